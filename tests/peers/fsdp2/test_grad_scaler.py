"""test_fully_shard_grad_scaler.py"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.testing import assert_close

from tests.peers.fsdp2.common import made, shard


def scaled(rank: int, world_size: int, inf: bool) -> None:
    model = made(lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))))
    shard(model)
    assert_scales(model, torch.randn(4, 4), rank, inf)


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
    assert_close(first.grad.to_local(), before / 2)
    state = copy.copy(optimizer.state)
    scaler.step(optimizer)
    scaler.update()
    assert (copy.copy(optimizer.state) == state) is inf
    assert scaler.get_scale() == (1.0 if inf else 2.0)
    for param, was in zip(model.parameters(), whole, strict=True):
        assert torch.equal(param.full_tensor(), was) is inf


@pytest.mark.parametrize("inf", [False, True])
def test_a_scaler_skips_steps_of_all_ranks_alike(ranks: Any, inf: bool) -> None:
    ranks(2).run(scaled, inf)
