"""What the process group really received, against counts by hand; and how much lives unsharded."""

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard import compat
from fxshard.config import Config
from fxshard.executor import Executor, TracedExecutor
from fxshard.memory.tracker import Tracker, WatchedWorld
from fxshard.module import ShardedModule
from fxshard.units import Unit, find_units
from fxshard.world.c10d import C10dWorld
from tests import oracles
from tests.zoo import MODELS, Case

NAMES = ["transformer", "llama", "tied", "mlp13"]


def gathered_bytes(unit: Unit, world_size: int) -> int:
    """All of a unit's fp32 parameters, rows rounded up to a multiple of the world size."""
    return sum(
        4 * math.ceil(p.shape[0] / world_size) * world_size * math.prod(p.shape[1:])
        for p in unit.params
    )


def step(model: nn.Module, case: Case, rank: int) -> list[oracles.Collective]:
    """The collectives of one training step, tracing aside."""
    args, kwargs = case.batch(rank, 0)
    case.loss(model(*args, **kwargs)).backward()
    with oracles.count_collectives() as seen:
        case.loss(model(*args, **kwargs)).backward()
    return seen.calls


def on_rank(rank: int, world_size: int, name: str) -> tuple[list[Any], list[Any], tuple[Unit, ...]]:
    case = MODELS[name]
    torch.manual_seed(0)
    model = fxshard.compile(case.build(), units=case.units)
    args, kwargs = case.batch(rank, 0)
    model(*args, **kwargs)
    with oracles.count_collectives() as forward:
        loss = case.loss(model(*args, **kwargs))
    with oracles.count_collectives() as backward:
        loss.backward()
    return forward.calls, backward.calls, model.units


def check(
    forward: list[Any], backward: list[Any], units: tuple[Unit, ...], world_size: int
) -> None:
    count = len(units)
    assert [call.kind for call in forward] == ["all_gather"] * count
    kinds = [call.kind for call in backward]
    assert set(kinds) == {"all_gather", "reduce_scatter"}
    assert kinds.count("all_gather") <= count
    assert kinds.count("reduce_scatter") == count
    want = sorted(gathered_bytes(unit, world_size) for unit in units)
    assert sorted(call.nbytes for call in forward) == want
    again = [call.nbytes for call in backward if call.kind == "all_gather"]
    assert sum(again) <= sum(want)
    reduced = sorted(call.nbytes for call in backward if call.kind == "reduce_scatter")
    assert reduced == want


@pytest.mark.parametrize("name", NAMES)
def test_collectives_per_step_on_2_ranks(ranks: Any, name: str) -> None:
    for forward, backward, units in ranks(2).run(on_rank, name):
        check(forward, backward, units, 2)


@pytest.mark.parametrize("name", NAMES)
def test_collectives_per_step_of_8(name: str) -> None:
    with compat.fake_process_group(0, 8):
        check(*on_rank(0, 8, name), 8)


def test_analysis_changes_no_collective() -> None:
    """The same calls, in the same order, with the same bytes, with the tracker and without."""
    case = MODELS["llama"]
    calls = []
    for tracked in (False, True):
        tracker = Tracker()

        def make(program: Any, world: Any, tracker: Tracker = tracker) -> Executor:
            return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

        torch.manual_seed(0)
        model = case.build()
        with compat.fake_process_group(0, 4):
            world = C10dWorld(init_device_mesh("cpu", (4,)))
            units = find_units(model, case.units)
            executor = make if tracked else Executor
            sharded = ShardedModule(model, units, world, Config(), executor)
            with tracker if tracked else contextlib.nullcontext():
                calls.append(step(sharded, case, 0))
    assert calls[0] == calls[1] != []


def test_plan_issues_no_collective() -> None:
    case = MODELS["llama"]
    args, kwargs = case.batch(0, 0)
    with compat.fake_process_group(0, 4), oracles.count_collectives() as seen:
        assert fxshard.plan(case.build(), args, kwargs, world_size=4).memory.peak_bytes
    assert seen.calls == []


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, width, bias=False)
        self.down = nn.Linear(width, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, 8)
        self.layers = nn.ModuleList(Layer(16 + i % 3) for i in range(depth))
        self.outlet = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.outlet(x).square().mean()


class Meter:
    """A World that adds up the bytes of gathered buffers from their launch to their free."""

    def __init__(self, world: Any) -> None:
        self.world, self.live, self.most = world, {}, 0

    def all_gather(self, shards: list[Tensor], pair: int) -> list[Tensor]:
        buffers = self.world.all_gather(shards, pair)
        self.live[pair] = (buffers, sum(b.untyped_storage().nbytes() for b in buffers))
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return buffers

    def reduce_scatter(self, grads: list[Tensor], pair: int) -> list[Tensor]:
        return self.world.reduce_scatter(grads, pair)

    def wait(self, tensors: list[Tensor], pair: int) -> None:
        self.world.wait(tensors, pair)

    def free(self, tensors: list[Tensor]) -> None:
        self.world.free(tensors)
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
        for pair, (buffers, _) in list(self.live.items()):
            if all(b.untyped_storage().nbytes() == 0 for b in buffers):
                del self.live[pair]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_live_gathers_are_flat_in_depth(prefetch: int) -> None:
    world_size, most = 4, {}
    for depth in (2, 8, 32):
        model = Stack(depth)
        config = Config(forward_prefetch=prefetch, backward_prefetch=prefetch)
        meters: list[Meter] = []

        def make(program: Any, world: Any, meters: list[Meter] = meters) -> Executor:
            meters.append(Meter(world))
            return Executor(program, meters[-1])

        with compat.fake_process_group(0, world_size):
            world = C10dWorld(init_device_mesh("cpu", (world_size,)))
            units = find_units(model, ["layers.*"])
            assert len(units) == depth + 1
            sharded = ShardedModule(model, units, world, config, make)
            sharded(torch.ones(2, 3)).backward()
        root, *layers = (gathered_bytes(unit, world_size) for unit in units)
        most[depth] = meters[0].most
        assert 0 < most[depth] <= (prefetch + 1) * max(layers) + root
        assert not meters[0].live, "everything gathered is freed"
    assert most[8] == most[32]
