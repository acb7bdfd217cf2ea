"""What the text of a program leaves out, because all that is written there already says it.

`fxshard.ir.write` leaves out what is as here, and `fxshard.ir.text` fills it in.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxshard._torch.export import OpOverload
from fxshard._torch.operators import schema_of
from fxshard._torch.traced_collectives import WAIT
from fxshard._torch.trees import TreeSpec
from fxshard.ir import ops, tags
from fxshard.ir.literals import Expected
from fxshard.ir.program import Result

# Roles of placeholders that have a name of their own, ``%x = input '0'``.
PLACEHOLDERS: tuple[tags.Role, ...] = (
    *("shard", "param", "ignored", "buffer", "input", "tangent", "accumulated", "partial"),
)


def begun(
    graph: fx.Graph, results: Sequence[Result]
) -> tuple[frozenset[str], dict[str, tuple[tags.Role, str | None]]]:
    """`Program.gradients` and `Program.given`, if capture made `graph`."""
    gradients = frozenset(result.name for result in results if result.kind == "grad")
    found = {n.name: n.meta.get("fxshard") for n in graph.find_nodes(op="placeholder")}
    given = {
        name: (tag.role, tag.fqn)
        for name, tag in found.items()
        if tag is not None and tag.role in tags.GIVEN
    }
    return gradients, given


def usual_signature(
    in_spec: TreeSpec,
    out_spec: TreeSpec,
    inputs: tuple[Any, ...] | None,
    outputs: tuple[Any, ...] | None,
    training: bool,
) -> dict[str, Any]:
    """Of a call: tensors go in, all outputs are computed, and gradients arrive at all of them.

    Args:
        inputs, outputs: None: as usual.
    """
    given = (None,) * in_spec.num_leaves if inputs is None else inputs
    made = (None,) * out_spec.num_leaves if outputs is None else outputs
    computed = tuple(i for i, constant in enumerate(made) if constant is None)
    return {
        "in_spec": in_spec,
        "out_spec": out_spec,
        "inputs": (None,) * in_spec.num_leaves,
        "tensor_inputs": tuple(i for i, constant in enumerate(given) if constant is None),
        "outputs": (None,) * out_spec.num_leaves,
        "input_names": tuple(map(str, range(len(given)))),
        "output_names": tuple(map(str, range(len(made)))),
        "tangents": computed if training else (),
        "training": True,
    }


def usual_param(fqn: str, unit: int, position: int, dtype: torch.dtype) -> dict[str, Any]:
    """Of a parameter after the one at `position`."""
    return {
        "fqn": fqn,
        "aliases": (fqn,),
        "unit": unit,
        "requires_grad": True,
        "position": position + 1,
        "compute_dtype": dtype,
    }


def usual_placeholder(role: tags.Role, fqn: str) -> tags.Meta:
    """The tag of what comes in."""
    return tags.Meta("backward" if role == "tangent" else "forward", role, fqn=fqn)


def usual_tag(node: fx.Node, phase: tags.Phase) -> tags.Meta:
    """The tag of an operator: its role is that of its table, of an item that of the list.

    An item is of the parameter that the operand in its place is of.
    """
    if node.op == "output":
        return tags.Meta(phase, "output")
    if node.op != "call_function":
        return tags.Meta(phase, "compute")
    if node.target is not operator.getitem:
        return tags.Meta(phase, ops.of(node).role)
    source, place = node.args
    tag = source.meta.get("fxshard") if isinstance(source, fx.Node) else None
    if tag is None or source.target not in ops.OPERATORS:  # type: ignore[union-attr]
        return tags.Meta(phase, "compute")
    operands = source.args[0]  # type: ignore[union-attr]
    listed = isinstance(operands, (list, tuple)) and type(place) is int
    operand = operands[place] if listed and 0 <= place < len(operands) else None  # type: ignore
    of = operand.meta.get("fxshard") if isinstance(operand, fx.Node) else None
    return tags.Meta(phase, tag.role, fqn=of.fqn if of is not None else None)


def storages(node: fx.Node) -> Expected | None:
    """Where the tensors of the value of an operator lie, by its arguments; None: apart."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source, place = node.args
        held = source.meta.get("val") if isinstance(source, fx.Node) else None
        listed = isinstance(held, (list, tuple)) and type(place) is int
        found = list(tags.tensors(held[place])) if listed and -1 < place < len(held) else []  # type: ignore
        return _among([tensor.untyped_storage() for tensor in found])
    spec = ops.OPERATORS.get(node.target)
    if spec is not None:
        if spec.in_place != "always" or not isinstance(node.args[0], (list, tuple)):
            return None
        return _among([_first(operand) for operand in node.args[0]])
    if node.target is WAIT:
        return _among([_first(node.args[0])])
    if not isinstance(node.target, OpOverload):
        return None
    places = _shared(node.target)
    if not any(place is not None for place in places):
        return None
    shared = [None if at is None else _first(_argument(node, *at)) for at in places]
    return _among(shared) if len(shared) > 1 else lambda place: shared[0]  # of all of a list


def _among(found: Sequence[torch.UntypedStorage | None]) -> Expected:
    return lambda place: found[place] if place < len(found) else None


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _first(value: Any) -> torch.UntypedStorage | None:
    """Of a node that is one tensor."""
    held = value.meta.get("val") if isinstance(value, fx.Node) else None
    return held.untyped_storage() if isinstance(held, torch.Tensor) else None


@functools.cache
def _shared(target: OpOverload) -> tuple[tuple[int, str] | None, ...]:
    """By result, the argument that it is a view of, or that is written: place and name."""
    schema = schema_of(target)
    found: list[tuple[int, str] | None] = []
    for returned in schema.returns:
        mine = returned.alias_info
        of = (
            (i, argument.name)
            for i, argument in enumerate(schema.arguments)
            if (theirs := argument.alias_info) is not None
            and mine is not None
            # Of a list of views the schema says of the argument that it is in some list.
            and (theirs.before_set & mine.before_set or "*" in theirs.after_set)
        )
        found.append(next(of, None))
    return tuple(found)
