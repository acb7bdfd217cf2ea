"""torchao's float8 training with a float8 all-gather: fxshard beside FSDP2, on two gloo ranks.

    pip install torchao
    python -m benchmarks.float8

Weights are of torchao's ``WeightWithDynamicFloat8CastTensor``, whose ``fsdp_pre_all_gather`` sends
float8 numbers and a scale of all ranks; products are emulated, so that it runs on the CPU. Losses,
gradients and parameters of each step are compared bit by bit, the bytes of the plan with a run
under the tracker.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp

import fxshard
from benchmarks.ranks import on_ranks

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """f32[n, width] -> f32[n, out]."""

    def __init__(self, width: int = 32, depth: int = 3, out: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(Net(), config=config)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(16, 32, generator=generator), torch.randn(16, 16, generator=generator)


def numbers(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor."""
    local = tensor.detach().to_local()
    return getattr(local, "_tensor", local).clone()


def trained(model: Any, fully_shard: Callable[..., Any], rank: int) -> list[Any]:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        grads = [numbers(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
        found.append([loss.detach(), *grads, *map(numbers, model.parameters())])
    return found


def compared() -> list[str]:
    """On each rank: a line per step."""
    rank = torch.distributed.get_rank()
    theirs = trained(net(), fsdp.fully_shard, rank)
    model = net()
    ours = trained(model, fxshard.fully_shard, rank)
    lines = []
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        same = all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
        kind = type(model.head.weight._local_tensor).__name__
        what = "bitwise equal" if same else "DIFFERENT"
        lines.append(f"rank {rank} step {step}: loss {float(mine[0]):.4f}, {what}; {kind}")
    return lines


def mean(output: Tensor) -> Tensor:
    return output.square().mean()


def main() -> int:
    for lines in on_ranks(2, compared):
        print("\n".join(lines))
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    given = {"world_size": 2, "units": ["blocks.*"], "optimizer": adamw, "loss": mean}
    found = fxshard.validate(net(), (batch(0, 0)[0],), **given)
    print(found.summary())
    print(fxshard.plan(net(), (batch(0, 0)[0],), **given).dump())
    return not found.holds


if __name__ == "__main__":
    sys.exit(main())
