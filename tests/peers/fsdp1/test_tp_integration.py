"""torch's test_fsdp_tp_integration.py: FSDP over one dimension of a mesh, tensors over another."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

from tests.fsdp2 import full
from tests.oracles import Collectives, count_collectives
from tests.peers.fsdp1.shared import FULL, GRAD_OP, compiled, ddp

# Ranks of one "tp" group have batches of their own: between the two layers each has all of them.
PLAN = {
    "net1": ColwiseParallel(input_layouts=Shard(0)),
    "net2": RowwiseParallel(output_layouts=Shard(0)),
}


class Layers(nn.Module):
    """f[batch, 3, 5] -> f[batch, 3, 12]; `net3` is no part of the plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net1, self.net2, self.net3 = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.net3(self.net2(self.net1(x).relu()))


def two_dimensions() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def average_over_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """What data parallelism over all ranks would do to gradients, beyond what FSDP does.

    Those of `net3` are of this rank's batches, all others the sum over the "tp" group.
    """
    group = mesh.get_group("tp")
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor)
        local = param.grad.to_local()
        if name.startswith("net3"):
            dist.all_reduce(local, group=group)
        local /= group.size()


def trained(rank: int, world_size: int, strategy: Any, offload: bool) -> None:
    mesh = two_dimensions()
    reference = ddp(Layers())
    model = parallelize_module(Layers(), mesh["tp"], PLAN)
    assert isinstance(model.net1.weight, DTensor) and isinstance(model.net2.weight, DTensor)
    options = {"strategy": strategy, "offload": CPUOffload(offload)}
    model = compiled(model, units=[], mesh=mesh["dp"], **options)
    both = reference, model
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in both]
    torch.manual_seed(rank + 1)
    for _ in range(3):
        x = torch.rand(2, 3, 5)
        expected, out = (each(x) for each in both)
        assert_close(out, expected)
        for each in (expected, out):
            each.square().sum().backward()
        average_over_tensors(model, mesh)
        for name, param in reference.module.named_parameters():
            assert param.grad.count_nonzero() > param.numel() // 4, name
            assert_close(full(model.get_parameter(name).grad), param.grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in reference.module.named_parameters():
        assert_close(full(model.get_parameter(name)), param)


GRID = pytest.mark.parametrize(
    ("strategy", "offload"), list(itertools.product((FULL, GRAD_OP), (False, True)))
)


@GRID
def test_as_data_parallelism(ranks: Any, strategy: Any, offload: bool) -> None:
    ranks(4).run(trained, strategy, offload)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Normed(nn.Module):
    """f[batch, 10] -> f[batch, 10]: an MLP, and a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp_norm = Norm(10)
        self.net1, self.net2 = nn.Linear(10, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.net1(self.mlp_norm(x)).relu())


def normed(mesh: DeviceMesh) -> nn.Module:
    """Batches are sharded over `mesh`; the norm, whose weight all have, sees its own."""
    model = parallelize_module(Normed(), mesh, PLAN)
    distribute_module(
        model.mlp_norm,
        mesh,
        input_fn=lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Shard(0)]),
        output_fn=lambda _, output, mesh: output.to_local(),
    )
    return model


def by_group(seen: Collectives, mesh: DeviceMesh) -> dict[str, Counter[str]]:
    ranks = {
        name: tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in ("dp", "tp")
    }
    found = {name: Counter(c.kind for c in seen.calls if c.ranks == ranks[name]) for name in ranks}
    assert sum(counts.total() for counts in found.values()) == len(seen.calls)
    return found


def counted(rank: int, world_size: int, strategy: Any, offload: bool) -> Any:
    """The collectives of forward and of backward, by dimension; gradients as without tensors."""
    mesh = two_dimensions()
    options = {"strategy": strategy, "offload": CPUOffload(offload)}
    model = compiled(normed(mesh["tp"]), units=[], mesh=mesh["dp"], **options)
    torch.manual_seed(rank)
    x = torch.rand(2, 10)
    model(x).square().sum().backward()  # which traces
    model.zero_grad()
    with count_collectives() as forward:
        loss = model(x).square().sum()
    with count_collectives() as backward:
        loss.backward()
    reference = ddp(Normed())
    reference(x).square().sum().backward()
    for name, param in reference.module.named_parameters():
        grad = full(model.get_parameter(name).grad)
        assert param.grad.count_nonzero() > param.numel() // 4, name
        assert_close(grad, param.grad * mesh["tp"].size(), msg=name)
    return by_group(forward, mesh), by_group(backward, mesh)


@GRID
def test_collectives(ranks: Any, strategy: Any, offload: bool) -> None:
    """Of tensors: into and out of the MLP, there and back, and the gradient of the norm.

    torch's FSDP1 never gathers its root again in backward; here SHARD_GRAD_OP says that.
    """
    for forward, backward in ranks(4).run(counted, strategy, offload):
        assert forward["tp"] == {"all_gather": 1, "reduce_scatter": 1}
        assert backward["tp"] == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
        assert forward["dp"] == {"all_gather": 1}
        again = {"all_gather": 1} if strategy is FULL else {}
        assert backward["dp"] == again | {"reduce_scatter": 1}
