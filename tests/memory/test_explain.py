"""The peak explained, and asked again with something changed.

Each figure of a what-if is held against a plan made from scratch with it, and against
bytes measured by `fxshard.validate`.
"""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard.errors import ConfigError
from fxshard.memory.category import Category
from fxshard.memory.explain import WhatIf
from tests.zoo import MODELS

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def planned(name: str, **options: Any) -> fxshard.Plan:
    case = MODELS[name]
    torch.manual_seed(0)
    args, kwargs = case.batch(0, 0)
    options = {"world_size": 4, "units": case.units, "optimizer": adamw} | options
    return fxshard.plan(case.build(), args, kwargs, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("dropout", {"strategy": "shard_grad_op", "checkpoint": "selective"}),
        ("mlp13", {"offload": CPUOffloadPolicy()}),
        ("tied", {"micro_batches": 2, "no_sync": True}),
    ],
)
def test_everything_alive_at_the_peak_adds_up(name: str, options: dict[str, Any]) -> None:
    plan = planned(name, **options)
    explained = plan.memory.explain_peak(3, what_ifs=False)
    assert sum(each.bytes for each in explained.alive) == explained.peak_bytes
    assert explained.peak_bytes == plan.memory.peak_bytes
    sums = dict.fromkeys(Category, 0)
    for each in explained.alive:
        sums[each.category] += each.bytes
    assert sums == plan.memory.peak_by_category
    sizes = [each.bytes for each in explained.alive]
    assert sizes == sorted(sizes, reverse=True)
    text = str(explained)
    assert f"{explained.peak_bytes:,} bytes" in text and f"{len(sizes) - 3:,} more" in text


