"""Gradients asked for by hand are eager's, and a second backward is refused on all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxshard.errors import StepError
from tests.end_to_end.training_cases import assert_same, batch, grads_of, loss_of
from tests.end_to_end.training_loops import made
from tests.fsdp2 import full


def asked(model: Any, params: list[nn.Parameter]) -> list[Tensor | None]:
    """Of a batch that all ranks share, so that their average is what one process gets."""
    grads = torch.autograd.grad(loss_of(model(batch(0))), params, allow_unused=True)
    assert all(param.grad is None for param in model.parameters())
    return [None if grad is None else full(grad) for grad in grads]


def asks(rank: int, world_size: int, how: str) -> None:
    ours, eager = made("unused_parameters", how), made("unused_parameters", "eager")
    every = [list(model.parameters()) for model in (ours, eager)]
    some = [[model.head.bias, model.blocks[0].spare, model.inlet.weight] for model in (ours, eager)]
    for mine, theirs in (every, some):
        got, want = asked(ours, mine), asked(eager, theirs)
        assert any(grad is None for grad in want) and any(grad is not None for grad in want)
        assert_same(got, want, rtol=1e-6, atol=1e-7)
    for model, params in zip((ours, eager), some, strict=True):
        loss_of(model(batch(0))).backward(inputs=params[::2])
    assert_same(grads_of(ours), grads_of(eager), rtol=1e-6, atol=1e-7)


def test_autograd_grad_and_backward_of_some_parameters(ranks: Any) -> None:
    asks(0, 1, "in_process")
    ranks(2).run(asks, "ranks")


def backward_twice(rank: int, world_size: int) -> None:
    model = made("gradient_accumulation", "ranks")
    y = model(batch(rank))
    loss_of(y).backward()
    with pytest.raises(StepError, match="backward was called twice on one forward"):
        loss_of(y).backward()
    loss_of(model(batch(rank))).backward()


def test_backward_twice_is_refused_on_all_ranks(ranks: Any) -> None:
    ranks(2).run(backward_twice)
