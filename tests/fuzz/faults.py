"""Faults of different kinds, planted in the library: random programs must find each.

A fault gives wrong numbers or bytes. One that raises is stale: the library has changed beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxshard.capture import normalize
from fxshard.ir import ops
from fxshard.memory import liveness
from fxshard.runtime import sharding, step
from fxshard.runtime.world import c10d, in_process
from tests.fuzz.case import Case

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Plant, Callable[[Case], bool]]] = {}


def fault(reaches: Callable[[Case], bool] = lambda case: True) -> Callable[[Plant], Plant]:
    """Register a fault; `reaches` tells the cases that have what it breaks."""

    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = plant, reaches
        return plant

    return register


def sharded(case: Case) -> bool:
    return case.world == 2 and "strategy" not in dict(case.options)


@fault(sharded)
def wrong_divide_factor(patch: pytest.MonkeyPatch) -> None:
    """An average is a sum."""
    patch.setitem(in_process.REDUCE, "avg", in_process.REDUCE["sum"])


@fault(sharded)
def stale_unshard(patch: pytest.MonkeyPatch) -> None:
    """An all-gather gives again what it gave in the first step."""
    right, known = in_process.InProcessWorld._run_row, {}

    def gather_once(world: Any, row: Any, envs: Any) -> None:
        right(world, row, envs)
        for rank, env in enumerate(envs if row.target is ops.all_gather else ()):
            key = (row.name, rank, *(t.shape for t in env[row]))
            env[row] = [t.clone() for t in known.setdefault(key, [t.clone() for t in env[row]])]

    patch.setattr(in_process.InProcessWorld, "_run_row", gather_once)


@fault(sharded)
def wrong_row_offset(patch: pytest.MonkeyPatch) -> None:
    """Each rank takes the rows of a parameter from one row further on."""
    right = sharding._take_rows

    def shifted(param: Any, shards: Any, whole: Tensor, world: Any) -> None:
        right(param, shards, whole.roll(1, 0) if whole.shape[0] > 1 else whole, world)

    patch.setattr(sharding, "_take_rows", shifted)


@fault(sharded)
def wrong_dtype_of_the_reduction(patch: pytest.MonkeyPatch) -> None:
    """Gradients go through bfloat16."""
    right = in_process.REDUCE["avg"]
    patch.setitem(
        in_process.REDUCE,
        "avg",
        lambda ranks: right([t.bfloat16().to(t.dtype) for t in ranks]),
    )


@fault(sharded)
def ranks_swapped_in_reduce_scatter(patch: pytest.MonkeyPatch) -> None:
    """The first rank gets the chunk of the last."""
    right = in_process.InProcessWorld.reduce_scatter

    def swapped(*args: Any, **options: Any) -> list[list[Tensor]]:
        return right(*args, **options)[::-1]

    patch.setattr(in_process.InProcessWorld, "reduce_scatter", swapped)


@fault(lambda case: "buffer_written" in case.operators())
def buffer_not_written_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(normalize, "_write_back", lambda program, mutated: None)


@fault(lambda case: "weight_decay" in case.optimizer and "frozen" in case.operators())
def frozen_parameter_stepped(patch: pytest.MonkeyPatch) -> None:
    """Every parameter gets a gradient, be it of zeros, and weight decay moves it."""
    right = step._gradients

    def never_none(call: Any, *rest: Any) -> list[Tensor | None]:
        out = right(call, *rest)
        for slot in call.runtime.slots.values():
            if not slot.param.requires_grad:
                slot.tensor.requires_grad_()
                slot.tensor.grad = torch.zeros_like(slot.tensor)
        return out

    patch.setattr(step, "_gradients", never_none)


@fault(lambda case: "tied" in case.operators())
def tied_gradient_added_once(patch: pytest.MonkeyPatch) -> None:
    """A parameter with two names gets half of its gradient."""
    right = step._gradients

    def half(call: Any, *rest: Any) -> list[Tensor | None]:
        out = right(call, *rest)
        for i, fqn in enumerate(call.params):
            grad = out[i]
            if grad is not None and len(call.runtime.slots[fqn].param.aliases) > 1:
                out[i] = grad * 0.5
        return out

    patch.setattr(step, "_gradients", half)


@fault()
def wrong_bytes_of_an_operator(patch: pytest.MonkeyPatch) -> None:
    """The results of additions are counted with four bytes more."""
    right = liveness.Walk._made

    def larger(self: Any, node: Any, category: Any, size: int, *rest: Any) -> int:
        return right(self, node, category, size + 4 * ("add" in node.name), *rest)

    patch.setattr(liveness.Walk, "_made", larger)


@fault(lambda case: case.no_sync)
def gradients_of_the_last_micro_batch_alone(patch: pytest.MonkeyPatch) -> None:
    """What was accumulated without synchronisation is forgotten."""
    right = step._backward_arguments

    def forgetful(call: Any, *rest: Any) -> list[list[Tensor]]:
        for sums in call.runtime.accumulated.values():
            for total in sums:
                total.zero_()
        return right(call, *rest)

    patch.setattr(step, "_backward_arguments", forgetful)


@fault(lambda case: "requires_grad_()" in case.program.inputs[0][1])
def gradient_of_an_input_lost(patch: pytest.MonkeyPatch) -> None:
    right = step._gradients

    def without_inputs(call: Any, results: Any, inputs: int, *rest: Any) -> list[Tensor | None]:
        out = right(call, results, inputs, *rest)
        return out[: len(out) - inputs] + [None] * inputs

    patch.setattr(step, "_gradients", without_inputs)


@fault()
def wait_dropped(patch: pytest.MonkeyPatch) -> None:
    """Of a reduce-scatter on real ranks: gloo's writes what it returns at its wait."""
    reduce_scatter, wait = c10d.C10dWorld.reduce_scatter, c10d.C10dWorld.wait
    pairs: set[int] = set()

    def noted(self: Any, grads: Any, pair: int, *rest: Any, **options: Any) -> Any:
        pairs.add(pair)
        return reduce_scatter(self, grads, pair, *rest, **options)

    def dropping(self: Any, tensors: Any, pair: int) -> None:
        if pair not in pairs:
            wait(self, tensors, pair)

    patch.setattr(c10d.C10dWorld, "reduce_scatter", noted)
    patch.setattr(c10d.C10dWorld, "wait", dropping)
