"""Activation checkpoints: what their policies do not save, backward recomputes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxshard._torch.traced_collectives import repeated
from fxshard.capture import rng
from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from fxshard.verify.failure import fail


def recomputed(program: Program) -> None:
    """No value of a checkpoint lives on to its own backward, unless its policy saves it.

    What others read in backward too is saved for them, as in eager; and so is the state of the
    generator, from which random operators draw again. Collectives are repeated as they were.
    """
    fact = Fact.RECOMPUTED
    if not program.signature.training:
        return
    for node in program.phase("forward"):
        tag = tags.get(node)
        if tag.checkpoint is None:
            module = _checkpointed(program, tag.call)
            if module is not None and tag.role == "compute":
                what = f"{module!r} is to be checkpointed, but %{node.name} of it is in no "
                fail(program, fact, node, what + "checkpoint: assign-checkpoints has not run.")
            continue
        readers = tags.backward_users(node)
        made = tags.source(node) if node.target is operator.getitem else node
        saved = tag.save or tags.get(made).save or node.target is rng.get_rng_state
        if readers and not saved and {tags.get(u).checkpoint for u in readers} == {tag.checkpoint}:
            what = f"%{readers[0].name} reads %{node.name}, which its checkpoint does not save: "
            fail(program, fact, readers[0], what + "checkpoint has not run since it was assigned.")
    _repeated_alike(program)


def _repeated_alike(program: Program) -> None:
    """What sends again sends to the same ranks as before, as much to each: they expect that."""
    for copy, original in repeated(program.graph.nodes):
        if ops.of(copy).of_model == ops.of(original).of_model and _said(copy) != _said(original):
            what = f"%{copy.name} repeats %{original.name}, but not as that was called."
            fail(program, Fact.RECOMPUTED, copy, what)


def _said(call: fx.Node) -> Any:
    """An operator, and what it is called with besides what it sends."""
    return call.target, _number(call.args[1:])


def _number(value: Any) -> Any:
    """Equal for arguments that are equal numbers: those read from data once, and sums of them."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_number, value))
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return value
    if value.target is torch.ops.aten._local_scalar_dense.default:
        return value
    numbers = [each for each in value.args if not list(tags.tensors(_value(each)))]
    return value.target, str(_value(value)), _number(numbers)


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _checkpointed(program: Program, call: int | None) -> str | None:
    """The module of a call around `call`, or of itself, that is to be checkpointed."""
    while call is not None:
        if program.calls[call].module in program.checkpoints:
            return program.calls[call].module
        call = program.calls[call].parent
    return None
