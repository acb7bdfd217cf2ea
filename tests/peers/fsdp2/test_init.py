"""test_fully_shard_init.py: meshes, what is sharded and how, models on the meta device."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

import fxshard
from tests.oracles import count_collectives
from tests.peers.fsdp2.common import MLP, Transformer, made, pair, shard, train_alike
from tests.ranks import told

INTEGERS = (
    [torch.uint8],
    [torch.int64],
    [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64],
)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# -- meshes ----------------------------------------------------------------------------------------


def three_dimensions(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size, 1, 1))
    return told(lambda: fxshard.fully_shard(MLP(8), mesh=mesh))


def test_a_mesh_of_three_dimensions_is_refused(ranks: Any) -> None:
    for said in ranks(4).run(three_dimensions):
        assert "ConfigError" in said and "Give its data-parallel part" in said, said


def unnamed(rank: int, world_size: int) -> None:
    """FSDP2 asks for names of a 2-D mesh; here it needs none."""
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    ref, model = pair(lambda: MLP(8), mesh=mesh)
    train_alike(ref, model, lambda: (torch.randn(2, 8),), 3)


def test_a_hybrid_mesh_without_names(ranks: Any) -> None:
    ranks(4).run(unnamed)


def assert_trains_on_both(first: Any, second: Any, x: Tensor) -> None:
    """The same on two meshes of the same ranks."""
    losses = [each(x).sum() for each in (first, second)]
    sum(losses).backward()
    assert_close(losses[1], losses[0])
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine.device_mesh.mesh, theirs.device_mesh.mesh)
        assert_close(mine.to_local(), theirs.to_local())
        assert_close(mine.grad.to_local(), theirs.grad.to_local())


def from_one_group(rank: int, world_size: int) -> None:
    grid = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    group = grid["dp"].get_group()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    first = made(lambda: MLP(8))
    second = copy.deepcopy(first)
    shard(first, mesh=grid["dp"])
    shard(second, mesh=mesh)
    torch.manual_seed(grid["dp"].get_local_rank())
    x = torch.randn(4, 8)
    assert_trains_on_both(first, second, x)
    alone = made(lambda: MLP(8))
    alone(x).sum().backward()
    for mine, theirs in zip(second.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(theirs.grad, group=group)
        assert_close(mine.grad.full_tensor(), theirs.grad / 2)


def test_a_mesh_made_of_a_group(ranks: Any) -> None:
    ranks(4).run(from_one_group)


def from_two_groups(rank: int, world_size: int) -> None:
    names = ("replicate", "shard")
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    groups = [grid.get_group(name) for name in names]
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=grid.mesh, mesh_dim_names=names)
    first = made(lambda: MLP(8))
    second = copy.deepcopy(first)
    shard(first, mesh=grid)
    shard(second, mesh=mesh)
    x = torch.randn(4, 8)
    assert_trains_on_both(first, second, x)
    # Newer torches: reduce-scatters in a group of their own, of the ranks of the shard group.
    second.set_separate_reduce_scatter_group()
    for each in (first, second):
        each.zero_grad()
    with count_collectives() as seen:
        assert_trains_on_both(first, second, x)
    ranks = tuple(dist.get_process_group_ranks(groups[1]))
    scatters = [call for call in seen.calls if call.kind == "reduce_scatter"]
    assert {call.ranks for call in scatters} == {ranks}
    assert len({call.group for call in scatters}) == 2


def test_a_mesh_made_of_two_groups(ranks: Any) -> None:
    ranks(4).run(from_two_groups)


def replicas(rank: int, world_size: int) -> None:
    """Replicas that differ, parameters and buffers, become alike by a broadcast of local shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = made(Transformer)
    model.buf = nn.Buffer(torch.ones(model.args.dim))
    shard(model, mesh=mesh)
    group = mesh.get_group("replicate")

    def local(tensor: Any) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def alike() -> list[bool]:
        found = []
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            parts = [torch.empty_like(local(tensor)) for _ in range(2)]
            dist.all_gather(parts, local(tensor.detach()).contiguous(), group=group)
            found.append(torch.equal(*parts))
        return found

    if mesh.get_local_rank("replicate"):
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.detach().fill_(1337)
    assert not any(alike())
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        dist.broadcast(local(tensor.detach()), src=rank % 2, group=group)
    assert all(alike())
    model(model.tokens(2, 16)).sum().backward()


def test_replicas_are_made_alike_by_a_broadcast(ranks: Any) -> None:
    ranks(4).run(replicas)


# -- what is sharded -------------------------------------------------------------------------------


