"""Steps of a sharded module under the tracker."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxshard._torch import inductor, process_groups, trees
from fxshard.capture.held import copied
from fxshard.codegen.emit import Executor, TracedExecutor
from fxshard.codegen.given_optimizer import make_optimizer
from fxshard.codegen.users_optimizer import UsersOptimizer
from fxshard.config.world_size import grid
from fxshard.errors import StepError
from fxshard.ir.program import Program
from fxshard.ir.splitting import configured_units
from fxshard.ir.whole import Whole
from fxshard.memory.category import Category
from fxshard.memory.report import MemoryReport
from fxshard.plans.workload import Workload
from fxshard.runtime.module import FxshardModule, sharded
from fxshard.runtime.sharding import Sharding
from fxshard.runtime.whole_step import CompiledStep
from fxshard.runtime.world.mesh import beside_tensor_parallel, mesh_of, world_over
from fxshard.validation.compare import Validation, compare
from fxshard.validation.parallel import Parallel
from fxshard.validation.tracker import Measured, Tracker, WatchedWorld


def tracked(work: Workload, steps: int, parallel: Parallel | None = None) -> list[Measured]:
    """Train a copy of the model on this rank of the default process group, and measure it.

    Args:
        work: what to run.
        steps: how many.
        parallel: the ranks are those of a mesh, on which the model is parallelised first.

    Raises:
        StepError: the kernels of a region cannot be built, so that it would not run as planned.
    """
    tracker = Tracker(offloaded=work.config.offload is not None)

    def make_executor(program: Program, world: Any) -> Executor:
        planned = _compiled_regions(program)
        made = TracedExecutor(program, WatchedWorld(world, tracker), tracker)
        if eager := planned - _compiled_regions(program):
            raise StepError(
                f"validate: the kernels of {', '.join(sorted(eager))} cannot be built here, as the "
                f"warning above says, so that what would run is not what is planned. Mend the "
                f"compiler or empty {inductor.inductor_cache_dir()}, Inductor's cache; or validate "
                f"with backend='eager'."
            )
        return made

    sharding, work = (on_this_rank(work), work) if parallel is None else parallel.here(work)
    model = sharded(sharding, make_executor)
    if work.whole is not None:
        tracked_whole_steps(model, work, work.whole, tracker, steps)
    else:
        tracked_steps(model, work, tracker, steps)
    return tracker.measured()


def _compiled_regions(program: Program) -> set[str]:
    assert program.schedule is not None
    return {name for name, region in program.schedule.regions.items() if region.compiled}


def on_this_rank(work: Workload) -> Sharding:
    """A copy of the model, to be sharded over the default process group.

    Beside tensor parallelism, over the other dimensions of its mesh.
    """
    module, config = copied(work.module), work.config
    units = configured_units(module, config)
    mesh = beside_tensor_parallel(units, config)
    mesh = mesh or mesh_of(module, config, grid(work.world_size, config))
    return Sharding(module, units, world_over(mesh, config, units), config)


def tracked_steps(model: FxshardModule, work: Workload, tracker: Tracker, steps: int) -> None:
    """Train `model` for some steps on one batch, marking phases for the tracker.

    Without a loss function, the gradients of the outputs are ones.
    """
    optimizer = None
    runtime = model._fxshard
    in_backward = runtime.config.optimizer_in_backward
    if in_backward:
        tracker.optimizer_state(model.optimizer)
    elif runtime.config.optimizer is not None:
        named = dict(model.named_parameters())
        optimizer = make_optimizer(runtime.config.optimizer, list(named.values()), list(named))
        tracker.optimizer_state(optimizer)  # Adagrad has it from the start
    args, kwargs = work.call
    with work.around():
        runtime.start_at(work.call, work.tangents)
        program = runtime.variant(args, kwargs).program
    inputs = _know_what_is_held(model, work, program, tracker)
    trained = [param for param in model.parameters() if param.requires_grad]
    hooks = [param.register_hook(tracker.gradient) for param in trained if not in_backward]
    with tracker:
        for _ in range(steps):
            for i in range(work.micro_batches):
                waits = work.no_sync and i < work.micro_batches - 1
                with work.around(), model.no_sync() if waits else contextlib.nullcontext():
                    _forward_backward(model, work, program, tracker)
                tracker.at()
                tracker.gradients(model.parameters())
                sums = (t for each in runtime.accumulated.values() for t in each)
                tracker.mark(sums, Category.UNSHARDED_GRAD)
                del sums
            if not in_backward:
                tracker.begin("optimizer")
                if optimizer is not None:
                    optimizer.step()
                    tracker.optimizer_state(optimizer)
                tracker.at()
            tracker.begin("zero_grad")
            for tensor in (*model.parameters(), *inputs):
                tensor.grad = None
            tracker.at()
    for hook in hooks:
        hook.remove()


def tracked_whole_steps(
    model: FxshardModule, work: Workload, whole: Whole, tracker: Tracker, steps: int
) -> None:
    """The same with one program of a whole step: the caller drops the loss and the norm."""
    named = dict(model.named_parameters())
    given = UsersOptimizer.checked(work.config.optimizer, named)
    step = CompiledStep(model, whole, given.over(named), work.config)
    tracker.optimizer_state(step.optimizer)
    args, kwargs = work.call
    step.trace(args, kwargs)
    _know_what_is_held(model, work, step.plan.program, tracker)
    with tracker:
        for _ in range(steps):
            step(*args, **kwargs)
            tracker.at()
            tracker.begin("zero_grad")
            step.grad_norm = None
            tracker.at()


def _know_what_is_held(
    model: FxshardModule, work: Workload, program: Program, tracker: Tracker
) -> list[torch.Tensor]:
    """Tell the tracker of all that is there before a step; returns the batch."""
    runtime = model._fxshard
    shards = (s for slot in runtime.slots.values() for s in slot.shards)
    tracker.know(shards, Category.SHARDED_PARAM, host=program.offloaded)
    tracker.know(runtime.ignored_params(), Category.SHARDED_PARAM)
    tracker.know([*model.buffers(), *program.constants.values()], Category.BUFFER)
    leaves, _ = trees.tree_flatten(work.call)
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tracker.know(inputs, Category.INPUTS)  # and what the loss reads, once it does
    return inputs


def _forward_backward(
    model: FxshardModule, work: Workload, program: Program, tracker: Tracker
) -> None:
    """Run one micro-batch; only gradients outlive it."""
    args, kwargs = work.call
    out = model(*args, **kwargs)
    leaves, _ = trees.tree_flatten(out)
    roots = [leaves[i] for i in program.signature.tangents]
    if work.loss is None or not program.signature.training:
        tracker.begin("loss backward")  # of nothing, where no output needs a gradient
        tangents = [torch.ones_like(root) for root in roots]
        torch.autograd.backward(roots, tangents)
        return
    tracker.begin("loss")
    for root in roots:
        root.register_hook(lambda grad: tracker.at())
    value = work.loss(out)
    if not work.keep_outputs:
        del out, leaves, roots, root
    tracker.at()
    tracker.begin("loss backward")
    value.backward()


def split_steps(
    phases: list[Measured], steps: int, micro_batches: int = 1
) -> list[list[list[Measured]]]:
    """The tracker's phases, step by step and micro-batch by micro-batch."""
    found: list[list[list[Measured]]] = []
    for phase in phases:
        if phase.phase == "forward":
            if not found or len(found[-1]) == micro_batches:
                found.append([])
            found[-1].append([])
        found[-1][-1].append(phase)
    assert len(found) == steps, f"{len(found)} steps were tracked, not {steps}"
    return found


def bytes_beside(
    workload: Workload, report: MemoryReport, steps: int, parallel: Parallel | None = None
) -> Validation:
    """What rank 0 of a fake process group measures in `steps` steps, beside its report."""
    if parallel is None:
        ranks = math.prod(grid(workload.world_size, workload.config))
        group: AbstractContextManager[None] = process_groups.fake_process_group(0, ranks)
    else:  # torch keeps meshes, and gives those of the plan's ranks for equal ones
        group = process_groups.FakeRanks(0, parallel.ranks).there()
    with torch.random.fork_rng(), group:
        measured = tracked(workload, steps, parallel)
    return compare(report, split_steps(measured, steps, workload.micro_batches))
