"""compile, fully_shard, shard: a model whose parameters are sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fxshard._torch import fully_sharded
from fxshard.arguments import check_flag, check_progress
from fxshard.config.checked import Config
from fxshard.config.docs import with_options
from fxshard.config.options import Options
from fxshard.dynamo import graphs
from fxshard.errors import ConfigError
from fxshard.host.progress import task
from fxshard.ir.splitting import configured_units, placed
from fxshard.planner.budget import within_budget
from fxshard.plans.workload import example
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
)
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.sharding import Slot
from fxshard.runtime.taken_over import require_unsharded, taken_over
from fxshard.runtime.unit_calls import UnitCall, options_of, outermost


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
    return fully_sharded.state_of(module)


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
