"""Parameters of tensor subclasses: they are sent, and made of what arrived, as their class says."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch import fx

from fxshard.ir import extensions, ops, tags, transfers
from fxshard.ir.layout import Grid
from fxshard.ir.program import Fact, Program
from fxshard.ir.units import Param
from fxshard.verify import walk
from fxshard.verify.failure import fail

MAKING: tuple[tags.Role, ...] = ("pre_gather", "post_gather")


def as_extensions_say(program: Program) -> None:
    """Between shard, launches and readers stand the operators that were traced, and no others."""
    extended = {p.fqn: p for p in program.params.values() if p.extension is not None}
    if not extended:
        return
    shards = {
        tags.get(node).fqn or "": node
        for node in program.graph.find_nodes(op="placeholder")
        if tags.get(node).role == "shard"
    }
    found: dict[tuple[tags.Phase, str], list[fx.Node]] = {}
    for node in program.graph.nodes:
        tag = tags.get(node) if node.op == "call_function" else None
        if tag is None or not (tag.role in MAKING or _is_reduced(node)):
            continue
        if tag.fqn not in extended and node.target is not ops.reduce_now:
            fail(program, Fact.PARAMS_UNSHARDED, node, f"%{node.name} belongs to no parameter.")
        fqn = tag.fqn or tags.get(next(iter(node.users))).fqn or ""
        found.setdefault((tag.phase, fqn), []).append(node)
    for (_, fqn), nodes in found.items():
        _follows(program, extended[fqn], shards[fqn], nodes)


def _is_reduced(node: fx.Node) -> bool:
    item = node.target is operator.getitem and tags.source(node).target is ops.reduce_now
    return item or node.target is ops.reduce_now


def _follows(program: Program, param: Param, shard: fx.Node, nodes: list[fx.Node]) -> None:
    """`nodes`, of one phase, are what was traced of `param`: on its shard, and on what arrived."""
    assert param.extension is not None
    grid = program.grid(param.fqn)
    traced = param.extension.traced(grid.shards, program.device)
    rest = iter(nodes)
    made = _repeated(program, grid, traced.pre, [shard], rest, nodes[0])
    sent, kept = made[: traced.sent], made[traced.sent :]
    phase = tags.get(nodes[0]).phase
    arrived = sent
    if grid.shards > 1:
        arrived = [_arrived(program, node, phase, nodes[-1]) for node in sent]
    _repeated(program, grid, traced.post, [*arrived, *kept], rest, nodes[-1])
    for node in rest:
        what = f"%{node.name} is no operator that the class of {param.fqn!r} asks for."
        fail(program, Fact.PARAMS_UNSHARDED, node, what)


def _arrived(program: Program, sent: fx.Node, phase: tags.Phase, at: fx.Node) -> fx.Node:
    """What the one launch of a phase that sends a tensor leaves of it."""
    found = [
        item
        for launch in sent.users
        if launch.target is ops.all_gather and tags.get(launch).phase == phase
        for item in launch.users
        if tags.operands(launch)[walk.item_index(item)] is sent
    ]
    if len(found) != 1:
        what = f"%{sent.name} is gathered {len(found)} times in {phase}, expected 1."
        fail(program, Fact.PARAMS_UNSHARDED, at, what)
    return found[0]


def _repeated(
    program: Program,
    grid: Grid,
    graph: fx.Graph,
    given: Sequence[fx.Node],
    nodes: Iterator[fx.Node],
    at: fx.Node,
) -> list[fx.Node]:
    """The results of a traced function in `program`, whose operators come next in `nodes`."""
    known: dict[fx.Node, fx.Node] = {}
    known.update(zip(graph.find_nodes(op="placeholder"), given, strict=True))
    for each in graph.nodes:
        if each.op != "call_function":
            continue
        reduces = each.target is extensions.ALL_REDUCE and grid.shards > 1
        if each.target in (extensions.WAIT, extensions.ALL_REDUCE) and not reduces:
            known[each] = known[tags.source(each)]
            continue
        node = next(nodes, None)
        args, kwargs = fx.node.map_arg((each.args, each.kwargs), known.__getitem__)
        target = each.target
        if reduces:
            target, kwargs = ops.reduce_now, {}
            args = ([args[0]], grid.shards, grid.group("shard"), args[1])
        if node is None or (node.target, node.args, node.kwargs) != (target, args, kwargs):
            name = "nothing" if node is None else f"%{node.name}"
            what = f"{name} stands where the class of the parameter asks for {each.target}."
            fail(program, Fact.PARAMS_UNSHARDED, node or at, what)
        known[each] = next(nodes) if reduces else node
    (output,) = graph.find_nodes(op="output")
    return [known[node] for node in tags.operands(output)]


def not_saved(program: Program) -> None:
    """Backward recomputes unsharded parameters, unless their unit stays unsharded."""
    making = [
        n for n in program.graph.nodes if n.op == "call_function" and tags.get(n).role in MAKING
    ]
    of: dict[int, fx.Node] = {}
    for node in making:
        if not transfers.lies_in_input(node):
            of |= dict.fromkeys(tags.storage_ids(node), node)
    for node in program.graph.nodes if of else ():
        for storage in tags.storage_ids(node) & of.keys() if node.op == "call_function" else ():
            tag = tags.get(of[storage])
            stays = program.units[tag.unit or 0].reshard is False
            for user in node.users:
                if user.op == "output" or (tags.get(user).phase != tag.phase and not stays):
                    what = (
                        f"%{user.name} reads %{node.name}, of the unsharded {tag.fqn!r}, outside "
                        f"of {tag.phase}."
                    )
                    fail(program, Fact.NO_PARAM_SAVED, user, what)
