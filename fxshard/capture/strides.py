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

from fxshard._torch.fake_tensors import (
    FakeTensorMode,
    convolves_with_onednn,
    suggest_memory_format,
)

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
    kept = _dense_format(image) or torch.contiguous_format
    return torch.empty(shape, dtype=image.dtype, device=image.device, memory_format=kept)


# Where torch's own meta functions take plain numbers alone, and make constants of open sizes.
OPEN: dict[Any, Rule] = {
    getattr(aten, name).default: upsampled_backward if name.endswith("_backward") else upsampled
    for name in dir(aten)
    if name.startswith(("upsample_", "_upsample_"))
}


def without_input(args: tuple[Any, ...], result: Any) -> Any:
    """No gradient of an input that needs none; fakes have one whatever the mask says.

    Source: ``batch_norm_backward_cpu`` (ATen/native/Normalization.cpp), likewise on CUDA.
    """
    return result if args[9][0] else (None, *result[1:])


def normalized(args: tuple[Any, ...], result: Any) -> Any:
    """In the memory format of the input, never in another order of its dimensions.

    Source: ``batch_norm_cpu``, ``batch_norm_cpu_out`` (ATen/native/Normalization.cpp).
    """
    input = args[0]
    return (
        _in_format(result[0], _dense_format(input) or suggest_memory_format(input)),
        *result[1:],
    )


def normalized_backward(args: tuple[Any, ...], result: Any) -> Any:
    """The same of the gradient of the input, whose format that of the other gradient may change.

    Source: ``batch_norm_backward_cpu_template`` (ATen/native/Normalization.cpp).
    """
    gradient, input = args[:2]
    if result[0] is None:
        return result
    suggested, kept = suggest_memory_format(input), _dense_format(input)
    is_alike = suggest_memory_format(gradient) is suggested and _dense_format(gradient) is not None
    return (_in_format(result[0], kept if kept and is_alike else suggested), *result[1:])


