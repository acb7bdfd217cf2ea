"""Tape: what a run allocated and freed, operator by operator, in the terms of a `Ledger`."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Container, Iterator

from fxshard.ir.calls import Call
from fxshard.memory.category import Category
from fxshard.memory.ledger import BEFORE, Ledger, LedgerPhase, LiveRange, Moment


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
        ends: the points after which a step begins or ends; what comes before the first is no step.
        calls: per stretch between them, and micro-batch, every call of a module.
        used_on: by number of a range, the streams of ``record_stream``.
        waited: the host's waits: when, and per stream up to which tick its work is over by then.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = [Moment("start")]
        self.ranges: list[LiveRange] = []
        self.marks: list[Mark] = []
        self.ends: list[int] = []
        self.calls: list[list[list[Call]]] = [[]]
        self.used_on: dict[int, set[str]] = {}
        self.waited: list[tuple[int, dict[str, int]]] = []

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
        """A storage is freed after the last point; if a step is over with that, after the step."""
        is_over = bool(self.ends) and self.ends[-1] == self.last
        gone.died = 2 * self.last + (2 if is_over else 1)

    def end(self) -> None:
        """With the last point a step is over, or what comes before the first."""
        self.ends.append(self.last)
        self.calls.append([])

    def steps(self) -> list[tuple[int, int]]:
        """Per step the last point before it and its last point; the start of the run is no step."""
        return list(itertools.pairwise(self.ends))

    def phases(self, first: int, last: int) -> Iterator[tuple[Mark, int]]:
        """The phases of the points after `first` up to `last`, each with the point that ends it."""
        inside = [mark for mark in self.marks if first < mark.point <= last]
        carried = [mark for mark in self.marks if mark.point <= first]
        if carried and first < last and (not inside or inside[0].point > first + 1):
            inside.insert(0, dataclasses.replace(carried[-1], point=first + 1))
        for mark, following in itertools.zip_longest(inside, inside[1:]):
            yield mark, last + 1 if following is None else following.point

    def products(self, operators: Container[str], backward: bool) -> Iterator[int]:
        """The points at which such operators run, of any overload, in backward or outside of it."""
        for mark, following in itertools.zip_longest(self.marks, self.marks[1:]):
            if ("backward" in mark.phase) != backward:
                continue
            stop = len(self.moments) if following is None else following.point
            for point in range(mark.point, stop):
                if self.moments[point].op.rpartition(".")[0] in operators:
                    yield point

    def over_for_host(self, stream: str) -> Callable[[int], int]:
        """When the host can first know that `stream` has done what was asked of it until a tick.

        Returns:
            A function of that tick; what the host never waits for is over after the run.
        """
        ticks: list[int] = []
        over: list[int] = []
        for tick, each in self.waited:
            if each.get(stream, 0) > (over[-1] if over else 0):
                ticks.append(tick)
                over.append(each[stream])
        ticks.append(2 * len(self.moments))
        return lambda asked: ticks[bisect.bisect_left(over, asked)]

    def ledger(self, step: int) -> Ledger:
        """The live ranges of one step.

        Args:
            step: from 0; -1 is the last that is over.
        """
        first, last = self.steps()[step]
        made = Ledger()
        shift: dict[int, int] = {}  # number of a point -> its number in the ledger
        for mark, stop in self.phases(first, last):
            count = stop - mark.point
            made.phases.append(LedgerPhase(mark.phase, mark.micro_batch, len(made.moments), count))
            made.moments.append(Moment("start"))
            for point in range(mark.point, stop):
                shift[point] = len(made.moments)
                made.moments.append(self.moments[point])
        begin, end = 2 * first + 1, 2 * last + 1
        for each in self.ranges:
            if each.born > end:
                break
            if each.died is not None and (each.died <= begin or each.died <= each.born):
                continue
            copy = each.copied()
            copy.born = BEFORE if each.born <= begin else _moved(each.born, shift)
            copy.died = None if each.died is None or each.died > end else _moved(each.died, shift)
            made.ranges.append(copy)
        return made


def _moved(tick: int, shift: dict[int, int]) -> int:
    return 2 * shift[tick // 2] + tick % 2
