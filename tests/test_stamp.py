"""Truncate and stamp: equal to the flat capture, byte for byte, or captured flat with one line."""

import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard import dump, meta, stamp, trace
from fxshard.errors import CaptureError
from fxshard.program import Program
from fxshard.units import find_units
from tests.zoo import architectures as zoo

DEPTH = 8
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


def planned(model: nn.Module, call: Any, options: dict[str, Any]) -> tuple[list[str], Any]:
    """All that a plan says, as text, and its report."""
    plan = fxshard.plan(model, *call, world_size=2, **options)
    text = [dump.text(plan.program), plan.dump(fold=False)]
    return [*text, *tags(plan.program)], plan.memory.to_dict()


def captured(model: nn.Module, call: Any, options: dict[str, Any]) -> tuple[list[str], Any]:
    """The program before any pass, as text, and the storages of its values."""
    training = torch.is_grad_enabled()
    program = trace.capture(
        model, *call, units=find_units(model), world_size=2, training=training, **options
    )
    return [dump.text(program), *tags(program)], storages(program)


def tags(program: Program) -> list[str]:
    """What the text of a program leaves out."""
    lines = [str(node.meta["fxshard"]) for node in program.graph.nodes]
    return [*lines, *map(str, program.calls), str(program.results), str(program.signature)]


def storages(program: Program) -> list[Any]:
    """Per node, of each tensor: number and bytes of its storage, and how it lies there."""
    numbers: dict[int, int] = {}
    return [
        [
            (
                numbers.setdefault(id(t.untyped_storage()), len(numbers)),
                *(t.untyped_storage().nbytes(), t.storage_offset(), t.shape, t.stride(), t.dtype),
                *(t.device, t.requires_grad),
            )
            for t in meta.tensors(node.meta.get("val"))
        ]
        for node in program.graph.nodes
    ]


def both(
    build: Callable[[], nn.Module],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: Callable[..., tuple[list[str], Any]] = captured,
    **options: Any,
) -> Seen:
    """Capture a model as it is and with FXSHARD_FLAT_CAPTURE=1, and compare all that is `said`."""
    written: list[Any] = []
    original = stamp.written

    def counted(*args: Any) -> Any:
        found = original(*args)
        written.append(found)
        return found

    monkeypatch.setattr(stamp, "written", counted)
    found: list[Any] = []
    lines: list[list[str]] = []
    for flat in ("0", "1"):
        monkeypatch.setenv("FXSHARD_FLAT_CAPTURE", flat)
        caplog.clear()
        torch.manual_seed(0)
        model = build()
        before = state(model)
        with caplog.at_level(logging.INFO, "fxshard"):
            found.append(said(model, call, options))
        assert state(model) == before
        lines.append([r.getMessage() for r in caplog.records if FLAT in r.getMessage()])
    monkeypatch.setattr(stamp, "written", original)
    assert "\n".join(found[0][0]).splitlines() == "\n".join(found[1][0]).splitlines()
    assert found[0][1] == found[1][1]
    assert not lines[1]
    return Seen(len(written), lines[0])


def state(model: nn.Module) -> list[Any]:
    """Every attribute of every module, by identity; collections with what is in them."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return id(value), [(key, id(item)) for key, item in value.items()]
        return (id(value), list(map(id, value))) if isinstance(value, list) else id(value)

    return [{name: of(v) for name, v in m.__dict__.items()} for m in model.modules()]


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


class Indexed(Block):
    """Knows where it stands, and has a use for it that no tensor sees."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.index >= 0
        return super().forward(x)


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
    "shard_grad_op": (Net, {"strategy": "shard_grad_op", "optimizer": zoo.ADAMW}),
}


SLOW = (
    *("in a Sequential", "two lists", "a loss each", "an index unused", "eval", "mixed precision"),
    *("open sizes", "shard_grad_op", "for CUDA"),
)


