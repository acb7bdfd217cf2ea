"""torch's test_fsdp_exec_order.py: ranks that run their units in another order."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.peers.fsdp1.shared import FULL, GRAD_OP, compiled
from tests.ranks import told

GRID = pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=lambda strategy: strategy.name)


class Model(nn.Module):
    """Two paths whose parameters have as many elements: collectives of one fit the other's."""

    units: Any = ("layer1", "layer2")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer0 = nn.Linear(5, 6)
        self.layer1 = nn.Linear(6, 6, bias=False)
        first, second = nn.Linear(6, 3, bias=False), nn.Linear(3, 6, bias=False)
        self.layer2 = nn.Sequential(first, nn.ReLU(), second).requires_grad_(False)
        self.other_path = False

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.layer0(x))
        return torch.relu(self.layer2(z) if self.other_path else self.layer1(z))

    def get_input(self) -> tuple[Tensor, ...]:
        return (torch.randn(8, 5),)

    def flip(self) -> None:
        self.other_path = not self.other_path
        self.layer1.requires_grad_(not self.other_path)
        self.layer2.requires_grad_(self.other_path)


def step(model: Any) -> None:
    model(*model.get_input()).sum().backward()


def flipped(rank: int, world_size: int, strategy: Any, steps: int) -> str:
    """After `steps` steps, rank 1 takes the other path."""
    model = compiled(Model(), strategy=strategy)
    for _ in range(steps):
        step(model)
    if rank:
        model.flip()
    return told(lambda: step(model))


@pytest.mark.parametrize("steps", [0, 1, 3])
@GRID
def test_ranks_on_other_paths(hasty: Any, strategy: Any, steps: int) -> None:
    """FSDP1 raises in the first step, and in later ones warns that collectives may not match."""
    said = hasty(2).run(flipped, strategy, steps)
    assert all(each.startswith("RankMismatchError: ") for each in said)
    assert (
        "parameter layer1.weight [6, 6] torch.float32 Shard(0) unit=1 requires_grad=False"
        in said[1]
    )


def all_flipped(rank: int, world_size: int, strategy: Any) -> None:
    """All ranks together: another program."""
    model = compiled(Model(), strategy=strategy)
    step(model)
    model.flip()
    step(model)
    assert model.layer2[0].weight.grad is not None


@GRID
def test_all_ranks_on_the_other_path(ranks: Any, strategy: Any) -> None:
    ranks(2).run(all_flipped, strategy)


def trained_and_evaluated(rank: int, world_size: int, strategy: Any) -> list[str]:
    model = compiled(Model(), strategy=strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.train()
            for _ in range(3):
                step(model)
            model.eval()
            for _ in range(3):
                model(*model.get_input()).sum()
    return [str(each.message) for each in caught]


@GRID
def test_training_and_evaluation_in_turns(ranks: Any, strategy: Any) -> None:
    assert ranks(2).run(trained_and_evaluated, strategy) == [[], []]
