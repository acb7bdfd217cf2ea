"""Where each row of each parameter is: all arithmetic on rows, padding and offsets is done here.

A parameter is cut along one dimension, by the rule of `torch.chunk`, which is DTensor's ``Shard``:
each rank has ``ceil(n / ranks)`` of its ``n`` rows, the last ranks with fewer or none. By default
that is dimension 0; "rows" of a parameter that is cut along another one are the indices along that
one. A shard is padded to as many rows, so that every rank sends as many bytes: what a rank has lies
contiguous at its beginning, and the padding after it. The shards of a unit lie one after the other
in a flat storage per dtype and mesh.

Shards cut along dimension 0, one after the other, are the parameter. Cut along another one, they
have to be copied into their places, and gradients into the shards that are sent (`both_places`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

Shape = Sequence[int]


def placements(dim: int = 0) -> dict[str, Placement]:
    """Of a parameter cut along `dim`, along each dimension of the mesh by its name.

    A dimension more is an entry more.
    """
    return {"replicate": Replicate(), "shard": Shard(dim)}


@dataclasses.dataclass(frozen=True)
class Grid:
    """The ranks of one mesh, as the parameters on it see them.

    Attributes:
        shards: number of ranks that share a parameter.
        replicas: number of such groups of ranks, which hold the same shards.
        name: "" for the mesh of the model; that of another one stands in the names of its groups.
        batches: of how many ranks' batches a gradient is, if there are more than the ranks: those
            of experts are of all tokens that have come to them.
    """

    shards: int
    replicas: int = 1
    name: str = ""
    batches: int = 0

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.shards * self.replicas

    @property
    def divisor(self) -> int:
        """What the sum of gradients over its ranks is divided by, for an average."""
        return self.batches or self.ranks

    @property
    def text(self) -> str:
        """For lines about parameters on it; empty for the mesh of the model."""
        of = f" batches={self.batches}" if self.batches else ""
        return f" mesh={self.name} ({self.replicas} x {self.shards}){of}" if self.name else ""

    def group(self, kind: str) -> str:
        """The name of a group of its ranks: ``"shard"``, ``"replicate"`` or ``"reshard<n>"``; on
        another mesh than the model's, ``"shard@name"``.
        """
        return f"{kind}@{self.name}" if self.name else kind

    def size(self, group: str) -> int | None:
        """Number of ranks of one of its groups, by the full name; None if it has no such group."""
        kind, _, name = group.partition("@")
        count = kind.removeprefix("reshard")
        known = {"shard": self.shards, "replicate": self.replicas}
        found = known.get(kind) or (int(count) if count.isdecimal() else None)
        return found if name == self.name else None


def kind_of_group(group: str | None) -> str:
    """``"shard"`` of ``"shard@name"``: the part that its ranks have in whichever mesh; or ""."""
    return (group or "").partition("@")[0]


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """Where each row of one parameter is.

    Attributes:
        shape: of the parameter, on all ranks together.
        dtype: of the sharded parameter.
        unit: index of its unit.
        mesh: number of ranks along each dimension of the mesh.
        placements: per dimension of the mesh: ``Shard``, or ``Replicate()`` where all ranks have
            the same. An ignored parameter is replicated along all of them.
        offset: place of its shard in its flat storage, in elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: int
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...] = tuple(placements().values())
    offset: int = 0

    @functools.cached_property
    def dim(self) -> int:
        """The dimension that it is cut along; 0 if all ranks have all of it."""
        return next((dim for dim, parts in enumerate(self.parts) if parts > 1), 0)

    @functools.cached_property
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

    def chunk_shape(self, ranks: int) -> tuple[int, ...]:
        """Of what a rank has, padded, where a group of `ranks` holds as many padded rows as all."""
        return part(self.padded_shape, ranks, self.dim)

    @property
    def unsharded_shape(self) -> tuple[int, ...]:
        """Of what an unshard leaves: padded where the all-gather's buffer is the parameter."""
        return self.shape if self.dim else self.padded_shape

    @property
    def padding(self) -> int:
        """Number of rows that all ranks together have too many."""
        return self.padded_shape[self.dim] - self.shape[self.dim] if self.shape else 0

    def rows(self, rank: int) -> range:
        """The rows that a rank has, without padding; empty for the last ranks of a short parameter.

        Args:
            rank: along the dimension of the mesh that shards; of a parameter with rows.
        """
        most, part = self.shard_shape[self.dim], rank % self.parts[self.dim]
        return range(self.shape[self.dim])[part * most : (part + 1) * most]

    def rows_of(self, full: Tensor, rank: int) -> Tensor:
        """A view: what a rank has of a full tensor of the parameter's shape."""
        rows = self.rows(rank)
        return full.narrow(self.dim, min(rows.start, full.shape[self.dim]), len(rows))

    def local_shape(self, rank: int = 0) -> tuple[int, ...]:
        """Of what a rank has, without padding; rank 0 never has less than another."""
        return with_rows(self.shape, self.dim, len(self.rows(rank))) if self.shape else ()

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

    def full_bytes(self, local_bytes: int) -> int:
        """Bytes of all of a tensor that is cut as this one, of which rank 0 has so many."""
        return local_bytes // max(1, math.prod(self.local_shape())) * math.prod(self.shape)

    def shard_numel_over(self, ranks: sympy.Expr) -> sympy.Expr:
        """`shard_numel` over another number of ranks, which pads this parameter if this one does.

        Of a parameter that is not cut it is the same over any number.
        """
        if math.prod(self.parts) == 1:
            return sympy.Integer(self.shard_numel)
        rows = sympy.Integer(self.shape[self.dim]) / ranks
        rest = math.prod(with_rows(self.shape, self.dim, 1))
        return (sympy.ceiling(rows) if self.padding else rows) * rest

    def padded_numel_over(self, ranks: sympy.Expr) -> sympy.Expr:
        """Elements of all shards over another number of ranks (see `shard_numel_over`)."""
        return self.shard_numel_over(ranks) * (ranks if math.prod(self.parts) > 1 else 1)

    def unsharded_numel_over(self, ranks: sympy.Expr) -> sympy.Expr:
        """Elements of `unsharded_shape` over another number of ranks."""
        return sympy.Integer(math.prod(self.shape)) if self.dim else self.padded_numel_over(ranks)

    # -- the flat storage --------------------------------------------------------------------------

    @property
    def storage(self) -> tuple[int, torch.dtype, tuple[int, ...]]:
        """Which flat storage it lies in: that of its unit, dtype and mesh."""
        return self.unit, self.dtype, self.mesh

    @property
    def end(self) -> int:
        """Place after its shard in the flat storage, in elements."""
        return self.offset + self.shard_numel

    def shards_in(self, flat: Tensor, ranks: int) -> list[Tensor]:
        """Views of a flat storage: the padded shards of the ranks that it is for.

        Args:
            flat: elements of the storage (see `flat_numels`), for each rank as many.
            ranks: number of ranks; the shards that they have of a parameter lie one after the
                other, so that an unsharded parameter is a view too. (Cut along another dimension
                than 0, the parameter itself lies there: see `chunk_of`.)
        """
        piece = flat[ranks * self.offset : ranks * self.end]
        return list(piece.view(ranks, *self.shard_shape).unbind())


