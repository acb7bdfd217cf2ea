"""The memory of fxshard.compile_step: known before it runs, to the byte."""

import functools
from typing import Any

import pytest
import torch
from torch.optim import Adagrad

import fxshard
from fxshard.config.checked import Config
from fxshard.ir.whole import Whole
from fxshard.plans.plan import Plan, make_plan
from fxshard.plans.workload import Workload
from fxshard.runtime.whole_step import step_config
from fxshard.validation.rehearsal import bytes_beside
from tests.api.compile_step_cases import BF16, MAX_NORM, OPTIMIZERS, UNITS, batch, loss_fn, net

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "apart": {"pack_bytes": 0},
    "bf16": {"mixed_precision": BF16},
    "stays": {"reshard_after_forward": False},
    "recomputed": {"checkpoint": "full"},
    "no_shard": {"strategy": "no_shard"},
    "placed": {"strategy": "full_shard", "forward_prefetch": 0, "pack_bytes": 0},
}
EVERY = OPTIMIZERS | {"adagrad": functools.partial(Adagrad, lr=0.1)}


def workload(max_norm: float | None, optimizer: Any = None, **options: Any) -> Workload:
    config = Config.from_options({"units": UNITS, **options})
    config = step_config(config, optimizer or OPTIMIZERS["adamw"])
    return Workload(net(), (batch(0, 0), {}), 2, config, whole=Whole(loss_fn, max_norm))


def planned(max_norm: float | None, **options: Any) -> Plan:
    return make_plan(workload(max_norm, **options))


@pytest.mark.parametrize("max_norm", [MAX_NORM, None])
@pytest.mark.parametrize("way", WAYS)
def test_predicted_bytes_are_the_measured_ones(way: str, max_norm: float | None) -> None:
    work = workload(max_norm, **WAYS[way])
    found = bytes_beside(work, make_plan(work).memory, 3)
    assert found.max_abs_difference == 0, found.table(only_different=True)
    assert {phase for _, phase, _ in found.points} == {"forward", "backward"}


@pytest.mark.parametrize("name", EVERY)
def test_of_each_optimizer(name: str) -> None:
    work = workload(MAX_NORM, EVERY[name])
    found = bytes_beside(work, make_plan(work).memory, 3)
    assert found.max_abs_difference == 0, found.table(only_different=True)


def of_ranks(rank: int, world_size: int) -> int:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = fxshard.compile_step(
        model, loss_fn, optimizer, max_norm=MAX_NORM, units=UNITS, args=batch(rank, 0)
    )
    peak = step.memory.peak_bytes
    step(*batch(rank, 0))
    assert step.memory.peak_bytes == peak
    return peak


def test_a_user_s_optimizer_has_the_bytes_of_one_that_is_made(ranks: Any) -> None:
    """The plan knows it before the first step, and does not step it."""
    peak = planned(MAX_NORM).memory.peak_bytes
    assert ranks(2).run(of_ranks) == [peak, peak]


def test_a_step_of_a_model_without_data_is_a_plan() -> None:
    """On the meta device: the same bytes as with numbers."""
    given: Any = {"max_norm": MAX_NORM, "world_size": 2, "units": UNITS}
    peaks = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, call = net(), tuple(torch.empty_like(t, device=device) for t in batch(0, 0))
        step = fxshard.compile_step(model, loss_fn, OPTIMIZERS["adamw"], args=call, **given)
        peaks.append(step.memory.peak_bytes)
    assert peaks[0] == peaks[1] > 0
