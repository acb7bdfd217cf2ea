"""A model on a mesh of several dimensions, planned where there are no ranks.

The user's own function parallelises a copy of the model, on the meta device, for a mesh of ranks
that move no data. What is left of the mesh is that of data parallelism, as `fxshard.compile` has
it. These ranks are there while something is planned, and at no other time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fxshard._torch.process_groups import FakeRanks
from fxshard.arguments import check_called
from fxshard.bytesize import is_count
from fxshard.capture.held import on_meta
from fxshard.config.checked import Config
from fxshard.errors import ConfigError
from fxshard.ir.splitting import configured_units, placed
from fxshard.plans.workload import Around, entered_once
from fxshard.runtime.world.mesh import CONTEXTS, data_parallel
from fxshard.runtime.world.parallelised import Context, Dims, Parallelize, failed, parallelised

EXAMPLE = "mesh={'dp': 8, 'tp': 4}"


@dataclasses.dataclass(frozen=True)
class ModelOnMesh:
    """A model as a rank of a mesh has it.

    Attributes:
        module: it, or a copy on the meta device that was parallelised.
        config: the options, for it.
        world_size: of data parallelism.
        around: see `fxshard.plans.workload.Workload`.
        added: how many dimensions of one rank the strategy has besides those of the mesh.
    """

    module: nn.Module
    config: Config
    world_size: int | tuple[int, int]
    around: Around
    added: int = 0


def there(
    module: nn.Module,
    config: Config,
    world_size: int | tuple[int, int] | None,
    mesh: Mapping[str, int] | None,
    parallelize: Parallelize | None,
    context: Context | None,
) -> ModelOnMesh:
    """The model on `world_size` ranks, or on a mesh: one of them is given.

    Raises:
        ConfigError: both are, or none is; or see `on_mesh`.
    """
    if mesh is not None and world_size is not None:
        raise ConfigError(
            f"world_size={world_size!r} and mesh={mesh!r} were both given; give one. The mesh says "
            f"how many ranks there are."
        )
    if mesh is not None:
        return on_mesh(module, config, mesh, parallelize, context)
    for name, value in (("parallelize", parallelize), ("context", context)):
        if value is not None:
            raise ConfigError(f"{name}=... needs the mesh that it is called with: {EXAMPLE}.")
    if world_size is None:
        raise ConfigError(
            f"for how many ranks? Give world_size=8, or a mesh of several dimensions, {EXAMPLE}."
        )
    return ModelOnMesh(module, placed(module, config), world_size, contextlib.nullcontext)


def on_mesh(
    model: nn.Module,
    config: Config,
    mesh: Any,
    parallelize: Parallelize | None = None,
    context: Context | None = None,
) -> ModelOnMesh:
    """`model` on the first rank of a mesh; it is not changed.

    Args:
        mesh: ranks by name of a dimension, the outermost first.
        parallelize, context: as for `fxshard.plan`.

    Raises:
        ConfigError: no such mesh; the model is sharded already; this process has a process group;
            `parallelize` fails, or leaves dimensions that no strategy has.
        UnitError: a parameter is placed as programs do not know it.
    """
    dims = checked_dims(mesh)
    for name, function in (("parallelize", parallelize), ("context", context)):
        if function is not None:
            check_called(name, function, "the model", "the mesh")
    if CONTEXTS in dims and context is None:
        raise ConfigError(
            f"mesh={dims}: {CONTEXTS!r} are the ranks that have parts of one sequence. Give the "
            f"context in which attention goes round them, context=lambda model, mesh: "
            f"context_parallel(mesh[{CONTEXTS!r}], ...) (docs/context-parallel.md)."
        )
    require_alone()
    _require_plain(model)
    ranks, made = _ranks(tuple(dims.items()))
    with ranks.there():
        module = model
        if parallelize is not None:
            module = parallelised(on_meta(model), parallelize, made)
        config = placed(module, config)
        units = configured_units(module, config)
        size, added = _world_size(data_parallel(made, units, config), dims, config)

    @entered_once
    @contextlib.contextmanager
    def around() -> Iterator[None]:
        require_alone(ranks)
        with ranks.there(), _entered(context, module, made):
            yield

    return ModelOnMesh(module, config, size, around, added)


@contextlib.contextmanager
def _entered(context: Context | None, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """The block of `context`; raises ConfigError if that cannot be entered."""
    with contextlib.ExitStack() as stack:
        try:
            if context is not None:
                stack.enter_context(context(module, mesh))
        except Exception as error:
            raise failed("context", error, "the model", mesh) from error
        yield


def checked_dims(mesh: Any) -> Dims:
    """`mesh`, if it is ranks by name of a dimension.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        shape = dict(zip(names, mesh.shape, strict=False))
        raise ConfigError(
            f"mesh={mesh}: a plan needs no process group, and makes the mesh itself: give its "
            f"dimensions, mesh={shape or {'dp': 8, 'tp': 4}}. A model that parallelize_module has "
            f"parallelised on a mesh of yours is planned without mesh=, with the world_size of "
            f"data parallelism."
        )
    if not isinstance(mesh, Mapping) or not mesh:
        raise ConfigError(f"mesh={mesh!r}: expected ranks by name of a dimension: {EXAMPLE}.")
    for name, size in mesh.items():
        if not isinstance(name, str) or not name or not is_count(size):
            raise ConfigError(
                f"mesh={dict(mesh)!r}: {name!r} has {size!r} ranks; expected a name, and a whole "
                f"number >= 1: {EXAMPLE}."
            )
    if "pp" in mesh:
        raise ConfigError(
            f"mesh={dict(mesh)!r}: stages of a pipeline hold different modules, and each has a "
            f"plan of its own. Plan one stage's module on the mesh of its ranks, without 'pp', "
            f"with pipeline_stage=True and in_flight=... (docs/pipeline-parallel.md)."
        )
    return dict(mesh)


