"""Snapshots as torch writes them, of programs that are written down in tests.

`Program` drives the model of CUDA's allocator and records what it does, in the format of
torch/csrc/cuda/Module.cpp: the entries, keys and their order of torch 2.13.
"""

import pickle
from pathlib import Path
from typing import Any

from fxshard.memory.cuda.blocks import Block, DeviceAllocator
from fxshard.memory.cuda.settings import AllocatorSettings

MIB, GIB = 1 << 20, 1 << 30
PAGE = 20 * MIB
BASE = 0x7F00_0000_0000
TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
FRAMES: dict[tuple[str, int, str], dict[str, Any]] = {}


def frame(path: str, line: int, name: str) -> dict[str, Any]:
    """As torch has them: one dictionary per distinct frame."""
    return FRAMES.setdefault(
        (path, line, name), {"line": line, "name": name, "filename": path.replace("torch:", TORCH)}
    )


CALL = [
    frame("torch:/nn/modules/module.py", 1786, "_call_impl"),
    frame("torch:/nn/modules/module.py", 1775, "_wrapped_call_impl"),
]
MAIN = [frame("/job/train.py", 120, "main"), frame("/job/train.py", 140, "<module>")]
BLOCK = [frame("/job/model.py", 40, "forward"), *CALL, frame("/job/model.py", 70, "forward"), *CALL]
LINEAR = [frame("torch:/nn/modules/linear.py", 134, "forward"), *CALL, *BLOCK, *MAIN]
INIT = [frame("torch:/nn/modules/module.py", 942, "_apply"), *MAIN]
STEP = [
    frame("torch:/optim/optimizer.py", 133, "_use_grad"),
    frame("torch:/optim/optimizer.py", 517, "wrapper"),
    *MAIN,
]
ADAMW = [
    frame("torch:/optim/adam.py", 180, "_init_group"),
    frame("torch:/optim/adam.py", 240, "step"),
    *STEP,
]
FOREACH = [
    frame("torch:/optim/adam.py", 700, "_multi_tensor_adam"),
    frame("torch:/optim/adam.py", 260, "step"),
    *STEP,
]
ENGINE: list[dict[str, Any]] = []


class Program:
    """Allocates and frees; `snapshot` is what torch would dump."""

    def __init__(
        self, capacity: int | None = None, settings: AllocatorSettings | None = None
    ) -> None:
        self.allocator = DeviceAllocator(settings or AllocatorSettings(), capacity)
        self.trace: list[dict[str, Any]] = []
        self.made: dict[int, tuple[Block, int, int, list[Any]]] = {}
        self.failed = False

    def alloc(self, size: int, frames: list[Any], stream: int = 0) -> int:
        """The address; what fails is recorded, as is what comes after."""
        before = self._segments()
        block = self.allocator.allocate(size, str(stream), len(self.trace))
        self._record_segments(before, stream, frames)
        if block is None:
            assert self.allocator.capacity is not None
            free = self.allocator.capacity - self.allocator.reserved
            self.failed = True
            rounded = self.allocator.settings.round_size(size)
            entry = {"action": "oom", "device_free": free, "size": rounded}
            self.trace.append(self._entry(entry, stream, frames))
            return -1
        address = BASE + block.address
        self.made[address] = (block, size, stream, frames)
        entry = {"action": "alloc", "addr": address, "size": size}
        self.trace.append(self._entry(entry, stream, frames))
        return address

    def free(self, address: int, frames: list[Any] = MAIN) -> None:
        block, size, stream, _ = self.made.pop(address)
        self.allocator.free(block, (), len(self.trace))
        for action in ("free_requested", "free_completed"):
            entry = {"action": action, "addr": address, "size": size}
            self.trace.append(self._entry(entry, stream, frames))

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        """`last`: entries that the ring buffer has kept."""
        trace = self.trace if last is None else self.trace[-last:]
        return {
            "segments": [self._segment(each) for each in self.allocator.snapshot()],
            "device_traces": [list(trace)],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": self.allocator.settings.expandable_segments,
                "pinned_num_register_threads": 1,
                "release_lock_on_cudamalloc": False,
                "pinned_use_cuda_host_register": False,
                "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
                "graph_capture_record_stream_reuse": False,
            },
            "external_annotations": [],
        }

    def dump(self, path: Path, **how: Any) -> Path:
        """As `torch.cuda.memory._dump_snapshot`."""
        path.write_bytes(pickle.dumps(self.snapshot(**how)))
        return path

    def _entry(self, first: dict[str, Any], stream: int, frames: list[Any]) -> dict[str, Any]:
        place = {"addr": first.get("addr", 0)} if first["action"] != "oom" else {}
        rest = {"stream": stream, "time_us": 10**15 + len(self.trace), "compile_context": "N/A"}
        return first | place | rest | {"user_metadata": "", "frames": list(frames)}

    def _segments(self) -> set[tuple[int, int]]:
        """Address and bytes of segments; of expandable ones, of each page."""
        found = {(each.address, each.bytes) for each in self.allocator.snapshot()}
        if not self.allocator.settings.expandable_segments:
            return found
        return {(at, PAGE) for start, size in found for at in range(start, start + size, PAGE)}

    def _record_segments(
        self, before: set[tuple[int, int]], stream: int, frames: list[Any]
    ) -> None:
        after = self._segments()
        names = ("segment_free", "segment_alloc")
        if self.allocator.settings.expandable_segments:
            names = ("segment_unmap", "segment_map")
        for name, changed in zip(names, (before - after, after - before), strict=True):
            for address, size in sorted(changed):
                entry = {"action": name, "addr": BASE + address, "size": size}
                self.trace.append(self._entry(entry, stream, frames))

    def _segment(self, each: Any) -> dict[str, Any]:
        blocks = []
        names = {"allocated": "active_allocated", "free": "inactive"}
        for state in each.blocks:
            _, size, _, frames = self.made.get(BASE + state.address, (None, 0, 0, []))
            blocks.append(
                {
                    "address": BASE + state.address,
                    "size": state.bytes,
                    "requested_size": size,
                    "state": names.get(state.state, "active_pending_free"),
                    "frames": list(frames),
                }
            )
        active = sum(b["size"] for b in blocks if b["state"] != "inactive")
        return {
            "device": 0,
            "address": BASE + each.address,
            "total_size": each.bytes,
            "allocated_size": active,
            "active_size": active,
            "requested_size": sum(b["requested_size"] for b in blocks),
            "stream": int(each.stream),
            "segment_type": "small" if each.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": each.expandable,
            "frames": [],
            "blocks": blocks,
        }


def fragmented(settings: AllocatorSettings | None = None) -> Program:
    """4 GiB are asked for, and 6 GiB are free in three pieces of 2 GiB.

    The device has 16.5 GiB. Four segments of 4 GiB, each in use as one, are later split in halves.
    """
    program = Program(16 * GIB + 512 * MIB, settings)
    for address in [program.alloc(4 * GIB, LINEAR) for _ in range(4)]:
        program.free(address)
    halves = [program.alloc(2 * GIB, INIT if at % 2 == 0 else LINEAR) for at in range(8)]
    for at in (1, 3, 5):
        program.free(halves[at])
    program.alloc(4 * GIB, LINEAR)
    return program
