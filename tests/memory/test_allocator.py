"""The caching allocator's rules, each counted by hand; sources are files of PyTorch.

What holds of all of them together, whatever lives: test_allocator_properties.py.
"""

import re
from pathlib import Path

import pytest
import torch

from fxshard.errors import ConfigError
from fxshard.memory.cuda import allocator
from fxshard.memory.cuda import settings as constants
from fxshard.memory.cuda.allocator import Allocation, Replay, Watermarks, replay
from fxshard.memory.cuda.fixed_costs import cublas_workspace, fixed_costs
from fxshard.memory.cuda.settings import AllocatorSettings

KIB = 1024
MIB = 1024 * KIB
PAGES = AllocatorSettings(expandable_segments=True)
OVERSIZE = AllocatorSettings(max_split_size=20 * MIB)


def life(mib: float, born: int, died: int | None = None, stream: str = "compute") -> Allocation:
    return Allocation(int(mib * MIB), born, died, stream)


def reserved(result: Replay) -> float:
    return result.peaks.reserved / MIB


def allocated(result: Replay) -> float:
    return result.peaks.allocated / MIB


def addresses(result: Replay) -> list[int]:
    return [block[0] for block in result.blocks if block is not None]


# Constants


def test_constants_are_those_of_the_installed_torch() -> None:
    """c10/core/AllocatorConfig.h ships in every wheel."""
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    text = header.read_text()
    named = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", text))
    assert int(named["kMinBlockSize"]) == constants.MIN_BLOCK
    assert int(named["kSmallSize"]) == constants.SMALL_SIZE
    assert int(named["kSmallBuffer"]) == constants.SMALL_SEGMENT
    assert int(named["kMinLargeAlloc"]) == constants.MIN_LARGE
    assert int(named["kRoundLarge"]) == constants.ROUND_LARGE
    large = re.search(r"large_segment_size_\{(\d+)\}|kLargeBuffer = (\d+);", text)
    assert large is not None
    assert int(large[1] or large[2]) == constants.LARGE_SEGMENT


def test_settings_are_those_that_the_installed_torch_knows() -> None:
    """c10/cuda/CUDAAllocatorConfig.h, getKeys: none may be unknown here; all but two, which torch
    2.15 brought, are modelled."""
    header = Path(torch.__file__).parent / "include/c10/cuda/CUDAAllocatorConfig.h"
    body = header.read_text().split("keys{", 1)[1].split("}", 1)[0]
    joined = re.sub(r'"\s*"', "", re.sub(r"//.*", "", body))  # two literals in a row are one
    keys = [key for key in re.findall(r'"(\w+)"', joined) if "hip" not in key]
    assert len(keys) >= 5
    values = {"backend": "native", "per_process_memory_fraction": "1.0"}
    refused = [key for key in keys if key.startswith("expandable_segments_reserve")]
    for key in set(keys) - set(refused):
        assert AllocatorSettings.from_text(f"{key}:{values.get(key, 'True')}") is not None
    for key in (*refused, "expandable_segments_reserve"):
        with pytest.raises(ConfigError, match=f"{key}: only the reserve that torch takes"):
            AllocatorSettings.from_text(f"expandable_segments:True,{key}:0.5")


# Rounding: CUDACachingAllocator.cpp, round_size


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_up_to_512_bytes(size: int, rounded: int) -> None:
    result = replay([Allocation(size, 0, 1)])
    assert AllocatorSettings().round_size(size) == rounded
    assert result.peaks.requested == size


def test_zero_bytes_take_nothing() -> None:
    result = replay([Allocation(0, 0, 1)])
    assert result.peaks.reserved == result.peaks.allocated == 0
    assert result.blocks == (None,)


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (1200, 1536),  # not above 512 * 4: as without
        (3000, 3072),  # 2048, 2560, 3072, 3584
        (4096, 4096),
        (5 * MIB, 5 * MIB),
        (5 * MIB + 1, 6 * MIB),  # 4, 5, 6, 7 MiB
        (100 * MIB, 112 * MIB),  # 64, 80, 96, 112 MiB
    ],
)
def test_roundup_power2_divisions(size: int, rounded: int) -> None:
    """roundup_power2_next_division, four steps between powers of two."""
    assert AllocatorSettings(roundup_power2_divisions=4).round_size(size) == rounded


