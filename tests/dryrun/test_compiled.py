"""torch.compile in a dry run takes the memory that Inductor leaves on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fxshard._torch import gpu_inductor
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard._torch.gpu_inductor import Gpu
from fxshard._torch.process_groups import fake_process_group
from fxshard.capture.cuda import operators
from fxshard.dryrun.compiled import Compilations, compiled_as_on_gpu
from fxshard.errors import CaptureError
from tests.dryrun.compiled_models import (
    BF16,
    MLP,
    Model,
    Storages,
    Text,
    cross_entropy,
    peak,
    products_are_saved,
)

GPU = Gpu((9, 0), 132)
B, S, D, H = 2, 40, 64, 192  # of MLP: rows B * S


@contextlib.contextmanager
def on_gpu() -> Iterator[tuple[Compilations, Storages]]:
    with (
        compiled_as_on_gpu(GPU) as done,
        operators.substituted(),
        operators.CudaFakeMode(allow_non_fake_inputs=True),
        Storages() as seen,
    ):
        yield done, seen


def test_a_block_allocates_what_fusion_leaves_and_layers_compile_once() -> None:
    """Counted by hand; the events are those of Inductor's text, too."""
    with on_gpu() as (done, seen):
        model = nn.Sequential(*(torch.compile(MLP(D, H), fullgraph=True) for _ in range(3)))
        x = torch.empty(B, S, D, dtype=BF16, requires_grad=True)
        y, forward = seen.during(lambda: model(x))
        wide, hidden, rows = 2 * B * S * D, 2 * B * S * H, 4 * B * S
        # The inverse norms in fp32, the normed x, up's result, gelu's; down's, in which x is added.
        assert forward == 3 * [rows, wide, hidden, hidden, wide]
        assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), BF16)
        y = model[0](x)
        gradient = torch.empty_like(y)
        _, backward = seen.during(lambda: y.backward(gradient))
    assert [code.is_backward for code in done.codes] == [False, True]
    texts = [Text(code.source) for code in done.codes]
    assert texts[0].events == forward[:5] and sorted(texts[0].returned) == sorted(forward[:5])
    # Gradients of down, up and the norm's weight, and of x; gelu's input becomes its gradient.
    births = [size for size in backward if size > 0]
    assert births == [size for size in texts[1].events if size > 0]
    assert max(births) == hidden and peak(backward) < 3 * hidden
    for parameter in (*model[0].parameters(), x):
        grad = parameter.grad
        assert grad is not None and (grad.shape, grad.dtype) == (parameter.shape, BF16)
    assert "compiled_models.py" in done.codes[0].line


def test_every_storage_of_compiled_code_has_a_line_of_the_users() -> None:
    lines: list[str] = []

    class Lines(Storages):
        def _see(self, storage: torch.UntypedStorage, op: str) -> None:
            if op == "aten.empty_strided.default" and (line := done.line()):
                lines.append(line)

    class Two(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            y = x.sin() @ w
            return torch.softmax(y, -1).bfloat16()

    with compiled_as_on_gpu(GPU) as done, FakeTensorMode(), Lines():
        torch.compile(Two())(torch.empty(8, 8), torch.empty(8, 8, requires_grad=True))
    first = Two.forward.__code__.co_firstlineno + 1
    assert {line.rpartition(":")[2].split()[0] for line in lines} == {str(first), str(first + 1)}


# -- activation checkpointing, FSDP2, a compiled loss ----------------------------------------------

BATCH, LENGTH, WIDE, VOCABULARY = 2, 40, 64, 112
ROWS = BATCH * LENGTH


def step_of(how: str, checkpoint: str, dropout: float, *, loss_too: bool = False) -> Any:
    """Three steps of two layers on four ranks; of the last, per phase, bytes born and freed.

    Without unsharded parameters: FSDP2 resizes their storages, which no operator does.
    """
    steps = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_process_group(0, 4))
        mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
        done, seen = stack.enter_context(on_gpu())
        model = Model(dropout=dropout)
        policy = MixedPrecisionPolicy(BF16, torch.float32)
        for i, layer in enumerate(model.layers):
            if checkpoint == "selective":
                layer = checkpoint_wrapper(
                    layer, context_fn=products_are_saved, preserve_rng_state=False
                )
            elif checkpoint == "full":
                layer = checkpoint_wrapper(layer, preserve_rng_state=False)
            if how == "wrapped":
                layer = torch.compile(layer, fullgraph=True)
            else:
                layer.compile(fullgraph=True)
            model.layers[i] = fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        loss_of = torch.compile(cross_entropy) if loss_too else cross_entropy
        for _ in range(3):
            tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
            logits, forward = seen.during(functools.partial(model, tokens))
            loss, of_loss = seen.during(functools.partial(loss_of, logits, tokens))
            del logits
            _, backward = seen.during(loss.backward)
            steps.append((forward, of_loss, backward))
            del loss
            assert all(p.grad.shape == p.shape for p in model.parameters())
            model.zero_grad()
    assert steps[1] == steps[2]
    assert len(done.codes) == (4 if loss_too else 2), "equal layers are compiled once, and the loss"
    return steps[-1], done


@pytest.fixture(scope="module")
def selective() -> Any:
    return step_of("wrapped", "selective", 0.1, loss_too=True)


def test_checkpointing_inside_compiled_blocks_saves_what_its_policy_says(
    selective: Any,
) -> None:
    """Per-op checkpointing keeps the products that backward reads, and recomputes the rest."""
    (full, _, _), _ = step_of("compiled", "full", 0.0)
    (some, _, _), done = selective
    kept = [sum(forward) for forward in (some, full)]
    # The logits; what goes into the layers and comes out of them.
    assert kept[1] == 2 * ROWS * VOCABULARY + 3 * 2 * ROWS * WIDE
    # Products of q, kv, o, w1 and w3: backward reads w2's not. A seed of dropout for each layer.
    assert kept[0] - kept[1] == 2 * (2 * ROWS * (3 * WIDE + 2 * 3 * WIDE) + 8)
    assert [code.is_backward for code in done.codes] == [False, True, False, True]


