"""Fake results that must be right while the trace is made, where torch's fake kernels are not.

Strides: autograd writes views of results into the graph, and a view that the fake tensor allows may
not exist of the real one. Which results there are, and their sizes: the trace notes expressions of
open sizes for them. What does not change the graph, `fxshard.capture.fakes` sets right after the
trace. A test holds every rule against the kernel itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard._torch.operators import schema_of
from fxshard.capture.results import OF_THE_CPU, RESULTS, dense_format

aten: Any = torch.ops.aten

Rule = Callable[[tuple[Any, ...]], Tensor]  # arguments of the operator -> laid out as its result


def of_state(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a tensor of the model in a step: of a contiguous parameter, those of its shape.

    A dimension of one element may have any stride (``torch.empty(1, 3).t()``), and a parameter that
    is gathered has the usual ones.
    """
    if isinstance(tensor, torch.nn.Parameter) and tensor.is_contiguous():
        return torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride()


def as_iterated(args: tuple[Any, ...]) -> Tensor:
    """Results of elementwise kernels follow the first argument where arguments disagree.

    Fakes come from torch/_decomp, whose formulas begin with another argument.
    Source: ``TensorIteratorBase::reorder_dimensions`` (ATen/TensorIterator.cpp).
    """
    first, second = (arg for arg in args if isinstance(arg, Tensor))
    return torch.add(first, second)


