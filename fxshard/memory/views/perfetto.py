"""A step as a trace for ui.perfetto.dev and chrome://tracing.

The format is in `fxshard.cost.trace_events`.

Note: time
==========
A program has no clock: a tick of the ledger is drawn as a microsecond, so that every operator takes
two. The order is right, and which bytes are alive; durations are not. `memory_events` draws the
same bytes over times that someone else has estimated (`fxshard.cost.perfetto`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxshard.cost import trace_events
from fxshard.cost.trace_events import BUFFERS, MEMORY, STREAMS, Event
from fxshard.memory.category import CATEGORIES, SENT
from fxshard.memory.ledger import Ledger
from fxshard.memory.report import MemoryReport
from fxshard.memory.views.serialize import streams


def text(report: MemoryReport, *, first_step: bool = False) -> str:
    """The trace as JSON."""
    ledger = report.ledger(first_step=first_step)
    names = streams(ledger)
    events = [
        *trace_events.processes({STREAMS: "streams"}),
        *trace_events.threads(["phases", *(f"stream {name}" for name in names)]),
        *_phases(ledger),
        *_operators(ledger, names),
        *memory_events(ledger, range(2 * len(ledger.moments) + 1), offloaded=report.offloaded),
    ]
    unit = {"unit of time": "tick of the schedule, not a duration"}
    return trace_events.text(events, "ns", **unit, peak_bytes=int(ledger.totals.max()))


def memory_events(ledger: Ledger, times: Sequence[float], *, offloaded: bool) -> list[Event]:
    """Bytes by category and the lives of what is sent.

    Args:
        ledger: the step.
        times: microseconds per tick of it, and of the end after them; never falling.
        offloaded: what is on the CPU has a curve too.
    """
    return [
        *trace_events.processes({MEMORY: "memory of one rank", BUFFERS: "gathers and reduces"}),
        *_counters(ledger, offloaded, times),
        *_buffers(ledger, times),
    ]


def _counters(ledger: Ledger, offloaded: bool, times: Sequence[float]) -> Iterator[Event]:
    """A value whenever it changes."""
    curves = {"total": ledger.totals}
    curves |= {category.value: ledger.bytes[:, i] for i, category in enumerate(CATEGORIES)}
    if offloaded:
        curves["CPU total"] = ledger.host_totals
    for name, curve in curves.items():
        before = None
        for time, size in zip(times, curve.tolist(), strict=False):  # the end has no bytes
            if size != before:
                where = {"ph": "C", "pid": MEMORY, "name": name}
                yield where | {"ts": time, "args": {"bytes": size}}
            before = size


def _phases(ledger: Ledger) -> Iterator[Event]:
    for phase in ledger.phases:
        length = 2 * (1 + phase.points)
        details = {"micro_batch": phase.micro_batch}
        yield trace_events.bar(0, phase.name, phase.begin, length, **details)


def _operators(ledger: Ledger, names: list[str]) -> Iterator[Event]:
    starts = {phase.start for phase in ledger.phases}
    for point, moment in enumerate(ledger.moments):
        if point not in starts:
            thread = 1 + names.index(moment.stream)  # the phases are the first
            details = {"node": moment.node, "module": moment.module, "line": moment.line}
            yield trace_events.bar(thread, moment.op or moment.node, 2 * point, 2, **details)


def _buffers(ledger: Ledger, times: Sequence[float]) -> Iterator[Event]:
    """What is gathered and what is reduced, from its birth to its free."""
    for number, each in enumerate(ledger.ranges):
        if each.category not in SENT or each.host or each.born < 0:
            continue
        kind = each.category.value
        shared = {"pid": BUFFERS, "tid": 0, "cat": kind, "id": number}
        shared["name"] = f"{kind}: {each.name}"
        details = {"bytes": each.bytes, "module": each.module, "stream": each.stream}
        yield {**shared, "ph": "b", "ts": times[each.born], "args": details}
        yield {**shared, "ph": "e", "ts": times[-1 if each.died is None else each.died]}
