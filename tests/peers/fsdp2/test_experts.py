"""What torch's tests do with experts, whose parameters have a mesh of their own.

`ShardPlacementResult` says which, as in torch's tests, or a call of the experts' own. Each rank has
some experts; tokens are gathered for them, and results are reduced to the ranks that they are of.
"""

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional as F
from torch.testing import assert_close

import fxshard
from tests.peers.fsdp2 import test_memory
from tests.peers.fsdp2.common import Args, Transformer, adam, made

KINDS = ["calls", *(["parameters"] if hasattr(_fsdp_common, "ShardPlacementResult") else [])]
TOGETHER = 2  # ranks that have each expert once between them
ARGS = Args(vocab=256, length=32, dim=64)
ALLOWED = 1_000_000  # bytes of activations and workspaces
LARGE = Args(vocab=256, length=32, dim=256)  # weights, of which activations are a small part


class Experts(nn.Module):
    """Tokens f[n, dim] -> f[n, dim]: the sum of what each expert makes of each token."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(0.02 * torch.randn(count, 4 * dim, dim))
        self.w2 = nn.Parameter(0.02 * torch.randn(count, dim, 4 * dim))

    def forward(self, x: Tensor) -> Tensor:
        w1, w2 = (getattr(w, "to_local", lambda w=w: w)() for w in (self.w1, self.w2))
        each = F.gelu(torch.bmm(x.expand(w1.shape[0], -1, -1), w1.mT))
        return torch.bmm(each, w2.mT).sum(0)


class ExpertLayer(nn.Module):
    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.count, self.experts = count, Experts(count, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x.flatten(0, 1)).view(x.shape) / self.count


class OverRanks(ParallelStyle):
    """Each rank has some of the experts: of the tokens of all, for which the sums are reduced."""

    def _cut(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in [*module.named_parameters(recurse=False)]:
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))

    def _gather(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Tensor:
        (x,) = inputs
        x = collectives.all_gather_tensor_autograd(x, gather_dim=0, group=mesh.get_group())
        return collectives.wait_tensor(x)

    def _reduce(self, module: nn.Module, x: Tensor, mesh: DeviceMesh) -> Tensor:
        x = collectives.reduce_scatter_tensor_autograd(x, "sum", 0, mesh.get_group())
        return collectives.wait_tensor(x)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._gather, self._reduce)  # type: ignore[arg-type]


def with_experts(args: Args) -> Any:
    model = Transformer(args)
    for layer in model.layers:
        layer.feed_forward = ExpertLayer(8, args.dim)
    return model


@dataclasses.dataclass
class Meshes:
    """All ranks, in copies if there are several; those that have an expert's rows; of experts."""

    data: DeviceMesh
    of_experts: DeviceMesh
    experts: DeviceMesh

    @classmethod
    def of(cls, copies: int) -> "Meshes":
        ranks = dist.get_world_size() // copies
        sizes = (ranks // TOGETHER, TOGETHER)
        if copies == 1:
            sparse = init_device_mesh("cpu", sizes, mesh_dim_names=("efsdp", "ep"))
            dense = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
            return cls(dense, sparse["efsdp"], sparse["ep"])
        names = ("copies", "efsdp", "ep")
        sparse = init_device_mesh("cpu", (copies, *sizes), mesh_dim_names=names)
        dense = init_device_mesh("cpu", (copies, ranks), mesh_dim_names=("copies", "shards"))
        return cls(dense, sparse["copies", "efsdp"], sparse["ep"])


def spread(model: Any, meshes: Meshes) -> Any:
    for layer in model.layers:
        parallelize_module(layer.feed_forward.experts, meshes.experts, OverRanks())
    return model


def sharded(model: Any, meshes: Meshes, kind: str, reshard: bool | int) -> Any:
    """As torch's test has it, or with a call of each layer's experts instead of the function."""
    for layer in model.layers:
        experts = set(layer.feed_forward.experts.parameters())
        if kind == "calls":
            fxshard.fully_shard(layer.feed_forward.experts, mesh=meshes.of_experts)
            fxshard.fully_shard(layer, mesh=meshes.data)
        else:
            where = {True: infos(meshes.of_experts), False: infos(meshes.data)}
            fxshard.fully_shard(
                layer,
                mesh=meshes.data,
                shard_placement_fn=lambda p, experts=experts, where=where: (
                    _fsdp_common.ShardPlacementResult(Shard(0), where[p in experts])
                ),
            )
    ends = [model.tok_embeddings, model.norm, model.output]
    fxshard.fully_shard(ends, mesh=meshes.data, reshard_after_forward=reshard)
    return fxshard.fully_shard(model, mesh=meshes.data, reshard_after_forward=reshard)


def infos(mesh: DeviceMesh) -> Any:
    if mesh.ndim == 1:
        return _fsdp_common.FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    return _fsdp_common.HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def trained(rank: int, world_size: int, kind: str, copies: int, reshard: bool | int) -> None:
    """Beside the whole model, whose gradients of experts are summed over the ranks of experts."""
    meshes = Meshes.of(copies)
    # Gradients are compared too, whose sums have another order here.
    ref = made(lambda: with_experts(ARGS).double())
    model = sharded(spread(copy.deepcopy(ref), meshes), meshes, kind, reshard)
    pairs = list(zip(model.parameters(), ref.parameters(), strict=True))
    for mine, theirs in pairs:
        assert torch.equal(mine.full_tensor(), theirs)
    of_experts = {p for layer in ref.layers for p in layer.feed_forward.experts.parameters()}
    both = adam(model), adam(ref)
    tokens = model.tokens(2, ARGS.length)
    for step in range(5):
        losses = [each(tokens).sum() for each in (model, ref)]
        for loss in losses:
            loss.backward()
        assert_close(*losses)
        for mine, theirs in pairs:
            dist.all_reduce(theirs.grad)
            theirs.grad /= world_size // TOGETHER if theirs in of_experts else world_size
            assert_close(mine.grad.full_tensor(), theirs.grad)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


GRID = [
    pytest.param(kind, copies, reshard, marks=() if reshard is True else pytest.mark.slow)
    for kind, copies, reshard in itertools.product(KINDS, [1, 2], [True, False, 2])
]


@pytest.mark.parametrize(("kind", "copies", "reshard"), GRID)
@pytest.mark.sample(4)
def test_experts_on_a_mesh_of_their_own(
    ranks: Any, kind: str, copies: int, reshard: bool | int
) -> None:
    ranks(4).run(trained, kind, copies, reshard)


def sizes_of(model: Any, world_size: int) -> tuple[int, int, int]:
    """Bytes: of a block, unsharded on a rank; of what is in none; and of a rank's shards of all."""
    layer = model.layers[0]
    experts = sum(p.numel() for p in layer.feed_forward.parameters()) // TOGETHER
    dense = sum(p.numel() for name, p in layer.named_parameters() if "experts" not in name)
    rest = sum(p.numel() for name, p in model.named_parameters() if "layers" not in name)
    shards = len(model.layers) * (dense / world_size + experts / (world_size // TOGETHER))
    return (experts + dense) * 4, rest * 4, int(shards + rest / world_size) * 4


def points(rank: int, world_size: int, kind: str) -> None:
    """The bounds of torch's test, of forward, backward, the optimizer's step, and after zero_grad;
    then ten steps, without garbage collection."""
    with test_memory.metered() as meter:
        model = made(lambda: with_experts(LARGE))
        block, rest, shards = sizes_of(model, world_size)
        assert block > 8 * ALLOWED
        meshes = Meshes.of(1)
        model = sharded(spread(model, meshes), meshes, kind, True)
        optimizer = test_memory.adam(model.parameters())
        meter.peak()

        loss = model(model.tokens(1, 4))
        peak = meter.peak()
        assert shards + block < peak <= shards + 3 * block + rest + ALLOWED, peak

        loss.sum().backward()
        peak = meter.peak()
        assert shards + 2 * block < peak <= 2 * shards + 4 * block + rest + ALLOWED, peak

        del loss
        meter.peak()
        optimizer.step()
        peak = meter.peak()
        largest = max(p.to_local().numel() for p in model.parameters()) * 4
        assert peak <= 4 * shards + 2 * largest + ALLOWED, peak  # Adam makes two tensors of a shard

        optimizer.zero_grad()
        left = [meter.now()]
        assert left[0] <= 3 * shards + ALLOWED, left

        for _ in range(10):
            model(model.tokens(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.close()
            left.append(meter.now())
        assert left[1:] == left[:1] * 10, left


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_bytes_with_experts_on_a_mesh_of_their_own(ranks: Any, kind: str) -> None:
    ranks(4).run(points, kind)
