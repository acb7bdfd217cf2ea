"""Ranks whose batches take different ways through the model train as eager PyTorch does."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.optim import Adam

import fxshard
from fxshard.codegen.emit import Executor, TracedExecutor
from fxshard.config.checked import Config
from fxshard.ir.program import Program
from fxshard.plans.workload import Workload
from fxshard.runtime.module import sharded
from fxshard.validation.compare import compare
from fxshard.validation.on_ranks import on_this_rank
from fxshard.validation.rehearsal import split_steps, tracked_steps
from fxshard.validation.tracker import Tracker, WatchedWorld
from fxshard.verify.certificate import collectives
from tests.oracles import count_collectives
from tests.runtime.differing_cases import (
    CASES,
    WIDTH,
    Trained,
    built,
    by_fully_shard,
    compiled,
    some,
    trained,
)

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ROUNDED = {"rtol": 5e-2, "atol": 5e-2}


def assert_alike(found: list[Trained]) -> None:
    """All ranks have issued the same collectives, and their completed programs say the same."""
    first, *others = found
    assert any(first.counts) and first.sequences
    for each in others:
        assert each.counts == first.counts
        assert each.sequences == first.sequences


# -- numbers, and collectives ----------------------------------------------------------------------


def trains(rank: int, world_size: int, name: str, options: dict[str, Any], **how: Any) -> Trained:
    return trained(rank, world_size, name, compiled(name, **options), **how)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("towers", 2), ("experts", 3), ("skipped", 4), ("turned", 2)]
    + [
        pytest.param(name, size, marks=pytest.mark.slow)
        for name in CASES
        for size in (2, 3, 4)
        if (name, size) not in (("towers", 2), ("experts", 3), ("skipped", 4), ("turned", 2))
    ],
)
def test_ranks_that_take_different_ways_train_as_eager(
    ranks: Any, name: str, world_size: int
) -> None:
    assert_alike(ranks(world_size).run(trains, name, {}))


OPTIONS: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": "no_shard"},
    "hybrid_shard": {"strategy": "hybrid_shard"},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "over 2 of 4": {"reshard_after_forward": 2},
    "prefetch": {"forward_prefetch": 2, "backward_prefetch": 0},
    "split": {"max_bucket_bytes": 64},
    "joined": {"min_bucket_bytes": 2000},
    "alone": {"pack_bytes": 0},
    "bf16": {"mixed_precision": BF16},
    "fp16": {"mixed_precision": MixedPrecisionPolicy(torch.float16, torch.float16)},
    "offload": {"offload": CPUOffloadPolicy()},
    "checkpoint": {"checkpoint": "full"},
    "inductor": {"backend": "inductor"},
    "sum": {"reduce_op": "sum"},
    "divided": {"gradient_predivide_factor": 2.0},
}


def trains_with(rank: int, world_size: int, name: str, option: str, no_sync: bool) -> Trained:
    options = dict(OPTIONS[option])
    if option == "hybrid_shard":
        options["mesh"] = init_device_mesh("cpu", (2, world_size // 2))
    return trained(
        rank,
        world_size,
        name,
        compiled(name, **options),
        micro_batches=2,
        no_sync=no_sync,
        sums=option == "sum",
        clips=True,
        close=ROUNDED if option in ("bf16", "fp16") else None,
    )


@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.sample(3)
def test_with_options_and_accumulated_gradients(
    ranks: Any, name: str, option: str, no_sync: bool
) -> None:
    world_size = 4 if option in ("hybrid_shard", "over 2 of 4") else 2
    assert_alike(ranks(world_size).run(trains_with, name, option, no_sync))


def steps_in_backward(rank: int, world_size: int) -> Trained:
    def adam(params: Any) -> Adam:
        return Adam(params, lr=0.05)

    model = compiled("towers", optimizer=adam, optimizer_in_backward=True)
    return trained(rank, world_size, "towers", model)


def test_the_optimizer_in_backward_steps_what_any_rank_trains(ranks: Any) -> None:
    assert_alike(ranks(2).run(steps_in_backward))


def shards_fully(rank: int, world_size: int, name: str, hybrid: bool) -> Trained:
    options: dict[str, Any] = {}
    if hybrid:
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    return trained(rank, world_size, name, by_fully_shard(built(name), name, **options))


@pytest.mark.parametrize("hybrid", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fully_shard(ranks: Any, hybrid: bool) -> None:
    assert_alike(ranks(4 if hybrid else 2).run(shards_fully, "experts", hybrid))


def agrees(rank: int, world_size: int) -> tuple[list[Any], list[Any], int]:
    """The collectives of a step in which all ranks take one way, with the option and without."""
    batch = CASES["towers"].batch(0, 1)
    found = []
    for differs in (True, False):
        model = fxshard.compile(
            built("towers"), units=CASES["towers"].units, ranks_may_differ=differs
        )
        with count_collectives() as seen:
            model(**batch).backward()
        found.append([(each.kind, each.nbytes) for each in seen.calls])
        (variant,) = model._fxshard.variants.values()
        assert variant.program.common is None
        found.append(collectives(variant.program))
    assert found[1] == found[3]
    return found[0], found[2], len(found[1])


def test_where_all_take_one_way_nothing_is_added(ranks: Any) -> None:
    for ours, plain, count in ranks(2).run(agrees):
        assert ours == plain and len(ours) == count


def evaluates(rank: int, world_size: int) -> None:
    model, reference = compiled("towers"), built("towers")
    for step in range(3):
        batch = CASES["towers"].batch(rank, step)
        with torch.no_grad():
            torch.testing.assert_close(model(**batch), reference(**batch))


def test_evaluation(ranks: Any) -> None:
    ranks(2).run(evaluates)


# -- programs --------------------------------------------------------------------------------------


def meets_everything(rank: int, world_size: int) -> tuple[int, int, list[str]]:
    """Two ranks and three ways: on each rank, six programs are completed, of which three stay."""
    model, x = compiled("skipped", max_variants=3), some(rank, 0, WIDTH)
    told = []
    for ways in ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (0, 1)):
        model(x, (0, *(i + 1 for i in range(3) if i == ways[rank]))).backward()
        variants = model._fxshard.variants.values()
        told.append(next(v.program.common.digest for v in reversed(variants) if v.program.common))
    completed = [v for v in model._fxshard.variants.values() if v.program.common]
    return len(variants) - len(completed), len(completed), told


def test_completed_programs_are_dropped_and_made_again(ranks: Any) -> None:
    first, second = ranks(2).run(meets_everything)
    assert first == second
    assert first[:2] == (3, 3)
    assert len({*first[2]}) == 3 and first[2][0] == first[2][-1]  # who takes which way is the same


# -- bytes -----------------------------------------------------------------------------------------


def measured(rank: int, world_size: int, name: str, options: dict[str, Any]) -> tuple[int, int]:
    """The largest difference between what is predicted and what the tracker sees, and the peak."""
    config = Config.from_options(
        {"units": CASES[name].units, "ranks_may_differ": True, "optimizer": Adam, **options}
    )
    call = (), CASES[name].batch(rank, 0)
    work = Workload(built(name), call, world_size, config)
    tracker = Tracker(offloaded=config.offload is not None)

    def make_executor(program: Program, world: Any) -> Executor:
        return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

    model = sharded(on_this_rank(work), make_executor)
    tracked_steps(model, work, tracker, 2)
    report = model._fxshard.plan.memory
    assert model._fxshard.plan.program.common is not None
    found = compare(report, split_steps(tracker.measured(), 2))
    return found.max_abs_difference, found.static_peak_bytes


@pytest.mark.parametrize("name", ["towers", pytest.param("experts", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"mixed_precision": BF16},
                {"pack_bytes": 0},
                {"strategy": "no_shard"},
                {"strategy": "shard_grad_op"},
                {"offload": CPUOffloadPolicy()},
            )
        ),
    ],
)
def test_bytes_are_known_beforehand(ranks: Any, name: str, options: dict[str, Any]) -> None:
    first, last = ranks(2).run(measured, name, options)
    assert first[0] == 0 and first[1] > 0
    if name == "towers":  # the report is that of rank 0; of experts, rank 1 steps fewer rows
        assert last[0] == 0 and last[1] > 0
