"""annotate-streams: which stream runs each node, and which events order them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from fxshard import meta, ops
from fxshard.program import Fact, Program


@dataclasses.dataclass(frozen=True)
class AnnotateStreams:
    """Launches run on streams of their own; events order them against the compute stream.

    A launch waits for what the compute stream has enqueued so far (its inputs, and the last
    readers of the memory that its buffers reuse), recorded by the node before it. A wait node
    makes the compute stream wait for the launch. On CPU this orders nothing at run time; the
    executor obeys it on CUDA.

    Before::

        %all_gather = fxshard.all_gather([%w_shard], 2)
        %wait = fxshard.wait([%getitem])

    After::

        %all_gather = fxshard.all_gather([%w_shard], 2)   | stream=unshard waits=c0 records=u0
        %wait = fxshard.wait([%getitem])                  | waits=u0
    """

    name: ClassVar[str] = "annotate-streams"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.STREAMS_ORDERED})

    def apply(self, program: Program) -> None:
        streams: dict[object, meta.Stream] = {
            ops.all_gather: "unshard",
            ops.reduce_scatter: "reduce",
        }
        for node in program.graph.nodes:
            tag = meta.get(node)
            if node.target in streams:
                stream = streams[node.target]
                done = f"{stream[0]}{tag.pair}"
                meta.update(node, stream=stream, waits=(f"c{tag.pair}",), records=done)
            elif node.target is ops.wait:
                stream = meta.get(node.args[0][0]).stream
                launch = node.args[0][0].all_input_nodes[0]
                meta.update(node, waits=(meta.get(launch).records,))
