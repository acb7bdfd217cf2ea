"""validate: a program is run, and compared with what was said of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.arguments import check_flag, check_progress
from fxshard.bytesize import is_count
from fxshard.capture import trace
from fxshard.capture.held import copied
from fxshard.config.checked import Config
from fxshard.config.docs import with_options
from fxshard.config.options import Options
from fxshard.config.world_size import grid
from fxshard.errors import ConfigError, UnknownSizeError
from fxshard.host.progress import say, task
from fxshard.ir.tensor_parallel import EXPERTS
from fxshard.ir.units import Unit
from fxshard.planner.budget import planned
from fxshard.planner.on_mesh import checked_dims, there
from fxshard.plans.workload import Workload, example
from fxshard.runtime.prepare import plain_module, refuse_extended
from fxshard.runtime.world.mesh import CONTEXTS
from fxshard.validation.compare import Validation
from fxshard.validation.numerics import beside_eager
from fxshard.validation.on_ranks import beside_ranks
from fxshard.validation.parallel import Parallel
from fxshard.validation.rehearsal import bytes_beside


@with_options
def validate(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    world_size: int | tuple[int, int] | None = None,
    mesh: Mapping[str, int] | None = None,
    parallelize: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    context: Callable[[nn.Module, DeviceMesh], AbstractContextManager[Any]] | None = None,
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
        mesh, parallelize, context: in place of it, as for `plan`: for tensor parallelism. Each rank
            calls `parallelize` with a copy of the model and its parameters; `context` is around
            each call. Fake ranks are compared in bytes alone. Of processes there are as many as the
            mesh has ranks. Eager PyTorch runs the model as it is given: compared with it are the
            outputs and the loss of each rank, which are to be full (a DTensor is put together),
            and gradients and parameters, put together over all dimensions. What tensor parallelism
            adds up in another order is "close". Refused are ranks that share sequences ("cp") or
            have experts ("ep"). See docs/tensor-parallel.md.
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
            `steps` is no number of steps; or what the ranks need cannot be pickled; or on a mesh
            something that cannot be run there.
        RankDiedError: a rank died, failed, or did not answer within
            `fxshard.validation.processes.LIMIT_S`.
        UnknownSizeError: a size depends on the data, and no `numerics` are asked for.
    """
    config = Config.from_options(options)
    if world_size is not None:
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
    if mesh is not None:
        _check_runs_on_mesh(mesh, numerics and ranks == "fake")
    args, kwargs = example(args, kwargs)
    placed = there(plain_module(model), config, world_size, mesh, parallelize, context)
    config = placed.config
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
    parallel = None
    if mesh is not None:
        parallel = Parallel(dict(mesh), placed.added, parallelize, context, device.type)
    workload = Workload(
        *(module, (args, kwargs), placed.world_size, config, micro_batches, no_sync),
        *(loss, keep_outputs),
    )
    with task("validating", shown=progress):
        told = workload
        if parallel is not None:
            told = dataclasses.replace(workload, module=placed.module, around=placed.around)
        expected = planned(told)
        if parallel is not None:
            _check_parallelised(module, expected.units)
        if numerics or ranks == "processes":
            what = "eager PyTorch in one process, with which numerics are compared,"
            refuse_extended(expected.units, what, "Validate bytes alone, with ranks='fake'")
        tangents = expected.workload.tangents
        workload = dataclasses.replace(workload, config=expected.config, tangents=tangents)
        if ranks == "processes":
            count = math.prod(grid(placed.world_size, config) if mesh is None else mesh.values())
            say(f"running {count} processes")
            return beside_ranks(workload, expected.program, expected.memory, steps, parallel)
        try:
            say("running rank 0 under the tracker")
            found = bytes_beside(workload, expected.memory, steps, parallel)
        except UnknownSizeError as error:
            if not numerics:
                raise
            found = Validation([], [], 0, 0, unknown=str(error))
        if numerics:
            say("running all ranks, and eager PyTorch")
            plain = dataclasses.replace(workload, module=plain_module(model))
            found.numerics = beside_eager(plain)
        return found


def _check_runs_on_mesh(mesh: Mapping[str, int], numerics_of_fake: bool) -> None:
    """Raise ConfigError for what cannot be compared on a mesh."""
    dims = checked_dims(mesh)
    if numerics_of_fake:
        raise ConfigError(
            f"numerics=True with mesh={dims}: fake ranks move no data, and beside tensor "
            f"parallelism not all ranks run inside one process. Give ranks='processes', which "
            f"compares numbers always; or leave numerics out, and bytes are compared."
        )
    if CONTEXTS in dims:
        raise ConfigError(
            f"mesh={dims}: the context that cuts sequences over {CONTEXTS!r} holds your batch, and "
            f"each rank has one of its own, which it would leave uncut. Validate without "
            f"{CONTEXTS!r}; fxshard.plan(mesh=..., context=...) has the bytes of this mesh, and "
            f"docs/context-parallel.md a script for torchrun with gloo."
        )
    if EXPERTS in dims:
        raise ConfigError(f"mesh={dims}: {_EXPERTS}")


_EXPERTS = (
    f"what a rank of {EXPERTS!r} receives depends on the batches of others, and is not compared. "
    f"Validate without {EXPERTS!r}; fxshard.plan(mesh=..., data_sizes=...) has the bytes of this "
    f"mesh (docs/expert-parallel.md)."
)


def _check_parallelised(module: nn.Module, units: Sequence[Unit]) -> None:
    """Check what `parallelize` has made of `module`, of which it got a copy.

    Raises:
        ConfigError: a parameter's name is gone, by which numbers are compared; or one is spread
            over ranks of experts.
    """
    params = [param for unit in units for param in (*unit.params, *unit.ignored)]
    names = {alias for param in params for alias in param.aliases}
    for name, _ in module.named_parameters():
        if name not in names:
            raise ConfigError(
                f"parallelize(model, mesh) leaves no parameter {name!r}: numbers are compared by "
                f"name. Let it change the model's modules in place, as parallelize_module does."
            )
    for param in params:
        if param.placed is not None and param.placed.group == EXPERTS:
            raise ConfigError(f"parallelize(model, mesh) of parameter {param.fqn!r}: {_EXPERTS}")
