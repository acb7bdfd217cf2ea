"""Collectives of fake tensors outside of any trace: what they return is what eager code gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed.tensor import (
    _collective_utils,
    _decompositions,
    _dispatch,
    _redistribute,
    _sharding_prop,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard._torch.fully_sharded import replaced

AsyncCollectiveTensor = _functional_collectives.AsyncCollectiveTensor
_FUNCTIONAL = torch.ops._c10d_functional
WAIT = _FUNCTIONAL.wait_tensor.default
GATHER = _FUNCTIONAL.all_gather_into_tensor.default
# Of these the group, or its name, is the last argument. The first two send what they are given, the
# others a copy (torch/csrc/distributed/c10d/Functional.cpp).
SENDING = (GATHER, _FUNCTIONAL.all_to_all_single.default)
LAUNCHES = (
    *SENDING,
    *(_FUNCTIONAL.all_reduce.default, _FUNCTIONAL.reduce_scatter_tensor.default),
    _FUNCTIONAL.broadcast.default,
)
# torch 2.13 wraps by an operator, whose fake kernel makes a copy.
WRAP: Any = getattr(getattr(_FUNCTIONAL, "_wrap_tensor_autograd", None), "default", None)
_ASKING = (
    *(_functional_collectives, _collective_utils, _decompositions, _dispatch),
    *(_redistribute, _sharding_prop),
)


@contextlib.contextmanager
def called_eagerly(ours: FakeTensorMode) -> Iterator[None]:
    """Functional collectives and DTensors take code under `ours` for eager code, not for a trace.

    In a trace a functional collective waits at once; eagerly it gives an `AsyncCollectiveTensor`,
    whose first use waits. (torch/distributed/_functional_collectives.py, ``_are_we_tracing``)
    """

    def traced() -> bool:
        fakes = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        other = fakes is not None and fakes is not ours
        return torch.compiler.is_compiling() or other or get_proxy_mode() is not None

    name = "_are_we_tracing"
    with replaced([(each, name, traced) for each in _ASKING if hasattr(each, name)]):
        yield


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Let `WAIT` of `tensor` wait for `work`, which writes it."""
    made: Any = torch._C._distributed_c10d
    made._register_work(tensor, work)


def finished(tensors: list[torch.Tensor]) -> Any:
    """A work that is done, in the form that operators return it in: its future has `tensors`.

    That of a fake process group has nothing, which DDP and its hooks fail on.
    """
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    made: Any = torch._C._distributed_c10d
    work: dist.Work = made._create_work_from_future(future)
    return work.boxed()
