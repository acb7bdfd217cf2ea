"""Globals and closures that forward reads: changing one changes what the next call computes.

One file because all cases are ways to read one variable, and put it back the same way.
"""

import argparse
import collections
import contextvars
import copy
import functools
import operator
import os
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard
from fxshard.errors import StepError
from tests.capture.capture_cases import Computes, eager_and_ours
from tests.fsdp2 import full

SCALE = 1.0
TABLE = {"scale": 1.0, "unused": 0}
FLAGS = argparse.Namespace(scale=1.0, unused=0)
SEEN = 0  # of the training script alone


class Settings:
    """Of the user's."""

    deep = True

    def __init__(self) -> None:
        self.inner = types.SimpleNamespace(scale=1.0)

    def applied(self, x: Tensor) -> Tensor:
        return x * SCALE


class Hidden:
    """It finds attributes elsewhere, as OmegaConf's do."""

    def __init__(self) -> None:
        self._content = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self._content[name]


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Counting(nn.Module):
    """Held by a variable, not by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


SETTINGS, HIDDEN, SLOTTED, OUTSIDE = Settings(), Hidden(), Slotted(), Counting()
ELSEWHERE = types.ModuleType("somewhere")
vars(ELSEWHERE).update(scale=1.0, unused=0)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def halved(x: Tensor) -> Tensor:
    return x / 2


def by_scale(x: Tensor) -> Tensor:
    return x * SCALE


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def run(x: Tensor) -> Tensor:
        result: Tensor = function(x)
        return result

    return run


ACT = doubled
indirect = decorated(by_scale)


def put(name: str, value: Any) -> None:
    globals()[name] = value


# What forward computes of x, and how what it reads is changed.
Case = tuple[Callable[[Tensor], Tensor], Callable[[], None]]
CASES: dict[str, Case] = {
    "a number": (lambda x: x * SCALE, lambda: put("SCALE", 3.0)),
    "a function": (lambda x: ACT(x), lambda: put("ACT", halved)),
    "of a function": (by_scale, lambda: put("SCALE", 3.0)),
    "of a decorated function": (lambda x: indirect(x), lambda: put("SCALE", 3.0)),
    "of a partial": (functools.partial(lambda y, x: x * y * SCALE, 2), lambda: put("SCALE", 3.0)),
    "of a method of an object": (lambda x: SETTINGS.applied(x), lambda: put("SCALE", 3.0)),
    "of a nested function": (lambda x: (lambda y: y * SCALE)(x), lambda: put("SCALE", 3.0)),
    "a dict": (lambda x: x * TABLE["scale"], lambda: TABLE.update(scale=3.0)),
    "a namespace": (lambda x: x * FLAGS.scale, lambda: setattr(FLAGS, "scale", 3.0)),
    "an object in an object": (
        lambda x: x * SETTINGS.inner.scale,
        lambda: setattr(SETTINGS.inner, "scale", 3.0),
    ),
    "an object that hides": (
        lambda x: x * HIDDEN.scale,
        lambda: HIDDEN._content.update(scale=3.0),
    ),
    "an object with slots": (lambda x: x * SLOTTED.scale, lambda: setattr(SLOTTED, "scale", 3.0)),
    "a class": (
        lambda x: x * (2 if Settings.deep else 1),
        lambda: setattr(Settings, "deep", False),
    ),
    "another file": (lambda x: x * ELSEWHERE.scale, lambda: setattr(ELSEWHERE, "scale", 3.0)),
    "a module outside": (lambda x: OUTSIDE(x), lambda: setattr(OUTSIDE, "scale", 3.0)),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SCALE", "ACT", "SEEN"):
        monkeypatch.setitem(globals(), name, globals()[name])
    for holder in (TABLE, HIDDEN._content):
        monkeypatch.setitem(holder, "scale", 1.0)
    for each in (FLAGS, SETTINGS.inner, SLOTTED, ELSEWHERE, OUTSIDE):
        monkeypatch.setattr(each, "scale", 1.0)
    monkeypatch.setattr(Settings, "deep", True)


def both(compute: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    return eager_and_ours(lambda: Computes(compute))


def programs(model: Any) -> int:
    return len(model._fxshard.variants)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_variable_that_forward_reads_is_changed(case: str) -> None:
    compute, change = CASES[case]
    eager, ours = both(compute)
    x = torch.arange(8.0).view(2, 4)
    assert_close(ours(x), eager(x))
    change()
    assert_close(ours(x), eager(x))
    assert programs(ours) == 2


class Scaled:
    """Called by forward; the scale is its own, or its class's."""

    scale = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale


