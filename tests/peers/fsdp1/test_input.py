"""torch's test_fsdp_input.py: inputs in lists and dicts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.peers.fsdp1.shared import compiled, same
from tests.ranks import told

KINDS = pytest.mark.parametrize("kind", ["dict", "list"])


def given(kind: str, x: Tensor) -> Any:
    return {"in": x} if kind == "dict" else [x]


class Model(nn.Module):
    def __init__(self, adds: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.adds = adds

    def forward(self, given: Any) -> Tensor:
        if isinstance(given, dict):
            x = given["in"]
            if self.adds:
                given["added"] = torch.ones(4, 4)
        else:
            x = given[0]
            if self.adds:
                given.append(torch.ones(4, 4))
        return self.layer(x)


def taken(rank: int, world_size: int, kind: str) -> None:
    """Trained on one rank, as plain."""
    reference, model = Model(), compiled(Model(), units=[])
    batches = [torch.rand(64, 4) for _ in range(5)]
    for each in (reference, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for batch in batches:
            x = batch.clone().requires_grad_()
            each(given(kind, x)).sum().backward()
            assert x.grad is not None
            optimizer.step()
            optimizer.zero_grad()
    same(model, reference)


@KINDS
def test_containers_of_inputs(ranks: Any, kind: str) -> None:
    ranks(1).run(taken, kind)


def changed(rank: int, world_size: int, kind: str) -> tuple[str, int]:
    container = given(kind, torch.rand(64, 4))
    model = compiled(Model(adds=True), units=[])
    return told(lambda: model(container)), len(container)


@KINDS
def test_containers_that_forward_changes(ranks: Any, kind: str) -> None:
    """Refused, and the container is as it was."""
    ((said, length),) = ranks(1).run(changed, kind)
    assert "forward changes a container that it was given" in said
    assert length == 1
