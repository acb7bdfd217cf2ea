"""The settings of CUDA's caching allocator (``PYTORCH_CUDA_ALLOC_CONF``) and its constants."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

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

# Names that change what is mapped where. Since torch 2.15: fewer addresses for a segment of pages.
NOT_MODELLED = frozenset({"expandable_segments_reserve", "expandable_segments_reserve_by_class"})


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
            ConfigError: a name that torch does not know, a value that it refuses, one of
                `NOT_MODELLED`, or the ``cudaMallocAsync`` backend, which is another allocator.
        """
        found: dict[str, object] = {}
        for name, value in _pairs(text):
            if name in _FIELDS:
                field, read = _FIELDS[name]
                found[field] = read(name, value)
            elif name == "backend" and value != "native":
                raise ConfigError(f"backend:{value}: only the native allocator is modelled")
            elif name in NOT_MODELLED:
                raise ConfigError(f"{name}: only the reserve that torch takes itself is modelled")
            elif name not in WITHOUT_EFFECT:
                known = ", ".join(sorted({*_FIELDS, *WITHOUT_EFFECT}))
                raise ConfigError(f"unknown allocator setting {name!r}; known: {known}")
        return cls(**found)  # type: ignore[arg-type]

    def round_size(self, size: int) -> int:
        """Bytes of the block that a request of `size` > 0 bytes asks for (``round_size``)."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self._divisions_at(size)
        if divisions > 1 and size > MIN_BLOCK * divisions:
            # a power of two is a multiple of its step, and stays as it is
            return up(size, (1 << (size.bit_length() - 1)) // divisions)
        return up(size, MIN_BLOCK)

    def segment_size(self, size: int) -> int:
        """Bytes of the segment that a block of `size` bytes asks for (``get_allocation_size``)."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE:
            return self.large_segment_size
        return up(size, ROUND_LARGE)

    def _divisions_at(self, size: int) -> int:
        divisions = self.roundup_power2_divisions
        if isinstance(divisions, int):
            return divisions
        return divisions[min(max(size.bit_length() - MIB.bit_length(), 0), len(divisions) - 1)]


def up(size: int, multiple: int) -> int:
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


def _number(name: str, value: str, kind: type[int] | type[float] = float) -> float:
    try:
        number = kind(value)
    except ValueError:
        raise ConfigError(f"{name} must be a number, not {value!r}") from None
    if number < 0 or (name == "garbage_collection_threshold" and number == 0):
        raise ConfigError(f"{name} must be above 0, not {value}")
    return number


def _mebibytes(name: str, value: str) -> int:
    return int(_number(name, value, int)) * MIB


def _divisions(name: str, value: str) -> int | tuple[int, ...]:
    """One number, or ``[boundary in MiB:divisions,...,>:divisions]``.

    The first boundary holds for smaller sizes too; ``>`` for all above the last
    (``parseRoundUpPower2Divisions``; up to torch 2.8 ``>`` included the last boundary itself).
    """
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


_FIELDS: dict[str, tuple[str, Callable[[str, str], object]]] = {  # name -> field, reader
    "expandable_segments": ("expandable_segments", _truth),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "large_segment_size_mb": ("large_segment_size", _mebibytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _number),
    "per_process_memory_fraction": ("per_process_memory_fraction", _number),
}