def chunks(rank: int, world_size: int) -> None:
    """Sizes that are not divisible, and a layer that two modules hold."""
    for shared in (False, True):
        model = made(lambda: nn.Sequential(*(MLP(3, multiplier=3) for _ in range(3))))
        if shared:
            model[0].in_proj = model[1].in_proj
        whole = [param.detach().clone() for param in model.parameters()]
        fxshard.fully_shard(model)
        mesh = init_device_mesh("cpu", (world_size,))
        assert len(list(model.parameters())) == len(whole)
        for mine, theirs in zip(model.parameters(), whole, strict=True):
            assert isinstance(mine, DTensor) and mine.device_mesh == mesh
            assert (mine.size(), mine.stride()) == (theirs.size(), theirs.stride())
            assert mine.placements == (Shard(0),)
            parts = theirs.chunk(world_size)
            assert torch.equal(mine.to_local(), parts[rank])


def test_parameters_are_chunks_of_rows(ranks: Any) -> None:
    ranks(2).run(chunks)


def odd_parameters(rank: int, world_size: int) -> dict[str, str]:
    scalar = MLP(3)
    scalar.scalar_p = nn.Parameter(torch.tensor(1.0))
    strided = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    return {
        "scalar": told(lambda: fxshard.fully_shard(scalar)),
        "strided": told(lambda: fxshard.fully_shard(strided)),
    }


ODD = {
    "scalar": "'scalar_p' is a scalar (shape []), which has no dim 0 to shard",
    "strided": "Make it contiguous: nn.Parameter(x.contiguous())",
}


def test_parameters_that_are_refused(ranks: Any) -> None:
    for found in ranks(2).run(odd_parameters):
        for case, said in ODD.items():
            assert said in found[case], (case, found[case])


def units(rank: int, world_size: int) -> None:
    """Each call holds what earlier calls inside of it have left; a layer held twice counts once."""
    model: Any = nn.Sequential(MLP(8), MLP(8))
    for part in (model[0].in_proj, model[0].out_proj, model):
        fxshard.fully_shard(part)
    model(torch.randn(2, 8)).sum().backward()
    held = {unit.fqn: {param.fqn for param in unit.params} for unit in model.plan.units}
    assert held == {
        "": {f"1.{part}.{kind}" for part in ("in_proj", "out_proj") for kind in ("weight", "bias")},
        "0.in_proj": {"0.in_proj.weight", "0.in_proj.bias"},
        "0.out_proj": {"0.out_proj.weight", "0.out_proj.bias"},
    }
    nested: Any = nn.Sequential(MLP(8, buffer=True), MLP(8, buffer=True))
    for part in (nested[0], nested):
        fxshard.fully_shard(part)
    nested(torch.randn(2, 8)).sum().backward()
    names = {fqn for fqn, _ in nested.named_parameters()}
    held = {unit.fqn: {param.fqn for param in unit.params} for unit in nested.plan.units}
    assert held == {"": {n for n in names if n[0] == "1"}, "0": {n for n in names if n[0] == "0"}}
    twice: Any = nn.Sequential(*[MLP(8)] * 2)
    for model in (twice, MLP(8)):
        fxshard.fully_shard(model)
        model(torch.randn(2, 8)).sum().backward()
        (root,) = model.plan.units
        assert {param.fqn for param in root.params} == {n for n, _ in model.named_parameters()}
    shared: Any = nn.Sequential(*(MLP(8, buffer=True) for _ in range(3)))
    shared[0].in_proj.weight = shared[2].in_proj.weight = shared[1].in_proj.weight
    shared[1].buffer = shared[2].buffer
    fxshard.fully_shard(shared)
    shared(torch.randn(2, 8)).sum().backward()
    (root,) = shared.plan.units
    assert len(root.params) == len(list(shared.parameters())) == 10


def test_units_hold_what_earlier_calls_left(ranks: Any) -> None:
    ranks(2).run(units)


