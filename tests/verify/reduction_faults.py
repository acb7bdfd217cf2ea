"""Faults in how gradients of hybrid and accumulated steps are reduced, and by hooks."""

import dataclasses
import functools

import torch
from torch import fx

from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from fxshard.verify import walk
from tests import graphs
from tests.verify.strategy_cases import (
    Cases,
    accumulated,
    adds,
    hooked,
    hybrid,
    hybrid_layers,
    low_precision,
    no_shard,
    no_sync,
    repeated,
    returned,
    summed,
    value_of,
)
from tests.verify.verify_cases import find, insert, item, launch, paired

aten = torch.ops.aten
chain, layered = graphs.chain, graphs.layered
CASES = Cases()
breaks = CASES.breaks


# -- all-reduce -----------------------------------------------------------------------------------


@breaks(Fact.REDUCED_ONCE, hybrid)
def all_reduce_missing(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.all_reduce)
    (sent,) = tags.operands(node)
    returned(program, "layers.0.weight", sent)
    for each in (paired(program, ops.wait, node), item(node, 0), node):
        program.graph.erase_node(each)
    return sent


@breaks(Fact.REDUCED_ONCE, no_shard)
def all_reduce_of_full_gradients_missing(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.all_reduce)
    returned(program, "layers.0.weight", tags.operands(node)[0])
    for each in (paired(program, ops.wait, node), item(node, 0), node):
        program.graph.erase_node(each)
    return program.output


@breaks(Fact.REDUCED_ONCE, hybrid, harms=False)  # it is reduced in place
def returned_from_before_the_all_reduce(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.all_reduce)
    return returned(program, "layers.0.weight", tags.operands(node)[0])


@breaks(Fact.REDUCED_ONCE, summed)
def all_reduced_twice(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.all_reduce)
    first, wait = item(node, 0), paired(program, ops.wait, node)
    got = repeated(program, wait, node, [first])
    (division,) = (n for n in first.users if n.target is aten.div_.Scalar)
    division.replace_input_with(first, got)
    return value_of(program, "layers.0.weight")


@breaks(Fact.REDUCED_ONCE, hybrid_layers)
def all_reduce_of_another_gradient(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.all_reduce)
    weight, bias, shift = tags.operands(node)
    node.args = ([shift, bias, weight], *node.args[1:])
    return item(node, 0)


@breaks(Fact.REDUCED_ONCE, hybrid)
def all_reduce_of_another_unit(program: Program) -> fx.Node:
    """What layer 1 has is reduced again, as the gradient of layer 0."""
    node = launch(program, 1, "backward", ops.all_reduce)
    node.args = ([value_of(program, "layers.1.weight")], *node.args[1:])
    return item(node, 0)


@breaks(Fact.REDUCED_ONCE, hybrid)
def reduce_scatter_over_the_replicas(program: Program) -> fx.Node:
    """There are as many replicas as shards."""
    node = launch(program, 1, "backward", ops.reduce_scatter)
    node.args = (*node.args, "replicate")
    return node


@breaks(Fact.REDUCED_ONCE, hybrid)
def all_reduce_over_the_shards(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.all_reduce)
    node.args = (*node.args[:2], "shard", "avg")
    return node


@breaks(Fact.EQUAL_CHUNKS, hybrid, harms=False)  # a World knows its groups
def all_reduce_of_too_many_ranks(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.all_reduce)
    node.args = (node.args[0], 4, *node.args[2:])
    return node


@breaks(Fact.UNSHARD_PAIRED, hybrid)
def all_reduce_of_what_is_in_flight(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.all_reduce)
    scatter = launch(program, 1, "backward", ops.reduce_scatter)
    item(scatter, 0).append(node)
    return node


@breaks(Fact.UNSHARD_PAIRED, low_precision)
def cast_of_what_is_all_reduced(program: Program) -> fx.Node:
    value = value_of(program, "layers.0.weight")
    item(launch(program, 1, "backward", ops.all_reduce), 0).append(value)
    return value


@breaks(Fact.UNSHARD_PAIRED, no_shard)
def operand_read_while_it_is_all_reduced(program: Program) -> fx.Node:
    """Not what the launch gives, but what it takes: the same storage."""
    reader = find(program, "dw_0")
    reader.update_arg(0, find(program, "dw_1"))
    return reader


@breaks(Fact.UNSHARD_PAIRED, summed)
def predivided_after_the_launch(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.reduce_scatter)
    (division,) = tags.operands(node)
    gradient = tags.source(division)
    tags.update(gradient, fqn=tags.get(division).fqn)
    division.replace_all_uses_with(gradient)
    item(node, 0).append(division)
    return division


@breaks(Fact.STREAMS_ORDERED, hybrid, harms=False)  # as all that follows about streams
def all_reduce_that_waits_for_nothing(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.all_reduce)
    tags.update(node, waits=())
    return node


# -- gradient accumulation and hooks --------------------------------------------------------------


