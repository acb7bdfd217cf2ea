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
    in flight while unit k-d computes, together with the casts and loads that it sends. The wait of
    a reduction moves in front of the next reduction, or to the end of backward, and what follows it
    (an all-reduce, a copy to the CPU) with it: at most one of each is in flight.

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
    """Move each launch, and what it sends, behind the wait `depth` unshards before it."""
    nodes = program.phase(phase)
    launches = [n for n in nodes if ops.is_unshard(n)]
    chains = {launch: chain(nodes, launch) for launch in launches}
    waits = {meta.get(n).pair: n for n in nodes if n.target is ops.wait}
    for k, launch in enumerate(launches):
        if depth == 0 or k == 0:
            continue
        anchor = waits[meta.get(launches[max(0, k - depth)]).pair]
        for earlier in launches[:k]:  # several units ahead: keep them in order of first use
            if _stands_behind(chains[earlier][0], anchor):
                anchor = chains[earlier][-1]
        for node in reversed(chains[launch]):
            anchor.append(node)


def chain(nodes: list[fx.Node], launch: fx.Node) -> list[fx.Node]:
    """`launch` with its picks, and the loads and casts of the same pair in front of it."""
    found: list[fx.Node] = []
    pair = meta.get(launch).pair
    for node in nodes:
        if node.target is ops.wait and meta.get(node).pair == pair:
            break
        if meta.get(node).pair == pair and meta.get(node).role == "unshard":
            found.append(node)
    return found


def _stands_behind(first: fx.Node, wait: fx.Node) -> bool:
    node = wait.next
    while node.op == "call_function" and meta.get(node).role == "unshard":
        if node is first:
            return True
        node = node.next
    return False


def defer_reduce_waits(program: Program) -> None:
    """Move what follows each launch of a reduction behind the next unit's launch of that kind.

    A reduction has stages: copies and launch; wait, and the launch of an all-reduce; and so on. A
    stage runs right in front of the stage before it of the next unit, so that the buffers of two
    units never add up; the last unit's run at the end.
    """
    behind: list[list[list[fx.Node]]] = []  # stages still to be placed, of the units so far
    for first, *rest in stages(program):
        at = first[0]
        waiting = [rest]
        for stage, *later in [stages_left for stages_left in behind if stages_left]:
            for node in stage:
                at.prepend(node)
            at = stage[0]
            waiting.append(later)
        behind = waiting
    while any(behind):
        end = program.phase("backward")[-1]
        for stage, *_ in reversed([left for left in behind if left]):
            for node in stage:
                end.append(node)
                end = node
        behind = [left[1:] for left in behind]


def stages(program: Program) -> list[list[list[fx.Node]]]:
    """Per reduction of a unit: its nodes, cut in front of each wait.

    An all-reduce or a copy to the CPU has a pair of its own; it belongs to what it reads.
    """
    found: list[list[list[fx.Node]]] = []
    number: dict[int, int] = {}  # pair -> place in `found`
    for node in program.phase("backward"):
        tag = meta.get(node)
        if tag.pair is None or tag.role not in ("pad", "reduce", "wait", "settle"):
            continue
        if tag.pair not in number:
            if tag.role == "wait":
                continue  # of an unshard
            before = [meta.get(source).pair for source in node.all_input_nodes]
            known = [number[pair] for pair in before if pair in number]
            if not known:
                found.append([[]])
            number[tag.pair] = known[0] if known else len(found) - 1
        group = found[number[tag.pair]]
        if tag.role == "wait":
            group.append([])
        group[-1].append(node)
    return found
