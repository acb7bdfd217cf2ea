"""The mesh that each parameter is on: that of the model, or another, by its strategy or its own.

A strategy of a unit that is not the model's is a way to see the ranks of the model's mesh: all of
them share its parameters (`SHARED`), or all have them (`COPIED`). A mesh of its own is one that
option ``shard_placement_fn`` gives a parameter, or a call of ``fully_shard`` its modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fxshard.config.checked import Config
from fxshard.config.options import HYBRID
from fxshard.errors import ConfigError
from fxshard.ir.layout import Grid
from fxshard.ir.placements import OnMesh

SHARED, COPIED = "all", "copies"  # names of meshes: all ranks share a parameter, or all have it


def of_strategy(config: Config, strategy: str) -> str:
    """The name of the mesh of a unit with this strategy."""
    if not isinstance(config.strategy, Mapping) or strategy in HYBRID:
        return ""
    if strategy == "no_shard":
        return COPIED
    return SHARED if config.hybrid else ""


def named(config: Config) -> dict[str, DeviceMesh]:
    """The meshes that parameters have of their own, by their names.

    The name is that of the mesh's dimensions, or else their sizes: the same on all ranks.
    """
    given: Any = config.shard_placement_fn
    found: dict[DeviceMesh, str] = {}
    for placement in given.values() if isinstance(given, Mapping) else ():
        mesh = placement.mesh if isinstance(placement, OnMesh) else None
        if mesh is None or mesh in found:
            continue
        label = "_".join(mesh.mesh_dim_names or ()) or "x".join(map(str, mesh.shape))
        taken = {SHARED, COPIED, *found.values()}
        names = [label, *(f"{label}_{n}" for n in range(2, len(taken) + 3))]
        found[mesh] = next(name for name in names if name not in taken)
    return {name: mesh for mesh, name in found.items()}


def of_params(config: Config, params: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """The name of the mesh of each parameter that has one of its own.

    Args:
        config: whose ``shard_placement_fn`` is a dict, if it has one.
        params: all names of each.

    Returns:
        Name of the mesh by the first name of the parameter.
    """
    given: Any = config.shard_placement_fn
    if not isinstance(given, Mapping):
        return {}
    names = {mesh: name for name, mesh in named(config).items()}
    return {
        aliases[0]: names[given[alias].mesh]
        for aliases in params
        for alias in aliases
        if isinstance(given.get(alias), OnMesh)
    }


def grids(config: Config, used: Iterable[str], replicas: int, shards: int) -> tuple[Grid, ...]:
    """The ranks of the meshes besides the model's that parameters are on.

    Args:
        used: names of the meshes of parameters.
        replicas, shards: of the model's mesh.
    """
    ranks, own = replicas * shards, named(config)
    known = {SHARED: Grid(ranks, 1, SHARED), COPIED: Grid(1, ranks, COPIED)}
    for name, mesh in own.items():
        known[name] = Grid(mesh.size(mesh.ndim - 1), mesh.size(0) if mesh.ndim == 2 else 1, name)
    return tuple(known[name] for name in sorted({*used} - {""}))


def of_units(units: Iterable[Any]) -> set[str]:
    """The names of the meshes that the parameters of units are on."""
    return {param.mesh for unit in units for param in unit.params}


def require_within(model: DeviceMesh, name: str, mesh: DeviceMesh) -> None:
    """Raise ConfigError if a mesh of parameters reaches ranks that the mesh of the model does not.

    All ranks of the model's mesh agree on what they do; others would wait for them. This rank must
    be one of the mesh.
    """
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"mesh {name!r} of some parameters, {mesh}, does not have this rank, which has these "
            f"parameters too. Give each rank the part of a mesh that it is in, such as mesh['ep']."
        )
    others = sorted({*mesh.mesh.flatten().tolist()} - {*model.mesh.flatten().tolist()})
    if others:
        raise ConfigError(
            f"mesh {name!r} of some parameters, {mesh}, has ranks {others}, which the mesh of the "
            f"model, {model}, has not: nothing would keep them in step. Give the model (the last "
            f"call of fully_shard) a mesh of all ranks that take part."
        )
