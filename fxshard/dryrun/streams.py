"""Streams of a GPU that is not there: which one is current, and what waits for what.

Memory depends on the current stream. What waits for what counts for blocks with ``record_stream``
alone: until when the GPU has done what the host asked of it is not known, but what has to be over
by then is, wherever the host waits for an event.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from fxshard.dryrun.position import Position

# FSDP2 makes its streams in this order (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py,
# `FSDPCommContext.lazy_init`).
OF_FSDP = ("all-gather copy-in", "all-gather", "reduce-scatter", "all-reduce")
COMPUTE = "compute"


# Per stream, by its name: all that was asked of it up to this tick is over.
Over = dict[str, int]


def _later(one: Over, other: Over) -> Over:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in one.keys() | other.keys()}


class Event:
    """``torch.cuda.Event``: nothing runs, so no time passes."""

    streams: Streams

    def __init__(self, *_: Any, **__: Any) -> None:
        self.over: Over = {}

    def record(self, stream: Stream | None = None) -> Event:
        """Returns itself, as ``torch.Event.record``."""
        self.over = (stream or self.streams.current()).over()
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """The stream, or the current one, does what follows once the event has happened."""
        (stream or self.streams.current()).wait_event(self)

    def query(self) -> bool:
        """True: it has happened."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        self.streams.host_waits(self.over)

    def elapsed_time(self, *_: Any) -> float:
        """0 milliseconds: no time passes."""
        return 0.0


class Stream:
    """``torch.cuda.Stream``: a name; the allocator reuses memory within a stream only."""

    streams: Streams

    def __init__(self, name: str) -> None:
        self.name = name
        self._waited_for: Over = {}

    def over(self) -> Over:
        """What is over when all is done that was asked of the stream so far."""
        return self._waited_for | {self.name: self.streams.tick()}

    def wait_stream(self, stream: Stream) -> None:
        """What follows runs once `stream` has done what was asked of it so far."""
        self._waited_for = _later(self._waited_for, stream.over())

    def wait_event(self, event: Event) -> None:
        """What follows runs once `event` has happened."""
        self._waited_for = _later(self._waited_for, event.over)

    def record_event(self, event: Event | None = None) -> Event:
        """The event that all that was asked of the stream so far is done."""
        return (event or self.streams.Event()).record(self)

    def synchronize(self) -> None:
        """The host waits."""
        self.streams.host_waits(self.over())

    def query(self) -> bool:
        """True: all is done."""
        return True

    def is_capturing(self) -> bool:
        """False: no CUDA graph is made."""
        return False


class Streams:
    """The streams of one GPU, and the one that is current; also FSDP2's handle of the device."""

    def __init__(self, position: Position) -> None:
        self._position = position
        numbers = itertools.count(1)
        self._names = [COMPUTE]

        class OurEvent(Event):
            """``torch.cuda.Event``."""

            streams: Streams = self

        class OurStream(Stream):
            """A stream of this GPU."""

            streams: Streams = self

        class UsersStream(OurStream):
            """``torch.cuda.Stream`` as the user makes it."""

            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(f"stream {next(numbers)}")
                self.streams._names.append(self.name)

        self._made = OurStream
        self.Event: type[Event] = OurEvent
        self.kind: type[Stream] = UsersStream
        self.default: Stream = OurStream(COMPUTE)
        self._current = [self.default]
        self._of_fsdp = itertools.cycle(OF_FSDP)

    def tick(self) -> int:
        """Now, as `fxshard.dryrun.tape.Tape` counts."""
        return 2 * self._position.tape.last + 1

    def host_waits(self, over: Over) -> None:
        """The host goes on when this is over."""
        self._position.tape.waited.append((self.tick(), over))

    def synchronize(self, *_: Any) -> None:
        """``torch.cuda.synchronize``."""
        self.host_waits(dict.fromkeys((*self._names, *OF_FSDP), self.tick()))

    def Stream(self, *_: Any, **__: Any) -> Stream:
        """A stream of FSDP2's."""
        return self._made(next(self._of_fsdp))

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """``with torch.cuda.stream(stream):``."""
        self._current.append(stream or self._current[-1])
        self._position.stream = self._current[-1].name
        try:
            yield
        finally:
            self._current.pop()
            self._position.stream = self._current[-1].name

    stream = using

    def set(self, stream: Any) -> None:
        """``torch.cuda.set_stream``."""
        self._current[-1] = stream
        self._position.stream = stream.name

    def current(self, *_: Any) -> Any:
        """``torch.cuda.current_stream``."""
        return self._current[-1]

    current_stream = current

    @staticmethod
    def current_device() -> int:
        """0: a process has one GPU."""
        return 0

    @staticmethod
    def device_count() -> int:
        """1."""
        return 1

    @staticmethod
    def set_device(*_: Any) -> None:
        """Nothing."""

    @staticmethod
    def is_available() -> bool:
        """True."""
        return True

    @staticmethod
    def is_initialized() -> bool:
        """True."""
        return True
