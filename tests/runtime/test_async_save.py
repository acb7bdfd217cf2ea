"""`fxshard.async_save`: a thread writes the state of the call while training goes on."""

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard._torch.process_groups import fake_process_group
from fxshard.errors import CheckpointError
from fxshard.memory.category import Category
from fxshard.runtime.checkpoint import background, files
from fxshard.validation.tracker import Tracker
from tests.memory.test_lifecycle import MODELS, adamw, built, phases_of
from tests.ranks import told
from tests.runtime.test_checkpoints import assert_same, made, values
from tests.runtime.test_module import train
from tests.zoo import MODELS as ZOO


@contextmanager
def writing(instead: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Where torch would write, `instead` runs, with torch's writing for its argument."""
    plain = files.save
    files.save = lambda *args, **options: instead(lambda: plain(*args, **options))
    try:
        yield
    finally:
        files.save = plain


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Nothing is written until the event is set."""
    goes_on = threading.Event()

    def wait(write: Callable[[], Any]) -> Any:
        assert goes_on.wait(100)
        return write()

    with writing(wait):
        yield goes_on


def overlapped(rank: int, world_size: int, path: str) -> None:
    """Steps run while nothing is written yet, and what is saved is the state of the call."""
    model, optimizer = made("fxshard", "mlp13")
    train(ZOO["mlp13"], model, optimizer, 0, 2)
    want, extra = values(model, optimizer), {"steps": [2]}
    with held_back() as goes_on:
        future = fxshard.async_save(path, model, optimizer, extra=extra)
        losses = train(ZOO["mlp13"], model, optimizer, 2, 4)
        extra["steps"].append(4)
        assert not future.done() and not os.path.exists(f"{path}/latest")
        goes_on.set()
        assert future.result() is None
    assert sorted(os.listdir(path)) == ["latest", "version-1"]
    again, other = made("fxshard", "mlp13", seed=1)
    assert fxshard.load_checkpoint(path, again, other) == {"steps": [2]}
    assert_same(values(again, other), want)
    assert train(ZOO["mlp13"], again, other, 2, 4) == losses


def test_steps_overlap_and_the_state_is_that_of_the_call(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(overlapped, str(tmp_path))


def in_turn(rank: int, world_size: int, path: str) -> list[str]:
    """Two asynchronous saves, one that is not, and a load, without asking for a result."""
    model, optimizer = made("fxshard", "mlp13")
    done: list[str] = []

    def watched(write: Callable[[], Any]) -> Any:
        done.append("begins")
        result = write()
        done.append("ends")
        return result

    with writing(watched):
        for number in (1, 2):
            train(ZOO["mlp13"], model, optimizer, number - 1, number)
            fxshard.async_save(path, model, optimizer, extra=number)
        fxshard.save_checkpoint(path, model, optimizer, extra=3)
        fxshard.async_save(path, model, optimizer, extra=4)
        assert fxshard.load_checkpoint(path, model, optimizer) == 4
    return done


def test_one_save_at_a_time(ranks: Any, tmp_path: Path) -> None:
    for done in ranks(2).run(in_turn, str(tmp_path)):
        assert done == ["begins", "ends"] * 4


def failed_behind(rank: int, world_size: int, path: str) -> list[str]:
    """What is said of a save that fails on rank 1 in the background, case by case."""
    model, optimizer = made("fxshard", "mlp13")
    train(ZOO["mlp13"], model, optimizer, 0, 1)
    fxshard.save_checkpoint(path, model, optimizer, extra="good")

    def full(*args: Any) -> Any:
        raise OSError("the disk of rank 1 is full")

    def fails() -> Any:
        plain = files._digests
        files._digests = full if rank == 1 else plain
        try:
            future = fxshard.async_save(path, model, optimizer, extra="bad")
            Future.exception(future)  # it is done, and nobody is told
        finally:
            files._digests = plain
        return future

    fails()
    found = [told(lambda: fxshard.load_checkpoint(path, model, optimizer))]
    assert fxshard.load_checkpoint(path, model, optimizer) == "good"  # the state before
    found.append(told(fails().result))
    fxshard.save_checkpoint(path, model, optimizer, extra="told before")
    future = fails()
    if rank == 0:
        assert isinstance(future.exception(), CheckpointError)  # rank 1 does not ask
    found.append(told(lambda: fxshard.save_checkpoint(path, model, optimizer, extra="no")))
    assert fxshard.load_checkpoint(path, model, optimizer) == "told before"
    return found


def test_a_failure_behind_reaches_all_ranks_once(
    ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for loads, result, saves in ranks(2).run(failed_behind, str(tmp_path)):
        for each in (loads, result, saves):
            assert each.startswith("CheckpointError: ") and "the disk of rank 1 is full" in each
            assert "could not be written, and the state before is as it was" in each
        assert "load_checkpoint has done nothing" in loads
        assert "save_checkpoint has done nothing" in saves
    assert sorted(os.listdir(tmp_path)) == ["latest", "version-2"]


def test_a_failure_is_in_the_log_and_lets_the_copy_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies: list[weakref.ref[Any]] = []
    plain = background.staged

    def staged(value: Any) -> Any:
        made = plain(value)
        copies.extend(weakref.ref(each) for each in (made,) if isinstance(each, torch.Tensor))
        return made

    def fail(write: Callable[[], Any]) -> Any:
        raise RuntimeError("no space")

    monkeypatch.setattr(background, "staged", staged)
    with writing(fail), caplog.at_level(logging.ERROR, "fxshard"):
        future = fxshard.async_save(tmp_path, nn.Linear(2, 2))
        assert "no space" in str(future.exception())
    assert "async_save failed" in caplog.text
    gc.collect()
    assert len(copies) == 2 and not any(ref() is not None for ref in copies)


ENDS = """
import sys, torch, fxshard
model = torch.nn.Linear(200, 200)
fxshard.async_save(sys.argv[1], model, extra="whole")
"""


@pytest.mark.slow
def test_a_process_that_ends_waits(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], check=True)
    assert fxshard.load_checkpoint(tmp_path, nn.Linear(200, 200)) == "whole"


def test_after_the_process_group_is_another(tmp_path: Path) -> None:
    """The group beside the default one goes with it."""
    for _ in range(2):
        with fake_process_group(0, 1):
            assert background.group_beside(None) is background.group_beside(None) is not None
    assert background.group_beside(None) is None


def test_a_process_group_that_is_destroyed_meanwhile(tmp_path: Path) -> None:
    """The future says so, and the state before stays."""
    model = nn.Linear(2, 2)
    fxshard.save_checkpoint(tmp_path, model, extra="before")
    with held_back() as goes_on:
        with fake_process_group(0, 2):
            future = fxshard.async_save(tmp_path, model)
        goes_on.set()
        error = future.exception()
    assert isinstance(error, CheckpointError)
    assert "the state before is as it was" in str(error) and "before torch.dist" in str(error)
    assert fxshard.load_checkpoint(tmp_path, model) == "before"


# -- memory ----------------------------------------------------------------------------------------


def measured(rank: int, world_size: int, name: str, path: str) -> list[int]:
    """Bytes that a step beside a save has more than one without: at most, and when it begins."""
    build, x, units = MODELS[name]
    model = fxshard.compile(built(build), units=units)
    optimizer = adamw(model.parameters())

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    tracker = Tracker()
    shards = [s for slot in model._fxshard.slots.values() for s in slot.shards]
    tracker.know(shards, Category.INPUTS)
    tracker.know(model.buffers(), Category.INPUTS)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with tracker:
            tracker.begin(name)
            yield
            tracker.at()

    world = model._fxshard.world
    wait, free = world.wait, world.free

    # gloo's thread drops its own buffers, and its views of ours, some time later.
    def waited(*given: Any, **named: Any) -> None:
        tracker.waiting = True
        wait(*given, **named)
        tracker.waiting = False

    def freed(tensors: list[Tensor]) -> None:
        free(tensors)
        tracker.resized(tensors)

    world.wait, world.free = waited, freed
    plain = background.staged

    def seen(state: Any) -> Any:
        with phase("staged"):
            return plain(state)

    background.staged = seen
    with held_back() as goes_on:
        future = fxshard.async_save(path, model, optimizer)
        with phase("beside"):
            step()
        assert not future.done()
        goes_on.set()
        future.result()
    background.staged = plain
    gc.collect()
    with phase("alone"):
        step()
    *_, beside, alone = tracker.measured()
    more = beside.during.sum(1).max() - alone.during.sum(1).max()
    return [int(more), sum(beside.start) - sum(alone.start)]


@pytest.mark.parametrize("name", ["net", "tied"])
def test_what_is_staged_is_planned_and_measured(ranks: Any, tmp_path: Path, name: str) -> None:
    """Bytes of the copy, which a step beside the save holds more than one without."""
    build, x, units = MODELS[name]
    want = phases_of(built(build), x, 2, units=units, optimizer=adamw)["async_save"]
    staged = want.end_bytes - want.start_bytes
    assert staged > 0
    assert ranks(2).run(measured, name, str(tmp_path))[0] == [staged] * 2


def test_on_a_gpu_the_copy_lies_on_the_host() -> None:
    """Linear(6, 5) over 2 ranks: rank 0 has 72 + 12 bytes; AdamW has 2 of each, and a count."""
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.ones(1, 6)
    there = phases_of(model, x, 2, device="cuda", optimizer=adamw)["async_save"]
    assert there.end_bytes == there.start_bytes
    assert there.host_end_bytes == there.host_peak_bytes == 3 * (72 + 12) + 2 * 4
