"""plan, compile, validate: the public verbs."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard import compat, dump, trace
from fxshard.config import Config
from fxshard.errors import ConfigError
from fxshard.executor import Executor, TracedExecutor
from fxshard.memory.category import Category
from fxshard.memory.compare import Validation, compare
from fxshard.memory.optimizer import make_optimizer, trace_step
from fxshard.memory.report import MemoryReport
from fxshard.memory.tracker import Measured, Tracker, WatchedWorld
from fxshard.module import ShardedModule, world_over
from fxshard.pipeline import Observer, make_program
from fxshard.plans import Plan
from fxshard.program import Program
from fxshard.units import Unit, check_reshard, configured_units
from fxshard.world.c10d import C10dWorld
from fxshard.world.in_process import InProcessWorld

log = logging.getLogger("fxshard")


def plan(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    world_size: int | tuple[int, int],
    observe: Observer | None = None,
    **options: Any,
) -> Plan:
    """Trace and rewrite one training step, and analyse it. Nothing runs, nothing is allocated.

    Args:
        model: an `nn.Module` (real, meta or fake parameters), a `torch.fx.GraphModule` or a
            `torch.export.ExportedProgram`. Left as it is.
        args, kwargs: an example call of the model; meta or fake tensors do.
        world_size: number of ranks; for a hybrid strategy a pair, replicas x shards.
        observe: called as ``observe(pass name, text before, text after)`` for every pass.
        **options: see `fxshard.config.Config`.

    Raises:
        ConfigError, UnitError, CaptureError, VerifyError: see `fxshard.errors`.
    """
    config = Config.from_options(options)
    replicas, shards = _grid(world_size, config)
    call = _example(args, kwargs)
    module = _plain_module(model)
    program = make_program(
        module,
        *call,
        units=configured_units(module, config),
        world=shards,
        replicas=replicas,
        config=config,
        observe=observe,
    )
    return Plan(program, config, module, call)


def compile(
    model: Any,
    *,
    world_size: int | tuple[int, int] | None = None,
    mesh: DeviceMesh | None = None,
    process_group: Any = None,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> ShardedModule:
    """Shard `model` and run it from its own rewritten graph.

    Under torchrun (a process group is initialised) each process is one rank. Without one, all
    `world_size` ranks run inside this process, each seeing the given batch.

    Args:
        model: as for `plan`. Its parameters are replaced by sharded ones; what is on the meta
            device is filled module by module (see `fxshard.materialise`): seed all ranks alike, or
            give `sync_module_states`.
        world_size: number of ranks (for a hybrid strategy a pair, replicas x shards); with a
            process group it must be the group's.
        mesh: a 1-D `DeviceMesh` to shard over (default: all ranks), or for a hybrid strategy a
            2-D one, replicate x shard.
        process_group: instead of `mesh`; for a hybrid strategy a pair, that of the ranks that
            share a parameter and that of the ranks that hold the same shard, as FSDP1 takes it.
        args, kwargs: an example call, to trace now and not at the first call.
        **options: see `fxshard.config.Config`.

    Raises:
        ConfigError: the world sizes disagree, or none is known; names both numbers.
        UnitError, CaptureError, VerifyError: the model is left as it was.
        RankMismatchError: the ranks hold different models.
    """
    config = Config.from_options(options)
    call = _example(args or (), kwargs)
    module = _plain_module(model)
    units = configured_units(module, config)
    world = _world(module, config, units, world_size, mesh, process_group)
    check_reshard(units, world.size)
    if isinstance(world, C10dWorld):
        world.agree(_model_lines(units), "the model")
    program = None
    if args is not None or kwargs is not None:
        program = make_program(
            module, *call, units=units, world=world.size, replicas=world.replicas, config=config
        )
        if isinstance(world, C10dWorld):
            world.agree(dump.agreement(program), "the model or the batch structure")
    sharded = ShardedModule(module, units, world, config)
    if program is not None:
        sharded.add(*call, program)
    return sharded


def validate(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    world_size: int | tuple[int, int],
    steps: int = 2,
    micro_batches: int = 1,
    no_sync: bool = False,
    **options: Any,
) -> Validation:
    """Run rank 0 of the compiled program under a tracker, and compare with the static report.

    The rank runs for real on a fake process group of `world_size` ranks, on a copy of the model:
    forward, backward, drop the outputs, optimizer step (if the option is given), zero_grad.

    Args:
        model: as for `compile`; left as it is.
        args, kwargs: the batch.
        world_size: number of ranks; for a hybrid strategy a pair, replicas x shards.
        steps: how many steps to run; the first is compared with the report's first step.
        micro_batches: forward and backward passes per step, each compared with a report of its own.
        no_sync: all but the last of them run under `ShardedModule.no_sync`.
        **options: see `fxshard.config.Config`.

    Raises:
        ConfigError: a process group is initialised in this process, or a parameter has no data.
    """
    config = Config.from_options(options)
    replicas, shards = _grid(world_size, config)
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "validate needs a fake process group of its own, but one is initialised in this "
            "process. Call it before init_process_group, or in another process."
        )
    args, kwargs = _example(args, kwargs)
    module = copy.deepcopy(_plain_module(model))
    for name, param in module.named_parameters():
        if param.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device; validate runs the model. Give it a "
                f"small model with real parameters of the same structure."
            )
    reports = _reports(module, (args, kwargs), replicas, shards, config, micro_batches, no_sync)
    with compat.fake_process_group(0, replicas * shards):
        tracker = Tracker(offloaded=config.offload is not None)
        units = configured_units(module, config)
        world = world_over(_mesh(module, config, (replicas, shards)), config, units)

        def make_executor(program: Program, world: Any) -> Executor:
            return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

        sharded = ShardedModule(module, units, world, config, make_executor)
        tracked_steps(sharded, args, kwargs, tracker, steps, micro_batches, no_sync)
    return compare(reports, split_steps(tracker.measured(), steps, micro_batches))


def _reports(
    module: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    replicas: int,
    shards: int,
    config: Config,
    micro_batches: int,
    no_sync: bool,
) -> list[MemoryReport]:
    """What is expected of each micro-batch of a step."""
    plans: list[Plan] = []
    accumulated: list[str] = []
    for i in range(micro_batches):
        last = i == micro_batches - 1
        program = make_program(
            module,
            *call,
            units=configured_units(module, config),
            world=shards,
            replicas=replicas,
            config=config,
            sync=last or not no_sync,
            accumulated=accumulated,
        )
        plans.append(Plan(program, config, module, call))
        accumulated += [r.name for r in program.results if r.kind == "accumulated"]
    step = trace_step(plans[-1].program, config.optimizer)
    return [
        each.micro_batch(step, holds_gradients=i > 0, last=i == micro_batches - 1)
        for i, each in enumerate(plans)
    ]


def tracked_steps(
    model: ShardedModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Tracker,
    steps: int,
    micro_batches: int = 1,
    no_sync: bool = False,
) -> None:
    """Train `model` for some steps on one batch, marking phases for the tracker.

    The gradients that arrive at the outputs are ones.
    """
    optimizer = None
    if model.config.optimizer is not None:
        optimizer = make_optimizer(model.config.optimizer, list(model.parameters()))
    leaves, _ = compat.tree_flatten((args, kwargs))
    program = model.variant(args, kwargs).program
    shards = (s for slot in model.slots.values() for s in slot.shards)
    tracker.know(shards, Category.SHARDED_PARAM, host=program.offloaded)
    tracker.know(model.whole_parameters(), Category.SHARDED_PARAM)
    tracker.know([*model.buffers(), *program.constants.values()], Category.BUFFER)
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tracker.know(inputs, Category.INPUTS)
    del shards
    trained = [param for param in model.parameters() if param.requires_grad]
    hooks = [param.register_hook(tracker.gradient) for param in trained]
    with tracker:
        for _ in range(steps):
            for i in range(micro_batches):
                waits = no_sync and i < micro_batches - 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    outputs, _ = compat.tree_flatten(model(*args, **kwargs))
                    tracker.begin("loss")
                    roots = [outputs[i] for i in program.signature.tangents]
                    tangents = [torch.ones_like(root) for root in roots]
                    torch.autograd.backward(roots, tangents)
                    del outputs, roots, tangents
                tracker.at()
                tracker.gradients(model.parameters())
                sums = (t for each in model.accumulated.values() for t in each)
                tracker.mark(sums, Category.UNSHARDED_GRAD)
                del sums
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
    assert len(found) == steps, f"{len(found)} steps were seen, not {steps}"
    return found


def _mesh(model: nn.Module, config: Config, grid: tuple[int, int]) -> DeviceMesh:
    """A mesh of all ranks, of the shape that the strategy asks for; `grid` is replicas x shards."""
    device = _device_type(model, None)
    if config.hybrid:
        return init_device_mesh(device, grid, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device, (grid[0] * grid[1],))


def _device_type(model: nn.Module, group: dist.ProcessGroup | None) -> str:
    """That of the parameters; of a meta model, the accelerator if `group` is made for it."""
    found = next((p.device.type for p in model.parameters() if not p.is_meta), None)
    if found:
        return found
    accelerator = torch.accelerator.current_accelerator()
    served = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if accelerator and served.get(accelerator.type) not in (None, "gloo", "fake"):
        return accelerator.type
    return "cpu"


def _model_lines(units: tuple[Unit, ...]) -> list[str]:
    return [
        f"parameter {p.fqn} {list(p.shape)} {p.dtype} unit={unit.name}"
        for unit in units
        for p in unit.params
    ]


def _plain_module(model: Any) -> nn.Module:
    if isinstance(model, ShardedModule):
        raise ConfigError(
            "the model is sharded already: fxshard.compile returned it. Give the plain model; what "
            "a compiled one runs is in its .plan and .memory."
        )
    return trace.as_module(model)


def _example(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call ``model(*args, **kwargs)``."""
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, (dict, type(None))):
        raise ConfigError(
            f"args is a {type(args).__name__} and kwargs a {type(kwargs).__name__}: expected a "
            f"tuple and a dict, for model(*args, **kwargs). Write args=(x,) for model(x)."
        )
    return tuple(args), kwargs or {}


