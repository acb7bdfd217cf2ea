"""One architecture put through everything: compiled, run beside eager, planned and measured."""

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import fxshard
from fxshard.capture import trace
from fxshard.config.checked import Config
from fxshard.errors import FxshardError, UnknownSizeError
from fxshard.ir.splitting import configured_units
from fxshard.validation.numerics import largest_difference, largest_value
from tests.zoo import built, output_loss
from tests.zoo.architecture import Architecture

# Largest difference from eager that passes, relative to the largest value of the tensor. A gradient
# whose largest value is below this part of the model's largest one is zero but for rounding (that
# of a key's bias, or of a bias before a batch norm): its differences are relative to that one.
CLOSE = 1e-6
RANKS = 8  # of the measured run; the ranks beside eager are two

Values = dict[str, Tensor | None]
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """What came out.

    Attributes:
        refusal: text of the error, for what was refused; the rest is 0 then.
        parameters: how many numbers the parameters hold.
        nodes: of the captured graph of forward and backward, before any pass.
        capture_seconds, plan_seconds: CPU-seconds; planning includes another capture. These three
            are 0 if nobody asked for them.
        bitwise: loss, gradients and buffers are eager's, bit by bit.
        worst: the largest relative difference of any.
        compared: how many tensors these are.
        memory_difference: bytes, between what was predicted and what was measured, in any cell;
            None: they cannot be predicted, for a size depends on the data.
    """

    refusal: str = ""
    parameters: int = 0
    nodes: int = 0
    capture_seconds: float = 0.0
    plan_seconds: float = 0.0
    bitwise: bool = False
    worst: float = 0.0
    compared: int = 0
    memory_difference: int | None = 0


def try_out(architecture: Architecture, *, timed: bool = False) -> Trial:
    """Compile and compare one step with eager; plan, and measure the bytes of two steps.

    Args:
        architecture: a row of the table.
        timed: also capture and plan it alone, for the figures.

    Raises:
        AssertionError: a value that eager has is missing or NaN, or its dtype or shape is another.
    """
    case = architecture.case
    eager, args, kwargs = built(case)
    try:
        ours = fxshard.compile(built(case)[0], args=args, kwargs=kwargs, world_size=2)
    except FxshardError as error:
        return Trial(refusal=str(error))
    cost = costs(eager, args, kwargs) if timed else (0, 0.0, 0.0)
    measure = partial(
        fxshard.validate,
        eager,
        args,
        kwargs,
        world_size=RANKS,
        optimizer=architecture.optimizer,
        loss=None if case.loss is output_loss else case.loss,
    )
    bytes_off = None if architecture.sized_by_data else measure().max_abs_difference
    if architecture.sized_by_data:
        _assert_unknown(measure)
    sides = one_step(eager, architecture), one_step(ours, architecture)
    parameters = sum(p.numel() for p in eager.parameters())
    return Trial("", parameters, *cost, *differences(*sides), bytes_off)


def _assert_unknown(measure: Callable[[], Any]) -> None:
    try:
        measure()
    except UnknownSizeError:
        return
    raise AssertionError("bytes are predicted, though a size depends on the data")


def costs(model: nn.Module, args: Any, kwargs: Any) -> tuple[int, float, float]:
    """Nodes of the captured graph, and the CPU-seconds of capturing and of planning."""
    units = configured_units(model, Config.from_options({}))
    capture = partial(trace.capture, units=units, world_size=2, training=True)
    program, capture_seconds = _timed(lambda: capture(model, args, kwargs))
    _, plan_seconds = _timed(lambda: fxshard.plan(model, args, kwargs, world_size=RANKS))
    return len(program.graph.nodes), capture_seconds, plan_seconds


def refusal(architecture: Architecture) -> str:
    """The error of planning and compiling an architecture that is refused.

    Raises:
        AssertionError: it is not refused, or two different reasons are given.
    """
    model, args, kwargs = built(architecture.case)
    texts = []
    for attempt in (fxshard.plan, fxshard.compile):
        try:
            attempt(model, args=args, kwargs=kwargs, world_size=2)
        except FxshardError as error:
            texts.append(str(error))
    assert len(texts) == 2 and texts[0] == texts[1], texts
    return texts[0]


def matches(architecture: Architecture, text: str) -> bool:
    """True if an error says what its row says it must."""
    return bool(re.search(architecture.refused or "", text)) and architecture.line in text


def one_step(model: nn.Module, architecture: Architecture) -> Values:
    """Loss, gradients and buffers of one training step with the random numbers of seed 7."""
    args, kwargs = architecture.case.batch(0, 0)
    torch.manual_seed(7)
    native = torch.backends.mkldnn.flags(enabled=False)
    with contextlib.nullcontext() if architecture.onednn else native:
        loss = architecture.case.loss(model(*args, **kwargs))
        loss.backward()
    values: Values = {"loss": loss.detach()}
    values |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return values | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


def differences(theirs: Values, ours: Values) -> tuple[bool, float, int]:
    """Whether all are equal bit by bit, the largest relative difference, how many were compared."""
    assert theirs.keys() == ours.keys()
    gradients = [v for name, v in theirs.items() if name.startswith("gradient") and v is not None]
    steepest = max(map(largest_value, gradients))
    bitwise, worst, compared = True, 0.0, 0
    for name, value in theirs.items():
        other = ours[name]
        assert (value is None) == (other is None), f"{name} is None on one side only"
        if value is None or other is None:
            continue
        assert (value.shape, value.dtype) == (other.shape, other.dtype), name
        assert not value.isnan().any() and not other.isnan().any(), f"{name} is NaN"
        compared += 1
        if torch.equal(value, other):
            continue
        bitwise = False
        assert value.is_floating_point() or value.is_complex(), f"{name} counts otherwise"
        scale = largest_value(value)
        if name.startswith("gradient") and scale < CLOSE * steepest:
            scale = steepest
        off = largest_difference(other, value)
        worst = max(worst, off / scale if scale else float("inf"))
    return bitwise, worst, compared


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    since = time.process_time()
    result = function()
    return result, time.process_time() - since
