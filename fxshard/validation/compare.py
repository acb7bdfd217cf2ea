"""Compares the figures of the memory report with those of the tracker."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tabulate import tabulate

from fxshard.errors import UnknownSizeError
from fxshard.memory.category import CATEGORIES, Category, Matrix, State
from fxshard.memory.ledger import PhaseBytes
from fxshard.memory.report import MemoryReport
from fxshard.memory.states import PEAKS, Span
from fxshard.validation.numerics import Numerics
from fxshard.validation.tracker import Measured


@dataclasses.dataclass(frozen=True)
class Cell:
    """One figure: bytes of one category on the rank when a module is in a state.

    Attributes:
        step: 1 for the first step.
        module, state: where; for the optimizer, module is "optimizer".
        category: see `Category`.
        static, measured: bytes.
    """

    step: int
    module: str
    state: str
    category: Category
    static: int
    measured: int

    @property
    def difference(self) -> int:
        """Static minus measured, in bytes."""
        return self.static - self.measured


@dataclasses.dataclass
class Validation:
    """Static against measured, everywhere.

    Attributes:
        cells: every module x state x category of every step.
        points: per step and phase, ``(step, phase, largest absolute difference over all points and
            categories)``: finer than cells.
        static_peak_bytes, measured_peak_bytes: largest over forward and backward of all steps.
        numerics: loss, gradients and buffers compared with eager, if that was asked for.
        unknown: why bytes cannot be predicted, and are not compared; "" if they are.
        peaks: with real ranks, the measured peak of each in forward and backward, in bytes; cells,
            points and predictions are rank 0's, which needs the most.
        batches: how many of them have a batch of their own; 0: each.
    """

    cells: list[Cell]
    points: list[tuple[int, str, int]]
    static_peak_bytes: int
    measured_peak_bytes: int
    numerics: Numerics | None = None
    unknown: str = ""
    peaks: tuple[int, ...] = ()
    batches: int = 0

    @property
    def holds(self) -> bool:
        """True if all that was compared is as predicted: bytes, peaks of ranks, and numbers."""
        if self.numerics is not None and self.numerics.verdict == "wrong":
            return False
        above = any(peak > self.static_peak_bytes for peak in self.peaks)
        return bool(self.unknown) or not (self.max_abs_difference or above)

    @property
    def max_abs_difference(self) -> int:
        """Largest difference in any cell or at any point, in bytes. 0 is the claim.

        Raises:
            UnknownSizeError: nothing is predicted: a size depends on the data.
        """
        if self.unknown:
            raise UnknownSizeError(self.unknown)
        cells = (abs(cell.difference) for cell in self.cells)
        return max([*cells, *(difference for *_, difference in self.points)], default=0)

    def table(self, *, only_different: bool = False, step: int | None = None) -> str:
        """Rows of module, state, category, static, measured, difference (bytes).

        Args:
            only_different: leave out rows with difference 0.
            step: only that step.

        Returns:
            Text; figures are bytes.
        """
        rows = [
            (
                c.step,
                c.module or "(root)",
                c.state,
                c.category.value,
                c.static,
                c.measured,
                c.difference,
            )
            for c in self.cells
            if (c.static or c.measured)
            and (c.difference or not only_different)
            and step in (None, c.step)
        ]
        headers = ("step", "module", "state", "category", "static", "measured", "difference")
        return tabulate(rows, headers, "simple", intfmt=",")

    def summary(self) -> str:
        """One sentence."""
        if self.unknown:
            return f"Bytes are not compared: {self.unknown}"
        text = (
            f"{len(self.cells):,} cells (module x state x category) and every point of "
            f"{len(self.points)} phases compared: largest difference "
            f"{self.max_abs_difference} bytes; peak static {self.static_peak_bytes:,}, measured "
            f"{self.measured_peak_bytes:,} bytes."
        )
        if not self.peaks:
            return text
        most = f"{max(self.peaks):,} bytes at most"
        ranks, batches = len(self.peaks), self.batches or len(self.peaks)
        of = "each on its own batch" if batches == ranks else f"with {batches} batches"
        return f"{text} Measured on {ranks} gloo ranks, {of}: {most}."


def compare(report: MemoryReport, steps: list[list[list[Measured]]]) -> Validation:
    """Compare each measured step with the report's first or steady step.

    Args:
        report: the static side.
        steps: per step and micro-batch, what the tracker measured of its phases: forward and
            backward, and after the last one optimizer and zero_grad.
    """
    cells: list[Cell] = []
    points: list[tuple[int, str, int]] = []
    static_peaks, measured_peaks = [0], [0]
    for number, batches in enumerate(steps, start=1):
        phases = {(p.phase, p.micro_batch): p for p in report.phases(first_step=number == 1)}
        for batch, seen in enumerate(batches):
            measured = {m.phase: m for m in seen}
            for name in ("forward", "backward"):
                if (name, batch) not in phases:
                    continue
                s, m = phases[name, batch], measured[name]
                points.append((number, name, _largest_difference(s, m)))
                static_peaks.append(s.peak_bytes)
                measured_peaks.append(max(sum(m.start), int(m.during.sum(1).max(initial=0))))
                for (module, call), each in report.spans(batch).items():
                    if name in each:
                        label = module if not call else f"{module} (call {call + 1})"
                        pairs = zip(
                            cells_of(s, name, each[name]),
                            cells_of(m, name, each[name]),
                            strict=True,
                        )
                        for (state, row), (_, found) in pairs:
                            cells += _cells(number, label, state.value, row, found)
            for name in ("loss", "loss backward"):
                if (name, batch) in phases:
                    cells += _loss_cells(number, name, phases[name, batch], measured[name])
            for name in ("optimizer", "zero_grad"):
                if name in measured and (name, -1) in phases:
                    cells += _optimizer_cells(number, name, phases[name, -1], measured[name])
    return Validation(cells, points, max(static_peaks), max(measured_peaks))


def cells_of(
    curve: PhaseBytes | Measured, phase: str, span: Span
) -> Iterator[tuple[State, Matrix]]:
    """States of one call of a module in one phase, with the row of bytes per category at each."""
    start = np.array(curve.start, dtype=np.int64)
    for state, point in span.moments(phase):
        yield state, curve.after[point] if point >= 0 else start
    stretch = curve.during[span.before_pre + 1 : span.after_post + 1]
    yield PEAKS[phase], stretch[int(stretch.sum(1).argmax())]


def _loss_cells(step: int, phase: str, s: PhaseBytes, m: Measured) -> list[Cell]:
    """Before and after the user's loss or its backward, and at the peak of it."""
    label = phase.capitalize()
    found = _cells(step, "loss", f"Before {label}", s.start, m.start)
    top, seen = _highest(s), _highest(m)
    found += _cells(step, "loss", f"Peak {label}", top, seen)
    found += _cells(step, "loss", f"After {label}", s.after[-1], m.after[-1])
    return found


