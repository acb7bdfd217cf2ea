"""Parameters, and units: the sets of them that are sharded and unsharded together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import torch

from fxshard.config.precision import Precision
from fxshard.errors import ConfigError
from fxshard.ir.extensions import Extension
from fxshard.ir.layout import Grid
from fxshard.ir.names import unit_of
from fxshard.ir.tensor_parallel import Placed


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of the model (tied names are one Param).

    Attributes:
        fqn: its first name.
        aliases: all its names, `fqn` included.
        shape: of what is sharded: all of it, or what this rank has of one that is `placed`.
        dtype: dtype of the sharded parameter.
        requires_grad: False for a frozen parameter.
        unit: index of its unit.
        position: place among ``model.named_parameters()``: the order that optimizers see.
        compute_dtype: dtype of the unsharded parameter and of its gradient.
        shard_dim: the dimension that it is cut along.
        extension: of a tensor subclass, what it sends in place of its shard.
        placed: of a DTensor of tensor parallelism, where it is besides.
        mesh: name of the mesh whose ranks share it; "" for that of the model.
    """

    fqn: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    unit: int
    position: int
    compute_dtype: torch.dtype = None  # type: ignore[assignment]  # set below: `dtype`
    shard_dim: int = 0
    extension: Extension | None = None
    placed: Placed | None = None
    mesh: str = ""

    def __post_init__(self) -> None:
        if self.compute_dtype is None:
            object.__setattr__(self, "compute_dtype", self.dtype)

    @property
    def line(self) -> str:
        """Its name, shape, dtype and placements, alike on all ranks of the mesh."""
        shape, places = self.shape, [f"Shard({self.shard_dim})"]
        if self.placed is not None:
            shape = self.placed.shape
            places += [f"{place} over {self.placed.group}" for place in self.placed.placements]
        return f"parameter {self.fqn} {list(shape)} {self.dtype} {', '.join(places)}"


Reductions: TypeAlias = Literal["all", "shards", "none"]


@dataclasses.dataclass(frozen=True)
class Unit:
    """A set of parameters that move together.

    Attributes:
        index: position in the program's tuple of units; 0 is the root unit.
        fqn: FQN of the module ("" for the root unit); of several, that of the first.
        kind: class name of the module; equal kinds fold to one row in dumps.
        params: its parameters, in ``named_parameters`` order.
        ignored: parameters of its modules that are never sharded or communicated.
        ignored_modules: FQNs of its modules whose buffers stay as they are too.
        precision: dtypes of compute and reduction.
        reshard: what its parameters are between forward and backward: True sharded, False
            unsharded, n sharded over groups of n neighbouring ranks.
        stays: after backward its parameters are kept unsharded, for the next forward.
        others: FQNs of the further modules whose parameters move with those of the first.
        reduce: which reductions its gradients go through: "all"; "shards", the reduce-scatter
            without the all-reduce of a hybrid strategy, whose partial sums are accumulated; or
            "none": unsharded gradients are accumulated.
        divide_factor: an average of its gradients divides by this; None: as the options say.
        forward_ahead, backward_ahead: FQNs of the units that are launched when this one is
            unsharded; none: as the options say.
    """

    index: int
    fqn: str
    kind: str
    params: tuple[Param, ...]
    ignored: tuple[Param, ...] = ()
    ignored_modules: tuple[str, ...] = ()
    precision: Precision = dataclasses.field(default_factory=Precision)
    reshard: bool | int = True
    stays: bool = False
    others: tuple[str, ...] = ()
    reduce: Reductions = "all"
    divide_factor: float | None = None
    forward_ahead: tuple[str, ...] = ()
    backward_ahead: tuple[str, ...] = ()

    @property
    def fqns(self) -> tuple[str, ...]:
        """The FQNs of its modules."""
        return (self.fqn, *self.others)

    @property
    def by_mesh(self) -> list[tuple[str, ...]]:
        """The FQNs of its parameters, those on one mesh together."""
        found: dict[str, list[str]] = {}
        for param in self.params:
            found.setdefault(param.mesh, []).append(param.fqn)
        return list(map(tuple, found.values()))

    @property
    def ahead(self) -> dict[str, tuple[str, ...]]:
        """`forward_ahead` and `backward_ahead` by phase."""
        return {"forward": self.forward_ahead, "backward": self.backward_ahead}

    @property
    def name(self) -> str:
        """`fqns` as text, or "(root)"."""
        return ", ".join(self.fqns) or "(root)"


def index_of(units: Iterable[Unit]) -> dict[str, int]:
    """FQN of each module of each unit -> the index of the unit."""
    return {fqn: unit.index for unit in units for fqn in unit.fqns}


def with_precision(unit: Unit, precision: Precision) -> Unit:
    """`unit` computing in `precision`: only floating parameters are cast."""
    if precision.reduce_as_stored:
        stored = [p.dtype for p in unit.params if p.requires_grad and p.dtype.is_floating_point]
        if precision.reduce_dtype is None and stored:
            dtype = functools.reduce(torch.promote_types, stored)
            precision = dataclasses.replace(precision, reduce_dtype=dtype)
        precision = dataclasses.replace(precision, reduce_as_stored=False)
    params = tuple(_computing_in(param, precision) for param in unit.params)
    return dataclasses.replace(unit, params=params, precision=precision)


def _computing_in(param: Param, precision: Precision) -> Param:
    if param.extension is None:
        return dataclasses.replace(param, compute_dtype=precision.computes_in(param.dtype))
    own = param.extension.computing_in(precision)
    return dataclasses.replace(param, extension=own, compute_dtype=own.form.dtype)


def buffer_dtypes(
    units: tuple[Unit, ...], buffers: Mapping[str, torch.Tensor]
) -> dict[str, torch.dtype]:
    """The dtype of each floating buffer that the precision of its unit changes."""
    by_fqn = index_of(units)
    found: dict[str, torch.dtype] = {}
    for name, buffer in buffers.items():
        unit = units[unit_of([name], by_fqn)]
        if name.rpartition(".")[0] in unit.ignored_modules:
            continue
        wanted = unit.precision.buffer_dtype
        if wanted is not None and buffer.is_floating_point() and buffer.dtype is not wanted:
            found[name] = wanted
    return found


def check_reshard(units: tuple[Unit, ...], world: int, meshes: Iterable[Grid] = ()) -> None:
    """Raise ConfigError if the ranks cannot be cut into the groups that a unit asks for.

    Args:
        world: number of ranks that share a parameter.
        meshes: the ranks of parameters that have a mesh of their own.
    """
    ranks = {"": world} | {grid.name: grid.shards for grid in meshes}
    for unit in units:
        for mesh in {param.mesh for param in unit.params} or {""}:
            shards, copied = ranks[mesh], mesh and ranks[mesh] == 1
            if not isinstance(unit.reshard, bool) and not copied and shards % unit.reshard:
                raise ConfigError(
                    f"reshard_after_forward={unit.reshard} of unit {unit.name!r}: {shards} ranks "
                    f"cannot be cut into groups of {unit.reshard}. Take a divisor of {shards}."
                )
