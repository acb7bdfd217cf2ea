"""Runs that are killed at random points and start again, on another number of ranks too.

The ranks of a run are gloo ranks of `tests.ranks`: processes, one of which kills itself with
SIGKILL; the others are killed when it is gone, as a launcher does it. A point is a call of a Python
function, of training or of the thread that saves, or an operation on files, counted from the first
step on. Whatever the point: the run that starts next finds a whole checkpoint, which is the last
one that a save has announced or a later one.
"""

import functools
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fxshard
from tests.fsdp2 import full
from tests.ranks import Ranks
from tests.runtime.test_checkpoint_files import is_file_operation

STEPS = 6
ROWS = 6  # of a step, on all ranks together: 1, 2 and 3 ranks have the same number each
Losses = dict[int, tuple[int, float]]  # by step: on how many ranks, and the loss


def built(shard: Callable[..., Any] | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Linear(7, 1))
    if shard is fully_shard:
        fully_shard(model[0])
        fully_shard(model)
    elif shard:
        model = shard(model, units=["0"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def rows(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a step's batch, and what to find of them."""
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))
    each = ROWS // world_size
    mine = x[rank * each : (rank + 1) * each]
    return mine, mine.square().sum(1, keepdim=True)


def step_of(model: nn.Module, optimizer: Any, step: int, rank: int, world_size: int) -> float:
    """The loss of all ranks, the mean."""
    x, y = rows(step, rank, world_size)
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(whole)
    return float(whole / world_size)


def uninterrupted(rank: int, world_size: int, eager: bool) -> tuple[list[float], list[Tensor]]:
    """Losses and last parameters of FSDP2, or of eager PyTorch, without a stop."""
    model, optimizer = built(None if eager else fully_shard)
    losses = [step_of(model, optimizer, step, rank, world_size) for step in range(STEPS)]
    return losses, [full(param).detach() for param in model.parameters()]


class Killer:
    """Kills this process at a point, of all threads; counts points of a kind."""

    def __init__(self, files: bool, at: int) -> None:
        self.files, self.at, self.count = files, at, 0

    def __enter__(self) -> "Killer":
        threading.setprofile(self.watch)  # of threads that start from now on
        sys.setprofile(self.watch)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def watch(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and is_file_operation(function) if self.files else event == "call":
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


def train(
    rank: int, world_size: int, path: str, saves: str, files: bool, at: int
) -> tuple[int, list[Tensor]]:
    """Go on from the last checkpoint to the end, saving each step; killed at a point on the way.

    Rank 0 writes what it sees: the step that it starts from, losses, and saves that are complete.

    Args:
        saves: "sync" or "async".
        files, at: see `Killer`; 0: it is not killed.

    Returns:
        the number of points, and the last parameters.
    """

    def note(**what: Any) -> None:
        if rank == 0:
            with open(f"{path}/log", "a") as log:
                log.write(json.dumps({"ranks": world_size, **what}) + "\n")

    def saved(step: int) -> None:
        note(saved=step)

    model, optimizer = built(fxshard.compile)
    found = os.path.exists(f"{path}/run/latest")
    first = fxshard.load_checkpoint(f"{path}/run", model, optimizer) if found else 0
    note(first=first)
    future = None
    with Killer(files, at) as killer:
        for step in range(first, STEPS):
            loss = step_of(model, optimizer, step, rank, world_size)
            note(step=step, loss=loss)
            if saves == "sync":
                fxshard.save_checkpoint(f"{path}/run", model, optimizer, extra=step + 1)
                saved(step + 1)
            else:
                future = fxshard.async_save(f"{path}/run", model, optimizer, extra=step + 1)
                future.add_done_callback(lambda done, at=step + 1: done.result() or saved(at))
        if future:
            future.result()
    return killer.count, [full(param).detach() for param in model.parameters()]


class Runs:
    """Runs in a folder, and what is known of runs without a stop, each run once."""

    def __init__(self, ranks: Callable[[int], Ranks], path: Path) -> None:
        self.ranks, self.path = ranks, path
        self.points = functools.cache(self._points)
        self.fsdp2 = functools.cache(lambda size: ranks(size).run(uninterrupted, False)[0])

    def _points(self, saves: str, files: bool) -> int:
        """How many points such a run has."""
        path = self.path / f"{saves}-{files}"
        path.mkdir()
        return self.ranks(2).run(train, str(path), saves, files, 0)[0][0]

    def killed(self, number: int) -> tuple[int, list[int], Losses, list[Tensor]]:
        """A run that is killed twice, and then goes on to the end.

        Returns:
            how many times it was killed; the numbers of ranks; the losses; the last parameters.
        """
        path = self.path / str(number)
        path.mkdir()
        chance = random.Random(number)
        on = [2] * 3 if number % 3 == 0 else [chance.randint(1, 3) for _ in range(3)]
        killed = 0
        for size in on[:2]:
            saves, files = chance.choice(["sync", "async"]), chance.random() < 0.5
            at = chance.randint(1, self.points(saves, files))
            run = chance.randrange(size), str(path), saves, files, at
            answers = self.ranks(size).run_expecting_errors(killed_on, *run)
            killed += any("exit code -9" in each for each in answers if isinstance(each, str))
        saves = chance.choice(["sync", "async"])
        _, last = self.ranks(on[-1]).run(train, str(path), saves, False, 0)[0]
        assert len(os.listdir(path / "run")) == 2, number
        return killed, on, read(path), last


def killed_on(
    rank: int, world_size: int, victim: int, path: str, saves: str, files: bool, at: int
) -> None:
    train(rank, world_size, path, saves, files, at if rank == victim else 0)


def read(path: Path) -> Losses:
    """The losses of a run; nothing that a save had announced was lost."""
    losses: Losses = {}
    announced = 0
    for line in (path / "log").read_text().splitlines():
        told = json.loads(line)
        if "first" in told:
            assert announced <= told["first"] <= len(losses)
            losses = {step: losses[step] for step in range(told["first"])}
        elif "saved" in told:
            announced = max(announced, told["saved"])
        else:
            losses[told["step"]] = told["ranks"], told["loss"]
    return losses


def go_on(ranks: Callable[[int], Ranks], path: Path, trials: range) -> int:
    """How often runs were killed; each trial against FSDP2 and eager PyTorch without a stop."""
    eager, whole = uninterrupted(0, 1, True)
    runs = Runs(ranks, path)
    total = 0
    for number in trials:
        killed, on, losses, last = runs.killed(number)
        total += killed
        found = [losses[step][1] for step in range(STEPS)]
        assert found == pytest.approx(eager, rel=1e-4), number
        torch.testing.assert_close(last, whole, rtol=1e-4, atol=1e-5)
        if len(set(on)) == 1:
            want, end = runs.fsdp2(on[0])
            assert found == want and all(map(torch.equal, last, end)), number
    return total


def test_a_killed_run_goes_on(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    assert go_on(ranks, tmp_path, range(1)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_killed_runs_go_on(ranks: Callable[[int], Ranks], tmp_path: Path, part: int) -> None:
    assert go_on(ranks, tmp_path, range(10 * part, 10 * part + 10)) >= 10