class Doubles(torch.autograd.Function):
    """Its backward reads a variable, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * SCALE


def an_attribute_of_a_function() -> Case:
    def compute(x: Tensor) -> Tensor:
        return x * compute.scale  # type: ignore[attr-defined, no-any-return]

    compute.scale = 1.0  # type: ignore[attr-defined]
    return compute, lambda: setattr(compute, "scale", 3.0)


def a_default_of_a_function() -> Case:
    def compute(x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    return compute, lambda: setattr(compute, "__defaults__", (3.0,))


def the_code_of_a_function() -> Case:
    def compute(x: Tensor) -> Tensor:
        return x * 1

    return compute, lambda: setattr(compute, "__code__", doubled.__code__)


def a_keyword_of_a_partial() -> Case:
    held = functools.partial(torch.mul, other=2.0)
    return lambda x: held(x), lambda: held.keywords.update(other=3.0)


def an_object_that_is_called() -> Case:
    held = Scaled()
    return lambda x: held(x), lambda: setattr(held, "scale", 3.0)


def the_class_of_an_object() -> Case:
    class Own(Scaled):
        scale = 1.0

    held = Own()
    return lambda x: x * held.scale, lambda: setattr(Own, "scale", 3.0)


def a_weak_reference() -> Case:
    kept = Scaled()
    held = weakref.ref(kept)
    return lambda x: x * held().scale, lambda: setattr(kept, "scale", 3.0)  # type: ignore[union-attr]


def a_context_variable() -> Case:
    held = contextvars.ContextVar("held", default=1.0)
    return lambda x: x * held.get(), lambda: held.set(3.0) and None


def a_user_dict() -> Case:
    held: Any = collections.UserDict(scale=1.0)
    return lambda x: x * held["scale"], lambda: held.update(scale=3.0)


def a_view_of_a_dict() -> Case:
    held = {"scale": 1.0}
    view = types.MappingProxyType(held)
    return lambda x: x * view["scale"], lambda: held.update(scale=3.0)


def an_array() -> Case:
    held = np.ones(2)
    return lambda x: x * float(held[0]), lambda: held.fill(3.0)


def by_a_string() -> Case:
    held = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))
    read = operator.attrgetter("inner.scale")
    return (
        lambda x: x * getattr(held.inner, "scale") * vars(held)["inner"].scale,  # noqa: B009
        lambda: setattr(held.inner, "scale", 3.0 * read(held)),
    )


def of_a_cached_function() -> Case:
    @functools.lru_cache
    def cached() -> float:
        return SCALE

    def change() -> None:
        put("SCALE", 3.0)
        cached.cache_clear()

    return lambda x: x * cached(), change


def the_environment() -> Case:
    def compute(x: Tensor) -> Tensor:
        return x * float(os.environ.get("FXSHARD_TEST_SCALE", "1"))

    return compute, lambda: os.environ.update(FXSHARD_TEST_SCALE="3")


def of_a_backward() -> Case:
    return Doubles.apply, lambda: put("SCALE", 3.0)  # type: ignore[no-untyped-call]


MADE: list[Callable[[], Case]] = [
    an_attribute_of_a_function,
    a_default_of_a_function,
    the_code_of_a_function,
    a_keyword_of_a_partial,
    an_object_that_is_called,
    the_class_of_an_object,
    a_weak_reference,
    a_context_variable,
    a_user_dict,
    a_view_of_a_dict,
    an_array,
    by_a_string,
    of_a_cached_function,
    the_environment,
    of_a_backward,
]


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_what_forward_reads_is_changed(
    make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FXSHARD_TEST_SCALE", raising=False)
    compute, change = make()
    eager, ours = both(lambda x: compute(x))
    x = torch.arange(8.0).view(2, 4) / 8
    for _ in range(2):
        for model in (eager, ours):
            model.zero_grad()
            model(x).square().sum().backward()
        assert_close(ours(x), eager(x))
        assert_close(ours.linear.weight.grad, eager.linear.weight.grad)
        change()
    assert programs(ours) == 2


class Tagged(Computes):
    """What it computes depends on attributes that a user puts on a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__(doubled)
        self.register_buffer("seen", torch.ones(4))
        self.linear.weight.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        scale = self.linear.weight.scale * getattr(self.seen, "scale", 1.0)
        return super().forward(x) * scale  # type: ignore[no-any-return]


