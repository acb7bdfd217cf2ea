"""record_stream in dry runs: what the GPU may still be doing when memory is freed."""

from collections.abc import Callable

import pytest
import torch

import fxshard

MIB = 1 << 20
BLOCK = 32 * MIB  # a segment of its own


def never(run: fxshard.DryRun, other: torch.cuda.Stream) -> None:
    """The host goes on."""


def for_an_event(run: fxshard.DryRun, other: torch.cuda.Stream) -> None:
    torch.cuda.current_stream().record_event().synchronize()


def for_the_stream(run: fxshard.DryRun, other: torch.cuda.Stream) -> None:
    torch.cuda.current_stream().synchronize()


def for_all(run: fxshard.DryRun, other: torch.cuda.Stream) -> None:
    torch.cuda.synchronize()


def for_a_stream_that_waited(run: fxshard.DryRun, other: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    event.record()
    third = torch.cuda.Stream()
    third.wait_event(event)
    third.synchronize()


def for_the_other_stream(run: fxshard.DryRun, other: torch.cuda.Stream) -> None:
    other.synchronize()


def for_the_other_stream_that_waited(run: fxshard.DryRun, other: torch.cuda.Stream) -> None:
    other.wait_stream(torch.cuda.current_stream())
    other.synchronize()


@pytest.mark.parametrize(
    ("waits", "blocks"),
    [
        (never, 2),
        (for_the_other_stream, 2),
        (for_an_event, 1),
        (for_the_stream, 1),
        (for_all, 1),
        (for_a_stream_that_waited, 1),
        (for_the_other_stream_that_waited, 1),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_memory_is_free_when_the_host_knows(
    waits: Callable[[fxshard.DryRun, torch.cuda.Stream], None], blocks: int
) -> None:
    """A block of `other` that the compute stream reads is freed, and another one is asked for."""
    with fxshard.dry_run(world_size=1) as run:
        run.step()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            first = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().wait_stream(other)
        first.record_stream(torch.cuda.current_stream())
        del first
        waits(run, other)
        with torch.cuda.stream(other):
            torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
        run.step()
    memory = run.device_memory()
    assert memory.allocated == BLOCK
    assert (memory.requested, memory.active, memory.reserved) == 3 * (blocks * BLOCK,)
    assert memory.keeping_up is not None
    assert memory.keeping_up.peaks.reserved == BLOCK


def test_an_event_from_before_says_nothing() -> None:
    with fxshard.dry_run(world_size=1) as run:
        run.step()
        other, early = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(other):
            first = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
        early.record()
        torch.empty(1, device="cuda")  # the stream works on
        first.record_stream(torch.cuda.current_stream())
        del first
        early.synchronize()
        with torch.cuda.stream(other):
            torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
        run.step()
    assert run.device_memory().active == 2 * BLOCK


def test_a_stream_that_reads_its_own_memory_holds_nothing() -> None:
    with fxshard.dry_run(world_size=1) as run:
        run.step()
        for _ in range(2):
            block = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
            block.record_stream(torch.cuda.current_stream())
            del block
        run.step()
    assert run.device_memory().reserved == BLOCK


def test_without_record_stream_time_changes_nothing() -> None:
    with fxshard.dry_run(world_size=1) as run:
        run.step()
        torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
        run.step()
    assert run.device_memory().keeping_up is None
