"""Models and functions for `shard_placement_fn`: matrices, kernels, tied embeddings, vectors."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import fxshard
from tests import fsdp2
from tests.fsdp2 import Result
from tests.zoo import Case, cross_entropy, float_batch, token_batch

STEPS = 3


def columns(param: Tensor) -> Shard | None:
    """Dimension 1 of all that has it; vectors stay at ``Shard(0)``."""
    return Shard(1) if param.dim() > 1 else None


def last(param: Tensor) -> Shard | None:
    return Shard(-1) if param.dim() > 1 else None


def largest(param: Tensor) -> Shard:
    """The function of FSDP2's documentation."""
    return Shard(max(range(param.dim()), key=lambda dim: param.shape[dim]))


class Mixed(nn.Module):
    """An embedding tied to a head, layers, a norm and a parameter of three dimensions."""

    def __init__(self, vocab: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Layer(width, hidden) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(4, width, width) / width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.einsum("bsi,kij->bsj", x, self.mix))


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Convolutions(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, channels, 4)
        self.second = nn.Conv2d(channels, channels, 4, bias=False)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))


def tokens(name: str, vocab: int, width: int, hidden: int) -> Case:
    build = functools.partial(Mixed, vocab, width, hidden)
    batch = functools.partial(token_batch, vocab=vocab, shape=(2, 4))
    return Case(name, build, batch, cross_entropy, units=["blocks.*"])


def images(name: str, channels: int, classes: int) -> Case:
    build = functools.partial(Convolutions, channels, classes)
    batch = functools.partial(float_batch, shape=(2, 4, 8, 8))
    return Case(name, build, batch, cross_entropy, units=["second"])


# Sizes that 2 and 4 divide, as FSDP2 needs them; and others, some shorter than 4.
EVEN = {"mixed": tokens("mixed", 16, 8, 12), "conv": images("conv", 8, 4)}
UNEVEN = {"mixed": tokens("mixed", 13, 7, 5), "conv": images("conv", 5, 3)}

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "columns": columns,
    "last": last,
    "largest": largest,
}


def trained(
    case: Case,
    fn: Callable[[Tensor], Any],
    *,
    shard: Callable[..., Any] = fully_shard,
    **options: Any,
) -> Result:
    """Three steps of AdamW by torch's `fully_shard`, or by ours; call in every rank."""
    return fsdp2.train(case, STEPS, fully_shard=shard, shard_placement_fn=fn, **options)


def compiled(case: Case, fn: Any, **options: Any) -> Any:
    """The same model from seed 0, by `fxshard.compile`."""
    torch.manual_seed(0)
    own: dict[str, Any] = {} if dist.is_initialized() else {"world_size": 2}
    return fxshard.compile(case.build(), units=case.units, shard_placement_fn=fn, **own | options)


def steps(model: nn.Module, case: Case, **options: Any) -> Result:
    return fsdp2.run_steps(model, case, STEPS, **options)


def locals_of(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Per parameter: its placements, and what this rank has of it."""
    return {
        fqn: (param.placements, param.to_local().detach().clone(), param.to_local().is_contiguous())
        for fqn, param in model.named_parameters()
        if isinstance(param, DTensor)
    }
