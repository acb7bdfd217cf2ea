"""Plans for CUDA made without it: what is put in place of the CPU's operators, held against bytes
that are counted by hand from shapes, PyTorch's meta kernels and its headers."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxshard
from fxshard._torch import export, fake_tensors, modes
from fxshard.capture.cuda import autocast
from fxshard.capture.cuda import operators as cuda_operators
from fxshard.config import Config
from fxshard.errors import CaptureError, ConfigError
from fxshard.ir import dump, tags
from fxshard.ir.program import Program
from fxshard.memory.cuda import kernels as kernels_cuda
from fxshard.memory.optimizer import trace_step
from tests.zoo import models

aten = torch.ops.aten
HALF, FLOAT = torch.bfloat16, torch.float32
B, H, S, D = 2, 4, 16, 8  # batch, heads, sequence, head dim


class Attention(nn.Module):
    """(B, S, dim) -> a scalar, through one scaled_dot_product_attention."""

    def __init__(self, dim: int = H * D, heads: int = H, kv_heads: int = H, **options: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.options = heads, kv_heads, options
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim // heads * kv_heads, bias=False)
        self.v = nn.Linear(dim, dim // heads * kv_heads, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x) for layer in (self.q, self.k, self.v))
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options).sum()


def program(model: nn.Module, *args: Any, device: str | None = "cuda", **options: Any) -> Program:
    return fxshard.plan(model, args, world_size=2, device=device, **options).program


def attend(dtype: torch.dtype = HALF, dim: int = H * D, **options: Any) -> Program:
    model = Attention(dim, **options).to(dtype)
    return program(model, torch.randn(B, S, dim, dtype=dtype))


def nodes(traced: Program, target: Any) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if node.target is target]


def results(traced: Program, target: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor that the one node with this operator gives."""
    (node,) = nodes(traced, target)
    return [(t.dtype, tuple(t.shape)) for t in tags.tensors(node.meta["val"])]


Kinds = dict[tuple[torch.dtype, int], int]


def saved(traced: Program) -> Kinds:
    """What backward reads of what forward makes: ``(dtype, elements)`` of storages -> how many."""
    held = {
        key
        for node in traced.graph.nodes
        if node.op == "placeholder" or tags.get(node).role != "compute"
        for key in tags.storage_ids(node)
    }
    kept: dict[int, tuple[torch.dtype, int]] = {}
    for node in traced.graph.nodes:
        if node.op != "call_function" or tags.get(node).phase == "backward":
            continue
        if any(tags.get(u).phase == "backward" for u in node.users if u.op == "call_function"):
            for tensor in tags.tensors(node.meta["val"]):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                kept[id(tensor.untyped_storage())] = tensor.dtype, size
    kinds = [kind for key, kind in kept.items() if key not in held]
    return {kind: kinds.count(kind) for kind in kinds}


CUDNN = aten._scaled_dot_product_cudnn_attention.default
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
FUSED = (CUDNN, FLASH, EFFICIENT)


# -- attention ------------------------------------------------------------------------------------

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


# -- norms, dropout, other operators with other results --------------------------------------------


class Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32, bias=False), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).sum()


def test_rms_norm_in_bf16_saves_its_input_and_one_number_a_row() -> None:
    """On the CPU two fp32 copies of the input: 8 bytes an element instead of 2."""
    model, x = Norm(nn.RMSNorm(32)).to(HALF), torch.randn(B, S, 32, dtype=HALF)
    on_cpu, on_cuda = (saved(program(model, x, device=d)) for d in (None, "cuda"))
    assert on_cuda == {(HALF, B * S * 32): 1, (FLOAT, B * S): 1}
    assert on_cpu[FLOAT, B * S * 32] == 2
    traced = program(model, x)
    assert nodes(traced, aten._fused_rms_norm.default)
    assert nodes(traced, aten._fused_rms_norm_backward.default)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_rms_norm_of_another_dtype_than_its_weight_is_not_fused() -> None:
    class Mixed(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x).to(HALF)).sum()

    assert not nodes(
        program(Mixed(nn.RMSNorm(32)), torch.randn(B, 32)), aten._fused_rms_norm.default
    )


