"""Parameters that are DTensors before they are sharded: those of tensor parallelism.

``torch.distributed.tensor.parallel.parallelize_module`` makes parameters DTensors on a dimension of
the mesh that data parallelism does not know. For a program such a parameter is what this rank has
of it: an ordinary tensor, which is sharded, gathered and reduced over the other dimensions. While
forward is traced it is a DTensor again, so that the graph has the collectives of tensor
parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fxshard._torch.dtensors import group_id, inner_of, joined, local_tensor, under
from fxshard.errors import UnitError
from fxshard.ir.layout import ParamLayout

PLACE = "_fxshard_place"  # attribute of a sharded parameter: its runtime, and its FQN
EXPERTS = "ep"  # what torch's own stacks call the dimension of a mesh that experts are spread over


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where a tensor is on a dimension of the mesh that fxshard does not shard over.

    Attributes:
        mesh: of that dimension alone.
        placements: one.
        shape, stride: of the tensor on all ranks together.
        rank: of this one, along the dimension.
        ranks_between: how far ranks of the other dimensions are apart: as many as this dimension
            has, if those are neighbours.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    rank: int = 0
    ranks_between: int = 1

    @classmethod
    def on(
        cls,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> Placed:
        """With what is known of `mesh` while its process group is there."""
        first, *others = mesh.mesh.flatten().tolist()
        between = mesh.size() if others[:1] == [first + 1] else 1
        return cls(mesh, placements, shape, stride, mesh.get_local_rank(), between)

    def __deepcopy__(self, memo: Any) -> Placed:
        return self  # process groups have no copies

    @property
    def group(self) -> str:
        """What its ranks are called: the name of the dimension."""
        return group_name(self.mesh)

    @property
    def process_group(self) -> str:
        """What functional collectives call its ranks, on this rank."""
        return group_id(self.mesh)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of what this rank has."""
        rows = ParamLayout(self.shape, torch.float32, 0, tuple(self.mesh.shape), self.placements)
        return rows.local_shape(self.rank)

    @property
    def uneven(self) -> bool:
        """True if some ranks have less than others."""
        sharded = [place for place in self.placements if isinstance(place, Shard)]
        return any(self.shape[place.dim] % self.mesh.size() for place in sharded)

    def around(self, local: Tensor) -> DTensor:
        """The DTensor of which this rank has `local`; autograd follows."""
        shape, stride = torch.Size(self.shape), self.stride
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )

    def over(
        self, outer: DeviceMesh, placements: Iterable[Placement]
    ) -> tuple[DeviceMesh, list[Placement]]:
        """Mesh and placements of the tensor where `outer` shards what each rank has of it.

        They are those that FSDP2 gives it.
        """
        sizes = tuple(self.mesh.shape)
        own = [under(place, self.placements, sizes) for place in placements]
        return joined(outer, self.mesh), [*own, *self.placements]


def group_name(mesh: DeviceMesh) -> str:
    """What operators call the ranks of a mesh that has one dimension."""
    name = (mesh.mesh_dim_names or ("tp",))[0]
    return f"{name} (parallel)" if name in ("shard", "replicate") else name


def is_sharded(param: Tensor) -> bool:
    """True if fxshard has sharded `param`."""
    return hasattr(param, PLACE)


def placed(fqn: str, param: nn.Parameter) -> Placed | None:
    """Where a parameter is besides what fxshard shards of it; None if it is so nowhere.

    Args:
        fqn: of the parameter.
        param: it, sharded by fxshard or not yet.

    Raises:
        UnitError: it is a DTensor of a kind that programs do not know.
    """
    if not isinstance(param, DTensor):
        return None
    placements, shape, stride = tuple(param.placements), tuple(param.shape), param.stride()
    if is_sharded(param):
        mesh = inner_of(param.device_mesh)
        return None if mesh is None else Placed.on(mesh, placements[-mesh.ndim :], shape, stride)
    what = f"parameter {fqn!r} is a DTensor {list(param.shape)} of placements {placements}"
    if param.device_mesh.ndim != 1:
        raise UnitError(
            f"{what} on {param.device_mesh}: fxshard shards what one dimension of tensor "
            f"parallelism leaves. Give it the model before torch's fully_shard, and one dimension "
            f"of the mesh, such as mesh['tp'], to parallelize_module."
        )
    if type(placements[0]) not in (Replicate, Shard):
        raise UnitError(f"{what}: a parameter is Shard(dim) or Replicate(). Redistribute it first.")
    found = Placed.on(param.device_mesh, placements, shape, stride)
    local = local_tensor(param)
    if type(local) not in (Tensor, nn.Parameter) and not local.is_meta:
        raise UnitError(
            f"{what}, and what a rank has of it is a {type(local).__name__}: programs run on plain "
            f"tensors. Parallelise plain parameters."
        )
    if tuple(local.shape) != found.local_shape:
        raise UnitError(
            f"{what}, of which this rank has {list(local.shape)}: expected "
            f"{list(found.local_shape)}, as torch.chunk cuts it. Make it with distribute_tensor."
        )
    return found


def placed_meshes(params: Iterable[Any]) -> list[DeviceMesh]:
    """The dimensions that `params` (`fxshard.ir.units.Param`) are placed on, at most two.

    That of tensor parallelism comes first, and then that of experts. The ranks of the former have
    one batch, of which each sends its part of the tokens to experts: so they are among the latter.

    Raises:
        UnitError: there are others, or the ranks of the first are not among those of the second.
    """
    found: dict[bool, Any] = {}  # by whether they are of experts: a parameter that is on one
    for param in params:
        if param.placed is None:
            continue
        first = found.setdefault(param.placed.group == EXPERTS, param)
        if param.placed.mesh != first.placed.mesh:
            raise UnitError(
                f"parameter {first.fqn!r} is a DTensor on {first.placed.mesh}, and {param.fqn!r} "
                f"on {param.placed.mesh}: fxshard knows one dimension of tensor parallelism, and "
                f"one of experts, {EXPERTS!r}. Give parallelize_module the same for both."
            )
    meshes: list[DeviceMesh] = [found[key].placed.mesh for key in sorted(found)]
    if len(meshes) == 2 and not among(*meshes):
        tensor, experts = meshes
        raise UnitError(
            f"experts such as {found[True].fqn!r} are spread over {experts}, which has not the "
            f"ranks of {tensor}, of {found[False].fqn!r}: these share a batch, so that experts get "
            f"its tokens once only if they are spread over these ranks too. Make a mesh whose "
            f"{EXPERTS!r} has all ranks of {group_name(tensor)!r}, as torchtitan's has with "
            f"expert_tensor_parallel_degree=1."
        )
    return meshes


def among(some: DeviceMesh, mesh: DeviceMesh) -> bool:
    """True if the ranks of `some` are ranks of `mesh` too."""
    return {*some.mesh.flatten().tolist()} <= {*mesh.mesh.flatten().tolist()}
