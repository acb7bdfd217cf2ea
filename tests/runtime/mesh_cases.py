"""A model whose units are on several meshes, by torch's `fully_shard` and by ours."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fxshard
from tests.oracles import count_collectives
from tests.runtime.placement_cases import EVEN

CASE = EVEN["mixed"]
STRATEGIES = {"": "full_shard", "blocks.0": "hybrid_shard", "blocks.1": "shard_grad_op"}


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks, and the same as two replicas of two."""
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def by_calls(shard: Callable[..., Any] = fully_shard, **options: Any) -> nn.Module:
    """As `STRATEGIES` says, each call with its mesh."""
    flat, grid = meshes()
    torch.manual_seed(0)
    model: Any = CASE.build()
    shard(model.blocks[0], mesh=grid, **options)
    shard(model.blocks[1], mesh=flat, reshard_after_forward=False, **options)
    shard(model, mesh=flat, **options)
    return model


def by_strategies(**options: Any) -> Any:
    """The same by `fxshard.compile`."""
    torch.manual_seed(0)
    given = {"mesh": meshes()[1]} if torch.distributed.is_initialized() else {"world_size": (2, 2)}
    given |= {"strategy": STRATEGIES, "units": CASE.units} | options
    return fxshard.compile(CASE.build(), **given)


def by_parameters(shard: Callable[..., Any] = fully_shard, **options: Any) -> nn.Module:
    """In each block, the matrices of one layer are on a mesh of their own, along dimension 1."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    flat, grid = meshes()
    torch.manual_seed(0)
    model: Any = CASE.build()
    own = HSDPMeshInfo(grid, shard_mesh_dim=1, replicate_mesh_dim=0)
    experts = [block.up.weight for block in model.blocks]

    def place(param: nn.Parameter) -> Any:
        chosen = any(param is expert for expert in experts)
        return ShardPlacementResult(Shard(1), own) if chosen else None

    for block in model.blocks:
        shard(block, mesh=flat, shard_placement_fn=place, **options)
    shard(model, mesh=flat, **options)
    return model


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.expert(torch.relu(self.gate(x)))


def experts() -> nn.Module:
    """The experts of ranks 0 and 2 are others than those of 1 and 3."""
    torch.manual_seed(0)
    model = nn.Sequential(Expert(), Expert())
    with torch.no_grad():
        for block in model:
            block.expert.weight.add_(0.1 * (torch.distributed.get_rank() % 2))
    return model


def with_experts(shard: Callable[..., Any] = fully_shard) -> tuple[Any, DeviceMesh]:
    """`experts`, which the ranks that have the same ones share, and the mesh of these."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))["efsdp"]
    model, own = experts(), FSDPMeshInfo(mesh, shard_mesh_dim=0)
    apart = {id(param) for block in model for param in block.expert.parameters()}

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), own) if id(param) in apart else None

    for block in model:
        shard(block, shard_placement_fn=place)
    shard(model)
    return model, mesh


def called(model: nn.Module, rank: int) -> Counter[tuple[str, tuple[int, ...]]]:
    """How many collectives of each kind a training step has, by the ranks of their group."""
    CASE.loss(model(*CASE.batch(rank, 0)[0])).backward()  # the first call is traced
    with count_collectives() as seen:
        CASE.loss(model(*CASE.batch(rank, 1)[0])).backward()
    return Counter((call.kind, call.ranks) for call in seen.calls)
