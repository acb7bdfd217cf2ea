"""test_fully_shard_frozen.py: frozen parameters, in units with others and in units of their own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from tests.oracles import count_collectives
from tests.peers.fsdp2.common import MLP, adam, assert_parity, ddp, made, shard, train_alike

RESHARD = [False, True, 2]


def biases_alone(model: nn.Module) -> None:
    for fqn, param in model.named_parameters():
        param.requires_grad_("bias" in fqn)


class Products(TorchDispatchMode):
    """What runs, in order: products of matrices, those of forward ("addmm") too, and reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name in ("mm", "addmm") or "reduce_scatter" in name:
            self.names.append("reduce" if "reduce_scatter" in name else name)
        return func(*args, **(kwargs or {}))


def within(rank: int, world_size: int, reshard: Any, checkpointed: bool, late: bool) -> None:
    """Biases are trained alone; what is reduced are theirs, each unit's before backward goes on."""
    model = made(lambda: nn.Sequential(*(MLP(32) for _ in range(3))))
    if not late:
        biases_alone(model)
    ref = ddp(copy.deepcopy(model), find_unused_parameters=late)
    for mlp in model if checkpointed else ():
        checkpoint(mlp)
    shard(model, reshard_after_forward=reshard)
    if late:
        biases_alone(model)
        biases_alone(ref)
    biases = sum(p.numel() for fqn, p in model[0].named_parameters() if "bias" in fqn)
    both = [(ref, adam(ref)), (model, adam(model))]
    for step in range(10):
        x = torch.randn(8, 32)
        for _, optim in both:
            optim.zero_grad(set_to_none=step % 2 == 0)
        losses = [each(x).sum() for each, _ in both]
        losses[0].backward()
        with count_collectives() as seen, Products() as ran:
            losses[1].backward()
        for _, optim in both:
            optim.step()
        assert_parity(ref, model)
        assert_close(losses[1], losses[0])
        reduced = [call.nbytes for call in seen.calls if call.kind == "reduce_scatter"]
        assert reduced == [biases * 4] * 3
        kinds = seen.kinds()
        if reshard:  # the last unit is gathered while the first is reduced
            assert kinds.index("reduce_scatter") < len(kinds) - 1 - kinds[::-1].index("all_gather")
        ends = [i for i, name in enumerate(ran.names) if name == "reduce"]
        parts = [ran.names[i:j] for i, j in zip([0, *ends], ends, strict=False)]
        assert all("mm" in part for part in parts)
        assert ["addmm" in part for part in parts] == [checkpointed] * 3


@pytest.mark.sample(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard", RESHARD)
def test_units_with_frozen_parameters(
    ranks: Any, reshard: Any, checkpointed: bool, late: bool
) -> None:
    ranks(4 if reshard == 2 else 2).run(within, reshard, checkpointed, late)


def across(rank: int, world_size: int, reshard: Any, unfreeze: bool) -> None:
    """Each layer is a root of its own: the model itself is not given."""
    count = 6
    model = made(
        lambda: nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(32, 32), nn.ReLU())))
    )
    ref = ddp(copy.deepcopy(model), find_unused_parameters=True)
    for linear in model[::2]:
        fxshard.fully_shard(linear, reshard_after_forward=reshard)
    both = [(ref, adam(ref)), (model, adam(model))]

    def freeze(frozen: bool) -> None:
        for each in (ref.module, model):
            for linear in each[::4]:
                linear.requires_grad_(not frozen)

    freeze(True)
    x = torch.randn(8, 32)
    for step in range(3):
        if unfreeze and step == 2:
            freeze(False)
        losses = []
        for each, optim in both:
            with torch.set_grad_enabled(step != 1):
                losses.append(each(x).sum())
            if step != 1:
                losses[-1].backward()
                optim.step()
                optim.zero_grad(set_to_none=step % 2 == 0)
        assert_close(losses[1], losses[0])


@pytest.mark.parametrize("unfreeze", [False, True])
@pytest.mark.parametrize("reshard", RESHARD)
def test_units_that_are_frozen_among_others(ranks: Any, reshard: Any, unfreeze: bool) -> None:
    ranks(4 if reshard == 2 else 2).run(across, reshard, unfreeze)


class Several(nn.Module):
    """Trained and frozen layers that run several times, without gradients too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.trained = (nn.Linear(5, 5) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(F.relu(self.trained(x)))
            with torch.no_grad():
                x += F.relu(self.trained(x))
        return x


def several(rank: int, world_size: int, reshard: Any) -> None:
    model = made(Several)
    ref = ddp(copy.deepcopy(model))
    shard(model, reshard_after_forward=reshard)
    train_alike(ref, model, lambda: (torch.randn(8, 5),))


@pytest.mark.parametrize("reshard", RESHARD)
def test_frozen_and_trained_layers_run_several_times(ranks: Any, reshard: Any) -> None:
    ranks(4 if reshard == 2 else 2).run(several, reshard)
