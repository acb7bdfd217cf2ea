"""Buckets: every parameter in one, and each collective moves those of one."""

from __future__ import annotations

import collections

from torch import fx

from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
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
            if program.params[fqn].mesh != program.params[bucket.fqns[0]].mesh:
                what = f"in one bucket with {bucket.fqns[0]!r}, which is on another mesh"
                fail(program, fact, program.output, f"{fqn!r} is {what}.")
        if not bucket.packed <= set(bucket.fqns):
            what = f"{sorted(bucket.packed - set(bucket.fqns))} are packed in another's bucket."
            fail(program, fact, program.output, what)
    for fqn in program.params:
        if fqn not in number:
            fail(program, fact, program.output, f"{fqn!r} is in no bucket.")
    to_pack = {fqn for bucket in program.moving for fqn in bucket.packed}
    seen: dict[tuple[str, object, str], fx.Node] = {}
    for launch in walk.launches(program):
        if ops.of(launch).role == "transfer":
            continue
        names = walk.moved(launch)
        mine = {number[fqn] for fqn in names if fqn in number}
        if len(mine) > 1:
            what = f"%{launch.name} moves {', '.join(names)}, which are in {len(mine)} buckets."
            fail(program, fact, launch, what)
        for fqn, count in collections.Counter(names).items():
            if program.params[fqn].extension is not None and launch.target is ops.all_gather:
                continue  # it sends as many tensors as it says, see `fxshard.verify.extensions`
            key = (tags.get(launch).phase, launch.target, fqn)
            if count > 1 or key in seen:
                what = f"%{launch.name} moves {fqn!r} a second time in {tags.get(launch).phase}."
                fail(program, fact, launch, what)
            seen[key] = launch
        packed = walk.packed_names(launch)
        for fqn in packed:
            if fqn not in program.moving[number[fqn]].packed:
                fail(program, fact, launch, f"%{launch.name} packs {fqn!r}, which is not to be.")
        alone = _to_pack(launch, [fqn for fqn in names if fqn not in packed], to_pack)
        if alone:
            what = f"%{launch.name} moves {', '.join(alone)} one by one, which are to be packed."
            fail(program, fact, launch, what)


def _to_pack(launch: fx.Node, names: list[str], packed: set[str]) -> list[str]:
    """Those of `names` that a gather packs, being `packed` in their bucket: two or more.

    Of gradients only those of one dtype are packed, which a launch does not show.
    """
    found = [fqn for fqn in names if fqn in packed and launch.target is ops.all_gather]
    return found if len(found) > 1 else []
