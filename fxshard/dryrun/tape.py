"""Tape: what a run allocated and freed, operator by operator, in the terms of a `Ledger`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fxshard.ir.calls import Call
from fxshard.memory.category import Category
from fxshard.memory.ledger import BEFORE, Ledger, LiveRange, Moment, Phase


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a stretch of the run begins.

    Attributes:
        point: the first of it.
        phase: "forward", "loss", "loss backward", "backward", "optimizer" or "between".
        micro_batch: forwards of this step before it, less one; -1 before the first and after the
            last backward.
    """

    point: int
    phase: str
    micro_batch: int

    def goes_on(self, other: Mark) -> bool:
        """True if `other` is of the same phase."""
        return (self.phase, self.micro_batch) == (other.phase, other.micro_batch)


class Tape:
    """Points and live ranges of a whole run; ticks are those of `fxshard.memory.ledger`.

    Attributes:
        moments: what ran at each point; the first is the start.
        ranges: every storage, in the order of birth; one that was freed and allocated again by
            ``resize_`` is two.
        marks: where phases change.
        ends: numbers of the points that are the last of a step.
        calls: per step and micro-batch, every call of a module.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = [Moment("start")]
        self.ranges: list[LiveRange] = []
        self.marks: list[Mark] = []
        self.ends: list[int] = []
        self.calls: list[list[list[Call]]] = [[]]

    @property
    def last(self) -> int:
        """Number of the last point."""
        return len(self.moments) - 1

    def point(self, moment: Moment, phase: str, micro_batch: int) -> int:
        """Something runs; returns the tick at which its results are born."""
        self.moments.append(moment)
        mark = Mark(self.last, phase, micro_batch)
        if not self.marks or not self.marks[-1].goes_on(mark):
            self.marks.append(mark)
        return 2 * self.last

    def born(self, size: int, category: Category, *, host: bool) -> LiveRange:
        """A storage appears at the last point."""
        at = self.moments[-1]
        made = LiveRange(
            *(len(self.ranges), at.node, at.op, at.module, category, size),
            *(host, at.stream, at.line, 2 * self.last),
        )
        self.ranges.append(made)
        return made

    def died(self, gone: LiveRange) -> None:
        """A storage is freed after the last point."""
        gone.died = 2 * self.last + 1

    def end_step(self) -> None:
        """A step is over with the last point."""
        self.ends.append(self.last)
        self.calls.append([])

    def ledger(self, step: int) -> Ledger:
        """The live ranges of one step.

        Args:
            step: from 0; -1 is the last that is over.
        """
        ends = [0, *self.ends]
        number = step % len(self.ends)
        first, last = ends[number], ends[number + 1]
        made = Ledger()
        made.phases = list(self._phases(first, last))
        starts = {phase.start for phase in made.phases}
        shift: dict[int, int] = {}  # number of a point -> its number in the ledger
        for point in range(first + 1, last + 1):
            if len(made.moments) in starts:
                made.moments.append(Moment("start"))
            shift[point] = len(made.moments)
            made.moments.append(self.moments[point])
        begin, end = 2 * first + 1, 2 * last + 1
        for each in self.ranges:
            if each.died is not None and each.died <= begin:
                continue
            if each.born > end:
                break
            copy = each.copied()
            copy.born = BEFORE if each.born <= begin else _moved(each.born, shift)
            copy.died = None if each.died is None or each.died > end else _moved(each.died, shift)
            made.ranges.append(copy)
        return made

    def _phases(self, first: int, last: int) -> Iterable[Phase]:
        """The phases of the points after `first` up to `last`, each with a point for its start."""
        inside = [mark for mark in self.marks if first < mark.point <= last]
        carried = [mark for mark in self.marks if mark.point <= first]
        if carried and (not inside or inside[0].point > first + 1):
            inside.insert(0, dataclasses.replace(carried[-1], point=first + 1))
        start = 0
        for i, mark in enumerate(inside):
            stop = inside[i + 1].point if i + 1 < len(inside) else last + 1
            yield Phase(mark.phase, mark.micro_batch, start, stop - mark.point)
            start += 1 + stop - mark.point


def _moved(tick: int, shift: dict[int, int]) -> int:
    return 2 * shift[tick // 2] + tick % 2
