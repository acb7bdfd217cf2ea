"""Several files: models that stay on the meta device until they are loaded or filled."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing import assert_close

from tests.peers.fsdp2.common import MLP, Transformer, made, shard
from tests.ranks import told


def unfilled(rank: int, world_size: int) -> str:
    with torch.device("meta"):
        model: Any = nn.Sequential(MLP(8, buffer=True), MLP(8))
        shard(model)
    assert all(param.device.type == "meta" for param in model.parameters())
    return told(lambda: model(torch.randn(4, 8)))


def test_a_model_on_meta_that_nobody_filled_is_refused(ranks: Any) -> None:
    for said in ranks(2).run(unfilled):
        assert "'0.in_proj.weight'" in said, said
        assert "on the meta device when the model was sharded" in said, said


def from_rank_0(rank: int, world_size: int) -> None:
    """The state of one rank goes to all, tensor by tensor, and is assigned."""
    mesh = init_device_mesh("cpu", (world_size,))
    ref = made(Transformer)
    full = ref.state_dict() if rank == 0 else {}
    with torch.device("meta"):
        model = Transformer()
    shard(model, mesh=mesh)
    assert all(param.device.type == "meta" for param in model.parameters())
    meta = model.state_dict()
    sharded: dict[str, Any] = {}
    for fqn, place in meta.items():
        whole = full[fqn].detach().clone() if rank == 0 else torch.empty(place.size())
        dist.broadcast(whole, src=0)
        sharded[fqn] = nn.Parameter(distribute_tensor(whole, mesh, place.placements))
    model.load_state_dict(sharded, assign=True)
    for param in model.parameters():
        assert isinstance(param, DTensor) and param.device.type == "cpu"
    shard(ref, mesh=mesh)
    tokens = model.tokens(2, 16)
    losses = [each(tokens).sum() for each in (ref, model)]
    sum(losses).backward()
    assert_close(losses[1], losses[0])
    names = list(zip(model.named_parameters(), ref.named_parameters(), strict=True))
    for (mine, param), (theirs, expected) in names:
        assert mine == theirs
        assert_close(param.to_local(), expected.to_local())
        assert_close(param.grad.to_local(), expected.grad.to_local())


def test_the_state_of_rank_0_is_assigned_to_a_model_on_meta(ranks: Any) -> None:
    ranks(4).run(from_rank_0)


def offloaded(rank: int, world_size: int, pinned: bool) -> None:
    """The full state comes in pieces, while the other parameters are still on meta."""
    policy = CPUOffloadPolicy(pin_memory=pinned)
    with torch.device("meta"):
        model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    shard(model, offload_policy=policy)
    plain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    torch.manual_seed(5)
    pieces = {fqn: torch.randn(param.size()) for fqn, param in model.named_parameters()}
    for fqn, param in dict(model.named_parameters()).items():
        piece = {fqn: distribute_tensor(pieces[fqn], param.device_mesh, param.placements)}
        model.load_state_dict(piece, assign=True, strict=False)
    plain.load_state_dict(pieces)
    x = torch.rand(4, 4)
    assert_close(model(x), plain(x))
    for fqn, value in model.state_dict().items():
        assert value.device.type == "cpu"
        assert_close(value.full_tensor(), pieces[fqn])


@pytest.mark.parametrize("pinned", [False, True])
def test_pieces_of_a_state_are_assigned_to_an_offloaded_model(ranks: Any, pinned: bool) -> None:
    ranks(2).run(offloaded, pinned)
