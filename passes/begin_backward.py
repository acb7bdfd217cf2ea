"""begin-backward: the program of a whole step begins backward by itself, with a gradient of 1."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from fxshard.ir import tags
from fxshard.ir.program import Fact, Program

aten: Any = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class BeginBackward:
    """The gradient that arrives at the loss is made in the program, as ``loss.backward()`` does.

    Before::

        %tangent : f32[] = tangent 0
        ...
        %d = aten.mul(%tangent, %x)                          # the first of backward

    After::

        %ones : f32[] = aten.full([], 1, dtype=f32)
        %d = aten.mul(%ones, %x)
    """

    name: ClassVar[str] = "begin-backward"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        if not program.whole:
            return
        (tangent,) = (
            node
            for node in program.graph.find_nodes(op="placeholder")
            if tags.get(node).role == "tangent"
        )
        val = tangent.meta["val"]
        with program.graph.inserting_before(program.phase("backward")[0]):
            ones = program.graph.create_node(
                "call_function",
                aten.full.default,
                (list(val.shape), 1),
                {"dtype": val.dtype, "device": val.device, "pin_memory": False},
                name="ones",
            )
        tag = tags.Meta("backward", "compute", unit=0)
        # Views of the tangent are views of this: it takes over the very value.
        tags.put(ones, tag, val)
        tangent.replace_all_uses_with(ones)
        program.graph.erase_node(tangent)
        if program.given is not None:
            program.given.pop(tangent.name, None)
