"""Blocks, pools and segments of one device, as ``DeviceCachingAllocator`` keeps them."""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from fxshard.memory.cuda.settings import (
    MIN_BLOCK,
    ROUND_LARGE,
    SMALL_SEGMENT,
    SMALL_SIZE,
    UNBOUNDED_ADDRESSES,
    AllocatorSettings,
    up,
)


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


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """A contiguous part of a segment; `prev` and `next` are its neighbours in it.

    Attributes:
        base: first address of the expandable segment; None: not in one.
        events: other streams that may still read it.
    """

    arena: Arena
    base: int | None
    address: int
    size: int
    mapped: bool = True
    prev: Block | None = None
    next: Block | None = None
    allocated: bool = False
    events: int = 0
    requested: int = 0
    cached_at: int = 0

    @property
    def idle(self) -> bool:
        return not self.allocated and self.events == 0

    @property
    def split(self) -> bool:
        return self.prev is not None or self.next is not None

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes; the rest is a new block after it."""
        rest = Block(
            self.arena, self.base, self.address + size, self.size - size, mapped=self.mapped
        )
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def absorb(self, other: Block) -> None:
        """Take over the block after it."""
        self.size += other.size
        self.next = other.next
        if other.next is not None:
            other.next.prev = self


@dataclasses.dataclass(eq=False)
class Arena:
    """The unused blocks of one pool on one stream: free ones, and address space.

    Attributes:
        page: bytes that are mapped at once.
        keys: (size, address) of free blocks, ascending.
        free: the same, by address.
        unmapped: address space, by address.
    """

    stream: str
    small: bool
    page: int
    keys: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    free: dict[int, Block] = dataclasses.field(default_factory=dict)
    unmapped: list[Block] = dataclasses.field(default_factory=list)

    def add(self, block: Block) -> None:
        bisect.insort(self.keys, (block.size, block.address))
        self.free[block.address] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect.bisect_left(self.keys, (block.size, block.address))]
        del self.free[block.address]

    def place(self, size: int) -> int:
        """Index in `keys` of the smallest free block of `size` bytes or more."""
        return bisect.bisect_left(self.keys, (size, 0))

    def at(self, place: int) -> Block:
        return self.free[self.keys[place][1]]

    def blocks(self) -> list[Block]:
        return [self.free[address] for _, address in self.keys]

    def add_unmapped(self, block: Block) -> None:
        bisect.insort(self.unmapped, block, key=lambda b: b.address)


class DeviceAllocator:
    """State of one device's allocator (``DeviceCachingAllocator``)."""

    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.settings = settings
        self.capacity = capacity
        # what a memory fraction leaves; its own check, before the device's
        self.allowed: int | None = None
        if capacity is not None and settings.per_process_memory_fraction < 1:
            self.allowed = int(settings.per_process_memory_fraction * capacity)
        self.collects: bool = self.allowed is not None and settings.garbage_collection_threshold > 0
        self.arenas: dict[tuple[bool, str], Arena] = {}
        self.heads: dict[int, Block] = {}  # first block of every segment, by address
        self.waiting: dict[str, deque[tuple[int, Block]]] = {}
        self.next_address: int = ROUND_LARGE
        self.searches: int = 0  # of the large pool: the clock of garbage collection
        self.requested: int = 0
        self.allocated: int = 0
        self.active: int = 0
        self.reserved: int = 0
        self.inactive_split: int = 0
        self.segments: int = 0
        self.most_segments: int = 0
        self.retries: int = 0
        self.highest: list[int] = [0, 0, 0, 0]

    def levels(self) -> tuple[int, int, int, int]:
        return (self.requested, self.allocated, self.active, self.reserved)

    def start_tick(self) -> None:
        self.highest = list(self.levels())

    # Requests and frees

    def allocate(self, requested: int, stream: str, tick: int) -> Block | None:
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

    def free(self, block: Block, used_on: Sequence[tuple[str, int]], tick: int) -> None:
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
        """Events of a stream complete in order, so one that is late holds back those after
        it (``process_events``).
        """
        for queue in self.waiting.values():
            while queue and queue[0][0] <= tick:
                self._event_done(queue.popleft()[1])

    def _synchronize(self) -> None:
        for queue in self.waiting.values():
            while queue:
                self._event_done(queue.popleft()[1])

    def _event_done(self, block: Block) -> None:
        block.events -= 1
        if block.events == 0:
            self._complete_free(block)

    def _complete_free(self, block: Block) -> None:
        """Coalesce with free neighbours and cache (``free_block``)."""
        self.active -= block.size
        self.requested -= block.requested
        self._cache(self._coalesce(block))

    def _coalesce(self, block: Block) -> Block:
        """Join with neighbours that are idle and mapped, or unmapped, as the block is itself
        (``try_merge_blocks``). The block is in no list; neither is what is returned.
        """
        following, previous = block.next, block.prev
        if following is not None and following.idle and following.mapped == block.mapped:
            self._take(following)
            block.absorb(following)
        if previous is not None and previous.idle and previous.mapped == block.mapped:
            self._take(previous)
            previous.absorb(block)
            return previous
        return block

    def _cache(self, block: Block) -> None:
        if block.base is None and block.split:
            self.inactive_split += block.size
        block.cached_at = self.searches
        block.arena.add(block)

    def _take(self, block: Block) -> None:
        """Out of the list of free, or of unmapped, blocks."""
        if not block.mapped:
            block.arena.unmapped.remove(block)
            return
        if block.base is None and block.split:
            self.inactive_split -= block.size
        block.arena.remove(block)

    # Which block

    def _arena(self, small: bool, stream: str) -> Arena:
        found = self.arenas.get((small, stream))
        if found is None:
            page = SMALL_SEGMENT if small else self.settings.large_segment_size
            found = self.arenas[small, stream] = Arena(stream, small, page)
        return found

    def _best_fit(self, arena: Arena, size: int) -> Block | None:
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

    def _splits(self, block: Block, size: int) -> bool:
        """Whether the rest after `size` bytes becomes a free block (``should_split``)."""
        rest = block.size - size
        if block.arena.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        oversize = self.settings.max_split_size
        return rest > SMALL_SIZE and (oversize is None or size < oversize)

    def _after_miss(self, arena: Arena, size: int) -> Block | None:
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

    def _grow(self, arena: Arena, size: int) -> Block | None:
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
        block = Block(arena, None, self._addresses(segment), segment)
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
        self.next_address += up(size, ROUND_LARGE)
        return address

    # Expandable segments

    def _grow_expandable(self, arena: Arena, size: int) -> Block | None:
        """Map what the lowest place with room still lacks (``try_allocate_expandable_block``)."""
        block: Block | None = self._room(arena, size)
        while block is not None and (not block.mapped or block.size < size):
            if not block.mapped:
                block = self._map(block, min(block.size, size))
                continue
            assert block.next is not None
            block = self._map(block.next, min(block.next.size, size - block.size))
        if block is not None:
            self._take(block)
        return block

    def _room(self, arena: Arena, size: int) -> Block:
        """The first of a run of free and unmapped blocks with `size` bytes together, at the lowest
        address; in a new segment if there is none (``find_expandable_block``).
        """
        for unmapped in arena.unmapped:
            previous = unmapped.prev
            first = previous if previous is not None and previous.idle else unmapped
            block: Block | None = first
            room = 0
            while block is not None and block.idle and room < size:
                room += block.size
                block = block.next
            if room >= size:
                return first
        span = self.capacity + self.capacity // 8 if self.capacity else UNBOUNDED_ADDRESSES
        span = up(span, arena.page)
        base = self._addresses(span)
        fresh = Block(arena, base, base, span, mapped=False)
        self.heads[base] = fresh
        arena.add_unmapped(fresh)
        return fresh

    def _map(self, block: Block, size: int) -> Block | None:
        """Back the first `size` bytes, in whole pages, by memory; the free block that they are then
        part of, or None (``map_block``).
        """
        size = up(size, block.arena.page)
        if not self._reserve(size):
            return None
        self._take(block)
        if size < block.size:
            block.arena.add_unmapped(block.cut(size))
        block.mapped = True
        block = self._coalesce(block)
        self._cache(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block (``unmap_block``)."""
        assert block.base is not None
        page, offset = block.arena.page, block.address - block.base
        start, stop = up(offset, page), (offset + block.size) // page * page
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

    def _release(self, block: Block) -> None:
        self._take(block)
        self.reserved -= block.size
        self.segments -= 1
        del self.heads[block.address]

    def _release_all(self) -> None:
        """Every segment and page that is free as one (``release_cached_blocks``)."""
        self._synchronize()
        for arena in self.arenas.values():
            for block in arena.blocks():
                if block.base is not None:
                    self._unmap(block)
                elif not block.split:
                    self._release(block)

    def _release_oversize(self, arena: Arena, size: int) -> bool:
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
            run: list[Block] = []
            for block in (*_chain(self.heads[address]), None):
                if block is not None and block.mapped:
                    run.append(block)
                elif run:
                    found.append(_segment(run))
                    run = []
        return tuple(found)


def _segment(run: list[Block]) -> Segment:
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


def _chain(block: Block | None) -> Iterator[Block]:
    while block is not None:
        yield block
        block = block.next


def _reach(block: Block) -> int:
    """Size of a free block with the unmapped addresses after it."""
    following = block.next
    more = following is not None and not following.mapped
    return block.size + (following.size if following is not None and more else 0)
