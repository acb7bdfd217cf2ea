"""Why a program ran out of GPU memory, from the snapshot that it left.

    explained = explain_oom("snapshot.pickle")
    print(explained)

What-ifs are replays of the recording through the model of the allocator (`fxshard.memory.cuda`),
with other settings or without some of what was held. They count only if the same replay without a
change runs out of memory at the same request: else it is said that nobody knows what would have
fitted.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Mapping
from typing import Any

from fxshard.errors import ConfigError
from fxshard.memory.category import CATEGORIES, Category
from fxshard.memory.cuda.allocator import Allocation, Replay, replay
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.explain import WhatIf
from fxshard.memory.oom import stacks
from fxshard.memory.oom.moments import AllocatorMoment, Recording
from fxshard.memory.oom.snapshot import Snapshot, read
from fxshard.memory.oom.stacks import StackOrigin
from fxshard.memory.report import MemoryReport
from fxshard.memory.views import serialize

SETTINGS: dict[str, dict[str, Any]] = {  # tried, each on top of the program's own
    "expandable_segments:True": {"expandable_segments": True},
    "roundup_power2_divisions:8": {"roundup_power2_divisions": 8},
    "max_split_size_mb:256": {"max_split_size": 256 << 20},
}
# What a program can do without, and how. Never "all of it": what computes now is needed.
REMOVALS = (
    (Category.ACTIVATION, "activation checkpointing, of what forwards keep for backward"),
    (Category.OPT_STATE, "optimizer states offloaded to the CPU, or sharded over more ranks"),
    (Category.SHARDED_PARAM, "parameters offloaded to the CPU, or sharded over more ranks"),
    (Category.SHARDED_GRAD, "sharded gradients offloaded to the CPU, or sharded over more ranks"),
    (Category.UNSHARDED_GRAD, "gradients sharded"),
    (Category.UNSHARDED_PARAM, "parameters resharded after forward, and fewer prefetched"),
)
STALE_GRADIENTS = "zero_grad(set_to_none=True) before forward, if nothing is accumulated"


@dataclasses.dataclass(frozen=True)
class FailedAllocation:
    """The allocation that failed.

    Attributes:
        bytes: of the block that was asked for.
        needed: bytes that the device would have had to give: a segment, or pages.
        stream: that it was asked for on.
        device_free: what the device had left.
        small: it is of the pool for requests up to 1 MiB.
        origin: what its stack tells.
    """

    bytes: int
    needed: int
    stream: int
    device_free: int
    small: bool
    origin: StackOrigin

    @property
    def limited(self) -> bool:
        """The device had enough: a limit of the program's own refused it."""
        return self.needed <= self.device_free


