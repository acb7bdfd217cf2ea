"""The schedule: it runs the operators of the graph, in order, with their tags."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from fxshard.errors import VerifyError
from fxshard.ir import dump, ops, tags
from fxshard.ir.domain import LAYOUT
from fxshard.ir.outline import describe
from fxshard.ir.program import Fact, Program
from fxshard.ir.schedule import Region, relative
from fxshard.verify import walk
from fxshard.verify.failure import fail

FACT = Fact.OUTLINED
Env = dict[fx.Node, Any]  # value of the schedule -> node of the graph, or several


def outlined(program: Program) -> None:
    """The schedule, flattened, is the graph: the same operators, values, tags and fake values.

    The executor, the certificate, memory and cost read rows and regions; all other checks read the
    graph. They are about one program only if the two are equal.
    """
    schedule = program.schedule
    if schedule is None:
        raise VerifyError(FACT.name.lower(), "the program has no schedule: nothing would run.")
    nodes = {node.name: node for node in program.graph.nodes}
    digests: dict[str, str] = {}
    saved: list[fx.Node] = []  # in the order in which forward hands them to backward
    for phase, outer in schedule.phases():
        want = iter(program.phase(phase))
        env: Env = {}
        for row in outer.nodes:
            if row.op == "placeholder":
                env[row] = _comes_in(program, row, nodes)
            elif row.op == "call_module":
                region = schedule.regions[str(row.target)]
                env[row] = _runs(program, row, region, want, env, digests)
            elif row.op == "call_function" and _is_item_of_region(row):
                env[row] = env[tags.source(row)][walk.item_index(row)]
                _is_result(program, row, env[row])
            elif row.op == "call_function":
                env[row] = _stands_for(program, row, row, next(want, None), env)
                _tagged_alike(program, row, env[row])
        left = next(want, None)
        if left is not None:
            fail(program, FACT, left, f"no row of the schedule runs %{left.name}.")
        results: Any = fx.node.map_arg(outer.output_node().args[0], env.__getitem__)
        if phase == "forward":
            results, handed = results
            saved = list(handed)
        elif saved != [env[p] for p in outer.find_nodes(op="placeholder") if _is_saved(p)]:
            fail(program, FACT, program.output, "backward takes other values than forward saves.")
        both = zip(program.values, program.results, strict=True)
        mine = [v for v, r in both if (r.kind == "output") == (phase == "forward")]
        if list(results) != mine:
            fail(program, FACT, program.output, f"the schedule's {phase} returns other values.")


def _is_saved(placeholder: fx.Node) -> bool:
    return tags.get(placeholder).role not in (*tags.HELD, "tangent", "accumulated", "partial")


def _comes_in(program: Program, row: fx.Node, nodes: dict[str, fx.Node]) -> fx.Node:
    """The node that `row`, a placeholder, stands for."""
    node = nodes.get(row.name)
    if node is None:
        what = f"%{row.name} comes into the schedule, but not out of the graph."
        fail(program, FACT, program.output, what)
    _tagged_alike(program, row, node)
    return node


def _runs(
    program: Program,
    row: fx.Node,
    region: Region,
    want: Iterator[fx.Node],
    env: Env,
    digests: dict[str, str],
) -> list[fx.Node]:
    """The nodes of the graph that stand for the results of a call of a region."""
    tag = tags.get(row)
    inputs = region.graph.find_nodes(op="placeholder")
    inner: Env = {a: env[b] for a, b in zip(inputs, row.all_input_nodes, strict=True)}
    for a in inputs:
        _lies_alike(program, row, a, inner[a])
        _open_alike(program, row, a, inner[a])
    run: list[fx.Node] = []
    for body in region.body:
        node = inner[body] = _stands_for(program, row, body, next(want, None), inner)
        run.append(node)
        mine, its = tags.get(body), tags.get(node)
        if node.target in ops.OPERATORS:
            fail(program, FACT, node, f"%{node.name} is no row of its own: {region.name} has it.")
        if (mine.role, mine.module) != (its.role, relative(its.module, tag.module)):
            what = f"in {region.name} %{node.name} is tagged {mine.role} {mine.module!r}."
            fail(program, FACT, node, what)
        if (tag.phase, tag.unit) != (its.phase, its.unit):
            what = f"%{row.name} runs it in {tag.phase} of unit {tag.unit}; it is tagged otherwise."
            fail(program, FACT, node, what)
        _lies_alike(program, row, body, node)
        _open_alike(program, row, body, node)
    if list(row.meta["run"]) != run:
        fail(program, FACT, run[0], f"row %{row.name} says that it runs other nodes than it runs.")
    if tag != tags.Meta(tag.phase, "compute", program.units[tag.unit or 0].fqn, tag.unit):
        fail(program, FACT, run[0], f"row %{row.name} of the schedule is tagged {tag}.")
    outputs = region.graph.output_node().all_input_nodes
    if region.name not in digests:
        taken, given = [inner[a] for a in inputs], [inner[n] for n in outputs]
        text = describe(run, taken, given, tag.module)
        digests[region.name] = hashlib.sha256(text.encode()).hexdigest()
    if region.compiled is not None and digests[region.name] != region.digest:
        fail(program, FACT, run[0], f"the compiled code of {region.name} is of another region.")
    found: Any = fx.node.map_arg(region.graph.output_node().args[0], inner.__getitem__)
    return list(found)


def _is_result(program: Program, row: fx.Node, node: fx.Node) -> None:
    """`row`, a result of a region, is tagged as the call is, but with its own module."""
    call = tags.get(tags.source(row))
    if tags.get(row) != tags.changed(call, module=tags.get(node).module):
        fail(program, FACT, node, f"row %{row.name} of the schedule is tagged {tags.get(row)}.")
    _lies_alike(program, row, row, node)


def _stands_for(
    program: Program, row: fx.Node, run: fx.Node, node: fx.Node | None, env: Env
) -> fx.Node:
    """`node`, if it is what `run`, in `row` of the schedule, does on the values in `env`."""
    if node is None or node.target is not run.target:
        what = f"row %{row.name} of the schedule runs {dump.operation(run)} there."
        fail(program, FACT, node or program.output, what)
    if fx.node.map_arg((run.args, run.kwargs), env.get) != (node.args, node.kwargs):
        what = f"row %{row.name} of the schedule runs it on other values."
        fail(program, FACT, node, what)
    return node


def _tagged_alike(program: Program, row: fx.Node, node: fx.Node) -> None:
    mine, its = vars(tags.get(row)), vars(tags.get(node))
    other = [f"{key}={mine[key]!r}" for key in its if mine[key] != its[key]]
    if other:
        what = f"row %{row.name} of the schedule has {', '.join(other)}, unlike the graph: tags "
        fail(program, FACT, node, what + "were changed after the schedule was made.")
    _lies_alike(program, row, row, node)


def _lies_alike(program: Program, row: fx.Node, mine: fx.Node, node: fx.Node) -> None:
    """The fake value of `mine`, in `row` of the schedule, is laid out as that of `node`."""
    one, other = mine.meta.get("val"), node.meta.get("val")
    if one is not other and _layout(one) != _layout(other):
        fail(program, FACT, node, f"row %{row.name} of the schedule has another value for it.")


def _open_alike(program: Program, row: fx.Node, mine: fx.Node, node: fx.Node) -> None:
    """The region of `row` has the same open sizes for its value as the graph has for `node`."""
    if mine.meta.get(LAYOUT) != node.meta.get(LAYOUT):
        fail(program, FACT, node, f"row %{row.name} of the schedule has other open sizes for it.")


def _layout(val: Any) -> list[Any]:
    return [(t.shape, _steps(t), t.dtype, t.device) for t in tags.tensors(val)]


def _steps(tensor: Tensor) -> list[Any]:
    """Strides, without those of dimensions with one element, which are never taken."""
    both = zip(tensor.stride(), tensor.shape, strict=True)
    return [0 if isinstance(size, int) and size == 1 else stride for stride, size in both]


def _is_item_of_region(row: fx.Node) -> bool:
    return row.target is operator.getitem and tags.source(row).op == "call_module"
