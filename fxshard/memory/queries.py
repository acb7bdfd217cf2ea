"""Questions about single units and activations: what is held, from when to when, and why."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from fxshard.ir import dump, tags
from fxshard.ir.program import Program
from fxshard.ir.units import Unit
from fxshard.memory.category import Category
from fxshard.memory.ledger import Ledger, LiveRange
from fxshard.memory.owners import nearest

# What is unsharded, and the categories that it is in between launch and free.
UNSHARDED = {
    "parameters": (Category.ALL_GATHER, Category.UNSHARDED_PARAM),
    "gradients": (Category.UNSHARDED_GRAD, Category.REDUCE_SCATTER),
}


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
        until: the one after which the last of it is gone; None: it outlives the step.
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
        on_cpu: it is on the CPU by then.
    """

    name: str
    op: str
    module: str
    bytes: int
    checkpointed: bool
    why: str
    on_cpu: bool = False


def unsharded(ledger: Ledger, units: Sequence[Unit]) -> list[Unsharded]:
    """When each unit holds unsharded memory on the device, in the order in which that begins.

    A stretch lasts as long as the unit holds any byte of it. With prefetch, stretches of two units
    overlap.
    """
    peak, end = ledger.peak_tick, 2 * len(ledger.moments)
    of_param = {param.fqn: unit.name for unit in units for param in unit.params}
    of_module = {fqn: unit.name for unit in units for fqn in unit.fqns}
    nearest_unit = nearest(of_module)
    ranges: dict[tuple[str, str], list[LiveRange]] = defaultdict(list)
    for each in ledger.ranges:
        for what, categories in UNSHARDED.items():
            if each.category in categories and not each.host and each.bytes:
                unit = of_param.get(each.name) or of_module[nearest_unit(each.module)]
                ranges[unit, what].append(each)

    def place(tick: int) -> tuple[int, str, str]:
        phase, _ = ledger.at(tick)
        return phase.micro_batch, phase.name, ledger.moments[tick // 2].node

    found = []
    for (unit, what), members in ranges.items():
        for stretch in _stretches(members, end):
            born, died = stretch[0].born, max(end if r.died is None else r.died for r in stretch)
            most = max(_bytes_at(stretch, max(each.born, 0)) for each in stretch)
            since, until = place(max(born, 0)), None if died >= end else place(died)
            row = Unsharded(unit, what, most, _bytes_at(stretch, peak), since, until)
            found.append((born, row))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def _stretches(ranges: Iterable[LiveRange], end: int) -> Iterator[list[LiveRange]]:
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


def _bytes_at(ranges: Iterable[LiveRange], tick: int) -> int:
    return sum(each.bytes for each in ranges if each.is_alive(tick))


def kept_for_backward(ledger: Ledger, program: Program, number: int) -> list[Kept]:
    """Every activation alive when forward of micro-batch `number` is over, and why, largest first.

    Those on the device add up to the root's activations After Post-Forward.

    Args:
        ledger: of the step.
        program: of that micro-batch.
        number: of it, from 0.
    """
    phase = next(p for p in ledger.phases if (p.name, p.micro_batch) == ("forward", number))
    makers: dict[str, fx.Node] = {}
    aliases: dict[int, list[fx.Node]] = defaultdict(list)  # that refer to a storage
    for node in program.phase("forward"):
        makers[node.name] = node
        for storage in tags.storage_ids(node):
            aliases[storage].append(node)
    pairs = zip(program.values, program.results, strict=True)
    returned = [tags.storage_ids(node) for node, result in pairs if result.kind == "output"]
    outputs = set().union(*returned)
    found = []
    for each in ledger.alive(phase.end):
        if each.category is Category.ACTIVATION and each.born >= phase.begin and each.bytes:
            maker = makers[each.name]
            same = {n: None for storage in tags.storage_ids(maker) for n in aliases[storage]}
            inside = tags.get(maker).checkpoint is not None
            why = _why(maker, same, outputs)
            found.append(Kept(each.name, each.op, each.module, each.bytes, inside, why, each.host))
    return sorted(found, key=lambda kept: kept.bytes, reverse=True)


def recomputed(program: Program) -> dict[str, int]:
    """How often backward runs each operator to recompute what a checkpoint dropped, most first.

    Views are not counted; what is done in place counts under the name of what it stands for.
    """
    found: dict[str, int] = defaultdict(int)
    for node in program.phase("backward"):
        if tags.get(node).recomputed and (tags.writes(node) or not tags.aliases_input(node)):
            name = dump.operation(node)
            if tags.writes(node):
                name = name.replace("_.", ".").removesuffix("_")
            found[name] += 1
    return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))


def _why(maker: fx.Node, same: Iterable[fx.Node], outputs: set[int]) -> str:
    tag = tags.get(maker)
    if tag.checkpoint is not None and tag.save:
        return "its checkpoint's policy saves it"
    readers = [reader for node in same for reader in tags.backward_users(node)]
    others = [r for r in readers if tags.get(r).checkpoint != tag.checkpoint]
    if tag.checkpoint is not None and others:
        modules = {tags.get(r).module or "the root" for r in others}
        return f"backward of {', '.join(sorted(modules))} reads it"
    if readers:
        return "backward reads it" + ("" if tag.checkpoint is None else " to recompute others")
    return "the model returns it" if tags.storage_ids(maker) & outputs else "held to the end"
