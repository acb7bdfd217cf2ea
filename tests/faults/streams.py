"""Faults of events and streams, and operators that read or write too early or too late."""

import dataclasses
import random
from typing import Any

from torch import fx

from fxshard.ir import ops, tags
from fxshard.ir.program import Program
from tests.faults.kinds import (
    REDUCTIONS,
    NoPlace,
    aten,
    compute,
    fault,
    items,
    nodes,
    one,
    retag,
    stands_before,
    two,
)

# -- events and streams ----------------------------------------------------------------------------


def waiters(program: Program) -> list[fx.Node]:
    return [n for n in nodes(program) if tags.get(n).waits]


@fault
def drop_event_of_a_launch(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in waiters(program) if n.target is not ops.wait])
    waits = list(tags.get(node).waits)
    waits.pop(rng.randrange(len(waits)))
    return retag(node, waits=tuple(waits))


@fault
def drop_event_of_a_wait(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in waiters(program) if n.target is ops.wait])
    return retag(node, waits=())


@fault
def drop_record(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program) if tags.get(n).records])
    return retag(node, records=None)


@fault
def swap_events(program: Program, rng: random.Random) -> str:
    a, b = two(rng, waiters(program))
    first, second = tags.get(a).waits, tags.get(b).waits
    if first == second:
        raise NoPlace
    tags.update(a, waits=second)
    return retag(b, waits=first)


@fault
def swap_records(program: Program, rng: random.Random) -> str:
    a, b = two(rng, [n for n in nodes(program) if tags.get(n).records])
    first = tags.get(a).records
    tags.update(a, records=tags.get(b).records)
    return retag(b, records=first)


@fault
def record_earlier(program: Program, rng: random.Random) -> str:
    found = [n for n in nodes(program) if (tags.get(n).records or "").startswith("c")]
    node = one(rng, found)
    earlier = [n for n in compute(program) if stands_before(n, node) and not tags.get(n).records]
    earlier = [n for n in earlier if n is not node and not tags.aliases_input(n)]
    place = one(rng, earlier)
    event = tags.get(node).records
    tags.update(node, records=None)
    return retag(place, records=event)


@fault
def wait_for_an_older_event(program: Program, rng: random.Random) -> str:
    events: list[str] = []
    found: list[tuple[fx.Node, str]] = []
    for node in nodes(program):
        tag = tags.get(node)
        if tag.waits and events:
            found += [(node, event) for event in events if event not in tag.waits]
        events += [tag.records] if tag.records else []
    node, event = one(rng, found)
    return retag(node, waits=(event,))


@fault
def another_stream(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program) if ops.of(n).asynchronous])
    others = ["compute", "unshard", "reduce", "all-reduce", "load", "store"]
    return retag(node, stream=rng.choice([s for s in others if s != tags.get(node).stream]))


# -- insert ----------------------------------------------------------------------------------------


def insert(program: Program, behind: fx.Node, target: Any, *args: Any) -> fx.Node:
    with program.graph.inserting_after(behind):
        node = program.graph.call_function(target, args)
    tag = dataclasses.replace(
        tags.get(behind), role="compute", stream="compute", records=None, waits=(), pair=None
    )
    return tags.put(node, tag, program.refake(node))


def returned(program: Program, node: fx.Node) -> None:
    """Add what `node` made to the first output of the model, so that it matters."""
    at = next(i for i, r in enumerate(program.results) if r.kind == "output")
    total = insert(program, node, aten.sum.default, node)
    values = program.values
    made = values[at]
    if made.op != "call_function" or not stands_before(total, made):
        return
    added = insert(program, made, aten.add.Tensor, made, total)
    program.values = [added if i == at else v for i, v in enumerate(values)]


@fault
def read_in_flight(program: Program, rng: random.Random) -> str:
    pairs = {tags.get(n).pair for n in nodes(program, ops.wait)}
    found = [n for n in nodes(program, ops.all_gather) if tags.get(n).phase == "forward"]
    launch = one(rng, [n for n in found if tags.get(n).pair in pairs])
    reader = insert(program, items(launch)[-1], aten.abs.default, items(launch)[-1])
    returned(program, reader)
    return f"%{reader} reads what %{launch} writes"


@fault
def read_after_free(program: Program, rng: random.Random) -> str:
    found = [n for n in nodes(program, ops.free) if tags.get(n).phase == "forward"]
    free = one(rng, found)
    reader = insert(program, free, aten.abs.default, tags.operands(free)[0])
    returned(program, reader)
    return f"%{reader} reads what %{free} has freed"


@fault
def write_in_flight(program: Program, rng: random.Random) -> str:
    launch = one(rng, nodes(program, *REDUCTIONS))
    behind = items(launch)[-1]
    writer = insert(program, behind, aten.mul_.Scalar, tags.operands(launch)[0], 2)
    return f"%{writer} writes what %{launch} sends"


@fault
def save_unsharded_parameter(program: Program, rng: random.Random) -> str:
    found = [n for n in nodes(program, ops.all_gather) if tags.get(n).phase == "forward"]
    readers = [n for n in compute(program) if tags.get(n).phase == "backward"]
    readers = [n for n in readers if n.target is aten.mm.default]
    launch, reader = one(rng, found), one(rng, readers)
    if program.units[tags.get(launch).unit or 0].reshard is False:
        raise NoPlace
    reader.update_arg(1, items(launch)[0])
    return f"%{reader} reads what %{launch} gathered"


@fault
def return_unreduced_gradient(program: Program, rng: random.Random) -> str:
    found = nodes(program, ops.reduce_scatter, ops.all_reduce)
    launch = one(rng, found)
    item = one(rng, items(launch))
    values = program.values
    if item not in values:
        raise NoPlace
    program.values = [tags.operands(launch)[item.args[1]] if v is item else v for v in values]
    return f"what %{launch} was sent is returned"
