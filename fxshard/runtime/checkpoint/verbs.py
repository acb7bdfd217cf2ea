"""Saving and loading a model and its optimizer (torch.distributed.checkpoint)."""

from __future__ import annotations

import contextlib
import io
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from fxshard.arguments import check_progress
from fxshard.errors import CheckpointError
from fxshard.host.progress import task
from fxshard.runtime.checkpoint import background
from fxshard.runtime.checkpoint.files import New, begin, check_digests, extra_of, latest
from fxshard.runtime.checkpoint.ranks import Ranks, explained
from fxshard.runtime.checkpoint.saved import (
    SavedCheckpoint,
    put,
    require_own,
    state_as_it_is,
    stated,
    to_load_into,
)
from fxshard.runtime.checkpoint.unpickling import RestrictedPlanner, RestrictedReader
from fxshard.runtime.module import FxshardModule


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> None:
    """Write the state of `model` and `optimizer`; call it on all ranks.

    The state that was there before can be loaded until this one is complete, and is then removed.

    Args:
        path: a directory that all ranks see; made if it is not there.
        model, optimizer: of any kind that torch.distributed.checkpoint knows.
        extra: what else `load_checkpoint` shall return (step, random state, ...); rank 0's is kept.
            Tensors and plain values load by default, all that can be pickled with ``trusted``.
        process_group: the ranks that hold the model (default: all).
        progress: show on standard error what is going on; None: on a terminal, of what takes long
            (docs/env.md: ``FXSHARD_PROGRESS``).

    Raises:
        ConfigError: `progress` is neither None nor a flag.
        CheckpointError: a rank cannot write; the previous state is still there.
        RankMismatchError: some ranks do something else with the model.
    """
    check_progress(progress)
    ranks = Ranks(process_group)
    new = _begun(Path(path), model, optimizer, extra, ranks, "save_checkpoint")
    with new.removed_if_it_fails(ranks), task(f"saving {new.root}", shown=progress) as say:
        say("taking the state")
        state = ranks.each(lambda: state_as_it_is(model, optimizer), new.failed)
        new.write(state, ranks, say)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> Future[None]:
    """As `save_checkpoint`, but return when the state is copied; a thread writes it meanwhile.

    What is saved is the state at the call: the steps that follow do not change it. Until the
    future is done, this rank holds a copy of what it has of model and optimizer in the CPU's
    memory (phase ``async_save`` of the memory report); `load_checkpoint`, and a process that is
    killed, find the state before. There is one save at a time: another one waits for it, and so
    does `load_checkpoint`. A process that ends waits too, but
    `torch.distributed.destroy_process_group` does not: ask for the result before.

    Args:
        path, model, optimizer, extra, process_group: as for `save_checkpoint`; call it on all
            ranks.

    Returns:
        A future, as `torch.distributed.checkpoint.async_save` returns one. Its ``result()`` waits
        until the checkpoint is complete on all ranks, or raises `CheckpointError`. If nobody asks
        for it, the next call that saves or loads raises that, on all ranks, and does nothing else.

    Raises:
        CheckpointError: as for `save_checkpoint`, or of the asynchronous save before this one.
        RankMismatchError: some ranks do something else with the model.
    """
    ranks = Ranks(process_group)
    new = _begun(Path(path), model, optimizer, extra, ranks, "async_save")
    with new.removed_if_it_fails(ranks):
        beside = Ranks(background.group_beside(process_group))
        state = ranks.each(lambda: background.staged(state_as_it_is(model, optimizer)), new.failed)

    def write() -> None:
        try:
            with new.removed_if_it_fails(beside):
                new.write(state, beside, lambda step: None)
        except CheckpointError:
            raise
        except Exception as error:  # of a process group that was destroyed, say
            raise CheckpointError(f"{new.failed}. Cause: {error}") from error

    return background.started(write)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    trusted: bool = False,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> Any:
    """Load what `save_checkpoint` wrote last into `model` and `optimizer`; call it on all ranks.

    The number of ranks may be another than at saving. `optimizer` gets state of the parameters
    that it had state of then (those that had had a gradient) and that are not frozen now, and has
    none of the others. As with `torch.optim.Optimizer.load_state_dict`, its groups must be those
    of then, and their options become what they were. Nothing of `model` and `optimizer` is written
    before all files are known to be as they were saved, and to be all asked for.

    Args:
        path: the directory that `save_checkpoint` wrote to.
        model, optimizer: of the kinds that were saved; written in place.
        trusted: whoever could write to `path` may run code here. By default only tensors and plain
            values are unpickled, as `torch.load` does with ``weights_only=True``; classes that
            `torch.serialization.add_safe_globals` names are too.
        process_group: the ranks that hold the model (default: all).
        progress: as for `save_checkpoint`.

    Returns:
        `extra`, on all ranks, with its tensors on the CPU.

    Raises:
        ConfigError: `progress` is neither None nor a flag.
        CheckpointError: there is none; it is not one of this model and optimizer, or has more
            than they have; a file is not as it was saved; or it has objects that only a
            ``trusted`` checkpoint may have.
        RankMismatchError: some ranks do something else with the model.
    """
    check_progress(progress)
    root = Path(path)
    ranks = Ranks(process_group)
    _together(model, ranks, "load_checkpoint")
    name, digests = ranks.first(lambda: latest(root), f"no complete checkpoint in {root}. {_CHECK}")
    version = root / name
    reader = FileSystemReader(version) if trusted else RestrictedReader(version)
    unreadable = f"{version} cannot be loaded"
    failed = f"{version} could not be loaded; was it saved with this model and optimizer?"
    with task(f"loading {version}", shown=progress) as say, contextlib.ExitStack() as stack:
        say("checksums")
        ranks.all(lambda: check_digests(version, digests, ranks), unreadable)
        extra = ranks.each(lambda: extra_of(version, trusted=trusted), unreadable)
        saved = ranks.each(
            lambda: SavedCheckpoint.read(reader, version, model, optimizer, trusted=trusted), failed
        )
        stack.enter_context(explained(failed))
        if optimizer is not None:
            stack.enter_context(stated(optimizer, saved))
        state = ranks.each(lambda: to_load_into(model, optimizer, saved), failed)
        say("reading")
        planner = None if trusted else RestrictedPlanner()
        load(state, storage_reader=reader, planner=planner, process_group=process_group)
        ranks.all(lambda: put(state, model, optimizer, saved), failed)
    return extra


