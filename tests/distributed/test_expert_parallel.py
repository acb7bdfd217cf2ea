"""Rows that go to the ranks of their experts, as many as the data say, on real ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard as fsdp2

import fxshard
from fxshard.ir import ops
from tests.experts import WIDTH, Experts

ROWS = 16
# step -> rank -> how many rows it sends to each rank
SENT = ([(5, 11), (9, 7)], [(1, 15), (16, 0)], [(0, 16), (4, 12)], [(16, 0), (16, 0)])


def sharded(how: str) -> Any:
    torch.manual_seed(0)
    model = Experts()
    if how == "compile":
        return fxshard.compile(model, units=["expert"])
    shard: Any = fsdp2 if how == "fsdp2" else fxshard.fully_shard
    shard(model.expert)
    return shard(model)


def trained(rank: int, model: Any) -> list[Tensor]:
    """Losses and parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, sent in enumerate(SENT):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        received = torch.tensor([sent[0][rank], sent[1][rank]])
        losses.append(model(x, torch.tensor(sent[rank]), received).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in losses] + [p.full_tensor() for p in model.parameters()]


def compared(rank: int, world_size: int, how: str) -> tuple[float, int, int]:
    """How far from FSDP2; how many programs and all-to-alls there are."""
    ours = sharded(how)
    found = zip(trained(rank, ours), trained(rank, sharded("fsdp2")), strict=True)
    apart = max((a - b).abs().max().item() for a, b in found)
    launches = [n for n in ours.plan.program.graph.nodes if n.target is ops.model_all_to_all]
    return apart, len(ours._fxshard.variants), len(launches)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["compile", "fully_shard"])
def test_bitwise_as_fsdp2_in_one_program(ranks: Any, how: str) -> None:
    """Three launches (the batch needs no gradient), of sizes that each step has anew."""
    assert ranks(2).run(compared, how) == [(0.0, 1, 3)] * 2
