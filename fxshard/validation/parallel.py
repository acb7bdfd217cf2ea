"""Ranks of a mesh of several dimensions, each of which parallelises a copy of the model itself."""

from __future__ import annotations

import dataclasses
import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard.capture.held import copied
from fxshard.ir.splitting import configured_units
from fxshard.plans.workload import Workload, entered_once
from fxshard.runtime.sharding import Sharding
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.mesh import data_parallel, world_over
from fxshard.runtime.world.parallelised import Context, Dims, Parallelize, parallelised


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How each rank of a mesh parallelises a model, with real parameters.

    Attributes:
        dims: of the mesh.
        added: how many dimensions of one rank the strategy has besides.
        parallelize, context: as for `fxshard.plan`.
        device: type of device of the model.
    """

    dims: Dims
    added: int = 0
    parallelize: Parallelize | None = None
    context: Context | None = None
    device: str = "cpu"

    @property
    def ranks(self) -> int:
        """How many there are."""
        return math.prod(self.dims.values())

    def here(self, work: Workload) -> tuple[Sharding, Workload]:
        """A copy of the plain model, parallelised on this rank of the default process group.

        Collective. The workload returned has the context that the loop calls this copy in.

        Raises:
            ConfigError: see `parallelised`.
        """
        root, mesh = self._meshes()
        module = copied(work.module)
        if self.parallelize is not None:
            said = "a copy of the model, on each rank"
            module = parallelised(module, self.parallelize, mesh, said)
        units = configured_units(module, work.config)
        left = data_parallel(root, units, work.config)
        assert left is not None  # `on_mesh` has found it, or one was added
        left = self._of_several(left, 1 + work.config.hybrid)
        sharding = Sharding(module, units, world_over(left, work.config, units), work.config)
        if (context := self.context) is None:
            return sharding, work
        around = entered_once(lambda: context(module, mesh))
        return sharding, dataclasses.replace(work, around=around)

    def _meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """A mesh of all dimensions, the added ones first; and what the user has of it."""
        names, ones = tuple(self.dims), self._ones
        shape = (*(1 for _ in ones), *self.dims.values())
        root = init_device_mesh(self.device, shape, mesh_dim_names=(*ones, *names))
        return root, root[names] if ones else root

    @property
    def _ones(self) -> tuple[str, ...]:
        return tuple(f"one_{i}" for i in range(self.added))

    def _of_several(self, left: DeviceMesh, wanted: int) -> DeviceMesh:
        """`left`, without dimensions of one rank if it has more than are wanted."""
        names = left.mesh_dim_names or ()
        if left.ndim <= wanted:
            return left
        sizes = dict(zip(names, left.shape, strict=True))
        return left[tuple(n for n in names if sizes[n] > 1 or n in self._ones)]


def position(sharding: Sharding) -> int:
    """The number of this rank among those that have batches of their own."""
    assert isinstance(sharding.world, C10dWorld)
    mesh = sharding.world.mesh
    found, where = 0, mesh.get_coordinate()
    assert where is not None  # a rank of the mesh
    for size, place in zip(mesh.shape, where, strict=True):
        found = found * size + place
    return found
