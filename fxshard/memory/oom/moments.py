"""What was held at one event of a recording.

A snapshot has the blocks and segments of its end, and what had happened before. The state at an
earlier event is that of the end with everything after the event undone, last first.

Note: sizes of blocks
=====================
An event says how many bytes were asked for, a block of the end how large it is. A block that is
gone by the end has the size that the allocator rounds its request up to; a rest that was not split
off is then in the figures as free memory.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fxshard.memory.cuda.settings import SMALL_SEGMENT, AllocatorSettings
from fxshard.memory.oom import stacks
from fxshard.memory.oom.snapshot import AllocatorEvent, Snapshot, SnapshotSegment, Stack
from fxshard.memory.oom.stacks import StackOrigin


@dataclasses.dataclass(frozen=True)
class HeldBlock:
    """One block that was in use, or waited for other streams.

    Attributes:
        bytes: asked for.
        block: the size of its block: `bytes`, rounded up.
        address: where it was.
        stream: that it was asked for on.
        waiting: freed by the program, and not yet free for reuse (``record_stream``).
        origin: what its stack tells.
        since: index of the event that allocated it; None: before the recording.
    """

    bytes: int
    block: int
    address: int
    stream: int
    waiting: bool
    origin: StackOrigin
    since: int | None


@dataclasses.dataclass(frozen=True)
class Piece:
    """Memory inside a segment that was free.

    Attributes:
        bytes: its size.
        address: where it was.
        stream: that it could be reused on.
        small: of the pool for requests up to 1 MiB.
        private: of a memory pool of the user's own, or of a CUDA graph.
    """

    bytes: int
    address: int
    stream: int
    small: bool
    private: bool


@dataclasses.dataclass(frozen=True)
class AllocatorMoment:
    """What was held at an event.

    Attributes:
        name: "out of memory", "highest point" or "end".
        event: index of the event in the trace, after which this holds; None: no trace.
        reserved: bytes of segments, or of mapped pages.
        held: every block in use, largest first.
        free: every free piece, largest first.
    """

    name: str
    event: int | None
    reserved: int
    held: tuple[HeldBlock, ...]
    free: tuple[Piece, ...]

    @property
    def requested_bytes(self) -> int:
        """Asked for, of what is in use or waiting."""
        return sum(each.bytes for each in self.held)

    @property
    def rounding_bytes(self) -> int:
        """What blocks have beyond what was asked for."""
        return sum(each.block - each.bytes for each in self.held)

    @property
    def waiting_bytes(self) -> int:
        """Blocks that the program has freed, and that wait for other streams."""
        return sum(each.block for each in self.held if each.waiting)

    @property
    def free_bytes(self) -> int:
        """Reserved, and in no block."""
        return sum(each.bytes for each in self.free)

    def by(self, *names: str) -> dict[tuple[str, ...], tuple[int, int]]:
        """Bytes and number of blocks per value of fields of `StackOrigin`, the most bytes first."""
        found: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
        for each in self.held:
            sums = found[tuple(getattr(each.origin, name) for name in names)]
            sums[0] += each.bytes
            sums[1] += 1
        ordered = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
        return {key: (sums[0], sums[1]) for key, sums in ordered}


class _ReservedRange(NamedTuple):
    """Reserved addresses."""

    stop: int
    stream: int
    small: bool
    expandable: bool
    private: bool


class _Live(NamedTuple):
    """A block that is in use or waits."""

    bytes: int
    block: int
    stream: int
    waiting: bool
    stack: Stack


class Recording:
    """The events of one device, and how to get to the state at any of them."""

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.segments: list[SnapshotSegment] = [
            each for each in snapshot.segments if each.device == device
        ]
        traces = snapshot.traces
        self.events: Sequence[AllocatorEvent] = traces[device] if device < len(traces) else ()
        self.settings: AllocatorSettings = snapshot.settings or AllocatorSettings()
        self.has_stacks: bool = any(event.stack for event in self.events)
        self._origins: dict[tuple[int, str, bool], StackOrigin] = {}

    def out_of_memory(self) -> int | None:
        """Index of the last allocation that failed."""
        found = (i for i in reversed(range(len(self.events))) if self.events[i].action == "oom")
        return next(found, None)

    def origin(self, stack: Stack, label: str = "", *, recorded: bool = True) -> StackOrigin:
        """`stacks.origin`, once per stack."""
        key = (id(stack), label, recorded)
        found = self._origins.get(key)
        if found is None:
            recorded_ = recorded and self.has_stacks
            found = self._origins[key] = stacks.origin(stack, label=label, recorded=recorded_)
        return found

    def highest(self) -> int | None:
        """Index of the event after which the most bytes are in use; the first of them."""
        sizes = {"alloc": 1, "free_completed": -1}
        level = highest = 0
        found = None
        for index, event in enumerate(self.events):
            level += sizes.get(event.action, 0) * event.bytes
            if found is None or level > highest:
                highest, found = level, index
        return found

    def at(self, name: str, event: int | None) -> AllocatorMoment:
        """The state after an event; None: at the end."""
        last = len(self.events) - 1 if event is None else event
        live, ranges = self._end()
        for index in range(len(self.events) - 1, last, -1):
            self._undo(self.events[index], live, ranges)
        held = self._held(live, last)
        return AllocatorMoment(
            name,
            last if self.events else None,
            sum(each.stop - start for start, each in ranges.items()),
            tuple(sorted(held, key=lambda each: (-each.bytes, each.address))),
            tuple(sorted(_pieces(held, ranges), key=lambda each: (-each.bytes, each.address))),
        )

    def _end(self) -> tuple[dict[int, _Live], dict[int, _ReservedRange]]:
        live, ranges = {}, {}
        for each in self.segments:
            stop = each.address + each.bytes
            kind = (each.stream, each.small, each.expandable, each.private)
            ranges[each.address] = _ReservedRange(stop, *kind)
            for block in each.blocks:
                if block.state != "free":
                    waits = block.state == "waiting"
                    live[block.address] = _Live(
                        block.requested, block.bytes, each.stream, waits, block.stack
                    )
        return live, ranges

    def _undo(
        self, event: AllocatorEvent, live: dict[int, _Live], ranges: dict[int, _ReservedRange]
    ) -> None:
        start, stop = event.address, event.address + event.bytes
        if event.action == "alloc":
            live.pop(start, None)
        elif event.action == "free_completed":
            size = self.settings.round_size(event.bytes)
            live[start] = _Live(event.bytes, size, event.stream, True, ())
        elif event.action == "free_requested" and start in live:
            live[start] = live[start]._replace(waiting=False)
        elif event.action in ("segment_alloc", "segment_map"):
            _without(ranges, start, stop)
        elif event.action in ("segment_free", "segment_unmap"):
            mapped = event.action == "segment_unmap"
            small = event.bytes == SMALL_SEGMENT
            ranges[start] = _ReservedRange(stop, event.stream, small, mapped, event.private)

    def _held(self, live: dict[int, _Live], last: int) -> list[HeldBlock]:
        born = self._born(last)
        steps = self._phases(last)
        held = []
        for address, each in live.items():
            since = born.get(address)
            if since is None:
                origin = self.origin(each.stack, recorded=bool(each.stack))
            else:
                event = self.events[since]
                origin = self.origin(event.stack, event.label)
                forward, backward, optimizer = (step > since for step in steps)
                origin = stacks.settled(
                    origin,
                    then_forward=forward,
                    then_optimizer=optimizer,
                    then_other=forward or backward,
                )
            sizes = (each.bytes, max(each.block, each.bytes))
            held.append(HeldBlock(*sizes, address, each.stream, each.waiting, origin, since))
        return held

    def _born(self, last: int) -> dict[int, int]:
        """The event that allocated what has this address after the event `last`."""
        born: dict[int, int] = {}
        for index in range(last + 1):
            event = self.events[index]
            if event.action == "alloc":
                born[event.address] = index
            elif event.action == "free_completed":
                born.pop(event.address, None)
        return born

    def _phases(self, last: int) -> tuple[int, int, int]:
        """The last event up to `last` in which forward, backward, an optimizer allocated; or -1."""
        names = (stacks.FORWARD_PHASE, stacks.BACKWARD_PHASE, stacks.OPTIMIZER_PHASE)
        found = dict.fromkeys(names, -1)
        for index in range(last, -1, -1):
            event = self.events[index]
            if event.action == "alloc":
                phase = self.origin(event.stack, event.label).phase
                if found.get(phase) == -1:
                    found[phase] = index
                    if min(found.values()) >= 0:
                        break
        return tuple(found.values())  # type: ignore[return-value]


def _without(ranges: dict[int, _ReservedRange], start: int, stop: int) -> None:
    """Take addresses out; what is left of ranges that they were part of stays."""
    if start in ranges and ranges[start].stop == stop:
        del ranges[start]
        return
    for begin, each in list(ranges.items()):
        if begin < stop and start < each.stop:
            del ranges[begin]
            if begin < start:
                ranges[begin] = each._replace(stop=start)
            if stop < each.stop:
                ranges[stop] = each


def _pieces(held: Sequence[HeldBlock], ranges: dict[int, _ReservedRange]) -> list[Piece]:
    """What no block has, of ranges; neighbours in one expandable segment are one piece."""
    blocks = sorted((each.address, each.address + each.block) for each in held)
    found: list[Piece] = []
    for start, each in sorted(_joined(ranges).items()):
        at = start
        first = bisect.bisect_left(blocks, (start, 0))
        for begin, end in blocks[first:]:
            if begin >= each.stop:
                break
            if begin > at:
                found.append(Piece(begin - at, at, each.stream, each.small, each.private))
            at = max(at, end)
        if at < each.stop:
            found.append(Piece(each.stop - at, at, each.stream, each.small, each.private))
    return found


def _joined(ranges: dict[int, _ReservedRange]) -> dict[int, _ReservedRange]:
    """Pages of one expandable segment that lie side by side are one range."""
    found: dict[int, _ReservedRange] = {}
    last = -1
    for start, each in sorted(ranges.items()):
        before = found.get(last)
        if each.expandable and before == each._replace(stop=start):  # of the same stream and pool
            found[last] = each
        else:
            found[start] = each
            last = start
    return found
