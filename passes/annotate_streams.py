"""annotate-streams: which stream runs each node, and which events order them."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any, ClassVar

from torch import fx

from fxshard.ir import ops, tags
from fxshard.ir.outline import COMPUTE, belongs_to
from fxshard.ir.program import Fact, Program
from fxshard.verify import orders
from fxshard.verify.orders import ENTRY, Need, OrderStep
from fxshard.verify.streams import Clock, join


@dataclasses.dataclass(frozen=True)
class AnnotateStreams:
    """Launches run on streams of their own; events order them where an order is needed.

    `fxshard.verify.orders` says which orders those are, and why: reads and writes of one storage,
    and memory that the caching allocator reuses. A launch waits for the last operator of each other
    stream that it depends on, unless another chain of events already orders the two. The compute
    stream waits for a launch at its wait node, unless a later wait is early enough and covers it.
    No other node waits, and no event is recorded that none waits for: without any one event, some
    order would be missing.

    An event of the compute stream is recorded after the region of the operator in question (none
    can be recorded inside of a region), or where the phase begins: ``c_forward`` and ``c_backward``
    stand for all that the caller ran before. On CPU events have no effect at run time;
    on CUDA `fxshard.runtime.world.c10d.C10dWorld` obeys it.

    Before::

        %mm = aten.mm(%x, %t)
        %unshard_1 = fxshard.all_gather([%w_shard], 2)
        %wait_1 = fxshard.wait([%getitem])

    After::

        %mm = aten.mm(%x, %t)                            | records=c1
        %unshard_1 = fxshard.all_gather([%w_shard], 2)   | stream=unshard waits=c1 records=u1
        %wait_1 = fxshard.wait([%getitem])               | waits=u1
    """

    name: ClassVar[str] = "annotate-streams"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED, Fact.FREED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.STREAMS_ORDERED})

    def apply(self, program: Program) -> None:
        for node in program.graph.nodes:
            if node.op == "call_function":
                tags.update(node, stream=ops.stream_of(node), waits=(), records=None)
        steps = list(orders.steps(program))
        order_launches(steps, order_compute(steps))


@dataclasses.dataclass
class Wait:
    """A wait node that may make the compute stream wait for its launch.

    Attributes:
        at: number of its step.
        knows: per stream but the compute stream, what is complete when its launch is.
        needed_at: number of the first step that needs it.
    """

    at: int
    node: fx.Node
    launch: fx.Node
    knows: Clock
    needed_at: int = 0


def order_compute(steps: list[OrderStep]) -> dict[fx.Node, fx.Node]:
    """The wait nodes that the compute stream needs, with their launches.

    A wait is taken when a later step needs it. It is dropped if a wait between the two is taken
    afterwards and covers it.
    """
    known: Clock = {}
    knows: dict[tuple[str, int], Clock] = {}  # of launches, by stream and position
    of_stream: dict[str, Clock] = {}
    launches: dict[
        int | None, tuple[fx.Node, Clock]
    ] = {}  # by pair; the last is what is waited for
    pending: list[Wait] = []
    taken: list[Wait] = []
    for at, step in enumerate(steps):
        if step.stream != "compute":
            clock = dict(of_stream.get(step.stream, {}))
            for stream, need in step.needs.items():
                join(clock, knows.get((stream, need.position), {}))
            clock[step.stream] = step.position
            knows[step.stream, step.position] = of_stream[step.stream] = clock
            launches[tags.get(step.node).pair] = step.node, clock
            continue
        if step.kind == "run" and step.node.target is ops.wait:
            launch = launches.get(tags.get(step.node).pair)
            if launch is not None:
                pending.append(Wait(at, step.node, *launch))
        for stream, need in step.needs.items():
            if known.get(stream, 0) >= need.position:
                continue
            wait = next((w for w in pending if w.knows.get(stream, 0) >= need.position), None)
            if wait is None:
                continue  # `fxshard.verify` reports it
            wait.needed_at = at
            join(known, wait.knows)
            late = len(taken)
            while late and taken[late - 1].needed_at > wait.at:
                late -= 1
            taken[late:] = [w for w in taken[late:] if not covers(wait.knows, w.knows)] + [wait]
            pending = [w for w in pending if not covers(known, w.knows)]
    return {wait.node: wait.launch for wait in taken}


def order_launches(steps: list[OrderStep], waits: dict[fx.Node, fx.Node]) -> None:
    """Tag every node with the events that it waits for and records."""
    ends = ends_of_runs(steps)
    entered: dict[int, tags.Phase] = {}  # position on the compute stream -> phase that begins
    nodes: dict[int, fx.Node] = {}  # position on the compute stream -> operator
    clocks: dict[str, Clock] = {"compute": {}}
    after: dict[fx.Node, Clock] = {}  # per launch, the clock of its stream after it
    launches: dict[tuple[str, int], fx.Node] = {}
    changes: list[tuple[int, Clock]] = []  # of the clock of the compute stream
    entry, before_entry = 0, Clock()  # where the phase begins; what was complete then
    for step in steps:
        if step.kind == "entry":
            entry, before_entry = step.position, dict(clocks["compute"])
            entered[step.position] = tags.get(step.node).phase
            changes.append((step.position, dict(clocks["compute"])))
        elif step.kind == "run" and step.stream == "compute":
            nodes[step.position] = step.node
            if step.node in waits:
                launch = waits[step.node]
                tags.update(step.node, waits=(event_of(launch),))
                join(clocks["compute"], after[launch])
                changes.append((step.position, dict(clocks["compute"])))
        elif step.kind == "run":
            mine = clocks.setdefault(step.stream, {})
            found: dict[tuple[str, int], Clock] = {}
            for stream, need in step.needs.items():
                where, position = place(stream, need, ends, entry, before_entry)
                if mine.get(where, 0) >= position:
                    continue
                if where == "compute":
                    last = bisect.bisect_right(changes, position, key=lambda change: change[0])
                    found[where, position] = changes[last - 1][1] | {"compute": position}
                else:
                    found[where, position] = after[launches[where, position]]
            waited: list[str] = []
            for (where, position), _ in sorted(found.items()):
                others = (clock for key, clock in found.items() if key != (where, position))
                if any(clock.get(where, 0) >= position for clock in others):
                    continue
                if where != "compute":
                    waited.append(event_of(launches[where, position]))
                elif position in entered:
                    waited.append(ENTRY[entered[position]])
                else:
                    waited.append(event_after(nodes[position], step.node))
            for clock in found.values():
                join(mine, clock)
            mine[step.stream] = step.position
            after[step.node], launches[step.stream, step.position] = dict(mine), step.node
            tags.update(step.node, waits=tuple(waited))


def ends_of_runs(steps: list[OrderStep]) -> dict[int, int]:
    """Per position on the compute stream, that of the last operator of its compute region."""
    run: list[int] = []
    before: Any = None
    found: dict[int, int] = {}
    for step in steps:
        tag = tags.get(step.node)
        ends = step.kind == "entry" or tag.role not in COMPUTE or belongs_to(step.node) != before
        if run and ends:
            found |= dict.fromkeys(run, run[-1])
            run = []
        if step.kind == "run" and tag.role in COMPUTE:
            run.append(step.position)
            before = belongs_to(step.node)
    return found | dict.fromkeys(run, run[-1] if run else 0)


def place(
    stream: str, need: Need, ends: dict[int, int], entry: int, before_entry: Clock
) -> tuple[str, int]:
    """Stream and position to wait for: earlier phases are complete where this one begins."""
    if stream == "compute":
        return stream, max(ends.get(need.position, need.position), entry)
    if before_entry.get(stream, 0) >= need.position:
        return "compute", entry
    return stream, need.position


def event_of(launch: fx.Node) -> str:
    """The event that `launch` records when it is done."""
    tag = tags.get(launch)
    tags.update(launch, records=f"{ops.of(launch).event}{tag.pair}")
    return str(tags.get(launch).records)


def event_after(node: fx.Node, launch: fx.Node) -> str:
    """The event that `node` of the compute stream records; named after the first that waits."""
    if tags.get(node).records is None:
        spec = ops.of(launch)
        name = f"c{tags.get(launch).pair}"  # a pair has one collective, and maybe loads and casts
        tags.update(node, records=name if spec.collective else name + spec.event)
    return str(tags.get(node).records)


def covers(clock: Clock, other: Clock) -> bool:
    """True if `clock` knows all that `other` knows."""
    return all(clock.get(stream, 0) >= position for stream, position in other.items())
