"""Peaks of one or more reports side by side: of tensors, and of CUDA's caching allocator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tabulate import tabulate

from fxshard.bytesize import size_text
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.report import MemoryReport

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def peaks_table(sides: Mapping[str, MemoryReport]) -> str:
    """A column per report: its peak, what it is made of, and the bytes of the allocator.

    Args:
        sides: reports by what heads their columns.
    """
    return tabulate(list(_peaks(sides)), headers=("", *sides), disable_numparse=True)


def _peaks(sides: Mapping[str, MemoryReport]) -> Iterator[list[str]]:
    """Peaks of tensors, and of the allocator; what each is made of."""
    yield ["peak of tensors", *(size_text(each.peak_bytes) for each in sides.values())]
    by_category = [each.peak_by_category for each in sides.values()]
    for category in dict.fromkeys(key for each in by_category for key, n in each.items() if n):
        yield [f"- {category.value}", *(size_text(each[category]) for each in by_category)]
    if all(each.device == "cuda" for each in sides.values()):
        devices = [each.device_memory() for each in sides.values()]
        for name in ("requested", "allocated", "reserved"):
            yield [f"{name} on the device", *(size_text(getattr(d, name)) for d in devices)]
        if any(each.keeping_up for each in devices):  # record_stream was called
            least = [(each.keeping_up or each.replay).peaks.reserved for each in devices]
            yield ["- if the GPU keeps up", *map(size_text, least)]
        others = [each.device_memory(settings=EXPANDABLE) for each in sides.values()]
        yield ["- with expandable segments", *(size_text(each.reserved) for each in others)]
