"""test_fully_shard_state.py: what `fully_shard` makes of a module's class."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import fxshard
from tests.peers.fsdp2.common import MLP, average_grads, ddp, made, shard, train_alike
from tests.ranks import told


def classes(rank: int, world_size: int) -> None:
    """Of the module alone, not of its children, nor of a slice of it."""
    model: Any = MLP(8)
    fxshard.fully_shard(model)
    assert isinstance(model, MLP) and isinstance(model, fxshard.FxshardModule)
    assert type(model).__name__.endswith("MLP")
    inner = [each for each in model.modules() if each is not model]
    assert not any(isinstance(each, fxshard.FxshardModule) for each in inner)
    sequence = made(lambda: nn.Sequential(*(MLP(8) for _ in range(3))))
    x = torch.randn(2, 8)
    expected = sequence[:2](x)
    fxshard.fully_shard(sequence)
    assert isinstance(sequence, nn.Sequential) and isinstance(sequence, fxshard.FxshardModule)
    part = sequence[:2]
    assert type(part) is nn.Sequential
    assert_close(part(x), expected)


def test_the_class_of_the_module_alone_is_swapped(ranks: Any) -> None:
    ranks(1).run(classes)


def state(rank: int, world_size: int) -> None:
    model: Any = nn.Sequential(MLP(8), MLP(8))
    state_of = fxshard.fully_shard.state  # type: ignore[attr-defined]
    fxshard.fully_shard(model[0])
    for module in (fxshard.fully_shard(model), model[0]):
        assert "has no state of torch's FSDP2" in told(lambda each=module: state_of(each))
    assert state_of(model[1]) is None


def test_a_state_of_fsdp2_is_refused(ranks: Any) -> None:
    ranks(1).run(state)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP(8) for _ in range(2))
        self.named = nn.ModuleDict({"a": MLP(8), "b": MLP(8)})

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.blocks, *self.named.values()):
            x = part(x)
        return x


def listed(rank: int, world_size: int) -> None:
    """A container without forward: its parameters become one unit. FSDP2, which hooks forward,
    refuses it."""
    model = made(Listed)
    ref = ddp(copy.deepcopy(model))
    shard(model, model.blocks, model.named)
    assert [unit.fqn for unit in model._fxshard.units] == ["", "blocks", "named"]
    train_alike(ref, model, lambda: (torch.randn(2, 8),), 3)
    assert "forward" in told(lambda: fxshard.fully_shard(nn.ModuleList([MLP(8)]))(1))


def test_containers_without_forward(ranks: Any) -> None:
    ranks(2).run(listed)


class Named(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return self["lin"](x)


class InTurn(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        return x


def with_forward(rank: int, world_size: int) -> None:
    for build in (lambda: Named({"lin": nn.Linear(8, 8)}), lambda: InTurn([nn.Linear(8, 8)])):
        model = made(build)
        ref = copy.deepcopy(model)
        fxshard.fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        x = torch.randn(2, 8)
        train_alike(ref, model, lambda x=x: (x,), 3, after=average_grads)


def test_containers_with_a_forward_of_their_own(ranks: Any) -> None:
    ranks(2).run(with_forward)


def twice(rank: int, world_size: int) -> str:
    model = MLP(8)
    fxshard.fully_shard(model)
    return told(lambda: fxshard.fully_shard(model))


def test_a_second_call_is_refused(ranks: Any) -> None:
    assert "this MLP is sharded already" in ranks(1).run(twice)[0]


def copied(rank: int, world_size: int) -> None:
    """FSDP2 refuses copies; here they work."""
    model = made(lambda: MLP(8))
    shard(model)
    again = copy.deepcopy(model)
    x = torch.randn(2, 8)
    for each in (model, again):
        each(x).sum().backward()
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert mine is not theirs
        assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor())


def test_a_copy_is_a_sharded_module_of_its_own(ranks: Any) -> None:
    ranks(2).run(copied)