@breaks(Fact.REDUCED_ONCE, accumulated)
def accumulated_gradient_not_reduced(program: Program) -> fx.Node:
    node = launch(program, 0, "backward", ops.reduce_scatter)
    returned(program, "head", tags.operands(node)[0])
    return program.output


@breaks(Fact.REDUCED_ONCE, accumulated)
def accumulated_gradient_forgotten(program: Program) -> fx.Node:
    """What this step adds is reduced, and what is there already is not."""
    node = launch(program, 0, "backward", ops.reduce_scatter)
    (total,) = tags.operands(node)
    gradient = find(program, "dhead")
    tags.update(gradient, fqn="head")
    total.replace_all_uses_with(gradient)
    program.graph.erase_node(total)
    return gradient


@breaks(Fact.REDUCED_ONCE, accumulated)
def accumulated_gradient_without_this_step(program: Program) -> fx.Node:
    """What is there already is reduced, then added to, after the free of it."""
    node = launch(program, 0, "backward", ops.reduce_scatter)
    (total,) = tags.operands(node)
    held = tags.source(total)
    total.replace_all_uses_with(held)
    paired(program, ops.wait, node).append(total)
    return total


@breaks(Fact.WELL_FORMED, adds)
def accumulated_twice(program: Program) -> fx.Node:
    (held,) = (n for n in program.graph.nodes if n.name == "accumulated_head")
    (first,) = held.users
    return insert(program, first, aten.add_.Tensor, held, find(program, "dhead"))


@breaks(Fact.REDUCED_ONCE, chain, harms=False)  # but for what the caller takes it to be
def reduced_under_no_sync(program: Program) -> fx.Node:
    program.sync = False
    return program.values[1]


@breaks(Fact.REDUCED_ONCE, no_sync)
def not_reduced_with_a_sync(program: Program) -> fx.Node:
    program.sync = True
    return program.values[1]


@breaks(Fact.REDUCED_ONCE, no_sync)
def accumulated_gradients_swapped(program: Program) -> fx.Node:
    """Those of the two layers have one shape; only the names can tell."""
    first, second = (value_of(program, f"layers.{i}.weight") for i in (0, 1))
    returned(program, "layers.1.weight", first)
    return returned(program, "layers.0.weight", second)


@breaks(Fact.REDUCED_ONCE, chain)
def reduced_and_said_to_be_accumulated(program: Program) -> fx.Node:
    program.sync = False
    program.results[1:] = [
        dataclasses.replace(result, kind="accumulated") for result in program.results[1:]
    ]
    return item(launch(program, 0, "backward", ops.reduce_scatter), 0)


@breaks(Fact.REDUCED_ONCE, hooked)
def hook_without_one_gradient(program: Program) -> fx.Node:
    """The shift's rows are those of the weight, which has its shape."""
    node = launch(program, 1, "backward", ops.comm_hook)
    weight, bias, _ = walk.packed_rows(tags.operands(node)[0])
    (cat,) = (n for n in weight.users if n.target is aten.cat.default)
    cat.args = ([weight, bias, weight], 1)
    return item(node, 0)


@breaks(Fact.REDUCED_ONCE, hooked)
def hook_in_another_order(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.comm_hook)
    weight, bias, shift = walk.packed_rows(tags.operands(node)[0])
    (cat,) = (n for n in weight.users if n.target is aten.cat.default)
    cat.args = ([shift, bias, weight], 1)
    return item(node, 0)


@breaks(Fact.REDUCED_ONCE, hooked)
def hook_result_cut_at_the_wrong_place(program: Program) -> fx.Node:
    value = value_of(program, "layers.0.shift")
    piece = tags.source(value)
    start, end = piece.args[2:4]
    piece.args = (*piece.args[:2], start - 1, end - 1)  # type: ignore[operator]
    return tags.source(piece)


@breaks(Fact.REDUCED_ONCE, functools.partial(layered, comm_hook=True, world_size=1, replicas=2))
def returned_from_before_the_hook(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.comm_hook)
    rows = walk.packed_rows(tags.operands(node)[0])
    row = next(n for n in rows if tags.get(tags.source(n)).fqn == "layers.0.shift")
    returned(program, "layers.0.shift", tags.source(row))
    return program.output


@breaks(Fact.NO_USE_AFTER_FREE, hooked)
def flat_tensor_freed_while_the_hook_runs(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.comm_hook)
    free = find(program, f"free_{tags.get(node).pair}")
    item(node, 0).append(free)
    return free


@breaks(Fact.REDUCED_ONCE, functools.partial(chain, replicas=2, ignored=["head"]), harms=False)
def gradient_of_an_ignored_parameter_reduced(program: Program) -> fx.Node:
    """It is the caller's, rank by rank."""
    node = launch(program, 1, "backward", ops.all_reduce)
    got = repeated(program, program.phase("backward")[-1], node, [find(program, "dhead")])
    return returned(program, "head", got)
