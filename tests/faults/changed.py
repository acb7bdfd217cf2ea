"""Faults that change an argument: a group, a size, a dtype, a name, a dimension."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch

from fxshard.ir import ops, tags
from fxshard.ir.program import Program
from tests.faults.kinds import (
    FAULTS,
    Fault,
    aten,
    cuts,
    fault,
    items,
    nodes,
    one,
    retag,
    two,
    waited,
    writers,
)

# -- regroup, resize, retype, rename ---------------------------------------------------------------


def argument(name: str, values: dict[Any, Any], *targets: Any) -> Fault:
    def change(program: Program, rng: random.Random) -> str:
        node = one(rng, nodes(program, *targets))
        schema = node.target._schema.arguments
        args = [*node.args, *(a.default_value for a in schema[len(node.args) :])]
        at = [a.name for a in schema].index(name)
        args[at] = values.get(args[at], values.get(None))
        node.args = tuple(args)
        return f"{name} of %{node} is {args[at]}"

    return change


OTHER_GROUP = {"shard": "replicate", "replicate": "shard", None: "shard"}
OTHER_OP = {"avg": "sum", None: "avg"}
SCATTER, REDUCE = ops.reduce_scatter, ops.all_reduce
FAULTS["regroup_gather"] = argument("group", OTHER_GROUP, ops.all_gather)
FAULTS["regroup_reduce_scatter"] = argument("group", OTHER_GROUP, SCATTER)
FAULTS["regroup_all_reduce"] = argument("group", OTHER_GROUP, REDUCE)
FAULTS["regroup_reshard"] = argument("group", OTHER_GROUP, ops.reshard)
FAULTS["resize_gather"] = argument("size", {None: 7}, ops.all_gather)
FAULTS["resize_reduction"] = argument("size", {None: 7}, SCATTER, REDUCE, ops.comm_hook)
FAULTS["resize_reshard"] = argument("size", {None: 7}, ops.reshard)
FAULTS["another_operation"] = argument("op", OTHER_OP, SCATTER, REDUCE)
FAULTS["retype_cast"] = argument("dtype", {None: torch.float64}, ops.cast)
FAULTS["retype_pack"] = argument("dtype", {None: torch.float64}, ops.pack)
FAULTS["resize_unpack"] = argument("size", {None: 7}, ops.unpack)


# -- dimensions ------------------------------------------------------------------------------------


def another(dims: Sequence[int], rng: random.Random) -> list[int]:
    """Dimensions of matrices and vectors, one of them another."""
    at = one(rng, [i for i, dim in enumerate(dims) if dim])
    return [1 - dim if i == at else dim for i, dim in enumerate(dims)]


@fault
def another_dimension_of_an_unpack(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program, ops.unpack) if len(n.args) > 3])
    node.update_arg(3, another(node.args[3], rng))
    return f"%{node} takes apart along {node.args[3]}"


@fault
def another_dimension_of_a_reshard(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program, ops.reshard) if len(n.args) > 3])
    node.update_arg(3, another(node.args[3], rng))
    return f"%{node} cuts along {node.args[3]}"


@fault
def fewer_rows_of_a_reshard(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program, ops.reshard) if len(n.args) > 3])
    first, *rows = node.args[4]
    node.update_arg(4, [first - 1, *rows])
    return f"%{node} keeps {node.args[4]} rows"


@fault
def another_order_of_a_gradient(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, aten.permute.default, role="pad"))
    first, second, *others = node.args[1]
    node.update_arg(1, [second, first, *others])
    return f"%{node} is permuted as {node.args[1]}"


@fault
def another_split_of_a_gradient(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, aten.permute.default, role="pad")).args[0]
    node.update_arg(1, node.args[1][::-1])
    return f"%{node} is viewed as {node.args[1]}"


@fault
def another_dimension_of_a_parameter(program: Program, rng: random.Random) -> str:
    """The program is that of a dimension, and the shards that are held are cut along another."""
    param = one(rng, [p for p in program.params.values() if len(p.shape) > 1])
    other = dataclasses.replace(param, shard_dim=1 - param.shard_dim)
    program.units = tuple(
        dataclasses.replace(unit, params=tuple(other if p is param else p for p in unit.params))
        for unit in program.units
    )
    return f"{param.fqn} is cut along {other.shard_dim}"


@fault
def shift_cut_of_a_packed_gradient(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in cuts(program) if n.args[2]])
    node.args = (*node.args[:2], node.args[2] - 1, node.args[3] - 1)
    return f"%{node} takes from one earlier"


@fault
def move_chunks_of_an_unpack(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.unpack))
    first, *others = node.args[2]
    node.update_arg(2, [*others, first])
    return f"the first chunk of %{node} is the last"


@fault
def retype_buffer(program: Program, rng: random.Random) -> str:
    item = one(rng, [p for n in writers(program) for p in items(n)])
    with program.fake_mode:
        item.meta["val"] = item.meta["val"].to(torch.float64)
    return f"%{item} is f64"


@fault
def resize_buffer(program: Program, rng: random.Random) -> str:
    item = one(rng, [p for n in writers(program) for p in items(n)])
    val = item.meta["val"]
    item.meta["val"] = program.fake((val.shape[0] + 1, *val.shape[1:]), val.dtype, val.device)
    return f"%{item} has a row more"


@fault
def divide_by_another_number(program: Program, rng: random.Random) -> str:
    roles = ("pad", "post_reduction")
    found = [n for n in nodes(program, aten.div_.Scalar) if tags.get(n).role in roles]
    node = one(rng, found)
    node.update_arg(1, 7.0)
    return f"%{node} divides by 7"


def renamer(*targets: Any) -> Fault:
    def rename(program: Program, rng: random.Random) -> str:
        """A getitem gets the FQN of another parameter."""
        found = [p for n in nodes(program, *targets) for p in items(n) if tags.get(p).fqn]
        node = one(rng, found)
        names = sorted(set(program.params) - {tags.get(node).fqn})
        return retag(node, fqn=one(rng, names))

    return rename


FAULTS["rename_gathered"] = renamer(ops.all_gather)
FAULTS["rename_reduced"] = renamer(ops.reduce_scatter, ops.all_reduce)
FAULTS["rename_unpacked"] = renamer(ops.unpack)
FAULTS["rename_loaded_or_cast"] = renamer(ops.load, ops.cast)


@fault
def rename_shard(program: Program, rng: random.Random) -> str:
    found = [n for n in program.graph.find_nodes(op="placeholder") if tags.get(n).role == "shard"]
    node, other = two(rng, [n for n in found if n.users])
    return retag(node, fqn=tags.get(other).fqn)


@fault
def another_pair(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.wait, ops.free))
    return retag(node, pair=(tags.get(node).pair or 0) + 1)


@fault
def another_phase(program: Program, rng: random.Random) -> str:
    found = [n for n in waited(program) if tags.get(n).phase == "forward"]
    node = one(rng, found)
    return retag(node, phase="backward")
