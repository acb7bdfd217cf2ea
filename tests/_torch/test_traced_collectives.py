"""`fxshard._torch.traced_collectives`: what it relies on in torch."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard._torch import traced_collectives
from fxshard._torch.process_groups import fake_process_group


def reduced(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    work = dist.all_reduce(total, op=dist.ReduceOp.MAX, async_op=True)
    assert work.wait() and work.is_completed()
    return total


def test_methods_of_process_groups_become_functional_collectives() -> None:
    before = dist.ProcessGroup.allreduce
    with fake_process_group(0, 2), traced_collectives.traced(ValueError):
        graph = make_fx(reduced, tracing_mode="fake")(torch.ones(3)).graph
        (call,) = [node for node in graph.nodes if traced_collectives.is_collective(node)]
        assert str(call.target) == "_c10d_functional.all_reduce.default" and call.args[1] == "max"
        with pytest.raises(ValueError, match="barrier"):
            dist.barrier()
    assert dist.ProcessGroup.allreduce is before


def test_ranks_of_functional_collectives_are_noted() -> None:
    with fake_process_group(0, 3), traced_collectives.traced(ValueError):
        graph = make_fx(reduced, tracing_mode="fake")(torch.ones(3)).graph
        (call,) = [node for node in graph.nodes if traced_collectives.is_collective(node)]
        assert traced_collectives.ranks_of(call) is None
        traced_collectives.note_ranks(call)
    found = traced_collectives.ranks_of(call)
    assert found is not None and (found.name, found.size, found.stride) == ("world", 3, 1)
    (read,) = call.users
    traced_collectives.note_same_ranks(read, call)
    assert traced_collectives.ranks_of(read) is found
    traced_collectives.note(read, other := dataclasses.replace(found, name="tp"))
    assert traced_collectives.ranks_of(read) is other


def test_what_a_collective_is_called_with_is_noted() -> None:
    graph = torch.fx.Graph()
    call = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (None, "max", "tp"))
    assert not traced_collectives.is_called_otherwise(call), "nothing is noted"
    traced_collectives.note_call(call)
    assert not traced_collectives.is_called_otherwise(call)
    call.args = (None, "sum", "tp")
    assert traced_collectives.is_called_otherwise(call)


def test_what_a_collective_repeats_is_noted() -> None:
    operator = torch.ops._c10d_functional.all_reduce.default
    graph = torch.fx.Graph()
    call = graph.call_function(operator, (None, "max", "tp"))
    plain = graph.call_function(torch.ops.aten.neg.default, (call,))
    with fake_process_group(0, 2):
        group = init_device_mesh("cpu", (2,)).get_group().group_name
        call.args = (None, "max", group)
        traced_collectives.note_ranks(call)
    again = graph.call_function(operator, call.args)
    traced_collectives.note_repeats(again, call)
    traced_collectives.note_repeats(plain, plain)
    assert traced_collectives.repeated(graph.nodes) == [(again, call)]
    assert traced_collectives.ranks_of(again) == traced_collectives.ranks_of(call)
    again.args = (None, "sum", group)
    stands = graph.call_function(torch.ops.aten.neg.default, (None, "sum", group))
    traced_collectives.note_stands_for(stands, again)
    assert traced_collectives.is_called_otherwise(stands), "as what it stands for is"
    assert traced_collectives.is_waited_for(call) and not traced_collectives.is_waited_for(plain)


def test_groups_of_equal_ranks_are_told_apart_by_when_they_were_made() -> None:
    with fake_process_group(0, 4):
        made = [dist.new_group([0, 1]) for _ in range(2)] + [dist.new_group([0, 2])]
        found = [traced_collectives.CollectiveRanks.of(group.group_name) for group in made]
    assert [(each.name, each.number) for each in found] == [
        *(("group of 2", 0), ("group of 2", 1), ("group of 2 stride 2", 0)),
    ]


def test_groups_of_a_mesh_are_named_by_their_dimension() -> None:
    with fake_process_group(0, 6):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        names = [mesh[name].get_group().group_name for name in ("dp", "tp")]
        found = [traced_collectives.CollectiveRanks.of(name) for name in names]
        other = traced_collectives.CollectiveRanks.of(dist.new_group([0, 5]).group_name)
    assert [(each.name, each.size, each.stride) for each in found] == [("dp", 3, 2), ("tp", 2, 1)]
    assert (other.name, other.size, other.stride) == ("group of 2 stride 5", 2, 5)


def test_what_was_waited_for_is_the_tensor_itself() -> None:
    """As `fxshard.capture.fakes` has it, and the fake kernel has not."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    value = torch.ones(3)
    assert wait(value).data_ptr() == value.data_ptr()


def test_what_is_noted_of_a_collective_is_noted_of_another() -> None:
    with fake_process_group(0, 3), traced_collectives.traced(ValueError):
        graph = make_fx(reduced, tracing_mode="fake")(torch.ones(3)).graph
        (call,) = [node for node in graph.nodes if traced_collectives.is_collective(node)]
        traced_collectives.note_ranks(call)
    other = graph.node_copy(call, lambda node: node)
    other.meta = {}
    assert traced_collectives.notes(other) == {}
    traced_collectives.note_all(other, traced_collectives.notes(call))
    assert traced_collectives.ranks_of(other) == traced_collectives.ranks_of(call) is not None
