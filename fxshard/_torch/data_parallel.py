"""DistributedDataParallel: what it reduces, and what its reducer, which is C++, does on fakes."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel, distributed

from fxshard._torch.fully_sharded import replaced

# What makes buckets, or tells ranks of sizes by integers that it writes into tensors' memory.
_OF_REDUCER = ("__init__", "_rebuild_buckets", "_set_static_graph")


def reduced() -> set[int]:
    """Ids of the parameters whose gradients some DistributedDataParallel of this process reduces.

    It leaves no trace on them, so that all objects are looked at: 0.1 s.
    """
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return {id(param) for each in found for param in each._module_parameters}


def reduced_by(module: nn.Module) -> str:
    """Which of torch's own reduces gradients of `module` itself; empty if none does.

    (torch/distributed/_composable/replicate.py: ``replicate`` leaves its name in a registry)
    """
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel):
        if isinstance(module, wrapper):
            return wrapper.__name__
    return "replicate" if "replicate" in (_get_registry(module) or {}) else ""


@contextlib.contextmanager
def reducers_watched(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """While the block runs, `around` is entered where reducers allocate of their own accord.

    Tensors that they make of nothing have to be given to them there: buckets, and integers, whose
    values they read. (torch/csrc/distributed/c10d/reducer.cpp)
    """

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with around():
                return function(*args, **kwargs)

        return run

    owner: Any = vars(dist)["Reducer"]
    changes = [(owner, name, inside(getattr(owner, name))) for name in _OF_REDUCER]
    verify = "_verify_param_shape_across_processes"
    changes.append((distributed, verify, inside(getattr(distributed, verify))))
    with replaced(changes):
        yield
