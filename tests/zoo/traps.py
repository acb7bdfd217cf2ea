"""Deep models that truncate and stamp must not take: depth or index enters the mathematics."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.deep import Block, Dropped, Net


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
