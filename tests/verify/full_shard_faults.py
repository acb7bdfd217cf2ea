"""Faults in a program of `full_shard`, each with the fact that it breaks (test_verify)."""

import dataclasses
import operator
from collections.abc import Callable

import torch
from torch import fx

from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from tests.verify.verify_cases import find, insert, item, launch, of, paired

aten = torch.ops.aten
Fault = Callable[[Program], fx.Node | None]  # breaks a good program; returns the node to blame
FAULTS: list[tuple[Fact, Fault]] = []


def breaks(fact: Fact) -> Callable[[Fault], Fault]:
    def add(fault: Fault) -> Fault:
        FAULTS.append((fact, fault))
        return fault

    return add


@breaks(Fact.WELL_FORMED)
def result_without_name(program: Program) -> None:
    program.results.pop()


@breaks(Fact.TAGGED)
def node_without_tag(program: Program) -> fx.Node:
    node = find(program, "tanh_1")
    del node.meta["fxshard"]
    return node


@breaks(Fact.TAGGED)
def forward_node_in_backward(program: Program) -> fx.Node:
    node = find(program, "y")
    find(program, "dhead").append(node)
    return node


@breaks(Fact.TAGGED)
def node_without_value(program: Program) -> fx.Node:
    node = find(program, "tanh_1")
    del node.meta["val"]
    return node


@breaks(Fact.TAGGED)
def view_that_aliases_nothing(program: Program) -> fx.Node:
    """A pass gave it another input and did not recompute its fake value."""
    view = find(program, "t_0")
    view.meta["val"] = program.fake((4, 4), torch.float32, torch.device("cpu"))
    return view


@breaks(Fact.UNITS_ASSIGNED)
def node_without_unit(program: Program) -> fx.Node:
    tags.update(find(program, "tanh_1"), unit=None)
    return find(program, "tanh_1")


@breaks(Fact.RECOMPUTED)
def value_of_a_checkpoint_is_saved(program: Program) -> fx.Node:
    for name in ("linear_1", "tanh_1", "dlinear_1"):
        tags.update(find(program, name), checkpoint=0)
    return find(program, "dlinear_1")


@breaks(Fact.UNITS_ASSIGNED)
def unit_that_is_not_there(program: Program) -> fx.Node:
    tags.update(find(program, "tanh_1"), unit=2)
    program.units = program.units[:2]
    return next(n for n in program.graph.nodes if tags.get(n).unit == 2)


@breaks(Fact.BUCKETED)
def parameter_in_two_buckets(program: Program) -> fx.Node:
    first, *rest = program.buckets
    program.buckets = (first, *rest, dataclasses.replace(rest[0], fqns=first.fqns))
    return program.output


@breaks(Fact.BUCKETED)
def unit_cut_in_two_after_it_was_gathered(program: Program) -> fx.Node:
    root, layer, *rest = program.buckets
    parts = [dataclasses.replace(layer, fqns=layer.fqns[i:j]) for i, j in ((0, 1), (1, None))]
    program.buckets = (root, *parts, *rest)
    return launch(program, 1, "forward")


@breaks(Fact.UNSHARD_PAIRED)
def no_wait(program: Program) -> fx.Node:
    program.graph.erase_node(of(program, ops.wait, 1, "forward"))
    return launch(program, 1, "forward")


@breaks(Fact.UNSHARD_PAIRED)
def no_wait_for_a_reduction(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.reduce_scatter)
    program.graph.erase_node(paired(program, ops.wait, node))
    return node


@breaks(Fact.UNSHARD_PAIRED)
def two_waits(program: Program) -> fx.Node:
    wait = of(program, ops.wait, 1, "forward")
    insert(program, wait, ops.wait, wait.args[0])
    return launch(program, 1, "forward")


@breaks(Fact.UNSHARD_PAIRED)
def wait_after_the_use(program: Program) -> fx.Node:
    find(program, "tanh_0").append(of(program, ops.wait, 1, "forward"))
    return find(program, "t_0")


