"""Units whose gradients are sent in one copy are stepped together."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from tests.fsdp2 import full

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def sgd(params: Any) -> torch.optim.Optimizer:
    """Not Adam, which makes steps of what is noise around zero: the bias before the norm."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def build() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 2))


def trained(model: nn.Module, batches: list[Tensor], optimizer: Any = None) -> list[Tensor]:
    for _ in range(3):
        sum((model(x).pow(2).mean() for x in batches), torch.tensor(0.0)).div(
            len(batches)
        ).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return [full(param).detach() for param in model.parameters()]


def sharded_and_trained(rank: int, world_size: int, units: list[Any]) -> list[Tensor]:
    options: dict[str, Any] = {"optimizer": sgd, "optimizer_in_backward": True}
    model = fxshard.compile(build(), units=units, min_bucket_bytes=100_000, **options)
    return trained(model, [BATCH.chunk(world_size)[rank]])


@pytest.mark.parametrize("units", [["*"], ["0", "2"], ["1"]])
def test_units_of_one_bucket_are_stepped_once(ranks: Any, units: list[str]) -> None:
    eager = build()
    expected = trained(eager, list(BATCH.chunk(2)), sgd(eager.parameters()))
    for found in ranks(2).run(sharded_and_trained, units):
        torch.testing.assert_close(found, expected)