def require_alone(ranks: FakeRanks | None = None) -> None:
    """Raise ConfigError if this process has a process group, which is not `ranks`."""
    if dist.is_available() and dist.is_initialized() and not (ranks and ranks.inside):
        raise ConfigError(
            "mesh=... plans on a mesh of its own, but a process group is initialised in this "
            "process. Plan before init_process_group, or in another process; or parallelise the "
            "model on your own mesh, and leave mesh= and parallelize= out."
        )


def _require_plain(model: nn.Module) -> None:
    """Raise ConfigError if something has sharded `model` before."""
    if isinstance(model, FSDPModule):
        raise ConfigError("mesh=... with a model that fully_shard has sharded: give the plain one.")
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ConfigError(
                f"mesh=... with parameter {name!r}, a DTensor on {param.device_mesh}: the model is "
                f"parallelised already. Give the plain one, and parallelize=..., which does it; or "
                f"leave mesh= out, and give the world_size of data parallelism."
            )


@functools.cache
def _ranks(dims: tuple[tuple[str, int], ...]) -> tuple[FakeRanks, DeviceMesh]:
    """Ranks without data, and their mesh: one for equal dimensions.

    torch's caches put meshes that are equal for each other.
    """
    shape, names = tuple(size for _, size in dims), tuple(name for name, _ in dims)
    ranks = FakeRanks(0, math.prod(shape))
    with ranks.there():
        return ranks, init_device_mesh("cpu", shape, mesh_dim_names=names)


def _world_size(
    left: DeviceMesh | None, dims: Dims, config: Config
) -> tuple[int | tuple[int, int], int]:
    """The ranks of what is left of a mesh, in which dimensions of one rank do not count.

    Returns:
        They, and how many dimensions of one rank were added.

    Raises:
        ConfigError: a strategy has another number of dimensions.
    """
    wanted, sizes = 1 + config.hybrid, () if left is None else tuple(left.shape)
    if len(sizes) > wanted:
        sizes = tuple(size for size in sizes if size > 1)
    added = max(0, wanted - len(sizes))
    sizes = (*(1,) * added, *sizes)
    if len(sizes) != wanted:
        names = () if left is None else left.mesh_dim_names or ()
        takes = "two, replicate x shard" if config.hybrid else "one"
        hybrid = ""
        if len(sizes) == 2 and "tp" not in names:
            hybrid = "strategy='hybrid_shard', or "
        raise ConfigError(
            f"mesh={dims}: tensor parallelism places no parameter on "
            f"{', '.join(map(repr, names))}, which makes {len(sizes)} dimensions of data "
            f"parallelism; strategy {config.strategy!r} takes {takes}. Give {hybrid}another mesh, "
            f"or a parallelize= that places parameters on one of them."
        )
    return ((sizes[0], sizes[1]) if config.hybrid else sizes[0]), added
