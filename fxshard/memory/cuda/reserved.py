"""What the CUDA caching allocator makes of a step: allocated and reserved bytes, phase by phase.

All memory of a step is asked for on the compute stream, and is freed only after the compute stream
has waited for the work that reads it (`fxshard.runtime.world.c10d`): no block waits for another
stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from fxshard.ir.program import Program
from fxshard.memory.cuda.allocator import Allocation, Replay, replay
from fxshard.memory.cuda.fixed_costs import FixedCost, fixed_costs
from fxshard.memory.cuda.kernels import kernel_temporaries_cuda
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.kernels import KernelTemporary
from fxshard.memory.ledger import BEFORE, Ledger

HOPPER = (9, 0)  # compute capability
STEADY_STEPS = 2  # until the cache serves every request as it did the step before


@dataclasses.dataclass(frozen=True)
class PhaseReserved:
    """The highest figures of one phase, in bytes.

    Attributes:
        phase, micro_batch: see `fxshard.memory.ledger.LedgerPhase`.
        step: 1 for the first step; the last one is the steady state.
        requested: of tensors, as `MemoryReport` counts them, with kernel temporaries.
        allocated: ``torch.cuda.max_memory_allocated`` over the phase.
        reserved: ``torch.cuda.max_memory_reserved`` over the phase.
    """

    phase: str
    micro_batch: int
    step: int
    requested: int
    allocated: int
    reserved: int


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The caching allocator over a first and some steady steps, and what it does not hold.

    Attributes:
        phases: of all steps, in order.
        out_of_memory: ``(step, phase, node)`` of the request that could not be met, or None.
        fixed: workspaces (in the figures above), and bounds of what is outside of the allocator.
        unknown: kernels whose temporaries are not known; they are in no figure.
        replay: the full record. Where ``record_stream`` was called, memory depends on time: this is
            the most that it can be, as the host is ahead of the GPU as far as its waits allow.
        keeping_up: the least that it can be, as the GPU has done its work when memory is freed;
            None without ``record_stream``, where time changes nothing.
    """

    phases: tuple[PhaseReserved, ...]
    out_of_memory: tuple[int, str, str] | None
    fixed: tuple[FixedCost, ...]
    unknown: tuple[KernelTemporary, ...]
    replay: Replay
    keeping_up: Replay | None = None

    @property
    def requested(self) -> int:
        """The most bytes asked for at once, kernel temporaries and workspaces included."""
        return self.replay.peaks.requested

    @property
    def allocated(self) -> int:
        """The most bytes in blocks in use (``allocated_bytes.all.peak``)."""
        return self.replay.peaks.allocated

    @property
    def reserved(self) -> int:
        """The most bytes of segments (``reserved_bytes.all.peak``)."""
        return self.replay.peaks.reserved

    @property
    def fragmentation(self) -> float:
        """Share of the reserved peak that no block uses, from 0 to 1."""
        return self.replay.peaks.fragmentation

    @property
    def retries(self) -> int:
        """Times that everything cached had to be given back (only with a `capacity`)."""
        return self.replay.peaks.retries

    @property
    def active(self) -> int:
        """The most bytes in blocks in use, or waiting for a stream (``active_bytes.all.peak``)."""
        return self.replay.peaks.active

    @property
    def reserved_by_stream(self) -> dict[str, int]:
        """Bytes of the segments that each stream has at the end: no stream reuses another's."""
        found: dict[str, int] = {}
        for segment in self.replay.segments:
            found[segment.stream] = found.get(segment.stream, 0) + segment.bytes
        return found

    @property
    def outside(self) -> int:
        """Bytes that may be taken outside of the allocator, at most: context and NCCL."""
        return sum(cost.bytes for cost in self.fixed if cost.bound)


