"""Where in a step each state of each call of each module lies, as points of the schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from fxshard.ir import ops, tags
from fxshard.ir.calls import Call
from fxshard.ir.program import Program
from fxshard.ir.schedule import points
from fxshard.memory.category import State

aten = torch.ops.aten


class Where(NamedTuple):
    """A row of the table: a module in a state.

    Attributes:
        module: FQN ("" is the root).
        state: see `State`.
        call: which of the module's calls in a forward, from 0.
        micro_batch: which of the step's, from 0.
    """

    module: str
    state: State
    call: int = 0
    micro_batch: int = 0


Called = tuple[str, int]  # FQN of a module, and which of its calls in a forward


@dataclasses.dataclass(frozen=True)
class Span:
    """The stretch of one phase that belongs to one call of one module; numbers of points.

    Point -1 is the start of the phase. A unit's pre-forward begins with the wait for its
    unshard, and its post-forward ends with its free (in backward: the free of its gradients).

    Attributes:
        before_again, after_again: of what an activation checkpoint makes again in backward; None if
            nothing of this call is.
    """

    before_pre: int
    after_pre: int
    before_post: int
    after_post: int
    before_again: int | None = None
    after_again: int | None = None

    def moments(self, phase: str) -> Iterator[tuple[State, int]]:
        """Each state but the peaks, and the point that it lies at."""
        for state, name in MOMENTS[phase]:
            point = getattr(self, name)
            if point is not None:
                yield state, point


MOMENTS = {
    "forward": (
        (State.BEFORE_PRE_FORWARD, "before_pre"),
        (State.AFTER_PRE_FORWARD, "after_pre"),
        (State.BEFORE_POST_FORWARD, "before_post"),
        (State.AFTER_POST_FORWARD, "after_post"),
    ),
    "backward": (
        (State.PRE_FORWARD_AC, "before_again"),
        (State.POST_FORWARD_AC, "after_again"),
        (State.BEFORE_PRE_BACKWARD, "before_pre"),
        (State.AFTER_PRE_BACKWARD, "after_pre"),
        (State.BEFORE_POST_BACKWARD, "before_post"),
        (State.AFTER_POST_BACKWARD, "after_post"),
    ),
}
PEAKS = {"forward": State.PEAK_FORWARD, "backward": State.PEAK_BACKWARD}


def spans(program: Program) -> dict[tuple[Called, tags.Phase], Span]:
    """Per call of a module, and phase in which it computes, its span.

    A call's computation runs from the first to the last operator of it or of what it calls. A
    module that is never called itself, such as a `ModuleList`, computes where those under its FQN
    do. What a checkpoint makes again does not belong to the backward of the modules inside of it.
    """
    assert program.schedule is not None
    found: dict[tuple[Called, tags.Phase], Span] = {}
    ever = {call.module for call in program.calls}
    outside: set[Called] = set()  # calls that no checkpoint repeats as a whole
    chains: dict[tuple[int | None, str], list[Called]] = {}
    for phase, graph in program.schedule.phases():
        first: dict[Called, int] = {}
        last: dict[Called, int] = {}
        again: dict[Called, tuple[int, int]] = {}
        waits: dict[str, list[int]] = {}
        frees: dict[str, list[int]] = {}
        places = points(program.schedule, graph)
        for i, place in enumerate(places):
            tag = tags.get(place.origin)
            if place.node is None:
                if place.row.target is ops.wait:
                    waits.setdefault(tag.module, []).append(i)
                elif place.row.target is ops.free:
                    frees.setdefault(tag.module, []).append(i)
                continue
            if isinstance(place.node.meta.get("val"), int):  # a size, which no module computes
                continue
            key = (tag.call, tag.module)
            if key not in chains:
                chains[key] = list(_around(program.calls, ever, *key))
            for called in chains[key]:
                # Buffers are written at the end of forward, behind every checkpoint.
                written = place.node.target is aten.copy_.default
                if phase == "forward" and tag.checkpoint is None and not written:
                    outside.add(called)
                if tag.again:
                    again[called] = (again[called][0] if called in again else i, i)
                else:
                    first.setdefault(called, i)
                    last[called] = i
        for called, start, end in _stretches(first, last):
            module = called[0]
            wait = [w for w in waits.get(module, []) if start < w <= first[called]]
            free = [f for f in frees.get(module, []) if last[called] <= f < end]
            after_pre = first[called] - 1
            before_pre = wait[0] - 1 if wait else after_pre
            after_post = free[-1] if free else last[called]
            if module == "":
                before_pre, after_post = -1, len(places) - 1
            made = (0, None) if called in outside else again.get(called, (0, None))
            found[called, phase] = Span(
                before_pre,
                after_pre,
                last[called],
                after_post,
                None if made[1] is None else made[0] - 1,
                made[1],
            )
    return found


def _stretches(
    first: dict[Called, int], last: dict[Called, int]
) -> Iterator[tuple[Called, int, float]]:
    """Each call, with the points between which no other call of its module computes."""
    calls: dict[str, list[Called]] = {}
    for called in sorted(first, key=first.__getitem__):
        calls.setdefault(called[0], []).append(called)
    place = {called: at for same in calls.values() for at, called in enumerate(same)}
    for called in first:
        same, at = calls[called[0]], place[called]
        end = first[same[at + 1]] if at + 1 < len(same) else math.inf
        yield called, last[same[at - 1]] if at else -1, end


def _around(
    calls: Sequence[Call], ever: Collection[str], call: int | None, module: str
) -> Iterator[Called]:
    """The calls that an operator runs in, and the modules around it that are never called.

    An operator that a pass has made is in no call: it counts for the first of each module.
    """
    found: dict[str, int] = {}
    known = call
    while call is not None:
        found.setdefault(calls[call].module, calls[call].number)
        call = calls[call].parent
    for name in list(found) or [module]:
        found.setdefault(name, 0)
        while name:
            name = name.rpartition(".")[0]
            if name not in ever or known is None or not name:
                found.setdefault(name, 0)
    yield from found.items()
