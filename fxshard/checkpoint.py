"""Checkpoints of model and optimizer that no crash can tear, on torch.distributed.checkpoint.

A checkpoint is a directory with complete states in ``version-N`` and a file ``latest`` that names
one of them. A new state is written into ``writing-N``, renamed when all ranks are done, and then
``latest`` is replaced, which the file system does at once or not at all. The old state is removed
behind that. So at any moment ``latest`` names a complete state: the old one or the new one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from fxshard.errors import CheckpointError

T = TypeVar("T")


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the state of `model` and `optimizer`; call it on all ranks.

    The state that was there before can be loaded until this one is complete, and is then removed.

    Args:
        path: a directory that all ranks see; made if it is not there.
        model, optimizer: of any kind that torch.distributed.checkpoint knows.
        extra: what else `load_checkpoint` shall return (step, random state, ...); rank 0's is kept.
        process_group: the ranks that hold the model (default: all).

    Raises:
        CheckpointError: a rank cannot write; the previous state is still there.
    """
    root = Path(path)

    def begin() -> str:
        root.mkdir(parents=True, exist_ok=True)
        numbers = [int(found[2]) for entry in root.iterdir() if (found := _version(entry))]
        name = str(1 + max(numbers, default=0))
        (root / f"writing-{name}").mkdir()
        torch.save(extra, root / f"writing-{name}" / "extra.pt")
        return name

    def publish() -> None:
        _sync(writing / "extra.pt")
        _sync(writing)
        writing.rename(root / f"version-{name}")
        _sync(root)
        pointer = writing.with_suffix(".latest")
        pointer.write_text(f"version-{name}")
        _sync(pointer)
        pointer.replace(root / "latest")
        _sync(root)
        for entry in root.iterdir():
            if (found := _version(entry)) and int(found[2]) < int(name):
                _remove(entry)

    name = _on_rank_0(begin, process_group, f"a checkpoint cannot be written to {root}")
    writing = root / f"writing-{name}"
    with _explained(f"{writing} could not be written, and the state before is as it was"):
        save(_state(model, optimizer), checkpoint_id=writing, process_group=process_group)
    _on_rank_0(publish, process_group, f"the checkpoint in {writing} cannot be published")


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Load what `save_checkpoint` wrote last into `model` and `optimizer`; call it on all ranks.

    The number of ranks may be another than at saving. `extra` is unpickled, as is the metadata of
    torch.distributed.checkpoint: load only what you trust.

    Returns:
        `extra`, on all ranks, with its tensors on the CPU.

    Raises:
        CheckpointError: there is none, or it is not one of this model and optimizer.
    """
    root = Path(path)

    def latest() -> str:
        return (root / "latest").read_text()

    version = root / _on_rank_0(latest, process_group, f"no complete checkpoint in {root}")
    state = _state(model, optimizer)
    with _explained(f"{version} could not be loaded; was it saved with this model and optimizer?"):
        load(state, checkpoint_id=version, process_group=process_group)
    if optimizer is None:
        set_model_state_dict(model, state["model"])
    else:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    return torch.load(version / "extra.pt", map_location="cpu", weights_only=False)


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _version(entry: Path) -> re.Match[str] | None:
    """Of a complete or half-written state: group 2 is its number."""
    return re.fullmatch(r"(version|writing)-(\d+)(\.latest)?", entry.name)


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _sync(path: Path) -> None:
    """Have the file system write a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _explained(complaint: str) -> Iterator[None]:
    """Torch's error, raised on all ranks if one fails, names the ranks but is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise CheckpointError(f"{complaint}. Cause: {error}") from error


def _on_rank_0(
    action: Callable[[], T], process_group: dist.ProcessGroup | None, complaint: str
) -> T:
    """What `action` returns on rank 0, on all ranks; all raise if it fails there.

    Raises:
        CheckpointError: `complaint` and the cause.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    answer: list[Any] = [None, None]
    cause = None
    if alone or dist.get_rank(process_group) == 0:
        try:
            answer[0] = action()
        except Exception as error:
            cause = error
            answer[1] = f"{type(error).__name__}: {error}"
    if not alone:
        dist.broadcast_object_list(answer, group=process_group, group_src=0)
    if answer[1] is not None:
        raise CheckpointError(
            f"{complaint}. Check that the path is right, and a directory that all ranks see and "
            f"may write to. Cause: {answer[1]}"
        ) from cause
    return answer[0]
