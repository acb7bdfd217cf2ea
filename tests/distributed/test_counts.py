"""What the process group really receives: how many collectives, of what size, alive at once."""

import math
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard._torch import process_groups
from fxshard.codegen.emit import Executor, TracedExecutor
from fxshard.config.checked import Config
from fxshard.ir.splitting import find_units
from fxshard.plans.workload import Workload
from fxshard.runtime.module import sharded
from fxshard.runtime.sharding import Sharding
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.validation.rehearsal import tracked_steps
from fxshard.validation.tracker import Tracker, WatchedWorld
from tests.fsdp2 import units_of
from tests.oracles import Collective, count_collectives
from tests.zoo import MODELS, Case, models

# Parameters whose values the backward of the model does not need: embeddings, the first layer of
# all, and whatever is only added.
NOT_IN_BACKWARD = {
    "transformer": ["position", "embed.weight", "*.proj.bias", "*.up.bias", "*.down.bias"],
    "llama": ["model.embed_tokens.weight"],
    "tied": ["position", "*.proj.bias", "*.up.bias", "*.down.bias"],
    "mlp13": ["inlet.*", "*.linear.bias", "blocks.*.bias", "head.bias"],
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].build()


def padded_bytes(param: nn.Parameter, world_size: int) -> int:
    """Of the full parameter, in chunks of ceil(rows / ranks) rows."""
    rows = math.ceil(param.shape[0] / world_size) * world_size
    return rows * math.prod(param.shape[1:]) * param.element_size()


def bytes_by_unit(name: str, world_size: int, without: list[str]) -> list[int]:
    """Padded bytes of each unit's parameters, the root's last; counted on the plain model."""
    model, case = built(name), MODELS[name]
    counted = {
        id(p) for n, p in model.named_parameters() if not any(fnmatchcase(n, w) for w in without)
    }
    seen: set[int] = set()
    sizes = []
    for module in [*units_of(model, case), model]:
        mine = [p for p in module.parameters() if id(p) not in seen]
        seen.update(map(id, mine))
        sizes.append(sum(padded_bytes(p, world_size) for p in mine if id(p) in counted))
    return sizes


Steps = tuple[list[Collective], list[Collective], list[Collective]]


def one_step(rank: int, world_size: int, name: str) -> Steps:
    """Collectives of compile; of the second step's forward; of its backward and optimizer."""
    case = MODELS[name]
    with count_collectives() as compiling:
        model = fxshard.compile(built(name), units=case.units)
        args, kwargs = case.batch(rank, 0)
        model._fxshard.variant(args, kwargs)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        args, kwargs = case.batch(rank, step)
        with count_collectives() as forward:
            loss = case.loss(model(*args, **kwargs))
        with count_collectives() as backward:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return compiling.calls, forward.calls, backward.calls


def assert_counts(name: str, world_size: int, calls: Steps) -> None:
    compiling, forward, backward = calls
    everything = bytes_by_unit(name, world_size, [])
    needed = [size for size in bytes_by_unit(name, world_size, NOT_IN_BACKWARD[name]) if size]
    assert compiling == []
    assert {call.kind for call in forward} == {"all_gather"}
    assert sorted(call.nbytes for call in forward) == sorted(everything)
    gathers = [call.nbytes for call in backward if call.kind == "all_gather"]
    assert sorted(gathers) == sorted(needed)
    assert len(gathers) <= len(everything)
    reduces = [call.nbytes for call in backward if call.kind == "reduce_scatter"]
    assert sorted(reduces) == sorted(everything)
    assert len(gathers) + len(reduces) == len(backward)


@pytest.mark.parametrize("name", NOT_IN_BACKWARD)
@pytest.mark.sample(2)
def test_one_collective_per_unit_and_phase_on_2_ranks(ranks: Any, name: str) -> None:
    for calls in ranks(2).run(one_step, name):
        assert_counts(name, 2, calls)


