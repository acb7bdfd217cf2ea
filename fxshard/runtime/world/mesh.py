"""From the user's world_size, mesh or process_group to the world to run in."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard._torch import process_groups
from fxshard._torch.dtensors import flattened, root_of
from fxshard.config.checked import Config
from fxshard.config.world_size import grid
from fxshard.errors import ConfigError, UnitError
from fxshard.ir import meshes
from fxshard.ir.tensor_parallel import EXPERTS, group_name, placed_meshes
from fxshard.ir.units import Unit, check_reshard
from fxshard.runtime.world.c10d import C10dWorld, Members
from fxshard.runtime.world.in_process import InProcessWorld

CONTEXTS = "cp"  # what torch's own stacks call the dimension of a mesh that sequences are cut over

log: logging.Logger = logging.getLogger("fxshard")


def world_over(mesh: DeviceMesh, config: Config, units: tuple[Unit, ...]) -> C10dWorld:
    """The world of a mesh under a strategy; collective if units are resharded to smaller groups.

    Args:
        mesh: of data parallelism alone.

    Raises:
        ConfigError: a unit has a strategy of its own beside tensor parallelism.
    """
    beside = _beside(units)
    by_strategy = sorted(meshes.of_units(units) & {meshes.SHARED, meshes.COPIED})
    if beside and by_strategy:
        raise ConfigError(
            f"tensor parallelism with units of a strategy of their own "
            f"({', '.join(map(repr, by_strategy))}): beside {group_name(beside[0])!r} one strategy "
            f"is that of all. Leave one of the two out."
        )
    others = _other_meshes(mesh, config, units)
    check_reshard(units, mesh.size(mesh.ndim - 1), [members.grid for members in others])
    sizes = [unit.reshard for unit in units if not isinstance(unit.reshard, bool)]
    sharded = config.strategy != "no_shard"
    return C10dWorld(mesh, sharded=sharded, reshard=sizes, beside=beside, others=others)


def _other_meshes(mesh: DeviceMesh, config: Config, units: tuple[Unit, ...]) -> list[Members]:
    """The ranks of the meshes that parameters are on besides `mesh`; collective over it."""
    named, found = meshes.named(config), []
    flat: DeviceMesh | None = mesh if mesh.ndim == 1 else None
    used = sorted(meshes.of_units(units) - {""})
    meshes.require_batches(config, used, mesh.size())
    for name in used:
        if name in named:
            meshes.require_within(mesh, name, named[name])
            batches = meshes.own_grid(config, name).batches
            found.append(Members.of(named[name], name, batches=batches))
            continue
        flat = flat or _flattened(mesh)
        found.append(Members.of(flat, name, sharded=name == meshes.SHARED))
    return found


def _flattened(mesh: DeviceMesh) -> DeviceMesh:
    """A 1-D mesh of the ranks of a 2-D one."""
    ranks, group = sorted(mesh.mesh.flatten().tolist()), dist.group.WORLD
    assert group is not None
    if len(ranks) < dist.get_world_size():
        group = process_groups.new_group(ranks, group)
    return DeviceMesh.from_group(group, mesh.device_type)


def world_for(
    model: nn.Module,
    config: Config,
    units: tuple[Unit, ...],
    world_size: int | tuple[int, int] | None,
    mesh: DeviceMesh | None,
    process_group: Any,
) -> C10dWorld | InProcessWorld:
    if world_size is not None:
        grid(world_size, config)
    if mesh is not None and process_group is not None:
        raise ConfigError("mesh and process_group were both given; give one.")
    _check_kinds(mesh, process_group)
    if mesh is None and process_group is None:
        _initialise(world_size)
    if not (dist.is_available() and dist.is_initialized()):
        if mesh is not None or process_group is not None:
            raise ConfigError(
                "a mesh or process_group was given, but no process group is initialised: call "
                "torch.distributed.init_process_group first, and start with torchrun."
            )
        if world_size is None:
            raise ConfigError(
                "no process group is initialised and no world_size given. Start with torchrun, or "
                "call torch.distributed.init_process_group, or pass world_size=N to run N ranks "
                "inside this process."
            )
        replicas, shards = grid(world_size, config)
        log.warning(
            "fxshard: no process group: running all %d ranks inside this process, each on the "
            "whole batch. Start with torchrun to use %d processes.",
            replicas * shards,
            replicas * shards,
        )
        others = meshes.grids(config, meshes.of_units(units), replicas, shards)
        return InProcessWorld(shards, replicas, others)
    mesh = _without_tensor_parallel(mesh, units, config)
    if process_group is not None:
        mesh = _mesh_of_groups(model, config, process_group)
    elif mesh is None:
        mesh = mesh_of(model, config, _default_grid(world_size, config))
    if mesh.ndim != 1 + config.hybrid:
        dims = "two, replicate x shard" if config.hybrid else "one"
        slices = " or ".join(f"mesh[{name!r}]" for name in mesh.mesh_dim_names or ["shard"])
        raise ConfigError(
            f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; strategy "
            f"{config.strategy!r} takes {dims}."
            + ("" if config.hybrid else f" Pass a slice of it: {slices}.")
        )
    given = tuple(mesh.shape) if config.hybrid else mesh.size()
    if world_size is not None and world_size != given:
        raise ConfigError(
            f"world_size={world_size}, but the process group has {given} ranks. Leave "
            f"world_size out, or start torchrun with --nproc-per-node={world_size}."
        )
    return world_over(mesh, config, units)


def _without_tensor_parallel(
    mesh: DeviceMesh | None, units: Sequence[Unit], config: Config
) -> DeviceMesh | None:
    """The dimensions of `mesh` that parameters are not placed on, as `_with_contexts` has them.

    Raises:
        UnitError: parameters are, and there is no mesh.
        ConfigError: too few or too many are left.
    """
    beside = _beside(units)
    if not beside:
        return mesh and _with_contexts(mesh)
    if mesh is None:
        first: Any = next(p for unit in units for p in unit.params if p.placed is not None)
        raise UnitError(
            f"parameter {first.fqn!r} is a DTensor already, on {first.placed.mesh}: fxshard "
            f"cannot tell which ranks it is to shard over. After parallelize_module give the mesh "
            f"that it got a dimension of, mesh=mesh (fully_shard: mesh=mesh['dp']). Else give the "
            f"plain model, before fully_shard or another fxshard.compile."
        )
    names = mesh.mesh_dim_names or ()
    left = beside_others(mesh, units)
    of_experts = group_name(beside[0]) == EXPERTS  # and no tensor parallelism
    if len(left) == len(names) or (of_experts and names[0] == EXPERTS):
        return _with_contexts(mesh)  # the data-parallel part
    if of_experts:
        return _joined_with(mesh, EXPERTS, 1 + config.hybrid)
    rest = _with_contexts(mesh[left])
    if rest.ndim != 1 + config.hybrid:
        dims = "two, replicate x shard" if config.hybrid else "one"
        raise ConfigError(
            f"the mesh has dimensions {names}, of which {group_name(beside[0])!r} is that of "
            f"tensor parallelism; for the others, {left}, strategy {config.strategy!r} takes "
            f"{dims}."
        )
    return rest


def beside_others(mesh: DeviceMesh, units: Sequence[Unit]) -> tuple[str, ...]:
    """The dimensions of `mesh` that no parameter is placed on."""
    beside = _beside(units)
    return tuple(name for name in mesh.mesh_dim_names or () if mesh[name] not in beside)


def _beside(units: Sequence[Unit]) -> list[DeviceMesh]:
    """See `placed_meshes`."""
    return placed_meshes(param for unit in units for param in unit.params)


def data_parallel(mesh: DeviceMesh, units: Sequence[Unit], config: Config) -> DeviceMesh | None:
    """The dimensions of `mesh` that parameters are sharded over; None if there are none."""
    left = beside_others(mesh, units)
    beside = _beside(units)
    if beside and group_name(beside[0]) == EXPERTS and len(left) < mesh.ndim:
        return _joined_with(mesh, EXPERTS, 1 + config.hybrid)
    return _with_contexts(mesh[left]) if left else None


def _with_contexts(mesh: DeviceMesh) -> DeviceMesh:
    """`mesh`, with its dimension "cp" and the one before it as one.

    Ranks that have parts of the same sequences have gradients of their own, as those of other
    batches have: parameters are sharded over both.
    """
    names = mesh.mesh_dim_names or ()
    if CONTEXTS not in names[1:]:
        return mesh
    return _joined_with(mesh, CONTEXTS)


def _joined_with(mesh: DeviceMesh, name: str, dims: int | None = None) -> DeviceMesh:
    """`mesh`, with its dimension `name` and the one before it as one.

    Args:
        dims: how many dimensions are left, up to that one; None: all.
    """
    names = mesh.mesh_dim_names or ()
    at = names.index(name)
    both = flattened(mesh[names[at - 1 : at + 1]])
    rest = (*names[: at - 1], *(both.mesh_dim_names or ()), *names[at + 1 :])
    rest = rest if dims is None else rest[at - dims : at]
    return both if len(rest) == 1 else root_of(mesh)[rest]


def beside_tensor_parallel(units: Sequence[Unit], config: Config) -> DeviceMesh | None:
    """The other dimensions of the mesh that parameters are placed on; None if none is placed."""
    beside = _beside(units)
    return _without_tensor_parallel(root_of(beside[0]), units, config) if beside else None


def _check_kinds(mesh: Any, process_group: Any) -> None:
    """Raise ConfigError if `mesh` is no mesh, or `process_group` neither a group nor a pair."""
    if not isinstance(mesh, (DeviceMesh, type(None))):
        raise ConfigError(
            f"mesh={mesh!r}: expected a torch.distributed.device_mesh.DeviceMesh, as "
            f"init_device_mesh(device, (ranks,)) makes it."
        )
    if process_group is None or not dist.is_available():
        return
    several = isinstance(process_group, (tuple, list))
    groups = process_group if several else [process_group]
    is_legal = all(isinstance(group, dist.ProcessGroup) for group in groups)
    if not is_legal or (several and len(groups) != 2):
        raise ConfigError(
            f"process_group={process_group!r}: expected what torch.distributed.new_group returns, "
            f"on a rank that is in it; or for a hybrid strategy a pair, (shard, replicate)."
        )


# The variables in which launchers other than torchrun pass the number of processes.
_STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _initialise(world_size: Any) -> None:
    """Initialise the default process group if torchrun has started this process as one of many.

    `init_device_mesh` and `fully_shard` do the same. Otherwise each process would train alone.
    (torch/distributed/fsdp/_fully_shard/_fsdp_init.py, ``_init_default_mesh``)

    Raises:
        ConfigError: the process is one of many, and the environment lacks variables that
            `init_process_group` needs.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    sizes = {name: os.environ[name] for name in ("WORLD_SIZE", *_STARTED) if name in os.environ}
    many = [f"{name}={value}" for name, value in sizes.items() if value not in ("", "1")]
    lacking = [name for name in _RENDEZVOUS if not os.environ.get(name)]
    if many and lacking:
        raise ConfigError(
            f"this process is one of several ({many[0]}), but no process group is initialised, and "
            f"each would train alone: call torch.distributed.init_process_group first. (With "
            f"{', '.join(lacking)} in the environment too, as torchrun sets them, fxshard does.)"
        )
    if not lacking and (many or world_size is None):
        dist.init_process_group()


