"""Streams of a GPU that is not there: which one is current is all that memory depends on."""

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


class Event:
    """``torch.cuda.Event``: nothing runs, so nothing is waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> Event:
        """Returns itself, as ``torch.Event.record``."""
        return self

    def wait(self, *_: Any) -> None:
        """Nothing."""

    def query(self) -> bool:
        """True: it has happened."""
        return True

    def synchronize(self) -> None:
        """Nothing."""

    def elapsed_time(self, *_: Any) -> float:
        """0 milliseconds: no time passes."""
        return 0.0


class Stream:
    """``torch.cuda.Stream``: a name; the allocator reuses memory within a stream only."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, *_: Any) -> None:
        """Nothing."""

    def wait_event(self, *_: Any) -> None:
        """Nothing."""

    def record_event(self, *_: Any) -> Event:
        """An event."""
        return Event()

    def synchronize(self) -> None:
        """Nothing."""

    def query(self) -> bool:
        """True: all is done."""
        return True

    def is_capturing(self) -> bool:
        """False: no CUDA graph is made."""
        return False


class Streams:
    """The streams of one GPU, and the one that is current; also FSDP2's handle of the device."""

    Event = Event

    def __init__(self, position: Position) -> None:
        self._position = position
        self.default = Stream(COMPUTE)
        self._current = [self.default]
        numbers = itertools.count(1)

        class UsersStream(Stream):
            """``torch.cuda.Stream`` as the user makes it."""

            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(f"stream {next(numbers)}")

        self.kind = UsersStream
        self._of_fsdp = itertools.cycle(OF_FSDP)

    def Stream(self, *_: Any, **__: Any) -> Stream:
        """A stream of FSDP2's."""
        return Stream(next(self._of_fsdp))

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
