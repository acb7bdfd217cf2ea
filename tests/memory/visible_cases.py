"""What several of the tests beside it need (test_visible)."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard.memory.report import MemoryReport
from fxshard.memory.views import diff as differences
from tests.zoo import MODELS

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Shared(nn.Module):
    """Calls its block twice; f32 (batch, 16) -> a number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.tanh(self.block(self.stem(x)))).mean()


class Hand(nn.Module):
    """One matrix multiplication: small enough to count by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight.t()).sum()


@functools.cache
def report(name: str) -> MemoryReport:
    """Reports that several tests read: none of them changes one."""
    if name == "hand":
        return fxshard.plan(Hand(), (torch.ones(2, 4),), world_size=2).memory
    if name == "frozen":  # no backward: its values die when the step ends
        x = torch.ones(4, 16)
        return fxshard.plan(Shared().requires_grad_(False), (x,), world_size=2).memory
    if name == "shared":
        options: dict[str, Any] = {"world_size": 2, "optimizer": adamw, "micro_batches": 2}
        return fxshard.plan(Shared(), (torch.ones(4, 16),), **options).memory
    case = MODELS["llama"]
    torch.manual_seed(0)
    # "llama" has a buffer per parameter; in "offload" they are packed.
    options = {
        "llama": {"pack_bytes": 0},
        "offload": {"offload": CPUOffloadPolicy(), "mixed_precision": BF16},
    }
    args, kwargs = case.batch(0, 0)
    return fxshard.plan(
        case.build(), args, kwargs, world_size=8, units=case.units, optimizer=adamw, **options[name]
    ).memory


PEAKS = tuple(s for s in differences.State if s.value in differences.PEAKS)
