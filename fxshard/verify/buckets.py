"""Buckets: every parameter in one, and each collective moves those of one."""

from __future__ import annotations

import collections

from torch import fx

from fxshard import meta
from fxshard.program import Fact, Program
from fxshard.verify import walk
from fxshard.verify.failure import fail


def bucketed(program: Program) -> None:
    fact = Fact.BUCKETED
    number: dict[str, int] = {}
    for i, bucket in enumerate(program.moving):
        for fqn in bucket.fqns:
            if fqn in number or fqn not in program.params:
                what = "in two buckets" if fqn in number else "no parameter of a unit"
                fail(program, fact, program.output, f"{fqn!r} is {what}.")
            number[fqn] = i
        if not bucket.packed <= set(bucket.fqns):
            what = f"{sorted(bucket.packed - set(bucket.fqns))} are packed in another's bucket."
            fail(program, fact, program.output, what)
    for fqn in program.params:
        if fqn not in number:
            fail(program, fact, program.output, f"{fqn!r} is in no bucket.")
    seen: dict[tuple[str, object, str], fx.Node] = {}
    for launch in walk.launches(program):
        names = walk.moved(launch)
        mine = {number[fqn] for fqn in names if fqn in number}
        if len(mine) > 1:
            what = f"%{launch.name} moves {', '.join(names)}, which are in {len(mine)} buckets."
            fail(program, fact, launch, what)
        for fqn, count in collections.Counter(names).items():
            key = (meta.get(launch).phase, launch.target, fqn)
            if count > 1 or key in seen:
                what = f"%{launch.name} moves {fqn!r} a second time in {meta.get(launch).phase}."
                fail(program, fact, launch, what)
            seen[key] = launch
        for fqn in walk.packed_names(launch):
            if fqn not in program.moving[number[fqn]].packed:
                fail(program, fact, launch, f"%{launch.name} packs {fqn!r}, which is not to be.")
