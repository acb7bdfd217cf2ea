"""Progress of long tasks on a terminal.

A task is one line on standard error, erased at its end: what is done, for how long, and its current
step. Nothing is shown if standard error is no terminal (a log, a pipe), on ranks other than 0, for
tasks shorter than `PATIENCE`, with ``FXSHARD_PROGRESS=0``, and with ``FXSHARD_DEBUG``, which prints
more. A task inside of another is a step of it: there is never more than one line.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

PATIENCE = 0.5  # seconds before a task is shown
WIDTH = 60  # characters of a step


class Say(Protocol):
    """Shows the current step of a task; `done` counts towards its total."""

    def __call__(self, step: str, done: int | None = None) -> None: ...


_current: Say | None = None  # of the task that is shown, or silent


@contextlib.contextmanager
def task(
    what: str,
    total: int | None = None,
    *,
    shown: bool | None = None,
    patience: float = PATIENCE,
) -> Iterator[Say]:
    """Show that `what` is going on while the block runs; yields a function that shows its steps.

    Args:
        what: such as "planning".
        total: how many steps it has at most, for a bar; None: not known.
        shown: True: at once, on a terminal or not; False: never, nor the tasks inside; None: after
            `patience`, on a terminal.
        patience: seconds.
    """
    global _current
    outer = _current
    if outer is not None:
        outer(what)

        def inner(step: str, done: int | None = None) -> None:
            outer(f"{what}, {step}")

        yield inner
        return
    bar = _bar(what, total, shown)
    if bar is None:
        _current = _silent
        try:
            yield _silent
        finally:
            _current = None
        return
    number = bar.add_task(what, total=total, step="")

    def say(step: str, done: int | None = None) -> None:
        bar.update(number, completed=done, step=step[:WIDTH])

    timer = threading.Timer(patience, bar.start)
    timer.daemon = True
    _current = say
    try:
        if shown:
            bar.start()
        else:
            timer.start()
        yield say
    finally:
        _current = None
        if timer.ident is not None:
            timer.cancel()
            timer.join()  # it may be starting the display
        bar.stop()


def say(step: str) -> None:
    """Show `step` as the current step of the task that is going on, if there is one."""
    if _current is not None:
        _current(step)


def _silent(step: str, done: int | None = None) -> None:
    pass


def _bar(what: str, total: int | None, shown: bool | None) -> Any:
    """Rich's display, not started yet; None: nothing is to be shown."""
    quiet = os.environ.get("FXSHARD_PROGRESS") == "0" or bool(os.environ.get("FXSHARD_DEBUG"))
    if shown is None:  # FORCE_COLOR makes rich take a log for a terminal
        shown = not quiet and sys.stderr is not None and sys.stderr.isatty()
        forced = None
    else:
        forced = shown
    if not shown or not _on_first_rank():
        return None
    from rich import progress  # imported only if it is shown
    from rich.console import Console

    console = Console(stderr=True, force_terminal=forced)
    if console.is_dumb_terminal and not forced:
        return None
    columns = [progress.SpinnerColumn(), progress.TextColumn("{task.description}", markup=False)]
    if total is not None:
        columns += [progress.BarColumn(), progress.MofNCompleteColumn()]
    columns += [
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[step]}", markup=False),
    ]
    return progress.Progress(*columns, console=console, transient=True, redirect_stdout=False)


def _on_first_rank() -> bool:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"  # under torchrun, before its group is made
