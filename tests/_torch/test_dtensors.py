"""Contracts of what `fxshard._torch.dtensors` uses of torch."""

import inspect
import io
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from fxshard._torch import dtensors, process_groups
from tests.subclasses import Narrow


def test_dtensors_stand_on_their_local_tensor() -> None:
    with process_groups.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(2, 3)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        assert dtensors.local_tensor(sharded).data_ptr() == local.data_ptr()
        other = torch.zeros(2, 3)
        dtensors.set_local_tensor(sharded, other)
        assert dtensors.local_tensor(sharded) is other
        assert torch.equal(sharded.to_local(), other) and sharded.shape == (4, 3)


def test_what_is_inside_of_a_wrapper() -> None:
    """Of one that says what is gathered; TwoTensor says nothing of that."""
    inner = torch.ones(2, 3)
    narrow, two = Narrow(inner), TwoTensor(inner, inner.clone())
    assert dtensors.plain(narrow) is inner
    assert dtensors.plain(two) is two and dtensors.plain(inner) is inner
    assert dtensors.plain(nn.Parameter(narrow)).data_ptr() == inner.data_ptr()
    with process_groups.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        sharded = DTensor.from_local(inner, mesh, [Shard(0)], run_check=False)
        dtensors.set_local_tensor(sharded, narrow)
        assert dtensors.held_part(sharded) is narrow and dtensors.local_part(sharded) is inner


def test_fsdp2_asks_for_what_is_gathered_by_these_names() -> None:
    source = "".join(inspect.getsource(_fsdp_param).split())
    assert f"hasattr(self._sharded_local_tensor,{dtensors.PRE!r})".replace("'", '"') in source
    assert f".{dtensors.POST}(" in source


def test_a_dtensor_is_made_like_another() -> None:
    with process_groups.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        like = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        local = torch.zeros(2, 3)
        made = dtensors.dtensor_like(local, like)
        assert dtensors.local_tensor(made) is local and not made.requires_grad
        assert (made.shape, made.placements) == (like.shape, like.placements)
        assert made.device_mesh == mesh


def test_a_dtensor_takes_over_the_storage_offset_of_its_local_tensor() -> None:
    with process_groups.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.arange(8.0)[2:].view(2, 3)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        assert sharded.storage_offset() == 2, "_torch.dtensors.stand_in may go"
        with pytest.raises(RuntimeError, match="invalid python storage"):
            torch.save(sharded, io.BytesIO())
        like = dtensors.stand_in(local)
        assert (like.shape, like.dtype, like.storage_offset()) == (local.shape, local.dtype, 0)
        shape, stride = (4, 3), (3, 1)
        savable = nn.Parameter(
            DTensor.from_local(like, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        )
        dtensors.set_local_tensor(savable, local)
        torch.save(savable, io.BytesIO())
        assert torch.equal(savable.to_local(), local) and savable.stride() == stride
        assert dtensors.stand_in(local[:0]).shape == (0, 3)
        inner = {name: getattr(savable, name) for name in savable.__tensor_flatten__()[0]}
        spec = savable.__tensor_flatten__()[1]
        theirs = DTensor.__tensor_unflatten__(inner, spec, savable.size(), stride)
        assert theirs.storage_offset() == 2, "dtensors.unflattened may go"
        again = dtensors.unflattened(inner, spec, savable.size(), stride)
        assert again.storage_offset() == 0 and torch.equal(again.to_local(), local)


def test_dtensor_asks_its_handlers_before_its_own_dispatch() -> None:
    aten_add = torch.ops.aten.add.Tensor
    with process_groups.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        before = dict(dtensors.dtensor_handlers())
        dtensors.dtensor_handlers()[aten_add] = lambda *_: torch.tensor(7.0)
        try:
            assert torch.ops.aten.add.Tensor(x, x).item() == 7
            with dtensors.without_dtensor_handler(aten_add):
                assert isinstance(x + x, DTensor)
            assert torch.ops.aten.add.Tensor(x, x).item() == 7
        finally:
            del dtensors.dtensor_handlers()[aten_add]
        assert dtensors.dtensor_handlers() == before


def test_rows_of_a_tensor_are_those_of_the_rank() -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    for ranks, rank, rows in (
        *((2, 0, slice(0, 3)), (2, 1, slice(3, 5))),
        *((4, 2, slice(4, 5)), (4, 3, slice(5, 5))),
    ):
        with process_groups.fake_process_group(rank, ranks):
            mesh = init_device_mesh("cpu", (ranks,))
            local = whole[rows].clone()
            like = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(2, 1)
            )
            made = dtensors.sharded_like(whole, like)
            assert made.placements == like.placements and made.shape == whole.shape
            assert torch.equal(dtensors.local_part(made), whole[rows])
    assert dtensors.local_part(whole) is whole and dtensors.sharded_like(whole, whole) is whole


