"""Tensors inside of torch.func's transforms: ``vmap``, ``grad`` and their kin."""

from __future__ import annotations

from torch import Tensor
from torch._C import _functorch


def without_transforms(tensor: Tensor) -> Tensor:
    """The tensor that lies in memory, below all transforms that run; most are that already."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
