"""torch's test_fsdp_multiple_forward.py: a unit that is called twice in one forward."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.peers.fsdp1.shared import compiled, ddp, same


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x) + self.inner(x))


def twice(rank: int, world_size: int) -> None:
    pair = ddp(Model()), compiled(Model(), units=["inner"])
    torch.manual_seed(rank)
    x = torch.rand(64, 4, requires_grad=True)
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    same(pair[1], pair[0])


def test_unit_called_twice(ranks: Any) -> None:
    ranks(2).run(twice)
