"""Launches in a graph: what they send and leave, and how passes insert them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from fxshard.ir import extensions, ops, tags
from fxshard.ir.program import Program


def is_launch(candidate: fx.Node) -> bool:
    """True if a wait belongs to `candidate`: casts and loads are launches if nothing sends them."""
    spec = ops.of(candidate)
    if spec.prepares:
        return any(user.target is ops.wait for item in candidate.users for user in item.users)
    return spec.asynchronous


def stepped(program: Program) -> dict[str, fx.Node]:
    """Per parameter that the program steps, its sharded gradient."""
    found: dict[str, fx.Node] = {}
    for node in program.graph.find_nodes(op="call_function", target=ops.step):
        found |= zip(node.args[2], tags.operands(node), strict=True)
    return found


def is_unshard(candidate: fx.Node) -> bool:
    """True if `candidate` is the launch whose results are unsharded parameters."""
    return ops.of(candidate).role == "unshard" and is_launch(candidate)


def keeps(program: Program, launch: fx.Node) -> bool:
    """True if what the unshard `launch` leaves is kept for the next forward, and not freed."""
    tag = tags.get(launch)
    unit = program.units[tag.unit or 0]
    last = unit.reshard is False or tag.phase == "backward"
    if not (unit.stays and last):
        return False
    names = {tags.get(item).fqn or "" for item in unsharded(launch)}
    return any(program.grid(fqn).shards > 1 for fqn in names & program.params.keys())


def is_reduction(candidate: fx.Node) -> bool:
    """True if `candidate` is a launch that takes gradients: a reduction, or a copy to the CPU."""
    return ops.of(candidate).role == "reduce"


def is_first_reduction(program: Program, candidate: fx.Node) -> bool:
    """True if gradients go through `candidate` before any other reduction."""
    if candidate.target is not ops.all_reduce:
        return candidate.target in (ops.reduce_scatter, ops.comm_hook)
    _, _, mesh = (ops.group(candidate) or "").partition("@")
    return mesh not in program.grids or program.grids[mesh].shards == 1


def is_in_place(candidate: fx.Node) -> bool:
    """True if the results of `candidate` are its operands."""
    how = ops.of(candidate).in_place
    return how == "always" or (how == "alone" and bool(candidate.args[1] == 1))


def sent_copies(launch: fx.Node) -> list[fx.Node]:
    """What was made only to be sent: after the wait for `launch` nothing reads it.

    For an unshard: packs, casts, loads and reshards before it. For a reduction or a copy to
    the CPU: its operands, unless its results are the operands. For any other: nothing.
    """
    if not is_unshard(launch):
        return tags.operands(launch) if is_reduction(launch) and not is_in_place(launch) else []
    found: list[fx.Node] = []
    todo = tags.operands(launch)[::-1]
    while todo:
        operand = todo.pop()
        if operand.op != "call_function":
            continue
        if tags.get(operand).role == "pre_gather":
            found += [] if lies_in_input(operand) else [operand]
            continue
        found.append(operand)
        maker = tags.source(operand)
        if maker.target is ops.pack:
            todo += tags.operands(maker)[::-1]
        elif ops.of(maker).role == "unshard":
            todo.append(tags.operands(maker)[int(operand.args[1])])  # type: ignore[arg-type]
    return found


def lies_in_input(node: fx.Node) -> bool:
    """True if the value of `node` is a view of an input of the program."""
    return storage_maker(node) is None


def storage_maker(node: fx.Node) -> fx.Node | None:
    """The operator that made the storage of `node`, through views and changes in place.

    None: the storage is that of an input of the program.
    """
    *_, first = lineage(node)
    return first if first.op == "call_function" else None


def lineage(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, and back through views and changes in place to what made its storage."""
    storages = tags.storage_ids(node)
    found: fx.Node | None = node
    while found is not None:
        yield found
        before = found.all_input_nodes if found.op == "call_function" else []
        found = next((n for n in before if tags.storage_ids(n) & storages), None)


def packed_results(launch: fx.Node) -> list[fx.Node]:
    """Results of an unshard that `unpack` takes apart: after it nothing reads them."""
    return [item for item in launch.users if any(user.target is ops.unpack for user in item.users)]


