"""Compiled blocks in a dry run: of FSDP2, on its GPU, with their lines, and never eager instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fxshard
from fxshard.memory.category import Category
from fxshard.memory.ledger import LiveRange
from tests.dryrun.compiled_models import BF16, MLP, Model, cross_entropy

B, S, D, H = 2, 40, 64, 192  # of MLP: rows B * S
WIDE, HIDDEN, ROWS = 2 * B * S * D, 2 * B * S * H, 4 * B * S


def born(run: fxshard.DryRun, phase: str, op: str) -> list[LiveRange]:
    """What such operators allocated in a phase of the last step, first to last."""
    ledger = run.memory.steady
    found = [each for each in ledger.ranges if each.op == op and not each.host]
    spans = [(p.begin, p.end) for p in ledger.phases if p.name == phase]
    return [each for each in found if any(begin <= each.born <= end for begin, end in spans)]


def test_blocks_allocate_on_the_gpu_what_fusion_leaves_with_the_lines_of_the_user() -> None:
    """The numbers are those that test_compiled.py counts by hand."""
    early = torch.compile(MLP(D, H), fullgraph=True)  # before the block; not yet called
    with fxshard.dry_run(world_size=1) as run:
        late = MLP(D, H)
        late.compile(fullgraph=True)
        model = nn.Sequential(early, late).cuda()
        for _ in range(2):
            x = torch.empty(B, S, D, dtype=BF16, device="cuda", requires_grad=True)
            y = model(x)
            assert y.is_cuda and (y.shape, y.dtype) == (x.shape, BF16)
            y.backward(torch.empty_like(y))
            model.zero_grad()
            run.step()
            print(y.sum().item())
    made = born(run, "forward", "aten.empty_strided.default")
    assert [each.bytes for each in made] == 2 * [ROWS, WIDE, HIDDEN, HIDDEN, WIDE]
    line = "compiled_models.py"
    assert all(line in each.line and " in forward" in each.line for each in made)
    assert {each.category for each in made} == {Category.ACTIVATION}
    assert len({each.line for each in made}) == 1, "MLP.forward has one line"
    assert "aten.gelu.default" not in {moment.op for moment in run.memory.steady.moments}


def of_fsdp2(compiles: bool) -> tuple[fxshard.DryRun, list[str]]:
    """Two steps of two layers on four ranks, and the losses as they print."""
    losses = []
    with fxshard.dry_run(world_size=4) as run:
        model = Model().cuda()
        policy = MixedPrecisionPolicy(BF16, torch.float32)
        for layer in model.layers:
            if compiles:
                layer.compile(fullgraph=True)
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        loss_of = torch.compile(cross_entropy) if compiles else cross_entropy
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            tokens = torch.zeros(B, S, dtype=torch.int64, device="cuda")
            loss = loss_of(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(f"{loss.item():.2f}")
            del loss
            run.step()
    return run, losses


def test_fsdp2_around_compiled_blocks_gathers_as_around_eager_ones_and_keeps_less() -> None:
    """FSDP2's hooks run between compiled frames, and there see the GPU as elsewhere."""
    (compiled, losses), (eager, _) = of_fsdp2(True), of_fsdp2(False)
    assert losses == ["unknown", "unknown"]

    def bytes_of(run: fxshard.DryRun, category: Category) -> list[int]:
        found = [r for r in run.memory.steady.ranges if r.category is category]
        return sorted(each.bytes for each in found if not each.host)

    for category in (
        *(Category.SHARDED_PARAM, Category.ALL_GATHER, Category.UNSHARDED_PARAM),
        *(Category.REDUCE_SCATTER, Category.SHARDED_GRAD, Category.OPT_STATE),
    ):
        assert bytes_of(compiled, category) == bytes_of(eager, category) != [], category
    kept = [sum(bytes_of(run, Category.ACTIVATION)) for run in (compiled, eager)]
    assert kept[0] < kept[1]
    operators = [{m.op for m in run.memory.steady.moments} for run in (compiled, eager)]
    fused = {"aten.silu.default", "aten._log_softmax.default", "aten.silu_backward.default"}
    assert fused <= operators[1] and not fused & operators[0]
    assert compiled.device_memory().requested < eager.device_memory().requested


