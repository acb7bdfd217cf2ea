"""The bytes: static against the tracker, against torch's profiler, and against counts by hand.

`fxshard.validate` compares the analysis with a tracker that shares no code with it; the profiler
sees what neither can (inside kernels) and is torch's own.
"""

import copy
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

import fxshard
from fxshard._torch.trees import tree_flatten
from fxshard.errors import ConfigError, DoesNotFitError
from fxshard.memory.category import Category, State
from tests import oracles
from tests.zoo import MODELS, built

pytestmark = pytest.mark.usefixtures("one_thread")

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize("world_size", [2, 7, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(3)
def test_static_equals_measured_everywhere(name: str, world_size: int) -> None:
    case = MODELS[name]
    model, args, kwargs = built(case)
    result = fxshard.validate(
        model, args, kwargs, world_size=world_size, units=case.units, optimizer=adamw
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)
    assert {cell.step for cell in result.cells} == {1, 2}
    recomputed = {State.PRE_FORWARD_AC, State.POST_FORWARD_AC}  # of checkpoints; none here
    states = {cell.state for cell in result.cells}
    assert states >= {state.value for state in set(State) - recomputed}
    assert result.static_peak_bytes == result.measured_peak_bytes > 0


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.AdamW, lr=1e-3, foreach=True, amsgrad=True),
        functools.partial(torch.optim.Adam, lr=1e-3, fused=True),
        torch.optim.Adagrad,
        torch.optim.AdamW(MODELS["mlp13"].build().parameters(), lr=1e-2, weight_decay=0.1),
    ],
)
@pytest.mark.sample(2)
def test_optimizers_are_analysed_by_running_them(optimizer: Any) -> None:
    case = MODELS["mlp13"]
    model, args, kwargs = built(case)
    result = fxshard.validate(model, args, kwargs, world_size=2, optimizer=optimizer)
    assert result.max_abs_difference == 0, result.table(only_different=True)


def test_gradients_of_inputs_are_counted() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.ones(7, 6, requires_grad=True)
    result = fxshard.validate(model, (x,), world_size=2, optimizer=adamw)
    assert result.max_abs_difference == 0, result.table(only_different=True)


class Hand(nn.Module):
    """One matrix multiplication: small enough to count by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 4))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight.t()).sum()


def test_counts_by_hand() -> None:
    """f32[5,4] over 2 ranks: chunks of 3 rows = 48 bytes, gathered 96 bytes, gradient 80."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    report = fxshard.plan(Hand(), (torch.ones(2, 4),), world_size=2, optimizer=optimizer).memory
    before = report.snapshot("", "Before Pre-Forward", first_step=True)
    assert before == {c: 0 for c in Category} | {
        Category.SHARDED_PARAM: 48,
        Category.BUFFER: 12,
        Category.INPUTS: 32,
    }
    # mm reads the gathered parameter and writes f32[2,5] = 40 bytes.
    peak = report.snapshot("", "Peak Forward", first_step=True)
    assert peak is not None
    assert peak[Category.UNSHARDED_PARAM] == 96 and peak[Category.ACTIVATION] == 40
    # The gradient (80 bytes) does not divide by 2: a padded copy (96) is sent, the result is 48.
    backward = report.snapshot("", "Peak Backward", first_step=True)
    assert backward is not None
    assert backward[Category.REDUCE_SCATTER] == 96
    after = report.snapshot("", "After Post-Backward", first_step=True)
    assert after is not None
    assert after[Category.SHARDED_GRAD] == 48
    # Momentum is kept for the rows that rank 0 owns: 3 x 4 floats.
    steady = report.snapshot("", "Before Pre-Forward")
    assert steady is not None
    assert steady[Category.OPT_STATE] == 48
    assert report.first_step_peak_bytes <= report.peak_bytes


