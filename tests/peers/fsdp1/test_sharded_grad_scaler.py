"""torch's test_fsdp_sharded_grad_scaler.py: its scaler of sharded gradients beside DDP's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.testing import assert_close

from tests.peers.fsdp1.models import Nested, PartlyFrozen, Transformer
from tests.peers.fsdp1.shared import (
    FULL,
    GRAD_OP,
    HALF,
    compiled,
    ddp,
    loss_of,
    params_of,
    plain,
    reloaded,
    same,
    sgd,
)

OFFLOADED = pytest.mark.parametrize("offload", [True, False], ids=["offload", "stays"])


def scaled(model: Any, scaler: Any, half: bool) -> Tensor:
    """Two steps; the last loss. Ours casts inputs by its policy, and is loaded back after each."""
    optimizer, reference = sgd(model), plain(model) is not model
    for _ in range(2):
        optimizer.zero_grad()
        inputs = tuple(x.half() if half and reference else x for x in plain(model).get_input())
        loss = loss_of(model, inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not reference:
            reloaded(model)
    return loss.detach()


def parity(rank: int, world_size: int, kind: type[nn.Module], options: dict[str, Any]) -> None:
    """In fp16 DDP has parameters of fp16, ours of fp32: losses alone are compared."""
    half = options["mixed_precision"] is not None
    start = 2.0**11 if kind is PartlyFrozen else 2.0**16
    reference, model = kind(), compiled(kind(), **options)
    pair = ddp(reference.half() if half else reference), model
    scalers = [ShardedGradScaler("cpu", init_scale=start) for _ in pair]  # torch's refuses fp16
    losses = [scaled(*each, half) for each in zip(pair, scalers, strict=True)]
    assert_close(losses[1], losses[0])
    assert scalers[1].get_scale() == scalers[0].get_scale()
    if not half:
        same(model, pair[0])


@pytest.mark.sample(2)
@OFFLOADED
@pytest.mark.parametrize("strategy", [GRAD_OP, FULL], ids=["shard_grad_op", "full_shard"])
@pytest.mark.parametrize("policy", [HALF, None], ids=["fp16", "fp32"])
@pytest.mark.parametrize("kind", [Nested, PartlyFrozen])
def test_scaled_as_ddp(ranks: Any, kind: Any, policy: Any, strategy: Any, offload: bool) -> None:
    options = {"offload": CPUOffload(offload), "strategy": strategy, "mixed_precision": policy}
    ranks(2).run(parity, kind, options)


def infinities(rank: int, world_size: int, offload: bool, norm: bool) -> None:
    """Of every second step, in a gradient that rank 0 alone holds of ours: all skip that step."""
    model = compiled(Transformer(batch_norm=norm), offload=CPUOffload(offload))
    pair = ddp(Transformer(batch_norm=norm)), model
    scalers = GradScaler("cpu", init_scale=2.0), ShardedGradScaler("cpu", init_scale=2.0)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in pair]
    for step in range(10):
        losses = []
        for each, scaler, optimizer in zip(pair, scalers, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(scaler.scale(loss_of(each)))
            losses[-1].backward()
            before, scale = params_of(each), scaler.get_scale()
            first = next(param for param in each.parameters() if param.grad is not None)
            if step % 2 == 0 and (each is not model or rank == 0):
                grad = first.grad
                (grad.to_local() if each is model else grad).fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            factor = scaler.get_backoff_factor() if step % 2 == 0 else 1.0
            assert scaler.get_scale() == scale * factor
            after = params_of(each)
            for name, param in plain(each).named_parameters():
                if param.grad is not None:
                    assert torch.equal(after[name], before[name]) == (step % 2 == 0), name
        assert_close(losses[1], losses[0])


@OFFLOADED
@pytest.mark.parametrize("norm", [True, False], ids=["batch_norm", "without"])
def test_an_infinity_of_one_rank_skips_the_step_of_all(
    ranks: Any, offload: bool, norm: bool
) -> None:
    ranks(2).run(infinities, offload, norm)
