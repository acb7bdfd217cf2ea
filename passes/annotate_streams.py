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
        streams: dict[object, meta.Stream] = {
            ops.all_gather: "unshard",
            ops.reduce_scatter: "reduce",
        }
        before: fx.Node | None = None  # the last node on the compute stream
        for node in program.graph.nodes:
            tag = meta.get(node)
            if node.op != "call_function":
                continue
            if node.target in streams:
                stream = streams[node.target]
                waits = (_event(before, tag.pair),) if before is not None else ()
                done = f"{stream[0]}{tag.pair}"
                meta.update(node, stream=stream, waits=waits, records=done)
            elif node.target is ops.wait:
                launch = meta.source(meta.operands(node)[0])
                meta.update(node, waits=(meta.get(launch).records,))
            if meta.get(node).stream == "compute" and tag.role not in ("unshard", "reduce", "free"):
                before = node


def _event(node: fx.Node, pair: int | None) -> str:
    """The event that `node` records when it is done; a new one if it has none yet."""
    if meta.get(node).records is None:
        meta.update(node, records=f"c{pair}")
    return str(meta.get(node).records)
