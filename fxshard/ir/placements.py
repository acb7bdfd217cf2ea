"""The dimension that each parameter is sharded along: what option ``shard_placement_fn`` says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.tensor import Shard

from fxshard.errors import UnitError

PlacementFn: TypeAlias = Callable[[nn.Parameter], Shard | None] | Mapping[str, Shard]


def shard_dims(
    fn: PlacementFn | None, params: Mapping[tuple[str, ...], nn.Parameter]
) -> dict[str, int]:
    """The dimension of each of `params`, by its first name; those along dimension 0 are left out.

    Args:
        fn: called with each parameter, as FSDP2 calls it; or a dict of what it returned, by a name.
        params: those that are sharded, by all their names.

    Raises:
        UnitError: `fn` failed, or a parameter cannot be sharded as it says; names the parameter.
    """
    if fn is None:
        return {}
    found: dict[str, int] = {}
    for (name, *others), param in params.items():
        if isinstance(fn, Mapping):
            placement = next((fn[each] for each in (name, *others) if each in fn), None)
        else:
            placement = _asked(fn, name, param)
        if dim := _dim(name, param, placement):
            found[name] = dim
    return found


def check_names(fn: PlacementFn | None, known: Collection[str]) -> None:
    """Raise UnitError if `fn` is a dict, and names what is no parameter of the model."""
    unknown = [name for name in fn if name not in known] if isinstance(fn, Mapping) else []
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnitError(f"shard_placement_fn names {unknown[0]!r}, which is no parameter.{hint}")


def _asked(fn: Callable[[nn.Parameter], Any], fqn: str, param: nn.Parameter) -> Any:
    try:
        return fn(param)
    except Exception as error:
        raise UnitError(
            f"the function shard_placement_fn failed for parameter {fqn!r} {list(param.shape)} "
            f"with {type(error).__name__}: {error}. It is called with each parameter that is "
            f"sharded, and returns None or Shard(dim)."
        ) from error


def _dim(fqn: str, param: nn.Parameter, placement: Any) -> int:
    if placement is None:
        return 0
    what = f"shard_placement_fn returned {placement!r} for parameter {fqn!r} {list(param.shape)}"
    if hasattr(placement, "mesh_info"):  # torch's ShardPlacementResult
        raise UnitError(
            f"{what}, a mesh of its own: fxshard shards a model over one mesh. Return "
            f"{placement.placement!r} alone, or name the parameter in ignored_params (option "
            f"ignored), shard it and reduce its gradient yourself."
        )
    if type(placement) is not Shard:
        raise UnitError(f"{what}: expected None or torch.distributed.tensor.Shard(dim).")
    if not -param.dim() <= placement.dim < param.dim():
        raise UnitError(
            f"{what}, which has {param.dim()} dimensions. Return a dimension that it has, or None "
            f"(which is Shard(0))."
        )
    return int(placement.dim) % param.dim() if param.numel() else 0  # of nothing: all the same
