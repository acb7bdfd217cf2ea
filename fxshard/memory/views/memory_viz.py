"""A step as a snapshot that PyTorch's memory_viz opens (torch/cuda/_memory_viz.py, MemoryViz.js).

The fields are those of ``torch.cuda.memory._snapshot()`` (torch/csrc/cuda/memory_snapshot.cpp).
What is on the device is device 0; with offload, what is on the CPU is device 1.

Addresses are made up: a freed block is used again for a request of its size, else the segment
grows. What a caching allocator reserves is in `fxshard.memory.cuda.allocator`, and not here.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from fxshard.memory.ledger import Ledger, Storage
from fxshard.memory.report import MemoryReport

BASE = 1 << 40  # address of the first byte of device 0; of device n: n + 1 times that
PROTOCOL = 4  # MemoryViz.js reads pickles up to this

Frames = list[dict[str, Any]]


@dataclasses.dataclass
class _VizAllocation:
    """A storage from its first range to the end of its last."""

    size: int
    device: int
    category: str
    frames: Frames
    born: int
    died: int | None
    address: int = 0


def pickled(report: MemoryReport, *, first_step: bool = False) -> bytes:
    """The snapshot, as the file that memory_viz opens."""
    return pickle.dumps(snapshot(report, first_step=first_step), protocol=PROTOCOL)


def snapshot(report: MemoryReport, *, first_step: bool = False) -> dict[str, Any]:
    """``{"segments", "device_traces"}``.

    What is held from before the step is allocated by the first events, so that it has a name.
    """
    ledger = report.ledger(first_step=first_step)
    found = list(_allocations(ledger))
    count = 1 + report.offloaded
    traces: list[list[dict[str, Any]]] = []
    segments = []
    for device in range(count):
        mine = [each for each in found if each.device == device]
        used = _place(mine, BASE * (device + 1))
        traces.append(list(_events(mine)))
        segments.append(_segment(mine, device, BASE * (device + 1), used))
    return {"segments": segments, "device_traces": traces}


def _allocations(ledger: Ledger) -> Iterator[_VizAllocation]:
    """One per storage: a change of category is none of memory, nor are the parts of a storage."""
    for each in filter(Storage.lives, ledger.storages()):
        first = each.parts[0]
        yield _VizAllocation(
            *(each.bytes, int(first.host), first.category.value),
            frames=_frames(each),
            born=each.born,
            died=each.died,
        )


def _frames(storage: Storage) -> Frames:
    """What it is, then where it comes from, innermost first."""
    first, *others = storage.parts
    what = " -> ".join(dict.fromkeys(each.category.value for each in storage.ranges))
    name = first.name + (f" and {len(others)} more" if others else "")
    made = f"{name} ({first.op})" if first.op else name
    frames = [
        {"filename": what, "line": 0, "name": made},
        {"filename": "module", "line": 0, "name": first.module or "(root)"},
    ]
    place, _, function = first.line.partition(" in ")
    path, _, number = place.rpartition(":")
    if path:
        frames.insert(1, {"filename": path, "line": int(number), "name": function})
    return frames


def _place(allocations: Iterable[_VizAllocation], base: int) -> int:
    """Give each an address; returns how many bytes of addresses are used."""
    free: dict[int, list[int]] = defaultdict(list)
    used = 0
    for _, begins, each in _in_time(allocations):
        if not begins:
            free[each.size].append(each.address)
        elif free[each.size]:
            each.address = free[each.size].pop()
        else:
            each.address = base + used
            used += each.size
    return used


def _in_time(allocations: Iterable[_VizAllocation]) -> Iterator[tuple[int, bool, _VizAllocation]]:
    """``(tick, begins, allocation)`` in order of time; at one tick what ends is first."""
    moments = []
    for number, each in enumerate(allocations):
        moments.append((max(each.born, 0), True, number, each))
        if each.died is not None:
            moments.append((each.died, False, number, each))
    for tick, begins, _, each in sorted(moments, key=lambda moment: moment[:3]):
        yield tick, begins, each


def _events(allocations: Iterable[_VizAllocation]) -> Iterator[dict[str, Any]]:
    # MemoryViz.js fails on categories among which there is no "unknown" (annotate_snapshot).
    nothing = {"addr": 0, "size": 0, "stream": 0, "time_us": 0, "frames": []}
    yield {"action": "snapshot", **nothing, "category": "unknown"}
    for tick, begins, each in _in_time(allocations):
        event = {
            "addr": each.address,
            "size": each.size,
            "stream": 0,  # all memory is asked for on the compute stream
            "time_us": tick,
            "frames": each.frames,
            "category": each.category,
        }
        for action in ("alloc",) if begins else ("free_requested", "free_completed"):
            yield {"action": action, **event}


def _segment(allocations: Iterable[_VizAllocation], device: int, base: int, used: int) -> Any:
    """One segment, as it is when the step is over."""
    blocks: list[dict[str, Any]] = []
    at = base
    kept = sorted((a for a in allocations if a.died is None), key=lambda each: each.address)
    for each in kept:
        if at < each.address:
            blocks.append(_block(at, each.address - at, 0, "inactive", []))
        blocks.append(_block(each.address, each.size, each.size, "active_allocated", each.frames))
        at = each.address + each.size
    if at < base + used:
        blocks.append(_block(at, base + used - at, 0, "inactive", []))
    held = sum(each.size for each in kept)
    return {
        "device": device,
        "address": base,
        "total_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "allocated_size": held,
        "active_size": held,
        "requested_size": held,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size: int, requested: int, state: str, frames: Frames) -> dict[str, Any]:
    both = {"address": address, "size": size}
    return both | {"requested_size": requested, "state": state, "frames": frames}
