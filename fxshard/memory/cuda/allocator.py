"""PyTorch's CUDA caching allocator as arithmetic: what a list of lives makes it reserve.

Nothing here touches a device. `replay` takes requests with the ticks at which they are born and die
and follows them through the rules of ``c10/cuda/CUDACachingAllocator.cpp``: rounding, two pools of
free blocks per stream, best fit, splitting, coalescing, what happens when the device has nothing
left, expandable segments and blocks that wait for other streams. The rules were read in PyTorch's
main branch of 2026; the constants are those of ``c10/core/AllocatorConfig.h``, which a test holds
against the header of the installed torch.

Two things cannot be told without a device. `cudaMalloc` picks addresses, and among free blocks of
equal size the lowest address is taken: here segments lie in the order of their birth. And the
processor runs ahead of the GPU, so how long a block waits for another stream is for the caller to
say (`Allocation.used_on`).

CUDA graphs' private pools, memory pools of the user, ``cudaMallocAsync`` and memory that other
processes take are outside the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fxshard.errors import ConfigError
from fxshard.memory.cuda.blocks import Block, DeviceAllocator, Segment
from fxshard.memory.cuda.settings import AllocatorSettings


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One request and its life.

    Attributes:
        bytes: asked for; 0 takes nothing.
        born, died: ticks of the program, half open; None: never freed.
        stream: that the request was made on; blocks are reused on the same stream only.
        used_on: ``record_stream``: other streams, and for each the tick from which on the work
            that may read the block is done. The block is not reused before.
    """

    bytes: int
    born: int
    died: int | None
    stream: str = "compute"
    used_on: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class AllocatorPeaks:
    """Peaks in bytes, as ``torch.cuda.memory_stats`` counts them.

    Attributes:
        requested: bytes as asked for, of blocks in use or waiting for a stream.
        allocated: sizes of blocks in use, the unsplit rest of a block included
            (``max_memory_allocated``).
        active: `allocated` and the blocks that were freed and wait for a stream.
        reserved: segments, or mapped pages (``max_memory_reserved``).
        inactive_split: bytes free in segments that cannot be given back, at the reserved peak;
            0 for expandable segments (``inactive_split_bytes``).
        unused: reserved and not active, at the reserved peak.
        segments: most segments at once; expandable ones do not count, as in torch.
        retries: times that everything cached was given back (``num_alloc_retries``).
        out_of_memory: tick of the request that could not be met; the replay ends there.
    """

    requested: int = 0
    allocated: int = 0
    active: int = 0
    reserved: int = 0
    inactive_split: int = 0
    unused: int = 0
    segments: int = 0
    retries: int = 0
    out_of_memory: int | None = None

    @property
    def fragmentation(self) -> float:
        """Share of the reserved peak that no block uses, from 0 to 1."""
        return self.unused / self.reserved if self.reserved else 0.0


@dataclasses.dataclass(frozen=True)
class Watermarks:
    """Highest bytes within a range of ticks; the words are those of `AllocatorPeaks`."""

    requested: int
    allocated: int
    active: int
    reserved: int


IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """What became of a list of lives.

    Attributes:
        peaks: over all ticks.
        ticks: [n], int64: the ticks at which something was born or died, ascending.
        requested, allocated, active, reserved: [n], int64, bytes: the highest at that tick, after
            its deaths. They hold until the next tick, save for what `after` says.
        after: [4, n], int64: the four rows above as the tick leaves them (a tick may give cached
            memory back, so they may be lower).
        blocks: (address, bytes) for each allocation; None: of zero bytes, or never met.
        refused: index of the allocation that could not be met, or None.
        segments: as they are at the end, by address.
    """

    peaks: AllocatorPeaks
    ticks: IntArray
    requested: IntArray
    allocated: IntArray
    active: IntArray
    reserved: IntArray
    after: IntArray
    blocks: tuple[tuple[int, int] | None, ...]
    refused: int | None
    segments: tuple[Segment, ...]

    def between(self, start: int, stop: int) -> Watermarks:
        """Highest bytes at the ticks from `start` up to, without, `stop`.

        What dies at `start` is not in it; what lives on from before is.
        """
        first, last = (int(np.searchsorted(self.ticks, t)) for t in (start, stop))
        highest = np.stack([self.requested, self.allocated, self.active, self.reserved])
        columns = highest[:, first:last]
        carried = first == len(self.ticks) or self.ticks[first] > start
        if carried and first > 0 and stop > start:
            columns = np.concatenate([self.after[:, first - 1 : first], columns], axis=1)
        return Watermarks(*(int(row.max(initial=0)) for row in columns))


