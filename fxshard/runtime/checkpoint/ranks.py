"""The ranks that save or load go on together, or fail together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fxshard._torch import process_groups
from fxshard.errors import CheckpointError

T = TypeVar("T")


_DESTROYED = (
    "the process group was destroyed meanwhile: ask the future of async_save for its result before "
    "torch.distributed.destroy_process_group()"
)


@contextlib.contextmanager
def explained(complaint: str) -> Iterator[None]:
    """Turn torch's errors into CheckpointError.

    torch raises a CheckpointException, which is no `Exception`, on all ranks if one of them fails,
    and a RuntimeError if a rank is gone.
    """
    try:
        yield
    except (CheckpointException, RuntimeError) as error:
        raise CheckpointError(f"{complaint}. Cause: {error}") from error


def cause_of(error: BaseException) -> BaseException:
    """The OSError that torch's zip writer replaced by an error of its own, if there is one."""
    first = error
    while not isinstance(first, OSError) and first.__context__ is not None:
        first = first.__context__
    return first if isinstance(first, OSError) else error


class Ranks:
    """The ranks of a process group, which go on together or fail together."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.alone: bool = not (dist.is_available() and dist.is_initialized())
        self.rank: int = 0 if self.alone else dist.get_rank(group)
        self.size: int = 1 if self.alone else dist.get_world_size(group)

    def all(self, action: Callable[[], T], complaint: str) -> list[T]:
        """What `action` returns, by rank.

        Raises:
            CheckpointError: `complaint` and the causes, on all ranks if it fails on one.
        """
        answer: tuple[Any, str] = (None, "")
        cause = None
        try:
            answer = action(), ""
        except Exception as error:
            cause = cause_of(error)
            answer = None, f"{type(cause).__name__}: {cause}"
        answers: list[Any] = [answer]
        if not self.alone:
            answers = [None] * self.size
            with explained(complaint):
                dist.all_gather_object(answers, answer, self.group)
            if None in answers:  # this rank is in the group no more
                raise CheckpointError(f"{complaint}. Cause: {_DESTROYED}")
        failed = [f"rank {rank}: {cause}" for rank, (_, cause) in enumerate(answers) if cause]
        if failed:
            raise CheckpointError(f"{complaint}. Cause: {'; '.join(failed)}") from cause
        return [found for found, _ in answers]

    def require_group(self) -> None:
        """Raise ValueError if the group was destroyed since."""
        if not self.alone and not process_groups.is_alive(self.group or dist.group.WORLD):
            raise ValueError(_DESTROYED)

    def each(self, action: Callable[[], T], complaint: str) -> T:
        """What `action` returns on this rank, which stays here; all raise if it fails on one."""
        found: list[T] = []
        self.all(lambda: found.append(action()), complaint)
        return found[0]

    def first(self, action: Callable[[], T], complaint: str) -> T:
        """What `action` returns on rank 0, on all ranks; all raise if it fails there."""
        found: list[Any] = self.all(action if self.rank == 0 else lambda: None, complaint)
        first: T = found[0]
        return first
