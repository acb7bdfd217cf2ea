"""MemoryReport: the bytes of a step as tables, peaks and sentences."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from tabulate import tabulate

from fxshard.errors import ConfigError, FxshardError
from fxshard.memory.category import CATEGORIES, Category, State
from fxshard.memory.kernels import KernelTemporary, kernel_temporaries
from fxshard.memory.liveness import PhaseBytes, StepBytes, Thing, alive_at
from fxshard.memory.states import MOMENTS, PEAKS, spans
from fxshard.program import Program

Snapshot = dict[Category, int]

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class DoesNotFitError(FxshardError):
    """The peak is above the budget; the text says by how much, where, and what is alive."""


@dataclasses.dataclass(frozen=True)
class PeakAt:
    """Where the peak is.

    Attributes:
        phase: "forward", "backward", "optimizer" or "zero_grad".
        point: number of the point in the phase, from 0.
        node: the operator that runs there.
        module: FQN of its module ("" is the root).
    """

    phase: str
    point: int
    node: str
    module: str


class MemoryReport:
    """Bytes of tensors alive on one rank at each point of a step. All figures are bytes.

    With offload, what lies on the CPU while the program computes elsewhere is in no figure but
    those named host: `host_peak_bytes`, `host_cells`, and columns of their own in `table`.

    Temporaries inside a kernel are not tensors that a program can see: they are in
    `kernel_temporaries` and in no other figure.
    """

    def __init__(self, step: StepBytes) -> None:
        self._step = step

    @property
    def program(self) -> Program:
        """What was analysed."""
        return self._step.program

    @functools.cached_property
    def peak_at(self) -> PeakAt:
        """Where in the steady step the peak is (its first occurrence)."""
        _, phase, point = _highest(self._step.steady)
        node, module = phase.labels[point]
        return PeakAt(phase.phase, point, node, module)

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes alive at once in the steady state (from the second step on)."""
        return _highest(self._step.steady)[0]

    @property
    def first_step_peak_bytes(self) -> int:
        """The same in the first step, in which the optimizer makes its state."""
        return _highest(self._step.first)[0]

    @property
    def peak_by_category(self) -> Snapshot:
        """What the peak is made of; sums to `peak_bytes`."""
        _, phase, point = _highest(self._step.steady)
        return _snapshot(phase.during[point])

    @property
    def host_peak_bytes(self) -> int:
        """Largest number of bytes on the CPU in the steady state, with offload; else 0."""
        totals = [phase.host.after.sum(1) for phase in self._step.steady]
        return max((int(total.max()) for total in totals if len(total)), default=0)

    @functools.cached_property
    def kernel_temporaries(self) -> list[KernelTemporary]:
        """Memory that kernels are known to take and give back inside one operator, per operator.

        Not in any other figure; see `fxshard.memory.kernels` for each formula and its source.
        """
        return kernel_temporaries(self.program)

    @property
    def peak_with_kernels_bytes(self) -> int | None:
        """Largest sum of live bytes and of what the running kernel takes for itself.

        None if the program has kernels of which that is not known. gloo's own buffers, taken by
        its threads at times of their choice, are not in it.
        """
        rows = [k for k in self.kernel_temporaries if k.backend == "cpu"]
        inside = {(k.phase, k.point): k.bytes for k in rows}
        if None in inside.values():
            return None
        return max(
            int(total) + (inside.get((phase.phase, i)) or 0)
            for phase in self._step.steady
            for i, total in enumerate(phase.during.sum(1))
        )

    def phases(self, *, first_step: bool = False) -> list[PhaseBytes]:
        """The raw curves, phase by phase."""
        return self._step.first if first_step else self._step.steady

    def modules(self) -> list[str]:
        """FQNs of all modules that compute, in order of their first operator."""
        return list(dict.fromkeys(module for module, _ in self._spans))

    def snapshot(
        self, module: str, state: State | str, *, first_step: bool = False
    ) -> Snapshot | None:
        """Bytes per category, of the whole rank, when `module` is in `state`.

        Returns:
            None if the module has no such state (no operator in that phase).

        Raises:
            ConfigError: no such module or state.
        """
        wanted = State(state) if state in {s.value for s in State} else state
        if module not in self.modules() or not isinstance(wanted, State):
            raise ConfigError(
                f"no state {state!r} of module {module!r}; states are "
                f"{', '.join(s.value for s in State)}, modules for example "
                f"{', '.join(map(repr, self.modules()[:4]))}."
            )
        row = self._cells(first_step).get((module, wanted))
        return None if row is None else _snapshot(row)

    def cells(self, *, first_step: bool = False) -> dict[tuple[str, State], Snapshot]:
        """Every (module, state) with its bytes per category."""
        return {key: _snapshot(row) for key, row in self._cells(first_step).items()}

    def host_cells(self, *, first_step: bool = False) -> dict[tuple[str, State], Snapshot]:
        """As `cells`, of CPU memory, with offload."""
        curves = {
            phase.phase: PhaseBytes(
                phase.phase,
                phase.labels,
                phase.host.after,
                phase.host.during,
                phase.host.start,
                phase.host,
            )
            for phase in self.phases(first_step=first_step)
        }
        return {
            (module, state): _snapshot(row)
            for (module, phase), span in self._spans.items()
            for state, row in cells_of(curves[phase], span)
        }

    @functools.cached_property
    def _spans(self) -> Any:
        return spans(self.program)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a report lives as long as its plan
    def _cells(self, first_step: bool) -> dict[tuple[str, State], Any]:
        curves = {phase.phase: phase for phase in self.phases(first_step=first_step)}
        return {
            (module, state): row
            for (module, phase), span in self._spans.items()
            for state, row in cells_of(curves[phase], span)
        }

    def timeline(self) -> Iterator[tuple[str, str, str, int]]:
        """``(phase, node, module, bytes alive behind it)`` for every point of the steady step."""
        for phase in self._step.steady:
            for (node, module), total in zip(phase.labels, phase.after.sum(1), strict=True):
                yield phase.phase, node, module, int(total)

    def alive_at_peak(self) -> list[Thing]:
        """The storages alive at the peak, largest first."""
        _, phase, point = _highest(self._step.steady)
        at_compute = phase.phase in ("forward", "backward")
        if at_compute:
            things = alive_at(self.program, self._step.held, phase.phase, point)
        else:
            things = [t for t in self._step.held]
        known = {category: 0 for category in CATEGORIES}
        for thing in things:
            known[thing.category] += thing.bytes
        for category, total in _snapshot(phase.during[point]).items():
            if total > known[category]:
                left = total - known[category]
                things.append(Thing(f"all {category.value}", "", category, left))
        return sorted(things, key=lambda t: t.bytes, reverse=True)

    def explain_peak(self, top: int = 20) -> str:
        """One sentence that names the peak, and the `top` largest things alive at it."""
        at = self.peak_at
        where = f"{at.phase}, at {at.node}" + (f" of {at.module}" if at.module else "")
        lines = [
            f"Peak {size_text(self.peak_bytes)} ({self.peak_bytes:,} bytes) in {where}; alive:"
        ]
        for thing in self.alive_at_peak()[:top]:
            module = (
                f" of {thing.module}" if thing.module and thing.module not in thing.name else ""
            )
            lines.append(
                f"  {size_text(thing.bytes):>12}  {thing.category.value}: {thing.name}{module}"
            )
        return "\n".join(lines)

    def table(self, depth: int | None = None, units: str = "MiB", *, fold: bool = True) -> str:
        """Bytes per module and state, by category, as text.

        Args:
            depth: show modules with at most this many names in their FQN (None: all).
            units: "B", "KiB", "MiB" or "GiB".
            fold: of modules that differ in a layer number only, show the first and the last.
        """
        if units not in UNITS:
            raise ConfigError(f"units={units!r}; legal: {', '.join(UNITS)}.")
        cells = self.cells()
        used = [c for c in CATEGORIES if any(cell[c] for cell in cells.values())]
        host = self.host_cells() if self.program.offloaded else {}
        on_host = [c for c in CATEGORIES if any(cell[c] for cell in host.values())]
        rows: list[tuple[str, ...]] = []
        for module, note in self._shown(depth, fold):
            label = f"{module or '(root)'}{note}"
            for state in State:
                if (module, state) in cells:
                    cell = cells[module, state]
                    figures = [*(cell[c] for c in used), sum(cell.values())]
                    figures += [host[module, state][c] for c in on_host]
                    rows.append((label, state.value, *(_scaled(v, units) for v in figures)))
                    label = ""
        headers = [
            "module",
            "state",
            *(c.value.replace(" ", "\n") for c in used),
            f"total\n{units}",
            *(f"CPU\n{c.value.replace(' ', chr(10))}" for c in on_host),
        ]
        align = ["left", "left", *["right"] * (len(used) + 1 + len(on_host))]
        return tabulate(rows, headers, "simple", colalign=align, disable_numparse=True)

    def _shown(self, depth: int | None, fold: bool) -> list[tuple[str, str]]:
        """Modules of the table, each with a note if it stands for a list of layers."""
        chosen = [m for m in self.modules() if depth is None or m.count(".") < depth]
        alike: dict[str, list[str]] = {}
        for module in chosen:
            alike.setdefault(re.sub(r"\b\d+\b", "*", module), []).append(module)
        shown: list[tuple[str, str]] = []
        for module in chosen:
            layers = alike[re.sub(r"\b\d+\b", "*", module)]
            if not fold or len(layers) < 3:
                shown.append((module, ""))
            elif module == layers[0]:
                shown.append((module, f" (first of {len(layers)})"))
            elif module == layers[-1]:
                shown.append((module, f" (last of {len(layers)})"))
        return shown

    def assert_fits(self, budget: int | str) -> None:
        """Raise DoesNotFitError if the peak of the first or of a later step is above `budget`.

        Args:
            budget: bytes, or text such as "80GiB".
        """
        limit = parse_bytes(budget)
        worst = max(self.peak_bytes, self.first_step_peak_bytes)
        if worst > limit:
            raise DoesNotFitError(
                f"{size_text(worst)} needed, {size_text(limit)} given: "
                f"{size_text(worst - limit)} too much.\n{self.explain_peak(5)}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values; ``schema`` names the form."""
        at = self.peak_at
        return {
            "schema": "fxshard.memory/1",
            "world_size": self.program.world_size,
            "optimizer": self._step.optimizer,
            "peak_bytes": self.peak_bytes,
            "first_step_peak_bytes": self.first_step_peak_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "peak_by_category": {c.value: v for c, v in self.peak_by_category.items()},
            "peak_at": dataclasses.asdict(at),
            "kernel_temporaries": [dataclasses.asdict(k) for k in self.kernel_temporaries],
            "modules": {
                module: {
                    state.value: {c.value: v for c, v in cell.items()}
                    for (name, state), cell in self.cells().items()
                    if name == module
                }
                for module in self.modules()
            },
        }


def cells_of(curve: PhaseBytes, span: Any) -> Iterator[tuple[State, Any]]:
    """States of one module in one phase, with the row of bytes per category at each."""
    phase = "forward" if curve.phase == "forward" else "backward"
    start = np.array(curve.start, dtype=np.int64)
    for state, name in MOMENTS[phase]:
        point = getattr(span, name)
        yield state, curve.after[point] if point >= 0 else start
    stretch = curve.during[span.before_pre + 1 : span.after_post + 1]
    yield PEAKS[phase], stretch[int(stretch.sum(1).argmax())]


def parse_bytes(budget: int | str) -> int:
    """Bytes of 123, "123", "80GiB", "512 MiB".

    Raises:
        ConfigError: not of that form.
    """
    if isinstance(budget, int):
        return budget
    match = re.fullmatch(r"\s*([0-9.]+)\s*(B|KiB|MiB|GiB|TiB)?\s*", budget)
    if match is None:
        raise ConfigError(f"{budget!r} is no size; write bytes or for example '80GiB'.")
    scale = {**UNITS, "TiB": 2**40}[match[2] or "B"]
    return int(float(match[1]) * scale)


def size_text(size: int) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    for unit, scale in reversed(UNITS.items()):
        if size >= scale:
            return f"{size / scale:.2f} {unit}" if scale > 1 else f"{size} B"
    return "0 B"


def _highest(phases: list[PhaseBytes]) -> tuple[int, PhaseBytes, int]:
    best: tuple[int, PhaseBytes, int] | None = None
    for phase in phases:
        if not len(phase.during):
            continue
        totals = phase.during.sum(1)
        point = int(totals.argmax())
        if best is None or totals[point] > best[0]:
            best = (int(totals[point]), phase, point)
    assert best is not None
    return best


def _snapshot(row: Any) -> Snapshot:
    return {category: int(row[i]) for i, category in enumerate(CATEGORIES)}


def _scaled(size: int, units: str) -> str:
    if not size:
        return "."
    return f"{size:,}" if units == "B" else f"{size / UNITS[units]:,.2f}"
