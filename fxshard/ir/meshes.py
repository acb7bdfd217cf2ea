"""The mesh that each parameter is on: that of the model, or another, by its strategy or its own.

A strategy of a unit that is not the model's is a way to see the ranks of the model's mesh: all of
them share its parameters (`SHARED`), or all have them (`COPIED`). A mesh of its own is one that
option ``shard_placement_fn`` gives a parameter, or a call of ``fully_shard`` its modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fxshard._torch.dtensors import root_of
from fxshard.config.checked import Config
from fxshard.config.options import HYBRID
from fxshard.errors import ConfigError
from fxshard.ir.layout import Grid
from fxshard.ir.placements import OnMesh
from fxshard.ir.tensor_parallel import EXPERTS, group_name, is_sharded

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
    return {name: mesh for name, (mesh, _) in _named(config).items()}


def _named(config: Config) -> dict[str, tuple[DeviceMesh, int]]:
    """The same, each with `OnMesh.batches`."""
    given: Any = config.shard_placement_fn
    found: dict[tuple[DeviceMesh, int], str] = {}
    for placement in given.values() if isinstance(given, Mapping) else ():
        if not isinstance(placement, OnMesh) or (placement.mesh, placement.batches) in found:
            continue
        mesh = placement.mesh
        label = "_".join(mesh.mesh_dim_names or ()) or "x".join(map(str, mesh.shape))
        taken = {SHARED, COPIED, *found.values()}
        names = [label, *(f"{label}_{n}" for n in range(2, len(taken) + 3))]
        found[mesh, placement.batches] = next(name for name in names if name not in taken)
    return {name: own for own, name in found.items()}


def with_experts(config: Config, params: Mapping[str, Any]) -> Config:
    """`config` with the mesh of experts, which are DTensors on a dimension called "ep".

    Its ranks have batches of their own, and experts of which each serves the tokens of all of them.
    So what no other rank has is shared by the ranks of the dimension before it alone (a hybrid
    strategy: of the two before it), and its gradients are of the batches of all. Of a model that
    tensor parallelism cuts too, some of these ranks have one batch, and a part of its tokens each.

    Args:
        config: whose ``shard_placement_fn`` is a dict, or None.
        params: of the model, by FQN.

    Raises:
        ConfigError: there is no such dimension.
    """
    given: Any = config.shard_placement_fn or {}
    found = {}
    placed = [
        p.device_mesh for p in params.values() if isinstance(p, DTensor) and not is_sharded(p)
    ]
    one_batch = next((m.size() for m in placed if m.ndim == 1 and group_name(m) != EXPERTS), 1)
    for fqn, param in params.items():
        place = given.get(fqn)
        if not isinstance(param, DTensor) or is_sharded(param) or isinstance(place, OnMesh):
            continue
        if param.device_mesh.ndim == 1 and group_name(param.device_mesh) == EXPERTS:
            mesh = root_of(param.device_mesh)
            names: Any = mesh.mesh_dim_names or ()
            at, before = names.index(EXPERTS) if EXPERTS in names else 0, 1 + config.hybrid
            if at < before:
                raise ConfigError(
                    f"parameter {fqn!r} is a DTensor on the dimension {EXPERTS!r} of {mesh}: "
                    f"strategy {config.strategy!r} shards experts over "
                    f"{'the two dimensions' if config.hybrid else 'the dimension'} before it. Make "
                    f"a mesh that has {'them' if config.hybrid else 'one'}, if only of size 1: "
                    f"init_device_mesh(device, (1, ranks), mesh_dim_names=('dp', 'ep'))."
                )
            own = mesh[names[at - before : at]]
            batches = own.size() * param.device_mesh.size() // one_batch
            found[fqn] = OnMesh(place or Shard(0), own, batches)
    return dataclasses.replace(config, shard_placement_fn=given | found) if found else config


def require_batches(config: Config, used: Iterable[str], ranks: int) -> None:
    """Raise ConfigError if the mesh of a model has not the ranks that send tokens to its experts.

    Args:
        used: names of the meshes of parameters.
        ranks: of the model's mesh.
    """
    for name, (mesh, batches) in _named(config).items():
        if name in used and batches and batches != ranks:
            raise ConfigError(
                f"experts on {mesh} get the tokens of {batches} ranks, and the rest of the model "
                f"is sharded over {ranks}: ranks of the dimension {EXPERTS!r} have batches of "
                f"their own, so that all parameters but the experts' are sharded over it too. Give "
                f"mesh= the mesh with both dimensions, or of {batches} ranks (plan: world_size="
                f"{batches}); where these ranks get the same batch, give that dimension another "
                f"name."
            )


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
    names = {own: name for name, own in _named(config).items()}
    return {
        aliases[0]: names[given[alias].mesh, given[alias].batches]
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
    ranks, used = replicas * shards, {*used} - {""}
    require_batches(config, used, ranks)
    known = {SHARED: Grid(ranks, 1, SHARED), COPIED: Grid(1, ranks, COPIED)}
    for name in _named(config):
        known[name] = own_grid(config, name)
    return tuple(known[name] for name in sorted(used))


def own_grid(config: Config, name: str) -> Grid:
    """The ranks of a mesh that parameters have of their own."""
    mesh, batches = _named(config)[name]
    replicas = mesh.size(0) if mesh.ndim == 2 else 1
    return Grid(mesh.size(mesh.ndim - 1), replicas, name, batches)


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
