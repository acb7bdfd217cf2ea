"""Truncate and stamp: equal to the flat capture, byte for byte, or captured flat with one line."""

import gc
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard import dump, stamp, trace
from fxshard.errors import CaptureError
from tests.zoo import architectures as zoo

DEPTH = 10
WIDTH = 8
FLAT = "is captured block by block"


# -- models by hand --------------------------------------------------------------------------------


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


class Seen:
    """What one call of `both` saw.

    Attributes:
        stamped: how many captures were stamped.
        lines: lines of the log that say why one was not.
    """

    def __init__(self, stamped: int, lines: list[str]) -> None:
        self.stamped, self.lines = stamped, lines


def both(
    build: Callable[[], nn.Module],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    **options: Any,
) -> Seen:
    """Plan a model as it is and with FXSHARD_FLAT_CAPTURE=1, and compare all that is said."""
    written: list[Any] = []
    original = stamp.written

    def counted(*args: Any) -> Any:
        found = original(*args)
        written.append(found)
        return found

    monkeypatch.setattr(stamp, "written", counted)
    texts: list[str] = []
    reports: list[Any] = []
    lines: list[str] = []
    for flat in ("0", "1"):
        monkeypatch.setenv("FXSHARD_FLAT_CAPTURE", flat)
        caplog.clear()
        torch.manual_seed(0)
        model = build()
        before = state(model)
        with caplog.at_level(logging.INFO, "fxshard"):
            plan = fxshard.plan(model, *call, world_size=2, **options)
        assert state(model) == before
        text = [dump.text(plan.program), plan.dump(fold=False), str(plan.program.calls)]
        text += [str(node.meta["fxshard"]) for node in plan.program.graph.nodes]
        texts.append("\n".join(text))
        reports.append(plan.memory.to_dict())
        said = [r.getMessage() for r in caplog.records if FLAT in r.getMessage()]
        if flat == "0":
            lines = said
        else:
            assert not said
    assert texts[0].splitlines() == texts[1].splitlines()
    assert reports[0] == reports[1]
    monkeypatch.setattr(stamp, "written", original)
    return Seen(len(written), lines)


def state(model: nn.Module) -> list[Any]:
    """Every attribute of every module, by identity; collections with what is in them."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return id(value), [(key, id(item)) for key, item in value.items()]
        return (id(value), list(map(id, value))) if isinstance(value, list) else id(value)

    return [{name: of(v) for name, v in m.__dict__.items()} for m in model.modules()]


# -- what is stamped ---------------------------------------------------------------------------------


class Siblings(nn.Module):
    """Two lists of one length, whose blocks take turns; the residual sums are the parent's."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))
        self.fcs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

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


