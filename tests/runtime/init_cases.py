"""What several of the tests beside it need (test_init)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from tests.fsdp2 import full


def compiled(model: nn.Module, **options: Any) -> Any:
    return fxshard.compile(model, **({} if dist.is_initialized() else {"world_size": 2}) | options)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters, also under their tied names, and buffers."""
    both = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: full(tensor) for name, tensor in both}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bitwise; NaN is NaN."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert not ours[name].is_meta, name
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        left, right = (t.reshape(-1).contiguous().view(torch.uint8) for t in (ours[name], value))
        assert torch.equal(left, right), name


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    """int64 tokens -> logits; constructed in the order of its modules."""

    def __init__(self, width: int = 13, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 17)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
