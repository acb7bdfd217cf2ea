"""What is written down of a model of few blocks -> what it would be of all of them.

A sequence (operators of a rehearsal, calls, nodes of a phase) is cut into the stretch of each
block. Two neighbouring stretches, the *templates*, must be each other's image; those of the missing
blocks are written as further images, and whatever lies after them is what it was.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fxshard._torch import export

OUTSIDE = -1  # the "run" of what is in no block


class Unproven(Exception):
    """Why a model is not stamped: nothing failed, it is captured flat."""


class Wider(Unproven):
    """More blocks must stay: sums of gradients reach over several."""


class Formless(Unproven):
    """A rehearsal needs tensors that are more than their form."""


class BlockPlace(NamedTuple):
    """Where something is written.

    Attributes:
        kind: of what: "leaf" (a parameter or buffer), "call", "region" (a checkpoint), "line" (an
            operator of a rehearsal), "forward" and "backward" (a node of the graph), "result".
        run: number of the run of blocks, or OUTSIDE.
        block: its block; outside: how many runs have been left before.
        position: in the stretch of that block; a name for leaves and results.
    """

    kind: str
    run: int
    block: int
    position: Any


@dataclasses.dataclass(slots=True)
class SequenceItem:
    """One thing in a sequence: what it is, and what it refers to."""

    place: BlockPlace
    key: Any
    refs: tuple[BlockPlace, ...]


@dataclasses.dataclass(frozen=True)
class BlockRun:
    """Blocks in which a pattern of `period` blocks repeats, some of which are left out.

    Attributes:
        paths: FQNs of the lists that hold them; "" is the model itself.
        names: of the blocks, the same in each list.
        period: blocks after which the next is like the first.
        kept: blocks in front of those that are left out.
        removed: blocks that are left out, a multiple of `period`.
    """

    paths: tuple[str, ...]
    names: tuple[str, ...]
    period: int = 1
    kept: int = 0
    removed: int = 0

    @property
    def length(self) -> int:
        """Number of blocks."""
        return len(self.names)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def real(self, block: int) -> int:
        """Number among all blocks of one of those that are left."""
        return block if block < self.kept else block + self.removed

    def short(self, block: int) -> int | None:
        """Number among those that are left; None for one that is not."""
        if block < self.kept:
            return block
        return block - self.removed if block >= self.kept + self.removed else None

    def template(self, block: int) -> int:
        """The block in front of those that are left out that one of them is an image of."""
        return self.kept - self.period + (block - self.kept) % self.period

    @property
    def full(self) -> BlockRun:
        """The same with no block left out."""
        return dataclasses.replace(self, removed=0)

    def split(self, name: str) -> tuple[int, str] | None:
        """Block, and the rest with the number of its list, of an FQN inside of a block."""
        for number, path in enumerate(self.paths):
            prefix = f"{path}." if path else ""
            if name.startswith(prefix):
                first, _, rest = name[len(prefix) :].partition(".")
                if first in self._numbers:
                    return self._numbers[first], f"{number}.{rest}"
        return None

    def joined(self, block: int, rest: str) -> str:
        """The FQN that `split` split."""
        number, _, inner = rest.partition(".")
        return ".".join(
            part for part in (self.paths[int(number)], self.names[block], inner) if part
        )


Runs = tuple[BlockRun, ...]


def place_of(name: str, runs: Runs, kind: str = "leaf") -> BlockPlace:
    """The place of an FQN."""
    for number, run in enumerate(runs):
        found = run.split(name)
        if found is not None:
            return BlockPlace(kind, number, *found)
    return BlockPlace(kind, OUTSIDE, 0, name)


def name_at(place: BlockPlace, runs: Runs) -> str:
    """The FQN of `place_of`."""
    if place.run == OUTSIDE:
        return str(place.position)
    return runs[place.run].joined(place.block, place.position)


def among_left(place: BlockPlace, runs: Runs) -> BlockPlace:
    """A place in the model of fewer blocks, of one in the full model.

    Raises:
        Unproven: its block is left out.
    """
    if place.run == OUTSIDE:
        return place
    block = runs[place.run].short(place.block)
    if block is None:
        raise Unproven(f"a block that was left out is used: {name_at(place, runs)}")
    return place._replace(block=block)


Label = tuple[int, int] | None  # run and block that something belongs to


def cut(labels: Sequence[Label], *, descending: bool = False) -> list[tuple[int, int, int]]:
    """Run, block and position in its stretch, of each thing of a sequence.

    A block's stretch ends with the last thing that is its own. What lies between two of them (a
    residual sum in the parent's loop, a sum of gradients) belongs to the second.

    Raises:
        Unproven: blocks do not follow each other in order.
    """
    last: dict[tuple[int, int], int] = {}
    first: dict[tuple[int, int], int] = {}
    for i, label in enumerate(labels):
        if label is not None:
            last[label] = i
            first.setdefault(label, i)
    owner: list[Label] = [None] * len(labels)
    before: tuple[int, int] | None = None
    end = -1
    for label in sorted(last, key=last.__getitem__):
        run, block = label
        if first[label] <= end:
            raise Unproven("the operators of two blocks interleave")
        follows = before is not None and before[0] == run
        if follows and before is not None and (before[1] > block) != descending:
            raise Unproven("blocks do not run in the order of their list")
        start = end + 1 if follows else first[label]
        owner[start : last[label] + 1] = [label] * (last[label] + 1 - start)
        before, end = label, last[label]
    runs = [key for key, _ in itertools.groupby(label[0] for label in owner if label)]
    if len(set(runs)) != len(runs):
        raise Unproven("blocks of two lists take turns")
    return _numbered(owner)


def _numbered(owner: Sequence[Label]) -> list[tuple[int, int, int]]:
    """Positions count back from the end of a stretch: the first block's begins later than others'.

    Outside they count from 0.
    """
    sizes = collections.Counter(label for label in owner if label is not None)
    found: list[tuple[int, int, int]] = []
    counts: dict[tuple[int, int], int] = {}
    left: set[int] = set()
    for label in owner:
        if label is not None:
            left.add(label[0])
        place = label or (OUTSIDE, len(left))
        position = counts.get(place, -sizes[label] if label else 0)
        counts[place] = position + 1
        found.append((*place, position))
    return found


class Stamp:
    """The full sequences that follow from those of a model of fewer blocks.

    Args:
        runs: what was left out.
        sequences: kind -> its items in order, of the model of fewer blocks. "leaf" and "result"
            have no order of their own.

    Raises:
        Unproven: the templates are not each other's image.
    """

    def __init__(self, runs: Runs, sequences: dict[str, list[SequenceItem]]) -> None:
        self.runs: Runs = runs
        self.sequences: dict[str, list[SequenceItem]] = sequences
        self._known: set[BlockPlace] = set()  # what templates refer to, all of them alike
        # Per reference of a template: relative.
        self._moves: dict[BlockPlace, tuple[bool, ...]] = {}
        self._blocks: dict[tuple[str, int, int], list[SequenceItem]] = {}
        self._starts: dict[tuple[str, int], int] = {}  # first index of a run in a sequence
        self._index: dict[BlockPlace, int] = {}
        self._where: dict[BlockPlace, list[tuple[BlockPlace, bool]]] = {}
        for kind, items in sequences.items():
            for i, item in enumerate(items):
                place = item.place
                self._blocks.setdefault((kind, place.run, place.block), []).append(item)
                self._starts.setdefault((kind, place.run), i)
                self._index[place] = i
        for number, run in enumerate(runs):
            for kind in sequences:
                for block in range(run.kept - run.period, run.kept):
                    self._compare(kind, number, block, run.period)

    def _compare(self, kind: str, run: int, block: int, period: int) -> None:
        first = self._blocks.get((kind, run, block), [])
        second = self._blocks.get((kind, run, block + period), [])
        moves = relations(first, second, run, period)
        if isinstance(moves, str):
            where = f"{self.runs[run].paths[0]}.{block}"
            raise Unproven(f"the {kind} of {where} is not that of the next one: {moves}")
        for a, b, relative in zip(first, second, moves, strict=True):
            self._moves[a.place] = self._moves[b.place] = relative
            self._known.update(
                ref for ref, moved in zip(a.refs, relative, strict=True) if not moved
            )

    @property
    def shared(self) -> Iterator[tuple[SequenceItem, int]]:
        """Items of templates, and the number of a reference that all blocks have in common."""
        for place, moves in self._moves.items():
            item = self.sequences[place.kind][self._index[place]]
            yield from ((item, i) for i, relative in enumerate(moves) if not relative)

    def written(self, kind: str) -> Iterator[tuple[SequenceItem, int]]:
        """Each item of the full sequence: the one that it is an image of, and blocks between."""
        descending = kind == "backward"
        done: set[int] = set()
        for item in self.sequences[kind]:
            number, block = item.place.run, item.place.block
            if number != OUTSIDE and number not in done:
                run = self.runs[number]
                if (block < run.kept) if descending else (block >= run.kept):
                    done.add(number)
                    yield from self._missing(kind, number, descending)
            yield item, 0

    def _missing(
        self, kind: str, number: int, descending: bool
    ) -> Iterator[tuple[SequenceItem, int]]:
        run = self.runs[number]
        blocks = range(run.kept, run.kept + run.removed)
        for block in reversed(blocks) if descending else blocks:
            template = run.template(block)
            for item in self._blocks.get((kind, number, template), []):
                yield item, block - template

    def place(self, item: SequenceItem, shift: int) -> BlockPlace:
        """Where the image of `item` is."""
        kind, number, block, position = item.place
        if number == OUTSIDE:
            return item.place
        return BlockPlace(kind, number, self.runs[number].real(block) + shift, position)

    def refs(self, item: SequenceItem, shift: int) -> list[BlockPlace]:
        """What the image of `item` refers to.

        Raises:
            Unproven: it cannot be said if the distance or the number of a block is meant.
        """
        where = self._where.get(item.place)
        if where is None:
            where = self._where[item.place] = self._meant(item)
        return [
            BlockPlace(place.kind, place.run, place.block + shift, place.position)
            if moves
            else place
            for place, moves in where
        ]

    def _meant(self, item: SequenceItem) -> list[tuple[BlockPlace, bool]]:
        """What `item` itself refers to, and whether its images refer to the image of that."""
        moves = self._moves.get(item.place)
        own, own_block = item.place.run, item.place.block
        found: list[tuple[BlockPlace, bool]] = []
        for i, ref in enumerate(item.refs):
            number = ref.run
            if number == OUTSIDE:
                found.append((ref, False))
            elif moves is not None and moves[i]:
                block = self.runs[own].real(own_block) + ref.block - own_block
                found.append((ref._replace(block=block), True))
            elif ref in self._known or self._same_side(item, ref):
                found.append((ref._replace(block=self.runs[number].real(ref.block)), False))
            else:
                name = self.runs[number].joined(ref.block, "0")
                raise Unproven(f"something outside of its neighbours refers to {name}")
        return found

    def _same_side(self, item: SequenceItem, ref: BlockPlace) -> bool:
        """True if no missing block is between an item and what it refers to."""
        after = ref.block >= self.runs[ref.run].kept
        kind, number, block, _ = item.place
        if number == ref.run:
            return (block >= self.runs[number].kept) == after
        if kind == "result":
            return True
        start = self._starts.get((kind, ref.run))
        if start is None:
            return after == (kind == "backward")
        return ((self._index[item.place] > start) != (kind == "backward")) == after


def relations(
    first: Sequence[SequenceItem], second: Sequence[SequenceItem], run: int, distance: int
) -> list[tuple[bool, ...]] | str:
    """Of each reference in `first`: True if its image in `second` lies `distance` blocks on.

    Else it is the very same. A text says why `second` is no image of `first`.
    """
    if len(first) != len(second):
        return f"{len(first)} and {len(second)} of them"
    found: list[tuple[bool, ...]] = []
    for a, b in zip(first, second, strict=True):
        if a.key != b.key or len(a.refs) != len(b.refs):
            return f"{described(a.key)} and {described(b.key)}, or their constants"
        moves: list[bool] = []
        for u, v in zip(a.refs, b.refs, strict=True):
            if u == v:
                moves.append(False)
            elif u.run == run and v == (u.kind, run, u.block + distance, u.position):
                moves.append(True)
            else:
                return f"{described(a.key)} reads what is elsewhere"
        found.append(tuple(moves))
    return found


def described(key: Any) -> str:
    """What an item is, for people: its operator, else the beginning of all of it."""
    for part in key if isinstance(key, tuple) else ():
        if isinstance(part, export.OpOverload):
            return str(part)
    text = str(key)
    return text if len(text) < 100 else text[:99] + "…"