@breaks(Fact.UNSHARD_PAIRED)
def wait_after_the_use_of_a_view(program: Program) -> fx.Node:
    """`h_0` reads the shift itself; without it the first reader is a view of the weight."""
    wait, view = of(program, ops.wait, 1, "forward"), find(program, "t_0")
    wait.append(find(program, "h_0"))
    view.append(wait)
    return view


@breaks(Fact.UNSHARD_PAIRED)
def wait_for_a_part(program: Program) -> fx.Node:
    wait = of(program, ops.wait, 1, "forward")
    wait.args = (tags.operands(wait)[:-1],)
    return wait


@breaks(Fact.WELL_FORMED)
def wait_before_its_launch(program: Program) -> fx.Node:
    wait = of(program, ops.wait, 1, "forward")
    launch(program, 1, "forward").prepend(wait)
    return wait


@breaks(Fact.WELL_FORMED)
def read_after_the_write_of_what_it_reads(program: Program) -> fx.Node:
    """%y is returned, not what has written over it: so a buffer would be, after its write."""
    node = find(program, "y")
    insert(program, node, aten.copy_.default, node, node)
    return program.output


@breaks(Fact.UNSHARD_PAIRED)
def less_sent_than_taken(program: Program) -> fx.Node:
    node = launch(program, 1, "forward")
    node.args = (tags.operands(node)[:-1], 2)
    return node


@breaks(Fact.UNSHARD_PAIRED)
def taken_twice(program: Program) -> fx.Node:
    node = launch(program, 1, "forward")
    item(node, 1).update_arg(1, 0)
    return node


@breaks(Fact.PARAMS_UNSHARDED)
def full_parameter_comes_in(program: Program) -> fx.Node:
    shard = find(program, "shard_layers_0_weight")
    tags.update(shard, role="param")
    return shard


@breaks(Fact.PARAMS_UNSHARDED)
def compute_reads_a_shard(program: Program) -> fx.Node:
    reader = find(program, "linear_0")
    reader.update_arg(0, find(program, "shard_layers_0_bias"))
    return reader


@breaks(Fact.PARAMS_UNSHARDED)
def wrong_shape(program: Program) -> fx.Node:
    node = item(launch(program, 1, "forward"), 1)
    node.meta["val"] = node.meta["val"][:3]
    return node


@breaks(Fact.PARAMS_UNSHARDED)
def shards_swapped(program: Program) -> fx.Node:
    """The weight and the shift have one shape; only the names can tell."""
    node = launch(program, 1, "forward")
    weight, bias, shift = tags.operands(node)
    node.args = ([shift, bias, weight], 2)
    return item(node, 0)


@breaks(Fact.PARAMS_UNSHARDED)
def padding_not_cut(program: Program) -> fx.Node:
    reader = find(program, "x_0")
    reader.update_arg(0, item(launch(program, 0, "forward"), 0))
    return reader


@breaks(Fact.NO_PARAM_SAVED)
def backward_reads_what_forward_gathered(program: Program) -> fx.Node:
    reader = find(program, "dx_0")
    reader.update_arg(1, item(launch(program, 1, "forward"), 0))
    return reader


@breaks(Fact.NO_PARAM_SAVED)
def backward_reads_a_view_of_it(program: Program) -> fx.Node:
    reader = find(program, "dx_0")
    reader.update_arg(1, find(program, "t_0"))
    return reader


@breaks(Fact.NO_PARAM_SAVED)
def model_returns_a_parameter(program: Program) -> fx.Node:
    program.values = [find(program, "t_0"), *program.values[1:]]
    return program.output


@breaks(Fact.NO_PARAM_SAVED)
def freed_in_backward(program: Program) -> fx.Node:
    free = of(program, ops.free, 2, "forward")
    find(program, "dhead").append(free)
    tags.update(free, phase="backward")
    return free


