"""A report as one page that needs no network: plotly.js, the figures and a little script inside.

Note: thinning
==============
Of a step of more than `DRAWN` ticks, the page draws one tick per run of equal length, that with the
most bytes, and every tick within `NEAR` of the peak and at the ends of phases. What it says about a
tick that it draws is exact; the page says that there are others.
"""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import numpy as np

from fxshard.bytesize import size_text
from fxshard.capture.provenance import line_text
from fxshard.errors import ConfigError
from fxshard.memory.category import CATEGORIES, SENT, Category, Matrix, State
from fxshard.memory.ledger import HALF, Ledger, LiveRange
from fxshard.memory.report import MemoryReport
from fxshard.memory.views.plots import Dot, PeakCurve, scale_of
from fxshard.memory.views.tables import phase_figures, phase_name

DRAWN = 6000  # ticks that a page draws
NEAR = 300  # on either side of the peak, all are drawn
LANES = 8  # bars at once, per category and stream; more overlap in the last lane

STACK = tuple(sorted(CATEGORIES, key=lambda category: category.layer))


class Strings:
    """A table of strings, each once; "" is number 0."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


@dataclasses.dataclass(frozen=True)
class Bar:
    """A stretch of the schedule: ranges that are born and die together.

    Attributes:
        lane: its row of the chart, from 0.
        begin, end: ticks.
        bytes: of all of them.
        name: what they are.
    """

    lane: int
    begin: int
    end: int
    bytes: int
    name: str


def page(report: MemoryReport, extra: dict[str, Any], *, first_step: bool = False) -> str:
    """The page as text. Args: `extra`: from `tuning`.

    Raises:
        ConfigError: plotly is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("the HTML page needs plotly: pip install 'fxshard[html]'.")
    from plotly.offline import get_plotlyjs

    data = contents(report, first_step=first_step) | extra
    height = 12 + 17 * max(data["lane_count"], 2)
    optimizer = f", {report.optimizer}" if report.optimizer else ""
    filled = {
        "TITLE": html.escape(f"Memory of one rank of {report.world_size}{optimizer}"),
        "HEIGHT": str(height),
        # A script ends at the first "</script", whatever it stands in, and not there after "<!--".
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "PLOTLY": get_plotlyjs(),
    }
    text = resources.files("fxshard.memory.views").joinpath("page.html").read_text("utf-8")
    return re.sub(rf"\$({'|'.join(filled)})", lambda match: filled[match[1]], text)


def tuning(front: Sequence[Dot], curves: Sequence[PeakCurve], budget: int | None) -> dict[str, Any]:
    """The figures of the sections on tuning and sizes; each is there if there is data for it.

    Raises:
        ConfigError: a front without its budget.
    """
    found: dict[str, Any] = {}
    if front:
        if budget is None:
            raise ConfigError("the front of a page needs the budget that it is for: budget=...")
        unit, scale = scale_of(max(budget, *(dot.peak_bytes for dot in front)))
        dots = [
            (d.label, d.peak_bytes, 1e3 * d.seconds, d.fits, d.on_front, d.is_best) for d in front
        ]
        found["front"] = {"unit": unit, "scale": scale, "budget": budget, "dots": dots}
    if curves:
        unit, scale = scale_of(max(budget or 0, *(max(curve.bytes) for curve in curves)))
        drawn = [dataclasses.asdict(curve) | {"log": curve.is_log} for curve in curves]
        found["curves"] = {"unit": unit, "scale": scale, "budget": budget, "drawn": drawn}
    return found