def layouts(
    units: Iterable[Any], ranks: int, replicas: int = 1, others: Iterable[Grid] = ()
) -> dict[str, ParamLayout]:
    """The layout of every parameter of `units`, the ignored ones too, by FQN.

    Args:
        units: `fxshard.ir.units.Unit`, which know of rows by this file, in the order of their flat
            storages.
        ranks: number of ranks that parameters are sharded over.
        replicas: number of such groups of ranks, which hold the same shards.
        others: the meshes of parameters that have one of their own.
    """
    grids = {"": (replicas, ranks)} | {grid.name: (grid.replicas, grid.shards) for grid in others}
    replicated = (Replicate(), Replicate())
    cut = {
        p.fqn: ParamLayout(
            *(p.shape, p.dtype, p.unit, grids[p.mesh]), tuple(placements(p.shard_dim).values())
        )
        for unit in units
        for p in unit.params
    }
    ignored = {
        p.fqn: ParamLayout(p.shape, p.dtype, p.unit, grids[""], replicated)
        for unit in units
        for p in unit.ignored
    }
    return dict(zip(cut, in_flat_storage(cut.values()), strict=True)) | ignored


def in_flat_storage(params: Iterable[ParamLayout]) -> list[ParamLayout]:
    """The same, one after the other: each in its flat storage."""
    ends: dict[Any, int] = {}
    found = []
    for param in params:
        found.append(dataclasses.replace(param, offset=ends.get(param.storage, 0)))
        ends[param.storage] = found[-1].end
    return found


