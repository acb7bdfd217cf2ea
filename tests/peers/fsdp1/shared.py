"""What tests of FSDP1's suite share: training beside DDP, and comparisons.

Functions that begin with the name of a rank run on each rank (tests/ranks.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import fxshard
from tests.fsdp2 import full

FULL, GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
STRATEGIES = (FULL, GRAD_OP, NO_SHARD)
OFFLOADS = (None, CPUOffload(True))
HALF = MixedPrecision(
    param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16
)


def compiled(model: nn.Module, **options: Any) -> Any:
    """`model` with the units that FSDP1's tests wrap of it, if they are not among the options."""
    return fxshard.compile(model, **{"units": getattr(model, "units", None)} | options)


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def plain(model: nn.Module) -> Any:
    """The user's own module: what `get_input` and `get_loss` are on."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def loss_of(model: Any, inputs: tuple[Tensor, ...] | None = None) -> Tensor:
    inputs = plain(model).get_input() if inputs is None else inputs
    return plain(model).get_loss(inputs, model(*inputs))


def params_of(model: nn.Module) -> dict[str, Tensor]:
    """Name -> full parameter; collective."""
    return {name: full(param) for name, param in plain(model).named_parameters()}


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Name -> full gradient; collective."""
    named = plain(model).named_parameters()
    return {name: None if p.grad is None else full(p.grad) for name, p in named}


def same(a: nn.Module, b: nn.Module, **tolerance: Any) -> None:
    """The parameters of two models are close, under the same names."""
    assert_close(params_of(a), params_of(b), **tolerance)


def same_grads(a: nn.Module, b: nn.Module, **tolerance: Any) -> None:
    left, right = grads_of(a), grads_of(b)
    assert left.keys() == right.keys()
    for name, grad in left.items():
        assert (grad is None) == (right[name] is None), name
        if grad is not None:
            assert_close(grad, right[name], **tolerance)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(
    model: Any,
    steps: int,
    *,
    backward: Callable[[Any, Tensor], Any] = lambda _, loss: loss.backward(),
    after_step: Callable[[Any], Any] = lambda _: None,
) -> Tensor:
    """Some steps of SGD with momentum (Adam would hide a wrong scale); the last loss."""
    optimizer = sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(model, loss)
        optimizer.step()
        after_step(model)
    return loss.detach()


def losses_alike(models: Sequence[nn.Module], *inputs: Tensor) -> None:
    """Ten steps of Adam on each: their losses are close. A model may hold plain parameters too."""
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    for _ in range(10):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            losses.append(model(*inputs).sum())
            losses[-1].backward()
            with implicit_replication():
                optimizer.step()
            optimizer.zero_grad()
        assert_close(losses[1], losses[0])


def reloaded(model: Any) -> None:
    """Save, overwrite with zeros, and load: training goes on as if nothing had been."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    zeroed(model)
    model.load_state_dict(saved)


def zeroed(model: Any, buffers: bool = False) -> None:
    with model.summon_full_params(), torch.no_grad():
        for tensor in [*model.parameters(), *(model.buffers() if buffers else ())]:
            tensor.zero_()


def barrier() -> None:
    dist.barrier()
