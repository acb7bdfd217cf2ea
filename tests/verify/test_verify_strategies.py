"""`verify` finds what is wrong in programs of every strategy and policy, and what it finds harms.

As tests/verify/test_verify.py, whose faults are those of `full_shard`. One file because its
tests go through the one list that all its faults are entered in.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fxshard import pipeline, verify
from fxshard.capture import trace
from fxshard.config.checked import Config
from fxshard.config.precision import Precision
from fxshard.errors import VerifyError
from fxshard.ir import dump, ops, tags, transfers
from fxshard.ir.program import Fact, Program
from fxshard.ir.splitting import configured_units
from fxshard.verify import walk
from tests import graphs
from tests.graphs import BF16
from tests.verify.full_shard_faults import FAULTS
from tests.verify.verify_cases import ALWAYS, find, fresh, insert, item, launch, paired
from tests.zoo import MODELS

aten = torch.ops.aten
chain, layered = graphs.chain, graphs.layered
Build = Callable[[], Program]
Fault = Callable[[Program], fx.Node]


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault in what the passes make of a program.

    Attributes:
        harms: the numbers on a `StrictWorld` are others, or it cannot run at all.
    """

    fact: Fact
    fault: Fault
    build: Build
    harms: bool


CASES: list[Case] = []


def breaks(fact: Fact, build: Build, *, harms: bool = True) -> Callable[[Fault], Fault]:
    def add(fault: Fault) -> Fault:
        CASES.append(Case(fact, fault, build, harms))
        return fault

    return add


def good(build: Build) -> Program:
    """The program that `build` makes, after the whole pipeline, its parameters apart."""
    program = build()
    pipeline.run(program, pipeline.default_passes(Config(**graphs.APART)))
    assert program.facts == ALWAYS
    return program


def returned(program: Program, name: str, node: fx.Node) -> fx.Node:
    """Return `node` as the gradient of `name`."""
    names = [result.name for result in program.results]
    values = program.values
    values[names.index(name)] = node
    program.values = values
    return node


def value_of(program: Program, name: str) -> fx.Node:
    return program.values[[result.name for result in program.results].index(name)]


def repeated(program: Program, after: fx.Node, node: fx.Node, taken: list[fx.Node]) -> fx.Node:
    """A copy of the launch `node` on `taken`, and its wait, after `after`; returns its item."""
    tag = dataclasses.replace(
        tags.get(node), phase="backward", pair=99, records="z99", waits=(), fqn=None
    )
    with program.graph.inserting_before(after.next):
        got, *_ = transfers.insert_operator(
            program, node.target, (taken, *node.args[1:]), [str(tags.get(taken[0]).fqn)], tag, "z"
        )
        transfers.insert_wait(program, [got], tag)
    return got


def part(program: Program, name: str, index: int = 0) -> fx.Node:
    return item(find(program, name), index)


bf16 = functools.partial(chain, precision=BF16)
offload = functools.partial(chain, offloaded=True)
offload_bf16 = functools.partial(chain, offloaded=True, precision=BF16)
kept = functools.partial(chain, reshard=False)
regrouped = functools.partial(chain, world_size=4, reshard=2)
hybrid = functools.partial(chain, replicas=2)
hybrid_layers = functools.partial(layered, replicas=2)
no_shard = functools.partial(chain, world_size=1, replicas=2)
summed = functools.partial(chain, replicas=2, precision=Precision(torch.float16))
low_precision = functools.partial(chain, replicas=2, precision=Precision(torch.bfloat16))
hooked = functools.partial(layered, comm_hook=True)
accumulated = functools.partial(chain, accumulated=frozenset({"head"}))
no_sync = functools.partial(chain, sync=False)
adds = functools.partial(chain, sync=False, accumulated=frozenset({"head"}))


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


# -- and the tests --------------------------------------------------------------------------------

IDS = [f"{case.fact.name.lower()}-{case.fault.__name__}" for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fault_is_found(case: Case) -> None:
    program = good(case.build)
    node = case.fault(program)
    with pytest.raises(VerifyError) as caught:
        verify.verify(program)
    assert caught.value.fact == case.fact.name.lower(), caught.value
    assert caught.value.node == node.name, caught.value
    assert "    " + dump.line(node, program) in str(caught.value).splitlines()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.harms], ids=lambda c: c.fault.__name__
)
def test_fault_does_harm(case: Case) -> None:
    values = graphs.random_values(case.build())
    program, broken = good(case.build), good(case.build)
    case.fault(broken)
    program.schedule = broken.schedule = None  # it still is that of the good program
    assert not differs(program, program, values)
    assert differs(program, broken, values)