def as_floats(args: tuple[Any, ...]) -> Tensor:
    """The same of operators that make floats of integers, which the CPU does before it iterates.

    Source: ``TensorIteratorBase::compute_types`` (ATen/TensorIterator.cpp).
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if all(tensor.is_floating_point() for tensor in tensors):
        return as_iterated(args)
    return torch.add(*(tensor.to(torch.float32) for tensor in tensors))


def input_first(args: tuple[Any, ...]) -> Tensor:
    """The same, of the input before the gradient.

    Source: the meta function of ``threshold_backward`` (ATen/native/Activation.cpp).
    """
    return torch.add(args[1], args[0])


def as_divided(args: tuple[Any, ...]) -> Tensor:
    """The same; fakes are contiguous where a divisor has no dimensions."""
    return torch.mul(args[0], args[1])


def as_exponent(args: tuple[Any, ...]) -> Tensor:
    """Contiguous. Source: the meta function of ``pow.Scalar`` (ATen/native/Pow.cpp)."""
    return torch.empty(args[1].shape)


def as_gradient(args: tuple[Any, ...]) -> Tensor:
    """``empty_like`` of it. Source: ``log_sigmoid_backward_cpu`` (ATen/native/Activation.cpp)."""
    return torch.empty_like(args[0])


def as_noise(args: tuple[Any, ...]) -> Tensor:
    """The noise is multiplied by the gradient; without any, as ``leaky_relu_backward``.

    Source: ``rrelu_with_noise_backward`` (ATen/native/Activation.cpp).
    """
    gradient, input, noise, lower, upper, training = args[:6]
    if training and upper - lower > 1e-6:
        return torch.mul(noise, gradient)
    return torch.mul(input, gradient)


def as_input(args: tuple[Any, ...]) -> Tensor:
    """``empty_like`` of the input, not of the gradient.

    Source: ``binary_cross_entropy_backward_cpu`` (ATen/native/Loss.cpp).
    """
    return torch.empty_like(args[1])


def contiguous(args: tuple[Any, ...]) -> Tensor:
    """Contiguous, whatever the arguments are.

    Source: ``mse_loss_backward``, ``smooth_l1_loss_backward``, ``huber_loss_backward``
    (ATen/native/Loss.cpp): ``zeros_like`` with LEGACY_CONTIGUOUS_MEMORY_FORMAT; ``normal_impl``
    (DistributionTemplates.h), the meta function of ``_log_softmax_backward_data`` (SoftMax.cpp).
    """
    shapes = [arg.shape for arg in args if isinstance(arg, Tensor)]
    return torch.empty(torch.broadcast_shapes(*shapes))


def grouped(args: tuple[Any, ...]) -> Tensor:
    """Rows padded to 16 bytes; of any dtype, where torch's meta function takes bf16 alone.

    Of two matrices one product per group, of a matrix and several its rows by group.
    Source: ``create_grouped_gemm_output_tensor`` (ATen/native/GroupedMMUtils.h).
    """
    first, second, offsets, _, dtype = (*args, None, None, None)[:5]
    if first.shape[-1] != second.shape[-2]:
        raise RuntimeError(f"grouped_mm: {first.shape} and {second.shape} do not match")
    rows, columns, dtype = first.shape[-2], second.shape[-1], dtype or first.dtype
    aligned = 16 // dtype.itemsize
    padded = (columns + aligned - 1) // aligned * aligned
    groups: tuple[Any, ...] = ()
    if first.dim() == second.dim():
        groups = first.shape[:1] if offsets is None else offsets.shape
    strides = (rows * padded, padded, 1) if groups else (padded, 1)
    shape = (*groups, rows, columns)
    return torch.empty_strided(shape, strides, dtype=dtype, device=first.device)


RULES: dict[Any, Rule] = {
    aten.copysign.Tensor: as_floats,
    aten.div.Tensor_mode: as_divided,
    aten.elu_backward.default: as_iterated,
    aten.floor_divide.default: as_divided,
    aten.hardsigmoid_backward.default: as_iterated,
    aten.hardswish_backward.default: as_iterated,
    aten.hardtanh_backward.default: as_iterated,
    aten.heaviside.default: as_iterated,
    aten.log_sigmoid_backward.default: as_gradient,
    aten.logaddexp.default: as_floats,
    aten.logaddexp2.default: as_floats,
    aten.logical_and.default: as_iterated,
    aten.logical_or.default: as_iterated,
    aten.logical_xor.default: as_iterated,
    aten.logit_backward.default: as_iterated,
    aten.native_dropout_backward.default: as_iterated,
    aten.pow.Scalar: as_exponent,
    aten.rrelu_with_noise_backward.default: as_noise,
    aten.softplus_backward.default: as_iterated,
    aten.special_xlog1py.default: as_floats,
    aten.threshold_backward.default: input_first,
    aten.xlogy.Tensor: as_floats,
    aten.binary_cross_entropy_backward.default: as_input,
    aten._log_softmax_backward_data.default: contiguous,
    aten.huber_loss_backward.default: contiguous,
    aten.mse_loss_backward.default: contiguous,
    aten.normal.Tensor_Tensor: contiguous,
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
    kept = dense_format(image) or torch.contiguous_format
    return torch.empty(shape, dtype=image.dtype, device=image.device, memory_format=kept)


# Where torch's own meta functions take plain numbers alone, and make constants of open sizes.
OPEN: dict[Any, Rule] = {
    getattr(aten, name).default: upsampled_backward if name.endswith("_backward") else upsampled
    for name in dir(aten)
    if name.startswith(("upsample_", "_upsample_"))
}


NARROW = (torch.bfloat16, torch.float16)


def is_narrow(func: Any, args: tuple[Any, ...], result: Tensor) -> bool:
    """True of an elementwise operator on low precision that reads an expanded tensor.

    Its fake comes from a formula that makes fp32 of each operand first, after which an expanded one
    is contiguous: its result lies as that, where the kernel's lies as another operand does. (Where
    dtypes differ, the kernel of the CPU converts them too: ``TensorIteratorBase::compute_types``.)
    """
    # torch has not tagged mish_backward, which is one.
    if torch.Tag.pointwise not in func.tags and func is not aten.mish_backward.default:
        return False
    if schema_of(func).is_mutable:
        return False
    tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.dim()]
    dtypes = {tensor.dtype for tensor in tensors} - {torch.bool}
    if len(tensors) < 2 or len(dtypes) != 1 or not dtypes.issubset(NARROW):
        return False
    return any(_expands(tensor, result.shape) for tensor in tensors)


def _expands(tensor: Tensor, shape: Sequence[Any]) -> bool:
    """True if it has the same again along a dimension of `shape`; open sizes are never one."""
    if tensor.dim() < len(shape) or any(isinstance(s, int) and s == 0 for s in tensor.stride()):
        return True
    both = zip(tensor.shape, shape, strict=True)
    return any(
        isinstance(n, int) and n == 1 and not (isinstance(m, int) and m == 1) for n, m in both
    )


class KernelFakeMode(FakeTensorMode):
    """Fake tensors with the strides that kernels give, and as many results."""

    on_cpu = True  # what is on the CPU stays there

    def __deepcopy__(self, memo: Any) -> KernelFakeMode:
        """Itself: copies of its tensors, as in ``copy.deepcopy(module)``, are its own, too."""
        return self

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in OPEN and any(isinstance(n, torch.SymInt) for n in (*args[0].shape, *args[1])):
            with self:
                return OPEN[func](args)
        if func is aten._grouped_mm.default:
            with self:
                return grouped(args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for change in RESULTS.get(func, ()):
            if self.on_cpu or change not in OF_THE_CPU:
                with self:
                    result = change(args, result)
        if func not in RULES or not isinstance(result, Tensor):
            if isinstance(result, Tensor) and is_narrow(func, args, result):
                return self._laid_out(result, self._as_wide(func, args, kwargs or {}).stride())
            return result
        with self:
            strides = RULES[func](args).stride()
        return self._laid_out(result, strides)

    def _laid_out(self, result: Tensor, strides: tuple[int, ...]) -> Tensor:
        if result.stride() == strides:
            return result
        with self:
            return torch.empty_strided(
                result.shape, strides, dtype=result.dtype, device=result.device
            )

    def _as_wide(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """The same operator on fp32 in place of bf16 and fp16."""

        def wide(tensor: Tensor) -> Tensor:
            if tensor.dtype not in NARROW:
                return tensor
            return torch.empty_strided(tensor.shape, tensor.stride(), device=tensor.device)

        with self:
            found: Tensor = func(*(wide(a) if isinstance(a, Tensor) else a for a in args), **kwargs)
            return found
