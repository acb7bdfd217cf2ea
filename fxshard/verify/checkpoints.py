"""Activation checkpoints: what their policies do not save, backward recomputes."""

from __future__ import annotations

import operator

from fxshard.capture import rng
from fxshard.ir import tags
from fxshard.ir.program import Fact, Program
from fxshard.verify.failure import fail


def recomputed(program: Program) -> None:
    """No value of a checkpoint lives on to its own backward, unless its policy saves it.

    What others read in backward too is saved for them, as in eager; and so is the state of the
    generator, from which random operators draw again.
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
        readers = [u for u in node.users if u.op != "output" and tags.get(u).phase == "backward"]
        made = tags.source(node) if node.target is operator.getitem else node
        saved = tag.save or tags.get(made).save or node.target is rng.get_rng_state
        if readers and not saved and {tags.get(u).checkpoint for u in readers} == {tag.checkpoint}:
            what = f"%{readers[0].name} reads %{node.name}, which its checkpoint does not save: "
            fail(program, fact, readers[0], what + "checkpoint has not run since it was assigned.")


def _checkpointed(program: Program, call: int | None) -> str | None:
    """The module of a call around `call`, or of itself, that is to be checkpointed."""
    while call is not None:
        if program.calls[call].module in program.checkpoints:
            return program.calls[call].module
        call = program.calls[call].parent
    return None
