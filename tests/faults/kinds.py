"""What all kinds of faults share: how they are registered, and where they can be."""

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Program

aten = torch.ops.aten
Fault = Callable[[Program, random.Random], str]
FAULTS: dict[str, Fault] = {}
GATHERS = (ops.all_gather,)
REDUCTIONS = (ops.reduce_scatter, ops.all_reduce, ops.comm_hook)


class NoPlace(Exception):
    """A program has no place for a fault of this kind."""


def fault(change: Fault) -> Fault:
    FAULTS[change.__name__] = change
    return change


def nodes(program: Program, *targets: Any, role: str = "") -> list[fx.Node]:
    return [
        n
        for n in program.graph.nodes
        if n.op == "call_function"
        and (not targets or n.target in targets)
        and (not role or tags.get(n).role == role)
    ]


def one(rng: random.Random, found: Sequence[Any]) -> Any:
    if not found:
        raise NoPlace
    return rng.choice(list(found))


def two(rng: random.Random, found: Sequence[Any]) -> Any:
    if len(found) < 2:
        raise NoPlace
    return rng.sample(found, 2)


def items(launch: fx.Node) -> list[fx.Node]:
    return [n for n in launch.users if n.target is operator.getitem]


def waited(program: Program) -> list[fx.Node]:
    """Launches that a wait belongs to."""
    return [n for n in nodes(program) if transfers.is_launch(n)]


def writers(program: Program) -> list[fx.Node]:
    """Launches that a wait belongs to, and what packs and unpacks."""
    return [*waited(program), *nodes(program, ops.pack, ops.unpack)]


def wait_of(program: Program, launch: fx.Node) -> fx.Node:
    for node in nodes(program, ops.wait):
        if tags.get(node).pair == tags.get(launch).pair:
            return node
    raise NoPlace


def compute(program: Program) -> list[fx.Node]:
    return [n for n in nodes(program, role="compute") if n.target is not operator.getitem]


def bypass(node: fx.Node, instead: fx.Node) -> str:
    node.replace_all_uses_with(instead)
    node.graph.erase_node(node)
    return f"%{instead} in the place of %{node}"


def copied(node: fx.Node, behind: fx.Node) -> fx.Node:
    with node.graph.inserting_after(behind):
        twin = node.graph.call_function(node.target, node.args, node.kwargs)
    twin.meta = dict(node.meta)
    return twin


def retag(node: fx.Node, **changes: Any) -> str:
    tags.update(node, **changes)
    return f"%{node}: {changes}"


def alike(found: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """Places of two tensors that have one shape and dtype."""
    kinds = [(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in found]
    return [(i, j) for j in range(len(kinds)) for i in range(j) if kinds[i] == kinds[j]]


def stands_before(node: fx.Node, other: fx.Node) -> bool:
    following = node
    while following.op != "root":
        if following is other:
            return True
        following = following.next
    return False


def cuts(program: Program) -> list[fx.Node]:
    """What takes one parameter's part of a packed gradient, or cuts padding off."""
    found = nodes(program, aten.slice.Tensor, role="post_reduction")
    return [n for n in found if isinstance(n.args[2], int) and isinstance(n.args[3], int)]
