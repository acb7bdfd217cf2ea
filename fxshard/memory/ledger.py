"""Ledger: every live range of a step, from which all figures of a report are read.

Note: ticks
===========
Time is counted in points: one in front of each phase (its start), then one behind each operator.
Each point has two ticks. While the operator of point ``p`` runs is tick ``2p``: its inputs and its
outputs are alive. Behind it is tick ``2p + 1``: what it read last is gone. A live range is half
open: alive at tick ``t`` if ``born <= t < died``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import sympy

from fxshard.memory.category import CATEGORIES, Category, Curve, Matrix

BEFORE = -1  # born before the step
WIDTH = 2 * len(CATEGORIES)  # columns of bytes: the device's categories, then the host's


@dataclasses.dataclass(slots=True)
class LiveRange:
    """A storage for as long as it is in one category.

    Attributes:
        storage: its number; a storage that changes its category has a range for each.
        name: node that made it, or what the caller holds.
        op: operator that made it; "" for what is held from before the step.
        module: FQN of the module that owns it ("" is the root): of the parameter, of the buffer, of
            the operator. `LOSS` and `OPTIMIZER` own what those make outside of the model.
        category: see `Category`.
        bytes: its size.
        host: it lies on the CPU while the program computes elsewhere (offload).
        stream: where the operator runs that made it. (The memory itself is always asked for on the
            compute stream.)
        line: line of user code, ``path:line in function``; "" if there is none.
        born, died: ticks; died is None for what outlives the step.
        formula: `bytes` as an expression of open sizes and of the number of ranks; None if it is
            the same number for all, or nobody has asked.
    """

    storage: int
    name: str
    op: str
    module: str
    category: Category
    bytes: int
    host: bool = False
    stream: str = "compute"
    line: str = ""
    born: int = BEFORE
    died: int | None = None
    formula: sympy.Expr | None = None

    @property
    def column(self) -> int:
        """Where its bytes are in a row of `WIDTH` columns."""
        return self.category.column + (len(CATEGORIES) if self.host else 0)

    def copied(self) -> LiveRange:
        """One like it (`dataclasses.replace` takes six times as long)."""
        return LiveRange(
            *(self.storage, self.name, self.op, self.module, self.category, self.bytes),
            *(self.host, self.stream, self.line, self.born, self.died, self.formula),
        )


LOSS = "(loss)"
OPTIMIZER = "(optimizer)"


class Moment(NamedTuple):
    """A point: what ran last.

    Attributes:
        node: name of the operator in the program; "start" in front of a phase.
        op: the operator, for example "aten.mm".
        module: FQN of its module.
        stream: where it runs.
        line: line of user code, or "".
        call: index into `Program.calls`, or None.
    """

    node: str
    op: str = ""
    module: str = ""
    stream: str = "compute"
    line: str = ""
    call: int | None = None


class Phase(NamedTuple):
    """A run of points.

    Attributes:
        name: "forward", "loss", "loss backward", "backward", "optimizer" or "zero_grad".
        micro_batch: which of the step's, from 0; -1 behind the last.
        start: number of the point in front of it.
        points: how many points follow that one.
    """

    name: str
    micro_batch: int
    start: int
    points: int


@dataclasses.dataclass
class PhaseBytes:
    """Bytes of one phase.

    Attributes:
        phase: its name, see `Phase`.
        labels: per point ``(node name, module FQN)`` of what ran last.
        after: int64 ``[points, categories]``, alive behind each point.
        during: int64 ``[points, categories]``, alive while the operator before the point ran:
            its inputs and its outputs.
        start: alive when the phase begins.
        host: the same for CPU memory, with offload; zeros without.
        micro_batch: see `Phase`.
    """

    phase: str
    labels: list[tuple[str, str]]
    after: Matrix
    during: Matrix
    start: list[int]
    host: Curve
    micro_batch: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most alive at once on the device."""
        return max(sum(self.start), int(self.during.sum(1).max(initial=0)))

    @property
    def end_bytes(self) -> int:
        """Alive on the device when the phase is over."""
        return int(self.after[-1].sum()) if len(self.after) else sum(self.start)


class Ledger:
    """The live ranges of one step, and the points that their ticks refer to."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.phases: list[Phase] = []
        self.ranges: list[LiveRange] = []

    def begin(self, name: str, micro_batch: int) -> int:
        """Begin a phase; returns the tick of its start."""
        self.phases.append(Phase(name, micro_batch, len(self.moments), 0))
        self.moments.append(Moment("start"))
        return 2 * len(self.moments) - 2

    def add(self, moments: Iterable[Moment]) -> int:
        """Append points to the phase that began last; returns the number of the first of them."""
        first = len(self.moments)
        self.moments += moments
        last = self.phases[-1]
        points = len(self.moments) - last.start - 1
        self.phases[-1] = Phase(last.name, last.micro_batch, last.start, points)
        return first

    @functools.cached_property
    def columns(self) -> list[int]:
        """The column of each range, once all are there."""
        return [each.column for each in self.ranges]

    @functools.cached_property
    def bytes(self) -> Matrix:
        """int64 ``[ticks, WIDTH]``: bytes alive at each tick, by category; the host's behind."""
        change = np.zeros((2 * len(self.moments) + 1, WIDTH), dtype=np.int64)
        end = len(change) - 1
        columns = np.array(self.columns, dtype=np.int64)
        sizes = np.array([each.bytes for each in self.ranges], dtype=np.int64)
        born = np.array([max(each.born, 0) for each in self.ranges], dtype=np.int64)
        died = np.array(
            [end if each.died is None else each.died for each in self.ranges], dtype=np.int64
        )
        np.add.at(change, (born, columns), sizes)
        np.add.at(change, (died, columns), -sizes)
        return change.cumsum(0)[:-1]

    @functools.cached_property
    def totals(self) -> Matrix:
        """int64 ``[ticks]``: bytes alive on the device."""
        return self.bytes[:, : len(CATEGORIES)].sum(1)

    def alive(self, tick: int) -> Iterator[LiveRange]:
        """What is alive at a tick."""
        return (
            each
            for each in self.ranges
            if each.born <= tick and (each.died is None or tick < each.died)
        )

    def at(self, tick: int) -> tuple[Phase, int]:
        """The phase of a tick, and the number of its point in it (-1: its start)."""
        point = tick // 2
        phase = next(p for p in reversed(self.phases) if p.start <= point)
        return phase, point - phase.start - 1

    def phase_bytes(self) -> list[PhaseBytes]:
        """The curves, phase by phase."""
        found = []
        half = len(CATEGORIES)
        for phase in self.phases:
            first, end = phase.start + 1, phase.start + 1 + phase.points
            start = [int(v) for v in self.bytes[2 * phase.start]]
            during, after = (
                self.bytes[2 * first : 2 * end : 2],
                self.bytes[2 * first + 1 : 2 * end : 2],
            )
            labels = [(m.node, m.module) for m in self.moments[first:end]]
            host = Curve(start[half:], after[:, half:], during[:, half:])
            found.append(
                PhaseBytes(
                    phase.name,
                    labels,
                    after[:, :half],
                    during[:, :half],
                    start[:half],
                    host,
                    phase.micro_batch,
                )
            )
        return found
