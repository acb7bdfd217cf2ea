"""What several of the tests beside it need (test_object)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from fxshard.errors import StepError

EVERYWHERE = pytest.mark.parametrize("where", ["in_process", "2 ranks"])


def run(ranks: Any, where: str, check: Callable[..., None], *args: Any) -> None:
    if where == "in_process":
        check(0, 1, *args)
    else:
        ranks(2).run(check, *args)


class Agent(nn.Module):
    """Names and methods that a wrapper would hide, and parameters read in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.block = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5), nn.Dropout(0.0))
        self.scale = nn.Parameter(torch.linspace(-1, 1, 5))
        self.cell = nn.LSTM(5, 5, batch_first=True)
        self.head = nn.Linear(5, 3)
        self.config, self.world, self.units, self.slots = {"mine": 1}, "earth", 12, [1]
        self.variants, self.kind, self.original = "many", "one", "mine"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)) * self.scale)

    def value(self, x: Tensor) -> Tensor:
        hidden = self.block(self.embed(x)) * self.scale.exp()
        return hidden.sum(-1) + (self.head.weight.t() @ hidden.new_ones(3)).sum()

    def recurrent(self, x: Tensor) -> Tensor:
        return self.cell(self.embed(x))[0]

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def add(self, x: int) -> int:
        return x + self.units

    def reset(self) -> str:
        return "reset"


def agent() -> Agent:
    torch.manual_seed(0)
    return Agent()


def compiled(model: nn.Module, **options: Any) -> Any:
    options |= {} if dist.is_initialized() else {"world_size": 2}
    return fxshard.compile(model, **options)


def tokens(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Of this rank, and of all."""
    batch = torch.randint(0, 7, (2 * world_size, 3), generator=torch.Generator().manual_seed(1))
    return batch[2 * rank : 2 * rank + 2], batch


def early(rank: int, world_size: int) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    ours = compiled(model)
    ours(torch.ones(3, 8)).sum().backward()
    with pytest.raises(StepError, match=r"AdamW holds parameter 'weight'.*after fxshard\.compile"):
        optimizer.step()
    torch.optim.AdamW(ours.parameters()).step()