def _optimizer_cells(step: int, phase: str, s: PhaseBytes, m: Measured) -> list[Cell]:
    """Before, at the peak of, and after the optimizer step; after zero_grad.

    Not every point is compared: DTensor runs more operators (without bytes) than the recording.
    """
    if phase == "zero_grad":
        return _cells(step, "optimizer", "After zero_grad", s.after[-1], m.after[-1])
    found = _cells(step, "optimizer", "Before Step", s.start, m.start)
    top, seen = _highest(s), _highest(m)
    found += _cells(step, "optimizer", "Peak Step", top, seen)
    found += _cells(step, "optimizer", "After Step", s.after[-1], m.after[-1])
    return found


def _highest(curve: PhaseBytes | Measured) -> Sequence[int]:
    """The last of the moments with most bytes."""
    moments: list[Sequence[int]] = [*curve.during.tolist()[::-1], curve.start]
    return max(moments, key=sum)


def _cells(step: int, module: str, state: State | str, row: Any, seen: Any) -> list[Cell]:
    text = state.value if isinstance(state, State) else state
    return [
        Cell(step, module, text, category, int(row[i]), int(seen[i]))
        for i, category in enumerate(CATEGORIES)
    ]


def _largest_difference(static: PhaseBytes, measured: Measured) -> int:
    """Over all points and categories; also over the totals while operators run."""
    if static.after.shape != measured.after.shape:
        raise AssertionError(
            f"{static.phase}: {len(static.after)} points in the program, {len(measured.after)} seen"
        )
    after = np.abs(static.after - measured.after).max(initial=0)
    # What is measured while the first operator runs begins with the phase.
    highest = max(
        static.during.sum(1).max(initial=0), sum(static.start) if len(static.after) else 0
    )
    during = np.abs(highest - measured.during.sum(1).max(initial=0))
    start = np.abs(np.array(static.start) - np.array(measured.start)).max()
    host = np.abs(static.host.after - measured.host.after).max(initial=0)
    host_start = np.abs(np.array(static.host.start) - np.array(measured.host.start)).max()
    return int(max(after, during, start, host, host_start))
