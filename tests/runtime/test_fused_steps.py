"""What optimizers call and DTensor has no rule for, on ranks: as eager on the joined batch."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing import assert_close

import fxshard
from fxshard.errors import StepError
from tests.fsdp2 import full

Make = Callable[..., torch.optim.Optimizer]
SGD: Make = functools.partial(torch.optim.SGD, lr=0.1, fused=True)
STEPS: dict[str, Make] = {
    "SGD": SGD,
    "SGD with momentum": functools.partial(SGD, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "SGD, nesterov": functools.partial(SGD, momentum=0.9, nesterov=True),
    "SGD, maximize": functools.partial(SGD, maximize=True),
    "Adagrad": functools.partial(
        torch.optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1, fused=True
    ),
}


def built() -> nn.Module:
    """Rows that two ranks do not divide, and one row that one of them has."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def batches(step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def trained(model: Any, make: Make, rows: slice, scaler: Any) -> dict[str, Tensor]:
    optimizer = make(model.parameters())
    for step in range(3):
        loss = model(batches(step)[rows]).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            # the gradient of row 0, which one rank has, is infinite in the second step
            scaler.scale(loss * (torch.inf if step == 1 and rows.start == 0 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return {name: full(param.detach()) for name, param in model.named_parameters()}


def beside_eager(rank: int, world_size: int, name: str, options: Any, scaled: bool) -> None:
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None for _ in range(2)]
    mine = slice(2 * rank, 2 * rank + 2)
    ours = trained(fxshard.compile(built(), **options), STEPS[name], mine, scalers[0])
    eager = trained(built(), STEPS[name], slice(0, 4), scalers[1])
    assert_close(ours, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("options", [{}, {"strategy": "no_shard"}], ids=str)
@pytest.mark.sample(6)
def test_fused_steps(ranks: Any, name: str, options: dict[str, Any]) -> None:
    ranks(2).run(beside_eager, name, options, False)


def test_an_infinity_of_one_rank_skips_a_fused_step_on_all(ranks: Any) -> None:
    ranks(2).run(beside_eager, "SGD with momentum", {}, True)


ADAM: Make = functools.partial(torch.optim.AdamW, lr=0.1, fused=True)


def other_states(rank: int, world_size: int) -> None:
    """What a step would write into copies of them."""
    for make, key in ((STEPS["SGD with momentum"], "momentum_buffer"), (ADAM, "exp_avg")):
        model = fxshard.compile(built())
        optimizer = make(model.parameters())
        model(batches(0)).square().mean().backward()
        optimizer.step()
        weight = model[0].weight
        kept = full(weight.detach()).clone()
        plain = torch.zeros(weight.shape)
        for state in (distribute_tensor(plain, weight.device_mesh, [Replicate()]), plain):
            optimizer.state[weight][key] = state
            with pytest.raises(StepError, match=r"parameter '0\.weight'.*not sharded as it is"):
                optimizer.step()
            assert torch.equal(full(weight.detach()), kept)


def test_a_state_that_lies_otherwise_is_refused(ranks: Any) -> None:
    ranks(2).run(other_states)


def at_least_nothing(rank: int, world_size: int) -> None:
    """DTensor has no rule for this form of it."""
    written = []
    for model in (fxshard.compile(built()), built()):
        params = list(model.parameters())
        with torch.no_grad():
            torch._foreach_maximum_(params, 0.0)
        written.append([full(param.detach()) for param in params])
    assert_close(*written, rtol=0, atol=0)


def test_a_function_of_lists_that_dtensor_has_no_rule_for(ranks: Any) -> None:
    ranks(2).run(at_least_nothing)
