"""torch's test_fsdp_apply.py: `apply` changes parameters where they are sharded."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.peers.fsdp1.models import Nested, Transformer
from tests.peers.fsdp1.shared import compiled
from tests.ranks import told


@torch.no_grad()
def to_ones(module: nn.Module) -> None:
    if type(module) is nn.Linear:
        module.weight.fill_(1.0)
        module.bias.fill_(1.0)


def are_ones(model: Any) -> list[bool]:
    with model.summon_full_params():
        linear = [module for module in model.modules() if type(module) is nn.Linear]
        return [bool((param == 1).all()) for module in linear for param in module.parameters()]


def applied(rank: int, world_size: int, kind: type[nn.Module]) -> None:
    model = compiled(kind())
    sharded = list(model.parameters())
    assert not any(are_ones(model))
    assert model.apply(to_ones) is model
    assert all(are_ones(model))
    assert all(p is q for p, q in zip(model.parameters(), sharded, strict=True))


@pytest.mark.parametrize("kind", [Nested, Transformer])
def test_apply(ranks: Any, kind: type[nn.Module]) -> None:
    ranks(2).run(applied, kind)


def inside(rank: int, world_size: int) -> tuple[str, list[bool]]:
    model = compiled(Transformer())
    with model.summon_full_params():
        said = told(lambda: model.apply(to_ones))
    return said, are_ones(model)


def test_apply_where_parameters_are_unsharded(ranks: Any) -> None:
    for said, ones in ranks(2).run(inside):
        assert "parameters are unsharded there, and programs run on shards" in said
        assert not any(ones)
