"""Temporaries inside CUDA's kernels have the bytes that are counted by hand from their sources."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxshard.ir.program import Program
from fxshard.memory.cuda import kernels as kernels_cuda
from tests.capture.cuda_cases import CUDNN, FLOAT, HALF, B, D, H, S, attend, nodes, program

pytestmark = pytest.mark.usefixtures("same_seed")
aten = torch.ops.aten


def temporaries(traced: Program, op: Any) -> list[int | None]:
    name = str(op).removesuffix(".default")
    rows = kernels_cuda.kernel_temporaries_cuda(traced)
    assert {row.backend for row in rows} <= {"cuda"}
    return [row.bytes for row in rows if row.op == name]


BACKWARD = aten._scaled_dot_product_flash_attention_backward.default


def test_flash_backward_by_hand() -> None:
    """flash_api.cpp, ``mha_bwd``: S up to 128, head dim up to 32, expanded keys and values."""
    gradients, sums = 4 * B * 128 * H * 32, 4 * B * H * 128
    expanded = 2 * B * S * H * D * 2
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        same, grouped = attend(), attend(kv_heads=2, enable_gqa=True)
        torch.use_deterministic_algorithms(True)
        try:
            (deterministic,) = temporaries(same, BACKWARD)
        finally:
            torch.use_deterministic_algorithms(False)
    (grad,) = nodes(same, BACKWARD)
    tensor = grad.args[0].meta["val"]  # type: ignore[union-attr]
    copy = 0 if tensor.transpose(1, 2).is_contiguous() else B * S * H * D * 2
    assert temporaries(same, BACKWARD) == [gradients + sums + copy]
    assert temporaries(grouped, BACKWARD) == [gradients + sums + copy + expanded]
    splits = -(-132 // (B * H))
    assert deterministic == splits * gradients + sums + copy


def test_flash_backward_of_an_8b_model() -> None:
    """Llama 3 8B, batch 2, sequence 8,192: 514 MiB a call of memory that no graph shows."""
    heads, kv_heads, rows, dim = 32, 8, 8192, 128

    class Once(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2).square().sum()

    q, kv = (
        torch.empty(2, rows, h, dim, dtype=HALF, device="meta", requires_grad=True)
        for h in (heads, kv_heads)
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        (size,) = temporaries(program(Once(), q, kv, kv.clone()), BACKWARD)
    mib = 2**20
    assert size == (256 + 2 + 2 * 128) * mib


@pytest.mark.parametrize(
    ("dtype", "dim", "tiles", "rows", "columns", "kept"),
    [
        (FLOAT, 8, 1, 64, 64, 0),
        (FLOAT, 80, 2, 128, 64, 0),
        (HALF, 80, 1, 128, 128, 0),
        (HALF, 264, 5, 128, 64, 64 * 2 * 384),
    ],
)
def test_efficient_backward_by_hand(
    dtype: torch.dtype, dim: int, tiles: int, rows: int, columns: int, kept: int
) -> None:
    """kernel_backward.h: tiles of floats after 16 bytes, one per rows of queries, columns of the
    head dim, and head; above 128 in half precision, gradients of 64 keys and values as wide as 3
    tiles. In fp32 the product of output and gradient comes first, if it is larger."""
    op = aten._scaled_dot_product_efficient_attention_backward.default
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        traced = attend(dtype, dim=dim * H)
    (node,) = nodes(traced, op)
    grad = node.args[0].meta["val"]  # type: ignore[union-attr]
    elements = B * H * S * dim
    copy = 0 if grad.transpose(1, 2).is_contiguous() else elements * dtype.itemsize
    workspace = B * H * 4 * (tiles * (rows * columns + 4) + kept)
    sums = 4 * B * H * S
    assert workspace > 4 * elements + sums
    assert temporaries(traced, op) == [copy + sums + workspace]


def test_attention_and_convolution_of_cudnn_are_unknown() -> None:
    traced = attend()
    for op in (CUDNN, aten._scaled_dot_product_cudnn_attention_backward.default):
        assert temporaries(traced, op) == [None]
    (row, _) = kernels_cuda.kernel_temporaries_cuda(traced)
    assert "sdpa_kernel" in row.why
    conv = program(nn.Sequential(nn.Conv1d(2, 2, 3)), torch.randn(1, 2, 8))
    assert temporaries(conv, aten.convolution.default) == [None]


class Lookup(nn.Module):
    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).square().sum()


@pytest.mark.parametrize(("count", "rows"), [(3072, 100), (5000, 100), (5000, 9000)])
def test_embedding_backward_by_hand(count: int, rows: int) -> None:
    """EmbeddingBackwardKernel.cu: up to 3,072 indices nothing; then three arrays of them, two of
    segments, one of partial segments, two numbers, and a row of fp32 per partial segment."""
    op = aten.embedding_dense_backward.default
    traced = program(Lookup(rows, 8), torch.zeros(count, dtype=torch.int64))
    segments = min(count, rows)
    partial = count // 10 + segments
    want = 8 * (3 * count + 2 * segments + partial) + 16 + 4 * 8 * partial
    assert temporaries(traced, op) == ([] if count <= 3072 else [want])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_of_softmax_by_hand(dtype: torch.dtype) -> None:
    """SoftMax.cu: the gradient times the output; log_softmax reads both as they are."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 16, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.linear(x)
            return (scores.softmax(-1) * scores.log_softmax(-1)).sum()

    traced = program(Scores(), torch.zeros(4, 8, dtype=dtype))
    # both write over what they read
    assert temporaries(traced, aten._softmax_backward_data.out) == [4 * 16 * dtype.itemsize]
    assert temporaries(traced, aten._log_softmax_backward_data.out) == []


def test_backward_of_indexing_by_hand() -> None:
    """Indexing.cu: linear, sorted and original indices and their range, int64 each."""

    class Index(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(10, 4))

        def forward(self, rows: Tensor) -> Tensor:
            return self.weight[rows].square().sum()

    traced = program(Index(), torch.zeros(6, dtype=torch.int64))
    assert temporaries(traced, aten.index_put.default) == [4 * 8 * 6]
