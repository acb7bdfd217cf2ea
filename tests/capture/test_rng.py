"""Random numbers that no program can draw are refused, and only those; what is drawn is eager's."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class BeforeADraw(nn.Module):
    """A linear layer, `part`, and numbers that are drawn after it; f32[2, 3, 4] -> the same."""

    def __init__(self, part: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(4, 4), part

    def forward(self, x: Tensor) -> Tensor:
        h = self.part(self.linear(x))
        return (h[0] if isinstance(h, tuple) else h) + torch.rand(4)


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)


def dropping(p: float) -> dict[str, Callable[[Tensor], Any]]:
    return {
        "dropout": nn.Dropout(p),
        "dropout in place": nn.Sequential(nn.Identity(), nn.Dropout(p, inplace=True)),
        "dropout of channels": nn.Dropout1d(p),
        "alpha dropout": nn.AlphaDropout(p),
        "alpha dropout of channels": nn.FeatureAlphaDropout(p),
        "LSTM": nn.LSTM(4, 4, 2, dropout=p),
        "GRU": nn.GRU(4, 4, 3, dropout=p),
        "attention": Attention(4, 2, dropout=p, batch_first=True),
        "SDPA": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=p),
        "checkpoint": lambda h: checkpoint(lambda t: F.dropout(t, p) * t, h, use_reentrant=False),
        "the fused operator": lambda h: torch.native_dropout(h, p, True)[0],
        "nothing": lambda h: torch.cat([F.dropout(h[:, :0], p), h], 1),
        "a number": lambda h: h * F.dropout(torch.ones(()), p),
    }


DRAWN: dict[str, Callable[[Tensor], Any]] = {
    "RReLU": nn.RReLU(),
    "random_": lambda h: h * torch.empty_like(h).random_(9),
    "random_ between": lambda h: h * torch.empty_like(h.mT).random_(2, 9).mT,
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, hard=True),
    "multinomial": lambda h: h * torch.multinomial(torch.ones(4), 1),
    "poisson": lambda h: h * torch.poisson(torch.ones_like(h)),
    "an odd number of normal ones": lambda h: h * torch.randn(17)[:4],
}


@pytest.mark.parametrize(
    "part",
    [
        *(
            pytest.param(part, id=f"{name}, {p}")
            for p in (0.0, 0.3, 1.0)
            for name, part in dropping(p).items()
        ),
        *(pytest.param(part, id=name) for name, part in DRAWN.items()),
    ],
)
def test_as_many_numbers_are_drawn_as_in_eager(part: Callable[[Tensor], Any]) -> None:
    """So that what is drawn next is the same."""
    torch.manual_seed(0)
    plain = BeforeADraw(part)
    model: Any = fxshard.compile(copy.deepcopy(plain), world_size=2)
    x, states, outs = torch.randn(2, 3, 4), [], []  # type: Tensor, list[Any], list[Tensor]
    for each in (plain, model):
        torch.manual_seed(1)
        out = each(x)
        after_forward = torch.get_rng_state()
        out.sum().backward()
        states.append((after_forward, torch.get_rng_state()))
        outs.append(out.detach())
    assert all(map(torch.equal, *states))
    torch.testing.assert_close(*outs)  # oneDNN's kernel of an LSTM rounds otherwise
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
