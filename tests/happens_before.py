"""Races of what really runs, found on CPU tensors, without a GPU.

`Machine` takes the place of ``torch.cuda`` in a world: streams and events with vector clocks, which
say what has happened before what. `Watch` sees every operator, and asks for each access whether it
comes after those that it conflicts with:

- what is read was written before; what is written was read and written before;
- memory comes from the pool of the stream on which it is asked for, and goes back to that pool as
  soon as nothing refers to it, or its storage is resized to nothing (`Watch.freed`), whoever still
  uses it. What is made of it next may be any of it, so that all that ever touched memory of the
  pool has happened before the first access;
- a kernel of the compute stream may take memory for the time that it runs;
- what is made empty is written at once where torch's deterministic algorithms fill it.

It knows nothing of programs, schedules and what `fxshard.verify` asks for.
"""

import contextlib
import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = Counter[int]  # per stream: how many of its operators are over
COMPUTE = 0
HOST = -1  # the pool of pinned memory: its allocator waits for copies before it gives memory again


class Stream:
    def __init__(self, machine: "Machine", number: int) -> None:
        self.machine, self.number = machine, number
        self.clock: Clock = Counter()

    def wait_event(self, event: "Event") -> None:
        self.clock |= event.clock

    def wait_stream(self, other: "Stream") -> None:
        self.clock |= other.clock

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits: whatever it issues from now on comes after."""
        for stream in self.machine.streams:
            stream.clock |= self.clock


class Event:
    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.clock: Clock = Counter()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Counter((stream or self.machine.current_stream()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.machine.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        for stream in self.machine.streams:
            stream.clock |= self.clock


class Machine:
    """What of ``torch.cuda`` makes streams and events."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._local = threading.local()
        self._default = self.Stream()

    def Stream(self, *args: Any, **kwargs: Any) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    def Event(self, *args: Any, **kwargs: Any) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._local, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before


@dataclasses.dataclass
class _Memory:
    """A storage: what its memory was before, and who touched it since."""

    pool: int
    since: Clock
    write: tuple[int, int] | None = None  # stream, position
    reads: Clock = dataclasses.field(default_factory=Counter)


class Watch(TorchDispatchMode):
    """Counts races while it is entered.

    Attributes:
        races: operator, its stream, what it does before what has happened -> how often.
        operators: how many it has looked at.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.races: Counter[tuple[str, int, str]] = Counter()
        self.operators = 0
        self._pinned = False
        self._memory: dict[int, _Memory] = {}
        self._gone: dict[int, Clock] = {}  # per pool: who touched memory that is free again

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """What is made inside is pinned memory."""
        self._pinned = True
        try:
            yield
        finally:
            self._pinned = False

    def freed(self, tensors: Iterable[Tensor]) -> None:
        """The storages of `tensors` are about to give their memory back."""
        for tensor in tensors:
            self._free(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        read, written = _accesses(function, args, kwargs or {})
        given = {key(t) for t in (*read, *written)}
        made = [t for t in _tensors(result) if key(t) not in given | self._memory.keys()]
        stream = self.machine.current_stream()
        for tensor in made:
            self._of(tensor, HOST if self._pinned else stream.number)
        if _runs_nothing(function, written, made, _tensors(result)):
            return result
        self.operators += 1
        stream.clock[stream.number] += 1
        at = stream.clock[stream.number]
        name = str(function)
        for tensor in read:
            memory = self._of(tensor)
            self._check(name, stream, "reads", memory, writes=False)
            memory.reads[stream.number] = at
        for tensor in (*written, *made):
            memory = self._of(tensor)
            self._check(name, stream, "writes", memory, writes=True)
            memory.write, memory.reads = (stream.number, at), Counter()
        if stream.number == COMPUTE:
            gone = self._gone.setdefault(COMPUTE, Counter())
            self._after(name, stream, "takes memory for a while that was used on", gone)
            gone[COMPUTE] = at
        return result

    def _of(self, tensor: Tensor, pool: int = HOST) -> _Memory:
        """What is known of a storage; of a new one, where its memory comes from.

        One that was there before this looked is nobody's.
        """
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number not in self._memory:
            since = Counter(self._gone[pool]) if pool in self._gone else Counter()
            self._memory[number] = _Memory(pool, since)
            weakref.finalize(storage, self._free, number)
        return self._memory[number]

    def _free(self, number: int) -> None:
        memory = self._memory.pop(number, None)
        if memory is not None and memory.pool != HOST:
            gone = self._gone.setdefault(memory.pool, Counter())
            gone |= memory.reads
            if memory.write is not None:
                gone |= Counter([memory.write[0]] * memory.write[1])
            self._gone[memory.pool] = gone

    def _check(self, name: str, stream: Stream, does: str, memory: _Memory, writes: bool) -> None:
        self._after(name, stream, f"{does} memory that was used on", memory.since)
        if memory.write is not None:
            write = {memory.write[0]: memory.write[1]}
            self._after(name, stream, f"{does} what is written on", write)
        if writes:
            self._after(name, stream, f"{does} what is read on", memory.reads)

    def _after(self, name: str, stream: Stream, what: str, clock: dict[int, int]) -> None:
        for other, position in clock.items():
            if other != stream.number and stream.clock[other] < position:
                self.races[name, stream.number, f"{what} stream {other}"] += 1


def key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.device.type != "meta"]


def _accesses(function: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operator reads, and that it writes."""
    if function.namespace == "c10d":  # results come first; what is reduced in place is both
        first = _tensors(args[0])
        rest = [t for arg in args[1:] for t in _tensors(arg)]
        return rest or first, first
    read: list[Tensor] = []
    written: list[Tensor] = []
    schema = function._schema.arguments
    for argument, value in (
        *zip(schema, args, strict=False),
        *((argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs),
    ):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(_tensors(value))
    return read, written


_ALLOCATE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def _runs_nothing(
    function: Any, written: list[Tensor], made: list[Tensor], results: list[Tensor]
) -> bool:
    """Whether an operator only makes room, or a view."""
    if function.namespace == "aten" and function._overloadpacket.__name__ in _ALLOCATE:
        fills = torch.utils.deterministic.fill_uninitialized_memory
        return not (fills and torch.are_deterministic_algorithms_enabled())
    return bool(results) and not written and not made
