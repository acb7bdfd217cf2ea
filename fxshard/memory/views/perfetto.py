"""A step as a trace for ui.perfetto.dev and chrome://tracing.

The format is in `fxshard.cost.trace_events`.

Note: time
==========
A program has no clock: a tick of the ledger is drawn as a microsecond, so that every operator takes
two. The order is right, and which bytes are alive; durations are not. `memory_events` draws the
same bytes over times that someone else has estimated (`fxshard.cost.perfetto`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from fxshard.cost.trace_events import BUFFERS, MEMORY, STREAMS, Event, processes, threads
from fxshard.memory.category import CATEGORIES, Category
from fxshard.memory.ledger import Ledger
from fxshard.memory.report import MemoryReport
from fxshard.memory.views.serialize import streams

PHASES = 0  # thread of the phases; those of the streams follow
TOTAL = "total"
SENT_NAME = "gathers and reduces"
SENT = (Category.ALL_GATHER, Category.UNSHARDED_PARAM, Category.REDUCE_SCATTER)


def text(report: MemoryReport, *, first_step: bool = False) -> str:
    """The trace as JSON."""
    ledger = report.ledger(first_step=first_step)
    names = streams(ledger)
    events = [
        *processes({MEMORY: "memory of one rank", STREAMS: "streams", BUFFERS: SENT_NAME}),
        *threads(["phases", *(f"stream {name}" for name in names)]),
        *_counters(ledger, report.program.offloaded, range(2 * len(ledger.moments) + 1)),
        *_phases(ledger),
        *_operators(ledger, names),
        *_buffers(ledger, range(2 * len(ledger.moments) + 1)),
    ]
    said = {"unit of time": "tick of the schedule, not a duration", "peak_bytes": report.peak_bytes}
    if first_step:
        said["peak_bytes"] = report.first_step_peak_bytes
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": said})


def memory_events(report: MemoryReport, times: Sequence[float]) -> list[Event]:
    """Bytes by category and the lives of what is sent, in the steady step.

    Args:
        report: what is drawn.
        times: microseconds per tick of its ledger, and of the end behind them; never falling.
    """
    ledger = report.ledger()
    return [
        *processes({MEMORY: "memory of one rank", BUFFERS: SENT_NAME}),
        *_counters(ledger, report.program.offloaded, times),
        *_buffers(ledger, times),
    ]


def _counters(ledger: Ledger, offloaded: bool, times: Sequence[float]) -> Iterator[Event]:
    """A value whenever it changes."""
    half = len(CATEGORIES)
    curves = {TOTAL: ledger.totals}
    curves |= {category.value: ledger.bytes[:, i] for i, category in enumerate(CATEGORIES)}
    if offloaded:
        curves["CPU total"] = ledger.bytes[:, half:].sum(1)
    for name, curve in curves.items():
        before = None
        for tick, size in enumerate(curve.tolist()):
            if size != before:
                yield {
                    "ph": "C",
                    "pid": MEMORY,
                    "name": name,
                    "ts": times[tick],
                    "args": {"bytes": size},
                }
            before = size


def _phases(ledger: Ledger) -> Iterator[Event]:
    for phase in ledger.phases:
        yield {
            "ph": "X",
            "pid": STREAMS,
            "tid": PHASES,
            "name": phase.name,
            "ts": 2 * phase.start,
            "dur": 2 * (1 + phase.points),
            "args": {"micro_batch": phase.micro_batch},
        }


def _operators(ledger: Ledger, names: list[str]) -> Iterator[Event]:
    starts = {phase.start for phase in ledger.phases}
    for point, moment in enumerate(ledger.moments):
        if point not in starts:
            yield {
                "ph": "X",
                "pid": STREAMS,
                "tid": PHASES + 1 + names.index(moment.stream),
                "name": moment.op or moment.node,
                "ts": 2 * point,
                "dur": 2,
                "args": {"node": moment.node, "module": moment.module, "line": moment.line},
            }


def _buffers(ledger: Ledger, times: Sequence[float]) -> Iterator[Event]:
    """What is gathered and what is reduced, from its birth to its free."""
    end = 2 * len(ledger.moments)
    for number, each in enumerate(ledger.ranges):
        if each.category not in SENT or each.host or each.born < 0:
            continue
        shared = {
            "pid": BUFFERS,
            "tid": 0,
            "cat": each.category.value,
            "id": number,
            "name": f"{each.category.value}: {each.name}",
        }
        said = {
            "bytes": each.bytes,
            "module": each.module,
            "stream": each.stream,
        }
        yield {**shared, "ph": "b", "ts": times[each.born], "args": said}
        yield {**shared, "ph": "e", "ts": times[end if each.died is None else each.died]}
