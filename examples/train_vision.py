"""Train a residual network with BatchNorm in bf16 on images that are made on the spot.

    torchrun --nproc-per-node 2 examples/train_vision.py      # two ranks over gloo
    python examples/train_vision.py                           # both ranks in one process

The images are noisy discs, squares and crosses; the network says which. Parameters are gathered,
and compute, in bf16, but those of BatchNorm; gradients are reduced, and weights and optimizer
states kept, in fp32. The statistics of BatchNorm are buffers: each rank has those of its own
batches, as under FSDP2, so that they are averaged at the end. Then the weights go into a plain
network, and that is tested in fp32.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard

RANKS = int(os.environ.get("WORLD_SIZE", "2"))  # torchrun sets it
RANK = int(os.environ.get("RANK", "0"))
SIZE, BATCH = 24, 32  # pixels each way, images per rank
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Of BatchNorm, statistics (buffers) and weights have to be of one dtype.
FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)  # every rank starts with the same weights
    model = fxshard.compile(
        ResNet(),
        world_size=RANKS,
        units=[Block],  # the rest is the root unit
        mixed_precision={"": BF16, nn.BatchNorm2d: FP32},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)

    for step in range(args.steps):
        pictures, labels = images(seed=RANKS * step + RANK)
        loss = F.cross_entropy(model(pictures).float(), labels, label_smoothing=0.05)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 0 or (step + 1) % args.log_every == 0:
            shown = loss.detach().clone()
            average_over_ranks(shown)
            say(f"step {step + 1:3}  loss {shown.item():.4f}")

    for buffer in model.buffers():
        average_over_ranks(buffer)
    say(f"peak of a step on each rank: {model.memory.peak_bytes:,} B")
    tell(f"sum of all weights {total(model):.7f}")

    weights = model.full_state_dict()  # full tensors on rank 0; every rank takes part
    if RANK == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, args.out)
        plain = ResNet()
        plain.load_state_dict(torch.load(args.out))
        say(f"plain PyTorch: {accuracy(plain):.1%} of new images are named right")
    if dist.is_initialized():
        dist.destroy_process_group()


class Block(nn.Module):
    """Two convolutions around a shortcut, (batch, channels, h, w) -> the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    """Images (batch, 1, h, w) -> logits (batch, 3)."""

    def __init__(self, channels: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def images(seed: int, count: int = BATCH) -> tuple[Tensor, Tensor]:
    """f32 [count, 1, SIZE, SIZE] and int64 [count]: 0 a disc, 1 a square, 2 a cross."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=random)
    radius = 3 + 4 * torch.rand(count, 1, 1, generator=random)
    middle = SIZE / 2 + 6 * (torch.rand(2, count, 1, 1, generator=random) - 0.5)
    places = torch.arange(SIZE, dtype=torch.float32)
    x = (places.view(1, 1, -1) - middle[0]).abs()
    y = (places.view(1, -1, 1) - middle[1]).abs()
    disc = x**2 + y**2 < radius**2
    square = (x < radius) & (y < radius)
    cross = square & ((x < 1.5) | (y < 1.5))
    chosen = torch.stack([disc, square, cross])[labels, torch.arange(count)]
    noise = 0.3 * torch.randn(count, SIZE, SIZE, generator=random)
    return (chosen + noise).unsqueeze(1), labels


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    model.eval()
    pictures, labels = images(seed=10**6, count=512)
    return (model(pictures).argmax(-1) == labels).float().mean().item()


def total(model: fxshard.FxshardModule) -> float:
    with torch.no_grad(), model.summon_full_params(writeback=False):
        return sum(param.double().sum().item() for param in model.parameters())


def average_over_ranks(value: Tensor) -> None:
    """In place; counts (integers) are equal on all ranks."""
    if dist.is_initialized() and value.is_floating_point():
        dist.all_reduce(value)
        value /= RANKS


def tell(text: str) -> None:
    """Print on every rank; a line in one write, as all ranks share the terminal."""
    print(f"rank {RANK}: {text}\n", end="", flush=True)


def say(text: str) -> None:
    if RANK == 0:
        print(f"{text}\n", end="", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/vision/model.pt"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
