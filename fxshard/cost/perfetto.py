"""An estimate as a trace for ui.perfetto.dev, beside the bytes that are alive.

Times are microseconds from the beginning of the step. Memory is taken and given back in program
order: its counters follow the clock of the compute stream, past each operator and each row.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from fxshard.cost import trace_events
from fxshard.cost.timeline import Estimate
from fxshard.cost.trace_events import DrawsMemory, Event, PhaseOfStep

MICROSECONDS = 1e6


def text(estimate: Estimate, memory: DrawsMemory | None = None) -> str:
    """The trace as JSON.

    Args:
        estimate: what is drawn, a track per stream; operators lie in the rows that run them.
        memory: of the same plan; None for no counters.
    """
    streams = list(dict.fromkeys(["compute", *(row.stream for row in estimate.rows)]))
    events = [
        *trace_events.processes({trace_events.STREAMS: "streams, estimated"}),
        *trace_events.threads([f"stream {name}" for name in streams]),
        *_rows(estimate, streams),
        *_operators(estimate),
    ]
    if memory is not None:
        events += memory.trace_events(functools.partial(times, estimate))
    about = {"hardware": estimate.hardware.name, "step_seconds": estimate.step_seconds}
    return trace_events.text(events, "ms", **about)


def _bar(thread: int, name: str, start: float, seconds: float, **details: Any) -> Event:
    return trace_events.bar(thread, name, start * MICROSECONDS, seconds * MICROSECONDS, **details)


def _rows(estimate: Estimate, streams: list[str]) -> Iterator[Event]:
    for row in estimate.rows:
        thread, name = streams.index(row.stream), f"{row.operation} {row.unit}"
        if row.exposed:
            waits = {"waits before": row.name}
            yield _bar(thread, "exposed", row.start - row.exposed, row.exposed, **waits)
        if row.seconds:
            details = {"row": row.name, "phase": row.phase, "micro_batch": row.micro_batch}
            yield _bar(thread, name, row.start, row.seconds, **details)


def _operators(estimate: Estimate) -> Iterator[Event]:
    starts = sorted(row.start for row in estimate.rows if row.stream == "compute" and row.seconds)
    for phase in estimate.phases:
        before = phase.start
        for name, end in zip(phase.operators, phase.ends, strict=True):
            # An operator starts where the one before it ended, or its row began after that.
            at = bisect.bisect_left(starts, end) - 1
            start = max(before, starts[at]) if at >= 0 else before
            if name and end > start:
                yield _bar(0, name, start, end - start)
            before = end


def times(estimate: Estimate, phases: Iterable[PhaseOfStep]) -> list[float]:
    """Microseconds per tick of a ledger with these phases, and of the end after them.

    What the estimate knows nothing of (the user's loss, ``zero_grad``) takes no time; the events of
    the optimizer share its time equally.
    """
    known = {(phase.name, phase.micro_batch): phase for phase in estimate.phases}
    last = estimate.rows[-1] if estimate.rows else None
    now = 0.0
    found: list[float] = []
    for phase in phases:
        ends: tuple[float, ...] = ()
        estimated = known.get((phase.name, phase.micro_batch))
        if estimated is not None:
            now, ends = estimated.start, estimated.ends
        elif phase.name == "optimizer" and last is not None and last.phase == phase.name:
            each = last.seconds / phase.points
            ends = tuple(last.start + each * (i + 1) for i in range(phase.points))
        found += [now, now]
        for point in range(phase.points):
            end = ends[point] if point < len(ends) else now
            found += [now, end]
            now = end
    return [tick * MICROSECONDS for tick in [*found, now]]