def _grid(world_size: Any, config: Config) -> tuple[int, int]:
    """Replicas and shards of a world under a strategy.

    Raises:
        ConfigError: `world_size` is no number of ranks, or a pair where none is meant.
    """
    if isinstance(world_size, tuple) and len(world_size) == 2:
        for size in world_size:
            _check_world_size(size)
        if not config.hybrid:
            raise ConfigError(
                f"world_size={world_size!r}: strategy {config.strategy!r} has one dimension. Give "
                f"one number, or strategy='hybrid_shard'."
            )
        return world_size
    _check_world_size(world_size)
    if config.hybrid:
        raise ConfigError(
            f"world_size={world_size!r}: strategy {config.strategy!r} has two dimensions. Give a "
            f"pair, replicas x shards, such as world_size=({world_size // 8 or 1}, 8)."
        )
    return (world_size, 1) if config.strategy == "no_shard" else (1, world_size)


def _check_world_size(world_size: Any) -> None:
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size={world_size!r}: expected a whole number of ranks >= 1.")


def _world(
    model: nn.Module,
    config: Config,
    units: tuple[Unit, ...],
    world_size: int | tuple[int, int] | None,
    mesh: DeviceMesh | None,
    process_group: Any,
) -> C10dWorld | InProcessWorld:
    if world_size is not None:
        _grid(world_size, config)
    if mesh is not None and process_group is not None:
        raise ConfigError("mesh and process_group were both given; give one.")
    if not (dist.is_available() and dist.is_initialized()):
        if mesh is not None or process_group is not None:
            raise ConfigError(
                "a mesh or process_group was given, but no process group is initialised: call "
                "torch.distributed.init_process_group first, and start with torchrun."
            )
        if world_size is None:
            raise ConfigError(
                "no process group is initialised and no world_size given. Start with torchrun "
                "and call torch.distributed.init_process_group, or pass world_size=N to run N "
                "ranks inside this process."
            )
        replicas, shards = _grid(world_size, config)
        log.warning(
            "fxshard: no process group: running all %d ranks inside this process, each on the "
            "whole batch. Start with torchrun to use %d processes.",
            replicas * shards,
            replicas * shards,
        )
        return InProcessWorld(shards, replicas)
    if process_group is not None:
        mesh = _mesh_of_groups(model, config, process_group)
    elif mesh is None:
        mesh = _mesh(model, config, _default_grid(world_size, config))
    if mesh.ndim != 1 + config.hybrid:
        dims = "two, replicate x shard" if config.hybrid else "one"
        raise ConfigError(
            f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; strategy "
            f"{config.strategy!r} takes {dims}."
            + ("" if config.hybrid else " Pass a slice of it: mesh['shard'].")
        )
    given = tuple(mesh.shape) if config.hybrid else mesh.size()
    if world_size is not None and world_size != given:
        raise ConfigError(
            f"world_size={world_size}, but the process group has {given} ranks. Leave "
            f"world_size out, or start torchrun with --nproc-per-node={world_size}."
        )
    return world_over(mesh, config, units)


