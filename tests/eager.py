"""fxshard's in-process world beside plain eager PyTorch, on small models made for one test."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard


class Net(nn.Module):
    """Two linear layers, 5 -> 6, and a buffer; forward is `function(self, *args, **kwargs)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(5, 6)
        self.register_buffer("seen", torch.ones(6))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def batch() -> Tensor:
    """f32[4, 5]."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(3))


def pair(build: Callable[[], nn.Module], world_size: int = 2) -> tuple[nn.Module, Any]:
    """The same model twice: eager, and compiled for an in-process world."""
    torch.manual_seed(0)
    eager = build()
    return eager, fxshard.compile(copy.deepcopy(eager), world_size=world_size)


def steps(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], Tensor],
    count: int = 3,
) -> list[Any]:
    """Losses and gradients of each AdamW step, then parameters and buffers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for step in range(count):
        torch.manual_seed(step)
        value = loss(model(*args, **kwargs))
        value.backward()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        seen.append((value.item(), grads))
        optimizer.step()
        optimizer.zero_grad()
    seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    seen.append({name: b.clone() for name, b in model.named_buffers()})
    return seen


def assert_trains_like_eager(
    build: Callable[[], nn.Module],
    *args: Any,
    loss: Callable[[Any], Tensor] = lambda output: output.sum(),
    world_size: int = 2,
    **kwargs: Any,
) -> None:
    """Losses, gradients (None included), parameters and buffers of three steps."""
    eager, ours = pair(build, world_size)
    theirs = steps(eager, args, kwargs, loss)
    assert_close(steps(ours, args, kwargs, loss), theirs, rtol=1e-6, atol=1e-7)
