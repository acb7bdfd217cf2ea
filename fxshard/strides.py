"""Strides of fake results, where torch's fake kernels lay them out otherwise than its kernels.

Unlike what `fxshard.fakes` sets right behind the trace, these must be right while it is made:
autograd writes views of them into the graph, and a view that the fake tensor allows may not exist
of the real one. A test holds every rule against the kernel itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxshard.compat import FakeTensorMode

aten = torch.ops.aten

Rule = Callable[[tuple[Any, ...]], Tensor]  # arguments of the operator -> laid out as its result


def as_iterated(args: tuple[Any, ...]) -> Tensor:
    """Results of elementwise kernels follow the first argument where arguments disagree.

    Fakes come from torch/_decomp, whose formulas begin with another argument.
    Source: ``TensorIteratorBase::reorder_dimensions`` (ATen/TensorIterator.cpp).
    """
    first, second = (arg for arg in args if isinstance(arg, Tensor))
    return torch.add(first, second)


def as_input(args: tuple[Any, ...]) -> Tensor:
    """``empty_like`` of the input, not of the gradient.

    Source: ``binary_cross_entropy_backward_cpu`` (ATen/native/Loss.cpp).
    """
    return torch.empty_like(args[1])


def contiguous(args: tuple[Any, ...]) -> Tensor:
    """Contiguous, whatever the arguments are.

    Source: ``mse_loss_backward``, ``smooth_l1_loss_backward``, ``huber_loss_backward``
    (ATen/native/Loss.cpp): ``zeros_like`` with LEGACY_CONTIGUOUS_MEMORY_FORMAT.
    """
    return torch.empty(torch.broadcast_shapes(args[0].shape, args[1].shape, args[2].shape))


RULES: dict[Any, Rule] = {
    aten.copysign.Tensor: as_iterated,
    aten.elu_backward.default: as_iterated,
    aten.hardsigmoid_backward.default: as_iterated,
    aten.hardswish_backward.default: as_iterated,
    aten.hardtanh_backward.default: as_iterated,
    aten.logit_backward.default: as_iterated,
    aten.native_dropout_backward.default: as_iterated,
    aten.softplus_backward.default: as_iterated,
    aten.special_xlog1py.default: as_iterated,
    aten.xlogy.Tensor: as_iterated,
    aten.binary_cross_entropy_backward.default: as_input,
    aten.huber_loss_backward.default: contiguous,
    aten.mse_loss_backward.default: contiguous,
    aten.smooth_l1_loss_backward.default: contiguous,
}


def upsampled(args: tuple[Any, ...]) -> Tensor:
    """Of an image and the size that it gets: ``[N, C, *size]``, in the image's memory format."""
    image, size = args[:2]
    return _in_format_of(image, (*image.shape[:2], *size))


def upsampled_backward(args: tuple[Any, ...]) -> Tensor:
    """Of a gradient, its size and the shape of the image: that shape, in the gradient's format."""
    return _in_format_of(args[0], args[2])


def _in_format_of(image: Tensor, shape: Sequence[Any]) -> Tensor:
    """Source: the meta functions in ATen/native/UpSample*.cpp, ``suggest_memory_format``."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.dim())
    is_last = (
        last is not None and not image.is_contiguous() and image.is_contiguous(memory_format=last)
    )
    kept = last if is_last and last is not None else torch.contiguous_format
    return torch.empty(shape, dtype=image.dtype, device=image.device, memory_format=kept)


# Where torch's own meta functions take plain numbers alone, and make constants of open sizes.
OPEN: dict[Any, Rule] = {
    getattr(aten, name).default: upsampled_backward if name.endswith("_backward") else upsampled
    for name in dir(aten)
    if name.startswith(("upsample_", "_upsample_"))
}


class KernelFakeMode(FakeTensorMode):
    """Fake tensors with the strides that kernels give."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in OPEN and any(isinstance(n, torch.SymInt) for n in (*args[0].shape, *args[1])):
            with self:
                return OPEN[func](args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func not in RULES or not isinstance(result, Tensor):
            return result
        with self:
            strides = RULES[func](args).stride()
            if result.stride() == strides:
                return result
            return torch.empty_strided(
                result.shape, strides, dtype=result.dtype, device=result.device
            )