def test_a_whole_model_with_an_embedding_compiles() -> None:
    """The embedding's backward is composed by C++, which asks for CUDA's own library."""
    with fxshard.dry_run(world_size=1) as run:
        model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)).cuda()
        model.compile(fullgraph=True)
        for _ in range(2):
            model(torch.zeros(4, 8, dtype=torch.int64, device="cuda")).sum().backward()
            model.zero_grad()
            run.step()
    made = [each.bytes for each in born(run, "forward", "aten.empty_strided.default")]
    assert made == [4 * 32 * 8, 4 * 32 * 100], "what the embedding gives, and the product"
    grads = [each.bytes for each in born(run, "backward", "aten.empty_strided.default")]
    assert grads.count(4 * 100 * 8) == 2 and max(grads) == 4 * 100 * 8


class Breaking(nn.Module):
    """A graph break between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return torch.sigmoid(self.second(y.to("cuda")))


def test_a_graph_break_and_what_is_left_out_run_in_eager_on_the_gpu() -> None:
    seen: list[Any] = []

    @torch.compiler.disable
    def left_out(x: Tensor) -> Tensor:
        made = torch.ones(8, device="cuda")
        seen.append((x.device, made.is_cuda, str(x.sum().item())))
        return x + made

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Breaking()

        def forward(self, x: Tensor) -> Tensor:
            return left_out(self.inner(x)) * 2

    with fxshard.dry_run(world_size=1) as run:
        model = Around().cuda()
        model.compile()
        for _ in range(2):
            model(torch.zeros(4, 8, device="cuda")).sum().backward()
            assert all(p.grad is not None and p.grad.is_cuda for p in model.parameters())
            model.zero_grad()
            run.step()
    assert seen == 2 * [(torch.device("cuda", 0), True, "unknown")]
    assert not [each for each in run.memory.steady.ranges if each.host]


def test_compiled_code_sees_that_its_tensors_are_on_the_gpu() -> None:
    """Dynamo decides while it traces: `device=x.device`, and branches by device."""

    @torch.compile
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        if x.is_cuda and x.device.type == "cuda" and x.get_device() == 0:
            made = torch.ones(64, device=x.device)
        else:
            made = torch.ones(1)
        return (x.sum() * made).sum(), made

    with fxshard.dry_run(world_size=1, device="h100") as run:
        x = torch.randn(8, device="cuda", requires_grad=True)
        run.step()  # no module is called: the step begins here
        total, made = function(x)
        assert made.shape == (64,) and made.is_cuda
        total.backward()
        run.step()
    assert not [each for each in run.memory.first.ranges if each.host]


def test_what_inductor_cannot_be_followed_in_is_refused_with_the_line() -> None:
    with fxshard.dry_run(world_size=1):
        layer = torch.compile(nn.Linear(4, 4).cuda(), mode="reduce-overhead")
        with pytest.raises(fxshard.CaptureError, match="CUDA graphs") as caught:
            layer(torch.zeros(2, 4, device="cuda"))
        assert "mode='default'" in str(caught.value)

        @torch.compile
        def saved(x: Tensor) -> Tensor:
            return (x * 2).to("cpu")

        with pytest.raises(fxshard.CaptureError, match="asks for the host's memory") as caught:
            saved(torch.zeros(2, 4, device="cuda"))
        assert f"{__file__}:{saved.__wrapped__.__code__.co_firstlineno + 2}" in str(caught.value)
        # After an error of Dynamo's own tensors are where they were asked to be.
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(Breaking().cuda(), fullgraph=True)(torch.zeros(2, 8, device="cuda"))
        assert torch.zeros(2, device="cuda").is_cuda and not torch.zeros(2).is_cuda
