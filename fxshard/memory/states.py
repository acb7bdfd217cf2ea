"""Where in a step each state of each call of each module lies, as points of the schedule."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fxshard.ir import ops
from fxshard.ir.calls import Call
from fxshard.memory.category import State
from fxshard.memory.ledger import Ledger, Moment

WAIT, FREE = (str(target).removesuffix(".default") for target in (ops.wait, ops.free))


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
        before_recomputed, after_recomputed: of what an activation checkpoint recomputes in
            backward; None if nothing of this call is recomputed.
    """

    before_pre: int
    after_pre: int
    before_post: int
    after_post: int
    before_recomputed: int | None = None
    after_recomputed: int | None = None

    def moments(self, phase: str) -> Iterator[tuple[State, int]]:
        """Each state but the peaks, and the point that it lies at."""
        for state, name in MOMENTS[phase]:
            point = getattr(self, name)
            if point is not None:
                yield state, point


MOMENTS: dict[str, tuple[tuple[State, str], ...]] = {
    "forward": (
        (State.BEFORE_PRE_FORWARD, "before_pre"),
        (State.AFTER_PRE_FORWARD, "after_pre"),
        (State.BEFORE_POST_FORWARD, "before_post"),
        (State.AFTER_POST_FORWARD, "after_post"),
    ),
    "backward": (
        (State.PRE_FORWARD_AC, "before_recomputed"),
        (State.POST_FORWARD_AC, "after_recomputed"),
        (State.BEFORE_PRE_BACKWARD, "before_pre"),
        (State.AFTER_PRE_BACKWARD, "after_pre"),
        (State.BEFORE_POST_BACKWARD, "before_post"),
        (State.AFTER_POST_BACKWARD, "after_post"),
    ),
}
PEAKS = {"forward": State.PEAK_FORWARD, "backward": State.PEAK_BACKWARD}


class StateRows:
    """The rows of the table of a step: each state of each call of each module.

    Attributes:
        ledger: the step.
        stretches: per row its ticks: one, or for a peak several.
        ticks: per row its tick: of a peak, the first at which it is the largest.
    """

    def __init__(
        self, ledger: Ledger, found: Sequence[Mapping[Called, Mapping[str, Span]]]
    ) -> None:
        """Args: `found`: from `spans`."""
        self.ledger = ledger
        self.stretches: dict[Where, range] = {}
        for number, calls in enumerate(found):
            places = {phase: _points(ledger, phase, number) for phase in MOMENTS}
            for (module, call), by_phase in calls.items():
                for phase, span in by_phase.items():
                    points = places[phase]
                    for state, at in span.moments(phase):
                        tick = 2 * (points[at] if at >= 0 else points[0] - 1) + 1
                        self.stretches[Where(module, state, call, number)] = range(tick, tick + 1)
                    begin, end = points[span.before_pre + 1], points[span.after_post] + 1
                    peak = Where(module, PEAKS[phase], call, number)
                    self.stretches[peak] = range(2 * begin, 2 * end, 2)

    @functools.cached_property
    def ticks(self) -> dict[Where, int]:
        totals = self.ledger.totals
        return {
            where: ticks[int(totals[ticks.start : ticks.stop : ticks.step].argmax())]
            for where, ticks in self.stretches.items()
        }


def spans(ledger: Ledger, calls: Sequence[Sequence[Call]]) -> list[dict[Called, dict[str, Span]]]:
    """Per micro-batch: each call of a module, and its span in each phase in which it computes.

    Args:
        ledger: the step.
        calls: per micro-batch, every call of a module in forward.
    """
    known: list[tuple[Any, dict[Called, dict[str, Span]]]] = []
    found = []
    for number, of_one in enumerate(calls):
        places = {phase: _points(ledger, phase, number) for phase in MOMENTS}
        phases = {
            phase: [ledger.moments[point] for point in points]
            for phase, points in places.items()
            if points
        }
        same = next((made for key, made in known if key == (of_one, phases)), None)
        if same is None:  # micro-batches that run the same program have the same spans
            same = _spans(phases, of_one)
            known.append(((of_one, phases), same))
        found.append(same)
    return found


def _points(ledger: Ledger, name: str, micro_batch: int) -> list[int]:
    """Where a phase of a micro-batch computes; it may be interrupted by others."""
    same = (p for p in ledger.phases if (p.name, p.micro_batch) == (name, micro_batch))
    points = (range(p.start + 1, p.start + 1 + p.points) for p in same)
    return [n for each in points for n in each if ledger.moments[n].kind]


def _spans(
    phases: Mapping[str, Sequence[Moment]], calls: Sequence[Call]
) -> dict[Called, dict[str, Span]]:
    """Of one micro-batch.

    A call's computation runs from the first to the last operator of it or of what it calls. A
    module that is never called itself, such as a `ModuleList`, computes where those under its FQN
    do. What a checkpoint recomputes does not belong to the backward of the modules inside of it.
    """
    found: dict[Called, dict[str, Span]] = defaultdict(dict)
    ever = {call.module for call in calls}
    outside: set[Called] = set()  # calls of which no checkpoint recomputes everything
    chains: dict[tuple[int | None, str], list[Called]] = {}
    for phase, places in phases.items():
        first: dict[Called, int] = {}
        last: dict[Called, int] = {}
        recomputed: dict[Called, tuple[int, int]] = {}
        waits: dict[str, list[int]] = defaultdict(list)
        frees: dict[str, list[int]] = defaultdict(list)
        for i, moment in enumerate(places):
            if moment.kind == "row":
                if moment.op == WAIT:
                    waits[moment.module].append(i)
                elif moment.op == FREE:
                    frees[moment.module].append(i)
            if moment.kind != "operator":
                continue
            key = (moment.call, moment.module)
            if key not in chains:
                chains[key] = list(_around(calls, ever, *key))
            for called in chains[key]:
                # Buffers are written at the end of forward, after every checkpoint.
                written = moment.op == "aten.copy_"
                if phase == "forward" and not moment.checkpointed and not written:
                    outside.add(called)
                if moment.recomputed:
                    recomputed[called] = (recomputed[called][0] if called in recomputed else i, i)
                else:
                    first.setdefault(called, i)
                    last[called] = i
        for called, start, end in _stretches(first, last):
            module = called[0]
            wait = [w for w in waits[module] if start < w <= first[called]]
            free = [f for f in frees[module] if last[called] <= f < end]
            after_pre = first[called] - 1
            before_pre = wait[0] - 1 if wait else after_pre
            after_post = free[-1] if free else last[called]
            if module == "":
                before_pre, after_post = -1, len(places) - 1
            made = None if called in outside else recomputed.get(called)
            recomputation = (made[0] - 1, made[1]) if made else (None, None)
            found[called][phase] = Span(
                before_pre, after_pre, last[called], after_post, *recomputation
            )
    return dict(found)


def _stretches(
    first: dict[Called, int], last: dict[Called, int]
) -> Iterator[tuple[Called, int, float]]:
    """Each call, with the points between which no other call of its module computes."""
    calls: dict[str, list[Called]] = defaultdict(list)
    for called in sorted(first, key=first.__getitem__):
        calls[called[0]].append(called)
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
