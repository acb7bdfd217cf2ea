"""The reports of a model that runs as several graphs, and their sum."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from fxshard.bytesize import size_text
from fxshard.memory.category import CATEGORIES, Matrix
from fxshard.memory.figures import Snapshot
from fxshard.memory.ledger import PhaseBytes
from fxshard.memory.report import MemoryReport


@dataclasses.dataclass(frozen=True)
class GraphReports:
    """One report per graph that Dynamo has captured, in the order in which they first ran.

    Their sum is the step in which each of them runs once: the forwards in order, the backwards in
    the opposite order, then the optimizer. While one graph runs, each other one has what it holds
    then: before its forward, its parameters, gradients and optimizer states; from its forward to
    its backward also what it has saved; after its backward its gradients. With one graph it is
    that graph's report. All figures are bytes of one rank, in the steady state.

    What the sum cannot know, for it is not in any graph: what Python keeps between graphs, and what
    eager stretches of a graph break make and save. What several graphs read, or one returns and
    another takes (parameters, buffers, activations that cross a break), counts in each of them. A
    graph that was captured again, for another layer, size or mode, counts as one more.

    Attributes:
        graphs: the reports.
    """

    graphs: tuple[MemoryReport, ...]

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, number: int) -> MemoryReport:
        return self.graphs[number]

    def __iter__(self) -> Iterator[MemoryReport]:
        return iter(self.graphs)

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes alive at once in the sum."""
        return int(self._peak.sum())

    @property
    def peak_by_category(self) -> Snapshot:
        """What that peak is made of."""
        return {category: int(n) for category, n in zip(CATEGORIES, self._peak, strict=True)}

    @property
    def saved_bytes(self) -> int:
        """What all graphs together hold between their forwards and their backwards, parameters and
        gradients left out: activations, and inputs and outputs that their callers hold.
        """
        return sum(saved_bytes(report) for report in self.graphs)

    @functools.cached_property
    def _peak(self) -> Matrix:
        """int64 ``[categories]``."""
        runs = [_phases(report) for report in self.graphs]
        moments: list[Matrix] = []
        for i, run in enumerate(runs):
            before = [np.array(r["forward"].start) for r in runs[i + 1 :]]
            after = [_end(r["forward"]) for r in runs[:i]]
            moments.append(_most(run["forward"], [*before, *after]))
        for i, run in reversed(list(enumerate(runs))):
            after = [_end(r["forward"]) for r in runs[:i]]
            done = [_end(r.get("backward", r["forward"])) for r in runs[i + 1 :]]
            for name in run.keys() - {"forward", "optimizer", "zero_grad"}:
                moments.append(_most(run[name], [*after, *done]))
        for i, run in enumerate(runs):
            rest = [_end(r.get("backward", r["forward"])) for r in (*runs[:i], *runs[i + 1 :])]
            for name in run.keys() & {"optimizer", "zero_grad"}:
                moments.append(_most(run[name], rest))
        return max(moments, key=lambda moment: int(moment.sum()))

    def __str__(self) -> str:
        lines = []
        for number, report in enumerate(self.graphs):
            kind = "forward and backward" if report.training else "forward"
            parameters = sum(len(unit.params) for unit in report.units)
            lines.append(
                f"graph {number}: {kind}, {parameters} parameters, peak "
                f"{size_text(report.peak_bytes)}, saved {size_text(saved_bytes(report))}"
            )
        total = f"peak {size_text(self.peak_bytes)}, saved {size_text(self.saved_bytes)}"
        return "\n".join([*lines, f"sum: {total}"])


def saved_bytes(report: MemoryReport) -> int:
    """What a graph holds between its forward and its backward, its state left out."""
    forward = _phases(report)["forward"]
    return int((_end(forward) - np.array(forward.start)).clip(0).sum())


def _phases(report: MemoryReport) -> dict[str, PhaseBytes]:
    return {phase.phase: phase for phase in report.phases()}


def _end(phase: PhaseBytes) -> Matrix:
    """Per category, alive when the phase is over."""
    return phase.after[-1] if len(phase.after) else np.array(phase.start)


def _most(phase: PhaseBytes, others: list[Matrix]) -> Matrix:
    """Per category, at the moment of the phase at which most is alive, with what others hold."""
    rows = np.concatenate([np.array([phase.start]), phase.during])
    found: Matrix = rows[rows.sum(1).argmax()] + sum(others, np.zeros(len(CATEGORIES), np.int64))
    return found
