"""test_fully_shard_training.py: steps beside DistributedDataParallel and beside eager PyTorch."""

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from fxshard.runtime.world.c10d import C10dWorld
from tests.oracles import count_collectives
from tests.peers.fsdp2.common import (
    MLP,
    Args,
    Transformer,
    adam,
    assert_parity,
    ddp,
    made,
    pair,
    replaced,
    shard,
    train_alike,
)

RESHARD = [True, False, 2]

# -- what forward takes ----------------------------------------------------------------------------


class Paramless(nn.Module):
    def forward(self, x: Tensor, ys: tuple[Tensor, ...]) -> Tensor:
        return x + ys[0] + ys[1] + 1


class ParameterOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> Tensor:
        return self.weight @ self.weight


def without_parameters(rank: int, world_size: int) -> None:
    model = made(Paramless)
    fxshard.fully_shard(model)
    x, y, z = torch.randn(3, 3)
    assert_close(model(x, (y, z)), x + y + z + 1)


def test_a_model_without_parameters_takes_nested_inputs(ranks: Any) -> None:
    ranks(2).run(without_parameters)


def without_inputs(rank: int, world_size: int) -> None:
    model = made(ParameterOnly)
    ref = ddp(copy.deepcopy(model))
    fxshard.fully_shard(model)
    train_alike(ref, model, tuple, 3)


def test_a_forward_without_inputs(ranks: Any) -> None:
    ranks(2).run(without_inputs)


# -- what the parameters are -----------------------------------------------------------------------


def registered(rank: int, world_size: int, reshard: Any, units: bool) -> None:
    model = made(lambda: nn.Sequential(MLP(3), MLP(3)))
    ref = copy.deepcopy(model)
    for unit in (model[0].in_proj, model[0].out_proj) if units else ():
        fxshard.fully_shard(unit, reshard_after_forward=reshard)
    fxshard.fully_shard(model, reshard_after_forward=reshard)

    def check() -> None:
        for mine, theirs in zip(model.parameters(), ref.parameters(), strict=True):
            assert isinstance(mine, DTensor)
            assert_close(mine.full_tensor(), theirs)

    check()
    out = model(torch.randn(2, 3))
    check()
    model.reshard()
    check()
    out.sum().backward()
    check()


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("reshard", [*RESHARD, None])
def test_parameters_are_sharded_at_all_times(ranks: Any, reshard: Any, units: bool) -> None:
    ranks(2 if reshard != 2 else 4).run(registered, reshard, units)


def float64(rank: int, world_size: int) -> None:
    model = made(lambda: MLP(4))
    ref = ddp(copy.deepcopy(model).to(torch.float64))
    shard(model)
    model.to(torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64)

    def dtypes(each: Any, step: int) -> None:
        for param in each.parameters():
            assert param.dtype == torch.float64

    assert_parity(ref, model)
    train_alike(ref, model, lambda: (x,), before=dtypes)
    model(x).sum().backward()
    for param in model.parameters():
        for tensor in (param, param.grad):
            assert tensor.dtype == tensor.to_local().dtype == torch.float64


def test_a_cast_after_sharding(ranks: Any) -> None:
    ranks(2).run(float64)


# -- beside DistributedDataParallel ----------------------------------------------------------------


def two_layers(first: tuple[int, int], second: tuple[int, int]) -> nn.Module:
    return nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second))


def one_unit(rank: int, world_size: int, shapes: Any) -> int:
    """Returns the rows that this rank has of the last bias."""
    model = made(lambda: two_layers(*shapes))
    ref = ddp(copy.deepcopy(model)) if world_size > 1 else copy.deepcopy(model)
    fxshard.fully_shard(model)
    x = torch.randn(4, shapes[0][0])
    with count_collectives() as seen:
        train_alike(ref, model, lambda: (x,), parity=world_size > 1)  # which sends
    assert world_size > 1 or seen.calls == []
    return model[2].bias.to_local().numel()


SHAPES = [[(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)]]
# As many ranks as torch's tests have. Some have no rows of 3, or of 17 in chunks of 3.
EIGHT = pytest.param(8, marks=pytest.mark.slow)


@pytest.mark.sample(4)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("count", [2, 4, EIGHT])
def test_one_unit_trains_as_ddp(ranks: Any, count: int, shapes: Any) -> None:
    rows = ranks(count).run(one_unit, shapes)
    assert sum(rows) == shapes[1][1] and (0 in rows) is (shapes[1][1] < count)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_on_one_rank_nothing_is_sent(ranks: Any, shapes: Any) -> None:
    ranks(1).run(one_unit, shapes)


DELAYS = ("after forward", "all-gather", "reduce-scatter", "optimizer")


def units(rank: int, world_size: int, options: dict[str, Any], late: tuple[str, ...]) -> None:
    """One rank is late, by a moment, at some places of each step."""
    hybrid = options.pop("hybrid", False)
    if hybrid:
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names)
    ref, model = pair(lambda: Transformer(Args(layers=3, vocab=1024, length=64)), **options)

    def wait(where: str) -> None:
        if where in late and rank == 1:
            time.sleep(0.005)

    def delayed(name: str, where: str) -> Any:
        plain = getattr(C10dWorld, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            wait(where)
            return plain(*args, **kwargs)

        return replaced(C10dWorld, name, call)

    both = [(ref, adam(ref)), (model, adam(model))]
    with delayed("all_gather", "all-gather"), delayed("reduce_scatter", "reduce-scatter"):
        for step in range(10):
            tokens, losses = torch.randint(1024, (3, 64)), []
            for each, optim in both:
                optim.zero_grad(set_to_none=step % 2 == 0)
                losses.append(each(tokens).sum())
                wait("after forward")
                losses[-1].backward()
                wait("optimizer")
                optim.step()
            assert_close(losses[1], losses[0])


LATE = [(), *((each,) for each in DELAYS), DELAYS]


@pytest.mark.sample(2)
@pytest.mark.parametrize("late", LATE, ids=lambda late: "+".join(late) or "on time")
@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize("count", [2, EIGHT])
def test_units_train_as_ddp(ranks: Any, count: int, reshard: Any, late: Any) -> None:
    options = {"reshard_after_forward": reshard}
    ranks(4 if (count, reshard) == (2, 2) else count).run(units, options, late)


@pytest.mark.sample(2)
@pytest.mark.parametrize("late", LATE, ids=lambda late: "+".join(late) or "on time")
@pytest.mark.parametrize(
    ("count", "pinned"), [(2, False), (2, True), pytest.param(8, False, marks=pytest.mark.slow)]
)
def test_units_on_the_cpu_train_as_ddp(ranks: Any, count: int, pinned: bool, late: Any) -> None:
    """Memory is pinned only where there is an accelerator; without one it is the same as not."""
    ranks(count).run(units, {"offload_policy": CPUOffloadPolicy(pin_memory=pinned)}, late)
