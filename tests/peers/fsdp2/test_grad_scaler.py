"""test_fully_shard_grad_scaler.py"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

from tests.peers.fsdp2.common import MLP, made, shard


def scaled(rank: int, world_size: int, inf: bool) -> None:
    model = made(lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))))
    shard(model)
    assert_scales(model, torch.randn(4, 4), rank, inf)


def of_two_dimensions(rank: int, world_size: int, inf: bool) -> None:
    """Of an input without rows."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    plan = {"*.in_proj": ColwiseParallel(), "*.out_proj": RowwiseParallel()}
    plain = made(lambda: nn.Sequential(*(MLP(2) for _ in range(3))))
    model = parallelize_module(plain, mesh["tp"], plan)
    shard(model, mesh=mesh["dp"])
    torch.manual_seed(mesh["dp"].get_local_rank())
    assert_scales(model, torch.randn(2), rank, inf)


def assert_scales(model: Any, x: Tensor, rank: int, inf: bool) -> None:
    """An inf of one rank skips the step of all."""
    loss = model(x).sum()
    scaler = GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler.scale(loss).backward()
    first = next(model.parameters())
    if inf and rank == 1:
        first.grad.to_local()[0, 0] = float("inf")
    before = first.grad.to_local().clone()
    whole = [param.full_tensor() for param in model.parameters()]
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    assert [bool(value) for value in found.values()] == [inf]  # on each rank
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    assert_close(first.grad.to_local(), before / 2)
    state = copy.copy(optimizer.state)
    scaler.step(optimizer)
    scaler.update()
    assert (copy.copy(optimizer.state) == state) is inf
    assert scaler.get_scale() == (2.0 * scaler.get_backoff_factor() if inf else 2.0)
    for param, was in zip(model.parameters(), whole, strict=True):
        # A gradient of zeros, after a ReLU, leaves the parameter as it was.
        assert torch.equal(param.full_tensor(), was) is (inf or not param.grad.full_tensor().any())


INF = pytest.mark.parametrize("inf", [False, True])


@INF
def test_a_scaler_skips_steps_of_all_ranks_alike(ranks: Any, inf: bool) -> None:
    ranks(2).run(scaled, inf)


@INF
def test_a_scaler_in_two_dimensions(ranks: Any, inf: bool) -> None:
    ranks(4).run(of_two_dimensions, inf)
