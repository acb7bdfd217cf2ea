"""A step as a trace for ui.perfetto.dev and chrome://tracing.

The format is the JSON form of Chrome's traces ("Trace Event Format", Google 2016): complete events
("X"), counters ("C"), nestable asynchronous events ("b", "e") and metadata ("M").

Note: time
==========
A program has no clock: a tick of the ledger is drawn as a microsecond, so that every operator takes
two. The order is right, and which bytes are alive; durations are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fxshard.memory.category import CATEGORIES, Category
from fxshard.memory.ledger import Ledger
from fxshard.memory.report import MemoryReport
from fxshard.memory.views.serialize import streams

MEMORY, STREAMS, BUFFERS = 1, 2, 3  # processes of the trace
PHASES = 0  # thread of the phases; those of the streams follow
TOTAL = "total"
SENT = (Category.ALL_GATHER, Category.UNSHARDED_PARAM, Category.REDUCE_SCATTER)

Event = dict[str, Any]


def text(report: MemoryReport, *, first_step: bool = False) -> str:
    """The trace as JSON."""
    ledger = report.ledger(first_step=first_step)
    names = streams(ledger)
    events = [
        *_metadata(names),
        *_counters(ledger, report.program.offloaded),
        *_phases(ledger),
        *_operators(ledger, names),
        *_buffers(ledger),
    ]
    said = {"unit of time": "tick of the schedule, not a duration", "peak_bytes": report.peak_bytes}
    if first_step:
        said["peak_bytes"] = report.first_step_peak_bytes
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": said})


def _metadata(names: list[str]) -> Iterator[Event]:
    processes = {MEMORY: "memory of one rank", STREAMS: "streams", BUFFERS: "gathers and reduces"}
    for process, name in processes.items():
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": process,
            "name": "process_sort_index",
            "args": {"sort_index": process},
        }
    for thread, name in enumerate(["phases", *(f"stream {name}" for name in names)]):
        where = {"ph": "M", "pid": STREAMS, "tid": thread}
        yield {**where, "name": "thread_name", "args": {"name": name}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _counters(ledger: Ledger, offloaded: bool) -> Iterator[Event]:
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
                    "ts": tick,
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


def _buffers(ledger: Ledger) -> Iterator[Event]:
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
        yield {**shared, "ph": "b", "ts": each.born, "args": said}
        yield {**shared, "ph": "e", "ts": end if each.died is None else each.died}
