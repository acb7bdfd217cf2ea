"""compile_step: a training step as one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh

from fxshard.arguments import check_progress
from fxshard.codegen.users_optimizer import UsersOptimizer
from fxshard.config.checked import Config
from fxshard.config.docs import with_options
from fxshard.config.options import Options
from fxshard.host.progress import task
from fxshard.ir.splitting import placed
from fxshard.ir.whole import Whole
from fxshard.plans.workload import example
from fxshard.runtime.module import FxshardModule, check_swappable
from fxshard.runtime.prepare import plain_module, shard_model, sharding_of, traced
from fxshard.runtime.whole_step import (
    CompiledStep,
    one_optimizer,
    require_parameters,
    step_config,
    step_of_sharded,
    whole_of,
)


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
