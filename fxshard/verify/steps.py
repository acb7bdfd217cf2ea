"""Steps: the optimizer steps each parameter once, when nothing needs its old value any more."""

from __future__ import annotations

from typing import cast

from torch import fx

from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from fxshard.verify import walk
from fxshard.verify.failure import fail


def stepped_once(program: Program) -> None:
    """Each gradient goes into one step, with its shard, after every read of the two."""
    fact = Fact.STEPPED_ONCE
    for node in program.graph.find_nodes(op="call_function", target=ops.step):
        if not program.optimizer_in_backward:
            what = f"%{node.name} steps, though no optimizer is to step in backward."
            fail(program, fact, node, what)
    for value, result in zip(program.values, program.results, strict=True):
        if result.kind == "grad" and result.name in program.params and program.sync:
            what = f"the gradient of {result.name!r} is returned, not stepped, which is what"
            fail(program, fact, value, f"{what} pass 'insert-step' is for, after 'insert-reduce'.")
    order = walk.order(program)
    waits = {tags.get(n).pair: n for n in program.graph.nodes if n.target is ops.wait}
    by: dict[str, fx.Node] = {}
    steps = program.graph.find_nodes(op="call_function", target=ops.step)
    for node in steps:
        if not program.sync:
            fail(program, fact, node, f"%{node.name} steps under no_sync.")
        grads, shards, fqns = node.args[:3]
        if not len(grads) == len(shards) == len(fqns):
            fail(program, fact, node, f"%{node.name} takes lists of different lengths.")
        for fqn, shard in zip(fqns, shards, strict=True):
            if fqn in by:
                what = f"%{node.name} steps {fqn!r}, as %{by[fqn].name} does."
                fail(program, fact, node, what)
            by[fqn] = node
            if (tags.get(shard).role, tags.get(shard).fqn) != ("shard", fqn):
                fail(program, fact, node, f"%{node.name} steps %{shard.name}, not {fqn!r}.")
    for node in steps:
        _nothing_after(program, node, order, waits)


def _nothing_after(
    program: Program, step: fx.Node, order: dict[fx.Node, int], waits: dict[int | None, fx.Node]
) -> None:
    """After `step` only frees use what it takes, and no launch that reads it is in flight."""
    taken = [*tags.operands(step), *cast("list[fx.Node]", step.args[1])]
    mine = set().union(*map(tags.storage_ids, taken))
    for node in program.graph.nodes:
        if node is step or node.op != "call_function" or ops.ends(node):
            continue
        reads = set().union(*map(tags.storage_ids, node.all_input_nodes), set())
        if not reads & mine:
            continue
        done = node
        if tags.get(node).role in ("unshard", "reduce"):
            done = waits.get(tags.get(node).pair, node)
        if max(order[node], order[done]) > order[step]:
            what = f"%{node.name} reads what %{step.name} has stepped or stepped with"
            if done is not node and order[node] < order[step]:
                what = f"%{step.name} runs while %{node.name}, which reads the same, is in flight"
            fail(program, Fact.STEPPED_ONCE, done, f"{what}.")
