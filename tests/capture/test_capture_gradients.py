"""Parameters have a gradient where eager gives one: unused, frozen, shared and tied ones too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard
from fxshard.errors import CaptureError
from fxshard.verify import certificate
from tests.eager import Net, assert_trains_like_eager, batch, pair


def test_a_parameter_that_loses_its_gradient_is_named() -> None:
    def loses(net: Net, x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # autograd sees nothing of it, nor is told so
            y = net.b(x)
        return (net.a(x) + y).sum()

    with pytest.raises(CaptureError, match=r"'b\.weight' reaches the loss.*requires_grad_"):
        fxshard.plan(Net(loses), (batch(),), world_size=2)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: net.a(x).sum(),
        lambda net, x: (net.a(x) + net.b(x).detach()).sum(),
        lambda net, x: (net.a(x) + net.b.weight.data.sum()).sum(),
        lambda net, x: (net.a(x) * (net.b(x) > 0)).sum(),
        lambda net, x: (net.a(x) + torch.ones_like(net.b(x))).sum(),
        lambda net, x: (net.a(x) + torch.no_grad()(net.b)(x)).sum(),
        lambda net, x: (net.a(x) + torch.no_grad()(net.b)(x).square()).sum(),
    ],
    ids=["not called", "detached", "data", "compared", "ones_like", "no_grad", "below no_grad"],
)
def test_an_unused_parameter_has_no_gradient(function: Callable[..., Tensor]) -> None:
    assert_trains_like_eager(lambda: Net(function), batch())
    _, ours = pair(lambda: Net(function))
    ours(batch()).backward()
    assert ours.b.weight.grad is None
    assert ours.a.weight.grad is not None


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def test_frozen_parameters_train_like_eager_and_are_not_reduced() -> None:
    assert_trains_like_eager(frozen, batch())
    program = fxshard.plan(frozen(), (batch(),), world_size=2).program
    reduced = [line for line in certificate.collectives(program) if "reduce_scatter" in line]
    assert len(reduced) == 1
    assert "2.weight" in reduced[0]
    assert "2.bias" not in reduced[0] and "0." not in reduced[0]


def test_freezing_and_unfreezing_between_steps() -> None:
    eager, ours = pair(frozen)
    for flag in (True, False, True):
        for model in (eager, ours):
            model.zero_grad()
            model.get_submodule("0").requires_grad_(flag)
            model(batch()).square().sum().backward()
        for theirs, mine in zip(eager.parameters(), ours.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("everything_frozen", [False, True])
def test_an_input_that_wants_its_gradient_gets_it(everything_frozen: bool) -> None:
    eager, ours = pair(lambda: Net(lambda net, x, scale: (net.a(x) * scale).square().sum()))
    grads = []
    for model in (eager, ours):
        model.requires_grad_(not everything_frozen)
        x, scale = batch().requires_grad_(), torch.tensor(2.0, requires_grad=True)
        model(x * 3, scale).backward()
        grads.append((x.grad, scale.grad))
    assert_close(*grads)


def test_a_gradient_that_two_parameters_share() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return (x.sum() * (net.a.bias + net.b.bias)).sum()

    assert_trains_like_eager(lambda: Net(forward), batch())


class Tied(nn.Module):
    """One weight under three names; `use(model, x)` is the loss."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5, bias=False) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: (m.a.weight + m.b.weight + m.c.weight).sum() * x.sum(),
        lambda m, x: m.c(torch.tanh(m.a(torch.tanh(m.b(x))))).square().sum(),
        lambda m, x: m.b(torch.tanh(m.c(torch.tanh(m.a(x))))).square().sum(),
    ],
    ids=["one gradient", "backwards", "in turn"],
)
def test_a_weight_with_three_names_has_eagers_gradient_bitwise(use: Callable[..., Tensor]) -> None:
    eager, ours = pair(lambda: Tied(use))
    for model in (eager, ours):
        model(batch()).backward()
    assert torch.equal(ours.a.weight.grad, eager.a.weight.grad)


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Embedding(5, 6, sparse=True)
    with pytest.raises(CaptureError, match=r"gradient of 'weight' is sparse.*sparse=False"):
        fxshard.plan(model, (torch.tensor([1, 2]),), world_size=2)
