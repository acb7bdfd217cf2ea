"""The numbers: fxshard against FSDP2 on real ranks, and the in-process world against eager."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxshard
from tests import fsdp2
from tests.fsdp2 import Result
from tests.zoo import MODELS, Case

STEPS = 5


def train(case: Case, steps: int, **options: Any) -> Result:
    """Like `fsdp2.train`, through `fxshard.compile`; in ranks if a process group is there."""
    torch.manual_seed(0)
    model = fxshard.compile(case.build(), units=case.units, **options)
    return fsdp2.run_steps(model, case, steps)


def both(rank: int, world_size: int, name: str) -> tuple[Result, Result]:
    case = MODELS[name]
    return fsdp2.train(case, STEPS), train(case, STEPS)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(2)
def test_bitwise_with_fsdp2_on_2_ranks(ranks: Any, name: str) -> None:
    for theirs, ours in ranks(2).run(both, name):
        fsdp2.assert_bitwise(ours, theirs)


@pytest.mark.parametrize("world_size", [pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "name", [n if n == "mlp13" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_close_to_fsdp2_on_more_ranks(ranks: Any, name: str, world_size: int) -> None:
    for theirs, ours in ranks(world_size).run(both, name):
        fsdp2.assert_close(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    "world_size", [pytest.param(n, marks=pytest.mark.slow) if n != 3 else n for n in (1, 2, 3, 8)]
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(3)
def test_in_process_world_equals_eager(name: str, world_size: int) -> None:
    assert not dist.is_initialized()
    case = MODELS[name]
    torch.manual_seed(0)
    eager = fsdp2.run_steps(case.build(), case, STEPS)
    ours = train(case, STEPS, world_size=world_size)
    fsdp2.assert_close(ours, eager, rtol=1e-6)
