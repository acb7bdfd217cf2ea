"""Formulas of programs of views, slices and sums, chosen and random, against plans of their own."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard
from fxshard.errors import OutOfRangeError
from tests.memory.test_formula import ADAMW, OF_X, assert_equal, floats

# Each takes and gives f32 (batch, some length, 12).
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "front of a split": lambda x: x.split([2, x.shape[1] - 2], 1)[0],
    "rest of a split": lambda x: x.split([2, x.shape[1] - 2], 1)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "first half": lambda x: x[:, : x.shape[1] // 2],
    "second half": lambda x: x[:, x.shape[1] // 2 :],
    "every second": lambda x: x[:, ::2],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "twice": lambda x: x * 2,
    "exp": lambda x: x.exp(),
    "plus mean": lambda x: x + x.mean(1, keepdim=True),
    "flat and back": lambda x: x.reshape(-1, x.shape[-1]).view(x.shape[0], x.shape[1], -1),
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "roll": lambda x: x.roll(1, 1),
    "cat": lambda x: torch.cat([x[:, 1:], x, x[:, :1]], 1),
    "pool": lambda x: F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "interleave": lambda x: x.repeat_interleave(2, 1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "products": lambda x: (x @ x.transpose(1, 2)).tril() @ x,
    "windows": lambda x: x.unfold(1, 2, 1).mean(-1),
    "stack": lambda x: torch.stack([x, x], 2).flatten(1, 2),
    "even and odd": lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
    "where": lambda x: torch.where(torch.arange(x.shape[1])[None, :, None] > 2, x, x * 0.5),
    "norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "in place": lambda x: x.clone().add_(1),
    "interpolate": lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2).transpose(1, 2),
    "backwards": lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "expand": lambda x: x[:, :, None].expand(-1, -1, 2, -1).flatten(1, 2),
}


class Random(nn.Module):
    """f32 (batch, seq, 8) -> a scalar, through the named operators."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.up, self.mid, self.out = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for i, name in enumerate(self.names):
            x = OPS[name](x)
            if i == len(self.names) // 2:
                x = self.mid(x)
        loss: Tensor = self.out(x).square().mean()
        return loss


Points = Sequence[tuple[int, int, int]]
POINTS: Points = ((7, 16, 3), (3, 24, 4), (9, 13, 8), (4, 40, 5))


def compare(seed: int, points: Points = POINTS) -> int:
    """Number of calls for which the formulas of a random program hold; there they are equal."""
    draw = random.Random(seed)
    model = Random([draw.choice(list(OPS)) for _ in range(draw.randint(2, 5))])
    try:
        model(torch.zeros(5, 12, 8))
    except RuntimeError:
        return 0  # too short for an operator
    plan = fxshard.plan(
        model, kwargs=floats(5, 12, width=8), world_size=2, dynamic=OF_X, optimizer=ADAMW
    )
    held = 0
    for batch, seq, world in points:
        try:
            plan.memory.at(batch=batch, seq=seq, world=world)
        except OutOfRangeError:
            continue
        alone = fxshard.plan(
            model, kwargs=floats(batch, seq, width=8), world_size=world, optimizer=ADAMW
        )
        assert_equal(plan.memory, batch, seq, world, alone)
        held += 1
    return held


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sample(2)
def test_random_programs(seed: int) -> None:
    assert compare(seed, POINTS[:1]) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("start", range(1000, 1200, 20))
def test_more_random_programs(start: int) -> None:
    assert sum(map(compare, range(start, start + 20))) >= 40


class Sliced(nn.Module):
    """f32 (batch, seq, 8) -> a scalar, through `part` of what it computes."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.part = nn.Linear(8, 12), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.up(x)).relu().sum()


def written(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0].zero_()
    x[:, 1:] = 0.5
    return x


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "without the first": lambda x: x[:, 1:],
    "shifted": lambda x: x[:, :-1].reshape(-1, 12),
    "expanded": lambda x: x[:, :, None].expand(-1, -1, 3, -1),
    "written": written,
    "a fixed number": lambda x: x.flatten()[:240].mul(2).exp(),
    "split": lambda x: x.split([4, x.shape[1] - 4], 1)[1].mul(2).exp(),
    "split, contiguous": lambda x: x.split([4, x.shape[1] - 4], 1)[1].contiguous().mul(2).exp(),
    "split, written twice": lambda x: (
        x.split([4, x.shape[1] - 4], 1)[1].mul(2).view(-1, 12).view(x.shape[0], -1, 12).exp()
    ),
    "the second half, twice": lambda x: (
        torch.cat([x[:, x.shape[1] // 2 :]] * 2, 1).view(-1, 12).view(x.shape[0], -1, 12).exp()
    ),
    "joined again": lambda x: torch.cat(x.split([4, x.shape[1] - 4], 1), 1).mul(2).exp(),
    "halves": lambda x: x.view(x.shape[0], 2, -1).mul(2).view(x.shape).exp(),
    "loss of a row and a column": lambda x: torch.ops.aten.mse_loss(x[:1], x[:, :1]),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.sample(3)
def test_parts_of_tensors(name: str) -> None:
    model = Sliced(PARTS[name])
    plan = fxshard.plan(model, kwargs=floats(5, 6, width=8), world_size=2, dynamic=OF_X)
    for batch, seq, world in ((9, 22, 3), (4, 40, 4)):
        alone = fxshard.plan(model, kwargs=floats(batch, seq, width=8), world_size=world)
        assert_equal(plan.memory, batch, seq, world, alone)
