"""Questions to a report about single modules and units: who holds what, from when to when, why."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Protocol

from torch import fx

from fxshard.ir import tags
from fxshard.ir.program import Program
from fxshard.memory.category import Category
from fxshard.memory.ledger import Ledger, LiveRange
from fxshard.memory.liveness import operation_of

# What is unsharded, and the categories that it is in between launch and free.
UNSHARDED = {
    "parameters": (Category.ALL_GATHER, Category.UNSHARDED_PARAM),
    "gradients": (Category.UNSHARDED_GRAD, Category.REDUCE_SCATTER),
}


class Asked(Protocol):
    """What these questions need of a `fxshard.memory.report.MemoryReport`."""

    @property
    def program(self) -> Program:
        """Of the last micro-batch."""

    @property
    def programs(self) -> tuple[Program, ...]:
        """One per micro-batch."""

    def ledger(self, *, first_step: bool = False) -> Ledger:
        """Every live range of the step."""

    def alive_at_peak(self) -> list[LiveRange]:
        """The storages alive on the device at the peak, largest first."""


@dataclasses.dataclass(frozen=True)
class Unsharded:
    """A stretch of the step in which a unit holds unsharded memory.

    Attributes:
        unit: name of the unit.
        what: "parameters" (what its unshard sends included) or "gradients" (what is sent to be
            reduced included).
        bytes: the most that it holds at once.
        peak_bytes: what it holds at the peak of the step; 0 if that is at another time.
        since: ``(micro-batch, phase, node)`` that made the first of it.
        until: the one behind which the last of it is gone; None: it outlives the step.
    """

    unit: str
    what: str
    bytes: int
    peak_bytes: int
    since: tuple[int, str, str]
    until: tuple[int, str, str] | None


@dataclasses.dataclass(frozen=True)
class Kept:
    """An activation that is alive between the forward and the backward of a micro-batch.

    Attributes:
        name: the node that made it.
        op: its operator.
        module: FQN of the module that it runs in ("" is the root).
        bytes: its size.
        checkpointed: it was made inside of an activation checkpoint.
        why: why it is alive all the same.
    """

    name: str
    op: str
    module: str
    bytes: int
    checkpointed: bool
    why: str


def peak_by_module(
    report: Asked, category: Category | None = None, depth: int | None = None
) -> dict[str, int]:
    """Bytes alive at the peak by the module that owns them, largest first.

    Args:
        report: of the step.
        category: only these bytes.
        depth: what modules with more names in their FQN own counts for those around them.
    """
    found: dict[str, int] = defaultdict(int)
    for each in report.alive_at_peak():
        if category in (None, each.category):
            names = each.module.split(".")
            found[".".join(names if depth is None else names[:depth])] += each.bytes
    return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))


def unsharded(report: Asked) -> list[Unsharded]:
    """When each unit holds unsharded memory on the device, in the order in which that begins.

    A stretch lasts as long as the unit holds any byte of it. With prefetch, stretches of two units
    overlap.
    """
    ledger = report.ledger()
    peak, end = int(ledger.totals.argmax()), 2 * len(ledger.moments)
    ranges: dict[tuple[str, str], list[LiveRange]] = defaultdict(list)
    for each in ledger.ranges:
        for what, categories in UNSHARDED.items():
            if each.category in categories and not each.host and each.bytes:
                ranges[unit_of(report.program, each), what].append(each)

    def place(tick: int) -> tuple[int, str, str]:
        phase, _ = ledger.at(tick)
        return phase.micro_batch, phase.name, ledger.moments[tick // 2].node

    found = []
    for (unit, what), members in ranges.items():
        for stretch in stretches(members, end):
            born, died = stretch[0].born, max(end if r.died is None else r.died for r in stretch)
            ticks = {max(r.born, 0) for r in stretch}
            most = max(sum(_bytes_at(stretch, tick)) for tick in ticks)
            until = None if died >= end else place(died)
            at_peak = sum(_bytes_at(stretch, peak))
            row = Unsharded(unit, what, most, at_peak, place(max(born, 0)), until)
            found.append((born, row))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def unit_of(program: Program, held: LiveRange) -> str:
    """Name of the unit that an unsharded parameter or gradient belongs to.

    That of the parameter if it has its name; else of the nearest unit around its module.
    """
    if held.name in program.params:
        return program.units[program.params[held.name].unit].name
    units = {unit.fqn: unit.name for unit in program.units}
    module = held.module
    while module not in units:
        module = module.rpartition(".")[0]
    return units[module]


def stretches(ranges: Collection[LiveRange], end: int) -> Iterator[list[LiveRange]]:
    """Ranges in groups without a pause inside of any, by their birth."""
    group: list[LiveRange] = []
    last = -1
    for each in sorted(ranges, key=lambda r: r.born):
        if group and each.born > last:
            yield group
            group = []
        group.append(each)
        last = max(last, end if each.died is None else each.died)
    if group:
        yield group


def _bytes_at(ranges: Collection[LiveRange], tick: int) -> Iterator[int]:
    for each in ranges:
        if each.born <= tick and (each.died is None or tick < each.died):
            yield each.bytes


def kept_for_backward(report: Asked, number: int) -> list[Kept]:
    """Every activation alive when forward of micro-batch `number` is over, and why, largest first.

    They add up to the root's activations After Post-Forward.
    """
    ledger, program = report.ledger(), report.programs[number]
    phase = next(p for p in ledger.phases if (p.name, p.micro_batch) == ("forward", number))
    first, tick = 2 * phase.start, 2 * (phase.start + phase.points) + 1
    makers, aliases = _forward_nodes(program)
    outputs = set().union(*(tags.storage_ids(node) for node in returned(program)))
    found = []
    for each in ledger.alive(tick):
        if each.category is Category.ACTIVATION and each.born >= first and each.bytes:
            maker = makers[each.name]
            same = {n: None for storage in tags.storage_ids(maker) for n in aliases[storage]}
            number_of = tags.get(maker).checkpoint
            why = _why(maker, list(same), outputs)
            inside = number_of is not None
            found.append(Kept(each.name, each.op, each.module, each.bytes, inside, why))
    return sorted(found, key=lambda kept: kept.bytes, reverse=True)


def recomputed(program: Program) -> dict[str, int]:
    """How often backward runs each operator to make what a checkpoint has let go, most first.

    Views are not counted; what is done in place counts under the name of what it stands for.
    """
    found: dict[str, int] = defaultdict(int)
    for node in program.phase("backward"):
        if tags.get(node).again and (tags.writes(node) or not tags.aliases_input(node)):
            name = operation_of(node)
            if tags.writes(node):
                name = name.replace("_.", ".").removesuffix("_")
            found[name] += 1
    return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))


def returned(program: Program) -> list[fx.Node]:
    """What the model returns."""
    pairs = zip(program.values, program.results, strict=True)
    return [node for node, result in pairs if result.kind == "output"]


def _forward_nodes(program: Program) -> tuple[dict[str, fx.Node], dict[int, list[fx.Node]]]:
    """The forward operators by name, and those that refer to each storage."""
    makers: dict[str, fx.Node] = {}
    aliases: dict[int, list[fx.Node]] = defaultdict(list)
    for node in program.phase("forward"):
        makers[node.name] = node
        for storage in tags.storage_ids(node):
            aliases[storage].append(node)
    return makers, aliases


def _why(maker: fx.Node, same: list[fx.Node], outputs: set[int]) -> str:
    tag = tags.get(maker)
    if tag.checkpoint is not None and tag.save:
        return "its checkpoint's policy saves it"
    readers = [
        reader
        for node in same
        for reader in node.users
        if reader.op == "call_function" and tags.get(reader).phase == "backward"
    ]
    others = [r for r in readers if tags.get(r).checkpoint != tag.checkpoint]
    if tag.checkpoint is not None and others:
        modules = {tags.get(r).module or "the root" for r in others}
        return f"backward of {', '.join(sorted(modules))} reads it"
    if readers:
        return "backward reads it" + ("" if tag.checkpoint is None else " to make others again")
    return "the model returns it" if tags.storage_ids(maker) & outputs else "held to the end"