def _default_grid(world_size: Any, config: Config) -> tuple[int, int]:
    """All ranks; a hybrid strategy shards inside a machine and copies over machines, as FSDP1.

    Raises:
        ConfigError: `world_size` is not that of the process group, or the number of ranks per
            machine is not known (torchrun sets LOCAL_WORLD_SIZE) or does not divide it.
    """
    ranks = dist.get_world_size()
    if not config.hybrid:
        return 1, ranks
    if world_size is not None:
        if math.prod(world_size) != ranks:
            raise ConfigError(
                f"world_size={world_size}, but the process group has {ranks} ranks: the product "
                f"of the two must be that."
            )
        return (world_size[0], world_size[1])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not local or ranks % local:
        raise ConfigError(
            f"strategy {config.strategy!r} needs to know how {ranks} ranks are arranged: pass a "
            f"2-D mesh, init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', "
            f"'shard')), or start with torchrun, which sets LOCAL_WORLD_SIZE."
        )
    return ranks // local, local


def _mesh_of_groups(model: nn.Module, config: Config, process_group: Any) -> DeviceMesh:
    """The mesh of a process group, or of the pair (shard group, replicate group)."""
    pair = isinstance(process_group, (tuple, list))
    if pair != config.hybrid:
        raise ConfigError(
            f"process_group is {'a pair' if pair else 'one group'}; strategy {config.strategy!r} "
            f"takes {'a pair (shard, replicate)' if config.hybrid else 'one'}."
        )
    if not pair:
        return DeviceMesh.from_group(process_group, _device_type(model, process_group))
    shard, replicate = process_group
    rows = _rows_of_groups(shard, replicate)
    return DeviceMesh.from_group(
        [replicate, shard],
        _device_type(model, shard),
        mesh=torch.tensor(rows),
        mesh_dim_names=("replicate", "shard"),
    )


