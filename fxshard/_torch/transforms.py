"""Tensors around tensors: transforms of torch.func, and subclasses such as DTensor."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as set_aside
from torch.distributed.tensor import DTensor

from fxshard._torch.modes import is_wrapper

__all__ = ["in_memory", "is_transformed", "running", "set_aside", "without_transforms"]

is_transformed = _functorch.is_functorch_wrapped_tensor


def running() -> bool:
    """True inside of a transform of torch.func; `set_aside` is a context in which none runs."""
    return _functorch.peek_interpreter_stack() is not None


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
