"""join-ranks: take part in what other ranks gather and reduce in a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from fxshard._torch.traced_collectives import is_collective
from fxshard.ir import ops, tags, transfers
from fxshard.ir.needs import Needs
from fxshard.ir.program import Fact, Program, Result

aten: Any = torch.ops.aten

Event = tuple[str, str]  # "read" or "grad", and the FQN of a parameter


@dataclasses.dataclass(frozen=True)
class JoinRanks:
    """Note what this rank gathers and reduces, or follow the order that ranks have agreed on.

    The pass is there with `Config.ranks_may_differ` alone. Without an agreement it writes
    ``program.needs`` and changes nothing. With one (``program.common``):

    - a parameter that another rank reads first, or alone, is read here at its place in the common
      order, by an operator that does nothing: it is gathered there, and freed after its last use;
    - a gradient that this rank does not have is zeros;
    - one that it has before its place in the common order goes through a view at that place; or
      through a cast, where other ranks add it to a sum of earlier calls in the dtype of reductions.

    So the passes that follow see the same parameters and gradients, in the same order, on all
    ranks, and make the same collectives of them.

    Before (another rank reads v as well, before w)::

        %mm = aten.mm(%x, %w)
        %g = aten.mm(%t, %x)
        return (%g)                                    # grad of w

    After::

        %join = fxshard.join([%v])
        %mm = aten.mm(%x, %w)
        %g = aten.mm(%t, %x)
        %zeros = aten.full([4, 4], 0.0)
        return (%g, %zeros)                            # grads of w, v
    """

    name: ClassVar[str] = "join-ranks"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        program.needs = needs_of(program)
        if program.common is None:
            return
        follow(program, "forward", [("read", fqn) for fqn in program.common.forward])
        if program.signature.training:
            follow(program, "backward", program.common.backward)


def needs_of(program: Program) -> Needs:
    """What `program`, of which nothing is sharded yet, gathers and reduces."""
    forward, ends, back = Reads(program, "forward"), [], Reads(program, "backward")
    order = sorted(forward.first, key=forward.first.__getitem__)
    firsts = [forward.first[fqn] for fqn in order]
    for fqn in order:
        ends.append(sum(first <= forward.last[fqn] for first in firsts))
    kept = {
        fqn for fqn in program.params if program.units[program.params[fqn].unit].reshard is False
    }
    events: list[tuple[int, int, Event]] = []
    for fqn, first in back.first.items():
        if fqn not in kept or fqn not in forward.first:
            events.append((first, 0, ("read", fqn)))
    grads = gradients(program)
    for fqn in grads:
        events.append((made_at(program, grads, back.order, fqn), 1, ("grad", fqn)))
    events.sort(key=lambda event: event[:2])
    made = {fqn for fqn, node in grads.items() if node is not None}
    calls = [node for node in program.graph.nodes if is_collective(node)]
    reduces = {program.reduces(fqn) for fqn in program.params}
    return Needs(
        forward=tuple(order),
        ends=tuple(ends),
        backward=tuple(event for *_, event in events),
        certain=frozenset(made - program.reached.keys()),
        sums=frozenset(program.accumulated & grads.keys()),
        kept=frozenset(kept),
        mode=f"{'training' if program.signature.training else 'inference'}, reduces "
        f"{', '.join(sorted(reduces))}",
        partial=bool(program.partial) or "shards" in reduces,
        own=tuple(f"{tags.get(node).phase} {node.target}" for node in calls),
    )


class Reads:
    """Where a phase reads the parameters that are gathered.

    Attributes:
        nodes: of the phase.
        order: place of each in it.
        first, last: FQN -> the place of the first, and of the last, reader.
    """

    def __init__(self, program: Program, phase: tags.Phase) -> None:
        self.nodes: list[fx.Node] = program.phase(phase)
        self.order: dict[fx.Node, int] = {node: i for i, node in enumerate(self.nodes)}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            fqn = tags.get(node).fqn
            places = [self.order[user] for user in node.users if user in self.order]
            if tags.get(node).role != "param" or fqn not in program.params or not places:
                continue
            if program.grid(fqn).shards > 1:
                self.first[fqn] = min(self.first.get(fqn, places[0]), *places)
                self.last[fqn] = max(self.last.get(fqn, places[0]), *places)


def gradients(program: Program) -> dict[str, fx.Node | None]:
    """The gradients that are to be reduced; None: only the sum of earlier ones is."""
    if not program.signature.training:
        return {}
    both = zip(program.values, program.results, strict=True)
    made = {result.name: value for value, result in both if result.kind == "grad"}
    names = [*made, *sorted(program.accumulated - made.keys())]
    return {
        fqn: made.get(fqn)
        for fqn in names
        if fqn in program.params and program.reduces(fqn) != "none" and program.grid(fqn).ranks > 1
    }


def made_at(
    program: Program, grads: dict[str, fx.Node | None], order: dict[fx.Node, int], fqn: str
) -> int:
    """The place in backward of the operator that makes a gradient; -1: it is there before."""
    node = grads[fqn]
    return -1 if node is None else order.get(node, -1)


def follow(program: Program, phase: tags.Phase, events: Sequence[Event]) -> None:
    """Let a phase read parameters, and have gradients, in the order of `events`."""
    reads = Reads(program, phase)
    grads = gradients(program) if phase == "backward" else {}
    made = {f: made_at(program, grads, reads.order, f) for f, n in grads.items() if n is not None}
    own = {
        fqn
        for fqn, node in grads.items()
        if node is not None
        and (not lifted(program, fqn) or node.meta["val"].dtype is sent_as(program, fqn))
    }
    at = gaps(events, reads.first, made, len(reads.nodes))
    last = reads.nodes[-1] if reads.nodes else None
    end = last.next if last is not None else beginning(program, phase)
    for gap in sorted(set(at)):
        here = [event for event, place in zip(events, at, strict=True) if place == gap]
        before = reads.nodes[gap] if gap < len(reads.nodes) else end
        with program.graph.inserting_before(before):
            for kind, fqn in to_mark(here, gap, reads.first, made, own):
                if kind == "read":
                    join(program, phase, fqn)
                else:
                    bring(program, fqn)


def gaps(
    events: Sequence[Event], first: dict[str, int], made: dict[str, int], end: int
) -> list[int]:
    """Per event, the operator of the phase before which it stands (`end`: after all).

    A read as late as this rank allows, a gradient as early as that allows; what only other ranks
    read delays no gradient.
    """
    found = [0] * len(events)
    latest = before = end  # by the reads of this rank; by its gradients too
    for i, (kind, fqn) in reversed(list(enumerate(events))):
        if kind == "grad":
            before = min(before, made.get(fqn, end) + 1)
        else:
            latest = min(latest, first.get(fqn, end))
            found[i] = latest if fqn in first else min(latest, before)
    earliest = 0
    for i, (kind, fqn) in enumerate(events):
        own = found[i] if kind == "read" else made.get(fqn, -1) + 1
        earliest = found[i] = max(earliest, own)
    return found


def to_mark(
    here: Sequence[Event], gap: int, first: dict[str, int], made: dict[str, int], own: set[str]
) -> Sequence[Event]:
    """Those of the events between two operators that these do not bring about in this order.

    A gradient that the operator before makes is the first by itself, and a parameter that the one
    after reads is the last. `own` are gradients of the dtype that they need.
    """
    if here and here[-1][0] == "read" and first.get(here[-1][1]) == gap:
        here = here[:-1]
    if here and here[0][0] == "grad" and made.get(here[0][1]) == gap - 1 and here[0][1] in own:
        here = here[1:]
    return here


def beginning(program: Program, phase: tags.Phase) -> fx.Node:
    """Where the operators of a phase that has none would stand."""
    backward = program.phase("backward") if phase == "forward" else []
    return next(iter(backward), program.output)


def join(program: Program, phase: tags.Phase, fqn: str) -> None:
    """Append an operator that reads a parameter and does nothing.

    One for each: where two buckets are first read at one place, their order would be open.
    """
    unit = program.units[program.params[fqn].unit]
    (placeholder,) = (
        node
        for node in program.graph.find_nodes(op="placeholder")
        if tags.get(node).role == "param" and tags.get(node).fqn == fqn
    )
    node = transfers.node(program.graph, ops.join, ([placeholder],), "join")
    tags.put(node, tags.Meta(phase, "join", module=unit.fqn, unit=unit.index))


def lifted(program: Program, fqn: str) -> bool:
    """True if other ranks add a sum of earlier calls to this gradient, and this rank has none."""
    return program.common is not None and fqn in program.common.sums - program.accumulated


def sent_as(program: Program, fqn: str) -> torch.dtype:
    """The dtype of the zeros in the place of a gradient, or to which it is cast, if `lifted`."""
    param = program.params[fqn]
    precision = program.units[param.unit].precision
    dtype = param.compute_dtype
    return precision.reduces_in(dtype) if lifted(program, fqn) else dtype


def bring(program: Program, fqn: str) -> None:
    """Append the gradient of a parameter: a view or a cast of it, or zeros if there is none."""
    param, dtype = program.params[fqn], sent_as(program, fqn)
    unit = program.units[param.unit]
    names = [result.name if result.kind == "grad" else "" for result in program.results]
    values = program.values
    shape = list(param.shape)
    if fqn in names:
        value = values[names.index(fqn)]
        tag = tags.changed(tags.get(value), phase="backward", role="compute", fqn=None)
        if lifted(program, fqn) and value.meta["val"].dtype is not dtype:
            args: tuple[Any, ...] = (value,)
            node = program.graph.call_function(aten._to_copy.default, args, {"dtype": dtype})
        else:
            node = program.graph.call_function(aten.view.default, (value, shape))
        values[names.index(fqn)] = tags.put(node, tag, program.refake(node))
    else:
        options: dict[str, Any] = {"dtype": dtype, "device": program.device, "pin_memory": False}
        node = program.graph.call_function(aten.full.default, (shape, 0.0), options)
        tag = tags.Meta("backward", "compute", module=unit.fqn, unit=unit.index)
        val = program.fake(param.shape, dtype, program.device)
        values.append(tags.put(node, tag, val))
        program.results.append(Result("grad", fqn))
    program.values = values
