"""outline-regions: cut the graph into compute regions; identical layers share one."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from fxshard.ir.outline import build
from fxshard.ir.program import Fact, Program


@dataclasses.dataclass(frozen=True)
class OutlineRegions:
    """Build the outer schedule: launches, waits, frees, and calls of regions.

    Before::

        %wait_0 = fxshard.wait([%getitem])
        %t = aten.t(%getitem)
        %mm = aten.mm(%x, %t)
        %free_0 = fxshard.free([%getitem])

    After::

        %wait_0 = fxshard.wait([%getitem])
        %region_0 = region_0(%getitem, %x)
        %free_0 = fxshard.free([%getitem])
    """

    name: ClassVar[str] = "outline-regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FREED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.OUTLINED})

    def apply(self, program: Program) -> None:
        program.schedule = build(program)