def test_roundup_divisions_may_differ_by_size() -> None:
    """The example of c10/test/core/AllocatorConfig_test.cpp, with its expected values."""
    text = "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]"
    entries = AllocatorSettings.from_text(text).roundup_power2_divisions
    assert isinstance(entries, tuple)
    by_mib = {1 << place: divisions for place, divisions in enumerate(entries)}
    expected = {32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1, 4096: 1, 32768: 1}
    assert {mib: by_mib[mib] for mib in expected} == expected
    chosen = AllocatorSettings(roundup_power2_divisions=entries)
    assert chosen.round_size(130 * MIB) == 192 * MIB  # two steps from 128: 128, 192
    assert chosen.round_size(2049 * MIB) == 2049 * MIB  # one step is none
    assert chosen.round_size(200 * KIB) == 208 * KIB  # below 1 MiB too: 128, 144, ... 192, 208


# Pools and segments: get_pool, get_allocation_size


@pytest.mark.parametrize(
    ("mib", "segment"),
    [
        (1 / 2048, 2),
        (1, 2),
        (1 + 1 / 2048, 20),
        (10 - 1 / 2048, 20),
        (10, 10),
        (10 + 1 / 2048, 12),
        (100.5, 102),
    ],
)
def test_segment_sizes(mib: float, segment: int) -> None:
    assert reserved(replay([life(mib, 0)])) == segment


def test_small_requests_share_a_segment() -> None:
    result = replay([life(1, 0), life(1, 0), life(0.25, 0)])
    assert reserved(result) == 4
    assert result.peaks.segments == 2


def test_pools_do_not_lend_to_each_other() -> None:
    """20 MiB of the large pool are free, and a small request takes 2 more."""
    assert reserved(replay([life(20, 0, 1), life(0.5, 1, 2)])) == 22
    assert reserved(replay([life(0.5, 0, 1), life(1.5, 1, 2)])) == 22


def test_streams_do_not_lend_to_each_other() -> None:
    same = [life(20, 0, 1), life(20, 1, 2)]
    assert reserved(replay(same)) == 20
    assert reserved(replay([same[0], life(20, 1, 2, "gather")])) == 40


def test_large_segment_size() -> None:
    """2.13: requests between 1 and 10 MiB, and pages, take large_segment_size."""
    chosen = AllocatorSettings.from_text("large_segment_size_mb:12")
    assert reserved(replay([life(5, 0)], chosen)) == 12
    pages = AllocatorSettings.from_text("large_segment_size_mb:12,expandable_segments:True")
    assert reserved(replay([life(13, 0)], pages)) == 24


# Fit and split: get_free_block, should_split


def test_smallest_block_that_fits() -> None:
    result = replay([life(40, 0, 2), life(12, 1, 2), life(30, 1, 2), life(12, 2)])
    assert addresses(result)[3] == addresses(result)[1]
    assert reserved(result) == 82


def test_lowest_address_among_equals() -> None:
    result = replay([life(30, 0, 1), life(30, 0, 1), life(30, 1)])
    assert addresses(result)[2] == addresses(result)[0]


def test_small_blocks_are_split_to_512_bytes() -> None:
    whole = 1 * MIB
    result = replay([Allocation(whole - 512, 0, None), Allocation(512, 0, None)])
    first, second = result.blocks
    assert first is not None and second is not None
    assert first[1] == whole - 512 and second == (first[0] + first[1], 512)


def test_large_blocks_are_split_where_more_than_1_mib_remains() -> None:
    """The slack of an unsplit block counts as allocated."""
    assert allocated(replay([life(20, 0, 1), life(19, 1)])) == 20
    assert replay([life(20, 0, 1), life(18.5, 1)]).allocated[-1] == 18.5 * MIB
    assert allocated(replay([life(11, 0)])) == 12  # of a new segment too
    assert allocated(replay([life(10.5, 0)])) == 10.5
    assert allocated(replay([life(11, 0)], PAGES)) == 11


def test_requests_between_1_and_10_mib_share_20() -> None:
    result = replay([life(5, 0), life(5, 0), life(5, 0), life(5, 0), life(5, 0)])
    assert reserved(result) == 40
    assert allocated(result) == 25
    assert result.peaks.inactive_split == 15 * MIB
    assert result.peaks.fragmentation == 15 / 40


