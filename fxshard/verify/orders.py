"""Which orders a program needs between its streams, whatever events it has.

Two operators on different streams need an order in these cases, and in no other:

- one writes what the other reads or writes;
- one gets memory that the other has used: a launch that writes a fresh buffer, and every kernel of
  the compute stream (it may allocate a result, or temporary memory), come after all that ever
  touched a storage that is freed by then, and after such kernels;
- a phase begins or ends: the first launches come after what the caller did before (an optimizer
  wrote shards, a loss used memory), and the caller continues after what the other streams did. Of a
  whole step, both phases are one.

The second is CUDA's caching allocator's (c10/cuda/CUDACachingAllocator.cpp): a block belongs to the
stream that was current when it was allocated. When it is freed it goes back at once to the free
blocks of that stream, even if other streams still use it, unless ``record_stream`` was called for
them. Every buffer is allocated on the compute stream (`fxshard.runtime.world.c10d`), and
``record_stream`` is not used: these orders make reuse safe. A copy to the CPU writes no memory of
the device; pinned memory is the host allocator's, which waits for the copies
(aten/src/ATen/core/CachingHostAllocator.h).

A view, a getitem and a free touch no data.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Set
from typing import Literal

from torch import fx

from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Program
from fxshard.verify import walk

# Events of the compute stream that are recorded where a phase begins, if anything waits for them.
ENTRY: dict[tags.Phase, str] = {"forward": "c_forward", "backward": "c_backward"}


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """All that a stream runs up to a position must be over.

    Attributes:
        position: on that stream: the number of operators up to and with `node`.
        node: the operator there; None: what the caller ran before the phase.
        why: what both touch, as the end of a sentence.
    """

    position: int
    node: fx.Node | None
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class OrderStep:
    """One thing that happens, in the order in which the host issues it.

    Attributes:
        kind: "entry" of a phase, "run" of an operator, "end" of a phase.
        node: the operator; for an entry and an end, the first and the last of the phase.
        stream: of the operator; the compute stream for the other kinds.
        position: on `stream`.
        needs: per other stream, what must be over there before.
    """

    kind: Literal["entry", "run", "end"]
    node: fx.Node
    stream: tags.Stream
    position: int
    needs: dict[tags.Stream, Need]


Storages = Set[int]  # identities
_NONE: Storages = frozenset()


class _Access:
    """Who touched a storage: its last writer, and per stream the last reader since."""

    __slots__ = ("reads", "write")

    def __init__(self, stream: tags.Stream, position: int, node: fx.Node | None) -> None:
        self.write = (stream, position, node)
        self.reads: dict[tags.Stream, tuple[int, fx.Node]] = {}


def steps(program: Program) -> Iterator[OrderStep]:
    """What happens in `program`, and what must be over before; streams are those of the tags.

    Linear in operators times storages of each: per storage only the last accesses are kept.
    """
    walker = _Walker(program)
    before: fx.Node | None = None
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        begins = not program.whole and tags.get(node).phase != tags.get(before or node).phase
        if before is None or begins:
            if before is not None:
                yield walker.end(before)
            yield walker.entry(node)
        yield walker.run(node)
        walker.drop_storages(node)
        before = node
    if before is not None:
        yield walker.end(before)


class _Walker:
    def __init__(self, program: Program) -> None:
        self.ids = {node: tuple(tags.storage_ids(node)) for node in program.graph.nodes}
        self.reads: dict[fx.Node, frozenset[int]] = {}
        self.positions: dict[tags.Stream, int] = {}
        self.accesses: dict[int, _Access] = {}
        self.freed: dict[tags.Stream, Need] = {}  # what touched memory that has been freed
        self.touched: dict[tags.Stream, Need] = {}  # last access of each stream
        self.given: dict[tags.Phase, list[int]] = {"forward": [], "backward": []}
        kept = {storage for value in program.values for storage in self.ids[value]}
        for node in program.graph.find_nodes(op="call_function", target=ops.keep):
            kept.update(*map(self.ids.__getitem__, tags.operands(node)))
        for node in program.graph.find_nodes(op="placeholder"):
            role = tags.get(node).role
            if role in tags.HELD:
                kept.update(self.ids[node])
            late = role in ("tangent", "accumulated", "partial")
            self.given["backward" if late else "forward"].extend(self.ids[node])
        last: dict[int, fx.Node] = {}
        for node in program.graph.nodes:
            if node.op == "call_function":
                self.reads[node] = tags.read_ids(node)
                last.update(dict.fromkeys(self.ids[node], node))
                last.update(dict.fromkeys(self.reads[node], node))
        self.dying: dict[fx.Node, list[int]] = {}
        for storage, node in last.items():
            if storage not in kept:
                self.dying.setdefault(node, []).append(storage)

    def advance(self, stream: tags.Stream) -> int:
        self.positions[stream] = self.positions.get(stream, 0) + 1
        return self.positions[stream]

    def entry(self, node: fx.Node) -> OrderStep:
        """The caller has written the inputs, and has used memory that is free now."""
        position = self.advance("compute")
        phase = tags.get(node).phase
        for storage in self.given[phase]:
            self.accesses[storage] = _Access("compute", position, None)
        self.freed["compute"] = Need(position, None, REUSED)
        return OrderStep("entry", node, "compute", position, {})

    def end(self, node: fx.Node) -> OrderStep:
        """The caller may write or give back anything."""
        needs: dict[tags.Stream, Need] = {}
        needs |= {stream: need for stream, need in self.touched.items() if stream != "compute"}
        return OrderStep("end", node, "compute", self.positions["compute"], needs)

    def run(self, node: fx.Node) -> OrderStep:
        stream = tags.get(node).stream
        position = self.advance(stream)
        needs: dict[tags.Stream, Need] = {}
        reads, writes, fresh = self.touches(node)
        allocates = reads or writes if stream == "compute" else fresh
        if allocates and not ops.of(node).on_host:
            for other, need in self.freed.items():
                if other != stream:
                    needs[other] = need
        for storage in reads:
            access = self.accesses.get(storage)
            if access is not None:
                _add(needs, stream, *access.write, "reads what is written by")
        for storage in writes:
            access = self.accesses.get(storage)
            if access is not None:
                _add(needs, stream, *access.write, "writes what is written by")
                for other, (at, reader) in access.reads.items():
                    _add(needs, stream, other, at, reader, "writes what is read by")
        for storage in reads:
            access = self.accesses.setdefault(storage, _Access("compute", 1, None))
            access.reads[stream] = (position, node)
        for storage in writes:
            self.accesses[storage] = _Access(stream, position, node)
        if reads or writes:
            self.touched[stream] = Need(position, node, "ends the phase without")
            if stream == "compute":
                self.freed[stream] = Need(position, node, REUSED)
        return OrderStep("run", node, stream, position, needs)

    def touches(self, node: fx.Node) -> tuple[Storages, Storages, Storages]:
        """Storages that `node` reads, writes, and makes."""
        if node.target is operator.getitem or ops.of(node).over == "nothing":
            return _NONE, _NONE, _NONE
        inputs = self.reads[node]
        own = tags.storage_ids(node)
        written = own if transfers.is_in_place(node) else walk.written(node)
        if own and own <= inputs and not written:
            return _NONE, _NONE, _NONE
        fresh = own - inputs
        return inputs, written | fresh, fresh

    def drop_storages(self, node: fx.Node) -> None:
        """Drop the storages that `node` frees, or is the last to refer to."""
        gone = self.dying.pop(node, [])
        if node.target is ops.free:
            gone = [storage for source in tags.operands(node) for storage in self.ids[source]]
        for storage in gone:
            access = self.accesses.pop(storage, None)
            if access is None:
                continue
            _add(self.freed, None, *access.write, REUSED)
            for stream, (at, reader) in access.reads.items():
                _add(self.freed, None, stream, at, reader, REUSED)


REUSED = "may get memory that was used by"


def _add(
    needs: dict[tags.Stream, Need],
    stream: tags.Stream | None,
    other: tags.Stream,
    position: int,
    node: fx.Node | None,
    why: str,
) -> None:
    if other != stream and (other not in needs or needs[other].position < position):
        needs[other] = Need(position, node, why)
