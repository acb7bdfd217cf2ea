"""Functions of the user's that reduce gradients, or get what was reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fxshard.errors import ConfigError
from fxshard.ir.layout import Grid
from fxshard.passes.insert_reduce import InsertReduce
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.world.c10d import OPS, C10dWorld

AVERAGE = InsertReduce()  # `register` refuses whatever else the options can say of it


def register(runtime: Runtime, method: str, hook: Callable[..., Any]) -> None:
    """Let `hook` reduce the gradients of a model: of each unit ``hook(flat, out)``.

    Args:
        method: the user's call, for errors.

    Raises:
        ConfigError: something else says how gradients are reduced.
    """
    if runtime.stage is not None:
        raise ConfigError(
            f"{method} with pipeline_stage=True: the gradients of a stage are reduced outside of "
            f"its program. Leave one of the two out."
        )
    if not isinstance(runtime.world, C10dWorld):
        raise ConfigError(f"{method} needs a process group: start with torchrun.")
    config = runtime.config
    for name, clashes in {
        f"strategy={config.strategy!r}": config.hybrid,
        "parameters on several meshes": len(runtime.world.meshes) > 1,
        f"reduce_op={config.reduce_op!r}": config.reduce_op != "avg",
        "gradient_divide_factor": config.gradient_divide_factor is not None,
        "gradient_predivide_factor": config.gradient_predivide_factor is not None,
        "offload": config.offload is not None,
        "another hook": runtime.comm_hook,
    }.items():
        if clashes:
            raise ConfigError(f"{method} does not go together with {name}.")
    runtime.world.hook = hook
    runtime.comm_hook = True
    runtime.variants.clear()


def register_after(runtime: Runtime, units: Iterable[int], hook: Callable[[Tensor], Any]) -> None:
    """Let `hook` get the reduced gradients of units (``FSDPModule.set_all_reduce_hook``).

    Raises:
        ConfigError: as `register`; or the strategy is hybrid or shards nothing.
    """
    if runtime.config.hybrid or runtime.config.strategy == "no_shard":
        raise ConfigError(
            f"set_all_reduce_hook with strategy {runtime.config.strategy!r}: here it is called "
            f"after reduce-scatters alone. After all-reduces use "
            f"parameter.register_post_accumulate_grad_hook."
        )
    if not runtime.after_reductions:
        register(runtime, "set_all_reduce_hook", functools.partial(_reduced, runtime))
    runtime.after_reductions |= {runtime.units[unit].fqn: hook for unit in units}
    runtime.variants.clear()


def _reduced(runtime: Runtime, flat: Tensor, out: Tensor | None = None) -> None:
    """Write the mean of the ranks' rows into `out`, and call the hook with it, in place.

    Between the two divisions of the reduction, as FSDP2 calls it
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``foreach_reduce``). `out` is in the
    program: `fxshard.runtime.eager.reduced` would make another.
    """
    hook = next(iter(runtime.after_reductions.values()))
    if out is None:
        hook(flat)
        return
    assert isinstance(runtime.world, C10dWorld)
    group = runtime.world.groups["shard"]
    before, op, after = AVERAGE.division(flat.dtype, Grid(group.size()))
    if before is not None:
        flat.div_(before)
    dist.reduce_scatter_tensor(out, flat, OPS[op], group)
    hook(out)
    if after is not None:
        out.div_(after)