def _rows_of_groups(shard: dist.ProcessGroup, replicate: dist.ProcessGroup) -> list[list[int]]:
    """The ranks of the shard group of each rank of `replicate`; collective over both groups.

    Raises:
        ConfigError: they hold this rank's rows at different places, or other ranks of the shard
            group have the shard groups in another order; on all ranks alike.
    """
    mine, ranks = dist.get_process_group_ranks(shard), dist.get_process_group_ranks(replicate)
    if dist.get_backend(replicate) == "fake":  # there is no other rank to ask
        return [[other + rank - dist.get_rank() for rank in mine] for other in ranks]
    rows: list[list[int]] = _from_each(replicate, mine)
    for each, others in _from_each(shard, (rows, ranks)):
        if len({(len(row), row.index(rank)) for row, rank in zip(each, others, strict=True)}) > 1:
            raise ConfigError(
                f"process_group: ranks {others} of the replicate group lie at different places of "
                f"their shard groups {each}, so that they hold different rows. Put ranks together "
                f"that are the n-th of their shard groups."
            )
        if each != rows:
            raise ConfigError(
                f"process_group: replicate groups {ranks} and {others} have their ranks' shard "
                f"groups in different orders, {rows} and {each}, so that there is no one first "
                f"replica. Number ranks as init_device_mesh does: of 4, shard groups [0, 1] and "
                f"[2, 3], replicate groups [0, 2] and [1, 3]."
            )
    return rows


def _from_each(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What each rank of `group` gives, as JSON has it, in their order."""
    store, ranks = process_groups.group_store(group), dist.get_process_group_ranks(group)
    key = f"fxshard/mesh/{store.add(f'fxshard/mesh/{dist.get_rank()}', 1)}"
    store.set(f"{key}/{dist.get_rank()}", json.dumps(mine))
    return [json.loads(store.get(f"{key}/{rank}")) for rank in ranks]


def mesh_of(model: nn.Module, config: Config, grid: tuple[int, int]) -> DeviceMesh:
    """A mesh of all ranks, of the shape that the strategy asks for; `grid` is replicas x shards."""
    device = _device_type(model, None)
    if config.hybrid:
        return init_device_mesh(device, grid, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device, (grid[0] * grid[1],))


def _device_type(model: nn.Module, group: dist.ProcessGroup | None) -> str:
    """The device type of the parameters; of a meta model, the accelerator if `group` serves it."""
    found = next((p.device.type for p in model.parameters() if not p.is_meta), None)
    if found:
        return found
    accelerator = torch.accelerator.current_accelerator()
    served = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if accelerator and served.get(accelerator.type) not in (None, "gloo", "fake"):
        return accelerator.type
    return "cpu"
