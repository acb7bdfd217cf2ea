"""fxshard's side: the plan's table, storage by storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from benchmarks.vs_fsdp2.models import WORLD, Case, make_optimizer
from benchmarks.vs_fsdp2.things import Row, Rows, Thing, unit_of
from fxshard.memory.category import Category, State
from fxshard.memory.ledger import Ledger, LiveRange, Moment
from fxshard.plans.plan import Plan

KINDS = {
    Category.SHARDED_PARAM: "shard",
    Category.UNSHARDED_PARAM: "copy",
    Category.ALL_GATHER: "flight",
    Category.UNSHARDED_GRAD: "gradient",
    Category.REDUCE_SCATTER: "sent",
    Category.SHARDED_GRAD: "reduced",
    Category.ACTIVATION: "values",
    Category.TEMP: "values",
}


GATHERED = (Category.UNSHARDED_PARAM, Category.ALL_GATHER)


def planned(case: Case) -> Plan:
    """The plan of the case."""
    model, tokens = case.model()
    return fxshard.plan(model, (tokens,), optimizer=make_optimizer, **case.options())


def fxshard_rows(plan: Plan, policy: MixedPrecisionPolicy | None) -> Rows:
    """Our table of the steady step: every state of every unit."""
    report, ledger = plan.memory, plan.memory.ledger()
    units = {unit.fqn for unit in plan.program.units}
    owners = {p.fqn: unit.fqn for unit in plan.program.units for p in unit.params}
    chunks = {fqn: layout.shard_numel for fqn, layout in plan.program.layouts.items()}
    dtype = (policy.param_dtype if policy else None) or torch.float32

    def thing(each: LiveRange) -> Thing:
        kind = KINDS.get(each.category, each.category.value)
        if kind == "flight" and each.bytes == chunks[each.name] * dtype.itemsize:
            kind = "cast shard"
        unit = owners.get(each.name, unit_of(each.module, units))
        known = kind in KINDS.values() or kind == "cast shard"
        return Thing(kind, unit if known else "", each.bytes, each.category.value)

    def unread(alive: list[LiveRange]) -> dict[str, int]:
        names = {each.name for each in alive if each.category in GATHERED}
        found: dict[str, int] = {}
        for unit in plan.program.units:
            if any(param.fqn in names for param in unit.params):
                absent = sum(chunks[p.fqn] for p in unit.params if p.fqn not in names)
                found[unit.fqn] = absent * WORLD * dtype.itemsize
        return found

    def freed(tick: int) -> frozenset[str]:
        phase, _ = ledger.at(tick)
        return frozenset(
            owners[each.name]
            for each in ledger.ranges
            if each.category is Category.UNSHARDED_PARAM
            and 2 * phase.start <= each.born
            and each.died is not None
            and each.died <= tick
        )

    rows: Rows = {}
    ticks = {(w.module, w.state): tick for w, tick in report.ticks().items()}
    cells = report.cells()
    for (module, state), tick in ticks.items():
        if module not in units:
            continue
        begun = ticks.get((module, State.BEFORE_PRE_BACKWARD), 0)
        alive = [each for each in ledger.alive(tick) if each.bytes]
        moment = ledger.moments[tick // 2]
        row = Row(
            tuple(dataclasses.replace(thing(e), fresh=e.born > begun > 0) for e in alive),
            at=(moment.op, unit_of(moment.module, units)),
            elsewhere=_elsewhere(ledger, ticks, module, state, units),
            unread=unread(alive),
            freed=freed(tick),
        )
        told = {c.value: size for c, size in cells[module, state].items() if size}
        assert row.figures() == told, (module, state)
        rows[module, state.value] = row
    return rows


def _elsewhere(
    ledger: Ledger, ticks: dict[tuple[str, State], int], unit: str, state: State, units: set[str]
) -> str:
    """The cause by which our state is at another moment of the step than FSDP2's, or ""."""

    def others(begin: int, end: int) -> bool:
        """True if an operator of another unit runs between two ticks."""
        between = ledger.moments[begin // 2 + 1 : end // 2 + 1]
        return any(m.op.startswith("aten.") and unit_of(m.module, units) != unit for m in between)

    def first(op: str, chosen: Callable[[Moment], bool]) -> int:
        """Tick of the first operator so named that is chosen."""
        found = (i for i, m in enumerate(ledger.moments) if m.op.startswith(op) and chosen(m))
        return 2 * next(found)

    tick = ticks[unit, state]
    if state is State.AFTER_POST_BACKWARD:
        return "later moment" if others(ticks[unit, State.BEFORE_POST_BACKWARD], tick) else ""
    if state is State.AFTER_PRE_FORWARD and tick < first(
        "fxshard.wait", lambda m: m.module == unit
    ):
        return "earlier moment"
    if unit and state in (State.BEFORE_PRE_FORWARD, State.AFTER_PRE_FORWARD):
        own = first("aten.", lambda m: unit_of(m.module, units) == unit)
        return "earlier moment" if others(tick, own) else ""
    return ""
