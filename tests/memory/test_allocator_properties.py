"""What holds of the caching allocator's replays, whatever lives, under rules of every kind."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.memory.cuda.allocator import Allocation, replay
from fxshard.memory.cuda.settings import AllocatorSettings
from tests.memory.test_allocator import KIB, MIB, OVERSIZE, PAGES, life

PROPERTY = settings(max_examples=120, deadline=None, derandomize=True)

SIZES = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(1, MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(10 * MIB, 60 * MIB),
)
STREAMS = st.sampled_from(["compute", "gather"])
SETTINGS = st.sampled_from(
    [
        AllocatorSettings(),
        PAGES,
        OVERSIZE,
        AllocatorSettings(expandable_segments=True, max_split_size=24 * MIB),
        AllocatorSettings(roundup_power2_divisions=4),
    ]
)
END = 100  # all are dead by then, and no stream still reads


@st.composite
def lives(draw: st.DrawFn) -> Allocation:
    born = draw(st.integers(0, 30))
    died = born + draw(st.integers(1, 15))
    used = draw(st.lists(st.tuples(STREAMS, st.integers(born, died + 20)), max_size=2))
    return Allocation(draw(SIZES), born, died, draw(STREAMS), tuple(used))


LIVES = st.lists(lives(), max_size=40)


def flushed(drawn: list[Allocation]) -> list[Allocation]:
    """With a last request, at which the events are polled."""
    return [*drawn, Allocation(1, END, END + 1)]


@PROPERTY
@given(drawn=LIVES, chosen=SETTINGS)
def test_allocated_is_what_lives_rounded_up(
    drawn: list[Allocation], chosen: AllocatorSettings
) -> None:
    """Counted from the lives alone: exactly for expandable segments; else a block may have up to
    1 MiB of slack, and up to 20 MiB more if it is oversize."""
    result = replay(drawn, chosen)
    slack = 0 if chosen.expandable_segments else MIB
    oversize = chosen.max_split_size if not chosen.expandable_segments else None
    for place, tick in enumerate(result.ticks):
        alive = [
            chosen.round_size(one.bytes)
            for one in drawn
            if one.bytes and one.born <= tick and (one.died is None or tick < one.died)
        ]
        most = sum(
            size
            + (slack if size > MIB else 0)
            + (20 * MIB if oversize is not None and size >= oversize else 0)
            for size in alive
        )
        assert sum(alive) <= result.allocated[place] <= most
    assert np.all(result.allocated <= result.active)
    assert np.all(result.requested <= result.active)
    assert np.all(result.active <= result.reserved)


@PROPERTY
@given(drawn=LIVES, chosen=SETTINGS, capacity=st.none() | st.integers(20, 300))
def test_blocks_that_are_read_at_one_time_do_not_overlap(
    drawn: list[Allocation], chosen: AllocatorSettings, capacity: int | None
) -> None:
    """Unless the device is full, when torch waits for the other streams."""
    limit = None if capacity is None else capacity * MIB
    result = replay(drawn, chosen, capacity=limit)
    waits = result.peaks.retries == 0
    spans = []
    for one, block in zip(drawn, result.blocks, strict=True):
        if block is None:
            continue
        assert block[0] % 512 == 0 and block[1] % 512 == 0
        assert one.died is not None
        others = [until for stream, until in one.used_on if stream != one.stream]
        end = max([one.died, *others]) if waits else one.died
        spans.append((block[0], block[0] + block[1], one.born, end))
    for place, (low, high, born, end) in enumerate(spans):
        for other in spans[:place]:
            apart_in_time = end <= other[2] or other[3] <= born
            assert apart_in_time or high <= other[0] or other[1] <= low
    if limit is not None:
        assert np.all(result.reserved <= limit)


@PROPERTY
@given(drawn=LIVES, chosen=SETTINGS)
def test_all_dead_is_all_free_and_whole(drawn: list[Allocation], chosen: AllocatorSettings) -> None:
    result = replay(flushed(drawn), chosen)
    assert list(result.after[:3, -1]) == [0, 0, 0]
    assert all(len(s.blocks) == 1 and s.blocks[0].state == "free" for s in result.segments)
    assert sum(segment.bytes for segment in result.segments) == result.after[3, -1]
    assert all(segment.expandable == chosen.expandable_segments for segment in result.segments)


@PROPERTY
@given(drawn=LIVES, chosen=SETTINGS)
def test_segments_account_for_every_byte(
    drawn: list[Allocation], chosen: AllocatorSettings
) -> None:
    """Half-way, when some live: the parts of each segment add up, without a gap, to the levels."""
    cut = [one for one in drawn if one.born < 15]
    halves = [Allocation(one.bytes, one.born, None, one.stream) for one in cut]
    result = replay(halves, chosen)
    sums = dict.fromkeys(("allocated", "waiting", "free"), 0)
    for segment in result.segments:
        address = segment.address
        for block in segment.blocks:
            assert block.address == address
            address += block.bytes
            sums[block.state] += block.bytes
        assert address == segment.address + segment.bytes
    requested, in_use, active, held = result.after[:, -1] if len(result.ticks) else (0, 0, 0, 0)
    assert (sums["allocated"], sum(sums.values())) == (in_use, held)
    assert active == in_use and requested == sum(one.bytes for one in halves)


@PROPERTY
@given(drawn=LIVES, chosen=SETTINGS, capacity=st.none() | st.integers(20, 300))
def test_the_same_lives_give_the_same_replay(
    drawn: list[Allocation], chosen: AllocatorSettings, capacity: int | None
) -> None:
    limit = None if capacity is None else capacity * MIB
    one, two = (replay(drawn, chosen, capacity=limit) for _ in range(2))
    assert one.peaks == two.peaks and one.blocks == two.blocks and one.segments == two.segments
    assert np.array_equal(one.after, two.after)


@PROPERTY
@given(
    sizes=st.lists(st.integers(5, 40), min_size=1, max_size=12),
    passes=st.integers(1, 4),
)
def test_whole_segments_in_stack_order_waste_nothing(sizes: list[int], passes: int) -> None:
    """Multiples of 2 MiB, 10 MiB and more: each has its segment, and finds it again next pass."""
    lives = []
    for start in range(0, passes * 100, 100):
        for place, size in enumerate(sizes):
            lives.append(life(2 * size, start + place, start + 99 - place))
    result = replay(lives)
    assert result.peaks.reserved == result.peaks.allocated == 2 * sum(sizes) * MIB
