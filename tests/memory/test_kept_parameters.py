"""Parameters that stay unsharded between calls are known to the byte: plans beside tracked runs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxshard._torch import process_groups
from fxshard.codegen.emit import Executor, TracedExecutor
from fxshard.config.checked import Config
from fxshard.ir import ops
from fxshard.ir.splitting import configured_units
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


def planned(work: Workload) -> Plan:
    """All micro-batches but the last leave parameters unsharded, which the next one takes."""
    programs: list[Any] = []
    kept: list[str] = []
    for number in range(MICRO):
        units = tuple(
            dataclasses.replace(unit, stays=number < MICRO - 1)
            for unit in configured_units(work.module, work.config)
        )
        made = make_program(
            *(work.module, *work.call), units=units, world=2, config=work.config, kept=kept
        )
        keeps = made.graph.find_nodes(op="call_function", target=ops.keep)
        kept = [fqn for node in keeps for fqn in node.args[1]]
        programs.append(made)
    return Plan(programs, work)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_what_stays_unsharded_is_counted(reshard: bool, precision: torch.dtype) -> None:
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=precision)
    options: dict[str, Any] = {"units": ["blocks.*", ["norm", "head"]], "mixed_precision": policy}
    options["reshard_after_forward"] = reshard
    config = Config(optimizer=torch.optim.AdamW, **options)
    work = Workload(net(), ((batch(0),), {}), 2, config, MICRO, no_sync=True)
    plan, tracker = planned(work), Tracker()
    gathers = [
        len(program.graph.find_nodes(op="call_function", target=ops.all_gather))
        for program in plan.programs
    ]
    assert gathers == ([10, 5, 4] if reshard else [5, 0, 0])  # the last one keeps no inlet

    def make_executor(program: Any, world: Any) -> Executor:
        return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

    with process_groups.fake_process_group(0, 2):
        model: Any = sharded(on_this_rank(work), make_executor)

        @contextlib.contextmanager
        def unsharded() -> Iterator[None]:
            model.set_reshard_after_backward(False)
            yield
            model.set_reshard_after_backward(True)

        model.no_sync = unsharded  # entered for all micro-batches but the last
        tracked_steps(model, work, tracker, STEPS)
    found = compare(plan.memory, split_steps(tracker.measured(), STEPS, MICRO))
    assert found.holds, found.table(only_different=True)
    held = [
        each.bytes
        for each in plan.memory.ledger().ranges
        if each.module == "blocks.0.up" and each.category is Category.UNSHARDED_PARAM
    ]
    assert 6 * WIDTH * precision.itemsize in held
