"""A capture leaves the user's model, and what its forward writes to, as they were."""

import collections
import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard
from fxshard.errors import CaptureError
from tests.capture.capture_cases import built
from tests.eager import Net, batch
from tests.zoo import MODELS


def picture(model: nn.Module) -> Any:
    """What must not change: every attribute by identity, dictionaries by content too."""
    found = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            content = list(map(id, value.values())) if isinstance(value, dict) else None
            found[name, key] = (id(value), list(value) if content is not None else None, content)
    hooks = nn.modules.module
    counts = (len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks))
    return found, counts, torch.compiler.is_compiling(), torch.is_grad_enabled()


def raises(net: Net, x: Tensor) -> Tensor:
    net.leftover = net.a(x)
    net.seen = net.seen + 1
    net.train(False)
    net.b.register_forward_hook(lambda module, args, output: output)
    return net.b(x)[0].item()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(3)
def test_plan_leaves_the_model_as_it_was(name: str) -> None:
    model, call = built(name), MODELS[name].batch(0, 0)
    values = copy.deepcopy(model.state_dict())
    before = picture(model)
    fxshard.plan(model, *call, world_size=2)
    assert picture(model) == before
    assert_close(model.state_dict(), values, rtol=0, atol=0)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda model, x: fxshard.plan(model, (x,), world_size=2),
        lambda model, x: fxshard.compile(model, world_size=2, args=(x,)),
        lambda model, x: fxshard.validate(model, (x,), world_size=2),
    ],
    ids=["plan", "compile", "validate"],
)
def test_a_failed_capture_leaves_the_model_as_it_was(attempt: Callable[..., Any]) -> None:
    model = Net(raises)
    before = picture(model)
    with pytest.raises(CaptureError, match="item"):
        attempt(model, batch())
    assert picture(model) == before


def test_what_forward_assigns_is_undone_and_told(caplog: pytest.LogCaptureFixture) -> None:
    def assigns(net: Net, x: Tensor) -> Tensor:
        net.hidden = net.a(x)
        return net.hidden.sum()

    model = Net(assigns)
    before = picture(model)
    with caplog.at_level(logging.WARNING, "fxshard"):
        fxshard.plan(model, (batch(),), world_size=2)
    assert picture(model) == before
    assert "forward of Net assigns self.hidden" in caplog.text


@dataclasses.dataclass(slots=True)
class Slots:
    last: Any = None


class Journal:
    """An object of the user's; its class keeps a journal too."""

    pages: ClassVar[list[Any]] = []
    last: Any = None

    def __init__(self) -> None:
        self.own: dict[str, list[Any]] = {}


EVERYWHERE: list[Any] = []


def remembers_everywhere(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    net.nested["seen"].append(y.detach())
    net.window.append({"y": y.detach()})
    net.ids.add(y.detach())
    net.slots.last = y.detach()
    net.journal.own.setdefault("y", []).append(y.detach())
    net.aside[0].last = y.detach()
    Journal.last = y.detach()
    Journal.pages.append(y.detach())
    EVERYWHERE.append([y.detach()])
    return y


def remembering(function: Callable[..., Tensor]) -> Any:
    model: Any = Net(function)
    model.nested, model.window = {"seen": []}, collections.deque([1], maxlen=2)
    model.ids, model.slots, model.journal = set(), Slots(), Journal()
    model.aside = [nn.Identity()]
    model.aside[0].last = None
    return model


def remembered(model: Any) -> Any:
    held = [model.nested, model.window, model.ids, model.slots, vars(model.journal)]
    return copy.deepcopy([*held, model.aside[0].last, Journal.last, Journal.pages, EVERYWHERE])


def test_what_forward_leaves_in_collections_and_objects_is_undone_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = remembering(remembers_everywhere)
    before = remembered(model)
    with caplog.at_level(logging.WARNING, "fxshard"):
        compiled = fxshard.compile(model, world_size=2)
        compiled(batch())
    assert remembered(compiled) == before
    for name in ("nested", "window", "ids", "slots", "journal", "aside"):
        assert f"forward of Net changes what self.{name} holds" in caplog.text
    for where in ("'last' of Journal", "a list"):
        assert f"forward keeps a tensor in {where} that its code holds" in caplog.text


def test_a_failed_capture_leaves_collections_and_objects_as_they_were() -> None:
    def fails(net: Any, x: Tensor) -> Tensor:
        remembers_everywhere(net, x)
        net.window.append(2)
        net.nested["calls"] = 1
        raise ValueError("no")

    model = remembering(fails)
    before = remembered(model)
    with pytest.raises(CaptureError, match="no"):
        fxshard.compile(model, args=(batch(),), world_size=2)
    assert remembered(model) == before


def test_collections_that_forward_only_reads_are_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Once(dict):  # type: ignore[type-arg]
        def update(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("an update")

    model: Any = Net(lambda net, x: net.a(x) * net.scales["two"])
    model.scales = Once(two=2)
    with caplog.at_level(logging.WARNING, "fxshard"):
        fxshard.plan(model, (batch(),), world_size=2)
    assert "changes what" not in caplog.text
