"""One rank of an emulated world: collectives that take as long as a modelled link would need.

Only rank 0 exists. A collective writes what `FakeProcessGroup` writes (an all-gather repeats this
rank's input, a reduce-scatter keeps its chunk, an all-reduce its input), and keeps a stream of its
own busy until the modelled time is over, so that it overlaps with compute as a real one does, and
collectives of a group stand in line as NCCL's do. Everything measured with it is *emulated*.

On CUDA the time is that of the copies and of a spinning kernel on the link's stream. On a CPU the
copies are done at once, and `Work.wait` sleeps until the moment at which the link would be done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

SPIN = 2_000_000  # cycles of the kernel that a GPU's clock is read from


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects the ranks.

    Attributes:
        alpha: seconds per step of the ring, besides its bytes.
        beta: bytes per second that a rank sends.
    """

    alpha: float
    beta: float

    def seconds(self, kind: str, whole: int, world: int) -> float:
        """Of a ring: each of its ``world - 1`` steps sends a `world`-th of `whole` bytes; an
        all-reduce runs it twice (Thakur, Rabenseifner, Gropp 2005, sections 4.1 and 4.4).

        Args:
            kind: "all_gather", "reduce_scatter", "all_reduce" or "broadcast".
            whole: bytes of the larger side, of all tensors together.
        """
        rounds = 2 if kind == "all_reduce" else 1
        return rounds * (world - 1) * (self.alpha + whole / world / self.beta)


@dataclasses.dataclass
class Sent:
    """One collective.

    Attributes:
        kind: see `Link.seconds`.
        bytes: of the larger side.
        modelled: seconds that the link needs for it.
        began, done: by ``time.monotonic`` on a CPU: when the link began, and when its result could
            be used first (0.0: nobody waited for it); on CUDA they are events.
        waited: on a CPU, seconds for which the program had nothing else to do.
    """

    kind: str
    bytes: int
    modelled: float
    began: Any = 0.0
    done: Any = 0.0
    waited: float = 0.0


class EmulatedGroup(dist.ProcessGroup):
    """A process group of which only this rank exists; its collectives take modelled time.

    Attributes:
        sent: every collective, in order.
    """

    def __init__(self, rank: int, world: int, link: Link) -> None:
        super().__init__(rank, world)
        self._rank, self._world, self.link = rank, world, link
        self.sent: list[Sent] = []
        self._busy = 0.0  # until when, on a CPU
        self._stream: Any = None

    def size(self) -> int:
        return self._world

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "fake"

    @property
    def group_name(self) -> str:
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    # Each under the name that torch 2.11 calls, and under that of 2.13.

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [given], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def run() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                output.view(self._world, -1).copy_(given.reshape(1, -1).expand(self._world, -1))

        return self._send("all_gather", outputs, inputs, run)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def run() -> None:
            for row, given in zip(outputs, inputs, strict=True):
                for output in row:
                    output.copy_(given)

        return self._send("all_gather", [each for row in outputs for each in row], inputs, run)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [given], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def run() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                output.view(-1).copy_(given.reshape(self._world, -1)[self._rank])

        return self._send("reduce_scatter", inputs, outputs, run)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._send("all_reduce", tensors, [], lambda: None)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._send("all_reduce", tensors, [], lambda: None)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._send("broadcast", tensors, [], lambda: None)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._send("broadcast", [], [], lambda: None)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _send(self, kind: str, larger: Sequence[Tensor], other: Sequence[Tensor], run: Any) -> Any:
        size = sum(t.numel() * t.element_size() for t in larger)
        each = Sent(kind, size, self.link.seconds(kind, size, self._world))
        self.sent.append(each)
        if larger and larger[0].is_cuda:
            return self._on_cuda(each, [*larger, *other], run)
        run()
        each.began = max(time.monotonic(), self._busy)
        self._busy = each.began + each.modelled
        return _Done(each, self._busy)

    def _on_cuda(self, each: Sent, tensors: list[Tensor], run: Any) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        each.began, each.done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            each.began.record()
            # Copies read and write once what they send; last, so that what does not wait is seen.
            copied = 2 * each.bytes / memory_rate() if each.kind != "all_reduce" else 0.0
            spin(each.modelled - copied)
            run()
            each.done.record()
        return _OnStream(each, tensors)


class _Done(dist.Work):
    """On a CPU: done at a moment."""

    def __init__(self, sent: Sent, until: float) -> None:
        super().__init__()
        self.sent, self.until = sent, until

    def wait(self, timeout: Any = None) -> bool:
        asked = time.monotonic()
        if not self.sent.done:
            self.sent.waited = max(0.0, self.until - asked)
        while (left := self.until - time.monotonic()) > 0:
            time.sleep(left)
        self.sent.done = self.sent.done or time.monotonic()
        return True

    def is_completed(self) -> bool:
        return time.monotonic() >= self.until

    def is_success(self) -> bool:
        return True


class _OnStream(dist.Work):
    """On CUDA: done when the link's stream is; holds the tensors until someone waits, as NCCL."""

    def __init__(self, sent: Sent, tensors: list[Tensor]) -> None:
        super().__init__()
        self.sent, self.tensors = sent, tensors

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self.sent.done)
        self.tensors = []
        return True

    def is_completed(self) -> bool:
        return bool(self.sent.done.query())

    def is_success(self) -> bool:
        return True


_RATES: dict[str, float] = {}


def spin(seconds: float) -> None:
    """Keep the current stream busy for so long by one thread of one multiprocessor."""
    if seconds > 0:
        torch.cuda._sleep(int(seconds * _rate("cycles", _cycles)))


def memory_rate() -> float:
    """Bytes per second that copies on this GPU read and write together."""
    return _rate("bytes", _bytes)


def _rate(name: str, measure: Any) -> float:
    if name not in _RATES:
        _RATES[name] = measure()
    return _RATES[name]


def _timed(run: Any) -> float:
    began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    torch.cuda.synchronize()
    began.record()
    run()
    done.record()
    torch.cuda.synchronize()
    return began.elapsed_time(done) / 1e3


def _cycles() -> float:
    return SPIN / _timed(lambda: torch.cuda._sleep(SPIN))


def _bytes() -> float:
    data = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(data)
    return 2 * data.numel() / _timed(lambda: other.copy_(data))


@contextlib.contextmanager
def emulated_world(world: int, link: Link) -> Iterator[list[EmulatedGroup]]:
    """Make torch.distributed's default group an `EmulatedGroup`; yields all groups made meanwhile.

    It takes the place of torch's fake backend, whose name says to everyone that no other ranks are
    there to be asked.
    """
    groups: list[EmulatedGroup] = []

    def create(common: Any, _: Any) -> EmulatedGroup:
        groups.append(EmulatedGroup(common.group_rank, common.group_size, link))
        return groups[-1]

    if torch.cuda.is_available():
        memory_rate(), _rate("cycles", _cycles)  # before anything runs
        torch.cuda.empty_cache()
    before = dist.Backend._plugins["FAKE"]
    dist.Backend._plugins["FAKE"] = before._replace(creator_fn=create, extended_api=True)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        yield groups
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.Backend._plugins["FAKE"] = before