class Dtypes(nn.Module):
    """A frozen parameter of another dtype, which forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        low = torch.empty(256, 256, dtype=torch.float8_e4m3fn)
        self.low = nn.Parameter(low, requires_grad=False)
        self.full = nn.Parameter(torch.empty(256, 256))

    def forward(self, x: Any) -> None:
        return None


def frozen_float8(rank: int, world_size: int) -> None:
    model: Any = Dtypes()
    fxshard.fully_shard(model)
    assert model(0) is None
    assert model.low.dtype == torch.float8_e4m3fn and model.full.dtype == torch.float32


class Counted(nn.Module):
    """Parameters of integers, which forward reads (torch's own does not)."""

    def __init__(self, dtypes: Sequence[torch.dtype], frozen: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        if frozen:
            self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        for i, dtype in enumerate(dtypes):
            whole = torch.randint(0, 127, (16,), dtype=dtype)
            self.register_parameter(f"whole{i}", nn.Parameter(whole, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        for name, param in self.named_parameters(recurse=False):
            assert name == "frozen" or not param.is_floating_point()
            out = out * (1 + param.to(out.dtype) / 128)
        return out


def of_integers(
    rank: int, world_size: int, dtypes: Sequence[torch.dtype], half: bool, frozen: bool
) -> None:
    torch.manual_seed(0)
    alone = Counted(dtypes, frozen)
    model: Any = copy.deepcopy(alone)
    fxshard.fully_shard(model, mp_policy=BF16 if half else MixedPrecisionPolicy())
    batches = [torch.randn(4, 16) for _ in range(world_size)]
    with count_collectives() as seen:
        model(batches[rank]).sum().backward()
    low = torch.bfloat16 if half else torch.float32
    sizes = [(p.numel(), low if p.is_floating_point() else p.dtype) for p in alone.parameters()]
    assert seen.nbytes("all_gather") == sum(n * dtype.itemsize for n, dtype in sizes)
    assert seen.nbytes("reduce_scatter") == sum(p.numel() * 4 for p in alone.linear.parameters())
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        own = theirs.chunk(world_size)[rank]  # gloo, asked by DTensor, gathers no int16
        assert mine.dtype is theirs.dtype and torch.equal(mine.to_local(), own)
    if half:
        alone.linear.to(low)
        if frozen:
            alone.frozen.data = alone.frozen.data.to(low)
    for x in batches:  # each rank's gradients are made in low precision, and added up in fp32
        alone(x.to(low)).sum().backward()
    for name, theirs in alone.linear.named_parameters():
        mine = model.linear.get_parameter(name).grad.full_tensor()
        limits: Any = {"rtol": 2e-2, "atol": 2e-2} if half else {}
        assert_close(mine, theirs.grad.float() / world_size, **limits)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtypes", INTEGERS, ids=len)
def test_parameters_of_integers(
    ranks: Any, dtypes: Sequence[torch.dtype], half: bool, frozen: bool
) -> None:
    ranks(2).run(of_integers, dtypes, half, frozen)


def test_a_frozen_parameter_of_another_dtype(ranks: Any) -> None:
    ranks(2).run(frozen_float8)


# -- the meta device -------------------------------------------------------------------------------


def assert_filled_and_trained(model: Any, dim: int) -> None:
    """By `to_empty` and each module's `reset_parameters`."""
    model.to_empty(device="cpu")
    assert all(param.device.type == "cpu" for param in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.detach().fill_(1337)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for param in model.parameters():
        local = param.to_local()
        assert local.numel() == 0 or not (local == 1337).any()
    assert not any((buffer == 1337).any() for buffer in model.buffers())
    model(torch.randn(4, dim)).sum().backward()
    optimizer.step()
    assert all(param.to_local().isfinite().all() for param in model.parameters())


def on_meta(rank: int, world_size: int, dim: int, policy: MixedPrecisionPolicy) -> None:
    """Sharded under the meta device, without a mesh, and after it, over one."""
    with torch.device("meta"):
        parts = [MLP(dim, multiplier=1, bias=False, buffer=first) for first in (True, False)]
        model = nn.Sequential(*parts)
        shard(model, mp_policy=policy)
    assert_filled_and_trained(model, dim)
    with torch.device("meta"):
        model = nn.Sequential(MLP(dim, buffer=True), MLP(dim))
    mesh = init_device_mesh("cpu", (world_size,))
    shard(model, mesh=mesh, mp_policy=policy)
    assert_filled_and_trained(model, dim)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [8, 3, 1])
def test_a_model_on_meta_is_filled(ranks: Any, dim: int, policy: Any) -> None:
    ranks(4).run(on_meta, dim, policy)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = (nn.Linear(3, 3, bias=False) for _ in range(2))
        self.weight_norm = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.layer1(x)).sum() + self.weight_norm.sum()


def replaced_later(rank: int, world_size: int) -> None:
    """A parameter is made anew of others, between sharding and the first forward."""
    with torch.device("meta"):
        model: Any = Normed()
        shard(model)
    for layer in (model.layer1, model.layer2):
        layer.to_empty(device="cpu")
        layer.reset_parameters()
    with torch.no_grad():
        norms = [torch.linalg.norm(layer.weight, dim=1) for layer in (model.layer1, model.layer2)]
    model.weight_norm = nn.Parameter(norms[0] + norms[1])
    loss = model(torch.randn(3, 3))
    loss.backward()
    assert loss.isfinite()


def test_a_parameter_that_is_made_anew_before_forward(ranks: Any) -> None:
    ranks(2).run(replaced_later)


def groups_of_units(rank: int, world_size: int) -> None:
    """Units that are resharded to two of four ranks, each by itself and two in a list."""

    def mlps() -> nn.Module:
        return nn.Sequential(*(MLP(8) for _ in range(3)))

    known = dist.distributed_c10d._world.pg_map
    shard(made(mlps), reshard_after_forward=2)
    before = len(known)
    ref, model = pair(mlps, reshard_after_forward=2)
    other = made(mlps)
    fxshard.fully_shard([other[0], other[1]], reshard_after_forward=2)
    shard(other, other[2], reshard_after_forward=2)
    assert len(known) == before, "one group of the same ranks for all units and models"
    torch.manual_seed(rank)
    for each in (model, other):
        train_alike(copy.deepcopy(ref), each, lambda: (torch.randn(2, 8),), 3)


def test_units_of_one_group_of_ranks_share_its_communicator(ranks: Any) -> None:
    ranks(4).run(groups_of_units)
