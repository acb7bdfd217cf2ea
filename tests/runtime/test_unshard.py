"""`unshard` and `reshard` of a model between its phases, as FSDP2's scripts call them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from tests.fsdp2 import full
from tests.ranks import told
from tests.runtime.init_cases import Stack, seeded


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(fully_shard: Any) -> Any:
    model: Any = seeded(Stack)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def all_plain(model: nn.Module) -> bool:
    return not any(isinstance(param, DTensor) for param in model.parameters())


def step(model: Any, optimizer: torch.optim.Optimizer, where: str, rank: int, number: int) -> None:
    """One step with calls of `unshard` and `reshard` as FSDP2 allows them, for all to the same."""
    handles = []

    def unshard() -> None:
        handles.append(model.unshard(async_op=True))

    hooks = []
    if where == "in a hook":
        hooks.append(model.register_forward_pre_hook(lambda *_: unshard()))
    if where == "before forward":
        unshard()
        handles[-1].wait()
    loss = model(tokens(rank, number)).square().mean()
    if where in ("before backward", "before backward and reshard"):
        unshard()
        handles[-1].wait()
        handles[-1].wait()
    if where == "before backward and reshard":
        model.reshard()
        model.reshard()
    loss.backward()
    if where == "before the optimizer":
        unshard()
        handles[-1].wait()
    optimizer.step()
    optimizer.zero_grad()
    if where == "before the optimizer":
        model.reshard()
    for hook in hooks:
        hook.remove()


PLACES = ["before forward", "in a hook", "before backward", "before backward and reshard"]
PLACES += ["before the optimizer"]


def phases(rank: int, world_size: int, where: str) -> None:
    ours, theirs = sharded(fxshard.fully_shard), sharded(fsdp.fully_shard)
    alone: Any = seeded(Stack)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs, alone)]
    for number in range(2):
        for model, optimizer in zip((ours, theirs), optimizers, strict=False):
            step(model, optimizer, where, rank, number)
        both = [alone(tokens(each, number)).square().mean() for each in range(world_size)]
        torch.stack(both).mean().backward()
        optimizers[2].step()
        optimizers[2].zero_grad()
    theirs.reshard()
    for fqn, param in alone.named_parameters():
        mine = full(ours.get_parameter(fqn))
        assert_close(mine, full(theirs.get_parameter(fqn)), rtol=1e-6, atol=1e-6)
        assert_close(mine, param.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.sample(2)
def test_between_phases_as_fsdp2(ranks: Any, where: str) -> None:
    ranks(2).run(phases, where)


def both_written(rank: int, world_size: int) -> list[str]:
    """A step of the shards is kept; with a write of the full parameter it is refused."""
    ours = sharded(fxshard.fully_shard)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    found = []
    for write in (False, True):
        ours(tokens(rank, 0)).sum().backward()
        handle = ours.unshard(async_op=True)
        assert all_plain(ours)
        handle.wait()
        optimizer.step()
        if write:
            with torch.no_grad():
                ours.layers[1].linear.bias.add_(1)
        found.append(told(ours.reshard))
        assert not all_plain(ours)
    ours(tokens(rank, 0)).sum().backward()  # it is as after the step
    return found


def test_what_would_be_lost_is_refused_by_name(ranks: Any) -> None:
    for found in ranks(2).run(both_written):
        assert found[0] == "no error"
        assert found[1].startswith("StepError: parameter 'layers.1.linear.bias' was written while")
