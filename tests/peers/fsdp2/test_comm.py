"""test_fully_shard_comm.py: how many collectives there are, of what, and in which order."""

import copy
import functools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint as recomputed

import fxshard
from tests.oracles import Collectives, count_collectives
from tests.peers.fsdp2.common import (
    MLP,
    Args,
    Transformer,
    adam,
    assert_parity,
    average_grads,
    made,
    shard,
    train_alike,
)

RESHARD = [True, False, 2, None]


def traced_step(model: Any) -> tuple[Collectives, Collectives]:
    """The collectives of a forward and of its backward."""
    tokens = model.tokens(2, 16)
    with count_collectives() as forward:
        loss = model(tokens).sum()
    with count_collectives() as backward:
        loss.backward()
    return forward, backward


def counts(rank: int, world_size: int, reshard: Any) -> None:
    model = made(Transformer)
    blocks = len(model.layers)
    shard(model, reshard_after_forward=reshard)
    for _ in range(2):
        forward, backward = traced_step(model)
        assert set(forward.kinds()) == {"all_gather"}
        assert forward.count() == blocks + 1
        gathers = {True: blocks + 1, False: 0, 2: blocks + 1, None: blocks}
        assert backward.count("all_gather") == gathers[reshard]
        assert backward.count("reduce_scatter") == blocks + 1
        assert backward.count() == gathers[reshard] + blocks + 1


def one_rank(rank: int, world_size: int) -> None:
    """A group of one rank is one that holds all: nothing is gathered again in backward."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxshard").addHandler(handler)
    model = made(lambda: MLP(4))
    ref = copy.deepcopy(model)
    shard(model, reshard_after_forward=1)
    assert len(said) == 3
    assert all("Give True to shard them" in each for each in said)
    x = torch.randn(2, 4)
    loss, theirs = model(x).sum(), ref(x).sum()
    assert_close(loss, theirs)
    with count_collectives() as backward:
        loss.backward()
    assert backward.count("all_gather") == 0
    theirs.backward()
    average_grads(ref)
    assert_parity(ref, model)


def test_a_group_of_one_rank_stays_unsharded(ranks: Any) -> None:
    ranks(2).run(one_rank)


@pytest.mark.parametrize("reshard", RESHARD)
def test_how_many_collectives_a_step_has(ranks: Any, reshard: Any) -> None:
    ranks(4 if reshard == 2 else 2).run(counts, reshard)


def changed(rank: int, world_size: int, reshard: bool | None, recurse: bool) -> None:
    """`set_reshard_after_forward`, of all units or of the root alone."""
    model = made(Transformer)
    blocks = len(model.layers)
    shard(model, reshard_after_forward=None if reshard is None else not reshard)
    if reshard is not None:
        model.set_reshard_after_forward(reshard_after_forward=reshard, recurse=recurse)
    forward, backward = traced_step(model)
    assert forward.kinds() == ["all_gather"] * (blocks + 1)
    gathers = {
        (True, True): blocks + 1,
        (True, False): 1,
        (False, True): 0,
        (False, False): blocks,
    }
    assert backward.count("all_gather") == gathers.get((reshard, recurse), blocks)
    assert backward.count("reduce_scatter") == blocks + 1


@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("reshard", [True, False, None])
def test_resharding_is_changed_by_a_method(ranks: Any, reshard: Any, recurse: bool) -> None:
    ranks(2).run(changed, reshard, recurse)


# -- their order -----------------------------------------------------------------------------------


class Widths(nn.Module):
    """A root and three layers, each of another size, so that its collectives are known by it."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.layers = nn.ModuleList(MLP(8, multiplier=i, bias=False) for i in (2, 3, 4))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Any) -> Any:
        x = x * self.scale
        for layer in self.layers:
            x = recomputed(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x * self.scale


ROOT, LAYERS = 8 * 4, [i * 2 * 64 * 4 for i in (2, 3, 4)]  # bytes


def order(rank: int, world_size: int, reshard: Any, forwards: int, how: str) -> None:
    """A unit is gathered in backward before the gradients of the one before it are reduced."""
    model = made(lambda: Widths(how == "utils"))
    if how == "composable":
        for layer in model.layers:
            checkpoint(layer)
    shard(model, reshard_after_forward=reshard)
    names = dict(zip([ROOT, *LAYERS], ["root", "0", "1", "2"], strict=True))

    def seen(calls: Collectives) -> list[str]:
        short = {"all_gather": "+", "reduce_scatter": "-"}
        return [short[call.kind] + names[call.nbytes] for call in calls.calls]

    for _ in range(3):
        with count_collectives() as forward:
            losses = [model(torch.ones(2, 8)).sum() for _ in range(forwards)]
        assert seen(forward) == ["+root", "+0", "+1", "+2"] * forwards
        with count_collectives() as backward:
            sum(losses).backward()
        expected = ["+2", "+1", "-2", "+0", "-1", "-0", "-root"]
        if reshard is not None:
            expected.insert(0, "+root")
        if reshard is False:
            expected = [each for each in expected if each[0] == "-"]
        assert seen(backward) == expected * forwards, seen(backward)
        model.zero_grad()


@pytest.mark.sample(8)
@pytest.mark.parametrize("how", ["plain", "utils", "composable"])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("reshard", RESHARD)
def test_backward_gathers_one_unit_ahead(ranks: Any, reshard: Any, forwards: int, how: str) -> None:
    ranks(4 if reshard == 2 else 2).run(order, reshard, forwards, how)


# -- division --------------------------------------------------------------------------------------


def divided(rank: int, world_size: int, factor: float, shape: tuple[int, ...]) -> None:
    """One unit: a factor given to the root of several is another one here (`missing`)."""
    model = made(lambda: Transformer(Args(tied=False)))
    ref = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])
    fxshard.fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.set_gradient_divide_factor(factor)

    def divide(ref: Any) -> None:
        for param in ref.parameters():
            param.grad /= factor
            dist.all_reduce(param.grad)

    tokens = model.tokens(2, 16)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    train_alike(
        ref,
        model,
        lambda: (tokens,),
        after=divide,
        optimizer=lambda each: adamw(each.parameters()),
    )


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("factor", [8, 4])
def test_gradients_are_divided_by_a_factor(ranks: Any, factor: float, shape: Any) -> None:
    ranks(4).run(divided, factor, shape)


