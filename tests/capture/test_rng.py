"""Random numbers that no program can draw are refused, and only those."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import CaptureError
from tests.eager import Net, batch


class Draws(nn.Module):
    """A linear layer after numbers that `draw` gives; f32[..., 5] -> f32[..., 5]."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw, self.linear = draw, nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.draw()
        return self.linear(x)


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (random.random, "random"),
        (lambda: random.choice([1.0, 2.0]), "random"),
        (numpy.random.rand, r"numpy\.random"),
        (lambda: float(numpy.random.permutation(3)[0]), r"numpy\.random"),
    ],
)
def test_numbers_drawn_outside_of_torch_are_refused(draw: Callable[[], float], named: str) -> None:
    model = nn.Sequential(nn.Linear(5, 5), Draws(draw))
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(CaptureError, match=rf"of 1 \(Draws\) draws from {named}: .*torch\.rand"):
        fxshard.plan(model, (batch(),), world_size=2)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states


@pytest.mark.parametrize("depth", [1, 8])  # eight blocks are rehearsed before they are traced
def test_a_model_that_draws_and_fails_leaves_the_generators_as_they_were(depth: int) -> None:
    def draw() -> float:
        raise ValueError(f"{random.random()} and {numpy.random.rand()}")

    model = nn.Sequential(*(Draws(draw) for _ in range(depth)))
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(CaptureError, match="cannot be traced"):
        fxshard.plan(model, (batch(),), world_size=2)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states


def test_a_draw_of_the_whole_model_is_named() -> None:
    with pytest.raises(CaptureError, match=r"of the model \(Net\) draws from random"):
        fxshard.plan(Net(lambda net, x: net.a(x * random.random())), (batch(),), world_size=2)


def test_draws_of_torch_and_of_generators_that_stay_are_taken() -> None:
    model = Net(lambda net, x: net.a(torch.rand(5) * torch.dropout(x, 0.5, True)).sum())
    assert fxshard.plan(model, (batch(),), world_size=2).program.results
