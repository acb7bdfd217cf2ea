"""Faults in how parameters and gradients are cast, offloaded, and kept between the phases."""

import functools

import torch
from torch import fx

from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from tests import graphs
from tests.verify.strategy_cases import (
    Cases,
    bf16,
    kept,
    low_precision,
    offload,
    offload_bf16,
    part,
    regrouped,
    repeated,
    returned,
    value_of,
)
from tests.verify.verify_cases import find, insert, item, launch, paired

aten = torch.ops.aten
chain, layered = graphs.chain, graphs.layered
CASES = Cases()
breaks = CASES.breaks


# -- precision ------------------------------------------------------------------------------------


@breaks(Fact.PARAMS_UNSHARDED, bf16)
def cast_of_the_shard_of_another_unit(program: Program) -> fx.Node:
    node = find(program, "cast_0")
    node.args = ([find(program, "shard_layers_1_weight")], *node.args[1:])
    return item(node, 0)


@breaks(Fact.PARAMS_UNSHARDED, bf16)
def shard_sent_without_cast(program: Program) -> fx.Node:
    node, cast = find(program, "unshard_0"), find(program, "cast_0")
    node.args = ([find(program, "shard_layers_0_weight")], 2)
    free = find(program, "free_sent_0")
    for each in (free, item(cast, 0), cast):
        program.graph.erase_node(each)
    buffer = item(node, 0)
    stale = tags.storage_ids(buffer)
    node.meta["val"] = program.refake(node)
    buffer.meta["val"] = node.meta["val"][0]
    program.refresh_views(buffer, stale)
    return buffer


@breaks(Fact.PARAMS_UNSHARDED, functools.partial(bf16, world_size=1))
def compute_reads_what_is_not_cast(program: Program) -> fx.Node:
    """With one rank, shards have the shape of parameters."""
    reader = find(program, "t_0")
    reader.update_arg(0, find(program, "shard_layers_0_weight"))
    reader.meta["val"] = find(program, "shard_layers_0_weight").meta["val"].t()
    return reader


@breaks(Fact.UNSHARD_PAIRED, functools.partial(bf16, world_size=1))
def nobody_waits_for_the_cast(program: Program) -> fx.Node:
    """Without a gather it is a launch of its own."""
    program.graph.erase_node(find(program, "wait_0"))
    return find(program, "t_0")


@breaks(Fact.PARAMS_UNSHARDED, kept)
def gather_of_an_activation(program: Program) -> fx.Node:
    node = find(program, "unshard_2")
    activation = insert(program, node.prev, aten.clone.default, find(program, "x_0"))
    tags.update(activation, fqn="head", phase="forward", unit=0, role="compute")
    activation.meta["val"] = program.fake((2, 3), torch.float32, torch.device("cpu"))
    node.args = ([activation], 2)
    return node


@breaks(Fact.NO_USE_AFTER_FREE, bf16)
def cast_freed_before_the_wait_of_the_gather(program: Program) -> fx.Node:
    free = find(program, "free_sent_1")
    part(program, "unshard_1").append(free)
    return free


@breaks(Fact.FREED, bf16, harms=False)  # but for memory
def cast_not_freed(program: Program) -> fx.Node:
    program.graph.erase_node(find(program, "free_sent_1"))
    return find(program, "free_1")


@breaks(Fact.FREED, low_precision, harms=False)  # but for memory
def reduced_gradient_not_freed(program: Program) -> fx.Node:
    """Its cast is returned."""
    node = launch(program, 1, "backward", ops.reduce_scatter)
    free = find(program, f"free_result_{tags.get(node).pair}")
    program.graph.erase_node(free)
    return find(program, f"free_{tags.get(node).pair}")


@breaks(Fact.NO_USE_AFTER_FREE, low_precision)
def reduced_gradient_freed_before_its_cast(program: Program) -> fx.Node:
    value = value_of(program, "layers.0.weight")
    (free,) = (
        n
        for n in program.graph.find_nodes(op="call_function", target=ops.free)
        if tags.storage_ids(tags.operands(n)[0]) & tags.storage_ids(tags.source(value))
    )
    value.prepend(free)
    return value


@breaks(Fact.NO_USE_AFTER_FREE, low_precision)
def reduced_gradient_freed_while_it_is_all_reduced(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.all_reduce)
    pair = tags.get(launch(program, 1, "backward", ops.reduce_scatter)).pair
    item(node, 0).append(find(program, f"free_result_{pair}"))
    return paired(program, ops.wait, node)


@breaks(Fact.REDUCED_ONCE, low_precision)
def gradient_not_cast_back(program: Program) -> fx.Node:
    return returned(program, "layers.0.weight", tags.source(value_of(program, "layers.0.weight")))


# -- offload --------------------------------------------------------------------------------------


@breaks(Fact.PARAMS_UNSHARDED, offload)
def load_of_the_shard_of_another_unit(program: Program) -> fx.Node:
    node = find(program, "load_0")
    node.args = ([find(program, "shard_layers_1_weight")], *node.args[1:])
    return item(node, 0)


@breaks(Fact.PARAMS_UNSHARDED, offload, harms=False)  # where all is one memory
def shard_sent_without_load(program: Program) -> fx.Node:
    node, load = find(program, "unshard_0"), find(program, "load_0")
    node.args = ([find(program, "shard_layers_0_weight")], 2)
    for each in (find(program, "free_sent_0"), item(load, 0), load):
        program.graph.erase_node(each)
    return node