def as_meta(op: Any, *args: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """What PyTorch's meta kernel gives where the device is not the CPU."""
    moved = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
    return [(t.dtype, tuple(t.shape)) for t in op(*moved)]


def test_layer_norm_in_bf16_has_statistics_in_fp32() -> None:
    x, w = torch.randn(B, S, 32, dtype=HALF), torch.ones(32, dtype=HALF)
    want = as_meta(aten.native_layer_norm.default, x, [32], w, w, 1e-5)
    assert [dtype for dtype, _ in want] == [HALF, FLOAT, FLOAT]
    traced = program(Norm(nn.LayerNorm(32)).to(HALF), x)
    assert results(traced, aten.native_layer_norm.default) == want
    on_cpu = program(Norm(nn.LayerNorm(32)).to(HALF), x, device=None)
    assert results(on_cpu, aten.native_layer_norm.default)[1][0] == HALF


def test_batch_norm_has_statistics_in_fp32_and_keeps_them_in_eval() -> None:
    """A trace turns cuDNN's into the native one, on CUDA too (torch/_decomp/decompositions.py), so
    that there is no reserve."""
    x, w = torch.randn(S, 32, dtype=HALF), torch.ones(32, dtype=HALF)
    trained = aten._native_batch_norm_legit_functional.default
    want = as_meta(trained, x, w, w, w, w, True, 0.1, 1e-5)
    assert [dtype for dtype, _ in want[1:3]] == [FLOAT, FLOAT]
    assert results(program(Norm(nn.BatchNorm1d(32)).to(HALF), x), trained) == want
    frozen = aten._native_batch_norm_legit_no_training.default
    want = as_meta(frozen, x, w, w, w, w, 0.1, 1e-5)
    assert want[1] == (FLOAT, (32,))
    assert results(program(Norm(nn.BatchNorm1d(32)).to(HALF).eval(), x), frozen) == want


def test_norms_and_dropout_made_again_in_backward_are_those_of_cuda() -> None:
    class Again(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    x = torch.randn(B, S, 32, dtype=HALF)
    model = Again(nn.Sequential(nn.LayerNorm(32), nn.Dropout(0.1))).to(HALF)
    traced = program(model, x)
    made = nodes(traced, aten.native_layer_norm.default)
    assert len(made) == 2
    assert {tuple(t.dtype for t in node.meta["val"]) for node in made} == {(HALF, FLOAT, FLOAT)}
    states = nodes(traced, torch.ops.fxshard.get_rng_state.default)
    assert {tuple(node.meta["val"].shape) for node in states} == {(16,)}


def test_dropout_saves_one_byte_an_element() -> None:
    """As on the CPU; its backward below fp32 is one operator on CUDA, three on the CPU."""
    model, x = Norm(nn.Dropout(0.1)).to(HALF), torch.randn(B, S, 32, dtype=HALF)
    on_cpu, on_cuda = (program(model, x, device=d) for d in (None, "cuda"))
    assert saved(on_cpu) == saved(on_cuda) == {(torch.bool, B * S * 32): 1}
    assert nodes(on_cuda, aten.native_dropout_backward.default)
    assert not nodes(on_cpu, aten.native_dropout_backward.default)


def test_embedding_bag_has_the_sizes_of_cuda() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(10, 4, mode="sum")

        def forward(self, x: Tensor) -> Tensor:
            return self.bag(x).sum()

    x = torch.randint(0, 10, (3, 5))
    offsets = torch.arange(3) * 5
    want = as_meta(aten._embedding_bag.default, torch.zeros(10, 4), x.flatten(), offsets)
    assert results(program(Bag(), x), aten._embedding_bag.default) == want


def test_other_operators_are_the_same() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)
            self.linear = nn.Linear(4, 5)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            y = F.max_pool2d(F.gelu(self.norm(self.conv(x))), 2)
            y = F.interpolate(y, scale_factor=2, mode="bilinear")
            logits = self.linear(y.mean((2, 3)).cumsum(-1))
            return F.cross_entropy(logits, labels) + logits.topk(2).values.sum()

    for dtype in (HALF, FLOAT):
        x, labels = torch.randn(2, 3, 8, 8, dtype=dtype), torch.tensor([0, 1])
        both = (program(Many().to(dtype), x, labels, device=d) for d in (None, "cuda"))
        on_cpu, on_cuda = map(cuda_operators.capture_signature, both)
        assert on_cpu == on_cuda


def test_recurrent_layers_are_refused_by_name() -> None:
    class Recurrent(nn.Module):
        def __init__(self, kind: type[nn.RNNBase]) -> None:
            super().__init__()
            self.layer = kind(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].sum()

    x = torch.randn(4, 2, 8)
    for kind, name in (
        (nn.LSTM, "lstm.input"),
        (nn.GRU, "gru.input"),
        (nn.RNN, "rnn_tanh.input"),
    ):
        model = Recurrent(kind)
        program(model, x, device=None)  # the first holds a copy more
        before = [str(node.target) for node in program(model, x, device=None).graph.nodes]
        with pytest.raises(CaptureError, match=rf"aten::{name} runs as cuDNN's"):
            program(model, x)
        after = [str(node.target) for node in program(model, x, device=None).graph.nodes]
        assert sorted(after) == sorted(before)


# -- autocast ------------------------------------------------------------------------------------


def test_autocast_lists_are_those_of_the_header() -> None:
    """Each list against its macro in torch's own ATen/autocast_mode.h, and all against what the
    dispatcher has for AutocastCUDA."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text()

    def macro(name: str) -> set[str]:
        body = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?)\n\n", text, re.S)
        assert body is not None
        entries = re.findall(r"_\((\w+)(?:, *(\w+))?\)", body[1])
        return {f"{op}.{overload}" if overload else op for op, overload in entries}

    have = set(export.aten_names("AutocastCUDA"))
    by_cudnn = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
    assert autocast.LOWER_PRECISION & have == macro("LOWER_PRECISION_FP") | by_cudnn & have
    in_no_header = {"linalg_matrix_sqrth"}  # since 2.15; see the next test
    assert autocast.FP32 & have == macro("FP32") | in_no_header & have
    assert autocast.FP32_RESULT & have == macro("FP32_SET_OPT_DTYPE")
    assert autocast.WIDEST & have == macro("PROMOTE")
    assert all(autocast.policy(name) for name in have)


UNLISTED = [name for name in ("linalg_matrix_sqrth",) if hasattr(aten, name)]  # torch 2.15 has it


@pytest.mark.parametrize("name", ["exp", *UNLISTED])
def test_what_no_header_lists_is_cast_by_cudas_kernel_to_fp32(name: str) -> None:
    """The kernel of AutocastCUDA itself, on a fake CUDA tensor; `exp` is in the header."""
    mode, seen = fake_tensors.FakeTensorMode(), []
    x = fake_tensors.fake_empty(mode, (3, 3), HALF, torch.device("cuda"))

    class Dtypes(modes.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            seen.append((func, args[0].dtype))
            return func(*args, **(kwargs or {}))

    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with Dtypes():
            getattr(aten, name)(x)
    finally:
        torch.set_autocast_enabled("cuda", before)
    assert name in autocast.FP32 and seen[-1] == (getattr(aten, name).default, FLOAT)


class Cast(nn.Module):
    """Each result is of an operator that the two autocasts cast differently, or of a linear."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear, self.norm, self.device = nn.Linear(8, 8), nn.LayerNorm(8), device

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.autocast(self.device, dtype=HALF):
            y = self.linear(x)
            return {
                "linear": y,
                "softmax": y.softmax(-1),
                "layer_norm": self.norm(y),
                "pow": y.pow(2),
                "sum": y.sum(-1),
                "norm": y.norm(),
                "stack": torch.stack([y, y]),
                "addcmul": torch.addcmul(x, y, y),
                "double": x.double().exp(),
            }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_casts_as_on_cuda(device: str) -> None:
    """By hand, from the lists of the header: a linear in bf16, softmax, norms, powers and sums in
    fp32, addcmul in the widest; on the CPU none but the first."""
    plan = fxshard.plan(Cast(device), (torch.randn(4, 8),), world_size=2, device="cuda")
    traced = plan.program
    got = {
        traced.signature.output_names[int(result.name)].strip("[]'"): value.meta["val"].dtype
        for value, result in zip(traced.values, traced.results, strict=True)
        if result.kind == "output"
    }
    fp32 = ("softmax", "layer_norm", "pow", "sum", "norm", "addcmul")
    assert got == {
        **{"linear": HALF, "stack": HALF, "double": torch.float64},
        **dict.fromkeys(fp32, FLOAT),
    }


def test_autocast_around_plan() -> None:
    model, x = Norm(nn.Softmax(-1)), torch.randn(4, 32)
    with torch.autocast("cpu", dtype=HALF):
        traced = program(model, x)
    assert results(traced, aten._softmax.default) == [(FLOAT, (4, 32))]
    first, *_ = nodes(traced, aten.mm.default)
    assert first.meta["val"].dtype == HALF


def test_an_operator_that_no_list_has_is_refused_where_it_is_called_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newer torch casts more, which must not matter to models that call none of it."""
    monkeypatch.setattr(autocast, "FP32", autocast.FP32 - {"layer_norm"})
    x = torch.randn(4, 32)
    with torch.autocast("cpu", dtype=HALF):
        program(Norm(nn.Softmax(-1)), x)
        with pytest.raises(CaptureError, match="casts aten::layer_norm"):
            program(Norm(nn.LayerNorm(32)), x)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_that_turned_itself_off_is_refused() -> None:
    model, x = Norm(nn.Identity()), torch.randn(4, 32)
    with (
        torch.autocast("cuda", dtype=HALF),
        pytest.raises(CaptureError, match=r"torch\.autocast that is off"),
    ):
        program(model, x)
    decorated = torch.autocast("cuda", dtype=HALF)

    class Decorated(Norm):
        def forward(self, x: Tensor) -> Tensor:
            with decorated:
                return super().forward(x)

    with pytest.raises(CaptureError, match="made before the capture"):
        program(Decorated(nn.Identity()), x)


# -- nothing stays --------------------------------------------------------------------------------


def dispatch_tables() -> dict[str, str]:
    names = {"scaled_dot_product_attention", "_fused_rms_norm", *cuda_operators.RECURRENT}
    names |= {*export.aten_names("AutocastCPU"), *export.aten_names("AutocastCUDA")}
    return {name: torch._C._dispatch_dump_table(f"aten::{name}") for name in sorted(names)}


class Fails(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if y > 0 else -y


def test_a_capture_leaves_torch_as_it_was_also_when_it_fails() -> None:
    tables = dispatch_tables()
    own = torch.autocast.__init__, torch.autocast.__enter__
    x, w = torch.randn(B, H, S, D), torch.randn(D)

    def eager() -> list[Tensor]:
        with torch.autocast("cpu", dtype=HALF):
            cast = F.softmax(x @ x.transpose(-1, -2), -1)
        return [
            F.scaled_dot_product_attention(x, x, x, is_causal=True),
            F.rms_norm(x, (D,), w),
            F.layer_norm(x.to(HALF), (D,), w.to(HALF), w.to(HALF)),
            cast,
        ]

    before = eager()
    text = dump.text(
        program(Norm(nn.LayerNorm(32)).to(HALF), torch.ones(B, 32, dtype=HALF), device=None)
    )
    attend()
    with pytest.raises(CaptureError, match="depends"):
        program(Fails(), torch.randn(B, S, H * D))
    assert dispatch_tables() == tables
    assert (torch.autocast.__init__, torch.autocast.__enter__) == own
    for one, other in zip(before, eager(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    again = program(Norm(nn.LayerNorm(32)).to(HALF), torch.ones(B, 32, dtype=HALF), device=None)
    assert dump.text(again) == text, "fake results of CUDA were remembered"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_alone_is_planned_as_on_cuda(mode: Callable[[], Any]) -> None:
    with mode():
        assert nodes(attend(), CUDNN)


def test_meta_models_and_batches_are_planned_alike() -> None:
    with torch.device("meta"):
        on_meta = Attention().to(HALF)
        batch = torch.empty(B, S, H * D, dtype=HALF)
    assert cuda_operators.capture_signature(
        program(on_meta, batch)
    ) == cuda_operators.capture_signature(attend())


# -- temporaries inside kernels --------------------------------------------------------------------


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
    """kernel_backward.h: tiles of floats behind 16 bytes, one per rows of queries, columns of the
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


# -- the optimizer -------------------------------------------------------------------------------


def highest(events: list[Any]) -> int:
    alive: dict[int, int] = {}
    most = 0
    for event in events:
        alive.update(event.allocated)
        most = max(most, sum(alive.values()))
        for number in event.freed:
            alive.pop(number, None)
    return most


def test_adamw_copies_a_whole_state_once() -> None:
    """``foreach`` is the default on CUDA: the square root of exp_avg_sq of all parameters at once;
    the loop over parameters takes as much as for the largest ones."""
    traced = program(
        nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5))), torch.ones(1, 64)
    )
    local = 5 * 32 * 64

    def most(for_cuda: bool, **options: Any) -> int:
        made = trace_step(
            traced, lambda p: torch.optim.AdamW(p, lr=1e-3, **options), for_cuda=for_cuda
        )
        assert made is not None
        return highest(made.second)

    assert most(True) == 4 * local
    assert most(False, foreach=True) == 4 * local
    assert most(True, foreach=False) == most(False) < 4 * local


