"""plan, compile, fully_shard, shard, validate, tune, fsdp2_memory: the public verbs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from fxshard.arguments import check_called, check_flag, check_progress
from fxshard.bytesize import is_count, parse_budget
from fxshard.capture import trace
from fxshard.capture.held import copied
from fxshard.codegen.users_optimizer import UsersOptimizer
from fxshard.config.checked import Config
from fxshard.config.docs import with_options
from fxshard.config.options import Options
from fxshard.config.world_size import grid
from fxshard.dryrun.fsdp2 import Fsdp2Memory, Recipe, run_fsdp2
from fxshard.dynamo import graphs
from fxshard.errors import ConfigError, UnknownSizeError
from fxshard.hardware import hardware_of
from fxshard.host.progress import say, task
from fxshard.ir.splitting import configured_units, placed
from fxshard.ir.whole import Whole
from fxshard.pipeline import Observer
from fxshard.planner.budget import planned, within_budget
from fxshard.planner.on_mesh import EXAMPLE as MESH_EXAMPLE
from fxshard.planner.on_mesh import OnMesh, on_mesh
from fxshard.planner.result import Tuning
from fxshard.planner.shapes import ranks_together, tuned_over_shapes
from fxshard.planner.tune import PLANS, tuned
from fxshard.plans.plan import Plan
from fxshard.plans.workload import Workload, example
from fxshard.runtime import reading, replaced
from fxshard.runtime.gathering import let_gather
from fxshard.runtime.module import (
    FxshardModule,
    as_fsdp_module,
    check_swappable,
    unchanged_on_error,
)
from fxshard.runtime.prepare import (
    plain_module,
    refuse_extended,
    refuse_placed,
    shard_model,
    sharding_of,
    traced,
)
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.sharding import Slot
from fxshard.runtime.taken_over import require_unsharded, taken_over
from fxshard.runtime.unit_calls import UnitCall, options_of, outermost
from fxshard.runtime.whole_step import (
    CompiledStep,
    one_optimizer,
    require_parameters,
    step_config,
    step_of_sharded,
    whole_of,
)
from fxshard.validation.compare import Validation
from fxshard.validation.numerics import beside_eager
from fxshard.validation.on_ranks import beside_ranks
from fxshard.validation.rehearsal import bytes_beside

log: logging.Logger = logging.getLogger("fxshard")


@with_options
def plan(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    world_size: int | tuple[int, int] | None = None,
    mesh: Mapping[str, int] | None = None,
    parallelize: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    context: Callable[[nn.Module, DeviceMesh], AbstractContextManager[Any]] | None = None,
    micro_batches: int = 1,
    no_sync: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    keep_outputs: bool = True,
    in_flight: int | None = None,
    observe: Observer | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Plan:
    """Trace and rewrite one training step, and analyse it. Nothing runs, nothing is allocated.

    Args:
        model: an `nn.Module` (real, meta or fake parameters), a `torch.fx.GraphModule` or a
            `torch.export.ExportedProgram`. It is not changed.
        args, kwargs: an example call of the model, of one rank and micro-batch: tensors of the
            shapes and dtypes that it will get; meta or fake tensors are enough.
        world_size: number of ranks; for a hybrid strategy a pair, replicas x shards.
        mesh: in place of `world_size`, ranks by name of a dimension, the outermost first, such as
            ``{"dp": 8, "tp": 4}``. No process group is needed, and none is left (see
            docs/tensor-parallel.md).
        parallelize: applies ``parallelize_module``: called with a copy of `model` on the meta
            device and a `DeviceMesh` of `mesh`; what it leaves of the mesh is data-parallel.
        context: called with these two; gives the context that the loop calls the model in:
            ``lambda model, mesh: context_parallel(mesh["cp"], ...)``.
        micro_batches: forward and backward passes per step, each on such a batch.
        no_sync: all but the last of them run under `FxshardModule.no_sync`.
        loss: what the training loop computes from the model's output, outside of the model, such
            as ``lambda logits: F.cross_entropy(logits.flatten(0, 1), labels)``.
        keep_outputs: the loop still refers to the model's output in backward; else it has only the
            loss then, as ``loss = F.cross_entropy(model(x), labels)`` has. Of a pipeline's last
            stage: the schedule returns its outputs.
        in_flight: with ``pipeline_stage=True``, how many of the micro-batches are forwarded ahead
            of the first backward, as 1F1B does: stage i of n has ``n - i``. None: all.
        observe: called as ``observe(pass name, text before, text after)`` for every pass.
        progress: show on standard error what is going on; None: on a terminal, of what takes long
            (docs/env.md: ``FXSHARD_PROGRESS``).
        **options: keys of `fxshard.Options`:

    Returns:
        The plan of one rank: its program, its memory in bytes, its estimated times.

    Raises:
        ConfigError: an option or argument that is not legal; the nearest legal one is named.
        UnitError: a unit pattern matches nothing, or a parameter cannot be sharded.
        CaptureError: the model cannot be traced.
        VerifyError: passes of the user's own leave a program that is not right.
        DoesNotFitError: nothing fits the option ``memory_budget``.
    """
    if observe is not None:
        check_called("observe", observe, "a pass's name", "text before", "text after")
    check_progress(progress)
    config = Config.from_options(options)
    there = _there(plain_module(model), config, world_size, mesh, parallelize, context)
    workload = Workload(
        there.module,
        example(args, kwargs),
        there.world_size,
        there.config,
        micro_batches,
        no_sync,
        loss,
        keep_outputs,
        in_flight=in_flight,
        around=there.around,
    )
    with task("planning", shown=progress):
        return planned(workload, observe)


def _there(
    module: nn.Module,
    config: Config,
    world_size: int | tuple[int, int] | None,
    mesh: Mapping[str, int] | None,
    parallelize: Callable[[nn.Module, DeviceMesh], Any] | None,
    context: Callable[[nn.Module, DeviceMesh], AbstractContextManager[Any]] | None,
) -> OnMesh:
    """The model on `world_size` ranks, or on a mesh: one of them is given."""
    if mesh is not None and world_size is not None:
        raise ConfigError(
            f"world_size={world_size!r} and mesh={mesh!r} were both given; give one. The mesh says "
            f"how many ranks there are."
        )
    if mesh is not None:
        return on_mesh(module, config, mesh, parallelize, context)
    for name, value in (("parallelize", parallelize), ("context", context)):
        if value is not None:
            raise ConfigError(f"{name}=... needs the mesh that it is called with: {MESH_EXAMPLE}.")
    if world_size is None:
        raise ConfigError(
            f"for how many ranks? Give world_size=8, or a mesh of several dimensions, "
            f"{MESH_EXAMPLE}."
        )
    return OnMesh(module, placed(module, config), world_size, contextlib.nullcontext)


@with_options
def compile(
    model: Any,
    *,
    world_size: int | tuple[int, int] | None = None,
    mesh: DeviceMesh | None = None,
    process_group: Any = None,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> FxshardModule:
    """Shard `model` and run it from its own rewritten graph.

    The model stays the user's object: its class becomes a subclass of `FxshardModule` and of its
    own class, and everything else stays as it was. Calling it runs the program.

    Under torchrun (a process group is initialised) each process is one rank. Without one, all
    `world_size` ranks run inside this process, each seeing the given batch.

    Args:
        model: as for `plan`. Its parameters are replaced by sharded ones; what is on the meta
            device is filled module by module (see `fxshard.runtime.initialise`): seed all ranks
            alike, or give `sync_module_states`.
        world_size: number of ranks (for a hybrid strategy a pair, replicas x shards); with a
            process group it must be the group's.
        mesh: a 1-D `DeviceMesh` to shard over (default: all ranks), or for a hybrid strategy a
            2-D one, replicate x shard. Of a model of ``parallelize_module`` it may have the
            dimension of tensor parallelism too (docs/tensor-parallel.md).
        process_group: instead of `mesh`; for a hybrid strategy a pair, that of the ranks that
            share a parameter and that of the ranks that hold the same shard, as FSDP1 takes it.
        args, kwargs: an example call, to trace now and not at the first call.
        progress: as for `plan`; also of what is traced at later calls.
        **options: keys of `fxshard.Options`:

    Returns:
        `model`; of an ExportedProgram, its module.

    Raises:
        ConfigError: the world sizes disagree, or none is known; names both numbers. Or an option
            or argument that is not legal.
        UnitError: a unit pattern matches nothing, or a parameter cannot be sharded.
        CaptureError: the model cannot be traced.
        VerifyError: passes of the user's own leave a program that is not right.
        DoesNotFitError: nothing fits the option ``memory_budget``.
        RankMismatchError: the ranks hold different models.

    After an error the model is as it was, its class too.
    """
    check_progress(progress)
    with task("compiling", shown=progress):
        compiled = _compiled(
            *(model, Config.from_options(options), world_size, mesh, process_group),
            args=args,
            kwargs=kwargs,
        )
    compiled._fxshard.progress = progress
    if compiled._fxshard.stage is not None:
        as_fsdp_module(compiled, compiled._fxshard)
    return compiled


def _compiled(
    model: Any,
    config: Config,
    world_size: int | tuple[int, int] | None = None,
    mesh: DeviceMesh | None = None,
    process_group: Any = None,
    *,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    kept: Sequence[Slot] = (),
    by_calls: bool = False,
) -> FxshardModule:
    """See `compile`.

    Args:
        kept: parameters that are sharded already.
        by_calls: calls of `fully_shard` say the mesh of each parameter.
    """
    call = example(() if args is None else args, kwargs)
    module = plain_module(model)
    check_swappable(module)
    config = placed(module, config, experts=not by_calls)
    sharding = sharding_of(module, config, world_size, mesh, process_group, kept)
    world = sharding.world
    if config.memory_budget is not None:
        if args is None and kwargs is None:
            raise ConfigError(
                "memory_budget needs an example call to plan: fxshard.compile(model, args=(x,), "
                "memory_budget=...)."
            )
        config = within_budget(module, call, world, config)
        units = configured_units(module, config)
        sharding = dataclasses.replace(sharding, config=config, units=units)
    return shard_model(sharding, call if args is not None or kwargs is not None else None)


@with_options
def compile_step(
    model: Any,
    loss: Callable[..., torch.Tensor] | None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    /,
    *,
    max_norm: float | None = None,
    world_size: int | tuple[int, int] | None = None,
    mesh: DeviceMesh | None = None,
    process_group: Any = None,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> CompiledStep:
    """One program of a whole training step: forward, loss, backward, clipping and the optimizer.

    ``step(batch, target)`` does what this loop does, and returns the loss::

        output = model(batch)
        loss = loss_fn(output, target)
        loss.backward()
        step.grad_norm = model.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()

    Args:
        model: as for `compile`, which shards it; or what `compile` or `fully_shard` returned.
        loss: called with what the model returns and the last positional argument of the step, it
            returns a scalar tensor. In a step without positional arguments it gets what the model
            returns alone: ``lambda output: output.loss``, and ``step(**batch)``. None: the model
            returns the loss, and gets all arguments.
        optimizer: a `torch.optim.Optimizer` over the parameters of `model`, sharded or not: it
            stays the user's object, and gets the sharded ones, with the rows of its state. Or a
            callable, as for the option ``optimizer``, which may be given by keyword too. Its class
            steps each element on its own.
        max_norm: gradients are scaled so that the 2-norm of all of them is at most this; None: they
            are not, and each unit is stepped in backward, as soon as its gradients are reduced.
        world_size, mesh, process_group: as for `compile`.
        args, kwargs: an example of a step, the target too, to trace now and not at the first step.
        progress: as for `plan`.
        **options: keys of `fxshard.Options`:

    Returns:
        The step; ``step.model`` is the sharded model, ``step.plan`` and ``step.memory`` say what it
        does, ``step.grad_norm`` is the norm before clipping.

    Raises:
        ConfigError: an argument or option that one program cannot honour, with what to do instead.
        UnitError, VerifyError, RankMismatchError: as for `compile`.
        CaptureError: the model or its loss cannot be traced, or is no scalar tensor.

    After an error the model and the optimizer are as they were.
    """
    check_progress(progress)
    whole = whole_of(loss, max_norm)
    optimizer = one_optimizer(optimizer, options.pop("optimizer", None))
    call = None if args is None and kwargs is None else example(args or (), kwargs)
    with task("compiling", shown=progress):
        if isinstance(model, FxshardModule):
            given = {"world_size": world_size, "mesh": mesh, "process_group": process_group}
            made = step_of_sharded(model, whole, optimizer, call, {**given, **options})
        else:
            made = _step_compiled(
                *(model, whole, optimizer, Config.from_options(options), call),
                world_size=world_size,
                mesh=mesh,
                process_group=process_group,
            )
    made.model._fxshard.progress = progress
    return made


def _step_compiled(
    model: Any,
    whole: Whole,
    optimizer: Any,
    config: Config,
    call: tuple[tuple[Any, ...], dict[str, Any]] | None,
    **ranks: Any,
) -> CompiledStep:
    """See `compile_step`: of a model that is not sharded yet."""
    module = plain_module(model)
    check_swappable(module)
    named = dict(module.named_parameters())
    chosen = step_config(config, optimizer)
    given = UsersOptimizer.checked(optimizer, named)
    config = placed(module, config)
    chosen = placed(module, step_config(config, given.factory()))
    sharding = sharding_of(module, config, **ranks)
    require_parameters(sharding.units, len(sharding.world.grids), whole)
    program = None if call is None else traced(sharding, call, chosen, whole)
    sharded = shard_model(sharding, None)
    made = given.over(dict(sharded.named_parameters()))
    before = None if program is None or call is None else (call, *program)
    return CompiledStep(sharded, whole, made, chosen, before)


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    ranks_may_differ: bool = False,
    pipeline_stage: bool = False,
) -> Any:
    """Shard `module` in place, called as `torch.distributed.fsdp.fully_shard` is.

    Call it on the blocks of a model, inner ones first, and then on the model: each call makes its
    parameters sharded ones (DTensors), those of earlier calls excepted, and one unit, whose
    parameters are gathered and reduced together. The module that was given last is the root: a
    `FxshardModule`, whose program is made at its first forward. It and the blocks get subclasses of
    their classes and of `FSDPModule`, whose methods they have.

    What is on the meta device stays there: fill it before the first forward, by
    ``model.to_empty(device=...)`` and the model's own initialisation, or by loading.

    Args:
        module: an `nn.Module`, or a list of such, whose parameters are one unit. A module inside of
            another one of the list counts as a part of that.
        mesh: a 1-D `DeviceMesh` to shard over, or a 2-D one, replicate x shard. Calls may differ:
            each unit is gathered, and its gradients reduced, by the ranks of its own. Beside tensor
            parallelism, the data-parallel part, ``mesh["dp"]``, in all calls. None: all ranks.
        reshard_after_forward: True: sharded between forward and backward; False: unsharded; an
            integer n: sharded over groups of n neighbouring ranks. None: False for the root, True
            for blocks.
        shard_placement_fn: called with each parameter; returns ``Shard(dim)``, the dimension to
            shard it along, or None for ``Shard(0)``. Sizes need not divide evenly. Or torch's
            ``ShardPlacementResult``, with a mesh of the parameter's own: it is gathered, and its
            gradient reduced, by the ranks of that mesh, in collectives of its own.
        mp_policy: dtypes of compute, of reductions and of outputs, of this unit.
        offload_policy: `CPUOffloadPolicy`: shards, sharded gradients and optimizer states are on
            the CPU; the same in all calls.
        ignored_params: parameters that stay unsharded and are never communicated.
        dp_mesh_dims: not supported.
        ranks_may_differ: FSDP2 has it not: batches of ranks may take different ways through the
            model, as the option of `compile` of that name says. On any of the calls.
        pipeline_stage: FSDP2 has it not: the root is a stage of a pipeline, as the option of
            `compile` of that name says. On any of the calls, the last one too.

    Returns:
        `module`.

    Raises:
        ConfigError: an argument that fxshard cannot honour, or no process group; `module` is
            sharded already, or a block in it has been called before; or calls differ in their
            `offload_policy`, or a mesh has ranks that the root's has not.
        UnitError: a parameter cannot be sharded, or is tied to one of an earlier call.
        RankMismatchError: the ranks hold different models.

    After an error `module` is as it was before the call.
    """
    options = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "dp_mesh_dims": dp_mesh_dims,
        "ranks_may_differ": ranks_may_differ,
        "pipeline_stage": pipeline_stage,
    }
    check_flag("ranks_may_differ", ranks_may_differ)
    check_flag("pipeline_stage", pipeline_stage)
    listed = isinstance(module, (list, tuple))
    modules = outermost(module) if listed else [module]
    call = UnitCall.of(modules, **options)
    for each in modules:
        require_unsharded(each)
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    own = [""] if root is modules[0] else [str(i) for i in range(len(modules))]
    with unchanged_on_error(root):
        inner = taken_over(root, call, own)
        names = dict(root.named_parameters(remove_duplicate=False))
        config = Config.from_options(options_of(inner.calls, inner.mesh, names))
        compiled = _compiled(root, config, mesh=inner.mesh, kept=inner.slots, by_calls=True)
        runtime = compiled._fxshard
        runtime.unit_calls = inner.calls
        for fqn, settings in inner.chosen.items():
            runtime.set_units(runtime.units_at(fqn, recurse=False), **settings)
        as_fsdp_module(compiled, runtime)
    return module


def _state(module: nn.Module) -> Any:
    """Torch's `fully_shard.state`: refused for a sharded module, None for any other."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


