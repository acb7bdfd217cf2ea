"""Backward from any outputs, of any of them in turn, and again: the gradients of eager PyTorch."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxshard
from fxshard.errors import StepError
from tests.eager import Net, pair
from tests.end_to_end.losses_cases import USES, Several, joined, made
from tests.end_to_end.training_cases import assert_same, batch, grads_of
from tests.zoo import MODELS

CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def trains(rank: int, world_size: int, how: str, names: list[str], options: Any) -> int:
    """Each use twice, with gradients added up over all of them; returns the number of programs."""
    ours, eager = made(how, **options), made("eager")
    for number, name in enumerate([*names, *names]):
        USES[name](ours(batch(rank, number)), 1.0)
        joined(eager, USES[name], world_size, number)
        got, want = grads_of(ours), grads_of(eager)
        assert {n for n, g in got.items() if g is None} == {n for n, g in want.items() if g is None}
        assert_same(got, want, **CLOSE)
        if number % 3 == 2:
            for model in (ours, eager):
                model.zero_grad()
    return len(ours._fxshard.variants)


@pytest.mark.parametrize("name", USES)
@pytest.mark.sample(3)
def test_each_on_a_model_of_its_own(name: str) -> None:
    batches = 1
    assert trains(0, batches, "in_process", [name], {}) <= 3


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("how", ["compile", "fully_shard"])
@pytest.mark.sample(2)
def test_all_in_turn_on_ranks(ranks: Any, how: str, options: dict[str, Any]) -> None:
    counts = ranks(2).run(trains, how, list(USES), options)
    assert counts[0] <= 6 and len(set(counts)) == 1


def test_what_no_gradient_arrived_at_leaves_no_nan() -> None:
    """Zero times the infinite derivative of an output that no loss reads."""
    model = made("in_process")
    out = model(batch(0))
    out["loss"].backward()
    assert all(grad is None or grad.isfinite().all() for grad in grads_of(model).values())
    model(batch(0))["risky"].backward()
    assert not model.inlet.weight.grad.isfinite().all()


# -- forward that runs again -----------------------------------------------------------------------


def dropped(net: Net, x: Tensor) -> dict[str, Tensor]:
    y = F.dropout(net.a(x), 0.5)
    return {"loss": y.square().mean(), "y": y}


def normalised(net: Any, x: Tensor) -> dict[str, Tensor]:
    y = net.norm(net.a(x))
    net.seen.add_(1)
    return {"loss": y.square().mean(), "y": y}


def with_norm() -> Net:
    net = Net(normalised)
    net.norm = torch.nn.BatchNorm1d(6)
    return net


@pytest.mark.parametrize("build", [lambda: Net(dropped), with_norm], ids=["dropout", "batch norm"])
def test_it_draws_the_same_numbers_and_writes_buffers_once(build: Any) -> None:
    eager, ours = pair(build)
    for _ in range(3):
        for name in ("y", "loss"):
            for model in (eager, ours):
                torch.manual_seed(7)
                out = model(batch(0))
                after = torch.rand(1)
                out[name].cos().sum().backward()
                assert torch.equal(torch.rand(1), after) is False  # goes on as it was
            assert_same(grads_of(ours), grads_of(eager), **CLOSE)
            assert_same(dict(ours.named_buffers()), dict(eager.named_buffers()), **CLOSE)


def changed_in_between(kind: str) -> Any:
    def forward(net: Net, x: Tensor) -> dict[str, Tensor]:
        y = net.a(x.clone())
        if kind == "a buffer":
            y = y + net.seen
            net.seen.mul_(2)
        if kind == "the input itself":
            x.add_(1)
        return {"loss": y.square().mean(), "y": y}

    return forward


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("a buffer", "has changed buffer 'seen', which it reads"),
        ("the input itself", r"has changed args\[0\]"),
        ("a parameter", "'a.weight' was changed in place"),
        ("the mode", "train or eval changed"),
        ("an input", r"'args\[0\]' was changed in place"),
    ],
)
def test_a_forward_that_cannot_run_again_is_refused(kind: str, text: str) -> None:
    eager, ours = pair(lambda: Net(changed_in_between(kind)))
    x = batch(0)
    out = ours(x)
    if kind == "a parameter":
        with torch.no_grad():
            ours.a.weight.mul_(2)
    if kind == "the mode":
        ours.eval()
    if kind == "an input":
        x.mul_(2)
    with pytest.raises(StepError, match=text):
        out["y"].sum().backward()
    assert all(param.grad is None for param in ours.parameters())
    eager.load_state_dict(ours.state_dict())
    for model in (eager, ours.train()):
        model(batch(0))["y"].cos().sum().backward()
    assert_same(grads_of(ours), grads_of(eager), **CLOSE)


def test_of_any_sizes_and_in_autocast() -> None:
    eager, ours = pair(lambda: Net(dropped).eval())
    for rows in (3, 5, 7, 9):
        for name in ("y", "loss"):
            for model in (eager, ours):
                torch.manual_seed(7)
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(torch.ones(rows, 5))
                out[name].float().sum().backward()
            assert_same(grads_of(ours), grads_of(eager), rtol=1e-2, atol=1e-3)
    assert len(ours._fxshard.variants) <= 6


def accumulates(rank: int, world_size: int) -> None:
    """Under no_sync, with losses that change from one micro-batch to the next."""
    ours, eager = made("compile"), made("eager")
    for step, names in enumerate([("logits", "loss", "logits"), ("aux", "hidden", "loss")]):
        for number, name in enumerate(names):
            use = USES[
                {"logits": "logits", "loss": "the loss", "aux": "the other loss"}.get(
                    name, "hidden states"
                )
            ]
            with ours.no_sync() if number < 2 else contextlib.nullcontext():
                use(ours(batch(rank, step)), 1.0)
            joined(eager, use, world_size, step)
        assert_same(grads_of(ours), grads_of(eager), **CLOSE)
        for model in (ours, eager):
            model.zero_grad()


def test_under_no_sync(ranks: Any) -> None:
    ranks(2).run(accumulates)


def differs(rank: int, world_size: int) -> None:
    model = made("compile")
    model(batch(rank))[("loss", "logits")[rank]].sum().backward()
    model(batch(rank))


def test_ranks_that_make_losses_of_other_outputs_are_told(ranks: Any) -> None:
    found = ranks(2).run_expecting_errors(differs)
    assert all("RankMismatchError" in failure for failure in found)


def test_logits_of_a_model_that_returns_its_loss_too() -> None:
    case = MODELS["llama"]
    eager, ours = pair(case.build)
    args, kwargs = case.batch(0, 0)
    for name in ("logits", "logits", "loss", "logits"):
        for model in (eager, ours):
            model.zero_grad()
            model(*args, **kwargs)[name].square().mean().backward()
        assert_same(grads_of(ours), grads_of(eager), rtol=1e-4, atol=1e-6)
    assert len(ours._fxshard.variants) == 3


# -- known beforehand ------------------------------------------------------------------------------

LOSSES: dict[str, Any] = {
    "logits": lambda out: out["logits"].square().mean(),
    "logits and a loss": lambda out: out["logits"].square().mean() + out["aux"],
    "one loss of three": lambda out: out["aux"],
    "hidden states": lambda out: out["hidden"].square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.sample(2)
def test_static_equals_measured_for_a_loss_of_any_outputs(name: str) -> None:
    found = fxshard.validate(
        Several(), (batch(0),), world_size=2, units=["blocks.*"], loss=LOSSES[name], numerics=True
    )
    assert found.holds, found.table(only_different=True)


def test_a_plan_follows_its_loss() -> None:
    plan = fxshard.plan(Several(), (batch(0),), world_size=2, loss=LOSSES["logits"])
    assert [plan.program.signature.output_names[i] for i in plan.program.signature.tangents] == [
        "['logits']"
    ]
    other = plan.replan(loss=LOSSES["hidden states"])
    assert [other.program.signature.output_names[i] for i in other.program.signature.tangents] == [
        "['hidden']"
    ]
    assert not plan.replan(loss=None).program.signature.starts_everywhere
