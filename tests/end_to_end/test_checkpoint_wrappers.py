"""Torch's activation checkpoints that are put on modules, before and after they are sharded."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.tensor import Shard

import fxshard
from fxshard.ir.outline import saved_values
from fxshard.ir.program import Program
from tests.end_to_end.losses_cases import made
from tests.end_to_end.training_cases import Block, Net, assert_same, batch, grads_of, loss_of
from tests.fsdp2 import full


def wrapped(model: nn.Module, how: CheckpointImpl) -> None:
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=how)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, Block)
    )


def composed(model: Any) -> None:
    for block in model.blocks:
        composable(block)


WAYS: dict[str, Callable[[Any], None]] = {
    "composable": composed,
    "wrapper": functools.partial(wrapped, how=CheckpointImpl.NO_REENTRANT),
    "reentrant wrapper": functools.partial(wrapped, how=CheckpointImpl.REENTRANT),
}


def matmuls(program: Program) -> int:
    """How many backward recomputes."""
    nodes = program.phase("backward")
    return sum("mm" in str(node.target) for node in nodes)


def trained(model: Any, rank: int, steps: int = 2) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        loss_of(model(batch(rank, step).requires_grad_())).backward()
        found.append(list(grads_of(model).values()))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, [full(param) for param in model.parameters()]]


def trains(rank: int, world_size: int, way: str, how: str) -> None:
    plain = made(how, Net)
    expected = trained(plain, rank)
    before = made(how, lambda: _checkpointed(way))
    after = made(how, Net)
    after(batch(rank)).sum().backward()  # of a program without checkpoints
    after.zero_grad()
    names = list(after.state_dict())
    WAYS[way](after)
    assert list(after.state_dict()) == names == list(after.full_state_dict(rank0_only=False))
    for model in (before, after):
        assert_same(trained(model, rank), expected, rtol=1e-6, atol=1e-7)
    with after.summon_full_params():
        assert after.blocks[0].linear.weight.shape == (6, 6)
    once, again, later = (model.plan for model in (plain, before, after))
    assert matmuls(again.program) == matmuls(later.program) == matmuls(once.program) + 3
    assert len(saved_values(again.program)) == len(saved_values(later.program))
    assert len(saved_values(later.program)) < len(saved_values(once.program))
    assert again.memory.peak_bytes == later.memory.peak_bytes


def _checkpointed(way: str) -> Net:
    model = Net()
    WAYS[way](model)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["compile", "fully_shard"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(2)
def test_before_and_after_sharding(ranks: Any, way: str, how: str) -> None:
    ranks(2).run(trains, way, how)


def sharded_in_wrappers(rank: int, world_size: int) -> None:
    """As torchtitan does it: each block is wrapped, and then the wrapper is sharded."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    model = copy.deepcopy(plain)
    for i, block in enumerate(model):
        model[i] = checkpoint_wrapper(block)
        last = None if i == 0 else lambda param: Shard(param.dim() - 1)
        fxshard.fully_shard(model[i], shard_placement_fn=last)
    fxshard.fully_shard(model)
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    model(batches[rank]).square().sum().backward()
    for x in batches:
        (plain(x).square().sum() / world_size).backward()
    for mine, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(full(mine.grad), whole.grad)
    assert [p.placements for p in model[1].parameters()] == [(Shard(1),), (Shard(0),)]


def test_wrappers_are_sharded(ranks: Any) -> None:
    ranks(2).run(sharded_in_wrappers)