fully_shard.state = _state  # type: ignore[attr-defined]


@with_options
def shard(
    model: nn.Module,
    *,
    world_size: int | tuple[int, int] | None = None,
    mesh: DeviceMesh | None = None,
    process_group: Any = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> nn.Module:
    """Shard `model` in place, for eager use and for ``torch.compile(model, backend="fxshard")``.

    Its parameters become sharded ones, DTensors; the model stays the user's object. In eager mode
    its forward gathers each parameter where it is read. Under torch.compile, each graph that Dynamo
    captures runs as a program of the kind that `compile` makes; `reports` gives their memory.

    Args:
        model: as for `compile`, but a module: what is on the meta device is filled.
        world_size, mesh, process_group: as for `compile`.
        progress: as for `plan`; also of graphs that Dynamo captures later.
        **options: keys of `fxshard.Options`. ``torch.compile(options={...})`` may change those of
            `fxshard.dynamo.graphs.PER_GRAPH`:

    Returns:
        `model`.

    Raises:
        ConfigError: an option that pieces of a model cannot have; or as for `compile`.
        UnitError: a parameter is a DTensor already (of tensor parallelism, or of `fully_shard`), or
            cannot be sharded; the model is left as it was.
        RankMismatchError: the ranks hold different models.
    """
    config = Config.from_options(options)
    check_progress(progress)
    graphs.check_options(config)
    module = plain_module(model)
    if module is not model or isinstance(model, torch.fx.GraphModule):
        raise ConfigError(
            f"fxshard.shard takes the nn.Module itself, which Dynamo traces, not a "
            f"{type(model).__name__}. Use fxshard.compile."
        )
    config = placed(module, config)
    sharding = sharding_of(module, config, world_size, mesh, process_group)
    refuse_extended(sharding.units, "fxshard.shard", "Use fxshard.compile or fxshard.fully_shard")
    refuse_placed(sharding.units)
    classes = reading.classes(module, sharding.units)
    before = dict(module.named_parameters())
    with task("sharding", shown=progress), unchanged_on_error(module):
        runtime = Runtime(sharding)
        runtime.progress = progress
        graphs.attach(runtime, classes)
        let_gather(runtime)
    replaced.mark({fqn: before[fqn] for fqn in runtime.slots})
    return model


@with_options
def validate(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    world_size: int | tuple[int, int],
    steps: int = 2,
    micro_batches: int = 1,
    no_sync: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    keep_outputs: bool = True,
    numerics: bool = False,
    ranks: Literal["fake", "processes"] = "fake",
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Validation:
    """Run the compiled program under a tracker, and compare with the static report.

    With fake ranks, rank 0 runs on a fake process group of `world_size` ranks, on a copy of the
    model: forward, backward, drop the outputs, optimizer step (if the option is given), zero_grad.
    A fake process group moves no data: for `numerics` all ranks run one more step inside this
    process. With processes, what goes over the wire is validated too.

    Args:
        model: as for `compile`; it is not changed.
        args, kwargs: the batch.
        world_size: number of ranks; for a hybrid strategy a pair, replicas x shards.
        steps: how many steps to run; the first is compared with the report's first step.
        micro_batches: forward and backward passes per step, each compared with a report of its own.
        no_sync: all but the last of them run under `FxshardModule.no_sync`.
        loss, keep_outputs: as for `plan`.
        numerics: also compare outputs, loss, gradients and buffers of a step with eager PyTorch:
            `Validation.numerics` has a verdict for each: bitwise equal, close or wrong (see
            `fxshard.validation.numerics`). Takes two more copies of the model. If a size depends on
            the data, only numerics are compared: `Validation.unknown` is the reason.
        ranks: "processes" starts `world_size` processes on this machine, a gloo process group,
            which train twice: once under the tracker, once for what `Validation.numerics` compares
            with eager PyTorch in one process: each rank's outputs, loss and buffers, every
            gradient, and every parameter after each optimizer step. Rank 0 has the given batch,
            the others have batches like it (see `fxshard.validation.on_ranks`, also for what the
            loss of the joined batch is: the mean over ranks).
        progress: as for `plan`.
        **options: keys of `fxshard.Options`:

    Returns:
        Predicted and measured bytes of rank 0 side by side, and numbers, if they are asked for.

    Raises:
        ConfigError: a process group is initialised in this process, or a parameter has no data; or
            `steps` is no number of steps; or what the ranks need cannot be pickled.
        RankDiedError: a rank died, failed, or did not answer within
            `fxshard.validation.processes.LIMIT_S`.
        UnknownSizeError: a size depends on the data, and no `numerics` are asked for.
    """
    config = Config.from_options(options)
    grid(world_size, config)
    if config.pipeline_stage:
        raise ConfigError(
            "validate with pipeline_stage=True: a stage runs in a schedule, beside others. "
            "Validate its module without the option; fxshard.plan(in_flight=...) has its memory."
        )
    if ranks not in ("fake", "processes"):
        raise ConfigError(f"ranks={ranks!r}: expected 'fake' or 'processes'.")
    check_flag("numerics", numerics)
    check_progress(progress)
    if not is_count(steps):
        raise ConfigError(f"steps={steps!r}: expected how many steps to run, an integer >= 1.")
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "validate needs a fake process group of its own, but one is initialised in this "
            "process. Call it before init_process_group, or in another process."
        )
    args, kwargs = example(args, kwargs)
    config = placed(plain_module(model), config)
    module = copied(plain_module(model))
    for name, param in module.named_parameters():
        if param.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device; validate runs the model. Give it a "
                f"small model with real parameters of the same structure."
            )
    device = trace.where_it_computes(module)
    config.check_runs_on(device)
    if ranks == "processes" and device.type != "cpu":
        raise ConfigError(
            f"ranks='processes' runs gloo ranks on the CPU, but the model is on {device.type!r}: "
            f"move it there, or give ranks='fake'."
        )
    workload = Workload(
        *(module, (args, kwargs), world_size, config, micro_batches, no_sync, loss, keep_outputs)
    )
    with task("validating", shown=progress):
        expected = planned(workload)
        if numerics or ranks == "processes":
            what = "eager PyTorch in one process, with which numerics are compared,"
            refuse_extended(expected.units, what, "Validate bytes alone, with ranks='fake'")
        tangents = expected.workload.tangents
        workload = dataclasses.replace(workload, config=expected.config, tangents=tangents)
        if ranks == "processes":
            say(f"running {math.prod(grid(world_size, config))} processes")
            return beside_ranks(workload, expected.program, expected.memory, steps)
        try:
            say("running rank 0 under the tracker")
            found = bytes_beside(workload, expected.memory, steps)
        except UnknownSizeError as error:
            if not numerics:
                raise
            found = Validation([], [], 0, 0, unknown=str(error))
        if numerics:
            say("running all ranks, and eager PyTorch")
            plain = dataclasses.replace(workload, module=plain_module(model))
            found.numerics = beside_eager(plain)
        return found


