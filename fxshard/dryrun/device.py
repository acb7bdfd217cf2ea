"""What CUDA's caching allocator makes of a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from fxshard.dryrun.tape import Tape
from fxshard.memory.cuda.allocator import Allocation, replay
from fxshard.memory.cuda.fixed_costs import FixedCost, fixed_costs
from fxshard.memory.cuda.reserved import DeviceMemory, PhaseReserved
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.kernels import KernelTemporary

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts


def settings_of_environment() -> AllocatorSettings:
    """What PYTORCH_ALLOC_CONF says, or PYTORCH_CUDA_ALLOC_CONF.

    Raises:
        ConfigError: it says what torch would refuse.
    """
    text = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    return AllocatorSettings.from_text(text)


def device_memory(
    tape: Tape,
    *,
    capability: tuple[int, int],
    settings: AllocatorSettings | None,
    capacity: int | None,
    unknown: tuple[KernelTemporary, ...],
) -> DeviceMemory:
    """Follow the whole run, from the first tensor on, through the allocator.

    Args:
        tape: what was allocated and freed, and on which stream.
        capability: of the GPU; decides the workspaces.
        settings: of the allocator; None: those of the environment.
        capacity: bytes of the device without what is outside of the allocator; None: no limit.
        unknown: kernels whose temporaries are not known.
    """
    fixed = tuple(fixed_costs(capability))
    settings = settings or settings_of_environment()
    lives = [*_lives(tape), *_workspaces(tape, fixed)]
    lives.sort(key=lambda each: each.born)
    done = replay(lives, settings, capacity=capacity)
    keeping_up = None
    if tape.used_on:
        lives = [dataclasses.replace(each, used_on=()) for each in lives]
        keeping_up = replay(lives, settings, capacity=capacity)
    phases = []
    for step, (first, last) in enumerate(tape.steps(), start=1):
        for mark, stop in tape.phases(first, last):
            most = done.between(2 * mark.point, 2 * stop)
            phases.append(
                PhaseReserved(
                    *(mark.phase, mark.micro_batch, step),
                    *(most.requested, most.allocated, most.reserved),
                )
            )
    return DeviceMemory(
        tuple(phases),
        None if done.peaks.out_of_memory is None else _where(tape, done.peaks.out_of_memory // 2),
        fixed,
        unknown,
        done,
        keeping_up,
    )


def _lives(tape: Tape) -> Iterator[Allocation]:
    """Every storage on the GPU; what other streams use waits until the host knows that they did."""
    streams = set[str]().union(*tape.used_on.values())
    over = {stream: tape.over_for_host(stream) for stream in sorted(streams)}
    for each in tape.ranges:
        if each.host or not each.bytes or (each.died is not None and each.died <= each.born):
            continue
        used_on: tuple[tuple[str, int], ...] = ()
        if each.died is not None:
            asked = sorted(tape.used_on.get(each.storage, ()))
            used_on = tuple((stream, over[stream](each.died)) for stream in asked)
        yield Allocation(each.bytes, each.born, each.died, each.stream, used_on)


def _workspaces(tape: Tape, fixed: tuple[FixedCost, ...]) -> Iterator[Allocation]:
    """Each thread that multiplies matrices has its own, from its first product on."""
    for cost in fixed:
        for point in tape.products(cost.operators, cost.backward):
            yield Allocation(cost.bytes, 2 * point, None)
            break


def _where(tape: Tape, point: int) -> tuple[int, str, str]:
    step = next((n for n, (_, last) in enumerate(tape.steps(), start=1) if point <= last), 0)
    phase = [mark.phase for mark in tape.marks if mark.point <= point][-1:]
    return step, phase[0] if phase else "between", tape.moments[point].node
