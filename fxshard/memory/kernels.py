"""Temporaries inside kernels: memory that no graph and no dispatch mode can see.

Each formula is that of the CPU kernel in torch's sources, named beside it. Rows name their
operator; nothing here is part of any other figure of a report. Operators that are known to take
temporaries of a size that cannot be told from the graph (oneDNN picks an algorithm) have
``bytes=None``. An operator without a row takes none (tests hold that against the profiler).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxshard import meta, ops
from fxshard.program import Program
from fxshard.schedule import Point, points

aten = torch.ops.aten

FLOAT_ACCUMULATOR = 4  # bytes; CPU kernels accumulate fp32, bf16 and fp16 in fp32
WRAPPED_NUMBER = 8  # bytes of the double or int64 tensor that stands for a Python number


@dataclasses.dataclass(frozen=True)
class KernelTemporary:
    """Memory that one operator takes and gives back while it runs.

    Attributes:
        phase, point: where, as in `fxshard.memory.liveness.PhaseBytes`.
        op: name of the operator.
        module: FQN of its module.
        bytes: taken at once; None if it depends on more than the graph.
        why: what it is.
        backend: "cpu", or "gloo" (taken from launch until wait, at most, by gloo's threads).
    """

    phase: str
    point: int
    op: str
    module: str
    bytes: int | None
    why: str
    backend: str = "cpu"


def kernel_temporaries(program: Program, threads: int | None = None) -> list[KernelTemporary]:
    """A row for every operator of the program whose kernel takes temporaries.

    Args:
        program: with a schedule.
        threads: number of intra-op threads that the kernels will use (default: this process's).
    """
    assert program.schedule is not None
    count = threads or torch.get_num_threads()
    found: list[KernelTemporary] = []
    for phase, graph in program.schedule.phases():
        for number, point in enumerate(points(program.schedule, graph)):
            row = _of_launch(phase, number, point) if point.node is None else None
            if point.node is not None:
                row = _of_operator(phase, number, point, point.node, count)
            if row is not None:
                found.append(row)
    return found


def _of_operator(
    phase: str, number: int, point: Point, node: fx.Node, threads: int
) -> KernelTemporary | None:
    op = str(node.target).removesuffix(".default")
    if node.target in UNKNOWN:
        return KernelTemporary(phase, number, op, point.module, None, UNKNOWN[node.target])
    formula = FORMULAS.get(node.target)
    size, why = formula(node, threads) if formula else (0, "")
    return None if size == 0 else KernelTemporary(phase, number, op, point.module, size, why)


def _of_launch(phase: str, number: int, point: Point) -> KernelTemporary | None:
    """Gloo flattens a coalesced collective: its inputs, and for a gather its outputs.

    Source: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, ``allgather_coalesced``,
    ``reduce_scatter_tensor_coalesced`` and ``allreduce_coalesced``.
    """
    row = point.row
    if row.target not in ops.COLLECTIVES:
        return None
    ins = sum(_nbytes(t) for n in meta.operands(row) for t in meta.tensors(n.meta["val"]))
    outs = sum(_nbytes(t) for t in meta.tensors(row.meta["val"]))
    gathers = row.target is ops.all_gather
    size = ins + outs if gathers else ins
    why = "flat inputs and outputs" if gathers else "clones of the inputs"
    op = str(row.target).removeprefix("fxshard.").removesuffix(".default")
    return KernelTemporary(phase, number, op, point.module, size, why, backend="gloo")


Formula = Callable[[fx.Node, int], tuple[int | None, str]]


def _attention_split(q_rows: int, kv_rows: int) -> tuple[int, int]:
    """Block sizes (native/cpu/FlashAttentionKernel.cpp, ``flash_attention_kernel_impl``)."""
    rows = 256 if q_rows >= 768 else 64 if q_rows >= 192 else 32
    return min(rows, q_rows), min(512, kv_rows)


def attention(node: fx.Node, threads: int) -> tuple[int, str]:
    """Scores, running max and sum, and the output block, per thread (``cpu_flash_attention``)."""
    q, k = _val(node.args[0]), _val(node.args[1])
    rows, columns = _attention_split(q.shape[2], k.shape[2])
    floats = threads * (rows * columns + 2 * rows + rows * q.shape[3])
    reduced = threads * rows * columns * q.element_size() if q.element_size() < 4 else 0
    return floats * FLOAT_ACCUMULATOR + reduced, "score blocks per thread"


def attention_backward(node: fx.Node, threads: int) -> tuple[int | None, str]:
    """Scores and their gradients per thread, and row sums (``cpu_flash_attention_backward``).

    The gradient of the output is copied unless it lies as ``[B, S, H, D]``. Below fp32 oneDNN
    multiplies blocks with scratchpads of its own: not known.
    """
    grad, q, k = (_val(argument) for argument in node.args[:3])
    why = "score blocks per thread"
    if q.element_size() < FLOAT_ACCUMULATOR:
        return None, why
    rows, columns = _attention_split(q.shape[2], k.shape[2])
    copy = 0 if grad.transpose(1, 2).is_contiguous() else _nbytes(grad)
    return copy + (threads * 2 * rows * columns + rows) * FLOAT_ACCUMULATOR, why


def layer_norm_backward(node: fx.Node, threads: int) -> tuple[int, str]:
    """Partial weight and bias gradients (native/cpu/layer_norm_kernel.cpp)."""
    normalized = math.prod(node.args[2])  # type: ignore[arg-type]
    return 2 * threads * normalized * FLOAT_ACCUMULATOR, "partial gradients per thread"


def number_operand(node: fx.Node, threads: int) -> tuple[int, str]:
    """A Python number becomes a 0-d double or int64 tensor, then one of the result's dtype."""
    if len(node.args) < 2 or isinstance(node.args[1], fx.Node):
        return 0, ""
    val = _val(node)
    wrapped = torch.float64 if isinstance(node.args[1], float) else torch.int64
    cast = 0 if val.dtype == wrapped else val.element_size()
    return WRAPPED_NUMBER + cast, "the number as a tensor"


def mean(node: fx.Node, threads: int) -> tuple[int, str]:
    """CPU means are a sum and a division by a number (native/ReduceOps.cpp)."""
    return WRAPPED_NUMBER + _val(node).element_size(), "the count as a tensor"


def dropout(node: fx.Node, threads: int) -> tuple[int, str]:
    """``input * mask`` in front of the scaling (native/Dropout.cpp, ``native_dropout_cpu``)."""
    return _nbytes(_val(node.args[0])), "masked input before scaling"


def dropout_backward(node: fx.Node, threads: int) -> tuple[int, str]:
    """``grad * mask`` in front of the scaling, and the scale as a tensor (native/Dropout.cpp)."""
    val = _val(node.args[0])
    return _nbytes(val) + WRAPPED_NUMBER + val.element_size(), "masked gradient before scaling"


FORMULAS: dict[Any, Formula] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.add.Tensor: number_operand,
    aten.sub.Tensor: number_operand,
    aten.mul.Tensor: number_operand,
    aten.div.Tensor: number_operand,
    aten.mul.Scalar: number_operand,
    aten.div.Scalar: number_operand,
    aten.mean.dim: mean,
    aten.native_dropout.default: dropout,
    aten.native_dropout_backward.default: dropout_backward,
}

UNKNOWN: dict[Any, str] = {
    aten.convolution.default: "oneDNN's reordered inputs and scratchpad",
    aten.convolution_backward.default: "oneDNN's reordered inputs and scratchpad",
    aten.native_batch_norm_backward.default: "contiguous copies, if the layouts differ",
    aten._native_batch_norm_legit_functional.default: "statistics per channel",
}


def _val(value: Any) -> Tensor:
    tensor: Tensor = value.meta["val"]
    return tensor


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