@breaks(Fact.REDUCED_ONCE)
def gradient_not_reduced(program: Program) -> fx.Node:
    values = program.values
    at = [result.name for result in program.results].index("layers.1.weight")
    values[at] = find(program, "dweight_1")
    program.values = values
    return program.output


@breaks(Fact.REDUCED_ONCE)
def gradient_reduced_twice(program: Program) -> fx.Node:
    scatter = launch(program, 1, "backward", ops.reduce_scatter)
    values = scatter.meta["val"]
    node = insert(
        program, scatter, ops.reduce_scatter, *scatter.args, pair=99, records="r99", stream="reduce"
    )
    items: list[fx.Node] = []
    for i, val in enumerate(values):
        tag = {"fqn": tags.get(item(scatter, i)).fqn, "pair": 99}
        items.append(
            insert(program, items[-1] if items else node, operator.getitem, node, i, **tag)
        )
        items[-1].meta["val"] = val
    insert(program, items[-1], ops.wait, items, role="wait", pair=99).meta.pop("val")
    return items[0]


@breaks(Fact.REDUCED_ONCE)
def one_tensor_sent_for_two(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.reduce_scatter)
    weight, bias, _ = tags.operands(node)
    node.args = ([weight, bias, weight], 2)
    return item(node, 2)


@breaks(Fact.REDUCED_ONCE)
def gradients_swapped(program: Program) -> fx.Node:
    """The weight and the shift have one shape; only the names can tell."""
    node = launch(program, 1, "backward", ops.reduce_scatter)
    weight, bias, shift = tags.operands(node)
    node.args = ([shift, bias, weight], 2)
    return item(node, 0)


@breaks(Fact.REDUCED_ONCE)
def reduced_gradient_not_returned(program: Program) -> fx.Node:
    at = [result.name for result in program.results].index("layers.1.weight")
    node = program.values[at]
    program.values = [value for i, value in enumerate(program.values) if i != at]
    del program.results[at]
    return node


@breaks(Fact.REDUCED_ONCE)
def padded_wrongly(program: Program) -> fx.Node:
    """8 rows are 2 equal chunks as 6 are, but not of a parameter of 5."""
    node = launch(program, 0, "backward", ops.reduce_scatter)
    (sent,) = tags.operands(node)
    result = item(node, 0)
    sent.meta["val"] = program.fake((8, 4), torch.float32, torch.device("cpu"))
    result.meta["val"] = program.fake((4, 4), torch.float32, torch.device("cpu"))
    node.meta["val"] = [result.meta["val"]]
    return result


@breaks(Fact.ONE_DTYPE)
def two_dtypes_in_one_launch(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.reduce_scatter)
    sent = tags.operands(node)[0]
    sent.meta["val"] = sent.meta["val"].to(torch.bfloat16)
    return node


@breaks(Fact.EQUAL_CHUNKS)
def not_padded(program: Program) -> fx.Node:
    node = launch(program, 0, "backward", ops.reduce_scatter)
    (pad,) = tags.operands(node)
    tags.update(pad.all_input_nodes[0], fqn=tags.get(pad).fqn)
    node.args = (pad.all_input_nodes, 2)
    return node


@breaks(Fact.EQUAL_CHUNKS)
def not_contiguous(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.reduce_scatter)
    weight = tags.operands(node)[0]
    weight.meta["val"] = weight.meta["val"].t()
    return node


@breaks(Fact.BOUNDED_INFLIGHT)
def launched_too_far_ahead(program: Program) -> fx.Node:
    later = launch(program, 2, "forward")
    first = launch(program, 1, "forward")
    for node in reversed([later, *later.users]):
        if node.target is operator.getitem or node is later:
            item(first, 2).append(node)
    return later


