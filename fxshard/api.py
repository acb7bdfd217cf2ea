"""plan, compile, validate: the public verbs."""

from __future__ import annotations

import copy
import logging
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
from fxshard.memory.optimizer import make_optimizer
from fxshard.memory.tracker import Measured, Tracker, WatchedWorld
from fxshard.module import ShardedModule
from fxshard.pipeline import Observer, make_program
from fxshard.plans import Plan
from fxshard.program import Program
from fxshard.units import Unit, find_units
from fxshard.world.c10d import C10dWorld
from fxshard.world.in_process import InProcessWorld

log = logging.getLogger("fxshard")


def plan(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    world_size: int,
    observe: Observer | None = None,
    **options: Any,
) -> Plan:
    """Trace and rewrite one training step, and analyse it. Nothing runs, nothing is allocated.

    Args:
        model: an `nn.Module` (real, meta or fake parameters), a `torch.fx.GraphModule` or a
            `torch.export.ExportedProgram`. Left as it is.
        args, kwargs: an example call of the model; meta or fake tensors do.
        world_size: number of ranks to shard over.
        observe: called as ``observe(pass name, text before, text after)`` for every pass.
        **options: see `fxshard.config.Config`.

    Raises:
        ConfigError, UnitError, CaptureError, VerifyError: see `fxshard.errors`.
    """
    config = Config.from_options(options)
    _check_world_size(world_size)
    call = _example(args, kwargs)
    module = _plain_module(model)
    units = find_units(module, config.units)
    program = make_program(
        module, *call, units=units, world=world_size, config=config, observe=observe
    )
    return Plan(program, config, module, call)


def compile(
    model: Any,
    *,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> ShardedModule:
    """Shard `model` and run it from its own rewritten graph.

    Under torchrun (a process group is initialised) each process is one rank. Without one, all
    `world_size` ranks run inside this process, each seeing the given batch.

    Args:
        model: as for `plan`, with real parameters. Its parameters are replaced by sharded ones.
        world_size: number of ranks; with a process group it must be the group's.
        mesh: a 1-D `DeviceMesh` to shard over (default: all ranks).
        process_group: instead of `mesh`.
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
    units = find_units(module, config.units)
    world = _world(module, world_size, mesh, process_group)
    if isinstance(world, C10dWorld):
        world.agree(_model_lines(units), "the model")
    program = None
    if args is not None or kwargs is not None:
        program = make_program(module, *call, units=units, world=world.size, config=config)
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
    world_size: int,
    steps: int = 2,
    **options: Any,
) -> Validation:
    """Run rank 0 of the compiled program under a tracker, and compare with the static report.

    The rank runs for real on a fake process group of `world_size` ranks, on a copy of the model:
    forward, backward, drop the outputs, optimizer step (if the option is given), zero_grad.

    Args:
        model: as for `compile`; left as it is.
        args, kwargs: the batch.
        world_size: number of ranks.
        steps: how many steps to run; the first is compared with the report's first step.
        **options: see `fxshard.config.Config`.

    Raises:
        ConfigError: a process group is initialised in this process, or a parameter has no data.
    """
    config = Config.from_options(options)
    _check_world_size(world_size)
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
    report = plan(module, args, kwargs, world_size=world_size, **options).memory
    with compat.fake_process_group(0, world_size):
        tracker = Tracker()
        units = find_units(module, config.units)
        world = C10dWorld(_whole_mesh(module))

        def make_executor(program: Program, world: Any) -> Executor:
            return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

        sharded = ShardedModule(module, units, world, config, make_executor)
        tracked_steps(sharded, args, kwargs, tracker, steps)
    return compare(report, split_steps(tracker.measured(), steps))


def tracked_steps(
    model: ShardedModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Tracker,
    steps: int,
) -> None:
    """Train `model` for some steps on one batch, marking phases for the tracker.

    The gradients that arrive at the outputs are ones.
    """
    optimizer = None
    if model.config.optimizer is not None:
        optimizer = make_optimizer(model.config.optimizer, list(model.parameters()))
    leaves, _ = compat.tree_flatten((args, kwargs))
    program = model.variant(args, kwargs).program
    tracker.know((s for slot in model.slots.values() for s in slot.shards), Category.SHARDED_PARAM)
    tracker.know([*model.buffers(), *program.constants.values()], Category.BUFFER)
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tracker.know(inputs, Category.INPUTS)
    with tracker:
        for _ in range(steps):
            outputs, _ = compat.tree_flatten(model(*args, **kwargs))
            tracker.begin("loss")
            roots = [outputs[i] for i in program.signature.tangents]
            tangents = [torch.ones_like(root) for root in roots]
            torch.autograd.backward(roots, tangents)
            del outputs, roots, tangents
            tracker.at()
            tracker.begin("optimizer")
            if optimizer is not None:
                optimizer.step()
                tracker.optimizer_state(optimizer)
            tracker.at()
            tracker.begin("zero_grad")
            for tensor in (*model.parameters(), *inputs):
                tensor.grad = None
            tracker.at()


def split_steps(phases: list[Measured], steps: int) -> list[list[Measured]]:
    """The tracker's phases, step by step."""
    each = len(phases) // steps
    return [phases[i * each : (i + 1) * each] for i in range(steps)]


def _whole_mesh(model: nn.Module) -> DeviceMesh:
    device = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")
    return init_device_mesh(device, (dist.get_world_size(),))


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


def _check_world_size(world_size: Any) -> None:
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size={world_size!r}: expected a whole number of ranks >= 1.")


def _world(
    model: nn.Module,
    world_size: int | None,
    mesh: DeviceMesh | None,
    process_group: dist.ProcessGroup | None,
) -> C10dWorld | InProcessWorld:
    if world_size is not None:
        _check_world_size(world_size)
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
        log.warning(
            "fxshard: no process group: running all %d ranks inside this process, each on the "
            "whole batch. Start with torchrun to use %d processes.",
            world_size,
            world_size,
        )
        return InProcessWorld(world_size)
    if process_group is not None:
        device = next((p.device.type for p in model.parameters()), "cpu")
        mesh = DeviceMesh.from_group(process_group, device)
    elif mesh is None:
        mesh = _whole_mesh(model)
    if mesh.ndim != 1:
        raise ConfigError(
            f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; strategy 'full_shard' "
            f"takes one. Pass a slice of it: mesh['shard']."
        )
    if world_size is not None and world_size != mesh.size():
        raise ConfigError(
            f"world_size={world_size}, but the process group has {mesh.size()} ranks. Leave "
            f"world_size out, or start torchrun with --nproc-per-node={world_size}."
        )
    return C10dWorld(mesh)
