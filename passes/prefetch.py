"""prefetch: launch early, wait late."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxshard import meta, ops
from fxshard.program import Fact, Program


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """Launch a unit's all-gather while an earlier unit computes; wait for a reduction late.

    The launch of the k-th unshard of a phase moves behind the wait of the (k-d)-th, so that it is
    in flight while unit k-d computes. The wait of a reduction moves in front of the next
    reduction, or to the end of backward: at most one is in flight.

    Attributes:
        forward: units ahead in forward (0: launch and wait stay together).
        backward: the same in backward.

    Before::

        wait a; compute a; launch b; wait b; compute b

    After (depth 1)::

        wait a; launch b; compute a; wait b; compute b
    """

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED})

    forward: int = 1
    backward: int = 1

    def apply(self, program: Program) -> None:
        program.forward_prefetch, program.backward_prefetch = self.forward, self.backward
        advance_launches(program, "forward", self.forward)
        advance_launches(program, "backward", self.backward)
        defer_reduce_waits(program)


def advance_launches(program: Program, phase: meta.Phase, depth: int) -> None:
    """Move each launch behind the wait `depth` unshards before it."""
    nodes = program.phase(phase)
    launches = [n for n in nodes if n.target is ops.all_gather]
    waits = {meta.get(n).pair: n for n in nodes if n.target is ops.wait}
    for k, launch in enumerate(launches):
        if depth == 0 or k == 0:
            continue
        anchor = waits[meta.get(launches[max(0, k - depth)]).pair]
        for earlier in launches[:k]:  # several units ahead: keep them in order of first use
            if _stands_behind(earlier, anchor):
                anchor = _last_pick(earlier)
        for node in reversed([launch, *launch.users]):
            anchor.append(node)


def _stands_behind(launch: fx.Node, wait: fx.Node) -> bool:
    node = wait.next
    while node.op == "call_function" and meta.get(node).role == "unshard":
        if node is launch:
            return True
        node = node.next
    return False


def _last_pick(launch: fx.Node) -> fx.Node:
    return list(launch.users)[-1]


def defer_reduce_waits(program: Program) -> None:
    """Move the wait of each reduction in front of the next one, or to the end.

    In front of the copies that the next one sends, so that the buffers of two never add up.
    """
    nodes = program.phase("backward")
    launches = [n for n in nodes if n.target is ops.reduce_scatter]
    waits = {meta.get(n).pair: n for n in nodes if n.target is ops.wait}
    starts: dict[int | None, fx.Node] = {}
    for node in nodes:
        if meta.get(node).role in ("pad", "reduce"):
            starts.setdefault(meta.get(node).pair, node)
    for k, launch in enumerate(launches):
        wait = waits[meta.get(launch).pair]
        if k + 1 < len(launches):
            starts[meta.get(launches[k + 1]).pair].prepend(wait)
        else:
            program.phase("backward")[-1].append(wait)
