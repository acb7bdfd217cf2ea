"""Tensor, sequence and loss parallelism beside FSDP, on one mesh.

    torchrun --nproc-per-node 4 examples/train_tensor_parallel.py

Two groups of two ranks: the ranks of a group compute one batch together (dimension "tp" of the
mesh), and each group has a batch of its own (dimension "dp", over which fxshard shards).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import fxshard

WIDTH, CLASSES, LENGTH = 64, 96, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mix = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class Model(nn.Module):
    """Tokens -> what the next one is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),  # between layers each rank has a part of the sequence
    "blocks.*.mix": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    ),
    "blocks.*.mix.0": ColwiseParallel(),
    "blocks.*.mix.2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(  # of logits, a part of the classes
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelize_module(Model(), mesh["tp"], PLAN)
    model = fxshard.compile(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for step in range(1, 21):
        start = torch.randint(0, CLASSES, (8, 1), generator=data)
        tokens = (start + torch.arange(LENGTH + 1)) % CLASSES
        with loss_parallel():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step:3}  loss {loss.full_tensor().item():.4f}  norm {norm.item():.3f}")
    if dist.get_rank() == 0:
        weight = model.get_parameter("blocks.0.mix.0.weight")
        print(f"{tuple(weight.shape)} of placements {weight.placements} on {weight.device_mesh}")
        print(f"this rank has {tuple(weight.to_local().shape)}")
        print(model.plan.dump())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
