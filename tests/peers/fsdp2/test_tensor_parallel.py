"""What torch's tests of `fully_shard` do on meshes with tensor parallelism; those of FSDP1 too."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

import fxshard
from tests.oracles import count_collectives
from tests.peers.fsdp2.common import MLP, adam, average_grads, shard
from tests.peers.fsdp2.test_init import assert_filled_and_trained
from tests.peers.fsdp2.test_state_dict import assert_saves_and_loads
from tests.ranks import told

PLAN = {"*.in_proj": ColwiseParallel(), "*.out_proj": RowwiseParallel()}


def two_mlps(mesh: DeviceMesh, data: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A plain model, and the same one, parallelised and sharded over the dimensions `data`."""
    torch.manual_seed(42)
    plain = nn.Sequential(MLP(8), MLP(8)).to(dtype)
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], PLAN)
    return plain, shard(model, mesh=mesh[data])


def trained(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    """Beside data parallelism alone: gradients, their norm, and parameters."""
    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "dp", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    ref, model = two_mlps(mesh, names[:-1], dtype=torch.float64)  # gradients are large: see below
    data = mesh[names[:-1]]
    group = (data if data.ndim == 1 else data._flatten("data")).get_group()
    optimizers = adam(ref), adam(model)
    torch.manual_seed(rank // shape[-1])
    for _ in range(10):
        x = torch.randn(4, 8, dtype=torch.float64)
        # Outputs grow: those that shrink are soon zeros, after a ReLU, and so are all gradients.
        losses = [-1e3 * each(x).sum() for each in (ref, model)]
        for loss in losses:
            loss.backward()
        assert_close(*losses)
        average_grads(ref, group)
        pairs = list(zip(ref.parameters(), model.parameters(), strict=True))
        for theirs, mine in pairs:
            assert isinstance(mine.grad, DTensor) and mine.grad.placements == mine.placements
            assert_close(mine.grad.full_tensor(), theirs.grad)
        with count_collectives() as seen:
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1, foreach=True)
        expected = torch.nn.utils.clip_grad_norm_(ref.parameters(), 1)
        assert expected > 1  # or nothing is clipped
        assert_close(total.full_tensor(), expected)
        assert seen.kinds() == ["all_reduce"] * 2  # over shards and over "tp"; replicas are alike
        for theirs, mine in pairs:
            assert_close(mine.grad.full_tensor(), theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for theirs, mine in pairs:
        assert_close(mine.full_tensor(), theirs)


def test_two_dimensions_train_as_data_parallelism(ranks: Any) -> None:
    ranks(4).run(trained, (2, 2))


def stacked(
    rank: int, world_size: int, shape: tuple[int, ...], dim: int, reshard: bool, recomputes: bool
) -> None:
    """Neither dimension of the mesh divides all rows: activations are DTensors, which know of it.
    Beside data parallelism alone."""
    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "dp", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = mesh[names[:-1]]
    group = (data if data.ndim == 1 else data._flatten("data")).get_group()
    torch.manual_seed(42)
    ref = nn.Sequential(MLP(dim, multiplier=3), MLP(dim), MLP(dim, multiplier=3))
    plan = {
        "*.in_proj": ColwiseParallel(use_local_output=False),
        "[01].out_proj": RowwiseParallel(use_local_output=False),
        "2.out_proj": RowwiseParallel(),
    }
    model: Any = parallelize_module(copy.deepcopy(ref), mesh["tp"], plan)
    for module in model:
        if recomputes:
            checkpoint(module)
        fxshard.fully_shard(module, mesh=data, reshard_after_forward=reshard)
    fxshard.fully_shard(model, mesh=data, reshard_after_forward=reshard)
    for mine, theirs in zip(model.parameters(), ref.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs)
    optimizers = adam(ref), adam(model)
    torch.manual_seed(43 + rank // shape[-1])
    for step in range(10):
        x = torch.randn(8, dim)
        losses = [each(x).sum() for each in (ref, model)]
        for loss in losses:
            loss.backward()
        assert_close(*losses)
        average_grads(ref, group)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    for param in model.parameters():
        assert isinstance(param, DTensor) and param.device_mesh.mesh_dim_names == names


STACKS = pytest.mark.parametrize(
    ("dim", "reshard", "recomputes"),
    list(itertools.product([3, 5, 16, 17], [False, True], [False, True])),
)


@pytest.mark.sample(2)
@STACKS
def test_two_dimensions_that_do_not_divide_the_rows(
    ranks: Any, dim: int, reshard: bool, recomputes: bool
) -> None:
    ranks(4).run(stacked, (2, 2), dim, reshard, recomputes)


@pytest.mark.slow
@STACKS
def test_three_dimensions_that_do_not_divide_the_rows(
    ranks: Any, dim: int, reshard: bool, recomputes: bool
) -> None:
    ranks(8).run(stacked, (2, 2, 2), dim, reshard, recomputes)


@pytest.mark.slow
def test_three_dimensions_train_as_data_parallelism(ranks: Any) -> None:
    ranks(8).run(trained, (2, 2, 2))


def placed(rank: int, world_size: int) -> None:
    """As torch's own, by default and along other dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def last(param: nn.Parameter) -> Shard | None:
        return Shard(param.ndim - 1)

    def other(param: Any) -> Shard | None:
        """Than the one that tensor parallelism shards."""
        dims = [each.dim for each in param.placements if isinstance(each, Shard)]
        return Shard(param.ndim - 1 - dims[0] if dims else 0)

    for fn in (None, last, other):
        torch.manual_seed(0)
        model = parallelize_module(nn.Sequential(MLP(8), MLP(8)), mesh["tp"], PLAN)
        theirs = fsdp2(copy.deepcopy(model), mesh=mesh["dp"], shard_placement_fn=fn)
        ours = fxshard.fully_shard(model, mesh=mesh["dp"], shard_placement_fn=fn)
        assert_placed_alike(ours, theirs)
        x = torch.randn(4, 8)
        for each in (ours, theirs):
            each(x).sum().backward()
        for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), expected.grad.to_local())
    odd = parallelize_module(nn.Sequential(MLP(9, multiplier=3)), mesh["tp"], PLAN)
    theirs = fsdp2(copy.deepcopy(odd), mesh=mesh["dp"])
    assert_placed_alike(fxshard.fully_shard(odd, mesh=mesh["dp"]), theirs)


def assert_placed_alike(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.placements, mine.device_mesh) == (other.placements, other.device_mesh)
        assert (mine.size(), mine.stride()) == (other.size(), other.stride())
        assert torch.equal(mine.to_local(), other.to_local())


def test_parameters_are_where_fsdp2_has_them(ranks: Any) -> None:
    ranks(4).run(placed)


def from_meta(rank: int, world_size: int, dim: int) -> None:
    """Filled by each module, and then with a value that all ranks know."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(42)
    with torch.device("meta"):
        model = parallelize_module(nn.Sequential(MLP(dim, buffer=True)), mesh["tp"], PLAN)
        shard(model, *model[0].children(), mesh=mesh["dp"])
    assert all(param.is_meta for param in model.parameters())
    assert_filled_and_trained(model, dim)
    model.zero_grad()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    model(torch.ones(2, dim)).sum().backward()
    for param in model.parameters():
        assert torch.equal(param.full_tensor(), torch.full(param.shape, 0.1))
        assert param.grad.full_tensor().isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, 3])
def test_the_meta_device_in_two_dimensions(ranks: Any, dim: int) -> None:
    ranks(4).run(from_meta, dim)


def saved(rank: int, world_size: int, shape: tuple[int, ...], dim: int) -> None:
    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "dp", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(42)
    plain = nn.Sequential(*(MLP(dim) for _ in range(3)))
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], PLAN)
    shard(model, mesh=mesh[names[:-1]])
    state, whole = model.state_dict(), plain.state_dict()
    assert state.keys() == whole.keys()
    for fqn, value in state.items():
        assert isinstance(value, DTensor)
        assert_close(value.full_tensor(), whole[fqn])
    assert_saves_and_loads(model, rank)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dim", [4, 6, 8, 10])
