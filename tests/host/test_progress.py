"""What takes long says so on a terminal, and nowhere else."""

import io
import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import ConfigError
from fxshard.host import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def batch() -> tuple[torch.Tensor]:
    return (torch.ones(2, 4),)


def save(**how: Any) -> None:
    fxshard.save_checkpoint("here", model(), **how)


def load(**how: Any) -> None:
    fxshard.load_checkpoint("here", model(), **how)


def first_call(**how: Any) -> Any:
    return fxshard.compile(model(), world_size=2, **how)(*batch())


# What takes long, and steps that it says.
WORK: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "plan": (
        lambda **how: fxshard.plan(model(), batch(), world_size=2, **how).memory.peak_bytes,
        ("planning", "capturing", "insert-unshard"),
    ),
    "compile": (
        lambda **how: fxshard.compile(model(), world_size=2, args=batch(), **how),
        ("compiling", "capturing", "sharding"),
    ),
    "first call": (first_call, ("capturing Fxshard", "insert-free")),
    "tune": (
        lambda **how: (
            fxshard.tune(
                *(model(), batch()),
                world_size=2,
                hardware="h100",
                plans=1,
                batches=[2],
                space={"checkpoint": [None]},
                **how,
            ).best.setting
        ),
        ("tuning", "tracing"),
    ),
    "validate": (
        lambda **how: fxshard.validate(model(), batch(), world_size=2, steps=1, **how).holds,
        ("validating", "capturing", "tracker"),
    ),
    "save": (save, ("saving here", "writing")),
    "load": (load, ("loading here", "checksums")),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every step is drawn: not as many a second as an eye can read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FXSHARD_PROGRESS", "FXSHARD_DEBUG", "RANK", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    save(progress=False)

    def refreshed(self: Any, *args: Any, **changes: Any) -> None:
        update(self, *args, **changes)
        if self.live.is_started:
            self.refresh()

    from rich.progress import Progress

    update = Progress.update
    monkeypatch.setattr(Progress, "update", refreshed)


def written(to: io.StringIO, work: Callable[..., Any], **how: Any) -> tuple[str, Any]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("sys.stderr", to)
        found = work(**how)
    return to.getvalue(), found


@pytest.mark.parametrize("what", WORK)
def test_a_terminal_shows_lines_and_a_pipe_none(what: str) -> None:
    work, steps = WORK[what]
    said, found = written(Terminal(), work, progress=True)
    for step in steps:
        assert step in said
    assert said.rstrip().endswith("\x1b[2K") or said.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")
    for to, how in ((io.StringIO(), {}), (Terminal(), {"progress": False})):
        silent, same = written(to, work, **how)
        assert silent == ""
        if isinstance(found, torch.Tensor):
            assert torch.equal(found, same)
        elif isinstance(found, (int, str, bool)):
            assert found == same


def test_it_shows_itself_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unasked: on rank 0, unless the environment says otherwise."""

    def work() -> None:
        with progress.task("planning", patience=0.0) as say:
            for thread in threading.enumerate():
                if isinstance(thread, threading.Timer) and thread.interval == 0.0:
                    thread.join(10)
            say("capturing")

    assert "capturing" in written(Terminal(), work)[0]
    for name, value in (
        *(("FXSHARD_PROGRESS", "0"), ("FXSHARD_DEBUG", "0"), ("RANK", "1")),
        ("TERM", "dumb"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert written(Terminal(), work)[0] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # a log all the same
    assert written(io.StringIO(), work)[0] == ""


def test_what_is_quick_is_not_shown() -> None:
    def work() -> None:
        with progress.task("planning", patience=3600.0) as say:
            say("capturing")

    assert written(Terminal(), work)[0] == ""
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert 3600.0 not in [timer.interval for timer in timers]


def test_an_error_ends_it() -> None:
    def work() -> None:
        with pytest.raises(KeyError), progress.task("planning", shown=True):
            raise KeyError

    written(Terminal(), work)
    assert progress._current is None


def test_a_task_inside_of_another_is_a_step() -> None:
    def work() -> None:
        with progress.task("validating", shown=True), progress.task("saving", shown=False) as say:
            say("writing")

    said, _ = written(Terminal(), work)
    assert "saving, writing" in said

    def silent() -> None:
        with progress.task("validating", shown=False), progress.task("saving", shown=True) as say:
            say("writing")

    assert written(Terminal(), silent)[0] == ""


def test_only_flags_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for work, _ in WORK.values():
        with pytest.raises(ConfigError, match="progress='no': expected True or False"):
            work(progress="no")


def test_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSHARD_PROGRESS", "yes")
    with pytest.raises(ConfigError, match="FXSHARD_PROGRESS='yes': expected 0 or 1"):
        fxshard.plan(model(), batch(), world_size=2)