@dataclasses.dataclass(frozen=True)
class OomWhatIf:
    """Something that could have been otherwise.

    Attributes:
        name: what.
        saves_bytes: of what was held, all of that kind, so at most; of a setting: of the reserved
            peak, None beside a request that failed.
        fits: the replay with it meets the request; None: not known.
        reserved: of a setting: the most that its replay reserves.
    """

    name: str
    saves_bytes: int | None
    fits: bool | None
    reserved: int | None = None


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan of the same step, to be put beside.

    Attributes:
        peak_bytes: of its steady step.
        by_category: the same by category.
        what_ifs: of the plan itself, each figure that of a plan made so.
    """

    peak_bytes: int
    by_category: dict[str, int]
    what_ifs: tuple[WhatIf, ...] = ()

    @classmethod
    def of(cls, report: MemoryReport, *, what_ifs: bool = True) -> Planned:
        """From a report; one that has its plan is asked for its what-ifs."""
        parts = report.peak_by_category.items()
        by_category = {each.value: size for each, size in parts if size}
        asked = what_ifs and report.plan is not None and report.sizes is None
        tried = report.explain_peak().what_ifs if asked else ()
        return cls(report.peak_bytes, by_category, tried)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Planned:
        """From what `MemoryReport.to_dict` wrote.

        Raises:
            ConfigError: it is of another schema, or was altered.
        """
        peak, parts = told.get("peak_bytes"), told.get("peak_by_category")
        names = {category.value for category in CATEGORIES}
        if (
            told.get("schema") != serialize.SCHEMA
            or type(peak) is not int
            or not isinstance(parts, dict)
            or not all(name in names and type(size) is int for name, size in parts.items())
        ):
            raise ConfigError("no report as `fxshard report --json` of this version writes it")
        return cls(peak, dict(parts))


@dataclasses.dataclass(frozen=True)
class OomExplanation:
    """Who held memory, and what would have made it fit; ``str()`` of it is the text.

    Attributes:
        device: index of the GPU.
        devices: all that the snapshot says something about.
        request: the allocation that failed; None: none did.
        moments: the state at it; without one, the highest point of the recording and its end.
        what_ifs: those first that fit; of them settings first, then the largest savings.
        model_reserved: what the replay with the program's own settings has reserved at the failed
            request, or at its highest; None: it was not replayed.
        why_not_replayed: why the replay cannot say what would have fitted; "" if it can.
        failures: requests that failed; `request` is the last.
        events: entries of the recording.
        complete: the recording begins before the first allocation.
        settings_text: of the allocator.
        plan: a plan of the same step.
    """

    device: int
    devices: tuple[int, ...]
    request: FailedAllocation | None
    moments: tuple[AllocatorMoment, ...]
    what_ifs: tuple[OomWhatIf, ...]
    model_reserved: int | None
    why_not_replayed: str
    failures: int
    events: int
    complete: bool
    settings_text: str
    plan: Planned | None = None

    @property
    def moment(self) -> AllocatorMoment:
        """The state at the failed request, or at the highest point."""
        return self.moments[0]

    @property
    def fragmented(self) -> bool:
        """The request would have fitted if all that was free were one piece."""
        free = self.moment.free_bytes + (0 if self.request is None else self.request.device_free)
        return self.request is not None and self.request.bytes <= free

    def __str__(self) -> str:
        from fxshard.memory.views import oom  # a view, which knows this class

        return oom.text(self)


def explain_oom(
    path: str | os.PathLike[str], *, device: int | None = None, plan: Planned | None = None
) -> OomExplanation:
    """Explain a snapshot that `torch.cuda.memory._dump_snapshot` wrote, of any program.

    Args:
        path: of the file. Nothing in it is run.
        device: index of the GPU; None: the one that ran out of memory last, else the one that has
            reserved the most.
        plan: of the same step, to be put beside.

    Returns:
        The state at the allocation that failed; if none did, at the highest point and at the end.

    Raises:
        ConfigError: the file is no such snapshot, or says nothing about the device.
    """
    snapshot = read(path)
    device = _device(snapshot, device)
    recording = Recording(snapshot, device)
    failed = recording.out_of_memory()
    moments = [recording.at("out of memory", failed)] if failed is not None else []
    if failed is None:
        highest = recording.highest()
        if highest is not None:
            moments.append(recording.at("highest point", highest))
        moments.append(recording.at("end", None))
    request = None if failed is None else _request(recording, failed)
    replays = _Replays(snapshot, recording, moments[0], request)
    return OomExplanation(
        device=device,
        devices=tuple(snapshot.devices()),
        request=request,
        moments=tuple(moments),
        what_ifs=tuple(replays.what_ifs()),
        model_reserved=replays.reserved(),
        why_not_replayed=replays.why_not,
        failures=sum(event.action == "oom" for event in recording.events),
        events=len(recording.events),
        complete=replays.complete,
        settings_text=snapshot.settings_text,
        plan=plan,
    )


def _device(snapshot: Snapshot, wanted: int | None) -> int:
    known = snapshot.devices()
    if wanted is not None:
        if wanted not in known:
            raise ConfigError(
                f"device {wanted}: the snapshot says nothing about it, but about "
                f"{', '.join(map(str, known)) or 'none'}."
            )
        return wanted
    if not known:
        raise ConfigError(
            "the snapshot has neither a segment nor an event: was it taken before the first "
            "allocation, or on a machine without a GPU?"
        )
    failed = [d for d in known if Recording(snapshot, d).out_of_memory() is not None]
    sizes = {d: sum(s.bytes for s in snapshot.segments if s.device == d) for d in known}
    return max(failed or known, key=lambda d: (sizes[d], -d))


def _request(recording: Recording, failed: int) -> FailedAllocation:
    event, settings = recording.events[failed], recording.settings
    size = settings.round_size(event.bytes)
    return FailedAllocation(
        *(event.bytes, settings.segment_size(size), event.stream, event.device_free),
        small=settings.segment_size(size) == settings.segment_size(1),
        origin=recording.origin(event.stack, event.label),
    )


_Key = tuple[int | None, int]  # of a life: the event that begins it, and its address


class _Replays:
    """The recording up to a moment, through the model of the allocator."""

    def __init__(
        self,
        snapshot: Snapshot,
        recording: Recording,
        moment: AllocatorMoment,
        request: FailedAllocation | None,
    ) -> None:
        self.moment, self.request = moment, request
        self.settings, self.events = snapshot.settings, len(recording.events)
        self.lives, self.before = _lives(recording, moment)
        self.complete = bool(recording.events) and not self.before
        self.capacity = None
        if request is not None:
            # What the device would give: it is full. A limit of the program's own is not recorded.
            self.capacity = moment.reserved + (0 if request.limited else request.device_free)
        self.control: Replay | None = None
        self.why_not = self._why_not(snapshot, recording)

    def _why_not(self, snapshot: Snapshot, recording: Recording) -> str:
        if not recording.events:
            return (
                "the snapshot has no history: call "
                "torch.cuda.memory._record_memory_history() at the start of the program"
            )
        if self.settings is None:
            return f"the settings of the allocator are not modelled: {snapshot.why_no_settings}"
        if any(s.private for s in recording.segments) or any(e.private for e in recording.events):
            return "memory pools of the program's own, and of CUDA graphs, are not modelled"
        self.control = self._replay(self.settings)
        if self.request is None or self.control.refused == len(self.lives):
            return ""
        begins = (
            ""
            if self.complete
            else ". The recording begins later than the program, and what was there before is laid "
            "out afresh: record from the start, with a larger max_entries"
        )
        word = "an earlier request" if self.control.refused is not None else "no request"
        return f"the replay without a change runs out of memory at {word}{begins}"

    def _replay(self, settings: AllocatorSettings, left_out: Container[_Key] = ()) -> Replay:
        """With the request at the end, and without some lives."""
        lives = [life for key, life in self.lives.items() if key not in left_out]
        if self.request is not None:
            last = self.events + 1
            lives.append(Allocation(self.request.bytes, last, None, str(self.request.stream)))
        return replay(lives, settings, capacity=self.capacity)

    def reserved(self) -> int | None:
        """Of the replay with the program's own settings."""
        if self.control is None:
            return None
        if self.request is None:
            return self.control.peaks.reserved
        return int(self.control.after[3, -1]) if self.control.after.size else 0

    def what_ifs(self) -> list[OomWhatIf]:
        removals = sorted(self._removals(), key=lambda each: -(each.saves_bytes or 0))
        return sorted([*self._settings(), *removals], key=lambda each: each.fits is not True)

    def _settings(self) -> list[OomWhatIf]:
        if self.control is None or self.settings is None or self.why_not:
            return []
        found = []
        for name, changes in SETTINGS.items():
            changed = dataclasses.replace(self.settings, **changes)
            if changed == self.settings:
                continue
            other = self._replay(changed)
            fits = None if self.request is None else other.refused is None
            saves = self.control.peaks.reserved - other.peaks.reserved
            if self.request is None and saves <= 0:
                continue
            known = saves if self.request is None else None
            name = f"PYTORCH_CUDA_ALLOC_CONF={name}"
            found.append(OomWhatIf(name, known, fits, other.peaks.reserved))
        return found

    def _removals(self) -> list[OomWhatIf]:
        found = [self._without(name, {category.value}) for category, name in REMOVALS]
        if self.request is not None and self.request.origin.phase == stacks.FORWARD_PHASE:
            gradients = {Category.UNSHARDED_GRAD.value, Category.SHARDED_GRAD.value}
            found.append(self._without(STALE_GRADIENTS, gradients))
        return [each for each in found if each is not None]

    def _without(self, name: str, categories: set[str]) -> OomWhatIf | None:
        gone = {
            (each.since, each.address): each.block
            for each in self.moment.held
            if each.origin.category in categories
        }
        if not gone:
            return None
        fits = None
        if self.request is not None and self.settings is not None and not self.why_not:
            fits = self._replay(self.settings, gone).refused is None
        return OomWhatIf(name, sum(gone.values()), fits)


def _lives(recording: Recording, moment: AllocatorMoment) -> tuple[dict[_Key, Allocation], bool]:
    """Every life up to a moment, and whether some begin before the recording. Those are laid out
    first, in the order of their addresses.
    """
    last = -1 if moment.event is None else moment.event
    born: dict[int, int] = {}
    found: dict[_Key, Allocation] = {}
    before: dict[_Key, Allocation] = {}
    for index in range(last + 1):
        event = recording.events[index]
        if event.action == "alloc":
            born[event.address] = index
            found[index, event.address] = Allocation(
                event.bytes, index + 1, None, str(event.stream)
            )
        elif event.action == "free_completed":
            # A block that waits for other streams is in use until they are done.
            since = born.pop(event.address, None)
            if since is not None:
                key = since, event.address
                found[key] = dataclasses.replace(found[key], died=index + 1)
            else:
                life = Allocation(event.bytes, 0, index + 1, str(event.stream))
                before.setdefault((None, event.address), life)
    for held in moment.held:
        if held.since is None:
            before[None, held.address] = Allocation(held.bytes, 0, None, str(held.stream))
    ordered = dict(sorted(before.items(), key=lambda item: item[0][1]))
    return ordered | found, bool(before)
