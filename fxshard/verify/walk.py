"""What checks look up in a graph: launches, their waits and frees, readers of what they write."""

from __future__ import annotations

import functools
import operator
from typing import Any, cast

import torch
from torch import fx

from fxshard._torch.operators import schema_of
from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Program

aten: Any = torch.ops.aten


def order(program: Program) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(program.graph.nodes)}


def launches(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if transfers.is_launch(node)]


def unshards(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if transfers.is_unshard(node)]


def by_pair(program: Program, *targets: Any) -> dict[int | None, list[fx.Node]]:
    found: dict[int | None, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.target in targets:
            found.setdefault(tags.get(node).pair, []).append(node)
    return found


def aliases(launch: fx.Node) -> list[fx.Node]:
    """Nodes whose value lies in a storage that `launch` writes, or in one unpacked from there."""
    storages = written_by(launch)
    found: dict[fx.Node, None] = {}
    todo = [launch]
    while todo:
        for user in todo.pop().users:
            if user not in found and tags.storage_ids(user) & storages:
                found[user] = None
                todo.append(user)
    return list(found)


def written_by(launch: fx.Node) -> set[int]:
    """Storages that `launch` writes, and those of what is unpacked from them."""
    unpacks = [u for item in launch.users for u in item.users if u.target is ops.unpack]
    return set().union(*map(tags.storage_ids, (launch, *unpacks)))


def moved(launch: fx.Node) -> list[str]:
    """FQNs of the parameters that a launch moves, or whose gradients."""
    if transfers.is_unshard(launch):
        return [tags.get(item).fqn or "" for item in transfers.unsharded(launch)]
    found: list[str] = []
    for operand in tags.operands(launch):
        fqn = tags.get(operand).fqn
        found += [fqn] if fqn else packed_fqns(operand)
    return found


def packed_names(launch: fx.Node) -> list[str]:
    """Those of `moved` that share a buffer; none for a comm_hook, where all do."""
    if launch.target is ops.comm_hook:
        return []
    if transfers.is_unshard(launch):
        unpacks = [
            u for p in transfers.packed_results(launch) for u in p.users if u.target is ops.unpack
        ]
        several = [unpack for unpack in unpacks if len(unpack.users) > 1]
        return [tags.get(item).fqn or "" for unpack in several for item in unpack.users]
    operands = (operand for operand in tags.operands(launch) if not tags.get(operand).fqn)
    return [fqn for operand in operands for fqn in packed_fqns(operand)]


def packed_rows(sent: fx.Node) -> list[fx.Node]:
    """The gradients in a flat copy that is sent, each ``[ranks, n]``, in order."""
    node = sent
    while node.op == "call_function" and node.target is not aten.cat.default:
        if tags.get(node).role == "reduce":  # a result of the reduction before
            item = node
            node = tags.operands(tags.source(item))[item_index(item)]
        elif tags.get(node).role in ("pad", "post_reduction"):
            node = tags.source(node)
        else:
            return []
    return list(cast("list[fx.Node]", node.args[0])) if node.op == "call_function" else []


def packed_fqns(sent: fx.Node) -> list[str]:
    """The parameters whose gradients are in a flat copy that is sent."""
    return [tags.get(row).fqn or "" for row in packed_rows(sent)]


def alias_readers(launch: fx.Node) -> list[fx.Node]:
    """Nodes other than `fxshard::` ones that read a storage that `launch` writes."""
    return [
        user
        for node in (launch, *aliases(launch))
        for user in node.users
        if user.op == "call_function"
        if ops.of(user).over != "nothing" or user.target is ops.join
    ]


def item_index(item: fx.Node) -> int:
    return cast("int", item.args[1])


def is_item_of(node: fx.Node, launch: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0] is launch


def maker(node: fx.Node) -> fx.Node:
    """The operator that `node` is an item of; itself if it is none."""
    return tags.source(node) if node.target is operator.getitem else node


def reads_sizes(node: fx.Node) -> bool:
    """True for an operator that takes a size or a stride of a tensor, and no data of it."""
    return str(schema_of(node.target)).startswith("aten::sym_")


def written(node: fx.Node) -> set[int]:
    """Storages that `node` writes in place."""
    found: set[int] = set()
    for i, name in _writable(node.target):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, fx.Node):
                found |= tags.storage_ids(each)
    return found


@functools.cache
def _writable(target: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that an operator writes to."""
    schema = schema_of(target)
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments if schema is not None else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def unit_name(program: Program, node: fx.Node) -> str:
    return program.units[tags.get(node).unit or 0].name