def _together(model: nn.Module, ranks: Ranks, what: str, *, filled: bool = False) -> None:
    """All ranks are about to do `what`, and no save is going on.

    Args:
        model: of which; its parameters are those that were sharded, as they were.
        ranks: who does it.
        what: for messages.
        filled: nothing of the model may be without values.

    Raises:
        CheckpointError: that save has failed, and a rank has not been told.
        StepError: a parameter is on a mesh that does not have all ranks, or was exchanged for one
            of another shape.
        RankMismatchError: another rank refuses it.
    """
    if isinstance(model, FxshardModule):
        runtime = model._fxshard

        def check() -> None:
            runtime.require_one_of_each(what)
            if filled:
                runtime.require_filled()
            runtime.restore_sharded(runtime.slots.values())

        runtime.together(what, check=check)
    waited = f"{what} waited for the asynchronous save before it"
    if told := next(filter(None, ranks.all(background.failure, waited)), ""):
        raise CheckpointError(f"{told}. It was an asynchronous save; {what} has done nothing")


_CHECK = "Check that the path is right, and a directory that all ranks see and may write to"


def _begun(
    root: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    ranks: Ranks,
    what: str,
) -> New:
    """All ranks can save, and rank 0 has written `extra`."""
    _together(model, ranks, what, filled=True)
    packed = io.BytesIO()
    ranks.all(lambda: require_own(model, optimizer), "nothing was saved")
    ranks.first(lambda: torch.save(extra, packed), "nothing was saved: extra cannot be pickled")
    number = ranks.first(
        lambda: begin(root, packed.getvalue()),
        f"a checkpoint cannot be written to {root}. {_CHECK}",
    )
    return New(root, number)
