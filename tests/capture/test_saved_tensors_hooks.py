"""Hooks for saved tensors that a model enters itself: no program would call them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)

import fxshard
from fxshard.errors import CaptureError


class Hooked(nn.Module):
    """What is saved is rounded, or on the CPU."""

    def __init__(self, hooks: Callable[[], Any]) -> None:
        super().__init__()
        self.lin, self.hooks = nn.Linear(3, 3), hooks

    def forward(self, x: Tensor) -> Tensor:
        with self.hooks():
            y: Tensor = self.lin(torch.sin(x))
            return y


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16()


def called(inner: nn.Module) -> None:
    model = nn.Sequential(inner, nn.Linear(3, 3))
    ours = fxshard.compile(model, units=["0"], world_size=2)
    ours(torch.randn(2, 3)).sum().backward()


def test_hooks_that_may_change_values_are_refused() -> None:
    hooks = functools.partial(saved_tensors_hooks, rounded, Tensor.float)
    with pytest.raises(CaptureError, match=r"hooks with .*\.rounded inside of the model: "):
        called(Hooked(hooks))


@pytest.mark.parametrize(
    ("inner", "warned"),
    [
        (lambda: Hooked(save_on_cpu), True),
        (lambda: offload_wrapper(nn.Linear(3, 3)), True),
        (lambda: checkpoint_wrapper(nn.Linear(3, 3)), False),
        (lambda: nn.Linear(3, 3), False),
    ],
    ids=["save_on_cpu", "offload_wrapper", "checkpoint_wrapper", "none"],
)
def test_hooks_that_offload_are_warned_of(
    inner: Callable[[], nn.Module], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    called(inner())
    assert ("inside of the model offloads nothing" in caplog.text) == warned