@breaks(Fact.BOUNDED_INFLIGHT)
def waited_for_too_far_ahead(program: Program) -> fx.Node:
    """Nothing is in flight for long, and yet two layers lie there before the first one runs."""
    wait = of(program, ops.wait, 1, "forward")
    later = launch(program, 2, "forward")
    anchor = item(launch(program, 1, "forward"), 2)
    for node in reversed([wait, later, *later.users]):
        if node.target is not ops.free and tags.get(node).role != "compute":
            anchor.append(node)
    return later


@breaks(Fact.BOUNDED_INFLIGHT)
def freed_too_late(program: Program) -> fx.Node:
    """Nothing reads the root's parameters in backward when layers.0 is launched."""
    root, later = of(program, ops.free, 0, "backward"), launch(program, 1, "backward")
    item(later, 0).append(root)
    return later


@breaks(Fact.FREED)
def no_free(program: Program) -> fx.Node:
    program.graph.erase_node(of(program, ops.free, 2, "forward"))
    return launch(program, 2, "forward")


@breaks(Fact.FREED)
def no_free_of_sent_gradients(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.reduce_scatter)
    program.graph.erase_node(paired(program, ops.free, node))
    return node


@breaks(Fact.FREED)
def two_frees(program: Program) -> fx.Node:
    free = of(program, ops.free, 1, "forward")
    insert(program, free, ops.free, free.args[0])
    return launch(program, 1, "forward")


@breaks(Fact.FREED)
def free_of_a_part(program: Program) -> fx.Node:
    free = of(program, ops.free, 1, "forward")
    free.args = (tags.operands(free)[1:],)
    return free


@breaks(Fact.FREED)
def freed_before_it_is_sent(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.reduce_scatter)
    free = paired(program, ops.free, node)
    node.prepend(free)
    return free


@breaks(Fact.NO_USE_AFTER_FREE)
def freed_before_the_last_reader(program: Program) -> fx.Node:
    find(program, "linear_0").prepend(of(program, ops.free, 1, "forward"))
    return find(program, "linear_0")


@breaks(Fact.NO_USE_AFTER_FREE)
def view_read_after_the_free(program: Program) -> fx.Node:
    return insert(program, find(program, "tanh_0"), aten.relu.default, find(program, "t_0"))


@breaks(Fact.NO_USE_AFTER_FREE)
def view_of_a_view_read_after_the_free(program: Program) -> fx.Node:
    view = insert(program, find(program, "t_0"), aten.t.default, find(program, "t_0"))
    view.meta["val"] = find(program, "t_0").meta["val"].t()
    return insert(program, find(program, "tanh_0"), aten.relu.default, view)


@breaks(Fact.NO_USE_AFTER_FREE)
def sent_gradient_read_after_the_free(program: Program) -> fx.Node:
    free = next(n for n in find(program, "dweight_0").users if n.target is ops.free)
    reader = insert(program, free, aten.abs.default, find(program, "dweight_0"))
    return tags.put(reader, tags.get(reader), program.refake(reader))


@breaks(Fact.NO_USE_AFTER_FREE)
def freed_while_it_is_sent(program: Program) -> fx.Node:
    node = launch(program, 2, "backward", ops.reduce_scatter)
    free = paired(program, ops.free, node)
    item(node, 2).append(free)
    return free


@breaks(Fact.STREAMS_ORDERED)
def launch_on_the_compute_stream(program: Program) -> fx.Node:
    node = launch(program, 1, "forward")
    tags.update(node, stream="compute")
    return node


@breaks(Fact.STREAMS_ORDERED)
def launch_without_an_event(program: Program) -> fx.Node:
    node = launch(program, 1, "forward")
    tags.update(node, records=None)
    return of(program, ops.wait, 1, "forward")


@breaks(Fact.STREAMS_ORDERED)
def launch_that_waits_for_nothing(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.reduce_scatter)
    tags.update(node, waits=())
    return node


@breaks(Fact.STREAMS_ORDERED)
def event_that_nobody_records(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.reduce_scatter)
    (event,) = tags.get(node).waits
    tags.update(recorder(program, event), records=None)
    return node


