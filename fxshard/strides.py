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


class KernelFakeMode(FakeTensorMode):
    """Fake tensors with the strides that kernels give."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
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
