"""The ledger: owners, calls, phases, and what a step does outside of the model, counted by hand."""

import cProfile
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import fxshard
from fxshard._torch import autograd
from fxshard.errors import ConfigError
from fxshard.memory import liveness
from fxshard.memory.category import Category, State
from fxshard.memory.held import held_ranges
from fxshard.memory.ledger import LOSS, OPTIMIZER
from fxshard.memory.report import MemoryReport
from tests.zoo import MODELS

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


def report_of(name: str, **options: Any) -> MemoryReport:
    case = MODELS[name]
    torch.manual_seed(0)
    args, kwargs = case.batch(0, 0)
    options = {"world_size": 3, "units": case.units, "optimizer": adamw} | options
    return fxshard.plan(case.build(), args, kwargs, **options).memory


# -- owners ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {}), ("tied", {"micro_batches": 2}), ("convnet", {"checkpoint": "full"})],
)
def test_owned_bytes_add_up_at_every_node(name: str, options: dict[str, Any]) -> None:
    report = report_of(name, **options)
    for first in (True, False):
        ledger = report.ledger(first_step=first)
        for tick in range(len(ledger.totals)):
            owned = report.owned_at(tick, first_step=first)
            assert sum(sum(each.values()) for each in owned.values()) == ledger.totals[tick]


def test_owned_rows_are_the_modules_of_the_model_and_what_is_outside() -> None:
    report = report_of("llama")
    owners = {each.module for each in report.ledger().ranges}
    named = {name for name, _ in MODELS["llama"].build().named_modules()}
    assert owners <= named | {OPTIMIZER} and OPTIMIZER in owners
    ledger = report.ledger()
    for where, size in report.owned().items():
        assert size == sum((report.snapshot(*where[:2], owned=True) or {}).values()), where
    # Parameters, their gradients and optimizer states are their module's.
    head = [r for r in ledger.ranges if r.module == "lm_head" and r.born < 0]
    assert {r.name for r in head} >= {"lm_head.weight", "exp_avg of lm_head.weight"}


class Twice(nn.Module):
    """A block that is called twice, on 2 and on 3 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh())
        self.other = nn.Linear(8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.block(x[:2])).sum() + self.other(self.block(x[2:])).sum()


def test_every_call_of_a_module_has_its_rows() -> None:
    report = fxshard.plan(Twice(), (torch.ones(5, 4),), world_size=1, units=[]).memory
    rows = {w: cell for w, cell in report.rows().items() if w.module == "block.1"}
    assert {w.call for w in rows} == {0, 1}
    ends = [
        report.snapshot("block.1", "After Post-Forward", call=call, owned=True) for call in (0, 1)
    ]
    # tanh saves its result: f32[2,8] = 64 bytes of the first call; f32[3,8] = 96 of the second.
    assert [end[Category.ACTIVATION] for end in ends if end] == [64, 64 + 96]
    backward = report.snapshot("block.1", "After Post-Backward", call=1, owned=True)
    assert backward is not None  # of the second call first: the first one's is still there
    assert backward[Category.ACTIVATION] >= 64
    assert report.snapshot("block.1", "Peak Forward", call=2) is None


class Again(nn.Module):
    """Two matrix products with a tanh between, checkpointed by option."""

    def __init__(self) -> None:
        super().__init__()
        up, down = nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False)
        self.block = nn.Sequential(up, nn.Tanh(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).square().sum()


def test_what_a_checkpoint_recomputes_has_its_states() -> None:
    x = torch.ones(5, 4)
    plain = fxshard.plan(Again(), (x,), world_size=1).memory
    assert plain.snapshot("block", "Pre-Forward AC") is None
    report = fxshard.plan(Again(), (x,), world_size=1, checkpoint={"block": "full"}).memory
    before = report.snapshot("block", State.PRE_FORWARD_AC)
    after = report.snapshot("block", State.POST_FORWARD_AC)
    assert before is not None and after is not None
    # The result of tanh, f32[5,8], is what backward misses; the product before it dies again.
    assert sum(after.values()) - sum(before.values()) == 160
    saved = [r.snapshot("block", "After Post-Forward", owned=False) for r in (plain, report)]
    assert saved[0] and saved[1]
    assert saved[0][Category.ACTIVATION] - saved[1][Category.ACTIVATION] == 160
    assert report.snapshot("", "Pre-Forward AC") is None  # the root is not repeated


# -- phases ----------------------------------------------------------------------------------------


def test_each_micro_batch_is_a_phase() -> None:
    report = report_of("mlp13", micro_batches=3)
    names = [(p.phase, p.micro_batch) for p in report.phases()]
    each = [(phase, i) for i in range(3) for phase in ("forward", "backward")]
    assert names == [*each, ("optimizer", -1), ("zero_grad", -1)]
    grads = [
        report.snapshot("", "Before Pre-Forward", micro_batch=i)[Category.SHARDED_GRAD]
        for i in range(3)
    ]
    plan = MODELS["mlp13"].build()
    # Rank 0 of 3 holds ceil(rows / 3) rows of each gradient, from the first micro-batch on.
    rows = sum(-(-p.shape[0] // 3) * p[0].numel() for p in plan.parameters())
    assert grads == [0, 4 * rows, 4 * rows]
    first = {w.micro_batch for w in report.rows()}
    assert first == {0, 1, 2}
    with pytest.raises(ConfigError, match="the step has 3"):
        report.snapshot("", "Peak Forward", micro_batch=3)


def test_no_sync_holds_unsharded_gradients_between_micro_batches() -> None:
    report = report_of("mlp13", micro_batches=2, no_sync=True)
    model = MODELS["mlp13"].build()
    second = report.snapshot("", "Before Pre-Forward", micro_batch=1)
    assert second is not None
    assert second[Category.UNSHARDED_GRAD] == sum(4 * p.numel() for p in model.parameters())
    assert second[Category.SHARDED_GRAD] == 0


class Spectrum(nn.Module):
    """f32[batch, 4] -> f32 scalar, by a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.basis = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).to(torch.complex64) @ self.basis).abs().square().sum()


