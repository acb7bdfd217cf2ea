"""What option ``shard_placement_fn`` says of each parameter: its dimension, a mesh of its own."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fxshard.errors import UnitError


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """What ``shard_placement_fn`` says of a parameter that has a mesh of its own.

    Attributes:
        placement: the dimension that it is sharded along.
        mesh: 1-D, or 2-D replicate x shard.
        batches: as of `fxshard.ir.layout.Grid`.
    """

    placement: Shard
    mesh: DeviceMesh
    batches: int = 0


PlacementFn: TypeAlias = Callable[[nn.Parameter], Any] | Mapping[str, Any]


def shard_dims(
    fn: PlacementFn | None, params: Mapping[tuple[str, ...], nn.Parameter]
) -> dict[str, int]:
    """The dimension of each of `params`, by its first name; those along dimension 0 are left out.

    For the arguments and errors see `said`.
    """
    return {
        fqn: dim
        for fqn, placement in said(fn, params).items()
        if (dim := placement.placement.dim if isinstance(placement, OnMesh) else placement.dim)
    }


def said(
    fn: PlacementFn | None, params: Mapping[tuple[str, ...], nn.Parameter]
) -> dict[str, Shard | OnMesh]:
    """What is said of each of `params`, by its first name.

    Args:
        fn: called with each parameter, as FSDP2 calls it; or a dict of what it returned, by a name.
        params: those that are sharded, by all their names.

    Raises:
        UnitError: `fn` failed, or a parameter cannot be sharded as it says; names the parameter.
    """
    if fn is None:
        return {names[0]: Shard(0) for names in params}
    found: dict[str, Shard | OnMesh] = {}
    for (name, *others), param in params.items():
        if isinstance(fn, Mapping):
            placement = next((fn[each] for each in (name, *others) if each in fn), None)
        else:
            placement = _asked(fn, name, param)
        found[name] = _checked(name, param, placement)
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
            f"sharded, and returns None, Shard(dim), or a ShardPlacementResult of torch's."
        ) from error


def _checked(fqn: str, param: nn.Parameter, placement: Any) -> Shard | OnMesh:
    if placement is None:
        return Shard(0)
    what = f"shard_placement_fn returned {placement!r} for parameter {fqn!r} {list(param.shape)}"
    if isinstance(placement, OnMesh):
        inside = _checked(fqn, param, placement.placement)
        assert isinstance(inside, Shard)
        return dataclasses.replace(placement, placement=inside)
    if hasattr(placement, "mesh_info"):  # torch's ShardPlacementResult
        inside = _checked(fqn, param, placement.placement)
        assert isinstance(inside, Shard)
        return OnMesh(inside, _mesh_of(placement.mesh_info, what))
    if type(placement) is not Shard:
        raise UnitError(f"{what}: expected None or torch.distributed.tensor.Shard(dim).")
    if not -param.dim() <= placement.dim < param.dim():
        raise UnitError(
            f"{what}, which has {param.dim()} dimensions. Return a dimension that it has, or None "
            f"(which is Shard(0))."
        )
    # Of nothing: all the same.
    return Shard(int(placement.dim) % param.dim() if param.numel() else 0)


def _mesh_of(info: Any, what: str) -> DeviceMesh:
    """The mesh of torch's `FSDPMeshInfo` (1-D) or `HSDPMeshInfo` (2-D, replicate x shard)."""
    mesh: Any = getattr(info, "mesh", None)
    dims = getattr(info, "replicate_mesh_dim", None), getattr(info, "shard_mesh_dim", None)
    legal = isinstance(mesh, DeviceMesh) and dims == {1: (None, 0), 2: (0, 1)}.get(mesh.ndim)
    if not legal or getattr(info, "dp_mesh_dims", None) is not None:
        raise UnitError(
            f"{what}: fxshard takes FSDPMeshInfo(mesh, shard_mesh_dim=0) of a 1-D mesh, or "
            f"HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0) of a 2-D one."
        )
    found: DeviceMesh = mesh
    return found
