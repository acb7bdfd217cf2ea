"""From a user's model to a sharded one: what is refused, its units and world, its first program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch import transforms
from fxshard.capture import attributes, shapes, trace
from fxshard.config.checked import Config
from fxshard.errors import ConfigError, UnitError
from fxshard.host.progress import say
from fxshard.ir.layout import Grid
from fxshard.ir.program import Program
from fxshard.ir.splitting import configured_units
from fxshard.ir.units import Unit, check_reshard
from fxshard.ir.whole import Whole
from fxshard.pipeline import make_program
from fxshard.runtime import reading, replaced
from fxshard.runtime.module import FxshardModule, sharded, unchanged_on_error
from fxshard.runtime.sharding import Sharding, Slot, other_meshes
from fxshard.runtime.variants import TracedProgram
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld
from fxshard.runtime.world.mesh import world_for
from fxshard.verify.certificate import agreement

Call = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs


def plain_module(model: Any) -> nn.Module:
    """The module that is to be traced.

    Raises:
        ConfigError: it is sharded already, or this is inside of a transform of torch.func.
    """
    if transforms.transforming():
        raise ConfigError(
            "inside of a transform of torch.func (grad, vmap, functionalize, ...) tensors are the "
            "transform's, and nothing can be sharded or planned. Compile the model before it, and "
            "call the compiled model inside."
        )
    if isinstance(model, FxshardModule):
        raise ConfigError(
            "the model is sharded already: fxshard.compile returned it. Give the plain model, as "
            "it was built; what a compiled one runs is in its .plan and .memory."
        )
    if reading.runtime_of(model) is not None:
        raise ConfigError(
            "the model is sharded already, by fxshard.shard. Give the plain model; the memory of "
            "what torch.compile has captured of it is fxshard.reports(model)."
        )
    return trace.as_module(model)


def sharding_of(
    module: nn.Module,
    config: Config,
    world_size: int | tuple[int, int] | None,
    mesh: DeviceMesh | None,
    process_group: Any,
    kept: Sequence[Slot] = (),
) -> Sharding:
    """How to shard `module`; all ranks hold the same one.

    Raises:
        ConfigError, UnitError, RankMismatchError: see `compile`.
    """
    units = configured_units(module, config)
    world = world_for(module, config, units, world_size, mesh, process_group)
    if config.pipeline_stage and not isinstance(world, C10dWorld):
        raise ConfigError(
            "pipeline_stage=True needs a process group: start with torchrun, and give "
            "mesh=mesh['dp'], the ranks that hold the same stage. fxshard.plan needs none."
        )
    if config.pipeline_stage and len(world.grids) > 1:
        raise ConfigError(
            "pipeline_stage=True with units or parameters on meshes of their own: the end of a "
            "schedule reduces over one mesh. Leave one of the two out."
        )
    check_reshard(units, world.size, other_meshes(world))
    config.check_runs_on(trace.where_it_computes(module, _device_of(world)))
    world.agree(_model_lines(units, world.grids), "the model")
    return Sharding(module, units, world, config, kept)


def shard_model(sharding: Sharding, call: Call | None) -> FxshardModule:
    """Shard a model, and exchange its class.

    Args:
        sharding: how.
        call: its ``(args, kwargs)``: traced before anything is changed. None: nothing is traced.

    Raises:
        CaptureError, VerifyError, RankMismatchError: see `fxshard.compile`.
    """
    module = sharding.model
    program, reads = (None, None) if call is None else traced(sharding, call)
    before = dict(module.named_parameters())
    say("sharding")
    with unchanged_on_error(module):
        made = sharded(sharding)
        if call is not None and program is not None and reads is not None:
            made._fxshard.facts.attributes.reads = reads
            made._fxshard.add(*call, TracedProgram(program))
    slots = made._fxshard.slots.items()
    replaced.mark({fqn: before[fqn] for fqn, slot in slots if slot.tensor is not before[fqn]})
    return made


def traced(
    sharding: Sharding, call: Call, config: Config | None = None, whole: Whole | None = None
) -> tuple[Program, attributes.Reads]:
    """The program of a call of the model before it is sharded, and the attributes that it reads.

    Args:
        sharding: how it will be.
        call: ``(args, kwargs)``.
        config: the options; None: those of `sharding`.
        whole: it is a step, as `fxshard.compile_step` has it.

    Raises:
        CaptureError, VerifyError, RankMismatchError: see `fxshard.compile`.
    """
    module, world, reads = sharding.model, sharding.world, attributes.Reads()
    config = config or sharding.config
    with attributes.noted(reads):
        program = make_program(
            module,
            *call,
            units=sharding.units,
            world=world.size,
            replicas=world.replicas,
            meshes=other_meshes(world),
            config=config,
            device=_device_of(world),
            symbols=shapes.named(config.dynamic or {}, module, *call),
            whole=whole,
        )
    if not config.ranks_may_differ:
        world.agree(agreement(program), "the model or the batch structure")
    return program, reads


def refuse_placed(units: Sequence[Unit]) -> None:
    """Raise UnitError if a parameter is a DTensor of tensor parallelism."""
    for param in (param for unit in units for param in unit.params):
        if param.placed is not None:
            raise UnitError(
                f"parameter {param.fqn!r} is a DTensor already, of tensor parallelism over "
                f"{param.placed.group!r}: what Dynamo captures knows plain tensors. Use "
                f"fxshard.compile or fxshard.fully_shard after parallelize_module."
            )


def refuse_extended(units: Sequence[Unit], what: str, remedy: str) -> None:
    """Raise UnitError if a parameter is of a subclass that says what is gathered of it."""
    for param in (param for unit in units for param in unit.params):
        if param.extension is not None:
            raise UnitError(
                f"{what} knows nothing of the all-gather that parameter {param.fqn!r}, a "
                f"{param.extension.kind.__name__}, asks for. {remedy}."
            )


def _device_of(world: C10dWorld | InProcessWorld) -> torch.device | None:
    return torch.device(world.mesh.device_type) if isinstance(world, C10dWorld) else None


def _model_lines(units: tuple[Unit, ...], grids: Mapping[str, Grid]) -> list[str]:
    return [f"{p.line} unit={unit.name}{grids[p.mesh].text}" for unit in units for p in unit.params]
