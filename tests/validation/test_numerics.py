"""`fxshard.validate(numerics=True)`: what is bitwise, close and wrong beside eager PyTorch."""

import copy
import dataclasses
import functools
import json
import math
import re
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

import fxshard
from fxshard.cli import main, steps
from fxshard.config.checked import Config
from fxshard.ir import tags
from fxshard.ir.program import Program
from fxshard.pipeline import default_passes
from fxshard.validation.numerics import RTOL, Numerics, difference, own
from tests.zoo import MODELS, built

aten = torch.ops.aten


def numerics(model: nn.Module, args: Any = (), kwargs: Any = None, **options: Any) -> Numerics:
    found = fxshard.validate(
        model, args, kwargs, **{"world_size": 2, "steps": 1, "numerics": True} | options
    ).numerics
    assert found is not None
    return found


def of_zoo(name: str, **options: Any) -> Numerics:
    case = MODELS[name]
    model, args, kwargs = built(case)
    return numerics(model, args, kwargs, **{"units": case.units, "loss": case.loss} | options)


@dataclasses.dataclass(frozen=True)
class Fault:
    """Puts an operator after a node of the capture: the gradient of a parameter, or a tanh."""

    of: str
    target: Any
    args: tuple[Any, ...] = ()
    name: ClassVar[str] = "fault"
    requires: ClassVar[frozenset[Any]] = frozenset()
    ensures: ClassVar[frozenset[Any]] = frozenset()

    def apply(self, program: Program) -> None:
        values = dict(zip([r.name for r in program.results], program.values, strict=True))
        node = values.get(self.of) or next(n for n in program.phase("forward") if n.name == self.of)
        with program.graph.inserting_after(node):
            changed = program.graph.call_function(self.target, (node, *self.args))
        changed.meta = dict(node.meta)
        tags.update(changed, phase=tags.get(node).phase)
        changed.meta["val"] = self.target(node.meta["val"], *self.args)
        node.replace_all_uses_with(changed, lambda user: user is not changed)
        program.values = [changed if v is node else v for v in program.values]


def with_fault(*fault: Any) -> list[Any]:
    passes: list[Any] = default_passes(Config())
    passes.insert(1, Fault(*fault))
    return passes


def broken(*fault: Any, **options: Any) -> Numerics:
    return of_zoo("mlp13", passes=with_fault(*fault), **options)


# -- bitwise ---------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Every kind of tensor that a step leaves, and a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.5)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor, count: Tensor) -> dict[str, Any]:
        count.add_(1)
        y = self.dropout(self.norm(self.linear(x))) * self.frozen
        return {"loss": y.square().mean(), "y": y, "best": y.argmax(-1), "rows": len(x)}


def test_every_tensor_of_a_step_is_a_row() -> None:
    torch.manual_seed(0)
    model, count = Everything(), torch.zeros(())
    x = torch.randn(4, 5, requires_grad=True)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = numerics(model, (x, count), world_size=3)
    assert {(row.kind, row.name) for row in found.rows} == {
        ("loss", "['loss']"),
        ("output", "['y']"),
        ("output", "['best']"),
        ("output", "['rows']"),
        ("gradient", "linear.weight"),
        ("gradient", "linear.bias"),
        ("gradient", "norm.weight"),
        ("gradient", "norm.bias"),
        ("buffer", "norm.running_mean"),
        ("buffer", "norm.running_var"),
        ("buffer", "norm.num_batches_tracked"),
        ("input gradient", "args[0]"),
        ("input", "args[1]"),
    }
    assert found.verdict == "bitwise", found.table()
    assert found.summary() == "Numbers: all 13 tensors are bitwise equal to eager PyTorch's."
    assert x.grad is None and torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():  # the user's model is as it was
        assert torch.equal(value, before[name])
    assert all(param.grad is None for param in model.parameters())


