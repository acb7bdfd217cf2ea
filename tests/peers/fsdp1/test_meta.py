"""torch's test_fsdp_meta.py: models on the meta device, filled where they are sharded."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy
from torch.testing import assert_close

from tests.peers.fsdp1.shared import compiled, params_of, same
from tests.ranks import told


class MyLinear(nn.Linear):
    def reset_parameters(self) -> None:
        torch.manual_seed(42)
        with torch.no_grad():
            nn.init.xavier_uniform_(self.weight, 1.0)


class MyBuffer(nn.Module):
    def __init__(self, device: Any) -> None:
        super().__init__()
        self.register_buffer("buf", torch.empty((3, 3), device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.manual_seed(42)
        nn.init.xavier_uniform_(self.buf, 0.5)


class Model(nn.Module):
    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.lin1 = MyLinear(2, 2, bias=False, device=device)
        self.lin2 = MyLinear(2, 2, bias=False, device=device)
        self.buf_mod = MyBuffer(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin2(self.lin1(x))


class Nested(nn.Module):
    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.lin1 = MyLinear(2, 2, bias=False, device=device)
        self.lin2 = MyLinear(2, 2, bias=False, device=device)
        self.l3 = Model(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(self.lin2(self.lin1(x)))


def fill(module: nn.Module) -> None:
    """As FSDP1's users write it."""
    tensors = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    if any(tensor.is_meta for tensor in tensors):
        module.to_empty(device=torch.device("cpu"), recurse=False)
        module.reset_parameters()


def filled(rank: int, world_size: int, kind: Any, init: Any, units: Any) -> None:
    """As of a model that was never on meta, before and after a step."""
    torch.manual_seed(rank)
    model = compiled(kind("meta"), units=units, param_init_fn=init)
    other = compiled(kind(), units=units)
    same(model, other)
    assert_close(dict(model.named_buffers()), dict(other.named_buffers()))
    x = torch.randn(10, 2)
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)
        each(x).sum().backward()
        optimizer.step()
    same(model, other)


@pytest.mark.parametrize("init", [fill, None], ids=["param_init_fn", "reset_parameters"])
@pytest.mark.parametrize(
    ("kind", "units"),
    [
        (Model, always_wrap_policy),
        (Model, []),
        (Nested, always_wrap_policy),
        (Nested, ["lin1", "l3"]),
    ],
    ids=["all", "root_alone", "nested", "nested_by_hand"],
)
def test_filled(ranks: Any, kind: Any, init: Any, units: Any) -> None:
    ranks(2).run(filled, kind, init, units)


def not_callable(rank: int, world_size: int) -> str:
    return told(lambda: compiled(Nested("meta"), units=[], param_init_fn=42))


def test_what_cannot_be_called(ranks: Any) -> None:
    for said in ranks(1).run(not_callable):
        assert "param_init_fn=42: expected a function of a module" in said


class OwnLinear(nn.Module):
    """Has no `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(5, 5, device="meta"), OwnLinear()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin2(torch.relu(self.lin1(x)))


def in_mixed_precision(rank: int, world_size: int) -> None:
    def init(module: nn.Module) -> None:
        module.to_empty(device=torch.device("cpu"))
        for param in module.parameters():
            nn.init.normal_(param, std=0.1)

    torch.manual_seed(0)
    policy = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float16)
    units = ModuleWrapPolicy({nn.Linear})
    model = compiled(TwoLayers(), units=units, mixed_precision=policy, param_init_fn=init)
    model(torch.randn(2, 5)).sum().backward()
    for param in params_of(model).values():
        assert 0 < param.abs().max() < 1


def test_in_mixed_precision(ranks: Any) -> None:
    ranks(2).run(in_mixed_precision)