def _dense_format(tensor: Tensor) -> torch.memory_format | None:
    """Source: ``suggest_memory_format_contig`` (ATen/native/Normalization.cpp); None: not dense."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return last if last is not None and tensor.is_contiguous(memory_format=last) else None


def _in_format(tensor: Tensor, kept: torch.memory_format) -> Tensor:
    made = torch.empty_like(tensor, memory_format=kept)
    return tensor if made.stride() == tensor.stride() else made


def in_format_of_first(args: tuple[Any, ...], result: Any) -> Any:
    """In the memory format of the input, where fakes are contiguous.

    Source: ``reflection_pad3d_out_cpu`` (ATen/native/ReflectionPad.cpp), ``replication_pad3d``
    (ReplicationPadding.cpp), ``channel_shuffle`` (ChanelShuffle.cpp), ``max_unpooling2d_cpu``
    (MaxUnpooling.cpp): ``suggest_memory_format``.
    """
    return _in_format(result, suggest_memory_format(args[0]))


def in_format_of_second(args: tuple[Any, ...], result: Any) -> Any:
    """The same of a gradient, which lies as the input does. Source: the same files."""
    return _in_format(result, suggest_memory_format(args[1]))


def rolled(args: tuple[Any, ...], result: Any) -> Any:
    """In the memory format of the input, unless all of it is rolled as one, or nothing.

    Source: ``roll``, ``roll_common`` (ATen/native/TensorTransformations.cpp): ``cat`` of parts.
    """
    given, shifts, dims = (*args, ())[:3]
    kept = suggest_memory_format(given)
    if kept is torch.contiguous_format or not dims:
        return result
    by = [n % given.shape[dim] for n, dim in zip(shifts, dims, strict=True)]
    return result if any(isinstance(n, int) and n == 0 for n in by) else _in_format(result, kept)


def always_contiguous(args: tuple[Any, ...], result: Any) -> Any:
    """Contiguous, all of them.

    Source: ``log_sigmoid_forward_cpu`` (ATen/native/Activation.cpp), ``glu_backward_cpu``
    (GatedLinearUnit.cpp), ``layer_norm_backward_cpu`` (layer_norm.cpp).
    """
    if isinstance(result, Tensor):
        return _in_format(result, torch.contiguous_format)
    return tuple(_in_format(t, torch.contiguous_format) if t is not None else t for t in result)


def of_input_dtype(args: tuple[Any, ...], result: Any) -> Any:
    """In the dtype of the input, though that of the target be wider.

    Source: ``mse_loss_backward``, ``smooth_l1_loss_backward``, ``soft_margin_loss_backward``
    (ATen/native/Loss.cpp): made like the input.
    """
    if result.dtype is args[1].dtype:
        return result
    return torch.empty_like(result, dtype=args[1].dtype)


def weight_and_bias(args: tuple[Any, ...], result: Any) -> Any:
    """OneDNN computes the gradient of the weight along with that of the bias, asked for or not.

    Source: ``mkldnn_convolution_backward`` (ATen/native/mkldnn/Conv.cpp).
    """
    given, (of_input, of_weight, of_bias) = args[:10], args[10]
    if args[1].device.type != "cpu" or of_weight or not of_bias:
        return result
    if not convolves_with_onednn(*given[1:]):
        return result
    full = aten.convolution_backward.default(*given, [of_input, True, True])
    return (result[0], *full[1:])


def bags(args: tuple[Any, ...], result: Any) -> Any:
    """What bags are kept with lies in storages that were made for one number more.

    Source: ``_embedding_bag_cpu_impl_out``, ``make_offset2bag_out`` and ``make_bag_size_out``
    (ATen/native/EmbeddingBag.cpp): made for all offsets, or with a last one, and resized. Sums of
    plain rows (``is_fast_path``) keep no numbers of bags; of bf16 fakes have them.
    """
    weight, indices, offsets = args[:3]
    if weight.device.type != "cpu":
        return result
    given = (*args, *(False, 0, False, None, False, -1)[len(args) - 3 :])
    mode, of_each, has_last, padding = given[4], given[6], given[7], given[8]
    is_plain = weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    is_plain &= weight.stride(1) == 1 and (of_each is None or of_each.stride(0) == 1)
    if mode == 0 and is_plain and padding < 0:
        numbers = indices.new_empty(0)
    else:
        numbers = indices.new_empty(indices.numel() + 1)[:-1]
    sizes = offsets.new_empty(offsets.numel())
    return (result[0], numbers, sizes[:-1] if has_last else sizes, result[3])


def bags_alone(args: tuple[Any, ...], result: Any) -> Any:
    """The same where no backward follows: sums keep what they do not need in full."""
    output, numbers, sizes, most = bags(args, result)
    is_sum = len(args) < 5 or args[4] == 0
    if args[0].device.type == "cpu" and is_sum:
        sizes, most = (args[2].new_empty(args[2].numel()) for _ in range(2))
    return (output, numbers, sizes, most)


Change = Callable[[tuple[Any, ...], Any], Any]  # arguments of the operator, its result -> the same
RESULTS: dict[Any, tuple[Change, ...]] = {
    aten._native_batch_norm_legit.default: (normalized,),
    aten._native_batch_norm_legit.no_stats: (normalized,),
    aten._native_batch_norm_legit_functional.default: (normalized,),
    aten._native_batch_norm_legit_no_training.default: (normalized,),
    aten.native_batch_norm.default: (normalized,),
    aten.native_batch_norm_backward.default: (without_input, normalized_backward),
    aten.batch_norm_backward.default: (without_input, normalized_backward),
    aten.convolution_backward.default: (weight_and_bias,),
    aten.mse_loss_backward.default: (of_input_dtype,),
    aten.smooth_l1_loss_backward.default: (of_input_dtype,),
    aten.soft_margin_loss_backward.default: (of_input_dtype,),
    aten.log_sigmoid_forward.default: (always_contiguous,),
    aten.glu_backward.default: (always_contiguous,),
    aten.native_layer_norm_backward.default: (always_contiguous,),
    aten.channel_shuffle.default: (in_format_of_first,),
    aten.max_unpool2d.default: (in_format_of_first,),
    aten.reflection_pad3d.default: (in_format_of_first,),
    aten.replication_pad3d.default: (in_format_of_first,),
    aten.reflection_pad2d_backward.default: (in_format_of_second,),
    aten.reflection_pad3d_backward.default: (in_format_of_second,),
    aten.replication_pad2d_backward.default: (in_format_of_second,),
    aten.replication_pad3d_backward.default: (in_format_of_second,),
    aten.roll.default: (rolled,),
    aten._embedding_bag.default: (bags,),
    aten._embedding_bag_forward_only.default: (bags_alone,),
}


OF_THE_CPU: tuple[Change, ...] = (
    *(weight_and_bias, bags, bags_alone),
    *(normalized, normalized_backward),
    *(always_contiguous, in_format_of_first, in_format_of_second, rolled),
)


NARROW = (torch.bfloat16, torch.float16)


def is_narrow(func: Any, args: tuple[Any, ...], result: Tensor) -> bool:
    """True of an elementwise operator on low precision that reads an expanded tensor.

    Its fake comes from a formula that makes fp32 of each operand first, after which an expanded one
    is contiguous: its result lies as that, where the kernel's lies as another operand does. (Where
    dtypes differ, the kernel of the CPU converts them too: ``TensorIteratorBase::compute_types``.)
    """
    if torch.Tag.pointwise not in func.tags and func is not aten.mish_backward.default:
        return False
    if func._schema.is_mutable:
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
