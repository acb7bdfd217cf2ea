"""What the tests of fxshard.compile_step share: a model, its loop, and FSDP2's."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.codegen.optimizer_in_program_cases import make
from tests.runtime import test_checkpoints as checkpoints

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
UNITS = ["layers.*"]
MAX_NORM = 0.05  # below the norms of every step: all are clipped

Make = Callable[[Iterable[Any]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd momentum": make(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": make(Adam, lr=1e-2),
    "adamw": make(AdamW, lr=1e-2, weight_decay=0.1),
    "adamw foreach": make(AdamW, lr=1e-2, foreach=True),
    "adamw fused": make(AdamW, lr=1e-2, fused=True),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks and a root; no parameter divides by 2. The root has the first parameters, and last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Another one on each rank and in each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 3, generator=generator)
    return x, torch.randint(3, (4,), generator=generator)


def rank_now() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def fsdp2(**options: Any) -> Any:
    model = net()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


Found = dict[str, Any]


def looped(
    model: Any,
    optimizer: Optimizer,
    max_norm: float | None,
    steps: int = 5,
    scheduler: Any = None,
) -> Found:
    """The loop that a step replaces; all that it leaves."""
    losses, norms = [], []
    for number in range(steps):
        x, y = batch(rank_now(), number)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        if max_norm is not None:
            norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.detach())
    return left(model, optimizer, losses, norms)


def stepped(step: Any, steps: int = 5, scheduler: Any = None) -> Found:
    losses, norms = [], []
    for number in range(steps):
        losses.append(step(*batch(rank_now(), number)))
        if step.grad_norm is not None:
            norms.append(step.grad_norm)
        if scheduler is not None:
            scheduler.step()
    assert all(param.grad is None for param in step.model.parameters())
    assert not any(loss.requires_grad for loss in losses)
    return left(step.model, step.optimizer, losses, norms)


def left(model: Any, optimizer: Optimizer, losses: list[Tensor], norms: list[Tensor]) -> Found:
    found: Found = checkpoints.values(model, optimizer)
    found |= {f"loss {i}": loss for i, loss in enumerate(losses)}
    return found | {f"norm {i}": norm for i, norm in enumerate(norms)}


def assert_same(ours: Found, theirs: Found) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.dtype is theirs[key].dtype, key
        assert torch.equal(value, theirs[key]), (key, value, theirs[key])