def test_without_the_flag_there_are_none() -> None:
    assert fxshard.validate(nn.Linear(3, 3), (torch.ones(2, 3),), world_size=2).numerics is None


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KEPT = MixedPrecision(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.bfloat16,
    buffer_dtype=torch.bfloat16,
    keep_low_precision_grads=True,
)


@pytest.mark.parametrize(
    "options",
    [
        {"mixed_precision": BF16, "micro_batches": 2},
        {"mixed_precision": BF16, "micro_batches": 3, "no_sync": True},
        {"mixed_precision": KEPT},
        {"strategy": "hybrid_shard", "world_size": (2, 3)},
        {"optimizer": torch.optim.AdamW, "optimizer_in_backward": True},
        {"reduce_op": "sum"},
        {"gradient_divide_factor": 2.0, "ignored": ["head"]},
        {"checkpoint": "full", "reshard_after_forward": 2, "world_size": 4},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.sample(3)
def test_bitwise_under_options(options: dict[str, Any]) -> None:
    found = of_zoo("mlp13", **options)
    assert found.verdict == "bitwise", found.table(only_different=True)
    gradients = {row.name for row in found.rows if row.kind == "gradient"}
    assert gradients == {name for name, _ in MODELS["mlp13"].build().named_parameters()}


def test_bitwise_in_eval_in_full_precision() -> None:
    """What is sharded in eval mode keeps its buffers as they are until it trains."""
    policy = dataclasses.replace(KEPT, _module_classes_to_ignore=())
    options: dict[str, Any] = {"mixed_precision": policy, "full_precision_in_eval": True}
    for training in (False, True):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train(training)
        nn.init.uniform_(model.get_buffer("1.running_mean"))
        made = fxshard.validate(model, (torch.ones(2, 3),), world_size=2, numerics=True, **options)
        assert made.numerics is not None and made.numerics.verdict == "bitwise"
        assert made.holds and not made.max_abs_difference


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bitwise_models(name: str) -> None:
    for options in ({"world_size": 3}, {"checkpoint": "full"}):
        found = of_zoo(name, **options)
        assert found.verdict == "bitwise", found.table(only_different=True)


# -- close -----------------------------------------------------------------------------------------


def test_close_where_divisions_round() -> None:
    """Dividing by 3 before the reduction and by 1 after it is not the average's rounding."""
    found = of_zoo("mlp13", world_size=3, gradient_predivide_factor=3.0)
    assert found.verdict == "close", found.table(only_different=True)
    close = found.of("close")
    assert {row.kind for row in close} == {"gradient"}
    assert 0 < max(row.max_rel for row in close) <= 2 * torch.finfo(torch.float32).eps
    assert f"{len(close)} close (within " in found.summary() and "0 wrong." in found.summary()


def test_the_tolerance_is_that_of_the_coarsest_dtype() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    found = of_zoo("mlp13", world_size=3, mixed_precision=policy)
    assert found.verdict == "close", found.table(only_different=True)
    farthest = max(row.max_rel for row in found.rows)
    assert RTOL[torch.float32] < farthest < RTOL[torch.float16]  # .grad itself is fp32


class Attention(nn.Module):
    """A key's bias shifts all scores of a query alike: its gradient is rounding and nothing else.

    (A softmax does not see the shift.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        return (scores.softmax(-1) @ self.v(x)).square().sum()


@pytest.mark.slow  # Inductor compiles for ten seconds
def test_rounding_is_judged_by_eagers_own() -> None:
    torch.manual_seed(0)
    found = numerics(Attention(), (torch.randn(2, 8, 16),), backend="inductor")
    assert found.verdict == "close", found.table()
    (bias,) = [row for row in found.rows if row.name == "k.bias"]
    assert bias.max_rel > RTOL[torch.float32] and "from fp64" in bias.note


def test_a_fault_in_rounding_alone_is_rounding() -> None:
    """Half as much again of k.bias's gradient; the same of v.bias's, which is none, is a fault."""
    for name, verdict in (("k.bias", "close"), ("v.bias", "wrong")):
        torch.manual_seed(0)
        passes = with_fault(name, aten.mul.Tensor, (1.5,))
        found = numerics(Attention(), (torch.randn(2, 8, 16),), passes=passes)
        (row,) = found.of("close", "wrong")
        assert (row.name, row.verdict) == (name, verdict) and "from fp64" in row.note


class Noisy(nn.Module):
    """Draws other numbers in fp64 (24 random bits make an fp32, 53 an fp64)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.rand(x.shape, dtype=x.dtype)).square().sum()


class Fp32Only(nn.Module):
    """Raises in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) @ torch.ones(6, 2)).square().sum()


@pytest.mark.parametrize("build", [Noisy, Fp32Only])
def test_where_fp64_shows_nothing_a_fault_is_wrong(build: Any) -> None:
    passes = with_fault("linear.bias", aten.mul.Tensor, (1.01,))
    found = numerics(build(), (torch.randn(4, 6),), passes=passes)
    (row,) = found.of("wrong")
    assert row.name == "linear.bias" and row.note == ""


# -- wrong -----------------------------------------------------------------------------------------


def test_one_gradient_scaled_is_wrong_by_name() -> None:
    found = broken("head.bias", aten.mul.Tensor, (1.001,))
    assert [(row.kind, row.name) for row in found.of("wrong")] == [("gradient", "head.bias")]
    assert found.of("close") == () and found.verdict == "wrong"
    assert found.of("wrong")[0].max_rel == pytest.approx(1e-3, rel=1e-3)
    assert found.summary().endswith("1 wrong: gradient head.bias.")
    assert found.table(only_different=True).splitlines()[2].split()[:3] == [
        "wrong",
        "gradient",
        "head.bias",
    ]


def test_a_tiny_gradient_scaled_is_wrong() -> None:
    """torch.testing's absolute tolerance of 1e-5 would pass it."""
    small = 1e-9
    case = MODELS["mlp13"]
    fault = "head.bias", aten.mul.Tensor, (1.001,)
    found = broken(*fault, loss=lambda out: small * case.loss(out))
    assert [row.name for row in found.of("wrong")] == ["head.bias"]
    assert found.of("wrong")[0].max_abs < 1e-10


def test_a_negated_activation_is_wrong_from_there_on() -> None:
    found = broken("tanh_2", aten.neg.default)
    wrong = {row.name for row in found.of("wrong")}
    assert "loss" in wrong and "blocks.2.linear.weight" in wrong and "inlet.weight" in wrong
    assert found.verdict == "wrong"


def test_a_fault_under_bf16_is_wrong() -> None:
    found = broken("head.bias", aten.mul.Tensor, (1.1,), mixed_precision=BF16)
    assert [row.name for row in found.of("wrong")] == ["head.bias"]


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0])
def test_a_gradient_lost_or_negated_under_bf16_is_wrong(factor: float) -> None:
    """Eager's own is 40% from fp64: half of the value is no rounding all the same."""
    name = "blocks.1.gain"
    found = broken(name, aten.mul.Tensor, (factor,), mixed_precision=BF16)
    assert name in [row.name for row in found.of("wrong")]


