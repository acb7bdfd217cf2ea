"""Where each row of each parameter is: all arithmetic on rows, padding and offsets is done here.

A parameter is cut by rows, by the rule of `torch.chunk`, which is DTensor's ``Shard(0)``: each rank
has ``ceil(rows / ranks)`` of them, the last ranks with fewer or none. Its shard is padded to that
number, so that every rank sends as many bytes. The shards of a unit lie one after the other in a
flat storage per dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import sympy
import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from fxshard.ir.units import Unit

Shape = Sequence[int]

# Along each dimension of the mesh by its name. A dimension more is an entry more.
PLACEMENTS: dict[str, Placement] = {"replicate": Replicate(), "shard": Shard(0)}


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """Where each row of one parameter is.

    Attributes:
        shape: of the parameter, on all ranks together.
        dtype: of the sharded parameter.
        unit: index of its unit.
        mesh: number of ranks along each dimension of the mesh.
        placements: per dimension of the mesh: ``Shard(0)``, or ``Replicate()`` where all ranks have
            the same. An ignored parameter is replicated along all of them.
        offset: place of its shard in the flat storage of its unit and dtype, in elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: int
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...] = tuple(PLACEMENTS.values())
    offset: int = 0

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts each dimension of the parameter is cut."""
        found = [1] * len(self.shape)
        for ranks, place in zip(self.mesh, self.placements, strict=True):
            if isinstance(place, Shard):
                found[place.dim] *= ranks
        return tuple(found)

    @functools.cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Of one rank's shard, with its padding."""
        return tuple(-(-n // parts) for n, parts in zip(self.shape, self.parts, strict=True))

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Of the shards of all ranks together, with their padding: what an all-gather leaves."""
        return tuple(n * parts for n, parts in zip(self.shard_shape, self.parts, strict=True))

    @property
    def padding(self) -> int:
        """Number of rows that all ranks together have too many."""
        return self.padded_shape[0] - self.shape[0] if self.shape else 0

    def rows(self, rank: int) -> range:
        """The rows that a rank has, without padding; empty for the last ranks of a short parameter.

        Args:
            rank: along the dimension of the mesh that shards; of a parameter with rows.
        """
        most, part = self.shard_shape[0], rank % self.parts[0]
        return range(min(part * most, self.shape[0]), min((part + 1) * most, self.shape[0]))

    def local_shape(self, rank: int = 0) -> tuple[int, ...]:
        """Of what a rank has, without padding; rank 0 never has less than another."""
        return (len(self.rows(rank)), *self.shape[1:]) if self.shape else ()

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, with its padding."""
        return math.prod(self.shard_shape)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard, with its padding."""
        return self.shard_numel * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes of the shards of all ranks, with their padding."""
        return math.prod(self.padded_shape) * self.dtype.itemsize

    @property
    def local_bytes(self) -> int:
        """Bytes of what rank 0 has, without padding."""
        return math.prod(self.local_shape()) * self.dtype.itemsize

    def shard_numel_over(self, ranks: sympy.Expr) -> sympy.Expr:
        """`shard_numel` over another number of ranks, which pads this parameter if this one does.

        Of a parameter that is not cut it is the same over any number.
        """
        if math.prod(self.parts) == 1:
            return sympy.Integer(self.shard_numel)
        rows = sympy.Integer(self.shape[0]) / ranks
        return (sympy.ceiling(rows) if self.padding else rows) * math.prod(self.shape[1:])

    def padded_numel_over(self, ranks: sympy.Expr) -> sympy.Expr:
        """Elements of all shards over another number of ranks (see `shard_numel_over`)."""
        return self.shard_numel_over(ranks) * (ranks if math.prod(self.parts) > 1 else 1)

    # -- the flat storage --------------------------------------------------------------------------

    @property
    def storage(self) -> tuple[int, torch.dtype]:
        """Which flat storage it lies in: that of its unit and dtype."""
        return self.unit, self.dtype

    @property
    def end(self) -> int:
        """Place after its shard in the flat storage, in elements."""
        return self.offset + self.shard_numel

    @property
    def alignment(self) -> int:
        """What the place of its shard is a multiple of, in bytes: shards lie without gaps."""
        return self.dtype.itemsize

    def shards_in(self, flat: Tensor, ranks: int) -> list[Tensor]:
        """Views of a flat storage: the padded shards of the ranks that it is for.

        Args:
            flat: elements of the storage (see `flat_numels`), for each rank as many.
            ranks: number of ranks; the shards that they have of a parameter lie one after the
                other, so that an unsharded parameter is a view too.
        """
        piece = flat[ranks * self.offset : ranks * self.end]
        return list(piece.view(ranks, *self.shard_shape).unbind())


def layouts(units: Iterable[Unit], ranks: int, replicas: int = 1) -> dict[str, ParamLayout]:
    """The layout of every parameter of `units`, the ignored ones too, by FQN.

    Args:
        units: in the order of their flat storages.
        ranks: number of ranks that parameters are sharded over.
        replicas: number of such groups of ranks, which hold the same shards.
    """
    mesh, replicated = (replicas, ranks), (Replicate(), Replicate())
    cut = {
        p.fqn: ParamLayout(p.shape, p.dtype, p.unit, mesh) for unit in units for p in unit.params
    }
    ignored = {
        p.fqn: ParamLayout(p.shape, p.dtype, p.unit, mesh, replicated)
        for unit in units
        for p in unit.ignored
    }
    return dict(zip(cut, in_flat_storage(cut.values()), strict=True)) | ignored


def in_flat_storage(params: Iterable[ParamLayout]) -> list[ParamLayout]:
    """The same, one after the other: each in the flat storage of its unit and dtype."""
    ends: dict[tuple[int, torch.dtype], int] = {}
    found = []
    for param in params:
        found.append(dataclasses.replace(param, offset=ends.get(param.storage, 0)))
        ends[param.storage] = found[-1].end
    return found


def flat_numels(params: Iterable[ParamLayout]) -> dict[tuple[int, torch.dtype], int]:
    """Elements of the flat storages that `params` lie in, for one rank, by unit and dtype."""
    found: dict[tuple[int, torch.dtype], int] = {}
    for param in params:
        found[param.storage] = max(param.end, found.get(param.storage, 0))
    return found


# -- rows of any tensor ----------------------------------------------------------------------------


def padding(rows: int, ranks: int) -> int:
    """How many rows over `ranks` ranks are padding."""
    return -rows % ranks


def gathered(shape: Shape, ranks: int) -> tuple[int, ...]:
    """Of the rows of `ranks` ranks, each of which has a tensor of this shape."""
    return (shape[0] * ranks, *shape[1:])


def part(shape: Shape, ranks: int) -> tuple[int, ...]:
    """Of one rank's part of a tensor of this shape, whose rows `ranks` ranks share evenly."""
    return (shape[0] // ranks, *shape[1:])


def part_of(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """A view: one rank's part of a tensor whose rows `ranks` ranks share evenly."""
    rows = tensor.shape[0] // ranks
    return tensor[rank * rows : (rank + 1) * rows]


def numel_over(numel: sympy.Expr, ranks: sympy.Expr, grows: int) -> sympy.Expr:
    """Elements of results that have ``ranks ** grows`` times the rows of a tensor of `numel`."""
    return numel * ranks**grows


# -- tensors that are packed into one --------------------------------------------------------------


def spans(shapes: Iterable[Shape]) -> list[tuple[int, int]]:
    """Begin and end, in elements, of tensors of these shapes that lie one after the other."""
    found, end = [], 0
    for shape in shapes:
        start, end = end, end + math.prod(shape)
        found.append((start, end))
    return found


def pieces(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Views of a flat tensor that holds tensors of these shapes, one after another."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def pieces_by_rank(flat: Tensor, ranks: int, shapes: Sequence[Shape]) -> list[Tensor]:
    """The same of a flat tensor in which such `pieces` of several ranks lie one after another.

    Returns:
        Per shape a view ``[ranks, elements]``.
    """
    return list(flat.view(ranks, -1).split([math.prod(shape) for shape in shapes], 1))
