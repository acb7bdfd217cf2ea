"""Long sequences, each computed by two ranks together, beside FSDP, on one mesh.

    torchrun --nproc-per-node 4 examples/train_context_parallel.py

Two groups of two ranks: the ranks of a group have halves of one sequence (dimension "cp" of the
mesh), and each group has a batch of its own (dimension "dp"). Parameters are sharded over all four.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import fxshard

WIDTH, HEADS, CLASSES, LENGTH = 32, 4, 24, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mix(self.norm_2(x))


class Model(nn.Module):
    """Tokens and their positions -> what the next token is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(CLASSES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = fxshard.compile(Model(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for step in range(1, 21):
        start = torch.randint(0, CLASSES, (8, 1), generator=data)
        tokens = (start + torch.arange(LENGTH + 1)) % CLASSES
        given, wanted = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        positions = torch.arange(LENGTH).expand(8, -1).clone()
        buffers = [given, wanted, positions]  # inside, each rank has its half of them
        with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            loss = F.cross_entropy(model(given, positions).flatten(0, 1), wanted.flatten())
            loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.SUM)
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step:3}  loss {loss.item() / 4:.4f}  norm {norm.item():.3f}")
    if dist.get_rank() == 0:
        weight = model.get_parameter("blocks.0.qkv.weight")
        print(f"{tuple(weight.shape)} of placements {weight.placements} on {weight.device_mesh}")
        print(model.plan.dump())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