class Doubled(nn.Module):
    """One large activation, whose line and life are known."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.lin(x)
        large = torch.softmax(wide, -1)
        return (large * large).sum()


def test_each_thing_has_its_line_and_its_life() -> None:
    plan = fxshard.plan(Doubled(), (torch.ones(256, 4),), world_size=2)
    explained = plan.memory.explain_peak(what_ifs=False)
    largest = {each.op: each for each in explained.alive if each.bytes == 4 * 256 * 512}
    made = largest["aten._softmax"]
    source, first = inspect.getsourcelines(Doubled.forward)
    number = first + next(i for i, line in enumerate(source) if "torch.softmax" in line)
    assert made.line == f"{__file__}:{number} in forward"
    # softmax saves its result, which backward reads; then it is gone.
    assert made.category is Category.ACTIVATION and made.stream == "compute"
    assert made.born == ("forward", "_softmax") and made.died is not None
    assert made.died[0] == "backward"
    assert "large = torch.softmax(wide, -1)" in str(explained)
    held = next(each for each in explained.alive if each.name == "lin.weight" and not each.op)
    assert held.born is None and held.died is None and held.module == "lin"


def tried(name: str, **options: Any) -> tuple[fxshard.Plan, dict[str, WhatIf]]:
    plan = planned(name, **options)
    return plan, {what_if.name: what_if for what_if in plan.memory.explain_peak().what_ifs}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("tied", {}, marks=pytest.mark.slow),
        ("mlp13", {"mixed_precision": BF16, "strategy": "shard_grad_op"}),
    ],
)
def test_each_what_if_saves_what_a_plan_with_it_says(name: str, options: dict[str, Any]) -> None:
    plan, found = tried(name, **options)
    case = MODELS[name]
    assert all(what_if.peak_bytes is not None for what_if in found.values())
    for what_if in found.values():
        args, kwargs = case.batch(0, 0)
        call = {"args": args, "kwargs": kwargs, "world_size": 4, "units": case.units}
        torch.manual_seed(0)
        again = fxshard.plan(
            case.build(), **{**call, "optimizer": adamw, **options, **what_if.changes}
        )
        assert again.memory.peak_bytes == what_if.peak_bytes, what_if.name
        assert plan.memory.peak_bytes - again.memory.peak_bytes == what_if.saves_bytes, what_if.name
    order = [what_if.saves_bytes for what_if in found.values() if what_if.saves_bytes is not None]
    assert order == sorted(order, reverse=True)


def test_the_what_ifs_of_the_issue_are_there() -> None:
    _, found = tried("tied", strategy="shard_grad_op")
    words = ("reshard", "checkpoint", "offload", "prefetch", "optimizer in backward", "bf16")
    for word in (*words, "accumulation", "batch of"):
        assert any(word in name for name in found), word
    _, reduced = tried("mlp13", mixed_precision=BF16)
    assert "bf16 reduction" in reduced
    assert "reshard after forward" not in reduced  # already so


@pytest.mark.parametrize(
    "what_if",
    [
        "checkpoint each unit",
        pytest.param("no prefetch", marks=pytest.mark.slow),
        pytest.param("optimizer in backward", marks=pytest.mark.slow),
    ],
)
def test_a_what_if_is_measured_too(what_if: str) -> None:
    """The plan with the what-if is what a rank really does."""
    case = MODELS["tied"]
    _, found = tried("tied")
    torch.manual_seed(0)
    args, kwargs = case.batch(0, 0)
    result = fxshard.validate(
        *(case.build(), args, kwargs),
        **{"world_size": 4, "units": case.units, "optimizer": adamw, **found[what_if].changes},
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)
    if what_if != "optimizer in backward":  # whose peak may lie in the optimizer's phase
        assert result.measured_peak_bytes == found[what_if].peak_bytes


def test_a_what_if_that_cannot_be_made_says_why() -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    plan = fxshard.plan(
        *(model, (torch.ones(4, 6),)),
        world_size=2,
        loss=lambda out: nn.functional.cross_entropy(out, labels),  # of a batch of 4, and no other
    )
    found = {what_if.name: what_if for what_if in plan.memory.explain_peak().what_ifs}
    what_if = found["batch of 2 instead of 4"]
    assert what_if.peak_bytes is None and "loss" in what_if.why_not
    assert what_if.why_not in str(plan.memory.explain_peak())


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 7},
        {"world_size": (2, 4), "strategy": "hybrid_shard"},
        {"strategy": "no_shard"},
        {"reshard_after_forward": False},
        {"forward_prefetch": 0},
        {"offload": CPUOffloadPolicy()},
        {"checkpoint": "full"},
        {"mixed_precision": BF16},
        {"units": None},
        {"optimizer": torch.optim.SGD},
        {"micro_batches": 3, "no_sync": True},
    ],
    ids=str,
)
@pytest.mark.sample(3)
def test_replan_is_plan(changes: dict[str, Any]) -> None:
    again = planned("tied").replan(**changes)
    fresh = planned("tied", **changes)
    assert again.dump() == fresh.dump() and again.certificate == fresh.certificate
    assert (again.memory.ledger().bytes == fresh.memory.ledger().bytes).all()


def test_replan_traces_again_only_if_it_must(traces: list[Any]) -> None:
    plan = planned("mlp13")
    assert len(traces) == 1
    for changes in ({"world_size": 2}, {"strategy": "shard_grad_op"}, {"forward_prefetch": 2}):
        plan.replan(**changes)
    assert len(traces) == 1
    plan.replan(mixed_precision=BF16)
    assert len(traces) == 2
    args, kwargs = MODELS["mlp13"].batch(0, 0)
    plan.replan(args=args, kwargs=kwargs)
    assert len(traces) == 3


def test_replan_refuses_what_plan_refuses() -> None:
    plan = planned("mlp13")
    with pytest.raises(ConfigError, match="unknown option 'strategie'"):
        plan.replan(strategie="full_shard")
    with pytest.raises(ConfigError, match="replicas x shards"):
        plan.replan(strategy="hybrid_shard")
    with pytest.raises(ConfigError, match="micro_batches=0: expected how many"):
        plan.replan(micro_batches=0)
    with pytest.raises(ConfigError, match="needs an optimizer"):
        plan.replan(optimizer=None, optimizer_in_backward=True)
    with pytest.raises(ConfigError, match="first micro-batch would step already"):
        plan.replan(micro_batches=2, optimizer_in_backward=True)
