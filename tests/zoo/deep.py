"""Deep models by hand: what truncate and stamp takes, and traps for it."""

import contextlib
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.architectures import ADAMW

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
    """Blocks of other kinds in front and behind."""

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


# -- traps: depth or index enters the mathematics --------------------------------------------------


class Averaged(Net):
    def blocks(self, x: Tensor) -> Tensor:
        return super().blocks(x) / len(self.layers)


class Fourth(Net):
    def blocks(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i % 4 == 3:
                x = x.relu()
        return x


class Special(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if self.index == 5 else x


class Scaled(Net):
    def blocks(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) * (i + 1)
        return x


class Rate(Block):
    """Stochastic depth: the rate grows linearly."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(super().forward(x), self.index / 20, self.training)


class LateRate(Block):
    """One block drops more than the others."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3 if self.index == 6 else 0.1, self.training)


class Window(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[:, : 1 + self.index % 3].sum()


class Collected(Net):
    def forward(self, x: Tensor) -> Any:
        states = [self.first(x)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return {"loss": states[-1].mean(), "states": states}


class Stacked(Net):
    def forward(self, x: Tensor) -> Any:
        states = [self.first(x)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return torch.stack(states).mean()


class Third(Net):
    """What one block in the middle gave is read at the end."""

    def forward(self, x: Tensor) -> Any:
        states = [self.first(x)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return (states[-1] + states[4] + states[-4]).mean()


class Reversed(Net):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Twice(Net):
    def blocks(self, x: Tensor) -> Tensor:
        return super().blocks(super().blocks(x))


class TwiceEach(Net):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        return x


class Dense(Net):
    def blocks(self, x: Tensor) -> Tensor:
        states = [x]
        for layer in self.layers:
            states.append(layer(torch.stack(states).sum(0)))
        return states[-1]


class FirstToAll(Net):
    def blocks(self, x: Tensor) -> Tensor:
        start = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x) + start
        return x


class Ladder(Net):
    """The first block feeds the last, the second the one before it, and so on."""

    def blocks(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        half = len(self.layers) // 2
        for i, layer in enumerate(self.layers):
            x = layer(x) if i < half else layer(x + kept.pop())
            if i < half:
                kept.append(x)
        return x


class Counter(Net):
    """Counts its blocks outside of all modules."""

    count = 0

    def blocks(self, x: Tensor) -> Tensor:
        Counter.count = 0
        for layer in self.layers:
            x = layer(x)
            Counter.count += 1
            if Counter.count == 6:
                x = x.relu()
        return x


class Round(Block):
    """Counts outside of all modules, and comes back to 0 with the last block."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        number, Round.count = Round.count, (Round.count + 1) % 16
        x = super().forward(x)
        return x.relu() if number == 3 else x


class Iterated(Block):
    """The same, with an iterator."""

    def __init__(self, index: int, numbers: Iterator[int]) -> None:
        super().__init__(index)
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.relu() if next(self.numbers) == 3 else x


def iterated() -> nn.Module:
    numbers = itertools.cycle(range(16))
    return Net(lambda i: Iterated(i, numbers), depth=16)


class Times(torch.autograd.Function):
    """A custom function whose backward alone knows the number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * (3 if ctx.number == 5 else 2), None


class InBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Times.apply(super().forward(x), self.index)
        return out


class TensorHook(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (3 if self.index == 5 else 2))
        return x


class Saved(torch.autograd.Function):
    """A custom function that saves another tensor in one block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(x if number == 5 else y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        return grad * saved, grad * saved, None


class Saving(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Saved.apply(x, super().forward(x), self.index)
        return out


class NodeHook(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.grad_fn is not None and self.index == 5:
            x.grad_fn.register_hook(
                lambda given, _: tuple(g if g is None else g * 3 for g in given)
            )
        return x


register_hook = Tensor.register_hook  # an alias of it


class Swallowing(Block):
    """Hides that a hook is refused."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with contextlib.suppress(Exception):
            register_hook(x, lambda grad: grad * (3 if self.index == 5 else 2))
        return x


class OtherDefault(Block):
    """One block makes a constant in another default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        if self.index == 5:
            torch.set_default_dtype(torch.float64)
        try:
            ones = torch.ones(8)
        finally:
            torch.set_default_dtype(torch.float32)
        return super().forward(x) + (ones / 3).sum().float()


class Twofold(Net):
    """One block has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = self.layers[5]


class Literal(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(2.0 if self.index == 5 else 1.0)


class Detached(Block):
    """One block lets no gradient through."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach() if self.index == 5 else x)


class NoGrad(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.index != 5 and torch.is_grad_enabled()):
            return super().forward(x)


class Widening(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index, 16 + index)


def tied() -> nn.Module:
    net = Net()
    net.layers[5].up.weight = net.layers[4].up.weight
    return net


def all_tied() -> nn.Module:
    net = Net()
    for layer in net.layers[1:]:
        layer.up.weight = net.layers[0].up.weight
    return net


def hooked() -> nn.Module:
    net = Net()
    net.layers[5].register_forward_hook(lambda module, args, out: out * 2)
    return net


def hooked_backward() -> nn.Module:
    net = Net()
    net.layers[5].register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))
    return net


def one_frozen() -> nn.Module:
    net = Net()
    net.layers[5].up.requires_grad_(False)
    return net


def one_in_eval() -> nn.Module:
    net = Net(Dropped)
    net.layers[5].eval()
    return net


TRAPS: dict[str, Callable[[], nn.Module]] = {
    "1 / len": Averaged,
    "i % 4 == 3": Fourth,
    "one block is special": lambda: Net(Special),
    "the index scales": Scaled,
    "linear drop rates": lambda: Net(Rate),
    "windows": lambda: Net(Window),
    "states collected": Collected,
    "states stacked": Stacked,
    "a state in the middle": Third,
    "reversed": Reversed,
    "twice": Twice,
    "dense": Dense,
    "ladder": Ladder,
    "counter": Counter,
    "counter of the class, round and round": lambda: Net(Round, depth=16),
    "iterator": iterated,
    "a block of two names": Twofold,
    "custom backward": lambda: Net(InBackward),
    "hook on a tensor": lambda: Net(TensorHook),
    "what is saved": lambda: Net(Saving),
    "hook on a node": lambda: Net(NodeHook),
    "a refusal is caught": lambda: Net(Swallowing),
    "another default dtype": lambda: Net(OtherDefault),
    "literal": lambda: Net(Literal),
    "detached": lambda: Net(Detached),
    "no_grad": lambda: Net(NoGrad),
    "shapes grow": lambda: Net(Widening),
    "one hooked in backward": hooked_backward,
    "one frozen": one_frozen,
    "one in eval": one_in_eval,
}


DEEP_TRAPS: dict[str, Callable[[], nn.Module]] = {
    "i % 4 == 3": lambda: Fourth(depth=24),
    "one block is special": lambda: Net(Special, depth=16),
    "twice each": TwiceEach,
    "the first to all": FirstToAll,
    "custom backward": lambda: Net(InBackward, depth=16),
    "counter": lambda: Counter(depth=16),
    "one drop rate": lambda: Net(LateRate),
    "all tied": all_tied,
    "two tied": tied,
    "one hooked": hooked,
    "a state in the middle": lambda: Third(depth=16),
}


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