def unsharded(launch: fx.Node) -> list[fx.Node]:
    """The unsharded parameters, padded, that an unshard leaves: its results, or the unpacked."""
    found: list[fx.Node] = []
    for item in launch.users:
        parts = [user for user in item.users if user.target is ops.unpack]
        found += [part for unpack in parts for part in unpack.users] or [item]
    return found


def node(graph: fx.Graph, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
    """Append an operator under a name of its own choice ("unshard_3") at the insertion point."""
    return graph.create_node("call_function", target, args, name=name)


def kept_storages(program: Program) -> set[int]:
    """Storages that are returned, or sent on by a later launch and freed as such."""
    return set().union(
        *(tags.storage_ids(value) for value in program.values),
        *(
            tags.storage_ids(operand)
            for other in program.graph.nodes
            if is_reduction(other)
            for operand in sent_copies(other)
        ),
    )


def dying_results(launch: fx.Node, kept: set[int]) -> list[fx.Node]:
    """Results of `launch` that are freed: unsharded parameters, gradients that are cast or copied
    to the CPU later on, and what else is moved. What is in place of an operand, or sent on, is
    freed there. Activations that are moved end as those that are computed do.

    `kept`: from `kept_storages`.
    """
    if is_unshard(launch):
        return unsharded(launch)
    if ops.of(launch).holds:
        return []
    items = list(launch.users)
    taken = kept
    if is_in_place(launch):
        for operand in tags.operands(launch):
            maker = next(filter(is_launch, lineage(operand)), None)
            if maker is not None and not ops.of(maker).holds:  # freed as its result
                taken = taken | tags.storage_ids(operand)
    return [item for item in items if not tags.storage_ids(item) & taken]


def insert_operator(
    program: Program, target: Any, args: tuple[Any, ...], fqns: list[str], tag: tags.Meta, name: str
) -> list[fx.Node]:
    """Append an operator that gives a list, and a getitem per result; returns the getitems.

    Args:
        program: whose graph has its insertion point set.
        target: the operator.
        args: its arguments; the first is a list with one tensor per parameter.
        fqns: of the parameters; each getitem is tagged with its own.
        tag: of the operator.
        name: of the operator.
    """
    made = node(program.graph, target, args, name)
    values = program.refake(made)
    tags.put(made, tag, values)
    items = [program.graph.call_function(operator.getitem, (made, i)) for i in range(len(fqns))]
    for item, fqn, value in zip(items, fqns, values, strict=True):
        tags.put(item, tags.changed(tag, fqn=fqn), value)
    return items


def insert_traced(
    program: Program,
    graph: fx.Graph,
    given: Sequence[fx.Node],
    tag: tags.Meta,
    ranks: tuple[int, str],
) -> list[fx.Node]:
    """Append the operators of a traced function of a parameter; returns its results.

    Args:
        program: whose graph has its insertion point set.
        graph: from `fxshard.ir.extensions`.
        given: its arguments.
        tag: of the operators, with the FQN of the parameter.
        ranks: size and name of the group that shares the parameter.
    """
    size, group = ranks
    made: dict[fx.Node, fx.Node] = {}
    made.update(zip(graph.find_nodes(op="placeholder"), given, strict=True))
    (output,) = graph.find_nodes(op="output")
    for each in graph.nodes:
        if each.target is extensions.WAIT or (each.target is extensions.ALL_REDUCE and size == 1):
            made[each] = made[tags.source(each)]
        elif each.target is extensions.ALL_REDUCE:
            args = ([made[tags.source(each)]], size, group, each.args[1])
            own = tags.changed(tag, role="unshard")
            name = f"reduce_now_{tag.pair}"
            (made[each],) = insert_operator(
                program, ops.reduce_now, args, [tag.fqn or ""], own, name
            )
        elif each.op == "call_function":
            copy = program.graph.node_copy(each, made.__getitem__)
            copy.meta = {}
            made[each] = tags.put(copy, tag, program.refake(copy))
    return [made[node] for node in tags.operands(output)]


def insert_wait(program: Program, items: list[fx.Node], tag: tags.Meta) -> fx.Node:
    """Append the wait for the launch that made `items`, which has the tag `tag`."""
    made = node(program.graph, ops.wait, (items,), f"wait_{tag.pair}")
    return tags.put(made, tags.changed(tag, role="wait", fqn=None))