def divided_bf16(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = made(lambda: nn.Sequential(*(MLP(16) for _ in range(3))))
    ref = copy.deepcopy(model)
    low = copy.deepcopy(ref).to(torch.bfloat16)
    shard(model, mp_policy=policy)
    model.set_gradient_divide_factor(world_size)
    optimizers = adam(ref), adam(model)
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    for _ in range(10):
        losses = [each(x).sum() for each in (low, model)]
        sum(losses).backward()
        for mine, other in zip(ref.parameters(), low.parameters(), strict=True):
            mine.grad, other.grad = other.grad.float(), None
        average_grads(ref)
        assert_close(losses[1], losses[0])
        assert_parity(ref, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(ref.parameters(), low.parameters(), strict=True):
            other.detach().copy_(mine)


def test_gradients_of_bf16_compute_are_divided_by_a_factor(ranks: Any) -> None:
    ranks(2).run(divided_bf16)


def alone(rank: int, world_size: int, factor: float | None) -> None:
    """On one rank nothing is sent; a factor divides all the same."""
    model = nn.Linear(8, 4, bias=False)
    fxshard.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    with count_collectives() as seen:
        model(torch.ones(3, 8)).sum().backward()
    assert seen.calls == []
    assert_close(model.weight.grad.to_local(), torch.full((4, 8), 3 / (factor or 1)))


@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_a_factor_on_one_rank(ranks: Any, factor: float | None) -> None:
    ranks(1).run(alone, factor)


def one_of_many(rank: int, world_size: int) -> None:
    model = made(lambda: nn.Linear(64, 65))
    ref = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1,))
    fxshard.fully_shard(model, mesh=mesh, reshard_after_forward=False)
    train_alike(ref, model, lambda: (torch.randn(65, 64),), 3)


def test_a_mesh_of_one_rank(ranks: Any) -> None:
    ranks(1).run(one_of_many)


# -- unshard ---------------------------------------------------------------------------------------


def unsharded(rank: int, world_size: int) -> None:
    """Of a root without parameters of its own; of a model that has not run yet."""
    model = made(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    shard(model)
    model.unshard(async_op=True).wait()
    model.reshard()
    model = made(lambda: MLP(4))
    ref = copy.deepcopy(model)
    fxshard.fully_shard(model)
    model.unshard()
    for mine, theirs in zip(model.parameters(), ref.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    model.reshard()
    x = torch.randn(2, 4)
    assert_close(model(x), ref(x))


def test_unshard_before_any_call(ranks: Any) -> None:
    ranks(2).run(unsharded)