def test_report_speaks() -> None:
    case = MODELS["llama"]
    model, args, kwargs = built(case)
    report = fxshard.plan(
        model, args, kwargs, world_size=2, units=case.units, optimizer=adamw
    ).memory
    text = str(report.explain_peak(3, what_ifs=False))
    assert f"{report.peak_bytes:,} bytes" in text and report.peak_at.node in text
    assert sum(report.peak_by_category.values()) == report.peak_bytes
    assert sum(t.bytes for t in report.alive_at_peak()) == report.peak_bytes
    assert max(total for *_, total in report.timeline()) <= report.peak_bytes
    told = report.to_dict()
    assert told["peak_bytes"] == report.peak_bytes and told["schema"] == "fxshard.memory/2"
    assert {row["module"] for row in told["steady_step"]["rows"]} == set(report.modules())
    for name in ("model.layers.0", "Peak Backward", "OptState"):
        assert name.split(" ")[0] in report.table()


def test_budget() -> None:
    case = MODELS["mlp13"]
    model, args, kwargs = built(case)
    report = fxshard.plan(model, args, kwargs, world_size=2).memory
    report.assert_fits("1GiB")
    with pytest.raises(DoesNotFitError, match="too much"):
        report.assert_fits(report.peak_bytes - 1)
    with pytest.raises(ConfigError, match="80GiB"):
        report.assert_fits("eighty")


def test_unknown_state_lists_the_legal_ones() -> None:
    model, args, kwargs = built(MODELS["mlp13"])
    report = fxshard.plan(model, args, kwargs, world_size=2).memory
    with pytest.raises(ConfigError, match="Peak Forward"):
        report.snapshot("", "Peak")


def test_planning_leaves_no_trace_in_memory_or_model() -> None:
    """Analysis allocates nothing of the model's size and leaves the model untouched."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    params = dict(model.named_parameters())
    x = torch.ones(4, 512)
    peak = oracles.profiler_peak_bytes(
        lambda: fxshard.plan(model, (x,), world_size=4).memory.table()
    )
    assert peak < 512 * 512 * 4
    assert all(model.get_parameter(name) is param for name, param in params.items())


RETURNS: dict[str, Callable[[Tensor, Any], Any]] = {
    "twice": lambda h, net: (h, h),
    "twice, and another": lambda h, net: {"a": h, "b": [h * 2, h], "c": h},
    "an alias": lambda h, net: (h, h.view_as(h)),
    "a detached one": lambda h, net: (h, h.detach(), h),
    "a column": lambda h, net: (h, h[:, 0]),
    "every second": lambda h, net: h[:, ::2],
    "rows": lambda h, net: h[1:],
    "halves": lambda h, net: h.chunk(2),
    "transposed": lambda h, net: (h, h.t()),
    "diagonal": lambda h, net: h.diagonal(),
    "expanded": lambda h, net: h.mean().expand(3),
    "windows": lambda h, net: h.unfold(1, 2, 1),
    "the weight": lambda h, net: (h, net.lin.weight),
    "one column": lambda h, net: torch.linalg.solve_triangular(h.t() @ h, h.t()[:, :1], upper=True),
}


class Returns(nn.Module):
    """A linear layer and what is made of its output; f32[3, 4] -> tensors that share memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Any:
        return RETURNS[self.how](self.lin(x), self)


def total(out: Any) -> Tensor:
    leaves, _ = tree_flatten(out)
    return sum((leaf.square().sum() for leaf in leaves if leaf.requires_grad), torch.zeros(()))


def exponentials(out: Any) -> Tensor:
    """Saves none of the outputs for its backward, which reads what exp made."""
    leaves, _ = tree_flatten(out)
    return sum((leaf.exp().sum() for leaf in leaves if leaf.requires_grad), torch.zeros(()))


@pytest.mark.parametrize(
    ("loss", "keep"),
    [(None, True), (total, True), (total, False), (exponentials, False)],
    ids=["ones", "loss", "loss that saves dropped outputs", "loss of dropped outputs"],
)
@pytest.mark.parametrize("how", RETURNS)
@pytest.mark.sample(20)
def test_outputs_that_share_memory(how: str, loss: Any, keep: bool) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    args: dict[str, Any] = {"world_size": 2, "loss": loss, "keep_outputs": keep}
    result = fxshard.validate(Returns(how), (x,), **args, numerics=True)
    assert result.max_abs_difference == 0, result.table(only_different=True)
    assert result.numerics is not None
    assert result.numerics.verdict != "wrong", result.numerics.table()


