"""Stages of a pipeline on gloo ranks: a small transformer-like model, its split, its training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp, pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard

VOCABULARY, WIDTH, ROWS, LENGTH = 11, 6, 2, 3
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SINGLE = ("ScheduleGPipe", "Schedule1F1B")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Net(nn.Module):
    """A model, or a part of it: what a part lacks is None, as torchtitan's parts have it."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(blocks)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, h: Tensor) -> Tensor:
        h = h if self.embed is None else self.embed(h)
        for block in self.blocks.values():
            h = block(h)
        return h if self.head is None else self.head(h)


def net(blocks: int) -> Net:
    torch.manual_seed(0)
    return Net(blocks)


def part(model: Net, index: int, count: int) -> Net:
    """Stage `index` of `count`: a copy of `model` without what the others have."""
    made = copy.deepcopy(model)
    each = len(made.blocks) // count
    for name in list(made.blocks):
        if int(name) // each != index:
            del made.blocks[name]
    if index:
        made.embed = None
    if index < count - 1:
        made.head = None
    return made


def batch(dp_rank: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 * step + dp_rank)
    size = (micro * ROWS, LENGTH + 1)
    tokens = torch.randint(VOCABULARY, size, generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Counted(TorchDispatchMode):
    """Counts collectives of c10d; those of a pipeline are sends and receives, which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        for kind in ("allgather", "reduce_scatter", "allreduce"):
            if name.startswith("c10d.") and kind in name:
                self.seen[kind] += 1
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Trained:
    """What a rank saw: full tensors, by FQN of the whole model."""

    losses: list[list[float]]
    grads: list[dict[str, Tensor]]
    params: dict[str, Tensor]
    counts: dict[str, int]


def stages_of(rank: int, pp: int, per_rank: int, schedule: str) -> list[int]:
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + i * pp for i in range(per_rank)]


def by_fsdp2(module: nn.Module, mesh: Any, reshard: bool | None) -> nn.Module:
    for block in module.blocks.values():  # type: ignore[union-attr, operator]
        fsdp.fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fsdp.fully_shard(module, mesh=mesh, reshard_after_forward=reshard)


def by_fully_shard(module: nn.Module, mesh: Any, reshard: bool | None) -> nn.Module:
    for block in module.blocks.values():  # type: ignore[union-attr, operator]
        fxshard.fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    made: nn.Module = fxshard.fully_shard(
        module, mesh=mesh, reshard_after_forward=reshard, pipeline_stage=True
    )
    return made


def by_compile(module: nn.Module, mesh: Any, reshard: bool | None) -> nn.Module:
    return fxshard.compile(
        module, mesh=mesh, units=["blocks.*"], reshard_after_forward=reshard, pipeline_stage=True
    )


WAYS: dict[str, Callable[..., nn.Module]] = {
    "fsdp2": by_fsdp2,
    "fully_shard": by_fully_shard,
    "compile": by_compile,
}


def pipeline(
    rank: int,
    world_size: int,
    way: str,
    schedule: str,
    pp: int,
    micro: int,
    reshard: bool | None = False,
    blocks: int = 4,
) -> tuple[Any, list[PipelineStage], int]:
    """A schedule, the stages of this rank, and its rank in the data-parallel dimension."""
    mesh = init_device_mesh("cpu", (pp, world_size // pp), mesh_dim_names=("pp", "dp"))
    per_rank = 1 if schedule in SINGLE else 2
    count, model = pp * per_rank, net(blocks)
    made = []
    for index in stages_of(mesh.get_local_rank("pp"), pp, per_rank, schedule):
        module = WAYS[way](part(model, index, count), mesh["dp"], reshard)
        made.append(
            PipelineStage(module, index, count, torch.device("cpu"), group=mesh.get_group("pp"))
        )
    kind = getattr(pipelining, schedule)
    return (
        kind(made[0] if schedule in SINGLE else made, micro, loss_fn=loss_of),
        made,
        mesh.get_local_rank("dp"),
    )


def train(
    rank: int,
    world_size: int,
    way: str,
    schedule: str,
    pp: int,
    micro: int,
    reshard: bool | None = False,
    steps: int = 3,
) -> Trained:
    runs, stages, dp_rank = pipeline(rank, world_size, way, schedule, pp, micro, reshard)
    named = {fqn: p for stage in stages for fqn, p in stage.submod.named_parameters()}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    losses, grads, counted = [], [], Counted()
    for step in range(steps):
        with counted if step == steps - 1 else contextlib.nullcontext():
            losses.append(run_step(runs, stages, *batch(dp_rank, step, micro)))
        grads.append({fqn: full(p.grad) for fqn, p in named.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, grads, {n: full(p) for n, p in named.items()}, dict(counted.seen))


def run_step(
    runs: Any, stages: list[PipelineStage], tokens: Tensor, targets: Tensor
) -> list[float]:
    seen: list[Tensor] = []
    has_last = any(stage.is_last for stage in stages)
    args = (tokens,) if any(stage.is_first for stage in stages) else ()
    if has_last:
        runs.step(*args, target=targets, losses=seen)
    else:
        runs.step(*args)
    return [float(loss) for loss in seen]


def full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def eager(dp: int, micro: int, steps: int = 3, blocks: int = 4) -> Trained:
    """Plain PyTorch on the joined batch."""
    model = net(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads = [], []
    for step in range(steps):
        pairs = [batch(r, step, micro) for r in range(dp)]
        tokens, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
        loss_of(model(tokens), targets).backward()
        losses.append(
            [
                float(loss_of(model(t), y))
                for tokens, targets in pairs
                for t, y in zip(tokens.chunk(micro), targets.chunk(micro), strict=True)
            ]
        )
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, grads, {n: p.detach() for n, p in model.named_parameters()}, {})
