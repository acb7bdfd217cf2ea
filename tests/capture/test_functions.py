"""Which functions, made anew, compute what others did."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxshard.capture.functions import Hooks, meaning

SCALE = 1.0
SCALES = [1.0]
ITSELF: Any = nn.Identity()


def twice(x: Tensor) -> Tensor:
    return 2 * x


def of_torch(x: Tensor) -> Tensor:
    return F.gelu(torch.relu(x)) + twice(x)


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def scaled_by_another(x: Tensor) -> Tensor:
    return scaled(x)


def falling(x: Tensor, n: int = 3) -> Tensor:
    return falling(x, n - 1) if n else x


def closing_over(value: Any) -> Callable[..., Any]:
    return lambda x: x * value


SAME: dict[str, Callable[[], Any]] = {
    "partial": lambda: functools.partial(checkpoint, use_reentrant=False),
    "nested partial": lambda: functools.partial(functools.partial(twice), torch.float32, k=(1, 2)),
    "lambda": lambda: lambda module, given, output: output.requires_grad_(True),
    "constant": lambda: closing_over(2.0),
    "functions": lambda: closing_over(of_torch),
    "global": lambda: closing_over(scaled_by_another),
    "itself": lambda: closing_over(falling),
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_made_again_they_are_the_same(make: Callable[[], Any]) -> None:
    assert make() is not make()
    assert meaning(make()) == meaning(make()) is not None


def test_what_a_function_reads_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [meaning(each) for each in (scaled, scaled_by_another, functools.partial(scaled))]
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    now = [meaning(each) for each in (scaled, scaled_by_another, functools.partial(scaled))]
    assert None not in before and not any(a == b for a, b in zip(before, now, strict=True))
    held = [closing_over(each) for each in (0.0, -0.0, 0, False, 1, True, "1", twice, scaled)]
    assert len({meaning(each) for each in held}) == len(held)
    others = [functools.partial(twice, k) for k in (1, 2)] + [functools.partial(twice, k=1)]
    assert len({meaning(each) for each in (*others, twice)}) == 4


class Called:
    def __call__(self, x: Tensor) -> Tensor:
        return x


def importing(x: Tensor) -> Tensor:
    from tests.capture import test_functions

    return x * test_functions.SCALE


def writing(x: Tensor) -> Tensor:
    global SCALE
    SCALE = 3.0
    return x


@functools.wraps(twice)
def wrapping(x: Tensor) -> Tensor:
    return twice(x)


UNKNOWN: dict[str, Any] = {
    "a list": closing_over([2.0]),
    "a tensor": closing_over(torch.ones(1)),
    "a module": closing_over(nn.Linear(1, 1)),
    "a global list": lambda x: x * SCALES[0],
    "a global module": lambda x: ITSELF(x),
    "the environment": lambda x: x * len(os.environ),
    "all globals": lambda x: x * globals()["SCALE"],
    "an import": importing,
    "a written global": writing,
    "attributes": wrapping,
    "a method": nn.Linear(1, 1).forward,
    "an object": Called(),
    "a partial of one": functools.partial(Called()),
    "torch's decorator": torch.no_grad()(twice),
}


@pytest.mark.parametrize("function", UNKNOWN.values(), ids=UNKNOWN)
def test_of_others_nothing_is_known(function: Any) -> None:
    assert meaning(function) is None


def test_hooks_put_back_are_those_that_were() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    hooks = Hooks()
    register: list[Callable[[], Any]] = [
        lambda: a.register_forward_hook(lambda module, given, output: None),
        lambda: b.register_forward_hook(lambda module, given, output: None),
        lambda: a.register_forward_hook(lambda *_, **__: None, with_kwargs=True),
        lambda: a.register_forward_hook(lambda *_, **__: None, always_call=True),
        lambda: a.register_forward_pre_hook(lambda *_, **__: None),
        lambda: a.register_forward_pre_hook(lambda *_, **__: None, with_kwargs=True),
        lambda: a.register_full_backward_pre_hook(lambda *_, **__: None),
        lambda: a.register_forward_hook(closing_over([1.0])),
        lambda: a.register_forward_hook(closing_over([1.0])),
    ]
    states = []
    for _ in range(2):
        for each in register:
            handle = each()
            states.append(hooks.state([a, b]))
            handle.remove()
            assert hooks.state([a, b]) == ()
    first, again = states[: len(register)], states[len(register) :]
    assert len(set(first)) == len(first) and first[:-2] == again[:-2]
    assert not {*first[-2:]} & {*again[-2:]}, "what is unknown is another each time"