@breaks(Fact.STREAMS_ORDERED)
def event_recorded_too_early(program: Program) -> fx.Node:
    node = launch(program, 1, "backward", ops.reduce_scatter)
    (event,) = tags.get(node).waits
    tags.update(recorder(program, event), records=None)
    tags.update(find(program, "dlinear_0"), records=event)
    return node


@breaks(Fact.STREAMS_ORDERED)
def event_recorded_twice(program: Program) -> fx.Node:
    twin = find(program, "dlinear_0")
    tags.update(twin, records=tags.get(launch(program, 1, "backward")).records)
    return twin


@breaks(Fact.STREAMS_ORDERED)
def reader_that_does_not_wait(program: Program) -> fx.Node:
    wait = of(program, ops.wait, 1, "forward")
    tags.update(wait, waits=())
    return find(program, "h_0")


def recorder(program: Program, event: str) -> fx.Node:
    (node,) = (n for n in program.graph.nodes if tags.get(n).records == event)
    return node


@breaks(Fact.OUTLINED)
def no_schedule(program: Program) -> None:
    program.schedule = None


def row(program: Program, name: str, phase: str = "forward") -> fx.Node:
    assert program.schedule is not None
    (node,) = (n for n in dict(program.schedule.phases())[phase].nodes if n.name == name)  # type: ignore[index]
    return node


@breaks(Fact.OUTLINED)
def row_dropped(program: Program) -> fx.Node:
    free = of(program, ops.free, 1, "forward")
    same = row(program, free.name)
    same.graph.erase_node(same)
    return free


@breaks(Fact.OUTLINED)
def last_row_dropped(program: Program) -> fx.Node:
    free = program.phase("backward")[-1]
    same = row(program, free.name, "backward")
    same.graph.erase_node(same)
    return free


@breaks(Fact.OUTLINED)
def rows_swapped(program: Program) -> fx.Node:
    free = of(program, ops.free, 1, "forward")
    same = row(program, free.name)
    (call,) = {tags.source(n) for n in (row(program, "linear_0"), row(program, "h_0"))}
    call.prepend(same)
    return find(program, "h_0")


TANH = (aten.tanh.default, aten.tanh_.default)  # reinplace may have chosen the second


@breaks(Fact.OUTLINED)
def region_changed(program: Program) -> fx.Node:
    assert program.schedule is not None
    regions = program.schedule.regions.values()
    (tanh,) = (n for r in regions for n in r.body if n.target in TANH)
    tanh.target = aten.sigmoid.default
    return find(program, "tanh_0")


@breaks(Fact.OUTLINED)
def region_called_on_other_values(program: Program) -> fx.Node:
    """Layer 1 gets the input of layer 0: the same operators in the same order."""
    wrong = row(program, "x_0")
    (call,) = (n for n in row(program, "x_1").users if n.op == "call_module")
    call.replace_input_with(row(program, "x_1"), wrong)
    return find(program, "h_1")


@breaks(Fact.OUTLINED)
def row_on_other_values(program: Program) -> fx.Node:
    free = of(program, ops.free, 1, "forward")
    same = row(program, free.name)
    same.args = (tags.operands(same)[::-1],)
    return free


@breaks(Fact.OUTLINED)
def saved_values_in_another_order(program: Program) -> fx.Node:
    assert program.schedule is not None
    output = program.schedule.forward.output_node()
    results, saved = output.args[0]  # type: ignore[misc]
    output.args = ((results, tuple(reversed(saved))),)  # type: ignore[arg-type]
    return program.output


@breaks(Fact.OUTLINED)
def gradients_in_another_order(program: Program) -> fx.Node:
    assert program.schedule is not None and program.schedule.backward is not None
    output = program.schedule.backward.output_node()
    output.args = (tuple(reversed(output.args[0])),)  # type: ignore[arg-type]
    return program.output
