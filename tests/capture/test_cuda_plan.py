"""Plans for CUDA made without it: what is put in place of the CPU's operators, held against bytes
that are counted by hand from shapes, PyTorch's meta kernels and its headers."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

import fxshard
from fxshard._torch import export
from fxshard.capture.cuda import operators as cuda_operators
from fxshard.config.checked import Config
from fxshard.errors import CaptureError, ConfigError
from fxshard.ir import dump
from fxshard.memory.category import Category
from fxshard.memory.optimizer import trace_step
from tests.capture.cuda_cases import (
    CUDNN,
    FLOAT,
    HALF,
    Attention,
    B,
    D,
    H,
    Norm,
    S,
    attend,
    nodes,
    program,
    results,
    saved,
)

pytestmark = pytest.mark.usefixtures("same_seed")
aten = torch.ops.aten


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


# -- norms, dropout, other operators with other results -------------------------------------------


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

    x = torch.randn(2, 2, 8)  # two steps of time
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


@pytest.mark.parametrize("offload", [None, CPUOffloadPolicy()])
def test_steps_are_of_the_device_that_shards_are_on(offload: CPUOffloadPolicy | None) -> None:
    """Shards on the CPU are stepped one by one; Adam's count of steps is on the CPU anyway."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plan = fxshard.plan(
        model,
        (torch.ones(1, 64, device="meta"),),
        world_size=2,
        device="cuda",
        optimizer=torch.optim.AdamW,
        offload=offload,
    )
    ledger = plan.memory.steady
    operators = {moment.op.split(".")[1] for moment in ledger.moments if "." in moment.op}
    assert ("_foreach_addcdiv_" in operators) == (offload is None)
    states = [each for each in ledger.ranges if each.category is Category.OPT_STATE]
    steps = [each for each in states if each.name.startswith("step of")]
    assert len(steps) == 4 and all(each.host for each in steps)
    moments = [each for each in states if each not in steps]
    assert len(moments) == 8 and all(each.host == (offload is not None) for each in moments)


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
    """They are in this file and in those beside it."""
    files = [path.read_text() for path in Path(__file__).parent.glob("test_cuda_*.py")]
    tests = {name for text in files for name in re.findall(r"^def (test_\w+)", text, re.M)}
    page = (Path(__file__).parents[2] / "docs/cuda.md").read_text()
    _, _, table = page.partition("|---|---|---|---|---|---|\n")
    rows = [row.strip("| ").split(" | ") for row in table.partition("\n\n")[0].splitlines()]
    assert rows
    for op, *cells, test in rows:
        assert len(cells) == 4, op
        assert test.strip("`") in tests, op
