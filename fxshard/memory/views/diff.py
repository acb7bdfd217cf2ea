"""Two reports side by side: what each phase, module and category has in one and in the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from fxshard.bytesize import SIZES
from fxshard.errors import ConfigError
from fxshard.memory.category import CATEGORIES, State
from fxshard.memory.views import serialize
from fxshard.memory.views.tables import grid, pattern, shortened

TOTAL = "total"
PEAKS = (State.PEAK_FORWARD.value, State.PEAK_BACKWARD.value)


@dataclasses.dataclass(frozen=True)
class DiffRow:
    """One figure in both reports. Bytes.

    Attributes:
        kind: "peak", "phase" or "module".
        step: "first" or "steady".
        name: of a peak "device" or "CPU"; of a phase its name; of a module its FQN.
        state: of a phase "Start", "Peak" or "End"; of a module its state; of a peak "".
        category: its name, or "total".
        before, after: None where that report has no such phase, module or state.
        call: which of the module's calls in a forward, from 0.
        micro_batch: which of the step's, from 0; -1 after the last.
    """

    kind: str
    step: str
    name: str
    state: str
    category: str
    before: int | None
    after: int | None
    call: int = 0
    micro_batch: int = 0

    @property
    def difference(self) -> int:
        """After less before; what is missing counts as 0."""
        return (self.after or 0) - (self.before or 0)


@dataclasses.dataclass(frozen=True)
class Diff:
    """Two reports side by side.

    Attributes:
        rows: every figure of either; peaks, phases, then modules. Categories that neither has are
            left out.
    """

    rows: tuple[DiffRow, ...]

    @property
    def peak_difference(self) -> int:
        """What the peak of the steady step grows by (below 0: shrinks). Bytes."""
        return next(r.difference for r in self.rows if r.kind == "peak" and r.category == TOTAL)

    def only_different(self) -> Diff:
        """Without the rows whose figures are the same on both sides."""
        return Diff(tuple(row for row in self.rows if row.before != row.after))

    def table(
        self,
        depth: int | None = None,
        units: str = "MiB",
        *,
        only_different: bool = True,
        fold: bool = True,
        width: int = 100,
    ) -> str:
        """Peaks by category, phases, then the peaks of each module, as text.

        Args:
            depth: show modules with at most this many names in their FQN (None: all).
            units: "B", "KiB", "MiB" or "GiB".
            only_different: leave out phases and modules whose figures are the same on both sides.
            fold: of modules that differ in a layer number only, show the largest difference.
            width: names are shortened so that no line is longer, as far as that goes.

        Raises:
            ConfigError: no such units.
        """
        if units not in SIZES:
            raise ConfigError(f"units={units!r}; legal: {', '.join(SIZES)}.")
        steady = [row for row in self.rows if row.step == "steady"]
        shown = [r for r in steady if r.before != r.after or not only_different]
        modules = [
            r
            for r in shown
            if r.kind == "module"
            and r.state in PEAKS
            and (depth is None or r.name.count(".") < depth)
        ]
        phases = [r for r in shown if r.kind == "phase" and r.category == TOTAL]
        peaks = [r for r in self.rows if r.kind == "peak"]
        parts = [_table("peak", [(_of_peak(r), r.category, r) for r in peaks], units)]
        if phases:
            parts.append(_table("phase", [(_of_phase(r), r.state, r) for r in phases], units))
        if modules:
            parts.append(_modules(modules, units, fold, width))
        else:
            parts.append("No module has another peak.")
        return "\n\n".join(parts)


def diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> Diff:
    """Compare two reports as `MemoryReport.to_dict` gives them.

    Raises:
        ConfigError: one of them is of another schema, or was altered.
    """
    for told in (before, after):
        if told.get("schema") != serialize.SCHEMA:
            raise ConfigError(
                f"schema {told.get('schema')!r}: expected {serialize.SCHEMA!r}, as "
                f"MemoryReport.to_dict and `fxshard report --json` of this version write it."
            )
        _check(told, _READ, "report")
    return Diff((*_peaks(before, after), *_phases(before, after), *_rows(before, after)))


# What is read of a report: of a list, what each element is; of names that are any, what each is.
_SIZES: Any = {str: int}
_STEP: Any = {
    "phases": [
        {"phase": str, "micro_batch": int}
        | {name: _SIZES for name in ("start", "peak", "end")}
        | {f"{name}_bytes": int for name in ("start", "peak", "end")}
    ],
    "rows": [
        {"module": str, "state": str, "call": int, "micro_batch": int}
        | {"bytes": int, "by_category": _SIZES}
    ],
}
_READ: Any = {
    "peak_by_category": _SIZES,
    "peak_bytes": int,
    "host_peak_bytes": int,
    "first_step_peak_bytes": int,
    "first_step": _STEP,
    "steady_step": _STEP,
}


def _check(told: Any, wanted: Any, where: str) -> None:
    """Raises ConfigError unless `told`, from a file, is as `wanted` says."""
    kind = wanted if isinstance(wanted, type) else type(wanted)
    fits = isinstance(told, Mapping if kind is dict else kind) and not isinstance(told, bool)
    if not fits:
        raise ConfigError(
            f"{where} is {str(told)[:40]!r}: expected {_KINDS[kind]}. The report is not as "
            f"MemoryReport.to_dict wrote it; write it again."
        )
    if isinstance(wanted, list):
        for i, each in enumerate(told):
            _check(each, wanted[0], f"{where}[{i}]")
    elif wanted == _SIZES:
        for name, each in told.items():
            _check(each, int, f"{where}[{name!r}]")
    elif isinstance(wanted, dict):
        for name, each in wanted.items():
            if name not in told:
                raise ConfigError(f"{where} has no {name!r}. The report was altered.")
            _check(told[name], each, f"{where}.{name}")


_KINDS: dict[Any, str] = {int: "a whole number", str: "a text", list: "a list", dict: "a mapping"}


def _peaks(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[DiffRow]:
    sides = [told["peak_by_category"] for told in (before, after)]
    totals = (before["peak_bytes"], after["peak_bytes"])
    yield from _by_category(sides, DiffRow("peak", "steady", "device", "", TOTAL, *totals))
    hosts = (before["host_peak_bytes"], after["host_peak_bytes"])
    if any(hosts):
        yield DiffRow("peak", "steady", "CPU", "", TOTAL, *hosts)
    totals = (before["first_step_peak_bytes"], after["first_step_peak_bytes"])
    yield DiffRow("peak", "first", "device", "", TOTAL, *totals)


def _phases(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[DiffRow]:
    for step in ("first", "steady"):
        sides = [
            {(p["phase"], p["micro_batch"]): p for p in told[f"{step}_step"]["phases"]}
            for told in (before, after)
        ]
        for name, micro_batch in dict.fromkeys([*sides[0], *sides[1]]):
            found = [side.get((name, micro_batch)) for side in sides]
            for state in ("start", "peak", "end"):
                before_, after_ = (None if p is None else p[f"{state}_bytes"] for p in found)
                parts = [None if p is None else p[state] for p in found]
                row = DiffRow("phase", step, name, state.title(), TOTAL, before_, after_)
                yield from _by_category(parts, dataclasses.replace(row, micro_batch=micro_batch))


def _rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[DiffRow]:
    for step in ("first", "steady"):
        sides = [
            {
                (r["module"], r["state"], r["call"], r["micro_batch"]): r
                for r in told[f"{step}_step"]["rows"]
            }
            for told in (before, after)
        ]
        for key in dict.fromkeys([*sides[0], *sides[1]]):
            found = [side.get(key) for side in sides]
            sizes = (None if r is None else r["bytes"] for r in found)
            parts = [None if r is None else r["by_category"] for r in found]
            yield from _by_category(parts, _of_module(step, key, *sizes))


def _of_module(
    step: str, key: tuple[str, str, int, int], before: int | None, after: int | None
) -> DiffRow:
    module, state, call, micro_batch = key
    return DiffRow("module", step, module, state, TOTAL, before, after, call, micro_batch)


def _by_category(sides: Sequence[Mapping[str, int] | None], total: DiffRow) -> Iterator[DiffRow]:
    """The total, then each category that one of the sides has."""
    yield total
    for category in CATEGORIES:
        name = category.value
        sizes = [None if side is None else side.get(name, 0) for side in sides]
        if any(sizes):
            yield dataclasses.replace(total, category=name, before=sizes[0], after=sizes[1])


# -- text ---------------------------------------------------------------------------------------


def _table(title: str, rows: Sequence[tuple[str, str, DiffRow]], units: str) -> str:
    """Lines ``(name, what, row)``; a name stands once."""
    lines = []
    last = None
    for name, what, row in rows:
        lines.append(["" if name == last else name, what, *_figures(row, units)])
        last = name
    headers = [title, "", "before", "after", f"more ({units})"]
    align = ("left", "left", "right", "right", "right")
    return tabulate(lines, headers, "simple", colalign=align, disable_numparse=True)


def _of_peak(row: DiffRow) -> str:
    return row.name if row.step == "steady" else f"{row.name}, first step"


def _of_phase(row: DiffRow) -> str:
    return row.name if row.micro_batch < 1 else f"{row.name} (micro-batch {row.micro_batch + 1})"


Key = tuple[str, int, int]  # module, call, micro-batch


def _modules(rows: Sequence[DiffRow], units: str, fold: bool, width: int) -> str:
    """The peaks of each module; of modules alike the one that differs most."""
    blocks: dict[Key, dict[str, list[DiffRow]]] = {}
    for row in rows:
        states = blocks.setdefault((row.name, row.call, row.micro_batch), {})
        states.setdefault(row.state, []).append(row)
    alike: dict[tuple[object, ...], list[Key]] = {}
    for key, states in blocks.items():
        total = next(iter(states.values()))[0]
        sides = (total.before is None, total.after is None)
        name = pattern(key[0]) if fold else key[0]
        alike.setdefault((name, *key[1:], *sides), []).append(key)
    lines = []
    for members in alike.values():
        most = max(members, key=lambda key: _most(blocks[key]))
        title = _title(most, members)
        for state, found in blocks[most].items():
            figures = _figures(found[0], units) if found[0].category == TOTAL else ["", "", ""]
            parts = [row for row in found if row.category != TOTAL and row.before != row.after]
            lines.append([title, state.removeprefix("Peak "), *figures, parts])
            title = ""
    return _with_parts(lines, units, width)


def _most(states: Mapping[str, Sequence[DiffRow]]) -> int:
    return max(abs(row.difference) for rows in states.values() for row in rows)


def _title(key: Key, members: Sequence[Key]) -> str:
    title = key[0] or "(root)"
    if len(members) > 1:
        title += f" (most of {len(members)})"
    title += f" (call {key[1] + 1})" if key[1] else ""
    return title + (f" (micro-batch {key[2] + 1})" if key[2] else "")


def _with_parts(lines: list[list[Any]], units: str, width: int) -> str:
    """A line per module and peak, then the categories that differ, as far as there is room."""
    headers = ["module", "peak", "before", "after", f"more\n({units})", "of which"]
    align = ("left", "left", "right", "right", "right", "left")
    taken = max(map(len, grid([line[1:5] for line in lines], headers[1:5], align[1:5]))) + 4
    name_room = min(max(len(line[0]) for line in lines), max(20, (width - taken) // 2))
    room = width - taken - max(name_room, len(headers[0]))
    made = [
        [shortened(line[0], name_room), *line[1:5], _parts(line[5], units, room)] for line in lines
    ]
    return "\n".join(grid(made, headers, align))


def _parts(rows: Sequence[DiffRow], units: str, room: int) -> str:
    text = ""
    for row in sorted(rows, key=lambda row: abs(row.difference), reverse=True):
        more = f"{', ' if text else ''}{row.category} {_figures(row, units)[2]}"
        if len(text) + len(more) + 2 > room:
            return f"{text} …" if text else "…"
        text += more
    return text


def _figures(row: DiffRow, units: str) -> list[str]:
    def text(size: int | None, sign: str = "") -> str:
        if size is None:
            return "-"
        return f"{size:{sign},}" if units == "B" else f"{size / SIZES[units]:{sign},.2f}"

    return [text(row.before), text(row.after), text(row.difference, "+")]
