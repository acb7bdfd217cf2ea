"""Ledger: every live range of a step, from which all figures of a report are read.

Note: ticks
===========
Time is counted in points: one before each phase (its start), then one after each operator.
Each point has two ticks. While the operator of point ``p`` runs is tick ``2p``: its inputs and its
outputs are alive. After it is tick ``2p + 1``: what it read last is gone. A live range is half
open: alive at tick ``t`` if ``born <= t < died``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import sympy

from fxshard.memory.category import CATEGORIES, Category, Curve, Matrix

BEFORE = -1  # born before the step
HALF = len(CATEGORIES)
WIDTH = 2 * HALF  # columns of bytes: the device's categories, then the host's


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
            the same number for all, or it was not asked for.
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
        return self.category.column + (HALF if self.host else 0)

    def is_alive(self, tick: int) -> bool:
        """True from its birth until before its end."""
        return self.born <= tick and (self.died is None or tick < self.died)

    def copied(self) -> LiveRange:
        """One like it (`dataclasses.replace` takes six times as long)."""
        return LiveRange(
            *(self.storage, self.name, self.op, self.module, self.category, self.bytes),
            *(self.host, self.stream, self.line, self.born, self.died, self.formula),
        )


def owner_of(fqn: str) -> str:
    """FQN of the module that holds a parameter or buffer."""
    return fqn.rpartition(".")[0]


LOSS = "(loss)"
OPTIMIZER = "(optimizer)"


@dataclasses.dataclass(frozen=True)
class Storage:
    """The live ranges of one storage: those held from before the step, or those of the step.

    Attributes:
        ranges: one per category that it is in, and per parameter of a unit that lies in it.
    """

    ranges: tuple[LiveRange, ...]

    @property
    def born(self) -> int:
        """Tick, or `BEFORE`."""
        return min(each.born for each in self.ranges)

    @property
    def died(self) -> int | None:
        """Tick; None if it outlives the step."""
        ends = [each.died for each in self.ranges if each.died is not None]
        return max(ends) if len(ends) == len(self.ranges) else None

    @property
    def parts(self) -> list[LiveRange]:
        """What it is when it is born."""
        return [each for each in self.ranges if each.born == self.born]

    @property
    def bytes(self) -> int:
        """Its size."""
        return sum(each.bytes for each in self.parts)

    def lives(self) -> bool:
        """False if it is alive at no tick."""
        return self.died is None or self.died > max(self.born, 0)


class Moment(NamedTuple):
    """A point: what ran last.

    Attributes:
        node: name of the operator in the program; "start" before a phase.
        op: the operator, for example "aten.mm".
        module: FQN of its module.
        stream: where it runs.
        line: line of user code, or "".
        call: index into `Program.calls`, or None.
        kind: "row" of the schedule, "operator" of a region, "size" that an operator of a region
            computes, or "" for what is in no program.
        checkpointed: it runs inside of an activation checkpoint.
        recomputed: it is recomputation of a checkpoint, in backward.
    """

    node: str
    op: str = ""
    module: str = ""
    stream: str = "compute"
    line: str = ""
    call: int | None = None
    kind: Literal["row", "operator", "size", ""] = ""
    checkpointed: bool = False
    recomputed: bool = False


class LedgerPhase(NamedTuple):
    """A run of points.

    Attributes:
        name: "forward", "loss", "loss backward", "backward", "reduction" (of a pipeline's stage),
            "optimizer" or "zero_grad".
        micro_batch: which of the step's, from 0; -1 after the last.
        start: number of the point before it.
        points: how many points follow that one.
    """

    name: str
    micro_batch: int
    start: int
    points: int

    @property
    def begin(self) -> int:
        """Its first tick."""
        return 2 * self.start

    @property
    def end(self) -> int:
        """Its last tick."""
        return 2 * (self.start + self.points) + 1


@dataclasses.dataclass
class PhaseBytes(Curve):
    """Bytes of one phase on the device: `during` counts inputs and outputs of each operator.

    Attributes:
        phase: its name, see `LedgerPhase`.
        labels: per point ``(node name, module FQN)`` of what ran last.
        host: the same for CPU memory, with offload; zeros without.
        micro_batch: see `LedgerPhase`.
    """

    phase: str
    labels: list[tuple[str, str]]
    host: Curve
    micro_batch: int = 0


class Ledger:
    """The live ranges of one step, and the points that their ticks refer to."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.phases: list[LedgerPhase] = []
        self.ranges: list[LiveRange] = []

    def begin(self, name: str, micro_batch: int) -> int:
        """Begin a phase; returns the tick of its start."""
        self.phases.append(LedgerPhase(name, micro_batch, len(self.moments), 0))
        self.moments.append(Moment("start"))
        return 2 * len(self.moments) - 2

    def add(self, moments: Iterable[Moment]) -> int:
        """Append points to the phase that began last; returns the number of the first of them."""
        first = len(self.moments)
        self.moments += moments
        last = self.phases[-1]
        points = len(self.moments) - last.start - 1
        self.phases[-1] = LedgerPhase(last.name, last.micro_batch, last.start, points)
        return first

    @functools.cached_property
    def columns(self) -> list[int]:
        """The column of each range, once all are there."""
        return [each.column for each in self.ranges]

    @functools.cached_property
    def bytes(self) -> Matrix:
        """int64 ``[ticks, WIDTH]``: bytes alive at each tick, by category; then the host's."""
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
        return self.bytes[:, :HALF].sum(1)

    @functools.cached_property
    def host_totals(self) -> Matrix:
        """int64 ``[ticks]``: bytes alive on the CPU, with offload."""
        return self.bytes[:, HALF:].sum(1)

    @property
    def peak_tick(self) -> int:
        """The first tick at which the most is alive on the device."""
        return int(self.totals.argmax())

    def alive(self, tick: int) -> Iterator[LiveRange]:
        """What is alive at a tick."""
        return (each for each in self.ranges if each.is_alive(tick))

    def extremes(self, phase: LedgerPhase) -> dict[str, int]:
        """The ticks of "start", "peak" and "end" of a phase."""
        peak = phase.begin + int(self.totals[phase.begin : phase.end + 1].argmax())
        return {"start": phase.begin, "peak": peak, "end": phase.end}

    def of_phase(self, phase: LedgerPhase) -> list[Moment]:
        """What runs at the points of a phase."""
        first = phase.start + 1
        return self.moments[first : first + phase.points]

    def storages(self) -> list[Storage]:
        """Every storage of any bytes, in the order in which they are made."""
        found: dict[tuple[int, bool], list[LiveRange]] = defaultdict(list)
        for each in self.ranges:
            if each.bytes:
                found[each.storage, each.born == BEFORE].append(each)
        return [Storage(tuple(ranges)) for ranges in found.values()]

    def at(self, tick: int) -> tuple[LedgerPhase, int]:
        """The phase of a tick, and the number of its point in it (-1: its start)."""
        point = tick // 2
        phase = next(p for p in reversed(self.phases) if p.start <= point)
        return phase, point - phase.start - 1

    @functools.cached_property
    def phase_bytes(self) -> list[PhaseBytes]:
        """The curves, phase by phase."""
        found = []
        for phase in self.phases:
            rows = self.bytes[phase.begin : phase.end + 1]
            device, host = (
                (half[0].tolist(), half[3::2], half[2::2])
                for half in (rows[:, :HALF], rows[:, HALF:])
            )
            labels = [(m.node, m.module) for m in self.of_phase(phase)]
            found.append(PhaseBytes(*device, phase.name, labels, Curve(*host), phase.micro_batch))
        return found
