"""Tensors around tensors: transforms of torch.func, and subclasses such as DTensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from fxshard._torch.modes import is_wrapper


def without_transforms(tensor: Tensor) -> Tensor:
    """The tensor that lies in memory, below all transforms that run; most are that already."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def in_memory(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors whose storages a tensor has: itself, or those below transforms and subclasses."""
    tensor = without_transforms(tensor)
    if not is_wrapper(type(tensor)):
        yield tensor
        return
    # Not by ``__tensor_flatten__``: torchao's reads a value there.
    inside = (tensor._local_tensor,) if isinstance(tensor, DTensor) else vars(tensor).values()
    for inner in inside:
        if isinstance(inner, Tensor):
            yield from in_memory(inner)


def is_transformed(tensor: Tensor) -> bool:
    """True for a tensor of a transform, such as a batch of ``vmap``.

    ``torch.autograd.grad(is_grads_batched=True)`` passes batches of an older kind.
    """
    return bool(
        _functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)
    )


def transforming() -> bool:
    """True inside of a transform of ``torch.func`` (grad, jvp, vmap, ...), in this thread."""
    return _functorch.peek_interpreter_stack() is not None


def forward_mode() -> bool:
    """True inside of ``torch.autograd.forward_ad.dual_level()``."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: Tensor) -> bool:
    """True for a dual of forward-mode AD."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def outside() -> contextlib.AbstractContextManager[Any]:
    """The block runs outside of all transforms of ``torch.func``.

    (torch/_functorch/pyfunctorch.py)
    """
    guard: contextlib.AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return guard