def test_states_of_two_dimensions_are_saved_and_loaded(ranks: Any, dim: int) -> None:
    ranks(4).run(saved, (2, 2), dim)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [4, 6, 8, 10])
@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)], ids=str)
def test_states_of_eight_ranks_are_saved_and_loaded(
    ranks: Any, shape: tuple[int, ...], dim: int
) -> None:
    """On the meshes that torch's tests have: four ranks of tensor parallelism; a hybrid one."""
    ranks(8).run(saved, shape, dim)


class Looks(nn.Module):
    """Asserts what its weight is where forward reads it: a DTensor, in the dtype of compute."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.in_proj.weight, self.out_proj.weight):
            if isinstance(weight, DTensor):
                assert weight.dtype == weight._spec.tensor_meta.dtype == torch.bfloat16
                assert weight.to_local().dtype == torch.bfloat16
        return self.out_proj(self.in_proj(x).relu())


def in_bf16(rank: int, world_size: int, compiled: bool) -> None:
    """Beside torch's tensor parallelism of the same model in bf16, without FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(42)
    plain = nn.Sequential(Looks(), Looks())
    ref, model = (
        parallelize_module(copy.deepcopy(plain).to(dtype), mesh["tp"], PLAN)
        for dtype in (torch.bfloat16, torch.float32)
    )
    shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    run = torch.compile(model, backend="aot_eager") if compiled else model
    torch.manual_seed(43 + rank // 2)
    x = torch.randn(4, 8)
    losses = [run(x).sum(), ref(x.bfloat16()).sum()]
    assert losses[0].dtype == torch.bfloat16 and torch.equal(*losses)
    for loss in losses:
        loss.backward()
    params: Any = zip(model.parameters(), ref.parameters(), strict=True)
    for mine, theirs in params:
        for each in (mine, mine.grad):
            assert each.dtype == each._spec.tensor_meta.dtype == torch.float32
        grad = theirs.grad.full_tensor().float()
        dist.all_reduce(grad, group=mesh["dp"].get_group())
        assert torch.equal(mine.grad.full_tensor(), grad / 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_forward_reads_dtensors_in_the_dtype_of_compute(ranks: Any, compiled: bool) -> None:
    ranks(4).run(in_bf16, compiled)


def synchronised(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(MLP(8), MLP(8)), mesh["tp"], PLAN)
    return told(lambda: fxshard.compile(model, mesh=mesh, sync_module_states=True))


def test_states_of_rank_0_are_refused(ranks: Any) -> None:
    for said in ranks(4).run(synchronised):
        assert "(sync_module_states): fxshard does not fill those" in said, said