def replay(
    allocations: Sequence[Allocation],
    settings: AllocatorSettings | None = None,
    *,
    capacity: int | None = None,
) -> Replay:
    """Follow every allocation through the allocator.

    At one tick deaths come before births, each in the order of the sequence. Events of other
    streams are polled at every allocation, as in torch: memory that waits becomes free then, and
    not when the other stream is done.

    Args:
        allocations: in any order of ticks.
        settings: torch's defaults if None.
        capacity: bytes that the device will give (without the CUDA context and other fixed costs);
            None: without end.

    Raises:
        ConfigError: a negative size, a life that ends before it begins, or a memory fraction
            without a capacity.
    """
    settings = settings or AllocatorSettings()
    if settings.per_process_memory_fraction < 1 and capacity is None:
        raise ConfigError("per_process_memory_fraction needs a capacity to be a fraction of")
    for index, one in enumerate(allocations):
        if one.bytes < 0 or (one.died is not None and one.died <= one.born):
            raise ConfigError(
                f"allocation {index}: {one.bytes} bytes, born at {one.born}, dead at {one.died}: "
                "sizes must not be negative and lives must last a tick at least"
            )
    return _follow(allocations, DeviceAllocator(settings, capacity))


def _follow(allocations: Sequence[Allocation], allocator: DeviceAllocator) -> Replay:
    births: dict[int, list[int]] = {}
    deaths: dict[int, list[int]] = {}
    for index, one in enumerate(allocations):
        births.setdefault(one.born, []).append(index)
        if one.died is not None:
            deaths.setdefault(one.died, []).append(index)
    ticks = sorted(births.keys() | deaths.keys())
    live: dict[int, Block] = {}
    blocks: list[tuple[int, int] | None] = [None] * len(allocations)
    at_peak = (0, 0, 0)  # reserved, and of it: inactive and split; not active
    highest: list[tuple[int, ...]] = []
    after: list[tuple[int, ...]] = []
    refused = None
    for tick in ticks:
        for index in deaths.get(tick, ()):
            if index in live:
                allocator.free(live.pop(index), allocations[index].used_on, tick)
        allocator.start_tick()
        for index in births.get(tick, ()):
            one = allocations[index]
            if one.bytes == 0:
                continue
            block = allocator.allocate(one.bytes, one.stream, tick)
            if allocator.reserved > at_peak[0]:
                unused = allocator.reserved - allocator.active
                at_peak = allocator.reserved, allocator.inactive_split, unused
            if block is None:
                refused = index
                break
            live[index] = block
            blocks[index] = (block.address, block.size)
        highest.append(tuple(allocator.highest))
        after.append(allocator.levels())
        if refused is not None:
            break
    seen = np.asarray(ticks[: len(after)], dtype=np.int64)
    table = np.asarray(highest, dtype=np.int64).reshape(-1, 4).T
    requested, allocated, active, reserved = table
    peaks = AllocatorPeaks(
        requested=int(requested.max(initial=0)),
        allocated=int(allocated.max(initial=0)),
        active=int(active.max(initial=0)),
        reserved=int(reserved.max(initial=0)),
        inactive_split=at_peak[1],
        unused=at_peak[2],
        segments=allocator.most_segments,
        retries=allocator.retries,
        out_of_memory=None if refused is None else int(seen[-1]),
    )
    return Replay(
        peaks=peaks,
        ticks=seen,
        requested=requested,
        allocated=allocated,
        active=active,
        reserved=reserved,
        after=np.asarray(after, dtype=np.int64).reshape(-1, 4).T,
        blocks=tuple(blocks),
        refused=refused,
        segments=allocator.snapshot(),
    )
