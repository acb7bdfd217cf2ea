"""Small programs that random ones were shrunk to: planned and measured bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard

BF16 = torch.bfloat16


class Net(nn.Module):
    """`run`, with a linear layer and an odd parameter."""

    def __init__(self, run: Callable[["Net", Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.weight = nn.Parameter(weight)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


# What runs, the parameter, the input.
PROGRAMS: dict[str, tuple[Callable[[Net, Tensor], Tensor], Tensor, Tensor]] = {
    # A dimension of one element may have any stride; a gathered parameter has the usual one.
    "strides of one row": (
        lambda net, x: nn.functional.linear(net.linear(x), net.weight),
        torch.randn(1, 3).t(),
        torch.randn(4, 4, 3),
    ),
    # Backward reads no gradient of an output.
    "a gradient of nothing": (
        lambda net, x: torch.cat((net.weight, x.flatten())),
        torch.empty(0),
        torch.randn(2, 3),
    ),
    "nothing runs in backward": (
        lambda net, x: x,
        torch.ones(3),
        torch.randn(3, 2, dtype=BF16).requires_grad_(),
    ),
    # The gradient of the output is that of the parameter.
    "handed through": (lambda net, x: x + net.weight, torch.randn(3, 5), torch.randn(3, 5)),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("loss", [lambda y: y.float().square().sum(), None])
def test_bytes(name: str, loss: Any) -> None:
    run, weight, x = PROGRAMS[name]
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "loss": loss, "world_size": 2}
    found = fxshard.validate(Net(run, weight), (x,), **options)
    assert found.max_abs_difference == 0 and not found.unknown
