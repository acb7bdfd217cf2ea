"""The proof: the report's figures beside the tracker's, and their differences."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from tabulate import tabulate

from fxshard.memory.category import CATEGORIES, Category, State
from fxshard.memory.liveness import PhaseBytes
from fxshard.memory.report import MemoryReport, cells_of
from fxshard.memory.states import spans
from fxshard.memory.tracker import Measured


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
    """

    cells: list[Cell]
    points: list[tuple[int, str, int]]
    static_peak_bytes: int
    measured_peak_bytes: int

    @property
    def max_abs_difference(self) -> int:
        """Largest difference in any cell or at any point, in bytes. 0 is the claim."""
        cells = (abs(cell.difference) for cell in self.cells)
        return max([*cells, *(difference for *_, difference in self.points)], default=0)

    def table(self, *, only_different: bool = False, step: int | None = None) -> str:
        """Rows of module, state, category, static, measured, difference (bytes).

        Args:
            only_different: leave out rows with difference 0.
            step: only that step.
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
        return (
            f"{len(self.cells):,} cells (module x state x category) and every point of "
            f"{len(self.points)} phases compared: largest difference "
            f"{self.max_abs_difference} bytes; peak static {self.static_peak_bytes:,}, measured "
            f"{self.measured_peak_bytes:,} bytes."
        )


def compare(reports: list[MemoryReport], steps: list[list[list[Measured]]]) -> Validation:
    """Put each measured step beside the reports' first or steady step.

    Args:
        reports: the static side, one per micro-batch of a step.
        steps: per step and micro-batch, what the tracker measured of its phases: forward and
            backward, and behind the last one optimizer and zero_grad.
    """
    cells: list[Cell] = []
    points: list[tuple[int, str, int]] = []
    static_peaks, measured_peaks = [0], [0]
    for number, batches in enumerate(steps, start=1):
        for report, phases in zip(reports, batches, strict=True):
            static = {p.phase: p for p in report.phases(first_step=number == 1)}
            measured = {m.phase: m for m in phases}
            for name in ("forward", "backward"):
                if name not in static:
                    continue
                s, m = static[name], measured[name]
                points.append((number, name, _largest_difference(s, m)))
                static_peaks.append(int(s.during.sum(1).max()))
                measured_peaks.append(int(m.during.sum(1).max()))
                curve = PhaseBytes(name, [], m.after, m.during, m.start, m.host)
                for (module, phase), span in spans(report.program).items():
                    if phase == name:
                        pairs = zip(cells_of(s, span), cells_of(curve, span), strict=True)
                        for (state, row), (_, seen) in pairs:
                            cells += _cells(number, module, state.value, row, seen)
            cells += _optimizer_cells(number, static, measured)
    return Validation(cells, points, max(static_peaks), max(measured_peaks))


def _optimizer_cells(
    step: int, static: dict[str, PhaseBytes], measured: dict[str, Measured]
) -> list[Cell]:
    """Before, at the peak of, and after the optimizer step; after zero_grad.

    Only moments are compared: DTensor runs more operators (without bytes) than the recording.
    """
    found: list[Cell] = []
    if "optimizer" in static:
        s, m = static["optimizer"], measured["optimizer"]
        found += _cells(step, "optimizer", "Before Step", s.start, m.start)
        top, seen = s.during[s.during.sum(1).argmax()], m.during[m.during.sum(1).argmax()]
        found += _cells(step, "optimizer", "Peak Step", top, seen)
        found += _cells(step, "optimizer", "After Step", s.after[-1], m.after[-1])
    if "zero_grad" in static:
        s, m = static["zero_grad"], measured["zero_grad"]
        found += _cells(step, "optimizer", "After zero_grad", s.after[-1], m.after[-1])
    return found


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
    during = np.abs(static.during.sum(1).max(initial=0) - measured.during.sum(1).max(initial=0))
    start = np.abs(np.array(static.start) - np.array(measured.start)).max()
    host = np.abs(static.host.after - measured.host.after).max(initial=0)
    host_start = np.abs(np.array(static.host.start) - np.array(measured.host.start)).max()
    return int(max(after, during, start, host, host_start))
