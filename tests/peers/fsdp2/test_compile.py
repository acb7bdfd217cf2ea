"""test_fully_shard_compile.py: torch.compile around a sharded model's layers and its optimizer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fxshard
from tests.peers.fsdp2.common import average_grads, made

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def layers() -> nn.Module:
    """Rows that do not divide evenly, and units whose shards follow each other in one memory."""
    return nn.Sequential(nn.Conv2d(3, 47, 3, padding=1), nn.Conv2d(47, 5, 1), nn.Flatten())


def compiled_steps(rank: int, world_size: int, name: str, by: str) -> None:
    """Two steps in eager, two compiled; beside data parallelism in eager."""
    ref = made(layers)
    model = copy.deepcopy(ref)
    if by == "compile":
        model = fxshard.compile(model)
    else:
        for unit in (model[0], model):
            fxshard.fully_shard(unit)
    both = (ref, model)
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in both]
    torch._dynamo.reset()
    compiled = torch.compile(optimizers[1].step, backend="aot_eager")
    torch.manual_seed(rank)
    for step in range(4):
        x = torch.randn(2, 3, 4, 4)
        for each in both:
            each(x).square().mean().backward()
        average_grads(ref)
        optimizers[0].step()
        if step < 2:
            optimizers[1].step()
        else:
            compiled()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for (fqn, mine), theirs in zip(model.named_parameters(), ref.parameters(), strict=True):
            assert_close(mine.full_tensor(), theirs, msg=lambda text, fqn=fqn: f"{fqn}: {text}")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("by", ["fully_shard", "compile"])
def test_a_compiled_optimizer_steps_uneven_shards(ranks: Any, name: str, by: str) -> None:
    ranks(2).run(compiled_steps, name, by)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28, 32), nn.Linear(32, 32), nn.Linear(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


def compiled_layers(rank: int, world_size: int) -> None:
    ref = made(Encoder)
    model = copy.deepcopy(ref)
    torch._dynamo.reset()
    for i, layer in enumerate(model.encoder):
        model.encoder[i] = torch.compile(layer, backend="aot_eager")
    fxshard.fully_shard(model)
    torch.manual_seed(rank)
    x = torch.randn(4, 28)
    outputs = [each(x) for each in (ref, model)]
    assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().mean().backward()
    average_grads(ref)
    for mine, theirs in zip(model.parameters(), ref.parameters(), strict=True):
        assert_close(mine.grad.full_tensor(), theirs.grad)


def test_layers_that_are_compiled_before_they_are_sharded(ranks: Any) -> None:
    ranks(2).run(compiled_layers)
