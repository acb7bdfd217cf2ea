"""The graph as such: tags, units, launches with their waits, and the schedule cut out of it."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxshard import dump, meta, ops
from fxshard.errors import VerifyError
from fxshard.program import Fact, Program
from fxshard.verify import walk
from fxshard.verify.failure import fail


def tagged(program: Program) -> None:
    seen_backward = False
    for node in program.graph.nodes:
        if "fxshard" not in node.meta:
            fail(program, Fact.TAGGED, node, f"%{node.name} has no tag; tag nodes when made.")
        tag = meta.get(node)
        if node.op != "call_function":
            continue
        if tag.phase == "backward":
            seen_backward = True
        elif seen_backward:
            fail(program, Fact.TAGGED, node, f"forward node %{node.name} stands in backward.")
        returns = getattr(getattr(node.target, "_schema", None), "returns", [None])
        if returns and "val" not in node.meta:
            fail(program, Fact.TAGGED, node, f"%{node.name} has no fake value.")
        # Who reads a storage is found through the aliases of fake values: they must be right.
        if meta.shares_by_schema(node) and not meta.aliases_input(node):
            what = f"%{node.name} is a view, but its fake value is no alias of its input's."
            fail(program, Fact.TAGGED, node, what)


def units_assigned(program: Program) -> None:
    for node in program.graph.nodes:
        unit = meta.get(node).unit
        if node.op == "call_function" and not (
            isinstance(unit, int) and 0 <= unit < len(program.units)
        ):
            fail(program, Fact.UNITS_ASSIGNED, node, f"%{node.name} belongs to unit {unit}.")


def unshard_paired(program: Program) -> None:
    """Every launch has one wait behind it, and nothing but that wait comes before it."""
    fact = Fact.UNSHARD_PAIRED
    order = walk.order(program)
    waits = walk.by_pair(program, ops.wait)
    for node in program.graph.nodes:
        if node.target in (ops.cast, ops.load) and not ops.is_launch(node):
            for reader in (user for pick in node.users for user in pick.users):
                if reader.target not in (*ops.ASYNCHRONOUS, ops.free):
                    what = f"%{reader.name} reads what %{node.name} makes, which nobody waits for."
                    fail(program, fact, reader, what)
    for launch in walk.launches(program):
        tag = meta.get(launch)
        mine = waits.get(tag.pair, [])
        if len(mine) != 1:
            fail(program, fact, launch, f"%{launch.name} has {len(mine)} waits, expected 1.")
        if sorted(map(walk.picked, launch.users)) != list(range(len(meta.operands(launch)))):
            fail(
                program, fact, launch, f"%{launch.name} has not one pick per tensor that it takes."
            )
        wait = mine[0]
        if order[wait] < order[launch]:
            fail(program, fact, wait, f"%{wait.name} stands before its launch %{launch.name}.")
        if set(meta.operands(wait)) != set(launch.users):
            fail(program, fact, wait, f"%{wait.name} does not wait for all of %{launch.name}.")
        for reader in walk.alias_readers(program, launch):
            if order[reader] < order[wait] and not walk.is_pick_of(reader, launch):
                fail(
                    program,
                    fact,
                    reader,
                    f"%{reader.name} reads what %{launch.name} is still writing: "
                    f"its wait %{wait.name} comes later.",
                )
        _nobody_interferes(program, launch, wait)


def one_dtype(program: Program) -> None:
    """Every collective sends, and leaves, tensors of one dtype: backends promise no more."""
    for launch in walk.launches(program, *ops.COLLECTIVES):
        values = (node.meta["val"] for node in (*meta.operands(launch), *launch.users))
        dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in values})
        if len(dtypes) > 1:
            what = f"%{launch.name} moves {' and '.join(dtypes)} in one launch; give each its own."
            fail(program, Fact.ONE_DTYPE, launch, what)


def _nobody_interferes(program: Program, launch: fx.Node, wait: fx.Node) -> None:
    """Between the two nobody writes what `launch` sends, nor reads what it writes in place."""
    sent = set().union(*map(meta.storage_ids, meta.operands(launch)))
    node = launch.next
    while node is not wait:
        if node.target not in (ops.wait, ops.free) and not walk.is_pick_of(node, launch):
            touched = walk.written(node)
            if ops.is_in_place(launch):
                touched = set().union(*map(meta.storage_ids, node.all_input_nodes))
            if touched & sent:
                what = f"%{node.name} touches what %{launch.name} works on until %{wait.name}."
                fail(program, Fact.UNSHARD_PAIRED, node, what)
        node = node.next


def outlined(program: Program) -> None:
    """The schedule, flattened, is the graph: operator by operator, on the same values."""
    fact = Fact.OUTLINED
    schedule = program.schedule
    if schedule is None:
        raise VerifyError(fact.name.lower(), "the program has no schedule.")
    nodes = {node.name: node for node in program.graph.nodes}
    saved: list[fx.Node] = []  # in the order in which forward hands them to backward
    for phase, outer in schedule.phases():
        want = iter(program.phase(phase))
        env: dict[fx.Node, Any] = {}  # value of the schedule -> node of the graph, or some
        for row in outer.nodes:
            if row.op == "placeholder":
                env[row] = nodes.get(row.name)
            elif row.op == "call_module":
                region = schedule.regions[str(row.target)]
                inputs = region.graph.find_nodes(op="placeholder")
                inner = {a: env[b] for a, b in zip(inputs, row.all_input_nodes, strict=True)}
                for node in region.body:
                    inner[node] = _stands_for(program, row, node, next(want, None), inner)
                env[row] = fx.node.map_arg(region.graph.output_node().args[0], inner.__getitem__)
            elif row.op == "call_function" and _picks_region(row):
                env[row] = env[meta.source(row)][walk.picked(row)]
            elif row.op == "call_function":
                env[row] = _stands_for(program, row, row, next(want, None), env)
        left = next(want, None)
        if left is not None:
            fail(program, fact, left, f"no row of the schedule runs %{left.name}.")
        results: Any = fx.node.map_arg(outer.output_node().args[0], env.__getitem__)
        if phase == "forward":
            results, handed = results
            saved = list(handed)
        elif saved != [
            env[p]
            for p in outer.find_nodes(op="placeholder")
            if meta.get(p).role not in (*meta.HELD, "tangent", "accumulated")
        ]:
            fail(program, fact, program.output, "backward takes other values than forward saves.")
        both = zip(program.values, program.results, strict=True)
        mine = [v for v, r in both if (r.kind == "output") == (phase == "forward")]
        if list(results) != mine:
            fail(program, fact, program.output, f"the schedule's {phase} returns other values.")


def _stands_for(
    program: Program, row: fx.Node, run: fx.Node, node: fx.Node | None, env: dict[fx.Node, Any]
) -> fx.Node:
    """`node`, if it is what `run`, in `row` of the schedule, does on the values in `env`."""
    if node is None or node.target is not run.target:
        what = f"row %{row.name} of the schedule runs {dump.operation(run)} there."
        fail(program, Fact.OUTLINED, node or program.output, what)
    if fx.node.map_arg((run.args, run.kwargs), env.get) != (node.args, node.kwargs):
        what = f"row %{row.name} of the schedule runs it on other values."
        fail(program, Fact.OUTLINED, node, what)
    return node


def _picks_region(row: fx.Node) -> bool:
    return row.target is operator.getitem and meta.source(row).op == "call_module"
