"""A snapshot of CUDA's caching allocator, read from its file and checked.

The format is that of ``torch.cuda.memory._snapshot()`` (torch/csrc/cuda/Module.cpp). Versions of
torch have added keys; what this room does not need may be missing, and what it does not know is
left alone.
"""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fxshard.errors import ConfigError
from fxshard.host import collector
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.oom import plain

MOST = 1 << 47  # a size above 128 TiB is none of a device
GZIP = b"\x1f\x8b"
STATES = {
    "active_allocated": "allocated",
    "active_pending_free": "waiting",  # torch/csrc/cuda/Module.cpp
    "active_awaiting_free": "waiting",  # the name in torch's documentation
    "inactive": "free",
}
DEFAULT_POOL = (0, 0)


class Frame(NamedTuple):
    """One line of a stack."""

    path: str
    line: int
    function: str


Stack = tuple[Frame, ...]  # innermost first


class AllocatorEvent(NamedTuple):
    """One thing that the allocator did.

    Attributes:
        action: "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
            "segment_map", "segment_unmap", "oom", "snapshot", or of a later torch.
        address: of the block or segment; 0 for "oom".
        bytes: asked for ("alloc", and what frees it), of a segment, or that could not be had.
        stack: who did it; empty if it was not recorded, or on a thread without Python.
        device_free: of "oom": what the device had left.
        private: in a memory pool of the user's own, or of a CUDA graph.
        label: the category that who wrote the file gave it, or "".
    """

    action: str
    address: int
    bytes: int
    stream: int
    stack: Stack
    device_free: int
    private: bool
    label: str


class SnapshotBlock(NamedTuple):
    """A part of a segment; `state` is "allocated", "waiting" (for other streams) or "free"."""

    address: int
    bytes: int
    requested: int
    state: str
    stack: Stack


class SnapshotSegment(NamedTuple):
    """Memory that the allocator had reserved when the snapshot was taken."""

    device: int
    address: int
    bytes: int
    stream: int
    small: bool
    expandable: bool
    private: bool
    blocks: tuple[SnapshotBlock, ...]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What `torch.cuda.memory._dump_snapshot` wrote.

    Attributes:
        segments: as they were at the end.
        traces: per device, what had happened before, oldest first.
        settings: of the allocator; None if the file does not say, or has some that the model of
            the allocator does not know.
        settings_text: as the environment variable has it.
        why_no_settings: why `settings` are None.
    """

    segments: tuple[SnapshotSegment, ...]
    traces: tuple[tuple[AllocatorEvent, ...], ...]
    settings: AllocatorSettings | None
    settings_text: str = ""
    why_no_settings: str = ""

    def devices(self) -> list[int]:
        """Those that the snapshot says something about."""
        traced = {device for device, trace in enumerate(self.traces) if trace}
        return sorted(traced | {segment.device for segment in self.segments})


@collector.paused()  # a large snapshot is millions of objects, and none of them is garbage
def read(path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot. Nothing in the file is run.

    Raises:
        ConfigError: it cannot be read, is truncated, was altered, or is no snapshot.
    """
    file = Path(path)
    try:
        if not file.is_file():
            raise ConfigError(f"{path}: there is no such file.")
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror}.") from error
    if data.startswith(GZIP):
        raise ConfigError(f"{path}: it is compressed; unpack it first (gunzip).")
    try:
        return _SnapshotReader().snapshot(plain.loads(data))
    except ConfigError as error:
        raise ConfigError(
            f"{path}: no snapshot of torch.cuda.memory._dump_snapshot that can be read: {error}."
        ) from error


