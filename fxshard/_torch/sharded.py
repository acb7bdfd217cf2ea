"""DTensors that are sharded by rows: what this rank holds, and others like them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fxshard._torch import compat


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a parameter."""
    return compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def sharded_like(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` placed as `like` is: this rank's rows of it; nothing is communicated."""
    if not isinstance(like, DTensor):
        return whole
    local = _local_rows(whole, like.device_mesh, like.placements)
    return _dtensor(local.to(local_part(like).device), like)


def _local_rows(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """A view: what this rank holds of `whole`, cut by torch.chunk's rule as DTensor cuts."""
    for mesh_dim, place in enumerate(placements):
        if place.is_shard():
            dim: int = place.dim  # type: ignore[attr-defined]
            parts = whole.chunk(mesh.size(mesh_dim), dim)
            rank = mesh.get_local_rank(mesh_dim)
            whole = parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)
    return whole


def _dtensor(local: Tensor, like: DTensor) -> DTensor:
    """`local` in the place of `like`'s."""
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
