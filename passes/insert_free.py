"""insert-free: give unsharded parameters and reduced gradients back behind their last reader."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxshard import meta, ops
from fxshard.program import Fact, Program


@dataclasses.dataclass(frozen=True)
class InsertFree:
    """Free a unit's gather buffers behind their last reader, and sent gradients behind the wait.

    Readers are counted through every alias. A buffer is freed by giving its storage back, since
    the process group may hold on to the tensor.

    Before::

        %mm = aten.mm(%x, %w)       # last reader of the unit's parameters

    After::

        %mm = aten.mm(%x, %w)
        %free_0 = fxshard.free([%getitem])
    """

    name: ClassVar[str] = "insert-free"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED, Fact.REDUCED_ONCE})
    ensures: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.FREED, Fact.NO_USE_AFTER_FREE, Fact.BOUNDED_INFLIGHT}
    )

    def apply(self, program: Program) -> None:
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        last_reader: dict[int, fx.Node] = {}
        for node in program.graph.nodes:
            if node.op == "call_function":
                for source in (node, *node.all_input_nodes):
                    for storage in meta.storage_ids(source):
                        last_reader[storage] = node
        waits = {
            meta.get(node).pair: node for node in program.graph.nodes if node.target is ops.wait
        }
        for launch in list(program.graph.nodes):
            if launch.target not in ops.LAUNCHES:
                continue
            tag = meta.get(launch)
            gathers = launch.target is ops.all_gather
            freed = list(launch.users) if gathers else meta.operands(launch)
            storages = set().union(*map(meta.storage_ids, freed))
            readers = [last_reader[storage] for storage in storages]
            at = max((*readers, waits[tag.pair]), key=order.__getitem__)
            with program.graph.inserting_after(at):
                free = ops.node(program.graph, ops.free, (freed,), f"free_{tag.pair}")
            meta.put(
                free,
                dataclasses.replace(tag, role="free", stream="compute", waits=(), records=None),
            )