class _SnapshotReader:
    """Checks what the file says; one tuple per distinct frame and stack."""

    def __init__(self) -> None:
        self.frames: dict[int, Frame] = {}  # by the identity of the dictionary that it is read from
        self.stacks: dict[Any, Stack] = {}

    def snapshot(self, told: Any) -> Snapshot:
        if isinstance(told, list):  # torch.cuda.memory_snapshot()
            told = {"segments": told}
        if not isinstance(told, dict) or "segments" not in told:
            raise ConfigError("it has no segments")
        segments = tuple(self.segment(each) for each in _list(told, "segments"))
        traces = [_listed(each, "device_traces") for each in _list(told, "device_traces")]
        read = tuple(tuple(self.event(each) for each in trace) for trace in traces)
        return Snapshot(segments, read, *_settings(told.get("allocator_settings"), segments))

    def segment(self, told: Any) -> SnapshotSegment:
        told = _mapping(told, "segment")
        address = _number(told, "address")
        blocks, at = [], address
        for each in _list(told, "blocks"):
            block = self.block(_mapping(each, "block"), at)
            blocks.append(block)
            at = block.address + block.bytes
        return SnapshotSegment(
            *(_number(told, "device", 0), address, _number(told, "total_size")),
            *(_number(told, "stream", 0), told.get("segment_type") == "small"),
            *(told.get("is_expandable") is True, _private(told.get("segment_pool_id"))),
            tuple(blocks),
        )

    def block(self, told: Mapping[str, Any], at: int) -> SnapshotBlock:
        state = STATES.get(told["state"]) if isinstance(told.get("state"), str) else None
        if state is None:
            raise ConfigError(f"a block's state is {reprlib.repr(told.get('state'))}")
        size, frames = _number(told, "size"), told.get("frames")
        requested = _number(told, "requested_size", size)
        history = told.get("history")  # of torch before 2.1: the newest is first
        if isinstance(history, list) and history and isinstance(history[0], dict):
            requested = _number(history[0], "real_size", requested)
            frames = history[0].get("frames", frames)
        address = _number(told, "address", at)
        return SnapshotBlock(address, size, min(requested, size), state, self.stack(frames))

    def event(self, told: Any) -> AllocatorEvent:
        told = _mapping(told, "entry of a trace")
        action, label = told.get("action"), told.get("category", "")
        if not isinstance(action, str):
            raise ConfigError("an entry of a trace has no action")
        out_of_memory = action == "oom"
        placed = action.startswith(("alloc", "free_", "segment_"))
        return AllocatorEvent(
            action,
            _number(told, "addr", None if placed else 0),
            _number(told, "size", None if placed or out_of_memory else 0),
            _number(told, "stream", 0),
            self.stack(told.get("frames")),
            _number(told, "device_free", 0) if out_of_memory else 0,
            _private(told.get("pool_id")),
            label if isinstance(label, str) else "",
        )

    def stack(self, told: Any) -> Stack:
        if told is None:
            return ()
        frames = _listed(told, "frames")
        key = tuple(map(id, frames))
        found = self.stacks.get(key)
        if found is None:
            made = tuple(self.frame(each) for each in frames)
            found = self.stacks[key] = self.stacks.setdefault(made, made)
        return found

    def frame(self, told: Any) -> Frame:
        found = self.frames.get(id(told))
        if found is None:
            told_ = _mapping(told, "frame")
            path, name = told_.get("filename", ""), told_.get("name", "")
            if not isinstance(path, str) or not isinstance(name, str):
                raise ConfigError("a frame has no file or no function")
            found = self.frames[id(told)] = Frame(path, _number(told_, "line", 0), name)
        return found


def _settings(
    told: Any, segments: Iterable[SnapshotSegment]
) -> tuple[AllocatorSettings | None, str, str]:
    if not isinstance(told, dict):
        if any(segment.expandable for segment in segments):
            return AllocatorSettings(expandable_segments=True), "", ""
        return AllocatorSettings(), "", ""
    text = str(told.get("PYTORCH_CUDA_ALLOC_CONF") or told.get("PYTORCH_ALLOC_CONF") or "")
    try:
        if text:
            return AllocatorSettings.from_text(text), text, ""
        largest = told.get("max_split_size", -1)
        return (
            AllocatorSettings(
                expandable_segments=told.get("expandable_segments") is True,
                max_split_size=_number(told, "max_split_size") if 0 < largest < MOST else None,
            ),
            text,
            "",
        )
    except (ConfigError, TypeError) as error:
        return None, text, str(error)


def _private(told: Any) -> bool:
    return isinstance(told, tuple | list) and tuple(told) != DEFAULT_POOL


def _number(told: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = told.get(name, default)
    if type(value) is not int or not (abs(value) < 1 << 64):
        raise ConfigError(f"{name} is {reprlib.repr(value)}, and should be a whole number")
    if name != "stream" and name != "line" and value < 0:
        raise ConfigError(f"{name} is {value}, which is below 0")
    if name not in ("addr", "address", "stream") and value > MOST:
        raise ConfigError(f"{name} is {value}, more than any device has")
    return value


def _mapping(told: Any, what: str) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise ConfigError(f"a {what} is {reprlib.repr(told)}")
    return told


def _listed(told: Any, what: str) -> list[Any]:
    if not isinstance(told, list):
        raise ConfigError(f"{what} are {reprlib.repr(told)}")
    return told


def _list(told: Mapping[str, Any], name: str) -> list[Any]:
    return _listed(told.get(name, []), name)
