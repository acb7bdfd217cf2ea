"""The route of torch.compile: `fxshard.shard`, then ``torch.compile(model, backend="fxshard")``.

    torchrun --nproc-per-node 2 examples/torch_compile.py     # two ranks over gloo

For models that one trace cannot take: Dynamo cuts the model where Python depends on data, and each
piece becomes a program of the same kind as `fxshard.compile` makes of the whole. Here a gate skips
a block if its input is small, and the loss is one of the user's own, in the loop. Beside it a copy
runs uncompiled, on unsharded weights, on the batches of all ranks.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard

RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets both
RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    args = arguments()
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun --nproc-per-node 2 examples/torch_compile.py")
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # every rank starts with the same weights
    model = Gated()
    whole = copy.deepcopy(model)

    fxshard.shard(model, units=[Block])
    compiled = torch.compile(model, backend="fxshard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-3)

    farthest = 0.0
    for step in range(args.steps):
        batches = [batch(seed=RANKS * step + rank) for rank in range(RANKS)]
        x, y = batches[RANK]
        loss = F.mse_loss(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        theirs = [F.mse_loss(whole(x), y) for x, y in batches]
        torch.stack(theirs).mean().backward()
        reference.step()
        reference.zero_grad()
        farthest = max(farthest, abs(loss.item() - theirs[RANK].item()) / theirs[RANK].item())
        if step == 0 or (step + 1) % args.log_every == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            say(f"step {step + 1:3}  loss {shown.item() / RANKS:.5f}")

    say(str(fxshard.reports(model)))
    tell(f"farthest from the uncompiled loss, relative: {farthest:.1e}")
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Gated(nn.Module):
    """f32 [batch, 64] -> f32 [batch, 1]; a branch on data makes Dynamo break the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.abs().mean() > 0.1:
            x = self.second(x)
        return self.head(x)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Points, and the sign of one of their coordinates."""
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :1].sign()


def tell(text: str) -> None:
    """Print on every rank; a line in one write, as all ranks share the terminal."""
    print(f"rank {RANK}: {text}\n", end="", flush=True)


def say(*lines: str) -> None:
    if RANK == 0:
        print("\n".join(lines) + "\n", end="", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log-every", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
