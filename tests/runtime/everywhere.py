"""Checks that hold of all ranks in one process, and of gloo ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

EVERYWHERE = pytest.mark.parametrize("where", ["in_process", "2 ranks"])


def run(ranks: Any, where: str, check: Callable[..., None], *args: Any) -> None:
    """`check(rank, world_size, *args)` without a process group, or on 2 gloo ranks."""
    if where == "in_process":
        assert not dist.is_initialized()
        check(0, 2, *args)
    else:
        ranks(2).run(check, *args)
