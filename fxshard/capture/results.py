"""Results that fake kernels give in other numbers, dtypes or memory formats than kernels do.

Each function takes the arguments of an operator and torch's fake result, and returns that of the
kernel; `fxshard.capture.strides` applies them while the trace is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxshard._torch.fake_tensors import convolves_with_onednn, suggest_memory_format

aten: Any = torch.ops.aten


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
        _in_format(result[0], dense_format(input) or suggest_memory_format(input)),
        *result[1:],
    )


def normalized_backward(args: tuple[Any, ...], result: Any) -> Any:
    """The same of the gradient of the input, whose format that of the other gradient may change.

    Source: ``batch_norm_backward_cpu_template`` (ATen/native/Normalization.cpp).
    """
    gradient, input = args[:2]
    if result[0] is None:
        return result
    suggested, kept = suggest_memory_format(input), dense_format(input)
    is_alike = suggest_memory_format(gradient) is suggested and dense_format(gradient) is not None
    return (_in_format(result[0], kept if kept and is_alike else suggested), *result[1:])


def dense_format(tensor: Tensor) -> torch.memory_format | None:
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
