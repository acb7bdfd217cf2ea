"""Updates that need all of a matrix: each rank computes those of the matrices that it owns.

Newton-Schulz steps (Muon) and preconditioners (Shampoo) multiply all rows of a matrix with each
other, and a rank has some of them. So each matrix is sent to one rank, its owner, which computes
the update and sends each rank the rows that it has. Owners are chosen by FLOPs, from what every
rank knows. Matrices travel in rounds: in each, one all-to-all brings every owner its next matrices,
and one takes the updates back. So a rank holds, besides two buffers, one matrix at a time.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol

import torch
from tabulate import tabulate
from torch import Tensor

from fxshard._torch.storages import storage_id
from fxshard.errors import StepError
from fxshard.ir.layout import ParamLayout, pieces

ROUND_BYTES = 64 * 2**20  # what an owner receives in a round, unless one matrix is larger

Rounds = list[list[list[int]]]  # per round and owner, the numbers of its matrices


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix whose update needs all of it.

    Attributes:
        fqn: of the parameter.
        layout: where its rows are.
        dtype: in which it is sent, and its update sent back.
        flops: that its update takes.
        copies, grams: how many matrices of its shape, and of its Gram matrix's, its update makes
            that are alive at once; so ranks are compared by memory.
    """

    fqn: str
    layout: ParamLayout
    dtype: torch.dtype
    flops: int
    copies: int = 2
    grams: int = 2

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, as it is sent."""
        return math.prod(self.layout.shape) * self.dtype.itemsize

    @property
    def _short(self) -> int:
        """The smaller of its sides; dimensions after the first count as columns."""
        rows = self.layout.shape[0]
        return min(rows, math.prod(self.layout.shape[1:]))

    @property
    def product(self) -> int:
        """What FLOPs of its Gram matrix are proportional to."""
        return math.prod(self.layout.shape) * self._short

    @property
    def workspace(self) -> int:
        """Bytes that its update allocates at most."""
        return self.copies * self.nbytes + self.grams * self._short**2 * self.dtype.itemsize


class Exchange(Protocol):
    """How the ranks that share parameters send matrices to their owners."""

    size: int
    rank: int
    device: torch.device  # of what is sent

    def stepping(
        self, matrices: Sequence[Matrix], schedule: Rounds
    ) -> AbstractContextManager[None]:
        """All of these ranks update these matrices in the block, by this schedule."""

    def all_to_all(
        self, into: Tensor, sent: Tensor, received: Sequence[int], given: Sequence[int]
    ) -> None:
        """Send each rank its part of `sent`, flat; its length in elements is in `given`."""


@dataclasses.dataclass(frozen=True)
class MatrixPlace:
    """Whose rows a tensor without data stands for, while a step is recorded.

    Attributes:
        fqn, layout: of the parameter.
        exchange: how its matrix is sent.
    """

    fqn: str
    layout: ParamLayout
    exchange: Exchange


def put_place(param: Tensor, place: MatrixPlace) -> None:
    """Let `param` stand for rows of a parameter."""
    param._fxshard_rows = place  # type: ignore[attr-defined]


def place_of(param: Tensor) -> MatrixPlace | None:
    """What `put_place` has put."""
    return getattr(param, "_fxshard_rows", None)


@dataclasses.dataclass(frozen=True)
class Update:
    """What is done with each matrix, by its number.

    Attributes:
        rows: makes what this rank sends of it, of its local shape.
        full: of all of it, on its owner, makes its update; may write into it.
        apply: takes this rank's rows of the update.
    """

    rows: Callable[[int], Tensor]
    full: Callable[[int, Tensor], Tensor]
    apply: Callable[[int, Tensor], None]


def rounds(
    matrices: Sequence[Matrix],
    ranks: int,
    limit: int = ROUND_BYTES,
    known: Mapping[str, int] = MappingProxyType({}),
) -> Rounds:
    """Who owns which matrix, and when it is sent; alike on every rank.

    The matrix of most FLOPs comes first, and each goes to the rank with the fewest so far: the most
    that a rank gets is at most 4/3 of what the best choice would give it (Graham, 1969). The rank
    that needs most memory, by what matrices say of their updates, is then called rank 0: it is the
    one that reports are about. Matrices that have an owner keep it, and the others go around them.

    Args:
        matrices: of one dtype.
        ranks: number of ranks that share them.
        limit: bytes that an owner receives in a round, unless one matrix is larger.
        known: owners of some matrices, by FQN.
    """
    order = sorted(range(len(matrices)), key=lambda i: (-matrices[i].flops, -matrices[i].nbytes, i))
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for i in order:
        if matrices[i].fqn in known:
            owned[known[matrices[i].fqn]].append(i)
    kept = any(owned)
    loads = [(sum(matrices[i].flops for i in mine), owner) for owner, mine in enumerate(owned)]
    heapq.heapify(loads)
    for i in order:
        if matrices[i].fqn not in known:
            load, owner = heapq.heappop(loads)
            owned[owner].append(i)
            heapq.heappush(loads, (load + matrices[i].flops, owner))
    queues = [_in_rounds(matrices, mine, limit) for mine in owned]
    if not kept:
        queues.sort(key=lambda queue: -max((_bytes(matrices, now) for now in queue), default=0))
    last = max(map(len, queues))
    return [[queue[at] if at < len(queue) else [] for queue in queues] for at in range(last)]


def _in_rounds(matrices: Sequence[Matrix], mine: Sequence[int], limit: int) -> list[list[int]]:
    found: list[list[int]] = []
    for i in mine:
        if found and sum(matrices[j].nbytes for j in (*found[-1], i)) <= limit:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _bytes(matrices: Sequence[Matrix], owned: Sequence[int]) -> int:
    """What an owner receives in a round, and allocates at most for one of these matrices."""
    most = 0
    for matrix in (matrices[i] for i in owned):
        most = max(most, matrix.workspace + matrix.nbytes * _is_copied(matrix, owned))
    return sum(matrices[i].nbytes for i in owned) + most


def _is_copied(matrix: Matrix, owned: Sequence[int]) -> bool:
    """False where what has arrived, rows of one matrix rank by rank, is the matrix."""
    return len(owned) > 1 or matrix.layout.dim > 0


def schedule(
    matrices: Sequence[Matrix], ranks: int, known: Mapping[str, int] = MappingProxyType({})
) -> Rounds:
    """`rounds` of matrices of any dtypes; a round has one."""
    found: Rounds = []
    for dtype in dict.fromkeys(matrix.dtype for matrix in matrices):
        members = [i for i, matrix in enumerate(matrices) if matrix.dtype is dtype]
        for now in rounds([matrices[i] for i in members], ranks, ROUND_BYTES, known):
            found.append([[members[at] for at in mine] for mine in now])
    return found


def most_flops(matrices: Sequence[Matrix], schedule: Rounds) -> int:
    """FLOPs of the rank that has most of them."""
    by_owner = zip(*schedule, strict=True)
    return max(sum(matrices[i].flops for mine in owner for i in mine) for owner in by_owner)


def lines(matrices: Sequence[Matrix], schedule: Rounds) -> list[str]:
    """The schedule as text, a line per owner and round: what ranks compare."""
    return [
        f"round {number}, rank {owner}: {', '.join(matrices[i].fqn for i in mine)}"
        for number, now in enumerate(schedule, 1)
        for owner, mine in enumerate(now)
        if mine
    ]


def table(matrices: Sequence[Matrix], schedule: Rounds) -> str:
    """The schedule as a table, of what each owner receives and computes."""
    rows = [
        (
            number,
            owner,
            ", ".join(matrices[i].fqn for i in mine),
            f"{sum(matrices[i].nbytes for i in mine) / 2**20:,.3f}",
            f"{sum(matrices[i].flops for i in mine) / 1e9:,.3f}",
        )
        for number, now in enumerate(schedule, 1)
        for owner, mine in enumerate(now)
        if mine
    ]
    headers = ("round", "owner", "full matrices", "MiB", "GFLOP")
    aligned = ("right", "right", "left", "right", "right")
    return tabulate(rows, headers, tablefmt="simple", colalign=aligned, disable_numparse=True)


def step(
    matrices: Sequence[Matrix],
    update: Update,
    exchange: Exchange,
    owners: dict[str, int] | None = None,
) -> None:
    """Update matrices: collective over the ranks that share them.

    Args:
        matrices: the same, in the same order, on all of these ranks.
        update: what to do with each.
        exchange: the ranks.
        owners: by FQN, of earlier steps, for updates that keep something there; new ones are added.

    Raises:
        StepError: an update has another shape than its matrix.
    """
    owners = {} if owners is None else owners
    plan = schedule(matrices, exchange.size, owners)
    for now in plan:
        owners.update((matrices[i].fqn, owner) for owner, mine in enumerate(now) for i in mine)
    with exchange.stepping(matrices, plan):
        for owned in plan:
            if exchange.size == 1:
                for i in owned[0]:
                    _alone(matrices[i], update, i)
            else:
                _round(matrices, owned, update, exchange)


def _alone(matrix: Matrix, update: Update, number: int) -> None:
    """Update a matrix of which this rank has all rows."""
    rows = update.rows(number)
    full = torch.empty_like(rows, dtype=matrix.dtype).copy_(rows)
    del rows
    update.apply(number, _updated(matrix, update, number, full))


def _round(
    matrices: Sequence[Matrix], owned: list[list[int]], update: Update, exchange: Exchange
) -> None:
    """One all-to-all to the owners and one back."""
    rank, order = exchange.rank, [i for mine in owned for i in mine]
    given = [sum(_numel(matrices[i], rank) for i in mine) for mine in owned]
    received = [sum(_numel(matrices[i], r) for i in owned[rank]) for r in range(exchange.size)]
    sent = torch.empty(sum(given), dtype=matrices[order[0]].dtype, device=exchange.device)
    places = pieces(sent, [matrices[i].layout.local_shape(rank) for i in order])
    for i, place in zip(order, places, strict=True):
        place.copy_(update.rows(i))
    full = sent.new_empty(sum(received))
    exchange.all_to_all(full, sent, received, given)
    _on_owner(matrices, owned[rank], full.split(received), full, update)
    exchange.all_to_all(sent, full, given, received)
    del full
    for i, place in zip(order, places, strict=True):
        update.apply(i, place)


def _on_owner(
    matrices: Sequence[Matrix],
    mine: Sequence[int],
    by_rank: Sequence[Tensor],
    received: Tensor,
    update: Update,
) -> None:
    """Put updates in the place of the matrices that this rank has received."""
    shapes = [[matrices[i].layout.local_shape(r) for i in mine] for r in range(len(by_rank))]
    parts = [pieces(part, shape) for part, shape in zip(by_rank, shapes, strict=True)]
    for at, i in enumerate(mine):
        layout = matrices[i].layout
        if not _is_copied(matrices[i], mine):
            full = received.view(layout.shape)
        else:
            full = received.new_empty(layout.shape)
            for rank, part in enumerate(parts):
                layout.rows_of(full, rank).copy_(part[at])
        found = _updated(matrices[i], update, i, full)
        if storage_id(found) == storage_id(received):
            found = found.clone()  # its rows may lie where other ranks' are written to
        for rank, part in enumerate(parts):
            part[at].copy_(layout.rows_of(found, rank))
        del full, found  # before the next one is made


def _updated(matrix: Matrix, update: Update, number: int, full: Tensor) -> Tensor:
    found = update.full(number, full)
    if found.shape != full.shape:
        raise StepError(
            f"the update of {matrix.fqn!r}, of shape {list(full.shape)}, has the shape "
            f"{list(found.shape)}: expected the same, so that each rank has its rows of it."
        )
    return found


def _numel(matrix: Matrix, rank: int) -> int:
    return math.prod(matrix.layout.local_shape(rank))
