"""Faults of any operator and of any tag."""

import operator
import random
from typing import Any

import torch
from torch import fx

from fxshard.ir import ops, tags
from fxshard.ir.program import Program
from tests.faults.changed import OTHER_GROUP, OTHER_OP
from tests.faults.kinds import (
    FAULTS,
    Fault,
    NoPlace,
    alike,
    fault,
    nodes,
    one,
    retag,
    stands_before,
)


def kinds(program: Program) -> list[list[fx.Node]]:
    """Nodes with a tag, in groups of what they run and what they are for."""
    found: dict[Any, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if "fxshard" in node.meta:
            what = node.target if node.op == "call_function" else node.op
            what = (
                what if what in (*ops.OPERATORS, operator.getitem, "placeholder") else "an operator"
            )
            found.setdefault((what, tags.get(node).role), []).append(node)
    return list(found.values())


def retagger(field: str) -> Fault:
    def change(program: Program, rng: random.Random) -> str:
        """A node says of itself what another one says; each kind is as likely."""
        node = one(rng, one(rng, kinds(program)))
        values = {getattr(tags.get(n), field) for group in kinds(program) for n in group}
        others = sorted(values - {getattr(tags.get(node), field)}, key=repr)
        return retag(node, **{field: one(rng, others)})

    return change


RETAGGED = ("phase", "role", "unit", "fqn", "stream", "pair", "records", "waits")
FAULTS |= {f"retag_{field}": retagger(field) for field in RETAGGED}


@fault
def another_argument(program: Program, rng: random.Random) -> str:
    """Of any operator of ours: a number, a dtype, the name of a group, a shape."""
    found = [
        (n, i)
        for n in nodes(program, *ops.OPERATORS)
        for i, value in enumerate(n.args)
        if not isinstance(value, fx.Node) and not (i == 0 and tags.operands(n))
    ]
    place = one(rng, found)
    node, i = place
    value: Any = node.args[i]
    if isinstance(value, (list, tuple)):
        value = value[:-1]
    elif isinstance(value, bool):
        value = not value
    elif isinstance(value, (int, float)):
        value = value + 1
    elif isinstance(value, torch.dtype):
        value = torch.float64
    elif isinstance(value, str):
        value = {**OTHER_GROUP, **OTHER_OP}.get(value, "max")
    else:
        raise NoPlace
    node.update_arg(i, value)
    return f"argument {i} of %{node} is {value}"


@fault
def another_operand(program: Program, rng: random.Random) -> str:
    """Of any operator of ours: a tensor of the same shape, made before."""
    found = [(n, i) for n in nodes(program, *ops.OPERATORS) for i in range(len(tags.operands(n)))]
    place = one(rng, found)
    node, i = place
    mine = tags.operands(node)[i]
    before = [n for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    before = [n for n in before if n is not mine and stands_before(n, node) and n is not node]
    other = one(rng, [n for n in before if alike([mine, n])])
    operands = tags.operands(node)
    operands[i] = other
    node.args = (operands, *node.args[1:])
    return f"%{node} takes %{other} for %{mine}"


def mover(earlier: bool) -> Fault:
    def move(program: Program, rng: random.Random) -> str:
        """Any operator of ours, as far as the graph allows, or a part of that.

        What is launched may be so earlier: how much is bounded, and its bytes are counted.
        """
        found = nodes(program, *ops.OPERATORS)
        node = one(rng, [n for n in found if not (earlier and ops.of(n).asynchronous)])
        place, places = node, []
        while True:
            place = place.prev if earlier else place.next
            if place.op != "call_function" or (
                place in node.all_input_nodes if earlier else node in place.all_input_nodes
            ):
                break
            places.append(place)
        to = one(rng, places)
        (to.prepend if earlier else to.append)(node)
        return f"%{node} {'before' if earlier else 'after'} %{to}"

    return move


FAULTS["move_earlier"] = mover(earlier=True)
FAULTS["move_later"] = mover(earlier=False)