def test_attributes_of_parameters_and_buffers() -> None:
    eager, ours = eager_and_ours(Tagged)
    x = torch.ones(2, 4)
    assert_close(ours(x), eager(x))
    for model in (eager, ours):
        model.linear.weight.scale = 3.0
    assert_close(ours(x), eager(x))
    for model in (eager, ours):
        model.seen.scale = 5.0
    assert_close(ours(x), eager(x))
    assert programs(ours) == 3


def test_a_closure() -> None:
    scale = 1.0

    def compute(x: Tensor) -> Tensor:
        return x * scale

    eager, ours = both(compute)
    x = torch.ones(2, 4)
    for each in (1.0, 2.0, 1.0):
        scale = each
        assert_close(ours(x), eager(x))
    assert programs(ours) == 2  # one is known again


def test_what_forward_does_not_read_asks_for_nothing() -> None:
    _, ours = both(lambda x: x * SCALE * FLAGS.scale * vars(ELSEWHERE)["scale"])
    for number in range(3):
        put("SEEN", number)
        FLAGS.unused = ELSEWHERE.unused = number  # type: ignore[attr-defined]
        ours(torch.ones(2, 4)).sum().backward()
    assert programs(ours) == 1


def test_what_forward_itself_changes_asks_for_nothing() -> None:
    called: list[float] = []

    def compute(x: Tensor) -> Tensor:
        called.append(SCALE)
        return x * SCALE

    eager, ours = both(compute)
    x = torch.ones(2, 4)
    for scale in (1.0, 1.0, 2.0, 1.0, 2.0):
        put("SCALE", scale)
        assert_close(ours(x), eager(x))
    assert programs(ours) == 2


def test_what_a_hook_reads() -> None:
    direction, strength = torch.ones(4), 0.0

    def steer(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + strength * SCALE * direction

    eager, ours = both(doubled)
    for model in (eager, ours):
        model.linear.register_forward_hook(steer)
    x = torch.ones(2, 4)
    for each in (0.0, 1.0, 0.0):
        strength = each
        assert_close(ours(x), eager(x))
    put("SCALE", 3.0)
    strength = 1.0
    assert_close(ours(x), eager(x))
    assert programs(ours) == 3


def scaling_hook(scale: float) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * scale

    return hook


def adding_hook(term: float) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + term

    return hook


def test_a_hook_that_is_registered_again_and_changes_later() -> None:
    """One that computes what another does asks for nothing, as long as it does."""
    eager, ours = both(doubled)
    x = torch.ones(2, 4)
    first, second = scaling_hook(1.0), scaling_hook(1.0)
    for hook in (first, second):
        for model in (eager, ours):
            model.linear.register_forward_hook(hook).remove()
            model.linear.register_forward_hook(hook)
        assert_close(ours(x), eager(x))
    assert second.__closure__ is not None
    for scale in (2.0, 3.0, 1.0):
        second.__closure__[0].cell_contents = scale
        assert_close(ours(x), eager(x))
    second.__code__ = adding_hook(1.0).__code__
    assert_close(ours(x), eager(x))


def test_what_has_changed_is_named() -> None:
    torch.manual_seed(0)
    ours = fxshard.compile(Computes(by_scale), world_size=2, max_variants=2)
    for scale in (1.0, 2.0):
        put("SCALE", scale)
        ours(torch.ones(2, 4))
    put("SCALE", 3.0)
    what = rf"a global or a closure that forward reads changed \(SCALE of {__name__}\)"
    with pytest.raises(StepError, match=what):
        ours(torch.ones(2, 4))


class Context:
    """Set and read by each forward."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


CONTEXT: Context | None = None


def test_a_variable_that_forward_itself_sets_asks_for_nothing() -> None:
    def compute(x: Tensor) -> Tensor:
        global CONTEXT
        CONTEXT = Context(SCALE)
        SETTINGS.seen = CONTEXT  # type: ignore[attr-defined]
        return x * CONTEXT.scale * SETTINGS.seen.scale  # type: ignore[attr-defined]

    eager, ours = both(compute)
    x = torch.ones(2, 4)
    for scale in (1.0, 2.0) * 10:
        put("SCALE", scale)
        assert_close(ours(x), eager(x))
    assert programs(ours) == 2


@pytest.mark.parametrize("name", ["forward", "helped"])
def test_a_method_of_the_models_class_is_exchanged(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Helped(Computes):
        def helped(self, x: Tensor) -> Tensor:
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.helped(super().forward(x))

    torch.manual_seed(0)
    eager = Helped(doubled)
    ours = fxshard.compile(copy.deepcopy(eager), world_size=2)
    x = torch.ones(2, 4)
    assert_close(ours(x), eager(x))
    monkeypatch.setattr(Helped, name, lambda self, x: x * 3)
    assert_close(ours(x), eager(x))
    assert programs(ours) == 2


class Takes(nn.Module):
    """What to compute is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        return compute(self.linear(x))


def scaled_by(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * scale


@pytest.mark.parametrize("case", ["a number", "a namespace", "of a decorated function"])
def test_what_a_function_that_is_an_argument_reads(case: str) -> None:
    (compute, change), (eager, ours) = CASES[case], eager_and_ours(Takes)
    x = torch.arange(8.0).view(2, 4)
    for _ in range(2):
        assert_close(ours(x, compute), eager(x, compute))
    change()
    assert_close(ours(x, compute), eager(x, compute))
    assert programs(ours) == 2


def test_functions_made_anew_for_each_call() -> None:
    eager, ours = eager_and_ours(Takes)
    x, logged = torch.ones(2, 4), list[float]()

    def logs(y: Tensor) -> Tensor:
        logged.append(SCALE)
        return y * SCALE

    for scale in (1.0, 2.0) * 10:
        assert_close(ours(x, scaled_by(scale)), eager(x, scaled_by(scale)))
    assert programs(ours) == 2
    for _ in range(20):
        assert_close(ours(x, logs), eager(x, logs))
    assert programs(ours) == 3


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.loss = 1.0, nn.MSELoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        result: Tensor = self.loss(output, target) * self.scale
        return result


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target) * SCALE


@pytest.mark.parametrize("kind", ["function", "module", "closure over a module"])
def test_what_the_loss_of_a_step_reads(kind: str) -> None:
    criterion = Weighted()
    losses: dict[str, Any] = {
        "function": weighted,
        "module": criterion,
        "closure over a module": lambda output, target: criterion(output, target),
    }
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Linear(4, 4))
    eager, ours = models
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    step = fxshard.compile_step(ours, losses[kind], optimizers[1], world_size=2)
    x, y = torch.arange(8.0).view(2, 4) / 8, torch.zeros(2, 4)
    for scale in (1.0, 3.0, 1.0):
        criterion.scale = scale
        put("SCALE", scale)
        optimizers[0].zero_grad()
        losses[kind](eager(x), y).backward()
        optimizers[0].step()
        step(x, y)
    for theirs, mine in zip(eager.parameters(), ours.parameters(), strict=True):
        assert_close(mine, theirs)


