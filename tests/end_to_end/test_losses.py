"""Backward from any outputs, of any of them in turn, and again: the gradients of eager PyTorch."""

from typing import Any

import pytest
import torch

from tests.end_to_end.losses_cases import USES, Several, joined, made
from tests.end_to_end.training_cases import assert_same, batch, grads_of

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
def test_each_on_a_model_of_its_own(name: str) -> None:
    batches = 1
    assert trains(0, batches, "in_process", [name], {}) <= 3


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("how", ["compile", "fully_shard"])
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
