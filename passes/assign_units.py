"""assign-units: say for every node to which unit it belongs."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from fxshard.ir import tags
from fxshard.ir.names import unit_of
from fxshard.ir.program import Fact, Program
from fxshard.ir.units import index_of


@dataclasses.dataclass(frozen=True)
class AssignUnits:
    """A node belongs to the innermost unit whose module contains the node's module.

    Before::

        %mm = aten.mm(%x, %t)   | layers.0.mlp

    After::

        %mm = aten.mm(%x, %t)   | layers.0.mlp  unit=1
    """

    name: ClassVar[str] = "assign-units"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TAGGED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})

    def apply(self, program: Program) -> None:
        by_fqn = index_of(program.units)
        params = program.params
        owner: dict[str, int] = {}
        for node in program.graph.nodes:
            tag = tags.get(node)
            if tag.role == "param":
                tags.update(node, unit=params[tag.fqn or ""].unit)
                continue
            if tag.module not in owner:
                owner[tag.module] = unit_of([tag.module], by_fqn)
            tags.update(node, unit=owner[tag.module])
