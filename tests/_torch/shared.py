"""What several of these contracts need."""

from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import Tensor, nn

aten = torch.ops.aten


class Small(nn.Module):
    """One parameter, one buffer that is written, one submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> list[Tensor]:
        self.calls.add_(1)
        return [(self.linear(x) * mask).sum()]


class Two(nn.Module):
    """Calls one module twice, the second time in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return torch.utils.checkpoint.checkpoint(
            self.inner, x, use_reentrant=False, context_fn=partial(_contexts, 1)
        )


def _contexts(number: int) -> Any:
    return torch.utils.checkpoint.noop_context_fn()