# Coalescing: try_merge_blocks


def test_neighbours_join_unless_one_is_in_use() -> None:
    quarters = [life(5, 0, died) for died in (1, None, 1, None)]
    apart = replay([*quarters, life(10, 2)])
    assert reserved(apart) == 30
    joined = replay([life(5, 0, 1), life(5, 0, 2), life(5, 0, 1), life(5, 0), life(15, 2)])
    assert reserved(joined) == 20
    assert addresses(joined)[4] == addresses(joined)[0]


def test_a_waiting_neighbour_does_not_join() -> None:
    waiting = Allocation(5 * MIB, 0, 1, used_on=(("gather", 9),))
    lives = [waiting, life(5, 0, 1), life(10, 0)]
    assert reserved(replay([*lives, life(10, 2)])) == 30
    assert reserved(replay([*lives, life(10, 9)])) == 20


# max_split_size: get_free_block, should_split, release_available_cached_blocks


def test_oversize_blocks_are_not_split() -> None:
    assert allocated(replay([life(40, 0, 1), life(30, 1)], OVERSIZE)) == 40
    split = replay([life(40, 0, 1), life(30, 1)])
    assert split.allocated[-1] == 30 * MIB


def test_oversize_blocks_serve_no_smaller_requests() -> None:
    assert reserved(replay([life(40, 0, 1), life(12, 1)], OVERSIZE)) == 52
    assert reserved(replay([life(40, 0, 1), life(12, 1)])) == 40
    assert reserved(replay([life(20, 0, 1), life(12, 1)], OVERSIZE)) == 32  # 20 is oversize
    below = AllocatorSettings(max_split_size=64 * MIB)
    assert reserved(replay([life(40, 0, 1), life(12, 1)], below)) == 40  # however much larger


def test_oversize_requests_take_blocks_that_are_less_than_20_mib_larger() -> None:
    assert reserved(replay([life(48, 0, 1), life(30, 1)], OVERSIZE)) == 48
    assert reserved(replay([life(50, 0, 1), life(30, 1)], OVERSIZE)) == 80
    wider = AllocatorSettings.from_text("max_split_size_mb:20,max_non_split_rounding_mb:22")
    assert reserved(replay([life(50, 0, 1), life(30, 1)], wider)) == 50


def test_a_miss_gives_one_oversize_block_back_before_all() -> None:
    lives = [life(52, 0, 2), life(12, 0, 2), life(30, 2)]
    result = replay(lives, OVERSIZE, capacity=70 * MIB)
    assert result.peaks.retries == 0
    assert result.after[3, -1] == 42 * MIB  # the 12 MiB stay


def test_a_miss_gives_the_largest_oversize_blocks_back_until_they_suffice() -> None:
    lives = [life(22, 0, 2), life(24, 1, 2), life(46, 2)]
    result = replay(lives, OVERSIZE, capacity=50 * MIB)
    assert result.peaks.retries == 0
    assert result.after[3, -1] == 46 * MIB
    lives = [life(22, 0, 2), life(24, 0, 2), life(40, 0, 2), life(50, 2)]
    result = replay(lives, OVERSIZE, capacity=90 * MIB)
    assert result.peaks.retries == 0
    assert result.after[3, -1] == 72 * MIB  # 40 and 24 suffice; 22 stay


# A full device: malloc, release_cached_blocks


def test_a_full_device_gets_everything_back_that_is_whole() -> None:
    result = replay([life(20, 0, 1), life(30, 1)], capacity=40 * MIB)
    assert result.peaks.retries == 1
    assert result.peaks.out_of_memory is None
    assert reserved(result) == 30


def test_split_segments_are_not_given_back() -> None:
    lives = [life(5, 0), life(20, 1), life(1, 2)]
    result = replay(lives, capacity=30 * MIB)
    assert result.peaks.out_of_memory == 1
    assert result.refused == 1
    assert result.peaks.retries == 1
    assert list(result.ticks) == [0, 1]
    assert result.blocks[1:] == (None, None)


