"""Fake values, where torch's fake kernels say another dtype or storage than its CPU kernels give.

Who counts bytes reads them off fake values. Each rule names the kernel that it follows; a test
holds every rule against the kernel itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.capture.cuda import operators as cuda_operators
from fxshard.ir import tags
from fxshard.ir.program import Program

aten: Any = torch.ops.aten

Rule = Callable[[tuple[Any, ...], Any], Any]  # values of the arguments, fake result -> the result


def correct(program: Program) -> None:
    """Set the fake values of all nodes right that torch's fake kernels get wrong on the CPU."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target not in RULES:
            continue
        stale = tags.storage_ids(node)
        val = node.meta["val"]
        node.meta["val"] = of_kernel(program, node, val)
        if node.meta["val"] is val:
            continue
        for user in node.users:
            if user.target is operator.getitem:
                stale |= tags.storage_ids(user)
                user.meta["val"] = program.refake(user)
                program.refresh_views(user, stale)
        program.refresh_views(node, stale)


def of_kernel(program: Program, node: fx.Node, val: Any) -> Any:
    """`val`, the fake value of `node`, as the kernel of its operator makes it."""
    if node.target not in RULES:
        return val
    values = tuple(a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args)
    return as_made(node.target, values, val, program.fake_mode)


def as_made(op: Any, values: tuple[Any, ...], result: Any, mode: FakeTensorMode) -> Any:
    """`result`, a fake one of `mode` that `op` gave for `values`, as its kernel makes it."""
    rule = RULES.get(op)
    if rule is None or cuda_operators.decides(mode, op):
        return result
    if rule in OF_THE_CPU and values[0].device.type != "cpu":
        return result  # the others hold on every device
    with mode:
        return rule(values, result)