@pytest.mark.parametrize("name", NOT_IN_BACKWARD)
@pytest.mark.sample(2)
def test_one_collective_per_unit_and_phase_of_8(name: str) -> None:
    with process_groups.fake_process_group(0, 8):
        assert_counts(name, 8, one_step(0, 8, name))


# -- analysis -------------------------------------------------------------------------------------


def plain_and_watched(rank: int, world_size: int, name: str) -> tuple[list[Collective], ...]:
    """Collectives of two steps: as they are, and with a tracker that looks on."""
    case = MODELS[name]
    args, kwargs = case.batch(rank, 0)
    found = []
    for watched in (False, True):
        model, tracker = built(name), Tracker()
        units = find_units(model, case.units)
        world = C10dWorld(torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,)))

        def make_executor(
            program: Any, world: Any, watched: bool = watched, tracker: Tracker = tracker
        ) -> Executor:
            if not watched:
                return Executor(program, world)
            return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

        config = Config(optimizer=torch.optim.SGD)
        compiled = sharded(Sharding(model, units, world, config), make_executor)
        with count_collectives() as seen:
            if watched:
                work = Workload(model, (args, kwargs), world_size, config)
                tracked_steps(compiled, work, tracker, 2)
                assert compiled.memory.peak_bytes > 0
            else:
                optimizer = torch.optim.SGD(compiled.parameters())
                for _ in range(2):
                    output = compiled(*args, **kwargs)
                    case.loss(output).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(seen.calls)
    return tuple(found)


@pytest.mark.parametrize("name", ["mlp13", pytest.param("llama", marks=pytest.mark.slow)])
def test_analysis_changes_no_collective(ranks: Any, name: str) -> None:
    for plain, watched in ranks(2).run(plain_and_watched, name):
        assert plain == watched
        assert plain


def plans(rank: int, world_size: int) -> int:
    case: Case = MODELS["transformer"]
    with count_collectives() as seen:
        plan = fxshard.plan(built("transformer"), *case.batch(0, 0), world_size=8)
        assert plan.memory.peak_bytes > 0
    return seen.count()


def test_plan_issues_no_collective_and_needs_no_group(ranks: Any) -> None:
    assert not torch.distributed.is_initialized()
    assert plans(0, 1) == 0
    assert ranks(2).run(plans) == [0, 0]


# -- live buffers ---------------------------------------------------------------------------------


class Watched(C10dWorld):
    """Counts the bytes of gather buffers between their all-gather and their free."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        self.live: dict[int, int] = {}
        self.peak = self.gathers = 0

    def all_gather(self, shards: list[Tensor], pair: int) -> list[Tensor]:
        buffers = super().all_gather(shards, pair)
        for buffer in buffers:
            self.live[buffer.data_ptr()] = buffer.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.live.values()))
        self.gathers += 1
        return buffers

    def free(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self.live.pop(tensor.data_ptr(), None)
        super().free(tensors)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


def live_peak(
    depth: int, prefetch: Any, world_size: int = 8, **options: Any
) -> tuple[int, int, int]:
    """Most bytes of gathered buffers alive in two steps; bytes of a layer and of the root."""
    model = models.Mlp13(depth)
    layer = sum(padded_bytes(p, world_size) for p in model.blocks[0].parameters())
    root = sum(padded_bytes(p, world_size) for p in model.parameters()) - depth * layer
    options |= {"forward_prefetch": prefetch, "backward_prefetch": prefetch}
    with process_groups.fake_process_group(0, world_size):
        world = Watched(torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,)))
        compiled = sharded(Sharding(model, find_units(model), world, Config(**options)))
        for _ in range(2):
            compiled(torch.randn(4, 5)).sum().backward()
    assert world.gathers == 2 * 2 * (depth + 1)
    assert not world.live
    return world.peak, layer, root


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_live_gathers_are_flat_in_depth(prefetch: int) -> None:
    peaks = []
    for depth in (2, 6, 12):
        peak, layer, root = live_peak(depth, prefetch)
        assert peak <= (prefetch + 1) * layer + root
        peaks.append(peak)
    assert peaks[1] == peaks[2]
