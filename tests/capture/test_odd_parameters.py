"""Parameters of odd kinds that are right: parametrized, of integers, complex."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import fxshard
from tests.fsdp2 import full

BATCH = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Plus(nn.Module):
    """A parametrization with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("base", torch.randn(4, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.base


def parametrized(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    how: dict[str, Callable[[], Any]] = {
        "with a buffer": lambda: parametrize.register_parametrization(model[1], "weight", Plus()),
        "weight norm": lambda: parametrizations.weight_norm(model[1]),
        "weight norm, old": lambda: nn.utils.weight_norm(model[1]),
        "spectral norm": lambda: parametrizations.spectral_norm(model[1]),
        "spectral norm, old": lambda: nn.utils.spectral_norm(model[1]),
    }
    how[kind]()
    return model


def trained(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return {name: full(tensor).detach() for name, tensor in model.state_dict().items()}


def sharded_and_trained(rank: int, world_size: int, kind: str, ignored: list[str]) -> Any:
    model = fxshard.compile(parametrized(kind), units=["0"], ignored=ignored)
    return trained(model, BATCH.chunk(world_size)[rank])


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "kind",
    ["with a buffer", "weight norm", "weight norm, old", "spectral norm", "spectral norm, old"],
)
@pytest.mark.sample(2)
def test_parametrized_modules(ranks: Any, kind: str) -> None:
    expected = trained(parametrized(kind), BATCH)
    found = trained(fxshard.compile(parametrized(kind), world_size=2, ignored=["1"]), BATCH)
    for made in (found, *ranks(2).run(sharded_and_trained, kind, [])):
        torch.testing.assert_close(made, expected)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.counts


@pytest.mark.parametrize("in_backward", [False, True])
def test_frozen_integers_beside_an_optimizer(in_backward: bool) -> None:
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "optimizer_in_backward": in_backward}
    found = fxshard.validate(Counts(), (BATCH,), world_size=2, **options)
    assert found.max_abs_difference == 0


class Complex(nn.Module):
    """A spectral layer; its gradient is a conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).to(torch.complex64) @ self.weight
        return (y * self.weight.mean().conj()).abs()


def complex_model() -> nn.Module:
    torch.manual_seed(0)
    return Complex()


def complex_and_trained(rank: int, world_size: int, verb: str, options: dict[str, Any]) -> Any:
    model = getattr(fxshard, verb)(complex_model(), **options)
    return trained(model, BATCH.chunk(world_size)[rank])


@pytest.mark.parametrize("options", [{}, {"strategy": "no_shard"}])
@pytest.mark.parametrize("verb", ["compile", "shard"])
def test_complex_parameters(ranks: Any, verb: str, options: dict[str, Any]) -> None:
    expected = trained(complex_model(), BATCH)
    for made in ranks(2).run(complex_and_trained, verb, options):
        torch.testing.assert_close(made, expected)