def statistics(values: tuple[Any, ...], result: Any) -> Any:
    """Mean and deviation have the dtype of the parameters, of the input if there are none.

    Source: ``batch_norm_cpu`` (ATen/native/Normalization.cpp), ``native_group_norm``
    (ATen/native/group_norm.cpp), ``layer_norm_cpu`` (ATen/native/layer_norm.cpp):
    ``param_scalar_type``. Fakes come from torch/_decomp, which takes the input's or fp32.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    dtype = tensors[1].dtype if len(tensors) > 1 else tensors[0].dtype
    if result[1].dtype is dtype:
        return result
    return (result[0], *(_as_dtype(t, dtype) for t in result[1:3]), *result[3:])


def running_statistics(values: tuple[Any, ...], result: Any) -> Any:
    """Also the new running mean and variance have the dtype of those before: they are clones."""
    result = statistics(values, result)
    old = values[3:5]
    if all(new.dtype is t.dtype for new, t in zip(result[3:], old, strict=True)):
        return result
    return (*result[:3], *(_as_dtype(t, t.dtype) for t in old))


def input_gradient(values: tuple[Any, ...], result: Any) -> Any:
    """The gradient of the input has its dtype, whatever that of the weight.

    Source: ``native_group_norm_backward`` (ATen/native/group_norm.cpp).
    """
    if result[0] is None or result[0].dtype is values[1].dtype:
        return result
    return (_as_dtype(result[0], values[1].dtype), *result[1:])


def norms(values: tuple[Any, ...], result: Any) -> Any:
    """Norms of low precision are kept in fp32; fakes know it of bf16 alone.

    Source: ``weight_norm_cpu`` (ATen/native/WeightNorm.cpp).
    """
    if result[1].dtype is not torch.float16:
        return result
    return (result[0], _as_dtype(result[1], torch.float32))


def whole_storage(values: tuple[Any, ...], result: Any) -> Any:
    """A changed copy of a view is one of all of its storage; fakes hold what the view spans.

    Of an expanded view it is contiguous, of which fakes know since torch 2.13 only
    (torch/_meta_registrations.py, ``_scatter_meta_output``).

    Source: ``clone_preserve_strides`` (ATen/native/TensorFactories.cpp), which ``copy`` and the
    scatters of views call (Copy.cpp, TensorShape.cpp).
    """
    base = values[0]
    if any(step == 0 and count > 1 for count, step in zip(base.shape, base.stride(), strict=True)):
        return result if 0 not in result.stride() else torch.empty_like(base)
    size = base.untyped_storage().nbytes()
    if result.stride() != base.stride() or result.untyped_storage().nbytes() == size:
        return result
    flat = torch.empty(size // base.element_size(), dtype=base.dtype, device=base.device)
    return flat.as_strided(base.shape, base.stride(), base.storage_offset())


def unreduced(values: tuple[Any, ...], result: Any) -> Any:
    """A loss of one element lies in the storage of the losses that it sums up.

    Source: ``mse_loss``, ``smooth_l1_loss`` (ATen/native/BinaryOps.cpp, PointwiseOps.cpp),
    ``binary_cross_entropy``, ``soft_margin_loss`` (Loss.cpp): made in full, and resized.
    """
    if result.dim():
        return result
    count = math.prod(torch.broadcast_shapes(values[0].shape, values[1].shape))
    if isinstance(count, int):  # open sizes are at least two
        count = max(count, 1)
    flat = torch.empty(count, dtype=result.dtype, device=result.device)
    return flat.as_strided((), ())


def grown(values: tuple[Any, ...], result: Any) -> Any:
    """Of columns, and of images that become columns: it began with the size of the input.

    Source: ``col2im_cpu`` (ATen/native/Col2Im.cpp), ``im2col_cpu`` (Im2Col.cpp):
    ``empty_like(input)``, then resized.
    """
    count = max(values[0].numel(), result.numel())
    flat = torch.empty(count, dtype=result.dtype, device=result.device)
    return flat.as_strided(result.shape, result.stride())


def window(values: tuple[Any, ...], result: Any) -> Any:
    """Of a window function: a periodic one is made with an element more, which is cut off.

    Source: ``hann_window`` and the others (ATen/native/TensorFactories.cpp): ``narrow``.
    """
    if not is_periodic(values) or result.numel() < 2:
        return result
    made = torch.empty(result.numel() + 1, dtype=result.dtype, device=result.device)
    return made[:-1]


def is_periodic(values: Sequence[Any]) -> bool:
    """By the arguments of a window function."""
    return values[1] is not False if len(values) > 1 else True


def waited(values: tuple[Any, ...], result: Any) -> Any:
    """What was waited for is the very tensor; its fake kernel makes another one.

    Source: ``wait_tensor`` (torch/csrc/distributed/c10d/Functional.cpp).
    """
    return values[0].detach()


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)


OF_THE_CPU: tuple[Rule, ...] = (statistics, running_statistics, input_gradient, norms)
RULES: dict[Any, Rule] = {
    aten._native_batch_norm_legit_functional.default: running_statistics,
    aten._native_batch_norm_legit.no_stats: statistics,
    aten.native_batch_norm.default: statistics,
    aten._native_batch_norm_legit_no_training.default: statistics,
    aten.native_group_norm.default: statistics,
    aten.native_layer_norm.default: statistics,
    aten.native_group_norm_backward.default: input_gradient,
    aten._weight_norm_interface.default: norms,
    aten.copy.default: whole_storage,
    aten.slice_scatter.default: whole_storage,
    aten.select_scatter.default: whole_storage,
    aten.diagonal_scatter.default: whole_storage,
    aten.as_strided_scatter.default: whole_storage,
    aten.col2im.default: grown,
    aten.im2col.default: grown,
    aten.mse_loss.default: unreduced,
    aten.smooth_l1_loss.default: unreduced,
    aten.soft_margin_loss.default: unreduced,
    aten.binary_cross_entropy.default: unreduced,
    torch.ops._c10d_functional.wait_tensor.default: waited,
    **dict.fromkeys(
        (
            *(aten.hann_window.default, aten.hann_window.periodic),
            *(aten.bartlett_window.default, aten.bartlett_window.periodic),
            *(aten.blackman_window.default, aten.blackman_window.periodic),
            *(aten.hamming_window.default, aten.hamming_window.periodic),
            *(aten.hamming_window.periodic_alpha, aten.hamming_window.periodic_alpha_beta),
            *(aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta),
        ),
        window,
    ),
}
