"""Where in a step each state of each module lies, as points of the schedule."""

from __future__ import annotations

import dataclasses

from fxshard import meta, ops
from fxshard.memory.category import State
from fxshard.program import Program
from fxshard.schedule import points


@dataclasses.dataclass(frozen=True)
class Span:
    """The stretch of one phase that belongs to one module; numbers of points.

    Point -1 is the start of the phase. A unit's pre-forward begins with the wait for its
    unshard, and its post-forward ends with its free (in backward: the free of its gradients).
    """

    before_pre: int
    after_pre: int
    before_post: int
    after_post: int


MOMENTS = {
    "forward": (
        (State.BEFORE_PRE_FORWARD, "before_pre"),
        (State.AFTER_PRE_FORWARD, "after_pre"),
        (State.BEFORE_POST_FORWARD, "before_post"),
        (State.AFTER_POST_FORWARD, "after_post"),
    ),
    "backward": (
        (State.BEFORE_PRE_BACKWARD, "before_pre"),
        (State.AFTER_PRE_BACKWARD, "after_pre"),
        (State.BEFORE_POST_BACKWARD, "before_post"),
        (State.AFTER_POST_BACKWARD, "after_post"),
    ),
}
PEAKS = {"forward": State.PEAK_FORWARD, "backward": State.PEAK_BACKWARD}


def spans(program: Program) -> dict[tuple[str, meta.Phase], Span]:
    """Per (module FQN, phase) in which the module computes, its span.

    A module's computation runs from the first to the last operator of it or of its submodules.
    """
    assert program.schedule is not None
    found: dict[tuple[str, meta.Phase], Span] = {}
    for phase, graph in program.schedule.phases():
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        waits: dict[str, int] = {}
        frees: dict[str, int] = {}
        places = points(program.schedule, graph)
        for i, point in enumerate(places):
            tag = meta.get(point.row)
            if point.node is not None:
                for module in _with_ancestors(point.module):
                    first.setdefault(module, i)
                    last[module] = i
            elif point.row.target is ops.wait and tag.module not in waits:
                waits[tag.module] = i
            elif point.row.target is ops.free:
                frees[tag.module] = i
        for module in first:
            after_pre = first[module] - 1
            before_pre = min(waits.get(module, first[module]) - 1, after_pre)
            after_post = max(frees.get(module, last[module]), last[module])
            if module == "":
                before_pre, after_post = -1, len(places) - 1
            found[module, phase] = Span(before_pre, after_pre, last[module], after_post)
    return found


def _with_ancestors(fqn: str) -> list[str]:
    names = fqn.split(".") if fqn else []
    return [".".join(names[:i]) for i in range(len(names) + 1)]
