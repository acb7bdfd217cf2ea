"""A collective method of the model on some ranks only: an error on all that names it, no abort."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from tests.ranks import told

BATCH = torch.randn(2, 8)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 2))


def summon(model: Any, optimizer: Any, path: str) -> None:
    with model.summon_full_params():
        pass


METHODS: dict[str, Callable[[Any, Any, str], Any]] = {
    "full_state_dict": lambda model, optimizer, path: model.full_state_dict(),
    "full_optim_state_dict": lambda model, optimizer, path: model.full_optim_state_dict(optimizer),
    "clip_grad_norm_": lambda model, optimizer, path: model.clip_grad_norm_(1.0),
    "summon_full_params": summon,
    "save_checkpoint": lambda model, *state: fxshard.save_checkpoint(state[-1], model, *state[:-1]),
    "load_checkpoint": lambda model, *state: fxshard.load_checkpoint(state[-1], model, *state[:-1]),
}


def apart(rank: int, world_size: int, path: str, mine: str, theirs: str) -> str:
    """What each rank is told, when rank 0 does one thing and rank 1 another, after a step."""
    model = fxshard.compile(build())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(BATCH).sum().backward()
    optimizer.step()
    does = (mine, theirs)[rank]
    if does == "forward":
        return told(lambda: model(BATCH).sum().backward())
    return told(lambda: METHODS[does](model, optimizer, path))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_on_one_rank_while_the_other_calls_the_model(
    hasty: Any, name: str, first: bool, tmp_path: Path
) -> None:
    pair = (name, "forward") if first else ("forward", name)
    found = hasty(2).run(apart, str(tmp_path), *pair)
    called, went_on = found if first else reversed(found)
    alone = 0 if first else 1
    assert called.startswith("RankMismatchError") and f"rank {alone} would do" in called, called
    assert name in called and "a call of the model" in called
    assert went_on.startswith("RankMismatchError"), went_on
    assert f"rank {alone} waits for all ranks to agree on what they do to the model" in went_on


def test_two_methods(hasty: Any, tmp_path: Path) -> None:
    for said in hasty(2).run(apart, str(tmp_path), "full_state_dict", "clip_grad_norm_"):
        assert said.startswith("RankMismatchError: ranks differ in what they do to the model")
        assert "'full_state_dict'" in said and "'clip_grad_norm_'" in said


def test_methods_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    for name in METHODS:
        assert ranks(2).run(apart, str(tmp_path), name, name) == ["no error"] * 2
