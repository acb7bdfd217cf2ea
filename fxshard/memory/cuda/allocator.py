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

import bisect
import dataclasses
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from fxshard.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB

# c10/core/AllocatorConfig.h
MIN_BLOCK = 512  # every block is a multiple of this
SMALL_SIZE = MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # a segment of the small pool, and a page of its expandable segments
LARGE_SEGMENT = 20 * MIB  # for requests below MIN_LARGE; a page of the large pool's segments
MIN_LARGE = 10 * MIB  # from here on a segment has the size of its request
ROUND_LARGE = 2 * MIB  # to a multiple of which such segments are rounded up

# c10/core/AllocatorConfig.cpp: roundup_power2_divisions has one entry per power of two from 1 MiB
POWER2_INTERVALS = 16

UNBOUNDED_ADDRESSES = 1 << 46  # of an expandable segment when no capacity is given

# Names that torch's parsers know and that change no byte on the device.
WITHOUT_EFFECT = frozenset(
    {
        "backend",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "throw_on_cudamalloc_oom",
    }
)


@dataclasses.dataclass(frozen=True)
class AllocatorSettings:
    """What ``PYTORCH_ALLOC_CONF`` (or ``PYTORCH_CUDA_ALLOC_CONF``) sets, in bytes.

    Source: ``c10/core/AllocatorConfig.{h,cpp}``, ``c10/cuda/CUDAAllocatorConfig.{h,cpp}``.

    Attributes:
        expandable_segments: map pages into one segment per stream and pool.
        max_split_size: blocks of this size and more are never split; None: all may be.
        max_non_split_rounding: a request of `max_split_size` or more takes a cached block only if
            that is smaller than the request and this together.
        large_segment_size: segment for requests between 1 and 10 MiB, and page of the large pool's
            expandable segments.
        roundup_power2_divisions: requests are rounded up to one of so many steps between two powers
            of two; 0 or 1: not. One number for every size, or `POWER2_INTERVALS` numbers for sizes
            from 1, 2, 4, ... MiB.
        garbage_collection_threshold: fraction of the allowed memory above which cached blocks are
            given back before more is asked for. Torch heeds it only if
            `per_process_memory_fraction` is below 1.
        per_process_memory_fraction: of the capacity, what the allocator may reserve; as
            ``torch.cuda.set_per_process_memory_fraction``.

    Raises:
        ConfigError: a value that torch would refuse.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    large_segment_size: int = LARGE_SEGMENT
    roundup_power2_divisions: int | tuple[int, ...] = 0
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.large_segment_size <= MIN_LARGE:
            raise ConfigError(
                f"large_segment_size must be above {MIN_LARGE} bytes, not {self.large_segment_size}"
            )
        for name in ("max_split_size", "max_non_split_rounding"):
            value = getattr(self, name)
            if value is not None and value < self.large_segment_size:
                raise ConfigError(
                    f"{name} must be at least large_segment_size "
                    f"({self.large_segment_size} bytes), not {value}"
                )
        divisions = self.roundup_power2_divisions
        each = divisions if isinstance(divisions, tuple) else (divisions,)
        if len(each) not in (1, POWER2_INTERVALS) or any(n < 0 or n & (n - 1) for n in each):
            raise ConfigError(
                "roundup_power2_divisions must be 0 or a power of two, or a tuple of "
                f"{POWER2_INTERVALS} of them, not {divisions!r}"
            )
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ConfigError(
                "garbage_collection_threshold must lie in (0, 1), or be 0 for none, not "
                f"{self.garbage_collection_threshold}"
            )
        if not 0 <= self.per_process_memory_fraction <= 1:
            raise ConfigError(
                "per_process_memory_fraction must lie in [0, 1], not "
                f"{self.per_process_memory_fraction}"
            )

    @classmethod
    def from_text(cls, text: str) -> AllocatorSettings:
        """Settings from the text of the environment variable, such as
        ``"expandable_segments:True,max_split_size_mb:128"``.

        Raises:
            ConfigError: a name that torch does not know, a value that it refuses, or the
                ``cudaMallocAsync`` backend, which is another allocator.
        """
        found: dict[str, object] = {}
        for name, value in _pairs(text):
            if name == "expandable_segments":
                found[name] = _truth(name, value)
            elif name in _SIZES:
                found[_SIZES[name]] = int(_number(name, value, int)) * MIB
            elif name in ("garbage_collection_threshold", "per_process_memory_fraction"):
                found[name] = _number(name, value, float)
            elif name == "roundup_power2_divisions":
                found[name] = _divisions(value)
            elif name == "backend" and value != "native":
                raise ConfigError(f"backend:{value}: only the native allocator is modelled")
            elif name not in WITHOUT_EFFECT:
                known = sorted(
                    {
                        *_SIZES,
                        *WITHOUT_EFFECT,
                        "expandable_segments",
                        "garbage_collection_threshold",
                        "per_process_memory_fraction",
                        "roundup_power2_divisions",
                    }
                )
                raise ConfigError(f"unknown allocator setting {name!r}; known: {', '.join(known)}")
        return cls(**found)  # type: ignore[arg-type]

    def round_size(self, size: int) -> int:
        """Bytes of the block that a request of `size` > 0 bytes asks for (``round_size``)."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self._divisions_at(size)
        if divisions > 1 and size > MIN_BLOCK * divisions:
            # a power of two is a multiple of its step, and stays as it is
            return _up(size, (1 << (size.bit_length() - 1)) // divisions)
        return _up(size, MIN_BLOCK)

    def segment_size(self, size: int) -> int:
        """Bytes of the segment that a block of `size` bytes asks for (``get_allocation_size``)."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE:
            return self.large_segment_size
        return _up(size, ROUND_LARGE)

    def _divisions_at(self, size: int) -> int:
        divisions = self.roundup_power2_divisions
        if isinstance(divisions, int):
            return divisions
        return divisions[min(max(size.bit_length() - MIB.bit_length(), 0), len(divisions) - 1)]


_SIZES = {
    "max_split_size_mb": "max_split_size",
    "max_non_split_rounding_mb": "max_non_split_rounding",
    "large_segment_size_mb": "large_segment_size",
}


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
    """Peaks in bytes, as ``torch.cuda.memory_stats`` counts them, and the ticks they fall on first.

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
    requested_at: int | None = None
    allocated: int = 0
    allocated_at: int | None = None
    active: int = 0
    active_at: int | None = None
    reserved: int = 0
    reserved_at: int | None = None
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


@dataclasses.dataclass(frozen=True)
class BlockState:
    """A part of a segment: `state` is "allocated", "waiting" (for other streams) or "free"."""

    address: int
    bytes: int
    state: Literal["allocated", "waiting", "free"]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Reserved memory with contiguous addresses, as in ``torch.cuda.memory_snapshot``."""

    address: int
    bytes: int
    stream: str
    small: bool
    expandable: bool
    blocks: tuple[BlockState, ...]


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
    return _follow(allocations, _Allocator(settings, capacity))


def _follow(allocations: Sequence[Allocation], allocator: _Allocator) -> Replay:
    births: dict[int, list[int]] = {}
    deaths: dict[int, list[int]] = {}
    for index, one in enumerate(allocations):
        births.setdefault(one.born, []).append(index)
        if one.died is not None:
            deaths.setdefault(one.died, []).append(index)
    ticks = sorted(births.keys() | deaths.keys())
    live: dict[int, _Block] = {}
    blocks: list[tuple[int, int] | None] = [None] * len(allocations)
    peaks = _Highest()
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
            peaks.note(allocator)
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
    return Replay(
        peaks=peaks.of(table, seen, allocator, refused is not None),
        ticks=seen,
        requested=table[0],
        allocated=table[1],
        active=table[2],
        reserved=table[3],
        after=np.asarray(after, dtype=np.int64).reshape(-1, 4).T,
        blocks=tuple(blocks),
        refused=refused,
        segments=allocator.snapshot(),
    )


class _Highest:
    """How much of the reserved peak was of use, as the request that led to it left things."""

    def __init__(self) -> None:
        self.reserved = 0
        self.inactive_split = 0
        self.unused = 0

    def note(self, allocator: _Allocator) -> None:
        if allocator.reserved > self.reserved:
            self.reserved = allocator.reserved
            self.inactive_split = allocator.inactive_split
            self.unused = allocator.reserved - allocator.active

    def of(
        self, table: IntArray, ticks: IntArray, allocator: _Allocator, failed: bool
    ) -> AllocatorPeaks:
        if not len(ticks):
            return AllocatorPeaks()
        top = [int(row.max()) for row in table]
        at = [int(ticks[row.argmax()]) for row in table]
        return AllocatorPeaks(
            requested=top[0],
            requested_at=at[0],
            allocated=top[1],
            allocated_at=at[1],
            active=top[2],
            active_at=at[2],
            reserved=top[3],
            reserved_at=at[3],
            inactive_split=self.inactive_split,
            unused=self.unused,
            segments=allocator.most_segments,
            retries=allocator.retries,
            out_of_memory=int(ticks[-1]) if failed else None,
        )


class _Block:
    """A contiguous part of a segment; `before` and `behind` are its neighbours in it."""

    __slots__ = (
        "address",
        "allocated",
        "arena",
        "base",
        "before",
        "behind",
        "cached_at",
        "events",
        "mapped",
        "requested",
        "size",
    )

    def __init__(
        self, arena: _Arena, base: int | None, address: int, size: int, *, mapped: bool = True
    ) -> None:
        self.arena = arena
        self.base = base  # first address of the expandable segment; None: not in one
        self.address = address
        self.size = size
        self.mapped = mapped
        self.before: _Block | None = None
        self.behind: _Block | None = None
        self.allocated = False
        self.events = 0  # other streams that may still read it
        self.requested = 0
        self.cached_at = 0

    @property
    def idle(self) -> bool:
        return not self.allocated and self.events == 0

    @property
    def split(self) -> bool:
        return self.before is not None or self.behind is not None

    def cut(self, size: int) -> _Block:
        """Keep the first `size` bytes; the rest is a new block behind."""
        rest = _Block(
            self.arena, self.base, self.address + size, self.size - size, mapped=self.mapped
        )
        rest.before, rest.behind = self, self.behind
        if self.behind is not None:
            self.behind.before = rest
        self.behind, self.size = rest, size
        return rest

    def absorb(self, other: _Block) -> None:
        """Take over the block behind."""
        self.size += other.size
        self.behind = other.behind
        if other.behind is not None:
            other.behind.before = self


class _Arena:
    """The blocks of one pool on one stream that nobody uses: free ones, and address space."""

    def __init__(self, stream: str, small: bool, page: int) -> None:
        self.stream = stream
        self.small = small
        self.page = page
        self.keys: list[tuple[int, int]] = []  # (size, address) of free blocks, ascending
        self.free: dict[int, _Block] = {}  # by address
        self.unmapped: list[_Block] = []  # by address

    def add(self, block: _Block) -> None:
        bisect.insort(self.keys, (block.size, block.address))
        self.free[block.address] = block

    def remove(self, block: _Block) -> None:
        del self.keys[bisect.bisect_left(self.keys, (block.size, block.address))]
        del self.free[block.address]

    def place(self, size: int) -> int:
        """Index in `keys` of the smallest free block of `size` bytes or more."""
        return bisect.bisect_left(self.keys, (size, 0))

    def at(self, place: int) -> _Block:
        return self.free[self.keys[place][1]]

    def blocks(self) -> list[_Block]:
        return [self.free[address] for _, address in self.keys]

    def add_unmapped(self, block: _Block) -> None:
        bisect.insort(self.unmapped, block, key=lambda b: b.address)


class _Allocator:
    """State of one device's allocator (``DeviceCachingAllocator``)."""

    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.settings = settings
        self.capacity = capacity
        self.allowed = None  # what a memory fraction leaves; its own check, before the device's
        if capacity is not None and settings.per_process_memory_fraction < 1:
            self.allowed = int(settings.per_process_memory_fraction * capacity)
        self.collects = self.allowed is not None and settings.garbage_collection_threshold > 0
        self.arenas: dict[tuple[bool, str], _Arena] = {}
        self.heads: dict[int, _Block] = {}  # first block of every segment, by address
        self.waiting: dict[str, deque[tuple[int, _Block]]] = {}
        self.next_address = ROUND_LARGE
        self.searches = 0  # of the large pool: the clock of garbage collection
        self.requested = self.allocated = self.active = self.reserved = 0
        self.inactive_split = 0
        self.segments = self.most_segments = self.retries = 0
        self.highest = [0, 0, 0, 0]

    def levels(self) -> tuple[int, int, int, int]:
        return (self.requested, self.allocated, self.active, self.reserved)

    def start_tick(self) -> None:
        self.highest = list(self.levels())

    # Requests and frees

    def allocate(self, requested: int, stream: str, tick: int) -> _Block | None:
        """A block for the request, or None if there is no memory (``malloc``)."""
        self._poll(tick)
        size = self.settings.round_size(requested)
        arena = self._arena(size <= SMALL_SIZE, stream)
        block = self._best_fit(arena, size) or self._after_miss(arena, size)
        if block is None:
            return None
        if self._splits(block, size):
            self._cache(block.cut(size))
        block.allocated, block.requested = True, requested
        self.requested += requested
        self.allocated += block.size
        self.active += block.size
        self.highest = [max(a, b) for a, b in zip(self.highest, self.levels(), strict=True)]
        return block

    def free(self, block: _Block, used_on: Sequence[tuple[str, int]], tick: int) -> None:
        """The program drops the block; other streams may hold it back (``free``)."""
        block.allocated = False
        self.allocated -= block.size
        until: dict[str, int] = {}
        for stream, done in used_on:
            if stream != block.arena.stream:  # as record_stream, which ignores the block's own
                until[stream] = max(until.get(stream, tick), done)
        block.events = len(until)
        for stream, done in until.items():
            self.waiting.setdefault(stream, deque()).append((done, block))
        if not until:
            self._complete_free(block)

    def _poll(self, tick: int) -> None:
        """Events of a stream complete in order, so one that is late holds back those behind
        it (``process_events``).
        """
        for queue in self.waiting.values():
            while queue and queue[0][0] <= tick:
                self._event_done(queue.popleft()[1])

    def _synchronize(self) -> None:
        for queue in self.waiting.values():
            while queue:
                self._event_done(queue.popleft()[1])

    def _event_done(self, block: _Block) -> None:
        block.events -= 1
        if block.events == 0:
            self._complete_free(block)

    def _complete_free(self, block: _Block) -> None:
        """Coalesce with free neighbours and cache (``free_block``)."""
        self.active -= block.size
        self.requested -= block.requested
        self._cache(self._coalesce(block))

    def _coalesce(self, block: _Block) -> _Block:
        """Join with neighbours that are idle and mapped, or unmapped, as the block is itself
        (``try_merge_blocks``). The block is in no list; neither is what is returned.
        """
        behind, before = block.behind, block.before
        if behind is not None and behind.idle and behind.mapped == block.mapped:
            self._take(behind)
            block.absorb(behind)
        if before is not None and before.idle and before.mapped == block.mapped:
            self._take(before)
            before.absorb(block)
            return before
        return block

    def _cache(self, block: _Block) -> None:
        if block.base is None and block.split:
            self.inactive_split += block.size
        block.cached_at = self.searches
        block.arena.add(block)

    def _take(self, block: _Block) -> None:
        """Out of the list of free, or of unmapped, blocks."""
        if not block.mapped:
            block.arena.unmapped.remove(block)
            return
        if block.base is None and block.split:
            self.inactive_split -= block.size
        block.arena.remove(block)

    # Which block

    def _arena(self, small: bool, stream: str) -> _Arena:
        found = self.arenas.get((small, stream))
        if found is None:
            page = SMALL_SEGMENT if small else self.settings.large_segment_size
            found = self.arenas[small, stream] = _Arena(stream, small, page)
        return found

    def _best_fit(self, arena: _Arena, size: int) -> _Block | None:
        """The smallest free block that is large enough (``get_free_block``).

        A free block before unmapped addresses counts as large as it can grow, so that it is left
        for last. Oversize requests take no block that is much too large, others no oversize block.
        """
        if self.collects and not arena.small:
            self.searches += 1
        place = arena.place(size)
        if place == len(arena.keys):
            return None
        block = arena.at(place)
        if self.settings.expandable_segments:
            while place + 1 < len(arena.keys):
                larger = arena.at(place + 1)
                if _reach(larger) >= _reach(block):
                    break
                place, block = place + 1, larger
        oversize = self.settings.max_split_size
        if oversize is not None:
            if size < oversize <= block.size:
                return None
            if size >= oversize and block.size >= size + self.settings.max_non_split_rounding:
                return None
        self._take(block)
        return block

    def _splits(self, block: _Block, size: int) -> bool:
        """Whether the rest behind `size` bytes becomes a free block (``should_split``)."""
        rest = block.size - size
        if block.arena.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        oversize = self.settings.max_split_size
        return rest > SMALL_SIZE and (oversize is None or size < oversize)

    def _after_miss(self, arena: _Arena, size: int) -> _Block | None:
        """More memory from the device, in torch's order of ever harder ways (``malloc``)."""
        if self.collects:
            self._collect_garbage()
        block = self._grow(arena, size)
        if block is None and self._release_oversize(arena, size):
            block = self._grow(arena, size)
        if block is None:
            self._release_all()
            self.retries += 1
            block = self._grow(arena, size)
        return block

    def _grow(self, arena: _Arena, size: int) -> _Block | None:
        """A new segment or new pages (``alloc_block``).

        The limit of a memory fraction is held against a whole segment, also where fewer pages
        would do.
        """
        segment = self.settings.segment_size(size)
        if self.allowed is not None and self.reserved + segment > self.allowed:
            return None
        if self.settings.expandable_segments:
            return self._grow_expandable(arena, size)
        if not self._reserve(segment):
            return None
        self.segments += 1
        self.most_segments = max(self.most_segments, self.segments)
        block = _Block(arena, None, self._addresses(segment), segment)
        self.heads[block.address] = block
        return block

    def _reserve(self, size: int) -> bool:
        """What cudaMalloc or cuMemCreate says."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.highest[3] = max(self.highest[3], self.reserved)
        return True

    def _addresses(self, size: int) -> int:
        address = self.next_address
        self.next_address += _up(size, ROUND_LARGE)
        return address

    # Expandable segments

    def _grow_expandable(self, arena: _Arena, size: int) -> _Block | None:
        """Map what the lowest place with room still lacks (``try_allocate_expandable_block``)."""
        block: _Block | None = self._room(arena, size)
        while block is not None and (not block.mapped or block.size < size):
            if not block.mapped:
                block = self._map(block, min(block.size, size))
                continue
            assert block.behind is not None
            block = self._map(block.behind, min(block.behind.size, size - block.size))
        if block is not None:
            self._take(block)
        return block

    def _room(self, arena: _Arena, size: int) -> _Block:
        """The first of a run of free and unmapped blocks with `size` bytes together, at the lowest
        address; in a new segment if there is none (``find_expandable_block``).
        """
        for unmapped in arena.unmapped:
            before = unmapped.before
            first = before if before is not None and before.idle else unmapped
            block: _Block | None = first
            room = 0
            while block is not None and block.idle and room < size:
                room += block.size
                block = block.behind
            if room >= size:
                return first
        span = self.capacity + self.capacity // 8 if self.capacity else UNBOUNDED_ADDRESSES
        span = _up(span, arena.page)
        base = self._addresses(span)
        fresh = _Block(arena, base, base, span, mapped=False)
        self.heads[base] = fresh
        arena.add_unmapped(fresh)
        return fresh

    def _map(self, block: _Block, size: int) -> _Block | None:
        """Back the first `size` bytes, in whole pages, by memory; the free block that they are then
        part of, or None (``map_block``).
        """
        size = _up(size, block.arena.page)
        if not self._reserve(size):
            return None
        self._take(block)
        if size < block.size:
            block.arena.add_unmapped(block.cut(size))
        block.mapped = True
        block = self._coalesce(block)
        self._cache(block)
        return block

    def _unmap(self, block: _Block) -> None:
        """Give back the whole pages of a free block (``unmap_block``)."""
        assert block.base is not None
        page, offset = block.arena.page, block.address - block.base
        start, stop = _up(offset, page), (offset + block.size) // page * page
        if start >= stop:
            return
        self._take(block)
        if start > offset:
            kept, block = block, block.cut(start - offset)
            self._cache(kept)
        if stop - start < block.size:
            self._cache(block.cut(stop - start))
        self.reserved -= block.size
        block.mapped = False
        block = self._coalesce(block)
        if block.split:
            block.arena.add_unmapped(block)
        else:
            del self.heads[block.address]

    # Giving back

    def _release(self, block: _Block) -> None:
        self._take(block)
        self.reserved -= block.size
        self.segments -= 1
        del self.heads[block.address]

    def _release_all(self) -> None:
        """Every segment and page that is free as a whole (``release_cached_blocks``)."""
        self._synchronize()
        for arena in self.arenas.values():
            for block in arena.blocks():
                if block.base is not None:
                    self._unmap(block)
                elif not block.split:
                    self._release(block)

    def _release_oversize(self, arena: _Arena, size: int) -> bool:
        """One cached oversize block that is large enough, else the largest ones until they are,
        together; whether they are (``release_available_cached_blocks``).
        """
        oversize = self.settings.max_split_size
        if oversize is None:
            return False
        wanted = max(size, oversize)
        place = arena.place(wanted)
        if place < len(arena.keys) and arena.at(place).base is None:
            self._release(arena.at(place))
            return True
        released = 0
        for block in reversed(arena.blocks()[:place]):
            if released >= wanted or block.size < oversize:
                break
            if block.base is None:
                released += block.size
                self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Above the threshold, free whole segments of the large pool that have been cached for at
        least the mean time, and again until enough is free (``garbage_collect_cached_blocks``).
        """
        assert self.allowed is not None
        threshold = int(self.settings.garbage_collection_threshold * self.allowed)
        excess = self.reserved - threshold
        cached = [
            block
            for arena in self.arenas.values()
            if not arena.small
            for block in arena.blocks()
            if not block.split and block.base is None
        ]
        while excess > 0 and cached:
            ages = {block.address: self.searches - block.cached_at for block in cached}
            mean = sum(ages.values()) / len(ages)
            # torch lowers the total while it walks, but compares with the mean of the round
            old = [block for block in cached if ages[block.address] >= mean]
            for block in old:
                excess -= block.size
                self._release(block)
            cached = [block for block in cached if ages[block.address] < mean]

    # What is there

    def snapshot(self) -> tuple[Segment, ...]:
        found = []
        for address in sorted(self.heads):
            run: list[_Block] = []
            for block in (*_chain(self.heads[address]), None):
                if block is not None and block.mapped:
                    run.append(block)
                elif run:
                    found.append(_segment(run))
                    run = []
        return tuple(found)


def _segment(run: list[_Block]) -> Segment:
    first = run[0]
    states = tuple(
        BlockState(
            block.address,
            block.size,
            "allocated" if block.allocated else "waiting" if block.events else "free",
        )
        for block in run
    )
    return Segment(
        first.address,
        sum(block.size for block in run),
        first.arena.stream,
        first.arena.small,
        first.base is not None,
        states,
    )


def _chain(block: _Block | None) -> Iterator[_Block]:
    while block is not None:
        yield block
        block = block.behind


def _reach(block: _Block) -> int:
    """Size of a free block with the unmapped addresses behind it."""
    behind = block.behind
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# The grammar of the environment variable (``ConfigTokenizer``)

_PAIR = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)")


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    rest = "".join(text.split())
    while rest:
        match = _PAIR.match(rest)
        if match is None:
            raise ConfigError(f"allocator settings {text!r}: expected name:value at {rest!r}")
        yield match[1], match[2]
        rest = rest[match.end() :]


