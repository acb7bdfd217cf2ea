"""Contracts of what `fxshard._torch.process_groups` uses of torch."""

import gc
import weakref

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fxshard._torch import process_groups


def test_a_fake_process_group() -> None:
    with pytest.raises(KeyError), process_groups.fake_process_group(1, 3):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
        group = dist.group.WORLD
        assert dist.get_backend(group) == "fake"
        ones, gathered = torch.ones(2), torch.zeros(6)
        group.allgather_into_tensor_coalesced([gathered], [ones]).wait()
        assert gathered.tolist() == [1.0] * 6, "a fake all-gather does not repeat the input"
        reduced = torch.zeros(2)
        options = dist.ReduceScatterOptions()
        group.reduce_scatter_tensor_coalesced([reduced], [torch.arange(6.0)], options).wait()
        raise KeyError
    assert not dist.is_initialized(), "the fake group outlives its block"


def test_the_local_part_of_a_dtensor_can_be_replaced() -> None:
    with process_groups.fake_process_group(0, 2):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        param = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
        local = torch.zeros(2)
        param._local_tensor = local
        assert param.to_local().data_ptr() == local.data_ptr(), "Slot.restore_storage has no effect"


def test_one_tensor_is_gathered_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    with process_groups.fake_process_group(0, 3):
        gathered = torch.zeros(6)
        process_groups.all_gather_single(gathered, torch.ones(2), group=dist.group.WORLD)
    assert gathered.tolist() == [1.0] * 6
    assert not [each for each in recwarn if "all_gather" in str(each.message)]


def test_a_mesh_forgets_its_groups() -> None:
    with process_groups.fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        group = weakref.ref(mesh.get_group("a"))
        process_groups.forget_groups(mesh["a"])
    gc.collect()
    assert group() is None, "something else refers to the groups of a mesh"


def test_fake_ranks_are_the_same_ones_in_each_block() -> None:
    ranks = process_groups.FakeRanks(1, 4)
    with ranks.there(), ranks.there():
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        group = mesh.get_group("b")
        local = DTensor.from_local(torch.ones(2), mesh["b"], [Replicate()])
    assert not dist.is_initialized() and not ranks.inside
    with process_groups.fake_process_group(0, 2):
        init_device_mesh("cpu", (2,), mesh_dim_names=("b",))
        with pytest.raises(RuntimeError, match="another process group"), ranks.there():
            pass
    with pytest.raises(KeyError), ranks.there():
        assert mesh.get_group("b") is group and process_groups.called(group.group_name) is group
        assert dist.get_process_group_ranks(group) == [0, 1]
        assert (local + local).redistribute(mesh["b"], [Replicate()]).to_local().tolist() == [2, 2]
        more = dist.new_group([0, 1])
        raise KeyError
    assert not dist.is_initialized()
    with ranks.there():
        assert process_groups.called(more.group_name) is more
