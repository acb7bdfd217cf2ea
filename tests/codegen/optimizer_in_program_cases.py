"""What several of the tests beside it need (test_optimizer_in_program)."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

import fxshard
from tests.fsdp2 import units_of
from tests.zoo import MODELS, Case

Make = Callable[[Iterable[Any]], Optimizer]


def make(kind: type[Optimizer], **options: Any) -> Make:
    return functools.partial(kind, **options)


OPTIMIZERS: dict[str, Make] = {
    "sgd": make(SGD, lr=0.1),
    "sgd momentum": make(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd foreach": make(SGD, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "adam amsgrad": make(Adam, lr=1e-2, amsgrad=True, maximize=True),
    "adamw": make(AdamW, lr=1e-2),
    "adamw foreach": make(AdamW, lr=1e-2, foreach=True),
    "adamw fused": make(AdamW, lr=1e-2, fused=True),
    "adamw tensor lr": make(AdamW, lr=torch.tensor(1e-2)),
    "nadam": make(NAdam, lr=1e-2),
    "radam": make(RAdam, lr=1e-2),
    "adamax": make(Adamax, lr=1e-2),
    "adadelta": make(Adadelta, lr=1.0),
    "adagrad": make(Adagrad, lr=1e-2),
    "rmsprop": make(RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "asgd": make(ASGD, lr=1e-2),
    "rprop": make(Rprop, lr=1e-2),
    "rprop foreach": make(Rprop, lr=1e-2, foreach=True),
}


class Uneven(nn.Module):
    """Two units; no parameter divides by 2, one has fewer rows than 4."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)))


UNEVEN = dataclasses.replace(MODELS["mlp13"], name="uneven", build=Uneven, units=["inner"])


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def fsdp2(case: Case, **options: Any) -> nn.Module:
    model = built(case)
    for unit in units_of(model, case):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, optimizer: Optimizer, case: Case, steps: int = 5) -> list[float]:
    """The plain loop, whoever steps in it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(steps):
        args, kwargs = case.batch(rank, step)
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.dtype is theirs[key].dtype and torch.equal(value, theirs[key]), key


FAST = ("sgd momentum", "adamw", "adamw fused", "rprop")  # the others are slow tests


EACH = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name)
    for name in OPTIMIZERS
]


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def planned(case: Case = UNEVEN, **options: Any) -> Any:
    args, kwargs = case.batch(0, 0)
    given = {"world_size": 2, "units": case.units, "optimizer": OPTIMIZERS["adamw"]}
    return fxshard.plan(
        built(case), args, kwargs, optimizer_in_backward=True, **{**given, **options}
    )