def trained(rank: int, world_size: int, differ: bool) -> None:
    """Each rank has its batch; the variable may have a value of its own on each, and change there
    alone.
    """
    torch.manual_seed(0)
    eager = Computes(by_scale)
    ours: Any = fxshard.compile(copy.deepcopy(eager))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, ours)]
    for number in range(4):
        scales = [1.0 + number % 2, 1.0 if differ else 1.0 + number % 2]
        batches = [torch.full((2, 4), number + each + 1.0) for each in range(world_size)]
        for scale, batch in zip(scales, batches, strict=True):
            put("SCALE", scale)
            (eager(batch).square().mean() / world_size).backward()
        put("SCALE", scales[rank])
        ours(batches[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for theirs, mine in zip(eager.parameters(), ours.parameters(), strict=True):
        assert_close(full(mine.detach()), theirs.detach())
    assert programs(ours) == (1 if differ and rank else 2)


@pytest.mark.parametrize("differ", [False, True])
def test_a_variable_that_changes_on_ranks(ranks: Any, differ: bool) -> None:
    ranks(2).run(trained, differ)


class Reads(nn.Module):
    """Added to the model later: it reads a variable that nothing read before."""

    def forward(self, x: Tensor) -> Tensor:
        return x * FLAGS.scale  # type: ignore[no-any-return]


def test_what_a_module_reads_that_came_later() -> None:
    eager, ours = eager_and_ours(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = torch.ones(2, 4)
    assert_close(ours(x), eager(x))
    for model in (eager, ours):
        model.append(Reads())
    for FLAGS.scale in (1.0, 3.0):
        assert_close(ours(x), eager(x))


def test_attributes_of_a_parameter_that_came_later() -> None:
    eager, ours = eager_and_ours(Tagged)
    x = torch.ones(2, 4)
    for scale in (2.0, 3.0, 5.0):
        for model in (eager, ours):
            if scale != 5.0:
                model.linear.weight = nn.Parameter(torch.ones(4, 4))
            model.linear.weight.scale = scale
        assert_close(ours(x), eager(x))
