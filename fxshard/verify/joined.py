"""Ranks that differ: each gathers and reduces what any of them needs, in the order agreed on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Fact, Program
from fxshard.verify import walk
from fxshard.verify.failure import fail

PHASES: tuple[tags.Phase, ...] = ("forward", "backward")


def joined(program: Program) -> None:
    """The collectives of each phase move what was agreed on, nothing else, and in that order."""
    common = program.common
    assert common is not None
    bucket = {fqn: bucket.fqns for bucket in program.moving for fqn in bucket.fqns}
    gathers = [n for n in walk.unshards(program) if n.target is ops.all_gather]
    for phase in PHASES:
        launches = [n for n in gathers if tags.get(n).phase == phase]
        place = {fqn: i for i, fqn in enumerate(common.reads(phase))}
        begins = {f: min(place[o] for o in bucket[f] if o in place) for f in place}
        _in_order(program, launches, begins, f"gathered in {phase}")
    reductions = [n for n in program.graph.nodes if transfers.is_first_reduction(program, n)]
    _in_order(program, reductions, {fqn: i for i, fqn in enumerate(common.grads)}, "reduced")


def _in_order(
    program: Program, launches: Sequence[fx.Node], place: dict[str, int], what: str
) -> None:
    """`launches` move all that has a `place`, and nothing else, by the last place in each."""
    fact, before = Fact.JOINED, -1
    moved: set[str] = set()
    for launch in launches:
        names = walk.moved(launch)
        for fqn in names:
            if fqn not in place:
                text = f"{fqn!r} is {what} by %{launch.name}, and not on other ranks."
                fail(program, fact, launch, text)
        at = max(place[fqn] for fqn in names)
        if at < before:
            text = f"{', '.join(names)} come too late: other ranks have %{launch.name} earlier."
            fail(program, fact, launch, text)
        before = at
        moved.update(names)
    for fqn in place:
        if fqn not in moved:
            text = f"{fqn!r} is not {what}, but other ranks do that and would wait for this one."
            fail(program, fact, program.output, text)
