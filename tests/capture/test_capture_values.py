"""What depends on values, transformers."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import CaptureError
from fxshard.ir import dump
from tests.eager import Net, assert_trains_like_eager, batch
from tests.zoo import MODELS, models

# -- what depends on values ------------------------------------------------------------------------


def branches(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    if y.sum() > 0:  # here
        return y.sum()
    return y.mean()


def loops(net: Net, x: Tensor) -> Tensor:
    for _ in range(int(x.abs().sum())):  # here
        x = x + 1
    return net.a(x).sum()


@pytest.mark.parametrize("function", [branches, loops], ids=lambda f: f.__name__)
def test_data_dependence_is_refused_at_the_line_of_the_user(function: Callable[..., Any]) -> None:
    lines, first = inspect.getsourcelines(function)
    number = first + next(i for i, line in enumerate(lines) if "# here" in line)
    with pytest.raises(CaptureError) as failure:
        fxshard.plan(Net(function), (batch(),), world_size=2)
    text = str(failure.value)
    assert text.startswith("Net cannot be traced: Python control flow or a shape depends on")
    assert f'File "{__file__}", line {number}, in {function.__name__}' in text
    assert lines[number - first].strip() in text
    assert "torch.where" in text  # the remedy


def test_an_error_of_the_user_is_told_with_its_line() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        raise KeyError("no such expert")

    with pytest.raises(
        CaptureError, match=rf"KeyError: 'no such expert'(.|\n)*{__file__}"
    ) as failure:
        fxshard.plan(Net(forward), (batch(),), world_size=2)
    assert isinstance(failure.value.__cause__, KeyError)


KEPT: dict[str, Tensor] = {}


def keeps_in_a_global(net: Net, x: Tensor) -> Tensor:
    if "ones" not in KEPT:
        KEPT["ones"] = torch.ones(6)
    return (net.a(x) * KEPT["ones"]).sum()


def keeps_in_itself(net: Net, x: Tensor) -> Tensor:
    if not hasattr(net, "ones"):
        net.ones = torch.ones(6)
    return (net.a(x) * net.ones).sum()


class Keeper(nn.Module):
    """Blocks enough for the trace to leave some out; each reads what the first has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Net(keeps_in_a_global) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (lambda: Net(keeps_in_a_global), "in a global, a closure or a collection"),
        (lambda: Net(keeps_in_itself), "as self.ones of Net"),
        (Keeper, "in a global, a closure or a collection"),
    ],
)
@pytest.mark.parametrize("dynamic", [None, {"batch": [("x", 0)]}])
@pytest.mark.sample(3)
def test_what_forward_makes_and_keeps(
    build: Callable[[], nn.Module], where: str, dynamic: Any
) -> None:
    KEPT.clear()
    call: dict[str, Any] = {"kwargs": {"x": batch()}, "world_size": 2, "dynamic": dynamic}
    for _ in range(2):  # the second time it is there from the beginning
        with pytest.raises(CaptureError, match=f"has made and kept, {where}") as failure:
            fxshard.plan(build(), **call)
        assert "register_buffer" in str(failure.value)
    KEPT.clear()  # the remedy
    model = build()
    model(batch())
    assert fxshard.plan(model, **call).memory.peak_bytes


# -- transformers ----------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = models.llama(1)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, **kwargs: Any) -> Tensor:
        return self.inner(tokens, position_ids=positions, labels=tokens, **kwargs).loss


def test_packed_sequences_are_refused_however_they_arrive() -> None:
    (_, batch) = MODELS["llama"].batch(0, 0)
    tokens = batch["input_ids"]
    positions = torch.arange(8).expand(2, 8)
    said = "position_ids without attention_mask.*pass an attention_mask"
    with pytest.raises(CaptureError, match=said):
        fxshard.plan(models.llama(1), (), {**batch, "position_ids": positions}, world_size=2)
    with pytest.raises(CaptureError, match=said):
        fxshard.plan(models.llama(1), (tokens, None, positions), world_size=2)
    with pytest.raises(CaptureError, match=said):
        fxshard.plan(Wrapped(), (tokens, positions), world_size=2)


def test_positions_with_a_mask_and_positions_of_the_model_are_eager_s() -> None:
    (_, batch) = MODELS["llama"].batch(0, 0)
    tokens = batch["input_ids"]
    positions = torch.arange(8).expand(2, 8)
    mask = torch.tensor([[1] * 8, [0] * 2 + [1] * 6])
    assert_trains_like_eager(Wrapped, tokens)
    assert_trains_like_eager(Wrapped, tokens, positions, attention_mask=mask)
    program = fxshard.plan(Wrapped(), (tokens,), world_size=2).program
    assert "_assert_async" not in dump.text(program)


def test_tangents_are_told_by_the_place_of_the_output() -> None:
    """Constants in front of a tensor output do not shift its gradient."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return None, {"count": 3, "y": self.line(x)}

    model = Mixed()
    eager = copy.deepcopy(model)
    ours = fxshard.compile(model, world_size=2)
    x = torch.ones(2, 4)
    for each in (ours, eager):
        nothing, found = each(x)
        assert nothing is None and found["count"] == 3
        found["y"].square().sum().backward()
    assert torch.equal(ours.line.weight.grad, eager.line.weight.grad)