def some_slow(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Names, those of `slow` marked so."""
    return [pytest.param(n, marks=[pytest.mark.slow] if n in slow else []) for n in names]


@pytest.mark.parametrize("name", some_slow(STAMPED, SLOW))
def test_equals_the_flat_capture(name: str, monkeypatch: Any, caplog: Any) -> None:
    build, options = STAMPED[name]
    said = planned if options else captured
    seen = both(build, ((x(),), {}), monkeypatch, caplog, said, **options)
    assert seen.lines == []
    assert seen.stamped == 1


def test_without_gradients(monkeypatch: Any, caplog: Any) -> None:
    with torch.no_grad():
        seen = both(Net, ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped == 1


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


class Padded(Net):
    """Its blocks have names of two digits."""

    def __init__(self) -> None:
        super().__init__()
        blocks = {f"{i:02d}": layer for i, layer in enumerate(self.layers)}
        self.layers = nn.Sequential(OrderedDict(blocks))  # type: ignore[assignment]


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


FAST_TRAPS = (
    *("1 / len", "i % 4 == 3", "one block is special", "the index scales", "linear drop rates"),
    *("states collected", "reversed", "counter", "custom backward", "hook on a tensor"),
    *("what is saved", "hook on a node", "a refusal is caught", "another default dtype"),
    *("literal", "dense", "one hooked in backward", "one frozen"),
)


@pytest.mark.parametrize("name", some_slow(TRAPS, TRAPS.keys() - set(FAST_TRAPS)))
def test_a_trap_is_captured_flat(name: str, monkeypatch: Any, caplog: Any) -> None:
    seen = both(TRAPS[name], ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped == 0
    assert len(seen.lines) == 1


# The same with more blocks, of which some stretch does repeat: right, whatever is done.
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


@pytest.mark.parametrize("make", [Padded, Twofold])
def test_blocks_of_other_names_are_captured_flat(make: Any, monkeypatch: Any, caplog: Any) -> None:
    seen = both(make, ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped == 0


@pytest.mark.slow
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
    """Knows how many blocks it has."""

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
    model = Net()
    loss = model(x())
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = fxshard.compile(model, world_size=2)
    found = compiled(x())
    found.backward()
    assert written
    assert torch.equal(found, loss)
    with compiled.summon_full_params(with_grads=True):
        for name, p in compiled.named_parameters():
            assert torch.equal(p.grad, wanted[name]), name


# -- transformers ----------------------------------------------------------------------------------

DEEP = dict(num_hidden_layers=8)
# name -> class, configuration, batch, options of `fxshard.plan`
MODELS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", zoo.LM | DEEP, zoo.TOKENS, {}),
    "llama, 16 layers": (
        *("LlamaForCausalLM", zoo.LM | {"num_hidden_layers": 16}, zoo.TOKENS),
        {"checkpoint": "full", "mixed_precision": HALF, "optimizer": zoo.ADAMW},
    ),
    "qwen3": ("Qwen3ForCausalLM", zoo.HEAD8 | DEEP, zoo.TOKENS, {}),
    "gpt2": ("GPT2LMHeadModel", zoo.GPT | {"n_layer": 8}, zoo.TOKENS, {}),
    "vit": ("ViTForImageClassification", zoo.VIT | DEEP, zoo.images(8), {}),
    "bert": ("BertForMaskedLM", zoo.ENCODER | DEEP, zoo.TOKENS, {}),
    "mixtral": ("MixtralForCausalLM", zoo.LM | zoo.EXPERTS | DEEP, zoo.TOKENS, {}),
    "t5": (
        *("T5ForConditionalGeneration", zoo.T5 | {"num_layers": 9, "num_decoder_layers": 8}),
        *(zoo.TRANSLATION, {}),
    ),
    "bart": (
        "BartForConditionalGeneration",
        *(zoo.BART | {"encoder_layers": 8, "decoder_layers": 8}, zoo.TRANSLATION, {}),
    ),
    "gemma3, every other layer": (
        "Gemma3ForCausalLM",
        zoo.HEAD8
        | dict(sliding_window=4, num_hidden_layers=12)
        | dict(layer_types=["sliding_attention", "full_attention"] * 6),
        *(zoo.TOKENS, {}),
    ),
    "gemma3, every third layer, and one more": (
        "Gemma3ForCausalLM",
        zoo.HEAD8
        | dict(sliding_window=4, num_hidden_layers=16)
        | dict(layer_types=((["sliding_attention"] * 2 + ["full_attention"]) * 6)[:16]),
        *(zoo.TOKENS, {}),
    ),
    "swin": (
        "SwinForImageClassification",
        *(zoo.WINDOWS | dict(depths=[1, 14], drop_path_rate=0.0), zoo.images(16), {}),
    ),
    "neox": ("GPTNeoXForCausalLM", zoo.ENCODER | DEEP, zoo.TOKENS, {}),
    "llama, open sizes": (
        *("LlamaForCausalLM", zoo.LM | DEEP, zoo.TOKENS),
        {"dynamic": {n: [("input_ids", i), ("labels", i)] for i, n in enumerate(("b", "s"))}},
    ),
}


@pytest.mark.parametrize("name", some_slow(MODELS, MODELS.keys() - {"llama"}))
def test_transformers_equal_the_flat_capture(name: str, monkeypatch: Any, caplog: Any) -> None:
    cls, config, batch, options = MODELS[name]
    call = batch(0, 0)
    seen = both(lambda: zoo.hf(cls, **config), call, monkeypatch, caplog, planned, **options)
    assert seen.lines == []
    assert seen.stamped == 1


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_their_checkpointing_too(reentrant: bool, monkeypatch: Any, caplog: Any) -> None:
    def build() -> nn.Module:
        return zoo.hf_checkpointed("LlamaForCausalLM", reentrant=reentrant, **zoo.LM | DEEP)

    seen = both(build, zoo.TOKENS(0, 0), monkeypatch, caplog, planned)
    assert seen.lines == []
    assert seen.stamped == 1


DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
DEPTHS += ("encoder_layers", "decoder_layers")


def deepened(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration of two layers for nine, or for twelve where it says what each is."""
    depth = 12 if config.keys() & {"layer_types", "attention_types"} else 9
    found = {k: depth if k in DEPTHS else v for k, v in config.items()}
    for key, value in config.items():
        if isinstance(value, dict):
            found[key] = deepened(value)
    if "layer_types" in config:
        found["layer_types"] = config["layer_types"] * 6
    if "attention_types" in config:
        found["attention_types"] = [[["global", "local"], 6]]
    return found


SWEEP = {
    name: row if isinstance(row, tuple) else (row, zoo.TOKENS)
    for family in ("decoder-only", "mixture of experts", "state space and hybrid")
    for name, row in zoo.TRANSFORMERS[family].items()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_any_architecture_equals_the_flat_capture(name: str, monkeypatch: Any, caplog: Any) -> None:
    """Stamped or not: the same program, or the same refusal."""
    config, batch = SWEEP[name]
    said: list[str] = []

    def captured_or_refused(*args: Any) -> Any:
        try:
            return captured(*args)
        except CaptureError as error:
            said.append(str(error).splitlines()[0])
            return [said[-1]], None

    call = batch(0, 0)
    build = partial(zoo.hf, name, **deepened(config))
    seen = both(build, call, monkeypatch, caplog, captured_or_refused)
    assert seen.stamped + len(seen.lines) >= (0 if said else 1)