class OtherWhenTraced(nn.Module):
    """What a trace cannot see: state outside of the module that changes."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.linear(x) if torch.compiler.is_compiling() else 2 * self.linear(x)


def test_a_model_that_is_another_while_tracing_is_wrong() -> None:
    found = numerics(OtherWhenTraced(), (torch.ones(2, 3),))
    assert {row.name for row in found.of("wrong")} == {"linear.weight", "linear.bias", "output"}


# -- two tensors -----------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("ours", "eager", "verdict", "largest"),
    [
        ([1.0, NAN], [1.0, NAN], "bitwise", 0),
        ([1.0 + 1e-6, NAN, INF], [1.0, NAN, INF], "close", pytest.approx(1e-6, rel=0.1)),
        ([1.0, 2.0], [1.0, NAN], "wrong", INF),
        ([1.0, NAN], [1.0, 2.0], "wrong", INF),
        ([1.0, INF], [1.0, -INF], "wrong", INF),
        ([1.0, INF], [1.0, 3e38], "wrong", INF),
        ([0.0], [-0.0], "close", 0),
        ([1e-9], [0.0], "wrong", pytest.approx(1e-9)),
        ([1e-7, 1.0], [2e-7, 1.0], "close", pytest.approx(1e-7)),  # small beside the largest
        ([], [], "bitwise", 0),
    ],
)
def test_differences(ours: list[float], eager: list[float], verdict: str, largest: Any) -> None:
    row = difference(("gradient", "w"), torch.tensor(ours), torch.tensor(eager))
    assert (row.verdict, row.max_abs) == (verdict, largest)
    if math.isinf(row.max_abs):
        assert row.note


@pytest.mark.parametrize("dtype", RTOL)
def test_tolerances_are_those_of_assert_close(dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError) as complaint:
        torch.testing.assert_close(torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype))
    (allowed,) = re.findall(r"relative difference.*\(up to (\S+) allowed\)", str(complaint.value))
    assert RTOL[dtype] == float(allowed)


def test_what_cannot_be_close() -> None:
    three, four = torch.tensor([3]), torch.tensor([4])
    assert difference(("output", "y"), three, four, torch.bfloat16).verdict == "wrong"
    for ours, eager, note in (
        (None, torch.ones(2), "the compiled program has none"),
        (torch.ones(2), None, "eager has none"),
        (torch.ones(2), torch.ones(2, 1), "compiled: [2] float32"),
        (torch.ones(2), torch.ones(2).double(), "compiled: [2] float32"),
    ):
        row = difference(("gradient", "w"), ours, eager)
        assert (row.verdict, row.max_abs, row.note) == ("wrong", INF, note)


# -- the command line ------------------------------------------------------------------------------

TINY = ("--model", "tests.cli.test_cli:blocks", "--world-size", "2", "--steps", "1")


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.main(["validate", *TINY, "--numerics"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("bitwise equal to eager PyTorch's.\n") and "gradient" not in said
    assert main.main(["validate", *TINY, "--numerics", "--all"]) == 0
    assert "bitwise    gradient" in capsys.readouterr().out
    passes = with_fault("0.linear.bias", aten.neg.default)
    monkeypatch.setattr(steps, "options", lambda args: {"passes": passes})
    assert main.main(["validate", *TINY, "--numerics", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["numerics"]["rows"]
    assert "wrong" in {row["verdict"] for row in rows}
    assert main.main(["validate", *TINY, "--numerics"]) == 1
    assert "1 wrong: gradient 0.linear.bias." in capsys.readouterr().out


class Unused(nn.Module):
    """Trainable parameters, none of which reaches what it returns; and integers, which cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.numbers = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.numbers


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("loss", [None, torch.sum])
def test_where_nothing_trains_there_is_no_backward(loss: Any, in_backward: bool) -> None:
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    options = {"optimizer": optimizer, "optimizer_in_backward": in_backward}
    result = fxshard.validate(
        Unused(), (torch.randn(3, 4),), world_size=2, loss=loss, numerics=True, **options
    )
    assert result.holds, result.table(only_different=True)
    assert not result.numerics.of("wrong") and {phase for _, phase, _ in result.points} == {
        "forward"
    }
    assert not fxshard.compile(Unused(), world_size=2)(torch.randn(3, 4)).requires_grad


def test_copies_of_a_call_are_of_its_kind() -> None:
    """A plain tensor in place of an nn.Parameter hid that it got no gradient."""
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    call = ((torch.ones(2), nn.Parameter(torch.ones(2))), {"w": frozen})
    (x, w), kwargs = own(call)
    assert [type(t) for t in (x, w, kwargs["w"])] == [Tensor, nn.Parameter, nn.Parameter]
    assert [t.requires_grad for t in (x, w, kwargs["w"])] == [False, True, False]
