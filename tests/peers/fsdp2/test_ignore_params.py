"""test_fully_shard_ignore_params.py: FSDP inside of DistributedDataParallel, with ignored ones."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import fxshard
from tests.peers.fsdp2.common import ddp, made


class C(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin_c = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin_c(x)


class B(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin_b, self.module_c = nn.Linear(dim, dim), C(dim)
        self.subtrahend = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin_b(self.module_c(x)) - self.subtrahend


class A(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.module_b, self.addend = B(dim), nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return (self.module_b(x) + self.addend).sum()


def around(rank: int, world_size: int) -> None:
    """DDP for what is around and inside of a sharded module, which it leaves alone."""
    model = made(A)
    ref = ddp(copy.deepcopy(model))
    ignored = set(model.module_b.module_c.parameters())
    for unit in (model.module_b.lin_b, model.module_b):
        fxshard.fully_shard(unit, ignored_params=ignored)
    units = {fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)}
    assert units == {"module_b", "module_b.lin_b"}
    sharded = [
        f"module_b.{fqn}" for fqn, p in model.module_b.named_parameters() if p not in ignored
    ]
    assert sharded == [fqn for fqn, p in model.named_parameters() if isinstance(p, DTensor)]
    assert sharded == ["module_b.subtrahend", "module_b.lin_b.weight", "module_b.lin_b.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    both = [ref, ddp(model, broadcast_buffers=False)]
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in both]
    for _ in range(3):
        x = torch.randn(8, 8)
        losses = [each(x) for each in both]
        assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            with implicit_replication():
                optimizer.step()
                optimizer.zero_grad()
        for mine, theirs in zip(both[1].parameters(), ref.parameters(), strict=True):
            whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
            assert_close(whole, theirs)


def test_ddp_around_a_sharded_module_with_ignored_parameters(ranks: Any) -> None:
    ranks(2).run(around)