def _default_grid(world_size: Any, config: Config) -> tuple[int, int]:
    """All ranks; a hybrid strategy shards inside a machine and copies over machines, as FSDP1.

    Raises:
        ConfigError: `world_size` is not that of the process group, or the number of ranks per
            machine is not known (torchrun sets LOCAL_WORLD_SIZE) or does not divide it.
    """
    ranks = dist.get_world_size()
    if not config.hybrid:
        return 1, ranks
    if world_size is not None:
        if math.prod(world_size) != ranks:
            raise ConfigError(
                f"world_size={world_size}, but the process group has {ranks} ranks: the product "
                f"of the two must be that."
            )
        return (world_size[0], world_size[1])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not local or ranks % local:
        raise ConfigError(
            f"strategy {config.strategy!r} needs to know how {ranks} ranks are arranged: pass a "
            f"2-D mesh, init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', "
            f"'shard')), or start with torchrun, which sets LOCAL_WORLD_SIZE."
        )
    return ranks // local, local


def _mesh_of_groups(model: nn.Module, config: Config, process_group: Any) -> DeviceMesh:
    """The mesh of a process group, or of the pair (shard group, replicate group)."""
    pair = isinstance(process_group, (tuple, list))
    if pair != config.hybrid:
        raise ConfigError(
            f"process_group is {'a pair' if pair else 'one group'}; strategy {config.strategy!r} "
            f"takes {'a pair (shard, replicate)' if config.hybrid else 'one'}."
        )
    if not pair:
        return DeviceMesh.from_group(process_group, _device_type(model, process_group))
    shard, replicate = process_group
    mine = dist.get_rank()
    rows = [
        [other + (rank - mine) for rank in dist.get_process_group_ranks(shard)]
        for other in dist.get_process_group_ranks(replicate)
    ]
    return DeviceMesh.from_group(
        [replicate, shard],
        _device_type(model, shard),
        mesh=torch.tensor(rows),
        mesh_dim_names=("replicate", "shard"),
    )