def device_memory(
    first: Ledger,
    steady: Ledger,
    programs: Sequence[Program],
    *,
    capability: tuple[int, int] = HOPPER,
    settings: AllocatorSettings | None = None,
    capacity: int | None = None,
) -> DeviceMemory:
    """Replay a first step and `STEADY_STEPS` more.

    Args:
        first, steady: ledgers of a step.
        programs: one per micro-batch.
        capability: of the GPU, as ``torch.cuda.get_device_capability``: decides the workspaces.
        settings: of the allocator; torch's defaults if None.
        capacity: bytes of the device without what is outside of the allocator; None: no limit.
    """
    inside = {id(program): kernel_temporaries_cuda(program) for program in programs}
    last = programs[-1]
    groups = sum(1 + (grid.replicas > 1 and grid.shards > 1) for grid in last.grids.values())
    fixed = tuple(fixed_costs(capability, communicators=groups))
    lives = list(_held(first))
    starts: list[tuple[int, Ledger]] = []
    offset = 0
    for step in range(1 + STEADY_STEPS):
        ledger = steady if step else first
        starts.append((offset, ledger))
        lives += _of_step(ledger, offset)
        lives += _temporaries(ledger, offset, [inside[id(program)] for program in programs])
        offset += len(ledger.totals)
    lives += _workspaces(first, fixed)
    lives.sort(key=lambda each: each.born)  # as they are asked for; the sort keeps equal ticks
    done = replay(lives, settings, capacity=capacity)
    phases = [
        PhaseReserved(p.name, p.micro_batch, step, w.requested, w.allocated, w.reserved)
        for step, (begin, ledger) in enumerate(starts, start=1)
        for p in ledger.phases
        for w in [done.between(begin + 2 * p.start, begin + 2 * (p.start + p.points + 1))]
    ]
    return DeviceMemory(
        tuple(phases),
        None if done.peaks.out_of_memory is None else _where(starts, done.peaks.out_of_memory),
        fixed,
        tuple(row for rows in inside.values() for row in rows if row.bytes is None),
        done,
    )


def _held(ledger: Ledger) -> Iterator[Allocation]:
    """What is there before the first step, each storage once."""
    for each in ledger.storages():
        if each.born == BEFORE and not each.ranges[0].host:
            yield Allocation(each.bytes, 0, None)


def _of_step(ledger: Ledger, offset: int) -> Iterator[Allocation]:
    """What one step asks for; it holds nothing from before."""
    for each in ledger.storages():
        if each.born != BEFORE and not each.ranges[0].host and each.lives():
            died = None if each.died is None else offset + each.died
            yield Allocation(each.bytes, offset + each.born, died)


def _temporaries(
    ledger: Ledger, offset: int, rows: Sequence[Sequence[KernelTemporary]]
) -> Iterator[Allocation]:
    for phase in ledger.phases:
        for row in rows[phase.micro_batch] if phase.micro_batch >= 0 else ():
            if row.phase == phase.name and row.bytes and row.backend == "cuda":
                tick = offset + 2 * (phase.start + 1 + row.point)
                yield Allocation(row.bytes, tick, tick + 1)


def _workspaces(first: Ledger, fixed: Sequence[FixedCost]) -> Iterator[Allocation]:
    """Workspaces stay from the first use on."""
    for cost in fixed:
        begin = next(
            (
                point
                for phase in first.phases
                if ("backward" in phase.name) == cost.backward
                for point in range(phase.start, phase.start + phase.points + 1)
                if first.moments[point].op in cost.operators
            ),
            None,
        )
        if begin is not None:
            yield Allocation(cost.bytes, 2 * begin, None)


def _where(starts: list[tuple[int, Ledger]], tick: int) -> tuple[int, str, str]:
    step, begin, ledger = next(
        (number, begin, ledger)
        for number, (begin, ledger) in reversed(list(enumerate(starts, start=1)))
        if begin <= tick
    )
    phase, _ = ledger.at(tick - begin)
    return step, phase.name, ledger.moments[(tick - begin) // 2].node