def flat_numels(params: Iterable[ParamLayout]) -> dict[Any, int]:
    """Elements of the flat storages that `params` lie in, for one rank (`ParamLayout.storage`)."""
    found: dict[Any, int] = {}
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


def part(shape: Shape, ranks: int, dim: int = 0) -> tuple[int, ...]:
    """Of one rank's part of a tensor of this shape, whose rows `ranks` ranks share evenly."""
    return with_rows(shape, dim, shape[dim] // ranks)


def with_rows(shape: Shape, dim: int, rows: int) -> tuple[int, ...]:
    """A shape with another number of rows."""
    return (*shape[:dim], rows, *shape[dim + 1 :])


def part_of(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """A view: one rank's part of a tensor whose rows `ranks` ranks share evenly."""
    rows = tensor.shape[0] // ranks
    return tensor[rank * rows : (rank + 1) * rows]


def numel_over(numel: sympy.Expr, ranks: sympy.Expr, grows: int) -> sympy.Expr:
    """Elements of results that have ``ranks ** grows`` times the rows of a tensor of `numel`."""
    return numel * ranks**grows


# -- tensors that are cut along any dimension ----------------------------------------------------


Places = list[tuple[Tensor, Tensor]]  # pairs of views of one shape: of chunks, of a full tensor


def both_places(stacked: Tensor, full: Tensor, chunk: Shape, dim: int) -> Places:
    """Where elements are in the chunks of all ranks, and where in the full tensor.

    Args:
        stacked: ``[ranks, elements]``: a padded chunk of each rank, one after the other.
        full: without padding.
        chunk: shape of a padded chunk.
        dim: that `full` is cut along.

    Returns:
        Pairs of views; padding is in none of them.
    """
    ranks, rows = stacked.shape[0], full.shape[dim]
    if rows == ranks * chunk[dim]:  # one copy does it
        if not dim and full.is_contiguous():
            return [(stacked, full.view(stacked.shape))]  # three views fewer per parameter
        return [(stacked.unflatten(1, tuple(chunk)), _by_rank(full, ranks, dim))]
    found = []
    for sent, start in zip(stacked, range(0, rows, chunk[dim]), strict=False):
        inside = full.narrow(dim, start, min(chunk[dim], rows - start))
        found.append((sent[: inside.numel()].view(inside.shape), inside))
    return found


def chunk_of(full: Tensor, dim: int, rows: int, rank: int) -> Tensor:
    """A copy: the chunk of one rank, padded to `rows`, of a full tensor without padding."""
    made = full.new_zeros(with_rows(full.shape, dim, rows))
    start = min(rank * rows, full.shape[dim])
    inside = full.narrow(dim, start, min(rows, full.shape[dim] - start))
    made.view(-1)[: inside.numel()].view(inside.shape).copy_(inside)
    return made


def joined(stacked: Tensor, layout: ParamLayout) -> Tensor:
    """The parameter, or a tensor like it, of the padded shards of all ranks.

    A view where it is cut along dimension 0, else a copy.
    """
    if not layout.dim:
        return stacked.view(layout.padded_shape)[: layout.shape[0]]
    full = stacked.new_empty(layout.shape)
    ranks = layout.parts[layout.dim]
    places = both_places(stacked.view(ranks, -1), full, layout.shard_shape, layout.dim)
    for sent, inside in places:
        inside.copy_(sent)
    return full


def as_sent(padded: Tensor, layout: ParamLayout) -> Tensor:
    """A padded gradient of `padded_shape`, as a reduction takes it: rank by rank, contiguous.

    Padding stays in the rows after those of the parameter, so that shards of gradients have it
    along `dim` (`without_padding`), where those of parameters have it at their end.
    """
    if not layout.dim:
        return padded
    ranks = layout.parts[layout.dim]
    by_rank = _by_rank(padded, ranks, layout.dim).contiguous()
    return by_rank.view(gathered(layout.shard_shape, ranks))


def without_padding(shards: Sequence[Tensor], layout: ParamLayout, rows: int) -> Tensor:
    """So many rows of a gradient, contiguous, of shards that `as_sent` has cut."""
    together = shards[0] if len(shards) == 1 else torch.cat(list(shards), layout.dim)
    if together.shape[layout.dim] == rows:
        return together
    return together.narrow(layout.dim, 0, rows).contiguous()


def split_by_rank(shape: Shape, ranks: int, dim: int) -> tuple[list[int], list[int]]:
    """How a tensor whose rows `ranks` ranks share evenly becomes theirs, one after the other.

    Returns:
        A view of this shape, in which the ranks are a dimension of their own, and the order of
        dimensions that puts it first.
    """
    split = [*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :]]
    return split, [dim, *range(dim), *range(dim + 1, len(split))]


def _by_rank(full: Tensor, ranks: int, dim: int) -> Tensor:
    split, order = split_by_rank(full.shape, ranks, dim)
    return full.view(split).permute(order)


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


def unpacked(
    ranks: int, chunks: Sequence[Shape], dims: Sequence[int] = (), lengths: Sequence[int] = ()
) -> list[tuple[int, ...]]:
    """Shapes of tensors of which `ranks` ranks each have a padded chunk.

    Args:
        ranks: number of ranks.
        chunks: shape of a rank's chunk of each.
        dims: that they are cut along; 0 if there are none.
        lengths: numbers of rows that all ranks together have of each; all, if there are none.
    """
    if not dims:
        return [gathered(chunk, ranks) for chunk in chunks]
    both = zip(chunks, dims, lengths, strict=True)
    return [with_rows(chunk, dim, length) for chunk, dim, length in both]


def unpacked_places(
    packed: Tensor,
    chunks: Sequence[Shape],
    dims: Sequence[int] = (),
    lengths: Sequence[int] = (),
) -> tuple[list[Tensor], Places]:
    """Fresh tensors whose chunks lie in one buffer, rank by rank, and `both_places` of them.

    Args:
        packed: of the chunks of all ranks.
        chunks, dims, lengths: as of `unpacked`.
    """
    ranks = packed.numel() // sum(map(math.prod, chunks))
    made = [packed.new_empty(shape) for shape in unpacked(ranks, chunks, dims, lengths)]
    found = pieces_by_rank(packed, ranks, chunks)
    every = zip(found, made, chunks, dims or [0] * len(made), strict=True)
    return made, [place for each in every for place in both_places(*each)]


def pieces_by_rank(flat: Tensor, ranks: int, shapes: Sequence[Shape]) -> list[Tensor]:
    """The same of a flat tensor in which such `pieces` of several ranks lie one after another.

    Returns:
        Per shape a view ``[ranks, elements]``.
    """
    return list(flat.view(ranks, -1).split([math.prod(shape) for shape in shapes], 1))