@pytest.mark.parametrize("ranks", ["fake", "processes"])
def test_complex_gradients_are_accumulated_in_their_own_dtype(ranks: Any) -> None:
    """On gloo ranks, each on its own batch, their numbers are compared with eager's too."""
    found = fxshard.validate(
        Spectrum(),
        (torch.randn(2, 4),),
        world_size=2,
        micro_batches=2,
        no_sync=True,
        mixed_precision=MixedPrecisionPolicy(reduce_dtype=torch.float32),
        ranks=ranks,
    )
    assert found.holds and found.max_abs_difference == 0, found.summary()


class Logits(nn.Module):
    """f32[batch, 10] logits of f32[batch, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(x)))


LABELS = torch.arange(4)


class Constant(torch.autograd.Function):
    """A loss whose backward gives a tensor that was there before."""

    grad = torch.ones(4, 10)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Constant.grad


LOSSES = {
    "cross_entropy": lambda out: F.cross_entropy(out, LABELS),
    "mean": lambda out: out.mean(),
    "sum": lambda out: out.sum(),
    "transposed": lambda out: (out.t().exp() * 2).mean(),
    "detached": lambda out: (out * out.detach()).sum() + F.cross_entropy(out, LABELS),
    "module": functools.partial(nn.CrossEntropyLoss(weight=torch.ones(10)), target=LABELS),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_outputs": False},
        {"optimizer_in_backward": True},
        {"micro_batches": 2, "no_sync": True},
        {"micro_batches": 2, "keep_outputs": False},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.sample(12)
def test_the_loss_outside_is_exact(name: str, options: dict[str, Any]) -> None:
    result = fxshard.validate(
        *(Logits(), (torch.ones(4, 6),)),
        **{"world_size": 2, "optimizer": adamw, "loss": LOSSES[name], **options},
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)
    assert {"Peak Loss", "Peak Loss backward"} <= {cell.state for cell in result.cells}


def test_outputs_that_the_loop_drops_by_hand() -> None:
    """log_softmax saves its own output: f32[4,10] of logits go when the loss is there."""
    options = {"world_size": 2, "loss": LOSSES["cross_entropy"]}
    died = {}
    for keep in (True, False):
        plan = fxshard.plan(Logits(), (torch.ones(4, 6),), keep_outputs=keep, **options)
        ledger = plan.memory.ledger()
        (logits,) = (r for r in ledger.ranges if r.bytes == 160 and r.op.startswith("aten.addmm"))
        assert logits.died is not None
        died[keep] = [p.name for p in ledger.phases if p.start <= logits.died // 2][-1]
    assert died == {True: "backward", False: "loss"}
    with pytest.raises(ConfigError, match=r"keep_outputs=False without a loss.*output\.loss"):
        fxshard.plan(Logits(), (torch.ones(4, 6),), world_size=2, keep_outputs=False)


def test_the_loss_outside_by_hand() -> None:
    report = fxshard.plan(
        Logits(), (torch.ones(4, 6),), world_size=2, loss=LOSSES["cross_entropy"]
    ).memory
    loss = next(p for p in report.phases() if p.phase == "loss")
    held = {r.name: r for r in report.ledger().ranges if r.module == LOSS and r.born < 0}
    assert held["held by the loss"].bytes == 4 * 8  # int64 labels
    # log_softmax makes f32[4,10], nll_loss a scalar and a total weight, which are saved.
    assert loss.end_bytes - sum(loss.start) == 160 + 4 + 4


@pytest.mark.parametrize("device", [None, "cuda"])
def test_labels_may_be_on_the_meta_device(device: Any) -> None:
    """What a loss holds counts by its sizes, whatever device the model is planned on."""

    def report(where: str) -> Any:
        labels = torch.zeros(4, dtype=torch.int64, device=where)
        loss = functools.partial(F.cross_entropy, target=labels)
        plan = fxshard.plan(Logits(), (torch.ones(4, 6),), world_size=2, loss=loss, device=device)
        held = [r.bytes for r in plan.memory.ledger().ranges if r.name == "held by the loss"]
        return plan.memory.to_csv(), held

    assert report("meta") == report("cpu")
    assert report("meta")[1] == [4 * 8]


def test_a_loss_may_give_a_gradient_that_was_there_before() -> None:
    def peak(loss: Any) -> int:
        plan = fxshard.plan(Logits(), (torch.ones(4, 6),), world_size=2, loss=loss)
        return plan.memory.peak_bytes

    # What a plain sum gives back is made anew and is f32[4,10] too: after it they are the same.
    assert peak(Constant.apply) == peak(torch.sum)


def test_the_gradient_of_an_output_dies_after_its_last_reader() -> None:
    plan = fxshard.plan(Logits(), (torch.ones(4, 6),), world_size=2, loss=LOSSES["cross_entropy"])
    ledger = plan.memory.ledger()
    (grad,) = (r for r in ledger.ranges if "_log_softmax_backward_data" in r.op)
    assert grad.bytes == 160 and grad.died is not None
    left = [moment.op for moment in ledger.moments[grad.died // 2 + 1 :]]
    # The head's gradients are made of it; after them are tanh's and the hidden layer's.
    assert any(op.startswith("aten.tanh_backward") for op in left) is autograd.BOXED_GRADS


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out, "scalar"),
        (lambda out: out.detach().sum().requires_grad_(), "sends no gradient"),
        (lambda out: F.cross_entropy(out, torch.arange(3)), "cannot be analysed"),
    ],
)
def test_a_loss_that_cannot_be_analysed_is_refused(loss: Any, message: str) -> None:
    plan = fxshard.plan(Logits(), (torch.ones(4, 6),), world_size=2, loss=loss)
    with pytest.raises(ConfigError, match=message):
        plan.memory.peak_bytes  # noqa: B018


# -- cost ------------------------------------------------------------------------------------------


def calls_of_analysis(blocks: int) -> float:
    """Python function calls of the analysis, per operator of the program."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(blocks)))
        x = torch.empty(2, 8)
    plan = fxshard.plan(model, (x,), world_size=8)
    held = held_ranges(model, plan.workload.call, plan.program)
    profile = cProfile.Profile()
    profile.enable()
    report = liveness.analyse(plan.programs, held, None)
    report.peak_bytes, report.rows(), report.owned()
    profile.disable()
    calls = sum(entry.callcount for entry in profile.getstats())
    return calls / sum(p.points for p in report.ledger().phases)


def test_the_analysis_is_linear() -> None:
    """As many calls per operator in a model of 32 as in one of 128 layers."""
    assert calls_of_analysis(128) == pytest.approx(calls_of_analysis(32), rel=0.05)