def _truth(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ConfigError(f"{name} must be True or False, not {value!r}")
    return value == "True"


def _number(name: str, value: str, kind: type[int] | type[float]) -> float:
    try:
        number = kind(value)
    except ValueError:
        raise ConfigError(f"{name} must be a number, not {value!r}") from None
    if number < 0 or (name == "garbage_collection_threshold" and number == 0):
        raise ConfigError(f"{name} must be above 0, not {value}")
    return number


def _divisions(value: str) -> int | tuple[int, ...]:
    """One number, or ``[boundary in MiB:divisions,...,>:divisions]``.

    The first boundary holds for smaller sizes too; ``>`` for all above the last
    (``parseRoundUpPower2Divisions``; up to torch 2.8 ``>`` included the last boundary itself).
    """
    name = "roundup_power2_divisions"
    if not value.startswith("["):
        return int(_number(name, value, int))
    entries = [0] * POWER2_INTERVALS
    last: int | None = None
    for boundary, number in _pairs(value[1:-1]):
        divisions = int(_number(name, number, int))
        if boundary == ">":
            start = 0 if last is None else last + 1
            entries[start:] = [divisions] * (POWER2_INTERVALS - start)
            continue
        size = int(_number(name, boundary, int))
        if size == 0 or size & (size - 1):
            raise ConfigError(f"{name}: the boundary {boundary} is not a power of two")
        place = min(size.bit_length() - 1, POWER2_INTERVALS - 1)
        if last is None:
            entries[:place] = [divisions] * place
        entries[place], last = divisions, place
    return tuple(entries)
