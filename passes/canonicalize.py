"""canonicalize: one form for what capture may spell in many ways."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar, cast

import torch
from torch import fx

from fxshard._torch.operators import schema_of
from fxshard.capture import fakes, shapes
from fxshard.ir import tags
from fxshard.ir.names import unit_of
from fxshard.ir.program import Fact, Program
from fxshard.ir.units import index_of

aten: Any = torch.ops.aten

NO_OPS = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
ASSERTS = (aten._assert_async.msg, aten._assert_tensor_metadata.default)


@dataclasses.dataclass(frozen=True)
class Canonicalize:
    """Strip no-ops, share what does not depend on parameters, and let backward re-derive views.

    Before that, fake values that do not say what CPU kernels give are set right
    (`fxshard.capture.fakes`). Four steps: (1) ``detach``, ``alias``, views to the same shape,
    double transposes and asserts go. (2) Equal operators that depend on no parameter (masks, rotary
    tables) are merged. (3) Those of them that several units read move to the front, so that
    identical layers stay identical. (4) A view or cast of a parameter that backward reads is
    recomputed in backward: nothing of a parameter is saved.

    Before::

        %t = aten.t(%w)                    # forward
        %mm = aten.mm(%x, %t)
        %d = aten.detach(%t)
        %mm_1 = aten.mm(%tangent, %d)      # backward

    After::

        %t = aten.t(%w)
        %mm = aten.mm(%x, %t)
        %t_1 = aten.t(%w)                  # backward
        %mm_1 = aten.mm(%tangent, %t_1)
    """

    name: ClassVar[str] = "canonicalize"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.WELL_FORMED, Fact.TAGGED})

    def apply(self, program: Program) -> None:
        fakes.correct(program)
        strip_no_ops(program)
        shared = merge_parameter_free(program)
        hoist(program, shared)
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        for node in list(program.graph.find_nodes(op="placeholder")):
            if tags.get(node).role == "param":
                rederive_in_backward(program, node, order)
        copy_returned_parameters(program)


def strip_no_ops(program: Program) -> None:
    """Remove nodes whose value is their input's."""
    # Results are replaced once, at the end: each replacement takes time linear in their number.
    returned, program.values = program.values, []
    kept = set(returned)
    instead: dict[fx.Node, fx.Node] = {}

    def remove(node: fx.Node, source: fx.Node) -> None:
        stale = tags.storage_ids(node) - tags.storage_ids(source)
        node.replace_all_uses_with(source)
        if stale:  # it was a copy: views of it are views of what it copied
            program.refresh_views(source, stale)
        program.graph.erase_node(node)
        if node in kept:
            instead[node] = source
            kept.add(source)

    for node in list(program.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ASSERTS and not node.users and node not in kept:
            program.graph.erase_node(node)
        elif node.target in NO_OPS or (
            node.target in SAME_IF_ALIKE and _is_alike(node, tags.source(node))
        ):
            remove(node, tags.source(node))
        elif node.target in SCATTERS and _is_alike(node, node.args[1]):
            remove(node, cast("fx.Node", node.args[1]))
        elif node.target is aten.t.default and tags.source(node).target is aten.t.default:
            once = tags.source(node)
            remove(node, tags.source(once))
            if not once.users and once not in kept:
                program.graph.erase_node(once)
    program.values = [instead.get(value, value) for value in returned]


# Views that are no-ops if they have the layout of their source. Eager makes no slice of a full
# tensor, a trace of open sizes does (torch/csrc/autograd/python_variable_indexing.cpp,
# ``applySlicing``).
SAME_IF_ALIKE = (
    *(aten._unsafe_view.default, aten.view.default),
    *(aten.slice.Tensor, aten.slice_backward.default),
)
SCATTERS = (aten.slice_scatter.default,)  # no-ops if the second argument covers the first


def _is_alike(node: fx.Node, other: Any) -> bool:
    return isinstance(other, fx.Node) and shapes.same_layout(other, node)


def merge_parameter_free(program: Program) -> list[fx.Node]:
    """Merge equal parameter-free forward operators; returns all such operators, in order.

    Both are of one activation checkpoint, or of none: each checkpoint recomputes its own.

    Only operators without randomness, mutation or parameter ancestors are touched: they are small
    (masks, position tables), and merging anything else would lengthen lives that eager keeps
    short.
    """
    free: list[fx.Node] = []
    is_free: set[fx.Node] = set()
    seen: dict[Any, fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.op == "placeholder":
            if tags.get(node).role in ("buffer", "input") and not _is_written(node):
                is_free.add(node)
            continue
        if node.op != "call_function" or tags.get(node).phase != "forward":
            continue
        if tags.is_random(node) or _writes(node) or not is_free.issuperset(node.all_input_nodes):
            continue
        region = tags.get(node).checkpoint
        key = (region, node.target, _freeze(node.args), _freeze(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            program.graph.erase_node(node)
            program.refresh_views(seen[key], tags.storage_ids(node) - tags.storage_ids(seen[key]))
            continue
        seen[key] = node
        is_free.add(node)
        free.append(node)
    return free


def hoist(program: Program, parameter_free: list[fx.Node]) -> None:
    """Move parameter-free operators that several units read, and what they need, to the front."""
    wanted: set[fx.Node] = set()
    units = index_of(program.units)
    for node in reversed(parameter_free):
        if node in wanted or len(_reading_units(units, node)) > 1:
            wanted.add(node)
            wanted.update(n for n in node.all_input_nodes if n.op == "call_function")
    forward = program.phase("forward")
    anchor = next((n for n in forward if n not in wanted), None)
    for node in parameter_free:
        if node in wanted and anchor is not None:
            anchor.prepend(node)
            tags.update(node, module="", call=None)


def _reading_units(units: dict[str, int], node: fx.Node) -> set[int]:
    return {
        unit_of([tags.get(user).module], units)
        for user in node.users
        if user.op != "output" and tags.get(user).phase == "forward"
    }


def rederive_in_backward(program: Program, param: fx.Node, order: dict[fx.Node, int]) -> None:
    """Backward reads views and casts of `param` through nodes of its own."""
    for node in derived(param):
        readers = tags.backward_users(node)
        if not readers or tags.get(node).phase == "backward":
            continue
        first = min(readers, key=order.__getitem__)
        copy = _copy_chain(program, node, first)
        for reader in readers:
            reader.replace_input_with(node, copy)
    for node in reversed(derived(param)):
        if not node.users:
            program.graph.erase_node(node)


def _copy_chain(program: Program, node: fx.Node, before: fx.Node) -> fx.Node:
    """Copy the views and casts from a parameter to `node` to where `before` stands."""
    if node.op == "placeholder":
        return node
    source = _copy_chain(program, node.all_input_nodes[0], before)
    with program.graph.inserting_before(before):
        copy = program.graph.node_copy(node, lambda n: source)
    tag = tags.get(before)
    tags.update(copy, phase="backward", module=tag.module, call=tag.call)
    return copy


def derived(param: fx.Node) -> list[fx.Node]:
    """Nodes made from `param` by views and casts alone, each after what it is made from."""
    found: list[fx.Node] = []
    todo = [param]
    while todo:
        for user in todo.pop(0).users:
            if len(user.all_input_nodes) == 1 and (_is_cast(user) or tags.aliases_input(user)):
                found.append(user)
                todo.append(user)
    return found


def copy_returned_parameters(program: Program) -> None:
    """A model output that is (a view of) a parameter becomes a copy: the parameter is freed."""
    sources = {
        storage
        for node in program.graph.find_nodes(op="placeholder")
        if tags.get(node).role in ("param", "ignored")
        for storage in tags.storage_ids(node)
    }
    values = program.values
    copies: dict[fx.Node, fx.Node] = {}
    for i, value in enumerate(values):
        if program.results[i].kind != "output" or not tags.storage_ids(value) & sources:
            continue
        if value not in copies:
            computed = program.phase("forward")
            last = [*program.graph.find_nodes(op="placeholder"), *computed][-1]
            with program.graph.inserting_after(last):
                copy = program.graph.call_function(aten.clone.default, (value,))
            val = value.meta["val"]
            fake = program.fake(tuple(val.shape), val.dtype, val.device)
            tag = tags.get(last) if computed else tags.Meta("forward", "compute")
            copies[value] = tags.put(copy, tag, fake)
        values[i] = copies[value]
    program.values = values


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default


def _writes(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    return node.target is not operator.getitem if schema is None else bool(schema.is_mutable)


def _is_written(node: fx.Node) -> bool:
    return any(_writes(user) for user in node.users if user.op == "call_function")


def _freeze(value: Any) -> Any:
    """A hashable stand-in for arguments: containers by content, nodes by identity."""
    if isinstance(value, (list, tuple)):
        return (type(value), *(_freeze(item) for item in value))
    if isinstance(value, dict):
        return tuple((key, _freeze(item)) for key, item in value.items())
    return (type(value), value) if not isinstance(value, fx.Node) else value
