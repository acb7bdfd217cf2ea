"""Temporaries inside kernels: memory that no graph and no dispatch mode can see.

Each formula is that of the CPU kernel in torch's sources, named beside it. Rows name their
operator; nothing here is part of any other figure of a report. Operators that are known to take
temporaries of a size that cannot be told from the graph (oneDNN picks an algorithm) have
``bytes=None``. An operator without a row takes none (tests hold that against the profiler).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxshard._torch.operators import schema_of
from fxshard.ir import ops, tags
from fxshard.ir.program import Program
from fxshard.ir.schedule import points

aten: Any = torch.ops.aten

FLOAT_ACCUMULATOR = 4  # bytes; CPU kernels accumulate fp32, bf16 and fp16 in fp32
WRAPPED_NUMBER = 8  # bytes of the double or int64 tensor that stands for a Python number


@dataclasses.dataclass(frozen=True)
class KernelTemporary:
    """Memory that one operator takes and gives back while it runs.

    Attributes:
        phase, point: where, as in `fxshard.memory.ledger.PhaseBytes`.
        op: name of the operator.
        module: FQN of its module.
        bytes: taken at once; None if it depends on more than the graph.
        why: what it is.
        backend: "cpu" or "cuda", or "gloo" (taken from launch until wait, at most, by gloo's
            threads).
    """

    phase: str
    point: int
    op: str
    module: str
    bytes: int | None
    why: str
    backend: str = "cpu"


Size = tuple[int | None, str]  # bytes, and what they are
NOTHING: Size = (0, "")


def kernel_temporaries(program: Program, threads: int | None = None) -> list[KernelTemporary]:
    """A row for every operator of the program whose kernel takes temporaries.

    Args:
        program: with a schedule.
        threads: number of intra-op threads that the kernels will use (default: this process's).
    """
    count = threads or torch.get_num_threads()

    def of_operator(node: fx.Node) -> Size:
        if node.target in UNKNOWN:
            return None, UNKNOWN[node.target]
        return FORMULAS[node.target](node, count) if node.target in FORMULAS else NOTHING

    return list(temporaries(program, of_operator, "cpu", _of_launch))


def temporaries(
    program: Program,
    of_operator: Callable[[fx.Node], Size],
    backend: str,
    of_launch: Callable[[fx.Node], Size] = lambda row: NOTHING,
) -> Iterator[KernelTemporary]:
    """The rows of what operators, and launches of collectives by gloo, are said to take."""
    assert program.schedule is not None
    for phase, graph in program.schedule.phases():
        for number, point in enumerate(points(program.schedule, graph)):
            runs, found, taker = point.row, of_launch, "gloo"
            if point.node is not None:
                runs, found, taker = point.node, of_operator, backend
            size, why = found(runs)
            if size != 0:
                op = str(runs.target).removeprefix("fxshard.").removesuffix(".default")
                yield KernelTemporary(phase, number, op, point.module, size, why, taker)


def _of_launch(row: fx.Node) -> Size:
    """Gloo receives a gather in one flat tensor, and flattens what it reduces.

    Source: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, ``allgather`` (which
    ``_allgather_base`` calls), ``reduce_scatter_tensor_coalesced`` and ``allreduce_coalesced``.
    """
    copied = ops.of(row).gloo
    if copied == "nothing":
        return NOTHING
    if copied == "results":
        return sum(map(nbytes_of, tags.tensors(row.meta["val"]))), "flat outputs"
    ins = (t for n in tags.operands(row) for t in tags.tensors(n.meta["val"]))
    return sum(map(nbytes_of, ins)), "clones of the inputs"


def _attention_split(q_rows: int, kv_rows: int) -> tuple[int, int]:
    """Block sizes (native/cpu/FlashAttentionKernel.cpp, ``flash_attention_kernel_impl``)."""
    rows = 256 if q_rows >= 768 else 64 if q_rows >= 192 else 32
    return min(rows, q_rows), min(512, kv_rows)


def attention(node: fx.Node, threads: int) -> Size:
    """Scores, running max and sum, and the output block, per thread (``cpu_flash_attention``)."""
    q, k = val_of(node.args[0]), val_of(node.args[1])
    rows, columns = _attention_split(q.shape[2], k.shape[2])
    floats = threads * (rows * columns + 2 * rows + rows * q.shape[3])
    reduced = threads * rows * columns * q.element_size() if q.element_size() < 4 else 0
    return floats * FLOAT_ACCUMULATOR + reduced, "score blocks per thread"


def attention_backward(node: fx.Node, threads: int) -> Size:
    """Scores and their gradients per thread, and row sums (``cpu_flash_attention_backward``).

    The gradient of the output is copied unless it lies as ``[B, S, H, D]``. Below fp32 oneDNN
    multiplies blocks with scratchpads of its own: not known.
    """
    grad, q, k = (val_of(argument) for argument in node.args[:3])
    why = "score blocks per thread"
    if q.element_size() < FLOAT_ACCUMULATOR:
        return None, why
    rows, columns = _attention_split(q.shape[2], k.shape[2])
    copy = 0 if grad.transpose(1, 2).is_contiguous() else nbytes_of(grad)
    return copy + (threads * 2 * rows * columns + rows) * FLOAT_ACCUMULATOR, why


def contiguous(why: str, *places: int) -> Callable[[fx.Node, int], Size]:
    """Contiguous copies of the arguments at some places."""
    return lambda node, threads: (sum(copied(node.args[place]) for place in places), why)


def like(why: str, *places: int) -> Callable[[fx.Node, int], Size]:
    """The arguments at some places in the dtype of the result, where theirs is another."""

    def size(node: fx.Node, threads: int) -> Size:
        dtype = val_of(node).dtype
        vals = [val_of(node.args[place]) for place in places]
        return sum(v.numel() * dtype.itemsize for v in vals if v.dtype is not dtype), why

    return size


def layer_norm_backward(node: fx.Node, threads: int) -> Size:
    """Partial weight and bias gradients in the input's dtype, contiguous copies of what is not.

    Source: native/layer_norm.cpp, ``layer_norm_backward_cpu``, and
    native/cpu/layer_norm_kernel.cpp, ``LayerNormBackwardKernelImplInternal``.
    """
    normalized = math.prod(node.args[2])  # type: ignore[arg-type]
    partial = 2 * threads * normalized * val_of(node.args[1]).element_size()
    mask: Any = node.args[7]
    if not any(mask[1:]):
        partial = 0
    copies = copied(node.args[0]) + copied(node.args[1])
    return partial + copies, "partial gradients per thread"


def group_norm(node: fx.Node, threads: int) -> Size:
    """Sums per channel, if channels come last (native/cpu/group_norm_kernel.cpp)."""
    return 0 if val_of(node.args[0]).is_contiguous() else None, "sums per channel"


def group_norm_backward(node: fx.Node, threads: int) -> Size:
    """Two sums per channel (native/cpu/group_norm_kernel.cpp, ``ds`` and ``db``)."""
    val = val_of(node.args[1])
    size = 2 * val.shape[0] * val.shape[1] * FLOAT_ACCUMULATOR
    return size if val.is_contiguous() else None, "sums per channel"


def batch_norm(node: fx.Node, threads: int) -> Size:
    """Scale and offset per channel (native/cpu/batch_norm_kernel.cpp, ``alpha`` and ``beta``).

    That is of the path for contiguous inputs.
    """
    val = val_of(node.args[0])
    known = val.is_contiguous() and val.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return 2 * val.shape[1] * FLOAT_ACCUMULATOR if known else None, "scale and offset per channel"


def batch_norm_backward(node: fx.Node, threads: int) -> Size:
    """A tensor like the input, if all is contiguous (native/Normalization.cpp).

    Source: ``batch_norm_backward_cpu_template``. Its other path copies what it reduces.
    """
    vals = [val_of(argument) for argument in node.args[:2]]
    known = all(val.is_contiguous() for val in vals)
    mask: Any = node.args[9]
    return nbytes_of(vals[1]) * bool(mask[0]) if known else None, "a tensor like the input"


def safe_softmax(node: fx.Node, threads: int) -> Size:
    """Which values are -inf, in which rows all are, and a zero (native/transformers/attention.cpp).

    They come after the softmax itself, which copies an input that is not contiguous.
    """
    val = val_of(node.args[0])
    rows = val.numel() // val.shape[node.args[1]]  # type: ignore[index]
    masks = val.numel() + rows + val_of(node).element_size()
    return max(copied(node.args[0]), masks), "masked rows"


def gelu_backward(node: fx.Node, threads: int) -> Size:
    """oneDNN's, which reorders inputs of different layouts (native/Activation.cpp)."""
    one, two = (val_of(argument) for argument in node.args[:2])
    return 0 if one.stride() == two.stride() else None, "oneDNN's reordered inputs"


def sort(node: fx.Node, threads: int) -> Size:
    """The positions 0, 1, ... of one row (native/Sorting.cpp, ``sort_stable``)."""
    (dim,) = _arguments(node, "dim")
    shape = val_of(node.args[0]).shape
    return shape[dim] * torch.int64.itemsize if shape else 0, "positions of one row"


def repeat(node: fx.Node, threads: int) -> Size:
    """Numbers of dimensions, four of them per dimension (native/TensorShape.cpp, ``repeat``)."""
    (repeats,) = _arguments(node, "repeats")
    return 4 * len(repeats) * torch.int64.itemsize, "numbers of dimensions"


def histogram(node: fx.Node, threads: int) -> Size:
    """Edges of the bins and a histogram per thread (native/cpu/HistogramKernel.cpp)."""
    (bins,) = _arguments(node, "bins")
    size = (bins + 1 + threads * bins) * val_of(node).element_size()
    return size + copied(node.args[0]), "edges, histograms per thread"


def elementwise(node: fx.Node, threads: int) -> Size:
    """Numbers as 0-d tensors, and operands in the dtype in which all of them are computed.

    A Python number becomes a double or int64 tensor. Source: native/BinaryOps.cpp,
    ``wrapped_scalar_tensor``, and TensorIterator.cpp, ``compute_types``.
    """
    operands: list[Any] = [val_of(a) if isinstance(a, fx.Node) else a for a in node.args[:2]]
    common = torch.result_type(*operands)
    if node.target in TRUE_DIVISIONS and not (common.is_floating_point or common.is_complex):
        common = torch.get_default_dtype()
    size = 0
    for operand in operands:
        is_tensor = isinstance(operand, Tensor)
        dtype = operand.dtype if is_tensor else WRAPPED[type(operand)]
        count = operand.numel() if is_tensor else 1
        size += 0 if is_tensor else dtype.itemsize
        size += 0 if dtype is common else count * common.itemsize
    return size, "numbers as tensors, operands in another dtype"


def mean(node: fx.Node, threads: int) -> Size:
    """CPU means are a sum and a division by a number (native/ReduceOps.cpp, ``mean``).

    Below fp32 both are done in fp32, on a copy of the input.
    """
    val, result = val_of(node.args[0]), val_of(node)
    low = result.element_size() < FLOAT_ACCUMULATOR
    size = FLOAT_ACCUMULATOR if low else result.element_size()
    cast = val.numel() * size if low or val.dtype is not result.dtype else 0
    return (result.numel() * size if low else 0) + max(cast, WRAPPED_NUMBER + size), "sum and count"


def scatter(node: fx.Node, threads: int) -> Size:
    """Below fp32 the result in fp32 (native/cpu/ScatterGatherKernel.cpp, ``create_acc_buffer``)."""
    val = val_of(node)
    low = val.is_floating_point() and val.element_size() < FLOAT_ACCUMULATOR
    return val.numel() * FLOAT_ACCUMULATOR if low else 0, "result in fp32"


def matmul(node: fx.Node, threads: int) -> Size:
    """Below fp32 oneDNN multiplies all but the smallest matrices (native/mkldnn/Matmul.cpp).

    Its scratchpads depend on the processor. The smallest are those of ``checksize``.
    """
    one, two = [val_of(n) for n in node.args if isinstance(n, fx.Node) and val_of(n).dim() > 1][-2:]
    low = one.element_size() < FLOAT_ACCUMULATOR
    return None if low and one.numel() * two.shape[-1] > 16**3 else 0, "oneDNN's scratchpad"


def dropout(node: fx.Node, threads: int) -> Size:
    """``input * mask`` before the scaling (native/Dropout.cpp, ``native_dropout_cpu``)."""
    return nbytes_of(val_of(node.args[0])), "masked input before scaling"


def dropout_backward(node: fx.Node, threads: int) -> Size:
    """``grad * mask`` before the scaling, and the scale as a tensor (native/Dropout.cpp)."""
    val = val_of(node.args[0])
    return nbytes_of(val) + WRAPPED_NUMBER + val.element_size(), "masked gradient before scaling"


WRAPPED: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
TRUE_DIVISIONS = (aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar)
ELEMENTWISE = (
    *(overload for op in (aten.add, aten.sub, aten.mul) for overload in (op.Tensor, op.Scalar)),
    *(overload for op in (aten.add_, aten.sub_, aten.mul_) for overload in (op.Tensor, op.Scalar)),
    *TRUE_DIVISIONS,
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.remainder.Scalar,
    aten.rsub.Scalar,
    aten.bitwise_and.Scalar,
    aten.bitwise_or.Scalar,
    aten.minimum.default,
    aten.maximum.default,
    *(
        overload
        for op in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
        for overload in (op.Tensor, op.Scalar)
    ),
)

# native/SoftMax.cpp, ``softmax_cpu_out`` and ``softmax_backward_cpu_out``
SOFTMAX = contiguous("contiguous input", 0)
SOFTMAX_BACKWARD = contiguous("contiguous gradient and output", 0, 1)

FORMULAS: dict[Any, Callable[[fx.Node, int], Size]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
    aten._safe_softmax.default: safe_softmax,
    aten._softmax.default: SOFTMAX,
    aten._log_softmax.default: SOFTMAX,
    aten._softmax_backward_data.default: SOFTMAX_BACKWARD,
    aten._log_softmax_backward_data.default: SOFTMAX_BACKWARD,
    aten._softmax_backward_data.out: SOFTMAX_BACKWARD,
    aten._log_softmax_backward_data.out: SOFTMAX_BACKWARD,
    # native/layer_norm.cpp, ``layer_norm_cpu``
    aten.native_layer_norm.default: contiguous("contiguous input", 0),
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten._native_batch_norm_legit_no_training.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.gelu_backward.default: gelu_backward,
    aten.gelu_backward.grad_input: gelu_backward,
    # native/Embedding.cpp, and its ``embedding_dense_backward_cpu``
    aten.embedding.default: contiguous("contiguous indices", 1),
    aten.embedding_dense_backward.default: contiguous("contiguous gradient and indices", 0, 1),
    # native/TensorAdvancedIndexing.cpp, ``index_select_out_cpu_``
    aten.index_select.default: contiguous("contiguous index", 2),
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten.histc.default: histogram,
    aten.repeat.default: repeat,
    # native/ReduceOps.cpp, ``cumsum`` and ``sum``
    aten.cumsum.default: like("input in another dtype", 0),
    aten.sum.default: like("input in another dtype", 0),
    aten.sum.dim_IntList: like("input in another dtype", 0),
    aten.mean.default: mean,
    aten.mean.dim: mean,
    # native/TensorCompare.cpp, ``where``
    aten.where.self: like("operands in another dtype", 1, 2),
    aten.gather.default: scatter,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter_add.default: scatter,
    aten.mm.default: matmul,
    aten.addmm.default: matmul,
    aten.bmm.default: matmul,
    aten.baddbmm.default: matmul,
    aten._grouped_mm.default: matmul,
    aten.native_dropout.default: dropout,
    aten.native_dropout_backward.default: dropout_backward,
    **dict.fromkeys(ELEMENTWISE, elementwise),
}

UNKNOWN: dict[Any, str] = {
    aten.logsumexp.default: "made of several operators",
    aten.binary_cross_entropy_with_logits.default: "made of several operators",
    aten._fused_rms_norm.default: "made of several operators",
    aten.mse_loss.default: "made of several operators",
    aten.upsample_nearest2d.default: "channels last",
    aten.upsample_bilinear2d.default: "channels last",
    aten.convolution.default: "oneDNN's reordered inputs and scratchpad",
    aten.convolution_backward.default: "oneDNN's reordered inputs and scratchpad",
}


def val_of(value: Any) -> Tensor:
    tensor: Tensor = value.meta["val"]
    return tensor


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def copied(value: Any) -> int:
    """Bytes of a contiguous copy; 0 if there is no need for one."""
    return 0 if val_of(value).is_contiguous() else nbytes_of(val_of(value))


def _arguments(node: fx.Node, *names: str) -> list[Any]:
    """What `node` passes to these arguments of its operator, or their defaults."""
    schema: Any = schema_of(node.target)
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    defaults = {a.name: a.default_value for a in schema.arguments}
    return [given.get(name, defaults[name]) for name in names]