@breaks(Fact.NO_USE_AFTER_FREE, offload_bf16)
def load_freed_before_the_wait_of_the_gather(program: Program) -> fx.Node:
    free = find(program, "free_sent_1")
    free.args = (tags.operands(free)[1:],)
    early = insert(program, part(program, "unshard_1"), ops.free, [part(program, "load_1")])
    tags.put(early, tags.get(free)).meta.pop("val", None)
    late = [part(program, "cast_1")]
    free.args = (late,)
    return early


@breaks(Fact.STREAMS_ORDERED, offload, harms=False)
def gather_that_does_not_wait_for_the_load(program: Program) -> fx.Node:
    node = find(program, "unshard_1")
    tags.update(node, waits=tuple(e for e in tags.get(node).waits if e != "l1"))
    return node


@breaks(Fact.STREAMS_ORDERED, offload_bf16, harms=False)
def cast_that_does_not_wait_for_the_load(program: Program) -> fx.Node:
    node = find(program, "cast_1")
    tags.update(node, waits=tuple(e for e in tags.get(node).waits if e != "l1"))
    return node


@breaks(Fact.STREAMS_ORDERED, bf16, harms=False)
def cast_on_another_stream_than_its_gather(program: Program) -> fx.Node:
    node = find(program, "cast_1")
    tags.update(node, stream="load")
    return node


@breaks(Fact.STREAMS_ORDERED, offload, harms=False)
def store_that_does_not_wait(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.store)
    tags.update(node, waits=())
    return node


@breaks(Fact.UNSHARD_PAIRED, offload)
def store_of_what_is_in_flight(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.store)
    item(launch(program, 1, "backward", ops.reduce_scatter), 0).append(node)
    return node


@breaks(Fact.NO_USE_AFTER_FREE, offload)
def freed_while_it_is_stored(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.store)
    free = find(program, f"free_{tags.get(node).pair}")
    item(node, 0).append(free)
    return free


@breaks(Fact.REDUCED_ONCE, offload, harms=False)  # where all is one memory
def gradient_not_stored(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.store)
    return returned(program, "layers.0.weight", tags.operands(node)[0])


@breaks(Fact.REDUCED_ONCE, functools.partial(layered, offloaded=True))
def stores_swapped(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.store)
    weight, bias, shift = tags.operands(node)
    node.args = ([shift, bias, weight],)
    return item(node, 0)


# -- between forward and backward -----------------------------------------------------------------


@breaks(Fact.NO_USE_AFTER_FREE, kept)
def kept_parameter_freed_in_forward(program: Program) -> fx.Node:
    free = find(program, "free_1")
    find(program, "mm_1").append(free)
    tags.update(free, phase="forward")
    return find(program, "dx_1")


@breaks(Fact.BOUNDED_INFLIGHT, kept, harms=False)  # but for memory
def kept_parameter_gathered_again_for_nobody(program: Program) -> fx.Node:
    node = find(program, "unshard_1")
    got = repeated(program, find(program, "dhead"), node, tags.operands(node))
    wait = next(n for n in got.users if n.target is ops.wait)
    insert(program, wait, ops.free, [got], role="free")
    return tags.source(got)


@breaks(Fact.NO_PARAM_SAVED, regrouped, harms=False)  # but for memory; it is freed, see below
def backward_reads_what_all_ranks_gathered(program: Program) -> fx.Node:
    reader = find(program, "dx_1")
    reader.update_arg(1, part(program, "unshard_1"))
    program.graph.erase_node(find(program, "free_1"))
    return reader


@breaks(Fact.UNSHARD_PAIRED, regrouped)
def resharded_before_the_wait(program: Program) -> fx.Node:
    node = find(program, "reshard_1")
    part(program, "unshard_1").append(node)
    return node


@breaks(Fact.NO_USE_AFTER_FREE, regrouped)
def resharded_after_the_free(program: Program) -> fx.Node:
    node = find(program, "reshard_1")
    node.prepend(find(program, "free_1"))
    return node


@breaks(Fact.PARAMS_UNSHARDED, functools.partial(layered, world_size=4, reshard=2))
def part_of_another_unit(program: Program) -> fx.Node:
    node, other = launch(program, 1, "backward"), launch(program, 2, "backward")
    node.args = (tags.operands(other), *node.args[1:])
    return item(node, 0)


@breaks(Fact.FREED, regrouped)
def part_freed_too_early(program: Program) -> fx.Node:
    gather = launch(program, 2, "backward")
    free = find(program, f"free_sent_{tags.get(gather).pair}")
    item(find(program, "reshard_1"), 0).append(free)
    tags.update(free, phase="forward")
    return free


@breaks(Fact.NO_USE_AFTER_FREE, regrouped)
def part_freed_while_it_is_sent(program: Program) -> fx.Node:
    gather = launch(program, 2, "backward")
    free = find(program, f"free_sent_{tags.get(gather).pair}")
    item(gather, 0).append(free)
    return free


@breaks(Fact.PARAMS_UNSHARDED, regrouped)
def part_gathered_from_all_ranks(program: Program) -> fx.Node:
    node = launch(program, 2, "backward")
    node.args = (node.args[0], 2)
    return node


@breaks(Fact.EQUAL_CHUNKS, regrouped, harms=False)  # a World knows its groups
def part_gathered_from_too_many(program: Program) -> fx.Node:
    node = launch(program, 2, "backward")
    node.args = (node.args[0], 4, "reshard2")
    return node


@breaks(Fact.PARAMS_UNSHARDED, functools.partial(chain, replicas=2))
def shards_gathered_from_the_replicas(program: Program) -> fx.Node:
    node = find(program, "unshard_1")
    node.args = (*node.args, "replicate")
    return node
