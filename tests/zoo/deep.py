"""Deep models by hand: what truncate and stamp takes (what it must not take: traps.py)."""

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.architecture import ADAMW

DEPTH = 8
WIDTH = 8


class Block(nn.Module):
    """A residual block; `index` is where it stands, which it does not use by itself."""

    def __init__(self, index: int = 0, width: int = 16) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Linear, blocks, Linear; the loss is a mean of squares."""

    def __init__(self, block: Callable[[int], nn.Module] = Block, depth: int = DEPTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block(i) for i in range(depth))
        self.last = nn.Linear(WIDTH, WIDTH)

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.last(self.blocks(self.first(x))).square().mean()


def x() -> Tensor:
    return torch.ones(2, 4, WIDTH)


# -- what is stamped -------------------------------------------------------------------------------


class Siblings(nn.Module):
    """Two lists of one length, whose blocks take turns; the residual sums are the parent's."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH + 2))
        self.fcs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH + 2))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.fcs)):
            x = x + self.fcs[i](self.norms[i](x)).relu()
        return x.mean()


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


class Normed(Block):
    """Buffers that forward changes."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.batch = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch(x))


class Checkpointed(Net):
    """Every other block is checkpointed: a period of two."""

    def blocks(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if i % 2 else layer(x)
        return x


class Ends(Net):
    """Blocks of other kinds before and after."""

    def __init__(self) -> None:
        super().__init__(depth=DEPTH + 2)
        self.layers[0] = nn.Linear(WIDTH, WIDTH)
        self.layers[1] = Block(width=24)
        self.layers[-1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Shared(Net):
    """Each block reads what the first one found, and a module that is called in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)

    def blocks(self, x: Tensor) -> Tensor:
        bias = self.layers[0].up(x).sum()
        for layer in self.layers:
            x = layer(self.scale(x)) + bias
        return x


class Losses(Net):
    """A loss of each block, summed up on the way."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            total = total + x.mean()
        return total


class InSequence(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)  # type: ignore[assignment]

    def blocks(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class InDict(Net):
    def __init__(self) -> None:
        super().__init__()
        blocks = {f"block {i}": layer for i, layer in enumerate(self.layers)}
        self.layers = nn.ModuleDict(blocks)  # type: ignore[assignment]

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():  # type: ignore[operator]
            x = layer(x)
        return x


class Padded(Net):
    """Its blocks have names of two digits."""

    def __init__(self) -> None:
        super().__init__()
        blocks = {f"{i:02d}": layer for i, layer in enumerate(self.layers)}
        self.layers = nn.Sequential(OrderedDict(blocks))  # type: ignore[assignment]

    def blocks(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Indexed(Block):
    """Knows where it stands, and has a use for it that no tensor sees."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.index >= 0
        return super().forward(x)


def at_the_root() -> nn.Module:
    return nn.Sequential(*(Block(i) for i in range(DEPTH)))


class Activated(Block):
    """Calls a module that is not its own alone."""

    def __init__(self, index: int, act: nn.Module) -> None:
        super().__init__(index)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def one_activation() -> nn.Module:
    act = nn.Dropout(0.1)
    return Net(lambda i: Activated(i, act))


def frozen() -> nn.Module:
    net = Net(depth=11)
    for layer in (net.first, *net.layers[:3]):
        layer.requires_grad_(False)
    return net


def two_lists() -> nn.Module:
    net = Net()
    net.first = nn.Sequential(*(Block(i, 12) for i in range(8)))  # type: ignore[assignment]
    return net


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPEN = {"batch": [("x", 0)], "seq": [("x", 1)]}
STAMPED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "blocks": (Net, {}),
    "in a Sequential": (InSequence, {}),
    "in a Sequential, by name": (Padded, {}),
    "in a ModuleDict": (InDict, {}),
    "at the root": (at_the_root, {}),
    "one activation for all": (one_activation, {}),
    "sibling lists": (Siblings, {}),
    "two lists": (two_lists, {}),
    "dropout": (lambda: Net(Dropped), {}),
    "buffers written": (lambda: Net(Normed), {}),
    "every other one checkpointed": (lambda: Checkpointed(depth=12), {}),
    "prefix and suffix": (Ends, {}),
    "shared by all": (Shared, {}),
    "a loss each": (lambda: Losses(depth=10), {}),
    "an index unused": (lambda: Net(Indexed), {}),
    "some frozen": (frozen, {}),
    "eval": (lambda: Net(Dropped).eval(), {}),
    "mixed precision": (Net, {"mixed_precision": HALF}),
    "checkpoint": (lambda: Net(Dropped), {"checkpoint": "full"}),
    "open sizes": (Net, {"dynamic": OPEN}),
    "for CUDA": (lambda: Net(Dropped), {"device": "cuda"}),
    "shard_grad_op": (Net, {"strategy": "shard_grad_op", "optimizer": ADAMW}),
}


# -- models of single tests -----------------------------------------------------------------------


class LayerDrop(Net):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 1:
                x = layer(x)
        return x


class Leaving(Block):
    """Leaves something behind wherever it can, and has one use for what it has left."""

    count = 0

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        number, Leaving.count = Leaving.count, (Leaving.count + 1) % DEPTH
        self.seen = number
        self.total = self.total + 1
        x = super().forward(x)
        return x.relu() if number == 3 else x


class Fails(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.index == 5:
            raise ValueError("the sixth block")
        return super().forward(x)


class Restless(Net):
    """Knows how many blocks it has."""

    def blocks(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = self.layers[i](x)
        return x