@pytest.mark.slow  # the test above has what selective checkpointing keeps, to the byte
def test_without_checkpointing_more_is_kept(selective: Any) -> None:
    (none, _, _), _ = step_of("compiled", "none", 0.0)
    assert sum(none) > sum(selective[0][0])


def test_a_compiled_loss_makes_no_fp32_logits(selective: Any) -> None:
    (_, forward, backward), _ = selective
    # The largest and the logarithm of the sum of each row; the loss, which divides in place.
    assert sorted(size for size in forward if size > 0)[-2:] == [4 * ROWS, 4 * ROWS]
    assert backward.count(2 * ROWS * VOCABULARY) == 1, "the gradient of the logits"
    assert 4 * ROWS * VOCABULARY not in backward


# -- what is like in the real run, and what is refused ---------------------------------------------


class Small(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.linear(x)) * 2
        if self.kind == "break":
            torch._dynamo.graph_break()
        if self.kind == "constant":
            y = y + torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        if self.kind == "sort":
            y = y.sort(-1)[0]
        return torch.sigmoid(y) + 1


def call(module: nn.Module, batch: int = 4) -> Tensor:
    y: Tensor = module(torch.empty(batch, 8))
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    return y


def test_graph_breaks_open_sizes_and_what_was_compiled_before() -> None:
    early, other = torch.compile(Small()), Small()
    other.compile()
    with compiled_as_on_gpu(GPU) as done, FakeTensorMode(allow_non_fake_inputs=True), Storages():
        call(torch.compile(Small("break")))
        assert len(done.codes) == 4, "forward and backward of both sides of the break"
        call(early)
        call(other)
        assert len(done.codes) == 6, "one module is like the other"
        for batch in (6, 10, 12):
            assert call(early, batch).shape == (batch, 8)
        assert len(done.codes) == 8, "the second size makes it open"
        assert "= primals_3" in done.codes[6].source and "(s77, 8)" in done.codes[6].source


def test_constants_lie_on_the_gpu_and_operators_without_a_kernel_of_inductors_run() -> None:
    with compiled_as_on_gpu(GPU) as done, FakeTensorMode(), Storages() as seen:
        call(torch.compile(Small("constant")))
        assert "_tensor_constant0" in done.codes[0].source
        assert (16, "aten.empty_strided.default") in seen.events
        call(torch.compile(Small("sort")))


def test_a_backward_that_computes_nothing_hands_the_gradient_on() -> None:
    with compiled_as_on_gpu(GPU) as done, FakeTensorMode(), Storages():
        x = torch.empty(4, 8, requires_grad=True)
        y = torch.compile(lambda x: x + 1)(x)
        y.backward(torch.empty_like(y))
        assert x.grad is not None and x.grad.shape == (4, 8)
    assert [code.is_backward for code in done.codes] == [False]


def test_what_cannot_be_known_is_refused_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"{__file__}:{Small.forward.__code__.co_firstlineno + 1} in forward"
    with compiled_as_on_gpu(GPU), FakeTensorMode(), Storages():
        for mode, why in (
            ("max-autotune-no-cudagraphs", "measuring"),
            ("max-autotune", "CUDA graphs"),
            ("reduce-overhead", "CUDA graphs"),
        ):
            with pytest.raises(CaptureError, match=why) as caught:
                call(torch.compile(Small(), mode=mode))
            said = str(caught.value)
            assert mode.removesuffix("-no-cudagraphs") in said and line in said
        code = gpu_inductor.gpu_code

        def with_a_new_name(*args: Any, **how: Any) -> Any:
            made = code(*args, **how)
            assert made is not None
            source = made.source.replace("args.clear()", "args.clear(); new_in_inductor(1)")
            return dataclasses.replace(made, source=source)

        monkeypatch.setattr(gpu_inductor, "gpu_code", with_a_new_name)
        with pytest.raises(CaptureError, match=r"refers to new_in_inductor.*args\.clear") as caught:
            call(torch.compile(Small("other")))
        assert line in str(caught.value)


def test_norms_keep_their_statistics_in_fp32() -> None:
    with on_gpu() as (_, seen):
        norm = torch.compile(nn.LayerNorm(64, dtype=BF16))
        x = torch.empty(16, 64, dtype=BF16, requires_grad=True)
        y, events = seen.during(lambda: norm(x))
        assert y.dtype == BF16
    assert events == [4 * 16, 4 * 16, 2 * 16 * 64], "mean and inverse deviation of each row"


def test_the_process_is_as_before() -> None:
    model, x = Small(), torch.ones(4, 8)
    compiled = torch.compile(model)
    is_available, modules = torch.cuda.is_available, set(sys.modules)
    with compiled_as_on_gpu(GPU), FakeTensorMode(allow_non_fake_inputs=True), Storages():
        call(compiled)
    model.zero_grad()
    assert torch.cuda.is_available is is_available and not torch.cuda.is_available()
    assert not [name for name in set(sys.modules) - modules if name.startswith("triton")]
    from torch._inductor.utils import get_gpu_type
    from torch.utils._triton import has_triton

    assert not has_triton() and get_gpu_type.cache_info().currsize == 0
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x))
    linear = nn.Linear(8, 8, bias=False)  # whose backward has no kernel that a compiler builds
    torch.compile(linear)(x).sum().backward()
    assert linear.weight.grad is not None
