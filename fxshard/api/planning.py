"""plan, tune, fsdp2_memory: nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fxshard.arguments import check_called, check_progress
from fxshard.bytesize import is_count, parse_budget
from fxshard.config.checked import Config
from fxshard.config.docs import with_options
from fxshard.config.options import Options
from fxshard.dryrun.fsdp2 import Fsdp2Memory, Recipe, run_fsdp2
from fxshard.errors import ConfigError
from fxshard.hardware import hardware_of
from fxshard.host.progress import task
from fxshard.pipeline import Observer
from fxshard.planner.budget import planned
from fxshard.planner.on_mesh import ModelOnMesh, there
from fxshard.planner.result import Together, Tuning
from fxshard.planner.shapes import ranks_together, tuned_over_shapes
from fxshard.planner.tune import PLANS, tuned
from fxshard.plans.plan import Plan
from fxshard.plans.workload import Workload, example
from fxshard.runtime.prepare import plain_module


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
    placed = there(plain_module(model), config, world_size, mesh, parallelize, context)
    workload = Workload(
        placed.module,
        example(args, kwargs),
        placed.world_size,
        placed.config,
        micro_batches,
        no_sync,
        loss,
        keep_outputs,
        in_flight=in_flight,
        around=placed.around,
    )
    with task("planning", shown=progress):
        return planned(workload, observe)


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
            `world_size` GPUs: with `parallelize` ranks of tensor parallelism, and with `context`
            those that have parts of one sequence ("cp"), within a node, or those of
            ``space={"tp": [1, 8], "cp": [1, 2, 4]}``. `parallelize` is called where "tp" is more
            than one, `context` where any of them is, with the mesh of those that are; where it asks
            that for a "cp" of one rank, there is none. Times are then those of all GPUs that
            compute a sample together.
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

    def step(placed: ModelOnMesh) -> Workload:
        return Workload(
            *(placed.module, call, placed.world_size, placed.config, micro_batches, no_sync),
            *(loss, keep_outputs),
            around=placed.around,
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
        placed = there(module, config, world_size, mesh, parallelize, context)
        shape = Together() if mesh is None else ranks_together(mesh, placed)
        work = step(placed)
        with work.around():
            return tuned(work, chosen, limit, shape, **given)


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