def test_a_full_device_waits_for_other_streams() -> None:
    """synchronize_and_free_events."""
    waiting = Allocation(20 * MIB, 0, 1, used_on=(("gather", 99),))
    result = replay([waiting, life(30, 1)], capacity=40 * MIB)
    assert result.peaks.out_of_memory is None
    assert result.after[2, -1] == 30 * MIB


def test_just_enough_is_enough() -> None:
    assert replay([life(40, 0)], capacity=40 * MIB).peaks.out_of_memory is None
    assert replay([life(40, 0)], capacity=40 * MIB - 1).peaks.out_of_memory == 0


# Fraction and garbage collection: alloc_block, garbage_collect_cached_blocks


def test_memory_fraction() -> None:
    half = AllocatorSettings.from_text("per_process_memory_fraction:0.5")
    assert replay([life(50, 0)], half, capacity=100 * MIB).peaks.out_of_memory is None
    assert replay([life(52, 0)], half, capacity=100 * MIB).peaks.out_of_memory == 0
    with pytest.raises(ConfigError, match="needs a capacity"):
        replay([], half)


def test_memory_fraction_counts_a_whole_segment_where_a_page_would_do() -> None:
    """alloc_block compares p.alloc_size, also for expandable segments."""
    lives = [life(15, 0), life(25, 1)]
    half = AllocatorSettings(expandable_segments=True, per_process_memory_fraction=0.5)
    assert replay(lives, half, capacity=80 * MIB).peaks.out_of_memory == 1  # 20 + 26 > 40
    assert reserved(replay(lives, PAGES, capacity=40 * MIB)) == 40


def test_garbage_collection_frees_what_is_older_than_the_mean() -> None:
    """Allowed 100 MiB, threshold 50. At the third request 22 and 30 MiB are cached, for two and
    for one search of the large pool."""
    lives = [life(22, 0, 1), life(30, 1, 2), life(40, 2)]
    text = "garbage_collection_threshold:0.5"
    collecting = AllocatorSettings.from_text(f"{text},per_process_memory_fraction:0.5")
    assert replay(lives, collecting, capacity=200 * MIB).after[3, -1] == 70 * MIB
    # without a fraction torch does not collect
    plain = AllocatorSettings.from_text(text)
    assert replay(lives, plain, capacity=200 * MIB).after[3, -1] == 92 * MIB


def test_garbage_collection_goes_on_until_enough_is_free() -> None:
    """Threshold 25 MiB: 52 are cached, the older 22 do not suffice, so the 30 go too."""
    lives = [life(22, 0, 1), life(30, 1, 2), life(40, 2)]
    chosen = AllocatorSettings(garbage_collection_threshold=0.25, per_process_memory_fraction=0.5)
    assert replay(lives, chosen, capacity=200 * MIB).after[3, -1] == 40 * MIB


# Expandable segments


def test_expandable_segments_grow_where_others_are_left_over() -> None:
    """A batch that grows: 20, 22, 24 MiB in turn. Three segments, or two pages of 20 MiB."""
    growing = [life(20, 0, 1), life(22, 1, 2), life(24, 2, 3)]
    assert reserved(replay(growing)) == 66
    assert reserved(replay(growing, PAGES)) == 40


