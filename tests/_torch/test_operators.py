"""Contracts of what `fxshard._torch.operators`, `storages` and `fsdp1` use of torch."""

import operator

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.nn.modules.batchnorm import _BatchNorm

from fxshard._torch import fsdp1
from fxshard._torch.operators import schema_of
from fxshard._torch.storages import storage_id
from tests._torch.shared import aten


def test_a_schema_says_what_an_operator_takes_writes_and_returns() -> None:
    added, sized = schema_of(aten.add_.Tensor), schema_of(aten.sym_size.int)
    assert added.is_mutable and not schema_of(aten.add.Tensor).is_mutable
    assert [argument.name for argument in added.arguments] == ["self", "other", "alpha"]
    assert [argument.kwarg_only for argument in added.arguments] == [False, False, True]
    own, other, alpha = added.arguments
    assert own.alias_info.is_write and other.alias_info is None
    assert alpha.has_default_value() and alpha.default_value == 1
    assert isinstance(own.type, torch.TensorType)
    assert [str(made.type) for made in added.returns] == ["Tensor"]
    (made,) = schema_of(aten.view.default).returns
    assert made.alias_info is not None and not made.alias_info.is_write
    assert str(sized).startswith("aten::sym_")
    assert schema_of(operator.getitem) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storages_are_told_apart_by_their_memory(device: str) -> None:
    one, other = (torch.empty(4, device=device) for _ in range(2))
    assert storage_id(one) == storage_id(one[2:]) == storage_id(one.untyped_storage())
    assert storage_id(one) != storage_id(other)


def test_options_of_fsdp1() -> None:
    assert isinstance(fsdp1.HYBRID_SHARD_ZERO2, ShardingStrategy)
    assert fsdp1.HYBRID_SHARD_ZERO2 is not ShardingStrategy.HYBRID_SHARD
    assert fsdp1.full_precision_classes(MixedPrecision()) == (_BatchNorm,)
    policy = MixedPrecision(_module_classes_to_ignore=[nn.LayerNorm])
    assert fsdp1.full_precision_classes(policy) == (nn.LayerNorm,)
