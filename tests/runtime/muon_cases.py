"""Models and steps for tests of Muon: run on ranks, and in one process."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import AdamW, Muon, Optimizer

import fxshard
from tests.fsdp2 import full

OPTIONS: dict[str, dict[str, Any]] = {
    "uneven": {"units": ["tall", "wide"]},
    "one unit": {"units": []},
    "columns": {"units": ["tall"], "shard_placement_fn": "columns"},
    "bf16 compute": {"units": ["tall"], "mixed_precision": "bf16"},
}


class Matrices(nn.Module):
    """Tall, wide, and of fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Linear(7, 13)
        self.wide = nn.Linear(13, 5)
        self.short = nn.Linear(5, 1, bias=False)
        self.last = nn.Linear(1, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.wide(torch.tanh(self.tall(x))))
        return self.last(self.short(x)).square().mean()


def columns(param: nn.Parameter) -> Shard:
    return Shard(1 if param.dim() == 2 else 0)


def built() -> Matrices:
    torch.manual_seed(0)
    return Matrices()


def compiled(name: str = "uneven", **more: Any) -> Any:
    options = OPTIONS[name] | more
    if options.get("shard_placement_fn") == "columns":
        options["shard_placement_fn"] = columns
    if options.get("mixed_precision") == "bf16":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options["mixed_precision"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return fxshard.compile(built(), **options)


def matrices_and_rest(named_parameters: Iterable[tuple[str, Any]]) -> list[Optimizer]:
    """As users split them: Muon for matrices, AdamW for vectors."""
    params = [param for _, param in named_parameters]
    return [
        Muon([p for p in params if p.dim() == 2], lr=0.1, momentum=0.9),
        AdamW([p for p in params if p.dim() != 2], lr=0.01),
    ]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def set_gradients(plain: nn.Module, sharded: nn.Module) -> None:
    """Give a plain model the gradients of a sharded one; collective."""
    for mine, theirs in zip(plain.parameters(), sharded.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else full(theirs.grad).clone()


def values(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Full parameters, and what the optimizers keep; collective."""
    states = {param: each.state[param] for each in optimizers for param in each.state}
    for param in model.parameters():
        yield full(param.detach())
        for value in states.get(param, {}).values():
            yield full(value) if isinstance(value, DTensor) else value


def assert_same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()


def counted(step: Any) -> dict[str, int]:
    """The collectives of an optimizer's step."""
    with CommDebugMode() as seen:
        step()
    return {str(name): count for name, count in seen.get_comm_counts().items()}