def test_expandable_segments_map_only_what_the_tail_lacks() -> None:
    result = replay([life(15, 0), life(25, 1), life(0.5, 2), life(1.75, 3)], PAGES)
    assert [int(r) // MIB for r in result.reserved] == [20, 40, 42, 62]
    first, second, small, third = addresses(result)
    assert (second - first, third - first) == (15 * MIB, 40 * MIB)
    assert not first <= small < third  # the small pool has its own segment
    assert result.peaks.segments == 0  # as in torch, which counts cudaMalloc's


def test_expandable_segments_are_one_per_stream() -> None:
    assert reserved(replay([life(5, 0), life(5, 0, None, "gather")], PAGES)) == 40


def test_the_block_that_can_grow_is_taken_last() -> None:
    """get_free_block: 5.5 MiB are free at the tail, and a hole of 9.5 before. Best fit for 4 is the
    tail; where that can grow, it is the hole."""
    lives = [life(9.5, 0, 1), life(5, 0), life(4, 1)]
    first, _, third = addresses(replay(lives))
    assert third == first + int(14.5 * MIB)
    first, _, third = addresses(replay(lives, PAGES))
    assert third == first


def test_only_free_pages_are_unmapped_and_the_lowest_gap_is_filled_first() -> None:
    """Pages of 20 MiB. 30 and 5 lie in the first two; the 30 die. A request of 35 on another stream
    does not fit into 60: page 0 is unmapped, page 1 has the 5. Then 25 on the first stream: the
    other stream's two pages are unmapped, page 0 is mapped again and joins the 10 after it."""
    lives = [life(30, 0, 2), life(5, 1), life(35, 3, 4, "gather"), life(25, 5)]
    result = replay(lives, PAGES, capacity=60 * MIB)
    assert [int(r) // MIB for r in result.reserved] == [40, 40, 40, 60, 60, 60]
    assert [int(r) // MIB for r in result.after[3]] == [40, 40, 40, 60, 60, 40]
    assert result.peaks.retries == 2
    assert addresses(result)[3] == addresses(result)[0]
    (segment,) = result.segments
    assert [(b.bytes // MIB, b.state) for b in segment.blocks] == [
        (25, "allocated"),
        (5, "free"),
        (5, "allocated"),
        (5, "free"),
    ]


def test_a_page_that_is_in_use_in_part_stays() -> None:
    """5 live in page 0, and 30 that die reach into page 1: only page 1 is given back."""
    lives = [life(5, 0), life(30, 0, 1), life(15, 1, None, "gather")]
    result = replay(lives, PAGES, capacity=40 * MIB)
    assert [[b.bytes // MIB for b in segment.blocks] for segment in result.segments] == [
        [5, 15],
        [15, 5],
    ]
    assert result.peaks.retries == 1


def test_pages_that_are_missing_are_out_of_memory() -> None:
    result = replay([life(15, 0), life(30, 1)], PAGES, capacity=40 * MIB)
    assert result.peaks.out_of_memory == 1
    assert reserved(result) == 20


# record_stream: free, insert_events, process_events


def test_a_block_that_another_stream_reads_is_reused_when_that_is_done() -> None:
    first = Allocation(20 * MIB, 0, 2, used_on=(("gather", 5),))
    result = replay([first, life(20, 3, 4), life(20, 5)])
    assert addresses(result)[2] == addresses(result)[0]
    assert reserved(result) == 40
    assert [int(a) // MIB for a in result.allocated] == [20, 0, 20, 0, 20]
    assert [int(a) // MIB for a in result.active] == [20, 20, 40, 20, 20]
    assert [int(r) // MIB for r in result.requested] == [20, 20, 40, 20, 20]


def test_events_are_polled_by_requests_alone() -> None:
    """Done at 3, but nothing is requested before 6."""
    first = Allocation(20 * MIB, 0, 2, used_on=(("gather", 3),))
    result = replay([first, Allocation(12 * MIB, 1, 4), life(20, 6)])
    assert [int(a) // MIB for a in result.after[2]] == [20, 32, 32, 20, 20]
    assert reserved(result) == 32


def test_a_late_event_holds_back_those_after_it() -> None:
    late = Allocation(20 * MIB, 0, 1, used_on=(("gather", 9),))
    early = Allocation(20 * MIB, 0, 2, used_on=(("gather", 3),))
    assert reserved(replay([late, early, life(20, 4)])) == 60
    other = Allocation(20 * MIB, 0, 2, used_on=(("copy", 3),))
    assert reserved(replay([late, other, life(20, 4)])) == 40


def test_a_block_waits_for_every_stream_but_its_own() -> None:
    both = Allocation(20 * MIB, 0, 1, used_on=(("gather", 3), ("copy", 5)))
    assert reserved(replay([both, life(20, 4)])) == 40
    assert reserved(replay([both, life(20, 5)])) == 20
    twice = Allocation(20 * MIB, 0, 1, used_on=(("gather", 5), ("gather", 3)))
    assert reserved(replay([twice, life(20, 4)])) == 40
    own = Allocation(20 * MIB, 0, 1, used_on=(("compute", 99),))
    assert reserved(replay([own, life(20, 1)])) == 20


# Series and refusals


def test_deaths_come_before_births() -> None:
    result = replay([life(20, 0, 1), life(20, 1, 2)])
    assert allocated(result) == 20
    assert list(result.ticks) == [0, 1, 2]
    assert result.ticks[result.allocated.argmax()] == 0


def test_peaks_between_ticks() -> None:
    result = replay([life(20, 0, 6), life(40, 2, 4), life(12, 8, 9)])
    assert result.between(0, 2) == Watermarks(*[20 * MIB] * 4)
    assert result.between(1, 3) == Watermarks(*[60 * MIB] * 4)
    assert result.between(4, 5) == Watermarks(*[20 * MIB] * 3, 60 * MIB)
    assert result.between(5, 6) == Watermarks(*[20 * MIB] * 3, 60 * MIB)
    assert result.between(6, 8).allocated == 0
    assert result.between(100, 101) == Watermarks(0, 0, 0, 60 * MIB)
    assert result.between(-2, 0) == Watermarks(0, 0, 0, 0)


def test_nothing_at_all() -> None:
    result = replay([])
    assert result.peaks == allocator.AllocatorPeaks()
    assert result.ticks.shape == (0,) and result.after.shape == (4, 0)
    assert result.between(0, 9) == Watermarks(0, 0, 0, 0)


@pytest.mark.parametrize("bad", [Allocation(-1, 0, 1), Allocation(1, 3, 3), Allocation(1, 3, 2)])
def test_impossible_lives_are_refused(bad: Allocation) -> None:
    with pytest.raises(ConfigError, match="allocation 1: "):
        replay([life(1, 0), bad])


def test_settings_from_text() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:8,backend:native,pinned_use_background_threads:True"
    )
    assert AllocatorSettings.from_text(text) == AllocatorSettings(
        expandable_segments=True,
        max_split_size=128 * MIB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=8,
    )
    assert AllocatorSettings.from_text("") == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("expandable_segment:True", "unknown allocator setting 'expandable_segment'"),
        ("expandable_segments:true", "True or False"),
        ("expandable_segments", "expected name:value"),
        ("expandable_segments:True,,", "expected name:value"),
        ("max_split_size_mb:19", "at least large_segment_size"),
        ("max_split_size_mb:many", "must be a number"),
        ("max_non_split_rounding_mb:1", "at least large_segment_size"),
        ("large_segment_size_mb:10", "above 10485760"),
        ("garbage_collection_threshold:1.0", "must lie in"),
        ("garbage_collection_threshold:0", "above 0"),
        ("per_process_memory_fraction:2", "must lie in"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[3:4]", "not a power of two"),
        ("backend:cudaMallocAsync", "only the native allocator"),
    ],
)
def test_settings_that_torch_refuses(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        AllocatorSettings.from_text(text)


# Fixed costs


def test_cublas_workspaces() -> None:
    """aten/src/ATen/cuda/CublasHandlePool.cpp: 4096 KiB x 8, or 2 x 4096 + 8 x 16 KiB."""
    assert cublas_workspace((9, 0)) == cublas_workspace((10, 0)) == 33_554_432
    assert cublas_workspace((8, 0)) == cublas_workspace((8, 9)) == 8_320 * KIB


def test_cublaslt_has_workspaces_of_its_own_where_torch_does_not_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.backends.cuda, "cublaslt_workspace_size", raising=False)
    found = {c.name: c.bytes for c in fixed_costs((9, 0)) if "cuBLASLt" in c.name}
    assert found == {
        "cuBLASLt workspace, forward thread": MIB,
        "cuBLASLt workspace, autograd thread": MIB,
    }


def test_fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads use cuBLAS; what is outside the allocator is marked as a bound."""
    monkeypatch.setattr(torch.backends.cuda, "cublaslt_workspace_size", None, raising=False)
    costs = fixed_costs((9, 0))
    assert sum(cost.bytes for cost in costs if not cost.bound) == 64 * MIB
    assert sum(c.bytes for c in fixed_costs((8, 0)) if not c.bound) == 16_640 * KIB
    assert {c.name: c.bytes // MIB for c in costs if c.bound} == {
        "CUDA context and kernels": 1024,
        "NCCL buffers": 768,
    }
    assert all(cost.source for cost in costs)
    assert fixed_costs((9, 0), communicators=2)[-1].bytes == 1536 * MIB