class Holder:
    """A loss that is an object, or a method of one."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = {"all": [labels]}

    def __call__(self, out: Tensor) -> Tensor:
        return (out - self.labels["all"][0]).abs().sum()

    def loss(self, out: Tensor) -> Tensor:
        """As the object itself."""
        return self(out)


class ByLabels(torch.autograd.Function):
    """A function whose backward alone reads labels."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, labels: Any) -> Tensor:
        ctx.labels = labels
        return out.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.labels[0], None


def holding(labels: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Losses that hold `labels` in several ways; some hold a tensor too that they never read."""
    unread = torch.zeros(100)
    held, array = {"labels": labels, "unread": unread}, labels.numpy()

    def inner(out: Tensor) -> Tensor:
        return (out - labels).abs().sum()

    def default(out: Tensor, labels: Tensor = labels) -> Tensor:
        return (out - labels).abs().sum()

    def keyword(out: Tensor, *, labels: Tensor = labels) -> Tensor:
        return (out - labels).abs().sum()

    return {
        "closure": lambda out: (out - labels).abs().sum() + 0 * len(unread),
        "dict": lambda out: (out - held["labels"]).abs().sum(),
        "function of a closure": lambda out: 2 * inner(out),
        "object": Holder(labels),
        "method": Holder(labels).loss,
        "default": default,
        "keyword": keyword,
        "partial": functools.partial(lambda held, out: (out - held[0]).abs().sum(), [labels]),
        "new ones": lambda out: (out * torch.tensor(2.0)).sum() + out[[0, 1], [1, 2]].sum(),
        "an array": lambda out: (out * torch.from_numpy(array)).sum(),
        "in backward": lambda out: ByLabels.apply(out, [labels]),
    }


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("how", holding(torch.zeros(1)))
def test_tensors_that_a_loss_holds(how: str, micro_batches: int) -> None:
    loss = holding(torch.randn(3, 4))[how]
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    result = fxshard.validate(model, (x,), world_size=2, loss=loss, micro_batches=micro_batches)
    assert result.max_abs_difference == 0, result.table(only_different=True)


@pytest.mark.parametrize("how", RETURNS)
def test_a_tensor_is_returned_twice_where_eager_does(how: str) -> None:
    eager = Returns(how)
    x = torch.randn(3, 4)
    theirs, _ = tree_flatten(eager(x))
    ours, _ = tree_flatten(fxshard.compile(copy.deepcopy(eager), world_size=2)(x))
    pairs = [*itertools.combinations(range(len(theirs)), 2)]
    assert [ours[i] is ours[j] for i, j in pairs] == [theirs[i] is theirs[j] for i, j in pairs]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "build", [lambda: nn.Linear(4, 4, bias=False), lambda: nn.PReLU(4)], ids=["linear", "prelu"]
)
def test_what_gradients_are_before_they_are_stored(build: Any, world_size: int) -> None:
    """One rank reduces nothing: that a gradient goes to the CPU is all that tells it."""
    result = fxshard.validate(
        build(), (torch.randn(3, 4),), world_size=world_size, offload=CPUOffloadPolicy()
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


def keeps_in_an_object(model: Any) -> None:
    model.kept = types.SimpleNamespace(last=[model(torch.ones(3, 4))])


def keeps_in_a_buffer(model: Any) -> None:
    model.register_buffer("last", model(torch.ones(3, 4)))


def keeps_a_distribution(model: Any) -> None:
    model.prior = torch.distributions.Normal(model(torch.ones(3, 4)), 1.0)


@pytest.mark.parametrize(
    "keep",
    [
        lambda model: nn.utils.weight_norm(model),
        lambda model: setattr(model, "last", model(torch.ones(3, 4))),
        keeps_in_an_object,
        keeps_in_a_buffer,
        keeps_a_distribution,
    ],
    ids=["weight_norm", "attribute", "object", "buffer", "distribution"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_models_that_hold_what_autograd_has_made(keep: Callable[[nn.Module], Any]) -> None:
    model = nn.Linear(4, 4)
    keep(model)
    x = torch.randn(3, 4)
    result = fxshard.validate(model, (x,), world_size=2, numerics=True)
    assert result.max_abs_difference == 0, result.table(only_different=True)
    assert result.numerics is not None
    assert result.numerics.verdict != "wrong", result.numerics.table()
