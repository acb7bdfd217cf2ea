"""Partial sums of hybrid strategies are known to the byte: plans beside runs under the tracker."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxshard._torch import process_groups
from fxshard.codegen.emit import Executor, TracedExecutor
from fxshard.config.checked import Config
from fxshard.ir.splitting import configured_units
from fxshard.ir.units import Reductions
from fxshard.memory.category import Category
from fxshard.pipeline import make_program
from fxshard.plans.plan import Plan
from fxshard.plans.workload import Workload
from fxshard.runtime.module import sharded
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import on_this_rank, split_steps, tracked_steps
from fxshard.validation.tracker import Tracker, WatchedWorld
from tests.runtime.test_unit_methods import WIDTH, batch, net

STEPS, MICRO = 2, 3


def planned(work: Workload, how: Reductions) -> Plan:
    """All micro-batches but the last reduce as `how` says."""
    programs: list[Any] = []
    left: dict[str, set[str]] = {"partial": set(), "accumulated": set()}
    for number in range(MICRO):
        reduce: Reductions = "all" if number == MICRO - 1 else how
        units = tuple(
            dataclasses.replace(unit, reduce=reduce)
            for unit in configured_units(work.module, work.config)
        )
        programs.append(
            make_program(
                *(work.module, *work.call),
                units=units,
                world=2,
                replicas=2,
                config=work.config,
                partial=sorted(left["partial"]),
                accumulated=sorted(left["accumulated"]),
            )
        )
        for result in programs[-1].results:
            if result.kind in left:
                left[result.kind].add(result.name)
    return Plan(programs, work)


@pytest.mark.parametrize("how", ["shards", "none"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.sample(2)
def test_partial_sums_take_the_bytes_of_shards(how: Reductions, precision: torch.dtype) -> None:
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(
        param_dtype=precision, reduce_dtype=torch.float32
    )
    options: dict[str, Any] = {"units": ["blocks.*", ["norm", "head"]], "mixed_precision": policy}
    config = Config(strategy="hybrid_shard", optimizer=torch.optim.AdamW, **options)
    work = Workload(net(), ((batch(0),), {}), (2, 2), config, MICRO, no_sync=True)
    plan, tracker = planned(work, how), Tracker()

    def make_executor(program: Any, world: Any) -> Executor:
        return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

    with process_groups.fake_process_group(0, 4):
        model: Any = sharded(on_this_rank(work), make_executor)
        name = "set_requires_all_reduce" if how == "shards" else "set_requires_gradient_sync"

        @contextlib.contextmanager
        def without() -> Iterator[None]:
            getattr(model, name)(False)
            yield
            getattr(model, name)(True)

        model.no_sync = without  # which the rehearsal enters for all micro-batches but the last
        tracked_steps(model, work, tracker, STEPS)
    found = compare(plan.memory, split_steps(tracker.measured(), STEPS, MICRO))
    assert found.holds, found.table(only_different=True)
    held = [
        each.bytes
        for each in plan.memory.ledger().ranges
        if each.module == "blocks.0.up" and each.category is Category.SHARDED_GRAD
    ]
    assert how == "none" or 4 * 3 * WIDTH in held  # 3 of 6 rows, in fp32, in buffers of their own
