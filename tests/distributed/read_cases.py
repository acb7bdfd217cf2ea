"""What some ranks read of a model while others do something else."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

import fxshard
from tests.ranks import told

BATCH = torch.randn(2, 4)

READS: dict[str, Callable[[Any], Any]] = {
    "full_tensor": lambda model: model[0].weight.full_tensor(),
    "of a gradient": lambda model: model[0].weight.grad.full_tensor(),
    "redistribute": lambda model: model[0].weight.redistribute(placements=[Replicate()]),
    "norm": lambda model: float(model[0].weight.norm()),
    "a sum": lambda model: model[0].weight.sum().full_tensor(),
    "tolist": lambda model: model[0].weight.tolist(),
    "a product": lambda model: BATCH @ model[0].weight,
    "an exact copy": lambda model: model[0].weight.detach().full_tensor(),
    "numpy": lambda model: model[0].weight.detach().numpy(),
    "a part by itself": lambda model: model[0](BATCH),
}


def built(**options: Any) -> Any:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 4, bias=False) for _ in range(3))
    return fxshard.compile(nn.Sequential(*layers), units=["0", "1", "2"], **options)


def apart(rank: int, world_size: int, name: str, then: str) -> str:
    """Rank 0 reads once more than the other rank, which goes on."""
    model = built()
    model(BATCH).sum().backward()
    if then == "backward":
        loss = model(BATCH).sum()

    def goes_on() -> Any:
        if then == "backward":
            loss.backward()
        elif then == "a method":
            model.full_state_dict()
        else:
            for _ in range(2):
                model(BATCH).sum().backward()

    def both() -> None:
        READS[name](model)
        goes_on()

    return told(goes_on if rank else both)


def order(rank: int, world_size: int) -> list[Tensor | str]:
    """Equal sizes: each rank reads in another order, before and after a call."""
    model = built()
    found: list[Tensor | str] = []

    def step() -> None:
        if rank == 0:
            model[0].weight.full_tensor()
        found.append(model(BATCH).detach())
        if rank == 1:
            model[0].weight.full_tensor()

    with torch.no_grad():
        found.append(told(step))
    return found


def others(rank: int, world_size: int) -> str:
    """Each rank reads two parameters of one shape, in another order, and calls the model."""
    model = built()
    model(BATCH).sum().backward()
    for i in (0, 1) if rank else (1, 0):
        model[i].weight.full_tensor()
    return told(lambda: model(BATCH))


def alike(rank: int, world_size: int) -> int:
    """All ranks read between calls, also before backward; how often they have agreed on it."""
    model = built()
    world: Any = model._fxshard.world
    agree, count = world.agree, 0

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        agree(*args)

    model(BATCH).sum().backward()
    model(BATCH).sum().backward()
    world.agree = counted
    out = model(BATCH).sum()
    for _ in range(3):
        for param in model.parameters():
            param.full_tensor()
            float(param.norm())
    out.backward()
    for param in model.parameters():
        param.grad.full_tensor()
    model(BATCH)
    return count
