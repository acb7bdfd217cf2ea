"""Attention planned for CUDA takes the kernel that CUDA takes, and saves what that saves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxshard
from fxshard.capture.cuda import operators as cuda_operators
from fxshard.errors import CaptureError
from tests.capture.cuda_cases import (
    CUDNN,
    EFFICIENT,
    FLASH,
    FLOAT,
    FUSED,
    HALF,
    Attention,
    B,
    D,
    H,
    S,
    attend,
    nodes,
    program,
    results,
    saved,
)
from tests.zoo import models

pytestmark = pytest.mark.usefixtures("same_seed")

BACKENDS: dict[str, tuple[dict[str, Any], Any]] = {
    "half": (dict(), CUDNN),
    "half, dropout that cuDNN rounds": (dict(dropout_p=0.1), FLASH),
    "half, dropout of 1/8": (dict(dropout_p=0.125), CUDNN),
    "half, head dim 160": (dict(dim=160 * H), FLASH),
    "half, head dim 264": (dict(dim=264 * H), EFFICIENT),
    "half, head dim 12": (dict(dim=12 * H), FLASH),
    "half, grouped": (dict(kv_heads=2, enable_gqa=True), CUDNN),
    "fp32": (dict(dtype=FLOAT), EFFICIENT),
    "fp32, dropout": (dict(dtype=FLOAT, dropout_p=0.1), EFFICIENT),
    "fp32, head dim 6": (dict(dtype=FLOAT, dim=6 * H), None),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_takes_the_kernel_that_cuda_takes(name: str) -> None:
    """By hand, from the checks in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""
    options, want = BACKENDS[name]
    found = {node.target for node in attend(**options).graph.nodes if node.target in FUSED}
    assert found == ({want} if want else set())


def test_attention_saves_what_cudnn_needs() -> None:
    """q, k, v and the output in bf16, the log-sum-exp [B, H, S, 1] in fp32, two int64."""
    rows, lse = (HALF, B * H * S * D), (FLOAT, B * H * S)
    assert saved(attend()) == {rows: 4, lse: 1, (torch.int64, 1): 2}
    assert results(attend(), CUDNN)[1] == (FLOAT, (B, H, S, 1))


def test_attention_in_fp32_saves_a_padded_log_sum_exp() -> None:
    lse = -(-S // 32) * 32
    rows = (FLOAT, B * H * S * 2 * D)  # of 16 columns, so that no two numbers are equal
    want = {rows: 4, (FLOAT, B * H * lse): 1, (torch.int64, 1): 2}
    assert saved(attend(FLOAT, dim=H * 2 * D)) == want


def test_attention_pinned_to_flash_saves_its_generator_state() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        kept = saved(attend())
    state = {(torch.uint64, 2): 1, (torch.uint64, 1): 1}
    assert kept == {(HALF, B * H * S * D): 4, (FLOAT, B * H * S): 1, **state}


def test_the_users_choice_of_attention_kernels_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, want in {
        SDPBackend.FLASH_ATTENTION: FLASH,
        SDPBackend.EFFICIENT_ATTENTION: EFFICIENT,
        SDPBackend.CUDNN_ATTENTION: CUDNN,
    }.items():
        with sdpa_kernel(backend):
            assert nodes(attend(), want)
    with sdpa_kernel(SDPBackend.MATH):
        assert not any(nodes(attend(), op) for op in FUSED)
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(order, set_priority=True):
        assert nodes(attend(), EFFICIENT)
    with monkeypatch.context() as context:
        context.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
        assert nodes(attend(), FLASH)
    torch.use_deterministic_algorithms(True)
    try:
        assert nodes(attend(), FLASH)
    finally:
        torch.use_deterministic_algorithms(False)
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(CaptureError, match=r"\[2, 4, 16, 8\] torch.float32.*sdpa_kernel"),
    ):
        attend(FLOAT)


def test_attention_dropout_keeps_no_scores() -> None:
    """On the CPU dropout in attention is computed with S x S scores, on CUDA inside the kernel."""
    model, x = Attention(dropout_p=0.1).to(HALF), torch.randn(B, S, H * D, dtype=HALF)
    scores = B * H * S * S
    on_cpu, on_cuda = (saved(program(model, x, device=d)) for d in (None, "cuda"))
    assert any(size == scores for _, size in on_cpu)
    assert not any(size == scores for _, size in on_cuda)
    multihead = nn.MultiheadAttention(32, H, dropout=0.1, batch_first=True, bias=False)

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = multihead

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0].sum()

    x = torch.randn(B, S, 32)
    on_cpu, on_cuda = (saved(program(Inside(), x, device=d)) for d in (None, "cuda"))
    assert any(size == scores for _, size in on_cpu)
    assert not any(size == scores for _, size in on_cuda)


def test_a_mask_becomes_numbers_and_rows_of_eight_for_the_efficient_kernel() -> None:
    """Flash takes none. cuDNN takes [S, S]; mem-efficient rows that start at multiples of 8."""
    size = 12
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    x = torch.randn(B, size, H * D)
    half = program(Attention().to(HALF), x.to(HALF), mask)
    (node,) = nodes(half, CUDNN)
    bias = node.args[3].meta["val"]  # type: ignore[union-attr]
    assert (bias.dtype, tuple(bias.shape)) == (HALF, (size, size))
    single = program(Attention(), x, mask)
    (node,) = nodes(single, EFFICIENT)
    bias = node.args[3].meta["val"]  # type: ignore[union-attr]
    assert (bias.dtype, tuple(bias.shape)) == (FLOAT, (B, H, size, size))
    assert bias.untyped_storage().nbytes() == size * 16 * 4
    learned = program(MaskedByParameter().to(HALF), x.to(HALF))
    assert nodes(learned, EFFICIENT), "cuDNN gives no gradient for a mask"


class MaskedByParameter(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(12, 16))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, self.bias[:, :12])


def test_a_head_dim_that_is_no_multiple_of_8_is_padded_for_flash() -> None:
    kept = saved(attend(dim=12 * H))
    assert kept[HALF, B * H * S * 16] == 4, "q, k, v and the output have 16 columns, not 12"


def test_grouped_heads_in_fp32_are_computed_with_scores_where_torch_has_no_kernel() -> None:
    """Mem-efficient attention alone takes fp32; whether it takes fewer heads of keys is said by the
    shape that torch's meta kernel of its backward gives."""
    traced = attend(FLOAT, kv_heads=2, enable_gqa=True)
    kernel = nodes(traced, EFFICIENT)
    assert bool(kernel) == cuda_operators.knows_grouped_efficient()
    assert bool(kernel) != any(size == B * H * S * S for _, size in saved(traced))


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_llama_saves_by_hand(dtype: torch.dtype) -> None:
    """One layer: 4 heads of 8, 2 of keys. What its attention and its activation save."""
    model, rows = models.llama(depth=1).to(dtype), 12
    ids = torch.randint(0, 128, (B, rows))
    plan = fxshard.plan(model, (ids,), {"labels": ids}, world_size=2, device="cuda")
    kept = saved(plan.program)
    scores, keys = B * H * rows * rows, B * 2 * rows * D
    if dtype == HALF:
        assert kept[FLOAT, B * H * rows] == 1, "the log-sum-exp"
        assert kept[HALF, keys] == 2, "keys and values, not repeated"
        assert not any(size == scores for _, size in kept)
    elif not cuda_operators.knows_grouped_efficient():
        assert kept[FLOAT, scores] == 1, "the softmax, once"
