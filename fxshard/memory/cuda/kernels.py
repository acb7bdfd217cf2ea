"""Temporaries inside CUDA kernels: what no graph can see and ``max_memory_allocated`` counts.

Each formula is that of the kernel in torch's sources, named beside it, for the GPU that
`fxshard.capture.cuda.operators.TARGET` is. None has been held against a GPU yet. As on the CPU,
rows name their operator, ``bytes=None`` is a temporary of a size that the graph does not tell, and
nothing here is part of any other figure of a report. Workspaces that stay (cuBLAS) are no
temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxshard.capture.cuda.operators import HALF, TARGET
from fxshard.ir.program import Program
from fxshard.memory.cuda.settings import up
from fxshard.memory.kernels import (
    NOTHING,
    KernelTemporary,
    Size,
    copied,
    nbytes_of,
    temporaries,
    val_of,
)

aten: Any = torch.ops.aten
FLOAT = 4  # bytes of what kernels accumulate in
INDEX = 8  # bytes of an int64 index


def kernel_temporaries_cuda(program: Program) -> list[KernelTemporary]:
    """A row for every operator of the program whose CUDA kernel is known to take temporaries.

    Args:
        program: with a schedule, captured for CUDA.
    """

    def of_operator(node: fx.Node) -> Size:
        return FORMULAS[node.target](node) if node.target in FORMULAS else NOTHING

    return list(temporaries(program, of_operator, "cuda"))


def flash_attention(node: fx.Node) -> Size:
    """Partial results, where heads and rows alone would leave multiprocessors idle.

    Source: native/transformers/cuda/flash_attn/flash_api.cpp, ``num_splits_heuristic``, which
    takes one part from 0.8 blocks per half multiprocessor on, and ``set_params_splitkv``.
    """
    query = val_of(node.args[0])
    batch, heads, rows, _ = query.shape
    dropout = node.args[3] if len(node.args) > 3 else 0.0
    if dropout or batch * heads * -(-rows // 64) >= 0.8 * 2 * TARGET.multiprocessors:
        return NOTHING
    return None, "partial results of split keys, in fp32"


def flash_attention_backward(node: fx.Node) -> Size:
    """FlashAttention-2: gradients of the queries in fp32, row sums, gradients per query head.

    ``dq_accum`` f32 [B, S up to 128, H, D up to 32 or 64] (times the splits of the deterministic
    mode), ``softmax_d`` f32 [B, H, S up to 128]; with fewer heads of keys ``dk_expanded`` and
    ``dv_expanded`` [B, S_k, H, D]; copies of the output and its gradient, contiguous as
    [B, S, H, D].
    Source: native/transformers/cuda/flash_attn/flash_api.cpp, ``mha_bwd``; attention_backward.cu.
    """
    grad, query, key, _, out = (val_of(argument) for argument in node.args[:5])
    batch, heads, rows, dim = query.shape
    padded_rows, padded_dim = up(rows, 128), up(dim, 32 if dim <= 128 else 64)
    splits = 1
    if _deterministic():
        splits = -(-TARGET.multiprocessors // (batch * heads))
    size = FLOAT * batch * heads * padded_rows * (splits * padded_dim + 1)
    if key.shape[1] != heads:
        size += 2 * batch * key.shape[2] * heads * dim * query.element_size()
    size += sum(_copy_of_rows(tensor) for tensor in (grad, out))
    return size, "gradients of queries in fp32, row sums, gradients per query head"


def efficient_attention_backward(node: fx.Node) -> Size:
    """Row sums and the tiles in which gradients of queries (and keys, values) are accumulated.

    In fp32 the row sums come from a product as large as the output, which is gone before the tiles
    are taken. Source: native/transformers/cuda/attention_backward.cu,
    ``_efficient_attention_backward``; mem_eff_attention/kernel_backward.h, ``workspace_size``; tile
    sizes of sm80 and newer in mem_eff_attention/kernels/cutlassB.h.
    """
    grad, query, key, value = (val_of(argument) for argument in node.args[:4])
    batch, heads, rows, dim = query.shape
    keys, value_dim = key.shape[2], value.shape[3]
    half = query.dtype in HALF
    widest = max(dim, value_dim)
    block, key_block = (64, 64) if widest <= 64 else (128, 128 if half and widest <= 128 else 64)
    tiles = -(-rows // block) * -(-dim // key_block)
    elements = tiles * (block * key_block + 4)  # each after a lock, a counter and padding
    if half and widest > 128:  # gradients of keys and values do not fit into registers
        splits = -(-keys // key_block)
        if batch * heads >= 256 and keys <= 2 * key_block:
            splits = 1
        splits = 1 if _deterministic() else max(min(splits, 200 // (batch * heads)), 1)
        elements += splits * key_block * (up(dim, block) + up(value_dim, block))
    workspace = batch * heads * up(elements, 4) * FLOAT
    sums = FLOAT * batch * heads * rows
    product = 0 if half else sums * value_dim + sums
    return _copy_of_rows(grad) + sums + max(workspace, product), "row sums, tiles of gradients"


def softmax_backward(node: fx.Node) -> Size:
    """The gradient times the output, before it is summed; that of log_softmax takes none.

    Source: native/cuda/SoftMax.cu, ``softmax_backward_cuda_out``.
    """
    grad, output = val_of(node.args[0]), val_of(node.args[1])
    dtype = torch.promote_types(grad.dtype, output.dtype)
    return grad.numel() * dtype.itemsize, "the gradient times the output"


def embedding_backward(node: fx.Node) -> Size:
    """Sorted indices, and partial sums in fp32 of the rows of equal ones; nothing up to 3,072.

    n indices into V rows make at most s = min(n, V) segments and n / 10 + s partial ones. Without
    the scratch of the sort, which is over before the partial sums are taken.
    Source: native/cuda/Embedding.cu, ``embedding_dense_backward_cuda``;
    native/cuda/EmbeddingBackwardKernel.cu, ``embedding_backward_cuda_kernel``.
    """
    grad, indices = val_of(node.args[0]), val_of(node.args[1])
    rows, by_frequency = node.args[2], bool(node.args[4])
    count, dim = indices.numel(), grad.shape[-1]
    copy = copied(node.args[0])
    if count <= 3072 and not by_frequency:
        return copy, "contiguous gradient"
    assert isinstance(rows, int)
    segments = min(count, rows)
    partial = count // 10 + segments
    width = indices.element_size()
    arrays = width * ((3 + by_frequency) * count + 2 * segments + partial) + 2 * INDEX
    return copy + arrays + FLOAT * partial * dim, "sorted indices, partial sums in fp32"


def accumulating_index_put(node: fx.Node) -> Size:
    """Linear, sorted and original indices, and the range that is sorted with them.

    Without the scratch of the sort (cub). Source: native/cuda/Indexing.cu,
    ``index_put_with_sort_kernel``; only where values are added (the backward of ``x[i]``).
    """
    if len(node.args) < 4 or not node.args[3]:
        return NOTHING
    chosen = [val_of(index) for index in node.args[1] if index is not None]  # type: ignore[union-attr]
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in chosen)))
    copy = copied(node.args[2])
    return 4 * INDEX * count + copy, "sorted indices"


def unknown(why: str) -> Callable[[fx.Node], Size]:
    """The formula of an operator whose temporary the graph does not tell."""
    return lambda node: (None, why)


CUDNN_ATTENTION = (
    "cuDNN's workspace (native/cudnn/MHA.cpp): measure it, or pin flash attention with "
    "torch.nn.attention.sdpa_kernel"
)
CUDNN_CONVOLUTION = "cuDNN's workspace, by the algorithm that it picks (native/cudnn/Conv_v8.cpp)"
CUB = "cub's scratch (ATen/cuda/cub.cuh)"

FORMULAS: dict[Any, Callable[[fx.Node], Size]] = {
    aten._scaled_dot_product_flash_attention.default: flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention.default: unknown(CUDNN_ATTENTION),
    aten._scaled_dot_product_cudnn_attention_backward.default: unknown(CUDNN_ATTENTION),
    aten.convolution.default: unknown(CUDNN_CONVOLUTION),
    aten.convolution_backward.default: unknown(CUDNN_CONVOLUTION),
    aten._softmax_backward_data.default: softmax_backward,
    aten._softmax_backward_data.out: softmax_backward,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.index_put.default: accumulating_index_put,
    aten.index_put_.default: accumulating_index_put,
    aten._unsafe_index_put.default: accumulating_index_put,
    aten.sort.default: unknown(CUB),
    aten.sort.stable: unknown(CUB),
    aten.topk.default: unknown(CUB),
    aten.cumsum.default: unknown(CUB),
    aten.nonzero.default: unknown(CUB),
}


def _deterministic() -> bool:
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return not torch.is_deterministic_algorithms_warn_only_enabled()


def _copy_of_rows(tensor: Tensor) -> int:
    """Bytes of the copy that makes ``[B, S, H, D]`` of ``[B, H, S, D]`` contiguous, if needed."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else nbytes_of(tensor)
