"""annotate-streams: which stream runs each node, and which events order them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxshard import meta, ops
from fxshard.program import Fact, Program


@dataclasses.dataclass(frozen=True)
class AnnotateStreams:
    """Launches run on streams of their own; events order them against the compute stream.

    A launch waits for what the compute stream has enqueued so far: the writers of its inputs, and
    the last readers of the memory that its buffers may reuse. The event is recorded by the last
    node in front of it on the compute stream. A wait node makes the compute stream wait for the
    launch. On CPU this orders nothing at run time; on CUDA the executor obeys it.

    Before::

        %mm = aten.mm(%x, %t)
        %unshard_0 = fxshard.all_gather([%w_shard], 2)
        %wait_0 = fxshard.wait([%getitem])

    After::

        %mm = aten.mm(%x, %t)                            | records=c0
        %unshard_0 = fxshard.all_gather([%w_shard], 2)   | stream=unshard waits=c0 records=u0
        %wait_0 = fxshard.wait([%getitem])               | waits=u0
    """

    name: ClassVar[str] = "annotate-streams"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.STREAMS_ORDERED})

    def apply(self, program: Program) -> None:
        before: fx.Node | None = None  # the last node on the compute stream
        for node in program.graph.nodes:
            tag = meta.get(node)
            if node.op != "call_function":
                continue
            if node.target in STREAMS:
                stream = STREAMS[node.target]
                waits = [_event(before, tag.pair)] if before is not None else []
                waits += _made_elsewhere(node, stream)
                done = f"{EVENTS[node.target]}{tag.pair}"
                meta.update(node, stream=stream, waits=tuple(waits), records=done)
            elif node.target is ops.wait:
                launch = meta.source(meta.operands(node)[0])
                meta.update(node, waits=(meta.get(launch).records,))
            if meta.get(node).stream == "compute" and tag.role not in ("unshard", "reduce", "free"):
                before = node


# A cast runs where the gather that sends it does, and needs no event.
STREAMS: dict[object, meta.Stream] = {
    ops.all_gather: "unshard",
    ops.cast: "unshard",
    ops.load: "load",
    ops.reduce_scatter: "reduce",
    ops.all_reduce: "reduce",
    ops.comm_hook: "reduce",
    ops.store: "store",
}
EVENTS: dict[object, str] = {
    ops.all_gather: "u",
    ops.cast: "k",
    ops.load: "l",
    ops.reduce_scatter: "r",
    ops.all_reduce: "a",
    ops.comm_hook: "h",
    ops.store: "s",
}


def _made_elsewhere(node: fx.Node, stream: meta.Stream) -> list[str]:
    """Events of launches on other streams whose results `node` reads without a wait."""
    events: dict[str, None] = {}
    for operand in meta.operands(node):
        maker = meta.source(operand) if operand.op == "call_function" else operand
        if maker.target in (ops.load, ops.cast) and meta.get(maker).stream != stream:
            events[str(meta.get(maker).records)] = None
    return list(events)


def _event(node: fx.Node, pair: int | None) -> str:
    """The event that `node` records when it is done; a new one if it has none yet."""
    if meta.get(node).records is None:
        meta.update(node, records=f"c{pair}")
    return str(meta.get(node).records)
