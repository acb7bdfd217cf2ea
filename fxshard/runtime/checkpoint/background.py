"""Saves that go on in a thread while training does: the copy they are of, and their failures.

One at a time in a process. A failure is written to the log at once, and reaches the user at the
next call that saves or loads, unless the future has told it before. The thread is no daemon: a
process that ends waits for it.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fxshard._torch import process_groups

log: logging.Logger = logging.getLogger("fxshard")

T = TypeVar("T")


class Saving(Future[None]):
    """A save in the background. `told`: the user has asked how it ended."""

    told: bool = False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.told = True
        return found

    def result(self, timeout: float | None = None) -> None:
        super().exception(timeout)
        self.told = True
        super().result()


_last: Saving | None = None


def started(work: Callable[[], None]) -> Saving:
    """`work`, begun in a thread of its own. What it holds is let go before its future is done."""
    global _last
    _last = saving = Saving()
    saving.set_running_or_notify_cancel()  # it cannot be cancelled: other ranks have begun too
    thread = threading.Thread(target=_run, args=([work], saving), name="fxshard.async_save")
    del work
    thread.start()
    return saving


def _run(box: list[Callable[[], None]], saving: Saving) -> None:
    failure: BaseException | None = None
    try:
        box.pop()()
    except BaseException as error:
        failure = error
    if failure is None:
        saving.set_result(None)
        return
    log.error("fxshard: async_save failed: %s", failure)
    _let_go(failure)
    saving.set_exception(failure)


def _let_go(error: BaseException | None) -> None:
    """Drop the tracebacks of an error: their frames hold the copy of the state."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def failure() -> str:
    """Wait for the last save; what it failed with, if nobody has been told yet, or ""."""
    global _last
    last, _last = _last, None
    if last is None:
        return ""
    known = last.told
    error = last.exception()
    return "" if known or error is None else str(error)


def staged(value: T) -> T:
    """A copy that nothing else writes to, with its tensors in the CPU's memory."""
    made: Any
    if isinstance(value, dict):
        made = {key: staged(each) for key, each in value.items()}
    elif type(value) in (list, tuple):
        made = type(value)(staged(each) for each in value)  # type: ignore[call-arg, attr-defined]
    elif isinstance(value, Tensor):
        with torch.no_grad():
            tensor = value.detach()
            made = tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")
    else:
        made = copy.deepcopy(value)
    return made


def group_beside(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group of the same ranks on the CPU, for collectives beside those of training; one for each.

    Made at the first save: collective then.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    parent = group or dist.group.WORLD
    assert parent is not None
    return process_groups.shared_group(dist.get_process_group_ranks(parent), parent, "gloo")
