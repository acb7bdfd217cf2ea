"""insert-step: the optimizer steps a unit's parameters as soon as their gradients are reduced."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Fact, Program, Result


@dataclasses.dataclass(frozen=True)
class InsertStep:
    """Step after the wait of each reduction, instead of returning the gradients.

    A step comes after every read of its gradients and of its shards: after the wait of the last
    all-gather that sends them or, where one rank holds full parameters, after the last operator
    that computes with them. Nothing reads the gradients after it: insert-free frees them. Under
    ``no_sync`` nothing is stepped. Gradients of ignored parameters are returned.

    Before::

        %wait_1 = fxshard.wait([%getitem])
        return (%getitem)                                    # sharded grad of w

    After::

        %wait_1 = fxshard.wait([%getitem])
        %step_1 = fxshard.step([%getitem], [%w_shard], ["w"])
        return ()
    """

    name: ClassVar[str] = "insert-step"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED, Fact.REDUCED_ONCE})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.STEPPED_ONCE})

    def apply(self, program: Program) -> None:
        if not program.signature.training or not program.sync:
            return
        params = program.params
        for param in params.values():
            if param.extension is not None:
                raise param.extension.in_backward
        stepped: list[tuple[Result, fx.Node]] = []
        left: list[tuple[Result, fx.Node]] = []
        for each in zip(program.results, program.values, strict=True):
            is_stepped = each[0].kind == "grad" and each[0].name in params
            (stepped if is_stepped else left).append(each)
        program.results[:] = [result for result, _ in left]
        program.values = [value for _, value in left]
        shards = {
            tags.get(node).fqn or "": node
            for node in program.graph.find_nodes(op="placeholder")
            if tags.get(node).role == "shard"
        }
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        last = last_readers(program, order)
        groups: dict[tuple[int, int | None], list[tuple[str, fx.Node]]] = {}
        homes: dict[int, tuple[int, int | None]] = {}
        for result, grad in stepped:
            reduced = tags.get(grad).role in ("reduce", "post_reduction")
            key = params[result.name].unit, tags.get(grad).pair if reduced else None
            for storage in tags.storage_ids(grad):  # units whose gradients were sent in one copy
                key = homes.setdefault(storage, key)
            groups.setdefault(key, []).append((result.name, grad))
        places: list[tuple[fx.Node, list[str], list[fx.Node], list[fx.Node]]] = []
        for members in groups.values():
            members.sort(key=lambda member: params[member[0]].position)
            fqns = [fqn for fqn, _ in members]
            grads = [grad for _, grad in members]
            mine = [shards[fqn] for fqn in fqns]
            storages = set().union(*(tags.storage_ids(node) for node in (*grads, *mine)))
            readers = [last[storage] for storage in storages if storage in last]
            at = max((*grads, *readers), key=order.__getitem__)
            if at.op == "placeholder":
                at = program.phase("backward")[0]
            places.append((at, fqns, grads, mine))
        places.sort(key=lambda place: order[place[0]])
        for number, (at, fqns, grads, mine) in enumerate(places):
            with program.graph.inserting_after(at):
                made = transfers.node(
                    program.graph, ops.step, (grads, mine, fqns), f"step_{number}"
                )
            unit = program.units[params[fqns[0]].unit]
            tags.put(made, tags.Meta("backward", "step", module=unit.fqn, unit=unit.index))


def last_readers(program: Program, order: dict[fx.Node, int]) -> dict[int, fx.Node]:
    """Per storage the node after which it is not read: for what a launch reads, its wait."""
    waits = {tags.get(node).pair: node for node in program.graph.nodes if node.target is ops.wait}
    found: dict[int, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        done = node
        if tags.get(node).role in ("unshard", "reduce") and tags.get(node).pair in waits:
            done = max(node, waits[tags.get(node).pair], key=order.__getitem__)
        for source in (node, *node.all_input_nodes):
            for storage in tags.storage_ids(source):
                found[storage] = max(found.get(storage, done), done, key=order.__getitem__)
    return found
