"""Changed after compile, methods on unsharded parameters."""

import array
import copy
import dataclasses
import pickle
import types
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError, StepError
from tests.fsdp2 import full
from tests.runtime.object_cases import EVERYWHERE, agent, compiled, early, run, tokens

# -- changed after compile -------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


class Twice(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def changes(rank: int, world_size: int) -> None:
    ours, eager, x = compiled(net()).eval(), net().eval(), torch.randn(4, 8)
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model[1] = nn.Tanh()
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model[1].__class__ = Twice
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model[1] = nn.Softplus(beta=2)
        model.train()
        model[2].p = 0.0
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model[1].beta = 3.0
    assert_close(ours(x), eager(x))
    count = len(ours._fxshard.variants)
    for model in (ours, eager):
        model[1].beta, model[1].note = 2, "nobody reads this"
    assert_close(ours(x), eager(x))
    assert len(ours._fxshard.variants) == count  # that of before serves

    ours[3] = nn.Linear(8, 2)
    with pytest.raises(StepError, match=r"'3\.\w+' was put into the model"):
        ours(x)


@EVERYWHERE
def test_what_changes_after_the_first_call_is_followed_or_refused(ranks: Any, where: str) -> None:
    run(ranks, where, changes)


def replaced(rank: int, world_size: int) -> None:
    x = torch.ones(3, 8)
    ours = compiled(nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(x)
    ours.weight = nn.Parameter(torch.ones_like(ours.weight) * 2)  # a DTensor on ranks
    assert_close(ours(x), torch.full((3, 4), 16.0))
    assert_close(full(ours.weight), torch.full((4, 8), 2.0))
    ours(x).sum().backward()
    with pytest.raises(StepError, match="SGD holds parameter 'weight' as it was before"):
        optimizer.step()
    ours.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(StepError, match="'extra' was put into the model"):
        ours(x)
    del ours.extra
    assert_close(ours(x), torch.full((3, 4), 16.0))
    ours.weight = nn.Parameter(torch.ones(5, 8))
    with pytest.raises(StepError, match="another kind of tensor"):
        ours(x)


@EVERYWHERE
def test_a_replaced_parameter(ranks: Any, where: str) -> None:
    run(ranks, where, replaced)


@EVERYWHERE
def test_an_optimizer_made_before_compile(ranks: Any, where: str) -> None:
    run(ranks, where, early)


class Configured(nn.Module):
    """Reads an object's attribute, a list and a tensor that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.config = type("Config", (), {})()
        self.config.double, self.order, self.shift = False, [1.0, 2.0], torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * self.order[-1] + self.shift
        return 2 * x if self.config.double else x


@pytest.mark.parametrize("args", [None, (torch.ones(2, 4),)], ids=["at a call", "with args"])
def test_attributes_that_forward_reads(args: Any) -> None:
    torch.manual_seed(0)
    eager = Configured()
    ours = compiled(copy.deepcopy(eager), args=args)
    x = torch.ones(2, 4)
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model.config.double = True
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model.order.append(3.0)
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model.shift = torch.zeros(4)
    assert_close(ours(x), eager(x))
    assert len(ours._fxshard.variants) == 4


class Switched(nn.Module):
    """What else it reads depends on a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.aside, self.factor, self.shift = nn.Linear(4, 4), False, 2.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.shift if self.aside else self.a(x) * self.factor


def test_what_only_another_state_reads_makes_no_new_one() -> None:
    torch.manual_seed(0)
    eager, x = Switched(), torch.ones(2, 4)
    ours = compiled(copy.deepcopy(eager))

    def programs(**attributes: Any) -> int:
        for model in (ours, eager):
            vars(model).update(attributes)
        assert_close(ours(x), eager(x))
        return len(ours._fxshard.variants)

    assert [programs(aside=aside) for aside in (False, True, False, True)] == [1, 2, 2, 2]
    assert [programs(shift=3.0), programs(aside=False), programs(factor=3.0)] == [3, 4, 5]
    # What has been read by all is looked at in each.
    assert programs(aside=True, shift=1.0) == 6 and programs(aside=False, factor=2.0) <= 7
    with torch.no_grad():
        assert_close(ours(x), eager(x))


class Holds(nn.Module):
    """A linear layer, and what `function` makes of its output."""

    factor = 1.0
    table: ClassVar[list[float]] = [1.0]

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(4, 4), function
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.a(x))

    def helped(self, x: Tensor) -> Tensor:
        """A method that may be exchanged."""
        return x


class Times:
    """An object that is called."""

    def __init__(self, k: float) -> None:
        self.k = k

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.k


@dataclasses.dataclass(slots=True)
class Sizes:
    k: float = 1.0


class Loop:
    def __init__(self) -> None:
        self.scale, self.steps = 1.0, 0


class Trainer:
    """Counts its calls, as trainers do that a module refers to."""

    def __init__(self) -> None:
        self.base, self.steps, self.loop, self.log = 1.5, 0, Loop(), [0.0]

    @property
    def rate(self) -> float:
        return self.base * 2

    def count(self) -> None:
        self.steps += 1
        self.loop.steps += 1
        self.log.append(self.steps)


class Finds:
    """Its attributes are items of a dict."""

    def __init__(self, **held: float) -> None:
        self.held = held

    def __getattr__(self, name: str) -> float:
        try:
            return self.__dict__["held"][name]
        except KeyError:
            raise AttributeError(name) from None


def space(**names: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**names)


def exchange_config(model: Any) -> None:
    model.cfg.sub = space(k=1.0)
    model(torch.ones(2, 4))
    model.cfg.sub.k = 3.0


CHANGES: dict[str, tuple[Callable[[], Holds], Callable[[Any], Any]]] = {
    "of the class, shadowed": (
        lambda: Holds(lambda m, y: y * m.factor),
        lambda m: setattr(m, "factor", 3.0),
    ),
    "a list of the class, shadowed": (
        lambda: Holds(lambda m, y: y * m.table[0]),
        lambda m: setattr(m, "table", [3.0]),
    ),
    "a default": (
        lambda: Holds(lambda m, y: y * getattr(m, "k", 1.0)),
        lambda m: setattr(m, "k", 3.0),
    ),
    "none yet": (
        lambda: Holds(lambda m, y: y * 3 if hasattr(m, "k") else y),
        lambda m: setattr(m, "k", None),
    ),
    "no buffer yet": (
        lambda: Holds(lambda m, y: y * getattr(m, "k", 1.0)),
        lambda m: m.register_buffer("k", torch.tensor(3.0)),
    ),
    "gone": (
        lambda: Holds(lambda m, y: y * getattr(m, "k", 1.0), k=2.0),
        lambda m: delattr(m, "k"),
    ),
    "an int, then the same as a float": (
        lambda: Holds(lambda m, y: y * (torch.full((4,), 2**24 + 1) * m.k - 2**24), k=1),
        lambda m: setattr(m, "k", 1.0),
    ),
    "a method": (
        lambda: Holds(lambda m, y: m.helped(y)),
        lambda m: setattr(m, "helped", lambda y: y * 3),
    ),
    "forward of a layer": (
        lambda: Holds(lambda m, y: y),
        lambda m: setattr(m.a, "forward", lambda x: x * 3),
    ),
    "a nested configuration": (
        lambda: Holds(lambda m, y: y * m.cfg.sub.k, cfg=space(sub=space(k=1.0))),
        lambda m: setattr(m.cfg.sub, "k", 3.0),
    ),
    "an exchanged configuration": (
        lambda: Holds(lambda m, y: y * m.cfg.sub.k, cfg=space(sub=space(k=1.0))),
        exchange_config,
    ),
    "a configuration in a dict": (
        lambda: Holds(lambda m, y: y * m.d["c"].k, d={"c": space(k=1.0)}),
        lambda m: setattr(m.d["c"], "k", 3.0),
    ),
    "a configuration with slots": (
        lambda: Holds(lambda m, y: y * m.sizes[0].k, sizes=(Sizes(),)),
        lambda m: setattr(m.sizes[0], "k", 3.0),
    ),
    "an object that is called": (
        lambda: Holds(lambda m, y: m.times(y), times=Times(1.0)),
        lambda m: setattr(m.times, "k", 3.0),
    ),
    "a list of lists": (
        lambda: Holds(lambda m, y: y * m.order[0][0], order=[[1.0], torch.ones(1)]),
        lambda m: m.order[0].append(m.order[0].pop() * 3),
    ),
    "a tensor in a list": (
        lambda: Holds(lambda m, y: y * m.order[0], order=[torch.tensor(1.0)]),
        lambda m: m.order.__setitem__(0, torch.tensor(3.0)),
    ),
    "a tensor in a deque": (
        lambda: Holds(lambda m, y: y * m.order[-1], order=deque([torch.tensor(1.0)])),
        lambda m: m.order.append(torch.tensor(3.0)),
    ),
    "a layer in a list": (
        lambda: Holds(lambda m, y: m.aside[0](y), aside=[nn.LeakyReLU(0.5)]),
        lambda m: setattr(m.aside[0], "negative_slope", 3.0),
    ),
    "an array": (
        lambda: Holds(lambda m, y: y * float(m.n[0]), n=np.ones(1)),
        lambda m: m.n.__setitem__(0, 3.0),
    ),
    "a large array": (
        lambda: Holds(lambda m, y: y * float(m.n[-1, 1]), n=np.ones((2, 200, 100)).T[..., 0]),
        lambda m: m.n.__setitem__((-1, 1), 3.0),
    ),
    "an array of objects": (
        lambda: Holds(lambda m, y: y * m.n[0].k, n=np.array([space(k=1.0)])),
        lambda m: setattr(m.n[0], "k", 3.0),
    ),
    "bytes": (
        lambda: Holds(lambda m, y: y * m.n[0], n=bytearray(b"1")),
        lambda m: m.n.__setitem__(0, 3),
    ),
    "an array of Python's": (
        lambda: Holds(lambda m, y: y * m.n[0], n=array.array("d", [1.0])),
        lambda m: m.n.__setitem__(0, 3.0),
    ),
    "what an object of an object holds": (
        lambda: Holds(lambda m, y: y * m.trainer.loop.scale, trainer=Trainer()),
        lambda m: setattr(m.trainer.loop, "scale", 3.0),
    ),
    "what a property reads": (
        lambda: Holds(lambda m, y: y * m.trainer.rate, trainer=Trainer()),
        lambda m: setattr(m.trainer, "base", 3.0),
    ),
    "what an object of a list holds": (
        lambda: Holds(lambda m, y: y * m.trainers["all"][0].base, trainers={"all": [Trainer()]}),
        lambda m: setattr(m.trainers["all"][0], "base", 3.0),
    ),
    "what an object may hold": (
        lambda: Holds(lambda m, y: y * getattr(m.trainer, "factor", 1.0), trainer=Trainer()),
        lambda m: setattr(m.trainer, "factor", 3.0),
    ),
    "all that an object holds": (
        lambda: Holds(lambda m, y: y * sum(vars(m.trainer.loop).values()), trainer=Trainer()),
        lambda m: setattr(m.trainer.loop, "more", 3.0),
    ),
    "what an object finds in another way": (
        lambda: Holds(lambda m, y: y * m.of.scale, of=Finds(scale=1.0)),
        lambda m: m.of.held.update(scale=3.0),
    ),
}


@pytest.mark.parametrize("args", [None, (torch.ones(2, 4),)], ids=["at a call", "with args"])
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.sample(29)  # each change once
def test_attributes_that_are_changed_after_the_first_call(what: str, args: Any) -> None:
    build, change = CHANGES[what]
    torch.manual_seed(0)
    eager = build()
    ours, x = compiled(copy.deepcopy(eager), args=args), torch.randn(2, 4)
    assert_close(ours(x), eager(x))
    ours(x)
    assert len(ours._fxshard.variants) == 1
    before = eager(x)
    change(eager)
    change(ours)
    assert not torch.equal(eager(x), before)
    assert_close(ours(x), eager(x))
    count = len(ours._fxshard.variants)
    ours(x)
    assert len(ours._fxshard.variants) == count


def test_attributes_that_are_given_equal_values_keep_their_program() -> None:
    def function(m: Any, y: Tensor) -> Tensor:
        return y * m.k * m.order[0] * m.cfg.k * float(m.n[0]) * m.low

    made = {"k": 1.5, "order": [2.0, [1.5]], "cfg": space(k=2.5), "n": np.ones(3), "low": 2.0}
    ours = compiled(Holds(function, **made, twice=None))
    x = torch.randn(2, 4)
    ours(x)
    ours.k, ours.order, ours.cfg.k = float("1.5"), [2.0, [float("1.5")]], float("2.5")
    ours.n, ours.low = np.ones(3), np.float64(2.0)
    ours(x)
    first = len(ours._fxshard.variants)  # np.float64 is another kind of number
    ours.low = np.float64("2.0")
    ours(x)
    assert len(ours._fxshard.variants) == first == 2
    ours.low = 2.0
    ours.order[1][0] = 7.0
    ours(x)
    ours.order[1][0] = 1.5
    ours(x)
    assert len(ours._fxshard.variants) == 3


def test_what_forward_does_not_read_of_an_object_may_change() -> None:
    """A trainer counts steps. It is as it was once the model is traced, and may be copied."""

    def function(m: Any, y: Tensor) -> Tensor:
        return y * m.trainer.rate * m.trainer.loop.scale

    eager = Holds(function, trainer=Trainer())
    ours, x = compiled(copy.deepcopy(eager)), torch.randn(2, 4)
    for _ in range(12):
        assert_close(ours(x), eager(x))
        ours.trainer.count()
    assert len(ours._fxshard.variants) == 1
    assert Trainer.__getattribute__ is Loop.__getattribute__ is object.__getattribute__
    assert copy.deepcopy(ours.trainer).steps == 12


# -- methods on unsharded parameters ---------------------------------------------------------------


def of_transformers(rank: int, world_size: int, folder: str) -> None:
    from transformers import LlamaForCausalLM

    from tests.tiny import llama

    eager, ours = llama().eval(), compiled(llama().eval())
    assert ours.config.model_type == "llama" and ours.dtype is torch.float32
    ids = torch.arange(5 + rank)[None]  # ranks generate other numbers of tokens
    options = {"max_new_tokens": 2 + rank, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    assert torch.equal(ours.get_input_embeddings()(ids), eager.get_input_embeddings()(ids))
    ours.save_pretrained(folder)
    if rank == 0:
        loaded = LlamaForCausalLM.from_pretrained(folder)
        assert loaded.config.architectures == ["LlamaForCausalLM"]
        for mine, theirs in zip(loaded.parameters(), eager.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    names = [name for name, _ in ours.named_parameters()]
    assert names == [name for name, _ in eager.named_parameters()]
    assert all(ours.get_parameter(name) is not None for name in names)  # sharded again


@EVERYWHERE
def test_a_model_of_transformers(ranks: Any, where: str, tmp_path: Any) -> None:
    run(ranks, where, of_transformers, str(tmp_path))


def registered(rank: int, world_size: int) -> None:
    ours, eager = compiled(agent()), agent()
    fxshard.register_fsdp_forward_method(ours, "value")
    fxshard.register_fsdp_forward_method(nn.Linear(2, 2), "forward")  # not compiled: nothing
    mine, everyone = tokens(rank, world_size)
    assert_close(ours.value(mine), eager.value(mine))
    ours.value(mine).mean().backward()
    eager.value(everyone).mean().backward()
    for (fqn, param), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:
            assert_close(full(param.grad), theirs.grad, msg=fqn)
    twin = pickle.loads(pickle.dumps(ours))
    with torch.no_grad():
        assert_close(twin.value(mine), eager.value(mine))
    assert_close(ours(mine), eager(mine))
    with pytest.raises(ConfigError, match="no method 'nothing'"):
        fxshard.register_fsdp_forward_method(ours, "nothing")


@EVERYWHERE
def test_a_registered_method(ranks: Any, where: str) -> None:
    run(ranks, where, registered)


class Arms(nn.Module):
    """Methods that do to the object what others do from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)

    def arm(self) -> Any:
        return self.register_forward_hook(lambda module, args, out: out * 0)

    def disarm(self, handle: Any) -> None:
        handle.remove()

    def exchange(self) -> None:
        inner = self.forward
        self.forward = lambda x: inner(x) + 1


def arms() -> Arms:
    torch.manual_seed(0)
    return Arms()


def armed(rank: int, world_size: int) -> None:
    ours, eager, x = compiled(arms()), arms(), torch.ones(2, 4)
    for name in ("arm", "disarm", "exchange"):
        fxshard.register_fsdp_forward_method(ours, name)
    calls: list[int] = []
    ours.register_forward_hook(lambda module, args, out: calls.append(1))
    handle, other = ours.arm(), ours.arm()
    assert len(ours._forward_hooks) == 3 and ours(x).eq(0).all() and calls == [1]
    handle.remove()
    assert ours(x).eq(0).all()
    ours.disarm(other)
    assert len(ours._forward_hooks) == 1
    assert_close(ours(x), eager(x))
    ours.exchange()
    eager.exchange()
    with torch.no_grad():
        assert_close(ours(x), eager(x))
    assert calls == [1] * 4
    del ours.forward, eager.forward
    assert_close(ours(x), eager(x))


@EVERYWHERE
def test_what_a_registered_method_does_to_the_object_stays(ranks: Any, where: str) -> None:
    run(ranks, where, armed)