class Indexed(Block):
    """Knows where it stands, and has a use for it that no tensor sees."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.index >= 0
        return super().forward(x)


def frozen() -> nn.Module:
    net = Net(depth=12)
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
    "sibling lists": (Siblings, {}),
    "two lists": (two_lists, {}),
    "dropout": (lambda: Net(Dropped), {}),
    "buffers written": (lambda: Net(Normed), {}),
    "every other one checkpointed": (lambda: Checkpointed(depth=14), {}),
    "prefix and suffix": (Ends, {}),
    "shared by all": (Shared, {}),
    "a loss each": (Losses, {}),
    "an index unused": (lambda: Net(Indexed), {}),
    "some frozen": (frozen, {}),
    "eval": (lambda: Net(Dropped).eval(), {}),
    "mixed precision": (Net, {"mixed_precision": HALF}),
    "checkpoint": (lambda: Net(Dropped), {"checkpoint": "full"}),
    "open sizes": (Net, {"dynamic": OPEN}),
    "shard_grad_op": (Net, {"strategy": "shard_grad_op", "optimizer": zoo.ADAMW}),
}


@pytest.mark.parametrize("name", STAMPED)
def test_equals_the_flat_capture(name: str, monkeypatch: Any, caplog: Any) -> None:
    build, options = STAMPED[name]
    seen = both(build, ((x(),), {}), monkeypatch, caplog, **options)
    assert seen.lines == []
    assert seen.stamped == 1


def test_without_gradients(monkeypatch: Any, caplog: Any) -> None:
    with torch.no_grad():
        seen = both(Net, ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped == 1


# -- traps: depth or index enters the mathematics ----------------------------------------------------


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
        return x + F.dropout(super().forward(x), self.index / DEPTH, self.training)


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
    "one drop rate": lambda: Net(LateRate),
    "windows": lambda: Net(Window),
    "states collected": Collected,
    "states stacked": Stacked,
    "a state in the middle": Third,
    "reversed": Reversed,
    "twice": Twice,
    "dense": Dense,
    "ladder": Ladder,
    "counter": Counter,
    "custom backward": lambda: Net(InBackward),
    "hook on a tensor": lambda: Net(TensorHook),
    "literal": lambda: Net(Literal),
    "detached": lambda: Net(Detached),
    "no_grad": lambda: Net(NoGrad),
    "shapes grow": lambda: Net(Widening),
    "two tied": tied,
    "all tied": all_tied,
    "one hooked": hooked,
    "one hooked in backward": hooked_backward,
    "one frozen": one_frozen,
    "one in eval": one_in_eval,
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_captured_flat(name: str, monkeypatch: Any, caplog: Any) -> None:
    seen = both(TRAPS[name], ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped == 0
    assert len(seen.lines) == 1


# The same with more blocks, of which some stretch does repeat: right, whatever is done.
DEEP_TRAPS: dict[str, Callable[[], nn.Module]] = {
    "i % 4 == 3": lambda: Fourth(depth=26),
    "one block is special": lambda: Net(Special, depth=16),
    "twice each": TwiceEach,
    "the first to all": FirstToAll,
    "custom backward": lambda: Net(InBackward, depth=16),
    "counter": lambda: Counter(depth=16),
    "a state in the middle": lambda: Third(depth=16),
}


@pytest.mark.parametrize("name", DEEP_TRAPS)
def test_what_repeats_beside_a_trap_is_stamped(name: str, monkeypatch: Any, caplog: Any) -> None:
    seen = both(DEEP_TRAPS[name], ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped + len(seen.lines) == 1


class LayerDrop(Net):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.9:
                x = layer(x)
        return x


def test_numbers_of_python_are_refused_as_before(caplog: Any) -> None:
    model = LayerDrop()
    before, drawn = state(model), random.getstate()
    with pytest.raises(CaptureError, match="draws from random"):
        fxshard.plan(model, (x(),), world_size=2)
    assert state(model) == before
    assert random.getstate() == drawn


class Fails(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.index == 5:
            raise ValueError("the sixth block")
        return super().forward(x)


def test_a_model_that_fails_says_so_and_is_as_it_was() -> None:
    model = Net(Fails)
    before = state(model)
    with pytest.raises(CaptureError, match="the sixth block"):
        fxshard.plan(model, (x(),), world_size=2)
    assert state(model) == before


class Restless(Net):
    """Fails where it has other than ten blocks: the rehearsal of all of them says nothing."""

    def blocks(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = self.layers[i](x)
        return x


def test_a_parent_that_counts_its_blocks_is_captured_flat(monkeypatch: Any, caplog: Any) -> None:
    seen = both(Restless, ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped == 0
    assert len(seen.lines) == 1


def test_shallow_models_are_not_looked_at(monkeypatch: Any, caplog: Any) -> None:
    seen = both(lambda: Net(depth=6), ((x(),), {}), monkeypatch, caplog)
    assert (seen.stamped, seen.lines) == (0, [])


def test_compile_stamps_too(monkeypatch: Any) -> None:
    """Gradients of a stamped program are those of eager."""
    written: list[Any] = []
    original = stamp.written
    monkeypatch.setattr(stamp, "written", lambda *a: written.append(a) or original(*a))
    torch.manual_seed(0)
    model = Net(depth=12)
    loss = model(x())
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = fxshard.compile(model, world_size=2)
    found = compiled(x())
    found.backward()
    assert len(written) == 1
    assert torch.equal(found, loss)
    with compiled.summon_full_params(with_grads=True):
        for name, p in compiled.named_parameters():
            assert torch.equal(p.grad, wanted[name]), name
