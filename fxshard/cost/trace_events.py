"""The format of traces for ui.perfetto.dev and chrome://tracing, of memory and of time.

It is the JSON form of Chrome's traces ("Trace Event Format", Google 2016): complete events ("X"),
counters ("C"), nestable asynchronous events ("b", "e") and metadata ("M").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

MEMORY, STREAMS, BUFFERS = 1, 2, 3  # processes of a trace

Event = dict[str, Any]


class PhaseOfStep(Protocol):
    """A phase of a step as a ledger of memory has it."""

    @property
    def name(self) -> str:
        """Such as "forward", "backward", "optimizer"."""

    @property
    def micro_batch(self) -> int:
        """Which of the step's, from 0."""

    @property
    def points(self) -> int:
        """How many operators and rows it has."""


class DrawsMemory(Protocol):
    """What can draw the bytes of a step over times that someone else has estimated."""

    def trace_events(self, clock: Callable[[Iterable[Any]], list[float]]) -> list[Event]:
        """Args: `clock`: phases -> microseconds per tick of the ledger, and of the end."""


def processes(names: dict[int, str]) -> Iterator[Event]:
    """What the groups of tracks are called; they stand in the order of their numbers."""
    for process, name in names.items():
        where = {"ph": "M", "pid": process}
        yield {**where, "name": "process_name", "args": {"name": name}}
        yield {**where, "name": "process_sort_index", "args": {"sort_index": process}}


def threads(names: Sequence[str]) -> Iterator[Event]:
    """What the tracks of `STREAMS` are called, from number 0 on."""
    for thread, name in enumerate(names):
        where = {"ph": "M", "pid": STREAMS, "tid": thread}
        yield {**where, "name": "thread_name", "args": {"name": name}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": thread}}


def bar(thread: int, name: str, begin: float, length: float, **details: Any) -> Event:
    """A bar on a track of `STREAMS`; `details` are shown when it is chosen."""
    where = {"ph": "X", "pid": STREAMS, "tid": thread, "name": name}
    return where | {"ts": begin, "dur": length} | ({"args": details} if details else {})


def text(events: Iterable[Event], unit: str, **about: Any) -> str:
    """The file. Args: `unit`: of times, as it is shown: "ns" or "ms"; `about`: the file."""
    return json.dumps({"traceEvents": list(events), "displayTimeUnit": unit, "otherData": about})