def contents(report: MemoryReport, *, first_step: bool = False) -> dict[str, Any]:
    """The figures of the page, JSON-ready; sizes in bytes, times in ticks."""
    ledger = report.ledger(first_step=first_step)
    ticks = drawn(ledger)
    chosen = np.array(ticks)
    texts = Strings()
    used = [c for c in STACK if ledger.bytes[chosen, c.column].any()]
    unit, scale = scale_of(int(ledger.totals.max()))
    moments = [ledger.moments[tick // 2] for tick in ticks]
    columns = [
        [texts(moment.node) for moment in moments],
        [texts(moment.op) for moment in moments],
        [texts(moment.module) for moment in moments],
        [texts(line_text(moment.line)) for moment in moments],
    ]
    bars, lanes, lane_count = _bars(ledger, texts)
    found = {where.state for where in report.ticks(first_step=first_step)}
    states = [state for state in State if state in found]
    rows = list(_rows(report, first_step, states, texts))
    present = {category for row in rows for category in row[6][::2]}
    peaks = (State.PEAK_BACKWARD, State.PEAK_FORWARD)
    return {
        "subtitle": _subtitle(report, first_step),
        "cards": list(_cards(report)),
        "note": _note(ledger, ticks, unit),
        "kinds": [{"name": c.value, "color": c.color} for c in CATEGORIES],
        "categories": [{"name": c.value, "color": c.color} for c in used],
        "unit": unit,
        "scale": scale,
        "ticks": ticks,
        "end": 2 * len(ledger.moments),
        "peak": ledger.peak_tick,
        "points": columns,
        "bytes": [ledger.bytes[chosen, c.column].tolist() for c in used],
        "host": ledger.host_totals[chosen].tolist() if report.offloaded else [],
        "phases": [
            {"label": label, "begin": phase.begin, "end": phase.end + 1}
            for phase in ledger.phases
            for label in [phase_name(phase.name, phase.micro_batch, report.micro_batches)]
        ],
        "bars": bars,
        "lanes": lanes,
        "lane_count": lane_count,
        "ranges": list(_ranges(ledger, chosen, texts)),
        "micro_batches": report.micro_batches,
        "states": [state.value for state in states],
        "rows": rows,
        "row_categories": sorted(present),
        "first_state": next((state.value for state in peaks if state in states), ""),
        "phase_heads": [
            *("step", "phase", "start", "peak", "end"),
            *["CPU peak", "CPU end"] * report.offloaded,
            "peak in",
        ],
        "phase_rows": [
            [step, name, *sizes, place] for step, name, sizes, place in phase_figures(report)
        ],
        "strings": list(texts.numbers),  # the last: all others have added theirs
    }


def drawn(ledger: Ledger) -> list[int]:
    """The ticks that are drawn, ascending; see the note above."""
    count = len(ledger.totals)
    if count <= DRAWN:
        return list(range(count))
    run = -(-count // (DRAWN - 2 * NEAR - 2 * len(ledger.phases)))
    peak = ledger.peak_tick
    found = {i + int(ledger.totals[i : i + run].argmax()) for i in range(0, count, run)}
    found |= set(range(max(0, peak - NEAR), min(count, peak + NEAR)))
    for phase in ledger.phases:
        found |= {phase.begin, phase.end}
    return sorted(found)


def _subtitle(report: MemoryReport, first_step: bool) -> str:
    step = "The first step" if first_step else "A step in the steady state"
    return f"{step}. The peak of the steady state is in {report.peak_at}."


def _cards(report: MemoryReport) -> Iterator[tuple[str, str, str, str]]:
    """``(name, figure, remark, class)``."""
    yield "peak", size_text(report.peak_bytes), f"{report.peak_bytes:,} bytes", "peak"
    first = report.first_step_peak_bytes
    yield "peak of the first step", size_text(first), f"{first:,} bytes", ""
    if report.offloaded:
        host = report.host_peak_bytes
        yield "peak on the CPU", size_text(host), f"{host:,} bytes", ""
    largest = sorted(report.peak_by_category.items(), key=lambda item: -item[1])
    for category, size in largest[:3]:
        share = 100 * size / max(report.peak_bytes, 1)
        yield f"{category.value} at the peak", size_text(size), f"{share:.0f}%", ""


def _note(ledger: Ledger, ticks: Sequence[int], unit: str) -> str:
    note = (
        "From left to right in the order of the program: every operator takes the same room, "
        f"whatever time it takes. The area is what is alive on the device, in {unit}. Bars: All "
        "Gather from launch to wait, Unsharded Param from wait to free, Reduce Scatter from the "
        "copy that is sent to its free; in brackets the stream that makes it."
    )
    if len(ticks) < len(ledger.totals):
        note += (
            f" Drawn are {len(ticks):,} of {len(ledger.totals):,} moments: of each run of them "
            f"the one with the most bytes, and all within {NEAR} of the peak."
        )
    return note


def _ranges(ledger: Ledger, ticks: Matrix, texts: Strings) -> Iterator[list[int]]:
    """What is alive on the device at a tick that is drawn."""

    def node(tick: int | None) -> int:
        inside = tick is not None and 0 <= tick < len(ledger.totals)
        return texts(ledger.moments[(tick or 0) // 2].node) if inside else 0

    for each in ledger.ranges:
        first = int(np.searchsorted(ticks, each.born))
        died = len(ledger.totals) if each.died is None else each.died
        if each.host or not each.bytes or first == len(ticks) or ticks[first] >= died:
            continue
        yield [
            texts(each.name),
            texts(each.op),
            texts(each.module),
            each.category.column,
            each.bytes,
            each.born,
            -1 if each.died is None else each.died,
            texts(each.stream),
            texts(line_text(each.line)),
            node(each.born),
            node(each.died),
        ]


# -- the schedule -------------------------------------------------------------------------------


def _bars(ledger: Ledger, texts: Strings) -> tuple[list[Any], list[Any], int]:
    """Bars per category, labels of lanes ``(lane, text)``, and how many lanes there are."""
    groups = _together(ledger)
    found: list[Any] = []
    labels = []
    lane_count = 0

    def node(tick: int) -> int:
        return texts(ledger.moments[min(tick // 2, len(ledger.moments) - 1)].node)

    for category in SENT:
        drawn_bars = []
        for kind, stream in groups:
            if kind is not category:
                continue
            bars = list(lanes(groups[kind, stream], ledger))
            labels.append((lane_count, f"{category.value}<br>({stream})"))
            for bar in bars:
                lane = lane_count + bar.lane
                ends = [node(bar.begin), node(bar.end)]
                drawn_bars.append([lane, bar.begin, bar.end, bar.bytes, texts(bar.name), *ends])
            lane_count += max(2, 1 + max(bar.lane for bar in bars))
        if drawn_bars:
            found.append({"name": category.value, "color": category.color, "bars": drawn_bars})
    return found, labels, lane_count


def _together(ledger: Ledger) -> dict[tuple[Category, str], list[list[LiveRange]]]:
    """Ranges of what is sent, by category and stream; what dies at once is one group.

    Parameters of a unit are gathered and freed at once, but copied one by one.
    """
    found: dict[tuple[Category, str], dict[int, list[LiveRange]]] = {}
    for each in ledger.ranges:
        if each.category in SENT and not each.host and each.born >= 0 and each.bytes:
            groups = found.setdefault((each.category, each.stream), {})
            groups.setdefault(_death(ledger, each), []).append(each)
    return {key: list(groups.values()) for key, groups in found.items()}


def _death(ledger: Ledger, each: LiveRange) -> int:
    return len(ledger.totals) if each.died is None else each.died


def lanes(groups: Sequence[Sequence[LiveRange]], ledger: Ledger) -> Iterator[Bar]:
    """A bar per group, from its first birth to its death, in the first lane that is free."""
    busy: list[int] = []
    for ranges in sorted(groups, key=lambda group: group[0].born):
        born, died = min(each.born for each in ranges), _death(ledger, ranges[0])
        free = (lane for lane, until in enumerate(busy) if until <= born)
        lane = min(next(free, len(busy)), LANES - 1)
        if lane == len(busy):
            busy.append(died)
        busy[lane] = max(busy[lane], died)
        yield Bar(lane, born, died, sum(each.bytes for each in ranges), _together_named(ranges))


def _together_named(ranges: Sequence[LiveRange]) -> str:
    """The only name, or what all modules have in common and how many there are."""
    if len(ranges) == 1:
        return ranges[0].name
    parts = [each.module.split(".") for each in ranges]
    common = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return f"{'.'.join(common) or '(root)'}: {len(ranges)} parameters"


# -- tables -------------------------------------------------------------------------------------


def _rows(
    report: MemoryReport, first_step: bool, states: Sequence[State], texts: Strings
) -> Iterator[list[Any]]:
    """Module, state, call, micro-batch, total, owned, ``[category, bytes, ...]``, on the CPU."""
    for where, row, owned in report.figures(first_step=first_step):
        sizes = [v for i in range(HALF) if row[i] for v in (i, int(row[i]))]
        place = [texts(where.module), states.index(where.state), where.call, where.micro_batch]
        device, own, host = row[:HALF], owned[:HALF], row[HALF:]
        yield [*place, int(device.sum()), int(own.sum()), sizes, int(host.sum())]