def differs(program: Program, broken: Program, values: graphs.Values) -> bool:
    """True if the ranks of `broken` disagree, if it cannot run, or if it gives other numbers."""
    right = graphs.run(program, values, apart=True)
    try:
        wrong = graphs.run(broken, values, apart=True)
        graphs.assert_same(wrong, right, exact=False)
    except (AssertionError, RuntimeError):
        return True
    return False


def test_there_are_new_faults() -> None:
    names = [case.fault.__name__ for case in CASES]
    assert len(set(names)) == len(names) and not set(names) & {f.__name__ for _, f in FAULTS}


SOME = ["tied", "convnet", pytest.param("transformer", marks=pytest.mark.slow)]
EVENTFUL = {
    "hybrid_offload_bf16": functools.partial(offload_bf16, replicas=2),
    "regrouped_offload": functools.partial(regrouped, offloaded=True),
    "hook": hooked,
    "no_shard_fp16": functools.partial(no_shard, precision=Precision(torch.float16)),
}


@pytest.mark.parametrize("build", EVENTFUL.values(), ids=list(EVENTFUL))
def test_every_event_matters(build: Build) -> None:
    program = good(build)
    program.facts = {Fact.STREAMS_ORDERED}
    for node in program.graph.nodes:
        tag = tags.get(node)
        fewer = [tag.waits[:i] + tag.waits[i + 1 :] for i in range(len(tag.waits))]
        broken = [dataclasses.replace(tag, waits=waits) for waits in fewer]
        broken += [dataclasses.replace(tag, records=None)] if tag.records else []
        for without in broken:
            tags.put(node, without)
            with pytest.raises(VerifyError) as caught:
                verify.verify(program)
            assert caught.value.fact == "streams_ordered"
            tags.put(node, tag)
    verify.verify(program)


# -- and no false alarm ---------------------------------------------------------------------------

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def columns(param: torch.Tensor) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options, and of the program
    "shard_grad_op": ({"strategy": "shard_grad_op"}, {}),
    "no_shard": ({"strategy": "no_shard"}, {"world_size": 1, "replicas": 2}),
    "hybrid": ({"strategy": "hybrid_shard"}, {"replicas": 2}),
    "reshard_2": ({"reshard_after_forward": 2}, {"world_size": 4}),
    "bf16": ({"mixed_precision": HALF}, {"world_size": 3}),
    "bf16_one_rank": ({"mixed_precision": HALF}, {"world_size": 1}),
    "offload": ({"offload": CPUOffloadPolicy()}, {}),
    "hook": ({}, {"comm_hook": True}),
    "no_sync": ({}, {"sync": False}),
    "apart": (graphs.APART, {}),
    "columns": ({"shard_placement_fn": columns}, {}),
    "columns_regrouped": (
        {"shard_placement_fn": columns, "reshard_after_forward": 2, "mixed_precision": HALF}
        | graphs.APART,
        {"world_size": 4, "replicas": 2},
    ),
    "everything": (
        {
            "strategy": "hybrid_shard_zero2",
            "mixed_precision": HALF,
            "offload": CPUOffloadPolicy(),
            "forward_prefetch": 2,
            "gradient_predivide_factor": 2.0,
        },
        {"replicas": 2},
    ),
    "everything_regrouped": (
        {"reshard_after_forward": 2, "mixed_precision": HALF, "offload": CPUOffloadPolicy()},
        {"world_size": 4, "replicas": 2},
    ),
}
SETTINGS["everything_apart"] = (
    SETTINGS["everything_regrouped"][0] | graphs.APART,
    SETTINGS["everything_regrouped"][1],
)


@functools.cache
def traced(name: str, half: bool) -> Program:
    torch.manual_seed(0)
    model = MODELS[name].build()
    args, kwargs = MODELS[name].batch(0, 0)
    config = Config(units=MODELS[name].units, mixed_precision=HALF if half else None)
    units = configured_units(model, config)
    return trace.capture(model, args, kwargs, units=units, world_size=1, training=True)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.sample(4)
def test_no_false_alarm(name: str, setting: str) -> None:
    options, attributes = SETTINGS[setting]
    config = Config(units=MODELS[name].units, **options)
    program = traced(name, config.mixed_precision is not None)
    units = configured_units(MODELS[name].build(), config)
    program = fresh(program, attributes.get("world_size", 2))
    program = dataclasses.replace(
        program, units=units, offloaded=config.offload is not None, **attributes
    )
    grads = [r.name for r in program.results if r.kind == "grad" and r.name in program.params]
    kept = [frozenset(), frozenset(grads[::2]), frozenset(program.params)]
    for names in kept:
        rewritten = fresh(program, program.world_size)
        rewritten.accumulated = names
        pipeline.run(rewritten, pipeline.default_passes(config), check_each=True)
        assert rewritten.facts == ALWAYS
