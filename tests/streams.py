"""Programs on streams, simulated: what memory holds if a stream is as slow as its events allow.

Nothing here knows which orders `fxshard.verify` asks for. Operators are issued in the order of the
graph; each runs as soon as its stream has come to it and its events are there. Storages have
addresses, and a freed address is given out again at once, as CUDA's caching allocator does. A
storage's content is who wrote it last. An operator that finds something else than in a run one
after the other has raced.

Running one stream as late as possible shows every race in which another overtakes it: an operator
that does not depend on one of the slow stream runs before it.
"""

import dataclasses
import operator
from collections.abc import Iterator

from torch import fx

from fxshard.ir import ops, tags
from fxshard.ir.program import Program

COMPUTE = "compute"
Token = tuple[int, int]  # a storage, and how often it was written before


@dataclasses.dataclass
class Op:
    """What runs on a stream: addresses that it reads with what must lie there, and writes."""

    name: str
    stream: str
    number: int = 0  # in the order of issue
    waits: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    reads: list[tuple[int, Token]] = dataclasses.field(default_factory=list)
    writes: list[tuple[int, Token]] = dataclasses.field(default_factory=list)


class Host:
    """Issues the operators of a program, and gives out addresses.

    Args:
        policy: which free address is given out next: the one freed first (0), last (-1), ...
    """

    def __init__(self, program: Program, policy: int) -> None:
        self.program, self.policy = program, policy
        self.free: list[int] = []
        self.addresses: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.next = 0
        self.ops = list(self.issue())
        for number, op in enumerate(self.ops):
            op.number = number

    def issue(self) -> Iterator[Op]:
        graph, values = self.program.graph, self.program.values
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        kept = {s for value in values for s in tags.storage_ids(value)}
        held: set[int] = set()
        arriving: dict[str, set[int]] = {"forward": set(), "backward": set()}
        for node in graph.find_nodes(op="placeholder"):
            late = tags.get(node).role in ("tangent", "accumulated")
            arriving["backward" if late else "forward"] |= tags.storage_ids(node)
            if tags.get(node).role in ("shard", "ignored", "buffer", "input"):
                held |= tags.storage_ids(node)
        last: dict[int, fx.Node] = {}
        for node in nodes:
            for each in (node, *node.all_input_nodes):
                last |= dict.fromkeys(tags.storage_ids(each), node)
        phase = ""
        for node in nodes:
            if tags.get(node).phase != phase:
                phase = tags.get(node).phase
                yield self.caller(phase, arriving[phase])
            yield self.run(node)
            gone = {s for s, reader in last.items() if reader is node} - kept - held
            if node.target is ops.free:
                gone |= {s for each in node.all_input_nodes for s in tags.storage_ids(each)}
            for storage in sorted(gone & self.addresses.keys(), key=self.addresses.__getitem__):
                self.free += [a for a in [self.addresses.pop(storage)] if a >= 0]
        end = Op("the caller, afterwards", COMPUTE)
        end.reads = [self.here(s) for s in kept & self.addresses.keys()]
        end.writes = [self.written(s) for s in held & self.addresses.keys()]
        end.writes += self.anything()
        yield end

    def caller(self, phase: str, arriving: set[int]) -> Op:
        """Writes what comes in, and uses memory for a while."""
        op = Op(f"the caller, before {phase}", COMPUTE, records=(f"c_{phase}",))
        op.writes = [self.written(s) for s in arriving]
        self.free += range(self.next, self.next + 8)
        self.next += 8
        op.writes += self.anything()
        return op

    def run(self, node: fx.Node) -> Op:
        tag = tags.get(node)
        records = (tag.records,) if tag.records else ()
        op = Op(node.name, tag.stream, waits=tag.waits, records=records)
        if node.target in (operator.getitem, ops.wait, ops.free):
            return op
        inputs = {s for each in node.all_input_nodes for s in tags.storage_ids(each)}
        own, written = tags.storage_ids(node), mutated(node)
        if own and own <= inputs and not written:
            return op  # a view
        op.reads = [self.here(s) for s in inputs & self.addresses.keys()]
        if ops.of(node).on_host:  # pinned memory, which the device does not give out
            self.addresses |= {s: -s for s in own}
        op.writes = [self.written(s) for s in written | (own - inputs)]
        if op.stream == COMPUTE:
            op.writes += self.anything()
        return op

    def anything(self) -> list[tuple[int, Token]]:
        """What a kernel uses while it runs, and gives back when it is issued, may lie anywhere."""
        return [(address, (-1, address)) for address in self.free]

    def here(self, storage: int) -> tuple[int, Token]:
        return self.addresses[storage], (storage, self.versions[storage])

    def written(self, storage: int) -> tuple[int, Token]:
        if storage not in self.addresses:
            if self.free:
                self.addresses[storage] = self.free.pop(self.policy % len(self.free))
            else:
                self.addresses[storage] = self.next
                self.next += 1
        self.versions[storage] = self.versions.get(storage, 0) + 1
        return self.here(storage)


def mutated(node: fx.Node) -> set[int]:
    if node.target is ops.all_reduce or (node.target is ops.comm_hook and node.args[1] == 1):
        return tags.storage_ids(node)
    found: set[int] = set()
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    for argument in schema:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            values = value if isinstance(value, list | tuple) else [value]
            found |= {s for n in values if isinstance(n, fx.Node) for s in tags.storage_ids(n)}
    return found


def race(program: Program, slowest: str, policy: int) -> str | None:
    """The first operator that finds other data than it should, with `slowest` as late as may be.

    "deadlock" if events wait for each other.
    """
    queues: dict[str, list[Op]] = {}
    recorded: set[str] = set()
    issued = Host(program, policy).ops
    for op in issued:
        queues.setdefault(op.stream, []).append(op)
    recorders = {event for op in issued for event in op.records}
    order = sorted(queues, key=lambda stream: stream == slowest)
    memory: dict[int, Token] = {}
    heads = dict.fromkeys(queues, 0)
    while True:
        ready = (
            stream
            for stream in order
            if heads[stream] < len(queues[stream])
            and all(
                e in recorded or e not in recorders for e in queues[stream][heads[stream]].waits
            )
        )
        stream = next(ready, None)
        if stream is None:
            left = [op for s in queues for op in queues[s][heads[s] :]]
            return "deadlock" if left else None
        op = queues[stream][heads[stream]]
        heads[stream] += 1
        for address, token in op.reads:
            if memory.get(address) != token:
                return op.name
        mine = {address for address, _ in op.writes}
        for late in queues[COMPUTE][heads[COMPUTE] :] if op.stream != COMPUTE else ():
            if late.number > op.number:
                break
            if mine & {address for address, (storage, _) in late.writes if storage == -1}:
                return op.name  # into what a kernel that was issued before will use
        memory.update(op.writes)
        recorded.update(op.records)


def races(program: Program) -> str | None:
    """A race of `program`, on whichever stream is slow and whichever memory is given out next."""
    streams = {tags.get(n).stream for n in program.graph.nodes if n.op == "call_function"}
    for policy in (-1, 0, -2, 1, -3, 2):
        for slowest in sorted(streams):
            found = race(program, slowest, policy)
            if found is not None:
                return f"%{found}, with a slow {slowest} stream"
    return None
