"""compile-regions: each distinct region that is worth it is compiled by Inductor, once."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import ClassVar

from fxshard.codegen import regions
from fxshard.ir import tags
from fxshard.ir.compiled import Compiled
from fxshard.ir.program import Fact, Program
from fxshard.ir.schedule import Region, Schedule

log: logging.Logger = logging.getLogger("fxshard")


@dataclasses.dataclass(frozen=True)
class CompileRegions:
    """Give regions the code that Inductor generates for them; the schedule stays as it is.

    Before::

        %region_0 = region_0(%x, %w)        # runs operator by operator

    After::

        %region_0 = region_0(%x, %w)        # runs kernels that Inductor made of it

    Code is kept on disk (`fxshard.codegen.regions.Store`). Ranks and processes that want the same
    regions at the same time share the work: each takes what no other is at, and reads the rest.
    What Inductor cannot do stays eager, with a warning.
    """

    name: ClassVar[str] = "compile-regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.OUTLINED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        schedule = program.schedule
        assert schedule is not None
        start = time.perf_counter()
        waiting = [r for r in schedule.regions.values() if regions.worth_compiling(r.graph)]
        store = regions.Store()
        compiled: dict[str, Compiled] = {}
        for wait in (False, True):  # first what no other process is at
            left = []
            for region in waiting:
                try:
                    made = _compiled(program, region, store, wait)
                except Exception as error:
                    _warn(program, schedule, region, error)
                    continue
                if made is None:
                    left.append(region)
                else:
                    compiled[region.name] = made
            waiting = left
        for name, made in compiled.items():
            schedule.regions[name] = dataclasses.replace(schedule.regions[name], compiled=made)
        fresh = sum(each.fresh for each in compiled.values())
        log.info(
            "fxshard: Inductor generated %d of %d regions, %d were in %s; %.1f s",
            *(fresh, len(schedule.regions), len(compiled) - fresh, store.folder),
            time.perf_counter() - start,
        )


def _compiled(
    program: Program, region: Region, store: regions.Store, wait: bool
) -> Compiled | None:
    """The region's code; None if another process is making it and `wait` is False."""
    digest = store.digest(region.digest)
    found = regions.generated(
        store, digest, lambda: regions.generate(region.graph, program.fake_mode), wait=wait
    )
    if found is None:
        return None
    code, fresh = found
    steps, outputs = regions.lifetimes(region.graph, code, program.fake_mode)
    return Compiled(digest, code, steps, outputs, fresh)


def _warn(program: Program, schedule: Schedule, region: Region, error: Exception) -> None:
    """Say which region stays eager, where it is called, and why."""
    rows = [
        row
        for _, graph in schedule.phases()
        for row in graph.find_nodes(op="call_module", target=region.name)
    ]
    units = list(dict.fromkeys(program.units[tags.get(row).unit or 0].name for row in rows))
    where = units[0] if len(units) == 1 else f"{units[0]} and {len(units) - 1} more"
    reason = str(error).strip().splitlines() or [""]
    log.warning(
        "fxshard: %s (%d operators, unit %s) stays eager, Inductor cannot compile it: %s: %s",
        *(region.name, len(region.body), where, type(error).__name__, reason[0]),
    )