def test_two_dimensions_of_a_mesh_are_joined_again() -> None:
    with process_groups.fake_process_group(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        both = dtensors.joined(mesh["dp"], mesh["tp"])
        assert both == mesh and both.mesh_dim_names == ("dp", "tp")
        assert dtensors.inner_of(both) == mesh["tp"] and dtensors.inner_of(mesh["dp"]) is None
        assert dtensors.root_of(mesh["tp"]) == mesh
        assert dtensors.group_id(mesh["tp"]) == mesh.get_group("tp").group_name
        flat = dtensors.flattened(mesh)
        assert flat.mesh_dim_names == ("dp_tp",) and flat.size() == 4
        assert dtensors.flattened(mesh) == flat
        assert dtensors.root_of(flat)["dp_tp"].get_group() is flat.get_group()
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        with pytest.raises(RuntimeError):
            dtensors.joined(other, mesh["tp"])
        with pytest.raises(RuntimeError, match="no names"):
            dtensors.joined(init_device_mesh("cpu", (4,)), mesh["tp"])


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("rows", [8, 7, 3])
def test_shards_of_shards_are_strided_as_fsdp2_has_them(rank: int, rows: int) -> None:
    """Each rank has a chunk of its chunk: as FSDP2 shards parameters of tensor parallelism."""
    with process_groups.fake_process_group(rank, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = torch.arange(float(rows))
        outer = dtensors.under(Shard(0), [Shard(0)], [2])
        assert not outer.is_shard() and dtensors.sharded_dim(outer) == 0
        assert dtensors.under(Shard(0), [Shard(1)], [2]) == Shard(0)
        assert dtensors.under(Replicate(), [Shard(0)], [2]) == Replicate()
        assert dtensors.sharded_dim(Replicate()) is None
        like = DTensor.from_local(
            torch.empty(0), mesh, [outer, Shard(0)], shape=torch.Size([rows]), stride=(1,)
        )
        chunks = full.chunk(2)
        inner = chunks[rank % 2].chunk(2) if rank % 2 < len(chunks) else ()
        expected = inner[rank // 2] if rank // 2 < len(inner) else full[:0]
        assert torch.equal(dtensors.sharded_like(full, like).to_local(), expected)
        if rows % 4 == 0:
            module = nn.Linear(1, rows, bias=False)
            with torch.no_grad():
                module.weight.copy_(full[:, None])
            placed = distribute_tensor(module.weight, mesh["tp"], [Shard(0)], src_data_rank=None)
            module.weight = nn.Parameter(placed)
            fully_shard(module, mesh=mesh["dp"])
            assert module.weight.placements == like.placements
            assert torch.equal(module.weight.to_local()[:, 0], expected)


def test_every_step_between_dtensors_and_local_tensors_is_told() -> None:
    """What decides about the backward of DTensors is in the calls of these functions."""
    with process_groups.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        told: list[tuple[str, tuple[Any, ...]]] = []
        local = torch.ones(2, 3, requires_grad=True)
        before = [function.apply for function in dtensors.FUNCTIONS]
        with dtensors.applied(lambda *call: told.append(call)):
            sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            full = sharded.redistribute(mesh, [Replicate()])
            out = full.to_local(grad_placements=[Replicate()])
        assert [function.apply for function in dtensors.FUNCTIONS] == before
        assert [what for what, _ in told] == ["_FromTorchTensor", "Redistribute", "_ToTorchTensor"]
        assert [type(tensor) for _, (tensor, *_) in told] == [torch.Tensor, DTensor, DTensor]
        assert all((Shard(0),) in map(tuple_of, args) for _, args in told[:1])
        assert any((Replicate(),) == tuple_of(each) for each in told[1][1])
        assert any((Replicate(),) == tuple_of(each) for each in told[2][1])
        assert type(dtensors.local_tensor(full)) is torch.Tensor  # waited for
        node = out.grad_fn
        for _ in told:
            assert dtensors.is_of_dtensor(node)
            node = node.next_functions[0][0]  # type: ignore[union-attr]
        assert dtensors.constants_of(local) == ()
        assert dtensors.constants_of(full) != dtensors.constants_of(sharded)


@pytest.mark.parametrize("forgets", [False, True])
def test_an_equal_mesh_of_another_time_is_forgotten(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else results of its operators are on the mesh before, whose groups are gone."""
    if not forgets:
        monkeypatch.setattr(process_groups, "forget_meshes", lambda: None)
    results = []
    for _ in range(2):
        with process_groups.fake_process_group(0, 2):
            mesh = init_device_mesh("cpu", (2,))
            local = DTensor.from_local(torch.ones(7, 5), mesh, [Shard(0)], run_check=False)
            assert dtensors.is_dtensor(local) and not dtensors.is_dtensor(local.to_local())
            result = (local + local).redistribute(mesh, [Replicate()])
            results.append((local + local).device_mesh is result.device_mesh is mesh)
    dtensors.forget_meshes()
    assert results[1] == forgets, "nothing needs to be forgotten"


def tuple_of(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else None


def test_dtensors_do_not_know_what_anomaly_mode_asks() -> None:
    """Else `fxshard.runtime.dtensors` need not answer it."""
    with process_groups.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        flags = DTensor.from_local(torch.ones(2, dtype=torch.bool), mesh, [Shard(0)])
        asks = torch.ops.aten._is_any_true.default
        unanswered = dtensors.without_dtensor_handler(asks)  # another test's model may answer it
        with unanswered, pytest.raises(NotImplementedError, match="_is_any_true"):
            asks(flags)


@pytest.mark.parametrize(("shape", "names"), [((4,), ("dp",)), ((2, 2), ("dp", "tp")), ((4,), ())])
def test_a_mesh_is_made_of_its_fields(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    with process_groups.fake_process_group(1, 4):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names or None)
        fields = dtensors.mesh_fields(mesh)
        made = dtensors.mesh_of(**fields)
        assert made == mesh and made.get_coordinate() == mesh.get_coordinate()
        for name in names:
            assert made[name].size() == mesh[name].size()
            assert made[name].get_local_rank() == mesh[name].get_local_rank()
    elsewhere = dtensors.mesh_of(**fields)  # in a process that is no rank
    assert elsewhere.get_rank() == 1 and elsewhere.shape == mesh.shape
    assert elsewhere.get_coordinate() == mesh.get_coordinate()
    assert dtensors.mesh_fields(elsewhere) == fields
    with pytest.raises(ValueError, match="rank 7 is not in"):
        dtensors.mesh_of(**fields | {"rank": 7})
