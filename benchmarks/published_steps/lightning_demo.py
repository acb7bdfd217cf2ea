"""The job of Lightning's guides to FSDP: `torch.nn.Transformer` on two GPUs, without Lightning."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fxshard

VOCABULARY, DIM, TOKENS, POSITIONS = 33_278, 1024, 35, 5000
STEPS = 3


class Demo(nn.Module):
    """What lightning.pytorch.demos.Transformer allocates, at the sizes of the guides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.transformer = nn.Transformer(DIM, 64, 32, 32, 4096, 0.2, batch_first=True)
        self.decoder = nn.Linear(DIM, VOCABULARY)
        self.dropout = nn.Dropout(0.2)
        self.positions: Tensor | None = None

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.zeros(1, POSITIONS, DIM, device=tokens.device)
        x: Tensor = self.embedding(tokens) * math.sqrt(DIM)
        out: Tensor = self.dropout(x + self.positions[:, x.size(1)])
        return out

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1).to(tokens.device)
        out = self.transformer(self._embedded(tokens), self._embedded(target), tgt_mask=mask)
        return F.log_softmax(self.decoder(out), dim=-1).view(-1, VOCABULARY)


class AdamOfTorch2_0(torch.optim.Optimizer):
    """Adam as torch 2.0 computed it: square roots, and a second temporary with `eps` added."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """No closure is called."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for param in params:
            if not self.state[param]:
                self.state[param] = {name: torch.zeros_like(param) for name in ("first", "second")}
        gradients = [param.grad for param in params]
        first, second = ([self.state[p][name] for p in params] for name in ("first", "second"))
        torch._foreach_lerp_(first, gradients, 0.1)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(second)
        divisors = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(params, first, divisors, -0.1)


@dataclasses.dataclass(frozen=True)
class DemoJob:
    """A job of two ranks with A100s, in fp32, with Adam.

    Attributes:
        by: "ddp", or a strategy of FSDP1.
        offload: FSDP1 offloads to the CPU.
        trainer: Lightning's Trainer sets gradients to None between forward and backward; the loop
            with Fabric after the optimizer's step. Its guide is a month older, of torch 2.0.
        settings: of the allocator.
    """

    by: str
    offload: bool = False
    trainer: bool = False
    settings: str = "expandable_segments:False"

    def _sharded(self) -> nn.Module:
        if self.by == "ddp":
            return DistributedDataParallel(Demo().cuda(), device_ids=[0])
        layers = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
        return FullyShardedDataParallel(
            Demo(),
            sharding_strategy=ShardingStrategy[self.by],
            cpu_offload=CPUOffload(offload_params=True) if self.offload else None,
            auto_wrap_policy=ModuleWrapPolicy(layers),
            device_id=torch.device("cuda", 0),
            use_orig_params=True,
        )

    def dry(self, steps: int = STEPS) -> fxshard.DryRun:
        """So many steps of it."""
        with fxshard.dry_run(world_size=2, device="a100") as run:
            self._train(run, steps)
        return run

    def _train(self, run: fxshard.DryRun, steps: int) -> Any:
        model = self._sharded()
        kind = torch.optim.Adam if self.trainer else AdamOfTorch2_0
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(steps):
            tokens, target = (torch.randint(100, (1, TOKENS)).cuda() for _ in range(2))
            loss = F.nll_loss(model(tokens, target), target.view(-1))
            if self.trainer:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not self.trainer:
                optimizer.zero_grad()
            run.step()