@with_options
def tune(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    world_size: int | tuple[int, int] | None = None,
    mesh: Mapping[str, int] | Literal["auto"] | None = None,
    parallelize: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    context: Callable[[nn.Module, DeviceMesh], AbstractContextManager[Any]] | None = None,
    budget: int | str | None = None,
    batches: Sequence[int] | None = None,
    space: Mapping[str, Iterable[Any]] | None = None,
    plans: int | None = PLANS,
    micro_batches: int = 1,
    no_sync: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    keep_outputs: bool = True,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Tuning:
    """The fastest configuration that fits, the Pareto front, and why others are not the best.

    Searched are strategy and resharding, checkpoints, prefetch, precision and batch, as far as
    `options` leave them open, and offload where nothing fits without it; times are those of
    `Plan.estimate` on the option `hardware`, which every choice within a plan is made for too. The
    model is traced once for each dtype that the trace sees (and for a batch
    of 1, which broadcasts); what is reported to fit was planned in full. See docs/tune.md.

    ``fxshard.compile(model, world_size=best.world_size, **best.options)`` takes the result's
    ``best``, and any other `Trial`.

    Args:
        model, args, kwargs, world_size, micro_batches, no_sync, loss, keep_outputs: as for `plan`.
        mesh, parallelize, context: as for `plan`. ``mesh="auto"`` searches its shape too, for
            `world_size` GPUs: ranks of tensor parallelism within a node, or those of
            ``space={"tp": [1, 8]}``; the functions are called where they are more than one. Times
            are then those of all GPUs that compute a sample together.
        budget: bytes of one rank, or text such as "80GiB"; None: all memory of `hardware`.
        batches: samples per rank and micro-batch; None: that of the call, and doubled.
        space: values by name of an option, in place of what is searched by default, such as
            ``{"checkpoint": [None, "8GiB"], "max_bucket_bytes": ["25MiB", None]}``; what is named
            with one value only stays at that.
        plans: how many plans of the full model are made at most. None: until every configuration
            is planned, or proven to be no better.
        progress: as for `plan`.
        **options: keys of `fxshard.Options`; those that are given stay:

    Returns:
        Every configuration, with its bytes and seconds as far as it was planned; the best first.

    Raises:
        DoesNotFitError: nothing fits; names the smallest.
        ConfigError: an option or value that is not legal; ``memory_budget``, which is the task of
            `budget` here.
        CaptureError: as for `plan`.
    """
    config = Config.from_options(options)
    chosen = hardware_of(config.hardware)
    if plans is not None and not is_count(plans):
        raise ConfigError(f"plans={plans!r}: expected None or an integer >= 1.")
    check_progress(progress)
    if config.memory_budget is not None:
        raise ConfigError("memory_budget=... in fxshard.tune: give budget=... instead.")
    limit = chosen.memory_bytes if budget is None else parse_budget(budget)
    module, call = plain_module(model), example(args, kwargs)

    def step(there: OnMesh) -> Workload:
        return Workload(
            *(there.module, call, there.world_size, there.config, micro_batches, no_sync),
            *(loss, keep_outputs),
            around=there.around,
        )

    with task("tuning", plans, shown=progress) as show:
        given: dict[str, Any] = {
            "batches": batches,
            "space": space,
            "plans": plans,
            "progress": lambda count, what: show(what, count),
        }
        if mesh == "auto":
            shapes = module, config, world_size, parallelize, context, chosen, limit
            return tuned_over_shapes(step, *shapes, **given)
        there = _there(module, config, world_size, mesh, parallelize, context)
        together = 1 if mesh is None else ranks_together(mesh, there)
        work = step(there)
        with work.around():
            return tuned(work, chosen, limit, **given, together=together)


def fsdp2_memory(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    world_size: int,
    device: str = "h100",
    units: Iterable[type[nn.Module] | str] | Callable[..., Any] | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    checkpoint: str | Collection[Any] | None = None,
    compile: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] | None = torch.optim.AdamW,
    loss: Callable[[Any], torch.Tensor] | None = None,
    offload: bool = False,
    micro_batches: int = 1,
    max_norm: float | None = None,
    keep_outputs: bool = True,
    compare: bool = False,
) -> Fsdp2Memory:
    """The memory of a training step of torch's own FSDP2, in a `dry_run` of its usual recipe.

    A copy of the model on the meta device is checkpointed, compiled, sharded by ``fully_shard``
    unit by unit, put on the GPU, and trained for three steps. A script that does it otherwise runs
    in a `dry_run` as it is.

    Args:
        model: real, meta or fake parameters. It is not changed.
        args, kwargs: a call of it, of one rank and micro-batch: real or meta tensors.
        world_size: number of ranks.
        device: see `dry_run`.
        units: what ``fully_shard`` is called on before the model, as `fxshard.Options` has it;
            None: blocks that repeat.
        mixed_precision: for every ``fully_shard``.
        reshard_after_forward: of the units; None: torch's default, in which the root stays.
        checkpoint: of each unit. None; "full": only its inputs are saved; "selective": torchtitan's
            per-op list, attention and every second product of matrices; or the operators to save.
        compile: ``torch.compile`` of each unit.
        optimizer: a class, or ``params -> optimizer``; None: none.
        loss: of the model's output; None: ``output.loss``, scalars of the output, or all of it.
        offload: torch's ``CPUOffloadPolicy``.
        micro_batches: forward and backward passes per step.
        max_norm: for ``torch.nn.utils.clip_grad_norm_``; None: nothing is clipped.
        keep_outputs: the loop still refers to the model's output in backward.
        compare: plan the same model with fxshard too.

    Returns:
        Figures in bytes: `Fsdp2Memory.memory`, `.device_memory()`, `.table()`.

    Raises:
        ConfigError: an argument without meaning, or settings that fxshard cannot plan to compare.
        UnitError: a pattern of `units` matches no module.
        CaptureError: something depends on values.
    """
    recipe = Recipe(
        *(world_size, device, 0, units, mixed_precision, reshard_after_forward, checkpoint),
        *(compile, optimizer, loss, offload, micro_batches, max_norm, keep_outputs),
    )
    run = run_fsdp2(plain_module(model), args, kwargs, recipe)
    if not compare:
        return Fsdp2Memory(run)
    if not isinstance(checkpoint, str | None):
        raise ConfigError("compare=True: fxshard plans checkpoint=None, 'full' and 'selective'.")
    options: dict[str, Any] = {
        "units": units,
        "mixed_precision": mixed_precision,
        "reshard_after_forward": reshard_after_forward,
        "optimizer": optimizer,
        "offload": CPUOffloadPolicy() if offload else None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    ours = plan(
        *(model, args, kwargs),
        world_size=world_size,
        device="cuda" if run.device == "cuda" else None,
        micro_batches=micro_batches,
        loss=loss,
        keep_outputs=keep_outputs,
        checkpoint=checkpoint,
        backend="inductor" if compile else "eager",
        **given,
    )
    return Fsdp2Memory(run, ours.memory)
