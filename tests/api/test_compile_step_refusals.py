"""What fxshard.compile_step refuses, by name and with a remedy; nothing is changed then."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import LBFGS, Adafactor, AdamW, Muon

import fxshard
from fxshard import CaptureError, ConfigError, StepError
from tests.api.compile_step_cases import UNITS, batch, loss_fn, net
from tests.ranks import Failure

Refused = Callable[[], object]


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2)


def hooked(model: nn.Module) -> AdamW:
    made = adamw(model)
    made.register_step_pre_hook(lambda *args: None)
    return made


def beside(model: nn.Module) -> AdamW:
    return AdamW([*model.parameters(), nn.Parameter(torch.ones(3))])


OF_OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "closure": (lambda m: LBFGS(m.parameters()), "optimizer LBFGS cannot step this rank"),
    "by norms": (lambda m: Adafactor(m.parameters()), "optimizer Adafactor cannot step this rank"),
    "matrices": (
        lambda m: Muon([p for p in m.parameters() if p.dim() == 2]),
        "fxshard.compile_step with Muon: .* needs all rows of a matrix. Train by a loop",
    ),
    "differentiable": (
        lambda m: AdamW(m.parameters(), differentiable=True),
        "differentiable=True",
    ),
    "hooks": (hooked, "the AdamW has hooks before its step .optimizer_step_pre_hooks.*Remove"),
    "parameters beside": (beside, r"holds a parameter of shape \[3\] that is none of the model's"),
    "parameters left out": (
        lambda m: AdamW(m.get_submodule("head").parameters()),
        "parameter 'first.weight' requires a gradient, and is in no group .*Freeze it",
    ),
    "none": (lambda m: None, "the optimizer is missing"),
    "no optimizer": (lambda m: 3, "expected a callable params -> torch.optim.Optimizer"),
    "a wrong callable": (
        lambda m: functools.partial(AdamW, lr=-1.0),
        "could not be made over the parameters",
    ),
}

OF_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": ({"optimizer": AdamW}, "the optimizer was given twice"),
    "offload": ({"offload": CPUOffloadPolicy()}, "offload=.*: the host waits .*Train by a loop"),
    "stage": ({"pipeline_stage": True}, "pipeline_stage=.*: the schedule of a pipeline"),
    "ranks": ({"ranks_may_differ": True}, "ranks_may_differ"),
    "sizes": ({"dynamic": {"batch": [("x", 0)]}}, "dynamic=.*: each size of a step gets a program"),
    "budget": ({"memory_budget": "1GiB"}, "memory_budget=.*what fxshard.plan has chosen"),
    "ignored": ({"ignored": ["head"]}, "parameter 'head.weight' is ignored and requires"),
    "passes": ({"passes": lambda default: default[:3]}, "without 'insert-step'"),
    "a norm": ({"max_norm": -1.0}, "max_norm=-1.0: expected a number > 0, or None"),
    "another norm": ({"max_norm": "1"}, "max_norm='1': expected a number > 0"),
}


def unchanged(model: nn.Module, optimizer: Any, refused: Refused, match: str, error: Any) -> None:
    """All of model and optimizer is the same object as before."""
    params = dict(model.named_parameters())
    kinds = [type(module) for module in model.modules()]
    held = dict(vars(optimizer)) if isinstance(optimizer, torch.optim.Optimizer) else {}
    groups = [list(group["params"]) for group in getattr(optimizer, "param_groups", [])]
    kind = type(optimizer)
    with pytest.raises(error, match=match):
        refused()
    assert [type(module) for module in model.modules()] == kinds
    now = dict(model.named_parameters())
    assert now.keys() == params.keys() and all(now[name] is params[name] for name in now)
    assert "_fxshard" not in vars(model)
    assert type(optimizer) is kind
    if held:
        assert vars(optimizer).keys() == held.keys()
        after = [list(group["params"]) for group in optimizer.param_groups]
        assert list(map(list, map(functools.partial(map, id), after))) == [
            [id(param) for param in group] for group in groups
        ]
        if not any(held[name] for name in held if name.startswith("_optimizer_step")):
            loss_fn(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()  # and it still steps


@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_optimizers(name: str) -> None:
    make, match = OF_OPTIMIZERS[name]
    model = net()
    optimizer = make(model)
    call = functools.partial(fxshard.compile_step, model, loss_fn, optimizer, world_size=2)
    unchanged(model, optimizer, call, match, ConfigError)


@pytest.mark.parametrize("name", OF_OPTIONS)
def test_options(name: str) -> None:
    options, match = OF_OPTIONS[name]
    model = net()
    optimizer = adamw(model)
    call = functools.partial(
        fxshard.compile_step, model, loss_fn, optimizer, world_size=2, args=batch(0, 0), **options
    )
    unchanged(model, optimizer, call, match, ConfigError)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Any, target: Any) -> Any:
        return self.scale * loss_fn(output, target)


LOSSES: dict[str, tuple[Any, Any, str]] = {
    "no function": (3, ConfigError, "expected the loss, a function"),
    "learned": (Learned(), ConfigError, "the loss, a Learned, has parameters .*submodule"),
    "by sample": (
        lambda o, t: F.cross_entropy(o, t, reduction="none"),
        CaptureError,
        r"the loss returns is a tensor of shape \[4\].*loss.mean\(\)",
    ),
    "several": (lambda o, t: (loss_fn(o, t), o), CaptureError, "the loss returns is a tuple"),
    "a number": (lambda o, t: 3.0, CaptureError, "the loss returns is a float"),
    "detached": (
        lambda o, t: loss_fn(o, t).detach(),
        CaptureError,
        "the loss returns is a tensor that needs no gradient",
    ),
    "of values": (lambda o, t: o.sum() if o.sum() > 0 else loss_fn(o, t), CaptureError, "value"),
    "of the model": (None, CaptureError, r"the model returns is a tensor of shape \[4, 3\]"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss, error, match = LOSSES[name]
    model = net()
    optimizer = adamw(model)
    args = batch(0, 0) if loss is not None else batch(0, 0)[:1]
    call = functools.partial(fxshard.compile_step, model, loss, optimizer, world_size=2, args=args)
    unchanged(model, optimizer, call, match, error)


def made(**options: Any) -> Any:
    model = net()
    return fxshard.compile_step(model, loss_fn, adamw(model), world_size=2, units=UNITS, **options)


def test_a_model_that_is_sharded_has_its_options() -> None:
    model = fxshard.compile(net(), world_size=2, units=UNITS)
    with pytest.raises(ConfigError, match=r"units=.*: the model is sharded already"):
        fxshard.compile_step(model, loss_fn, adamw(model), units=UNITS)
    own = fxshard.compile(net(), world_size=2, optimizer=AdamW)
    with pytest.raises(ConfigError, match="the optimizer is an argument"):
        fxshard.compile_step(own, loss_fn, own.optimizer)


def test_nothing_was_traced() -> None:
    step = made()
    with pytest.raises(StepError, match=r"nothing is traced yet.*args=\(batch, target\)"):
        print(step.memory)
    assert made(args=batch(0, 0)).memory.peak_bytes > 0


def without_grad(step: Any) -> None:
    with torch.no_grad():
        step(*batch(0, 0))


def under_no_sync(step: Any) -> None:
    with step.model.no_sync():
        step(*batch(0, 0))


def after_no_sync(step: Any) -> None:
    with step.model.no_sync():
        loss_fn(step.model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    step(*batch(0, 0))


def with_a_gradient(step: Any) -> None:
    loss_fn(step.model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    step(*batch(0, 0))


def with_a_parameter_hook(step: Any) -> None:
    next(step.model.parameters()).register_hook(lambda grad: grad)
    step(*batch(0, 0))


def with_a_module_hook(step: Any) -> None:
    step.model.register_forward_hook(lambda *args: None)
    step(*batch(0, 0))


def with_a_learned_input(step: Any) -> None:
    x, y = batch(0, 0)
    step(x.requires_grad_(), y)


def without_target(step: Any) -> None:
    step()


def unsharded(step: Any) -> None:
    with step.model.summon_full_params():
        step(*batch(0, 0))


def with_a_step_hook(step: Any) -> None:
    step.optimizer.register_step_pre_hook(lambda *args: None)
    step(*batch(0, 0))


def with_a_scaler(step: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(step(*batch(0, 0)))
    scaler.step(step.optimizer)


CALLS: dict[str, tuple[Callable[[Any], None], str]] = {
    "no gradients": (without_grad, "gradients are off .*Call the step outside"),
    "no_sync": (under_no_sync, "no_sync accumulates gradients over calls.*train by a loop"),
    "accumulated": (after_no_sync, "accumulated. Call model.zero_grad"),
    "gradients": (with_a_gradient, "has a gradient from outside .*.grad = None drops it"),
    "a hook of a parameter": (with_a_parameter_hook, "has a hook on its gradient, which fxshard.c"),
    "a hook of the model": (with_a_module_hook, "the model has a forward hook of its own"),
    "an input": (with_a_learned_input, "an input requires a gradient.*Detach it"),
    "no target": (without_target, "was called without a target"),
    "a hook before the step": (with_a_step_hook, "has hooks before its step"),
    "unsharded": (unsharded, "a step inside of summon_full_params"),
    "a scaler": (with_a_scaler, "a GradScaler with .*fxshard.compile_step"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call, match = CALLS[name]
    step = made(max_norm=1.0)
    step(*batch(0, 1))
    before = {key: value.clone() for key, value in step.model.state_dict().items()}
    with pytest.raises((StepError, CaptureError, ConfigError), match=match):
        call(step)
    if name != "a scaler":
        for key, value in step.model.state_dict().items():
            assert torch.equal(value, before[key]), key


def test_too_many_sizes() -> None:
    step = made(max_variants=1)
    x, y = batch(0, 0)
    step(x, y)
    with pytest.raises(StepError, match=r"needs one more program: args.0. is .*max_variants"):
        step(x[:2], y[:2])


def of_ranks(rank: int, world_size: int) -> None:
    """One rank alone is wrong."""
    model = net()
    step = fxshard.compile_step(model, loss_fn, adamw(model), max_norm=1.0, units=UNITS)
    x, y = batch(rank, 0)
    step(x, y)
    step(x[:3].clone().requires_grad_(rank == 0), y[:3])


def test_a_refusal_of_one_rank_ends_the_others(ranks: Any) -> None:
    """It leaves the group, so that none waits. (The pool starts anew after errors.)"""
    mine, theirs = ranks(2).run_expecting_errors(of_ranks)
    assert "RankMismatchError" in mine and "an input requires a gradient" in mine
    assert isinstance(theirs, Failure)
