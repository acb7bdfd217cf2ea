"""insert-free: free unsharded parameters and reduced gradients after their last reader."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Fact, Program


@dataclasses.dataclass(frozen=True)
class InsertFree:
    """Free gather buffers after their last reader, and what was only sent after the wait.

    Readers are counted through every alias. A buffer is freed by giving its storage back, since
    the process group may hold on to the tensor. If a unit stays unsharded for backward, what only
    forward reads is freed in forward. The result of a reduction is freed too, if a cast or a copy
    of it is the gradient. What a unit that stays unsharded after backward has gathered last is kept
    for the next forward, in backward, where it would be freed.

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
                last_reader.update(dict.fromkeys(tags.read_ids(node), node))
                last_reader.update(dict.fromkeys(tags.storage_ids(node), node))

        def phase_of_last_reader(item: fx.Node) -> tags.Phase:
            readers = [last_reader[storage] for storage in tags.storage_ids(item)]
            return tags.get(max(readers, key=order.__getitem__)).phase

        waits = {
            tags.get(node).pair: node for node in program.graph.nodes if node.target is ops.wait
        }
        kept = transfers.kept_storages(program)
        for launch in [n for n in program.graph.nodes if transfers.is_launch(n)]:
            sent, results = transfers.sent_copies(launch), transfers.dying_results(launch, kept)
            pair = tags.get(launch).pair
            gathers = transfers.is_unshard(launch)
            groups = [(sent, f"free_sent_{pair}" if gathers else f"free_{pair}")]
            groups += [([p], f"free_packed_{pair}") for p in transfers.packed_results(launch)]
            if gathers and transfers.keeps(program, launch):
                places = [last_reader[s] for p in results for s in tags.storage_ids(p)]
                places += [waits[pair], *program.phase("backward")[:1]]
                insert_keep(program, results, max(places, key=order.__getitem__), launch)
            elif gathers:  # backward may read only a part of a unit that stays unsharded
                early = [p for p in results if phase_of_last_reader(p) != "backward"]
                late = [p for p in results if p not in early]
                groups += [(early, f"free_{pair}" if not late else f"free_early_{pair}")]
                groups += [(late, f"free_{pair}")]
            else:
                groups += [(results, f"free_result_{pair}")]
            for freed, name in groups:
                storages = set().union(*map(tags.storage_ids, freed))
                readers = [last_reader[storage] for storage in storages]
                if freed:
                    at = max((*readers, waits[pair]), key=order.__getitem__)
                    insert_free(program, freed, name, at, tags.get(launch))


def insert_free(
    program: Program, freed: list[fx.Node], name: str, at: fx.Node, tag: tags.Meta
) -> None:
    """Insert, after `at`, a free of what the launch with `tag` read or wrote."""
    with program.graph.inserting_after(at):
        free = transfers.node(program.graph, ops.free, (freed,), name)
    phase = tags.get(at).phase
    made = tags.changed(tag, phase=phase, role="free", stream="compute", waits=(), records=None)
    tags.put(free, made)


def insert_keep(program: Program, kept: list[fx.Node], at: fx.Node, launch: fx.Node) -> None:
    """Insert, after `at`, what hands unsharded parameters to the caller."""
    tag = tags.get(launch)
    fqns = [tags.get(item).fqn or "" for item in kept]
    with program.graph.inserting_after(at):
        made = transfers.node(program.graph, ops.keep, (kept, fqns), f"keep_{tag.pair}")
    changes = {"phase": tags.get(at).phase, "role": "free", "stream": "compute"}
    tags.put(made, tags.changed(tag, **changes, waits=(), records=None))
