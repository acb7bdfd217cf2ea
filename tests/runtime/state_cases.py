"""What several of the tests beside it need (test_state)."""

from typing import Any

import torch
from torch import nn

from tests.fsdp2 import full
from tests.runtime.test_module import call
from tests.zoo import MODELS


def step(ours: nn.Module, eager: nn.Module, name: str, optimizers: Any = ()) -> None:
    """One forward and backward of both, and an optimizer step."""
    for model in (ours, eager):
        call(MODELS[name], model).backward()
    for optimizer in optimizers:
        optimizer.step()


def sgd(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def assert_same_values(ours: nn.Module, eager: nn.Module) -> None:
    """Parameters are bitwise those of the plain model; collective."""
    for (name, mine), (other_name, other) in zip(
        ours.named_parameters(), eager.named_parameters(), strict=True
    ):
        assert name == other_name
        assert torch.equal(full(mine), other.detach()), name


def init_weights(module: nn.Module) -> None:
    """What users write: by class, with random numbers over full shapes."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.kaiming_uniform_(module.weight)
    if isinstance(module, type(MODELS["mlp13"].build())):
        nn.init.constant_(module.head.bias, 2.0)  # the root is the user's own module


def other_values(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name].build()
