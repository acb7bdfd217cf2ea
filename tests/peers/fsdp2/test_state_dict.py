"""test_fully_shard_state_dict.py"""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from tests.peers.fsdp2.common import MLP, Transformer, made, shard


def assert_saves_and_loads(model: Any, rank: int) -> None:
    """Values share storage with the parameters; loading writes into these."""
    for param in model.parameters():
        assert isinstance(param, DTensor)
        with torch.no_grad():
            param.fill_(1)
    places = {fqn: param.to_local().data_ptr() for fqn, param in model.named_parameters()}
    sizes = [param.size() for param in model.parameters()]
    state = model.state_dict()
    assert [param.size() for param in model.parameters()] == sizes
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())
    assert state.keys() == places.keys()
    for fqn, value in state.items():
        assert isinstance(value, DTensor)
        assert value.to_local().data_ptr() == places[fqn]
    new = {fqn: value.detach().clone().fill_(42 + rank) for fqn, value in state.items()}
    for param in model.parameters():
        assert (param.to_local() == 1).all()
    model.load_state_dict(new)
    for fqn, param in model.named_parameters():
        assert (param.to_local() == 42 + rank).all()
        assert param.to_local().data_ptr() == places[fqn]


def saved(rank: int, world_size: int, dim: int, hybrid: bool, placed: Any = None) -> None:
    base = made(
        lambda: nn.Sequential(MLP(dim), nn.Sequential(MLP(dim), nn.Linear(dim, dim)), MLP(dim))
    )
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=names) if hybrid else None
    model = copy.deepcopy(base)
    shard(model, mesh=mesh, shard_placement_fn=placed)
    assert_saves_and_loads(model, rank)
    kept = copy.deepcopy(base)
    shard(kept, mesh=mesh, shard_placement_fn=placed, reshard_after_forward=False)
    assert_saves_and_loads(kept, rank)
    before = {fqn: value.to_local().clone() for fqn, value in kept.state_dict().items()}
    kept(torch.randn(2, dim))  # these stay unsharded after it
    after = kept.state_dict()
    assert after.keys() == before.keys()
    for fqn, value in after.items():
        assert_close(value.to_local(), before[fqn])
    assert_saves_and_loads(kept, rank)


@pytest.mark.parametrize("dim", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("count", "hybrid"),
    [
        (2, False),
        (4, True),
        *(pytest.param(8, hybrid, marks=pytest.mark.slow) for hybrid in (False, True)),
    ],
)
def test_sharded_states_are_saved_and_loaded(
    ranks: Any, count: int, hybrid: bool, dim: int
) -> None:
    """Of two to five rows, those of the last layers, most of eight ranks have none."""
    ranks(count).run(saved, dim, hybrid)


def kept_state(rank: int, world_size: int, dim: int, moved: bool) -> None:
    """A state dict taken once shows what training makes of the parameters."""
    model = made(lambda: nn.Linear(dim, dim, bias=False))
    fxshard.fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = model.state_dict()
    if moved:
        model.double().float()
    for _ in range(5):
        same = state["weight"].to_local().data_ptr() == model.weight.to_local().data_ptr()
        assert same is not moved
        optimizer.zero_grad()
        model(torch.rand(dim, dim)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("dim", [2, 3, 4, 5])
def test_a_state_that_is_kept(ranks: Any, dim: int, moved: bool) -> None:
    ranks(2).run(kept_state, dim, moved)


def on_rank_0(rank: int, world_size: int) -> None:
    model = made(Transformer)
    ref = copy.deepcopy(model)
    shard(model)
    full = {fqn: value.full_tensor() for fqn, value in model.state_dict().items()}
    assert list(full) == list(ref.state_dict())
    for fqn, value in ref.state_dict().items():
        assert torch.equal(full[fqn], value)
    again = model.full_state_dict()
    assert list(again) == (list(full) if rank == 0 else [])
    for fqn, value in again.items():
        assert value.device.type == "cpu" and torch.equal(value, full[fqn])


def test_the_full_state_is_on_rank_0(ranks: Any) -> None:
    ranks(2).run(on_rank_0)