# -- the option ------------------------------------------------------------------------------------


def test_the_device_is_none_or_cuda() -> None:
    assert Config(device=torch.device("cuda", 1)).device == "cuda"
    for wrong in ("cpu", "mps", "cuda:0", 0, torch.device("cpu")):
        with pytest.raises(ConfigError, match=r"device=.*legal: None, 'cuda'"):
            Config(device=wrong)


def test_what_is_planned_for_cuda_does_not_run_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"device='cuda'.*computes on 'cpu'"):
        Config(device="cuda").check_runs_on(torch.device("cpu"))
    Config(device="cuda").check_runs_on(torch.device("cuda", 0))
    for run in (fxshard.compile, fxshard.validate):
        with pytest.raises(ConfigError, match=r"device='cuda'.*computes on 'cpu'"):
            run(Attention(), args=(torch.randn(B, S, H * D),), world_size=2, device="cuda")


# -- the table -------------------------------------------------------------------------------------


def test_the_table_names_its_tests() -> None:
    page = (Path(__file__).parents[2] / "docs/cuda.md").read_text()
    _, _, table = page.partition("|---|---|---|---|---|---|\n")
    rows = [row.strip("| ").split(" | ") for row in table.partition("\n\n")[0].splitlines()]
    assert len(rows) == 22
    for op, *cells, test in rows:
        assert len(cells) == 4, op
        assert inspect.isfunction(globals()[test.strip("`")]), op


@pytest.fixture(autouse=True)
def same_seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
