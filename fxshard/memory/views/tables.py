"""A report as text that fits a terminal, and as CSV.

Note: columns
=============
A category that is zero everywhere has no column, and one that is the same in every row is named
once, under the table. Where the others do not fit the width, neighbours are added up, step by step
(`GROUPS`), and then decimals go. Nothing is left out: the categories of a row add up to its total.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from tabulate import tabulate

from fxshard.bytesize import SIZES, size_text
from fxshard.errors import ConfigError
from fxshard.memory.category import CATEGORIES, GROUPS, OTHER, Matrix, State
from fxshard.memory.ledger import HALF, LOSS, OPTIMIZER, PhaseBytes
from fxshard.memory.owners import nearest, owned_rows, owners_at
from fxshard.memory.report import MemoryReport
from fxshard.memory.states import Called, Where

OUTSIDE = "outside"  # of the step
INDENT = "  "  # of what stands under the name of a module
LEAST_OF_NAME = 24  # letters of a module's name that its notes leave


_Line = tuple[list[str], list[int], str]  # names of a phase, its bytes, where its peak is


@dataclasses.dataclass(frozen=True)
class _TableColumn:
    title: str
    sources: tuple[int, ...]  # columns of `Ledger.bytes` that it adds up


@dataclasses.dataclass(frozen=True)
class _CallRows:
    """The rows of a call of a module.

    Attributes:
        title, tail: its name, of which the end is kept, and what stands after it.
        called: whose rows they are.
        states: label and row of each line; a row is int64 ``[1 + WIDTH]``: what is owned on the
            device, then the columns of `Ledger.bytes`.
    """

    title: str
    tail: str
    called: Called
    states: tuple[tuple[str, Matrix], ...]


def text(
    report: MemoryReport,
    depth: int | None = None,
    units: str = "MiB",
    *,
    fold: bool = True,
    micro_batch: int = 0,
    width: int = 100,
) -> str:
    """The table; see `MemoryReport.table`."""
    if units not in SIZES:
        raise ConfigError(f"units={units!r}; legal: {', '.join(SIZES)}.")
    head = [
        f"Bytes of one rank of {report.world_size}, in {units}. "
        f"Peak {size_text(report.peak_bytes)}, in {report.peak_at}."
    ]
    if report.micro_batches > 1:
        head.append(
            f"{report.micro_batches} micro-batches; modules are shown in number {micro_batch + 1}."
        )
    parts = [
        "\n".join(line for text in head for line in _wrapped(text, width)),
        *_phase_tables(report, units, width),
        *_module_table(report, depth, units, fold, micro_batch, width),
    ]
    return "\n\n".join(parts)


# -- phases -------------------------------------------------------------------------------------


def _phase_tables(report: MemoryReport, units: str, width: int) -> Iterator[str]:
    """The phases of both steps, and those outside of them."""
    inside: list[_Line] = []
    outside: list[_Line] = []
    before = ""
    for step, name, sizes, place in phase_figures(report):
        if step == OUTSIDE:
            outside.append(([name], sizes, place))
        else:
            inside.append((["" if step == before else step, name], sizes, place))
        before = step
    yield _phase_table(["step", "phase"], inside, units, width)
    if outside:
        yield _phase_table(["outside of the step"], outside, units, width)


def phase_figures(report: MemoryReport) -> Iterator[tuple[str, str, list[int], str]]:
    """Each phase: "first", "steady" or `OUTSIDE`, its name, its bytes, and where its peak is.

    The bytes are those at its start, at its peak and at its end; with offload also those on the
    CPU, at its peak there and at its end.
    """
    for step, first in (("first", True), ("steady", False)):
        for phase in report.phases(first_step=first):
            sizes = [sum(phase.start), phase.peak_bytes, phase.end_bytes]
            host = [phase.host.peak_bytes, phase.host.end_bytes] * report.offloaded
            name = phase_name(phase.phase, phase.micro_batch, report.micro_batches)
            yield step, name, sizes + host, _peak_place(phase)
    for each in report.lifecycle:
        sizes = [each.start_bytes, each.peak_bytes, each.end_bytes]
        host = [each.host_peak_bytes, each.host_end_bytes] * report.offloaded
        yield OUTSIDE, each.name, sizes + host, each.peak_node


def _phase_table(names: Sequence[str], lines: Sequence[_Line], units: str, width: int) -> str:
    """Lines ``(names, bytes, where the peak is)``; what has no room is left out from the right."""
    headers = [*names, "start", "peak", "end", "CPU\npeak", "CPU\nend"]
    headers = headers[: len(names) + len(lines[0][1])]
    for decimals in (2, 1, 0):
        rows = [[*name, *(_figure(v, units, decimals) for v in sizes)] for name, sizes, _ in lines]
        align = [*["left"] * len(names), *["right"] * (len(headers) - len(names))]
        room = width - max(map(len, grid(rows, headers, align))) - 2
        if room >= LEAST_OF_NAME:
            break
    while room < -2:
        rows, headers, align = [row[:-1] for row in rows], headers[:-1], align[:-1]
        room = width - max(map(len, grid(rows, headers, align))) - 2
    if room >= 8:
        rows = [[*row, shortened(at, room)] for row, (*_, at) in zip(rows, lines, strict=True)]
        headers, align = [*headers, "peak in"], [*align, "left"]
    return "\n".join(grid(rows, headers, align))


def phase_name(phase: str, micro_batch: int, count: int) -> str:
    """Name of a phase; of a step of several micro-batches ``backward (2 of 3)``."""
    return phase if count == 1 or micro_batch < 0 else f"{phase} ({micro_batch + 1} of {count})"


def _peak_place(phase: PhaseBytes) -> str:
    """The module in which a phase is at its peak."""
    if not len(phase.during) or phase.peak_bytes == sum(phase.start):
        return "(start)"
    node, module = phase.labels[int(phase.during.sum(1).argmax())]
    return module or node


# -- modules ------------------------------------------------------------------------------------


def _module_table(
    report: MemoryReport, depth: int | None, units: str, fold: bool, micro_batch: int, width: int
) -> Iterator[str]:
    ledger = report.ledger()
    ticks = {w: t for w, t in report.ticks().items() if w.micro_batch == micro_batch}
    chosen = [w.module for w in ticks if depth is None or w.module.count(".") < depth]
    plain = _rows(report, ticks, str, set(chosen))
    groups = _groups(plain, fold)
    shown = {called for group in groups.values() for called in group.shown}
    owner = nearest({module for module, _ in shown}, (LOSS, OPTIMIZER))
    rows = _rows(report, ticks, owner, set(chosen))
    at_peak = owners_at(ledger, ledger.peak_tick, owner)
    blocks = []
    for called in _tree_order(plain):
        group = groups[called]
        if called not in group.shown:
            continue
        owns = at_peak.pop(called[0], 0) if called[1] == 0 else 0
        tail = _notes(called, group, _figure(owns, units, 2) if owns else "")
        states = _merged(rows[called], fold)
        blocks.append(_CallRows(called[0] or "(root)", tail, called, states))
        if called == group.between_after:
            blocks.append(_CallRows(*group.between(plain, units), called, ()))
    yield _fitted(blocks, units, width)
    others = [f"{name} owns {_figure(v, units, 2)}" for name, v in at_peak.items() if v]
    notes = [
        "owned: what the module holds itself, and what modules under it hold that have no rows "
        "here. total: all that the rank holds in that state. A state without Before and After: "
        "both are equal."
    ]
    if others:
        notes.append(f"At the peak {', '.join(others)}.")
    yield "\n".join(line for note in notes for line in _wrapped(note, width))


def _rows(
    report: MemoryReport, ticks: dict[Where, int], owner: Callable[[str], str], chosen: set[str]
) -> dict[Called, dict[State, Matrix]]:
    """Per call of a module, per state, a row as in `_CallRows`."""
    ledger = report.ledger()
    owned = owned_rows(ledger, {w: t for w, t in ticks.items() if w.module in chosen}, owner)
    found: dict[Called, dict[State, Matrix]] = {}
    for where, own in owned.items():
        row = np.concatenate([[own[:HALF].sum()], ledger.bytes[ticks[where]]])
        found.setdefault((where.module, where.call), {})[where.state] = row
    return found


@dataclasses.dataclass(frozen=True)
class _LayerGroup:
    """Calls of modules that differ in a layer number only.

    Attributes:
        members: all of them.
        shown: those with rows.
        equal: all have the same rows; then only the first is shown.
    """

    members: tuple[Called, ...]
    shown: tuple[Called, ...]
    equal: bool

    @property
    def between_after(self) -> Called | None:
        """The call after which a line stands for those that have no rows."""
        return self.shown[0] if len(self.members) > len(self.shown) and not self.equal else None

    def between(self, rows: dict[Called, dict[State, Matrix]], units: str) -> tuple[str, str]:
        """That line: their names, and the range of their figures."""
        hidden = [called for called in self.members if called not in self.shown]
        ranges = []
        for name in (State.PEAK_FORWARD, State.PEAK_BACKWARD):
            totals = [int(rows[c][name][1 : 1 + HALF].sum()) for c in hidden if name in rows[c]]
            if totals:
                low, high = (_figure(v, units, 2) for v in (min(totals), max(totals)))
                ranges.append(f"{name.value} {low if low == high else f'{low} to {high}'}")
        return names_of([module for module, _ in hidden]), f": total at {', '.join(ranges)}"


def names_of(modules: Sequence[str]) -> str:
    """Modules that differ in numbers only: ``layers.[1…30].mlp (30)``."""
    if len(modules) == 1:
        return modules[0]
    parts = [re.split(r"\b(\d+)\b", module) for module in (modules[0], modules[-1])]
    ends = (a if a == b else f"[{a}…{b}]" for a, b in zip(*parts, strict=True))
    return f"{''.join(ends)} ({len(modules)})"


def pattern(module: str) -> str:
    """What modules that differ in numbers only have in common."""
    return re.sub(r"\b\d+\b", "*", module)


def _groups(rows: dict[Called, dict[State, Matrix]], fold: bool) -> dict[Called, _LayerGroup]:
    """The group of each call."""
    alike: dict[Called, list[Called]] = {}
    for module, call in rows:
        key = (pattern(module), call) if fold else (module, call)
        alike.setdefault(key, []).append((module, call))
    groups: dict[Called, _LayerGroup] = {}
    for members in alike.values():
        equal = len(members) > 1 and all(_equal(rows[members[0]], rows[m]) for m in members[1:])
        shown = members[:1] if equal else members if len(members) < 3 else [members[0], members[-1]]
        group = _LayerGroup(tuple(members), tuple(shown), equal)
        groups |= dict.fromkeys(members, group)
    return groups


def _tree_order(calls: Iterable[Called]) -> list[Called]:
    """Calls in their order, but none before those around it."""
    by_module: dict[str, list[Called]] = {"": []}
    for module, call in calls:
        by_module.setdefault(module, []).append((module, call))
    names: dict[str, None] = {"": None}
    for module in by_module:
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            names[".".join(parts[:length])] = None
    return [called for name in names for called in by_module.get(name, [])]


def _equal(one: dict[State, Matrix], other: dict[State, Matrix]) -> bool:
    return one.keys() == other.keys() and all((one[s] == other[s]).all() for s in one)


def _notes(called: Called, group: _LayerGroup, owns: str) -> str:
    """What stands after the name of a call."""
    notes = [f"call {called[1] + 1}"] if called[1] else []
    if group.equal:
        notes.append(f"one of {len(group.members)} with equal rows, to {group.members[-1][0]}")
    elif len(group.members) > 2:
        end = "first" if called == group.members[0] else "last"
        notes.append(f"{end} of {len(group.members)}")
    if owns:
        notes.append(f"owns {owns} at the peak")
    return f" ({'; '.join(notes)})" if notes else ""


def _merged(states: dict[State, Matrix], fold: bool) -> tuple[tuple[str, Matrix], ...]:
    """Lines in the order of `State`; where Before and After are equal, one."""
    found: list[tuple[str, Matrix]] = []
    for state in State:
        if state not in states:
            continue
        row, name = states[state], state.value.removeprefix("After ")
        last = found[-1] if found else ("", row)
        if fold and last[0] == f"Before {name}" and (last[1] == row).all():
            found[-1] = (name, row)
        else:
            found.append((state.value, row))
    return tuple(found)


# -- layout -------------------------------------------------------------------------------------


def _fitted(blocks: Sequence[_CallRows], units: str, width: int) -> str:
    """The first layout that is not too wide."""
    lines = [row for block in blocks for _, row in block.states]
    every = np.array(lines) if lines else np.zeros((1, 1 + 2 * HALF), dtype=np.int64)
    constant = (every == every[0]).all(0)[1:]
    varying = [i for i in range(HALF) if not constant[i]]
    on_host = _TableColumn("CPU", tuple(range(HALF, 2 * HALF)))
    host = [] if constant[HALF:].all() else [on_host]
    for decimals in (2, 1, 0):
        for level in range(len(GROUPS) + 1):
            columns = [*_columns(varying, level), *host]
            if _width(blocks, every, columns, units, decimals) <= width:
                made = _table(blocks, columns, units, decimals)
                return _with_titles(made, blocks, _same(every[0][1:], constant, units), width)
    raise ConfigError(f"width={width} has no room for the figures in {units}; take larger units.")


def _width(
    blocks: Sequence[_CallRows],
    every: Matrix,
    columns: Sequence[_TableColumn],
    units: str,
    decimals: int,
) -> int:
    """Of the lines that `_table` makes of the rows `every`: the largest figure is the longest."""
    labels = [label for block in blocks for label, _ in block.states]
    parts = [every[:, 0], every[:, 1 : 1 + HALF].sum(1)]
    parts += [every[:, [1 + i for i in column.sources]].sum(1) for column in columns]
    headers = ["owned", "total", *(column.title for column in columns)]
    widths = [
        max(len(_figure(int(part.max()), units, decimals)), *map(len, header.split("\n")))
        for part, header in zip(parts, headers, strict=True)
    ]
    return len(INDENT) + max(map(len, ["state", *labels])) + sum(2 + width for width in widths)


def _columns(varying: Sequence[int], level: int) -> list[_TableColumn]:
    """A column per category, or per group of them up to that level."""
    left = list(varying)
    found: dict[tuple[int, ...], str] = {}
    for group in reversed(GROUPS[:level]):
        inside = tuple(i for i in left if group in (OTHER, CATEGORIES[i].group))
        if len(inside) > 1:
            found[inside] = group
            left = [i for i in left if i not in inside]
    found |= {(i,): CATEGORIES[i].heading for i in left}
    return [_TableColumn(found[sources], sources) for sources in sorted(found)]


def _table(
    blocks: Sequence[_CallRows], columns: Sequence[_TableColumn], units: str, decimals: int
) -> list[str]:
    rows = []
    for block in blocks:
        for label, row in block.states:
            figures = [row[0], row[1 : 1 + HALF].sum()]
            figures += [row[[1 + i for i in column.sources]].sum() for column in columns]
            rows.append([label, *(_figure(int(v), units, decimals) for v in figures)])
    headers = ["state", "owned", "total", *(c.title for c in columns)]
    align = ("left", *["right"] * (2 + len(columns)))
    return [f"{INDENT}{line}" for line in grid(rows, headers, align)]


def grid(rows: list[list[str]], headers: Sequence[str], align: Sequence[str]) -> list[str]:
    """Lines of a table; the first of the rows comes after the line of dashes.

    As rows, headers cost no padding, and those of several lines are level at the bottom.
    """
    tall = 1 + max(header.count("\n") for header in headers)
    split = [("\n" * (tall - 1 - header.count("\n")) + header).split("\n") for header in headers]
    above = [list(line) for line in zip(*split, strict=True)]
    lines = tabulate(
        above + rows, tablefmt="plain", colalign=align, disable_numparse=True
    ).splitlines()
    widths = [max(map(len, column)) for column in zip(*above, *rows, strict=True)]
    return [*lines[:tall], "  ".join("-" * width for width in widths), *lines[tall:]]


def _with_titles(lines: list[str], blocks: Sequence[_CallRows], same: str, width: int) -> str:
    """The lines of the table, with the title of each block before its own."""
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{INDENT}--")) + 1
    found = lines[:at]
    for block in blocks:
        found += _heading(block.title, block.tail, width)
        found += lines[at : at + len(block.states)]
        at += len(block.states)
    return "\n".join([*found, *_wrapped(same, width)])


def _heading(title: str, tail: str, width: int) -> list[str]:
    """Name and notes on one line, if that leaves enough of the name."""
    room = width - len(tail)
    if room >= min(len(title), LEAST_OF_NAME):
        return [shortened(title, room) + tail]
    inside = 2 * INDENT
    notes = _wrapped(tail.removeprefix(":"), width - len(inside))
    return [shortened(title, width), *(inside + line for line in notes)]


def _same(row: Matrix, constant: Matrix, units: str) -> str:
    """What is the same in every row, as a sentence."""

    def listed(first: int) -> str:
        return ", ".join(
            f"{category.value} {_figure(int(row[first + i]), units, 2)}"
            for i, category in enumerate(CATEGORIES)
            if constant[first + i] and row[first + i]
        )

    parts = [
        f"{listed(0)} (in total)" if listed(0) else "",
        f"on the CPU {listed(HALF)}" * bool(listed(HALF)),
    ]
    kept = [part for part in parts if part]
    return f"In every row: {'; '.join(kept)}." if kept else ""


def _wrapped(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return [shortened(line, width) for line in lines]


def shortened(name: str, room: int) -> str:
    """A name that is too long loses its beginning: its end tells modules apart."""
    return name if len(name) <= room else f"…{name[len(name) - room + 1 :]}"


def _figure(size: int, units: str, decimals: int) -> str:
    if not size:
        return "."
    return f"{size:,}" if units == "B" else f"{size / SIZES[units]:,.{decimals}f}"


# -- CSV ----------------------------------------------------------------------------------------


def csv_text(report: MemoryReport) -> str:
    """Every phase and every row of both steps, in bytes.

    Columns: step ("first", "steady", or "outside": see `MemoryReport.lifecycle`), micro_batch,
    phase, module, call, state, total, a column per category, then the same of what the module
    itself owns, and with offload of the CPU. A phase has three rows, with the states "Start",
    "Peak" and "End".
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ["total", *(category.value for category in CATEGORIES)]
    kinds = ["", "owned ", *(["CPU "] * report.offloaded)]
    head = ["step", "micro_batch", "phase", "module", "call", "state"]
    writer.writerow(head + [f"{kind}{name}" for kind in kinds for name in names])

    def write(place: Sequence[object], row: Matrix, owned: Matrix | None = None) -> None:
        own = [""] * len(names) if owned is None else _sum_and_parts(owned[:HALF])
        host = _sum_and_parts(row[HALF:]) if report.offloaded else []
        writer.writerow([*place, *_sum_and_parts(row[:HALF]), *own, *host])

    for step, first in (("first", True), ("steady", False)):
        ledger, ticks = report.ledger(first_step=first), report.ticks(first_step=first)
        for phase in ledger.phases:
            for state, tick in ledger.extremes(phase).items():
                place = [step, phase.micro_batch, phase.name, "", "", state.title()]
                write(place, ledger.bytes[tick])
        for where, row, owned in report.figures(first_step=first):
            name = ledger.at(ticks[where])[0].name
            place = [step, where.micro_batch, name, where.module, where.call, where.state.value]
            write(place, row, owned)
    for each in report.lifecycle:
        for state, tick in (("Start", 0), ("Peak", each.peak_tick), ("End", -1)):
            write([OUTSIDE, -1, each.name, "", "", state], each.ledger.bytes[tick])
    return out.getvalue()


def _sum_and_parts(row: Matrix) -> list[int]:
    return [int(row.sum()), *map(int, row)]
