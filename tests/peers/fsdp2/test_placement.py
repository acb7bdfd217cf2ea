"""Several files: `shard_placement_fn` that shards parameters along other dimensions than rows."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.testing import assert_close

import fxshard
from tests.oracles import count_collectives
from tests.peers.fsdp2.common import (
    MLP,
    Args,
    Transformer,
    adam,
    assert_parity,
    average_grads,
    ddp,
    made,
    shard,
    train_alike,
)
from tests.peers.fsdp2.test_mixed_precision import RESHARD, assert_reduced_in, reduced, stack
from tests.peers.fsdp2.test_state_dict import saved
from tests.peers.fsdp2.test_training import EIGHT, two_layers
from tests.ranks import told


def largest(param: nn.Parameter) -> Shard:
    return Shard(param.shape.index(max(param.shape)))


def one_unit(rank: int, world_size: int) -> None:
    model = made(lambda: two_layers((32, 16), (16, 8)))
    ref = ddp(copy.deepcopy(model))
    fxshard.fully_shard(model, shard_placement_fn=largest)
    x = torch.randn(4, 32)
    train_alike(ref, model, lambda: (x,))


@pytest.mark.parametrize("count", [2, EIGHT])
def test_one_unit_sharded_along_its_largest_dimension(ranks: Any, count: int) -> None:
    ranks(count).run(one_unit)


def transformer(rank: int, world_size: int) -> None:
    model = made(lambda: Transformer(Args(layers=3)))
    ref = copy.deepcopy(model)
    shard(model, shard_placement_fn=largest)
    assert {param.placements[0].dim for param in model.parameters()} == {0, 1}
    assert_parity(ref, model)
    train_alike(ref, model, lambda: (model.tokens(2, 16),), 5, after=average_grads)
    assert_parity(ref, model)


@pytest.mark.parametrize("count", [4, EIGHT])
def test_a_transformer_sharded_along_its_largest_dimensions(ranks: Any, count: int) -> None:
    ranks(count).run(transformer)


def last(rank: int, world_size: int) -> None:
    model = made(lambda: Transformer(Args(layers=3)))
    ref = copy.deepcopy(model)
    shard(model, shard_placement_fn=lambda param: Shard(-1))
    assert_parity(ref, model)
    assert all(param.placements[0].dim == param.dim() - 1 for param in model.parameters())


def test_a_negative_dimension(ranks: Any) -> None:
    ranks(4).run(last)


def columns(param: nn.Parameter) -> Shard:
    return Shard(1 if param.dim() > 1 else 0)


def contiguous(rank: int, world_size: int) -> None:
    model = made(lambda: MLP(4))
    shard(model, shard_placement_fn=columns)

    def check(module: nn.Module, args: Any) -> None:
        assert all(param.is_contiguous() for param in module.parameters())

    for part in (model.in_proj, model.out_proj):
        part.register_forward_pre_hook(check)
    for grads in (False, True):
        if grads:
            model(torch.randn(2, 4)).sum().backward()
        for param in model.parameters():
            for tensor in (param, param.grad) if grads else (param,):
                assert tensor.is_contiguous() and tensor.to_local().is_contiguous()


def test_shards_of_columns_are_contiguous(ranks: Any) -> None:
    ranks(4).run(contiguous)


def uneven(rank: int, world_size: int) -> None:
    """FSDP2 asks for sizes that the ranks divide; here they need not."""
    model = made(lambda: nn.Sequential(nn.Linear(16, 17), nn.Linear(17, 8)))
    ref = copy.deepcopy(model)
    fxshard.fully_shard(model, shard_placement_fn=largest)
    assert model[1].weight.placements == (Shard(1),)
    x = torch.randn(4, 16)
    train_alike(ref, model, lambda: (x,), 3, parity=False, after=average_grads)
    for mine, theirs in zip(model.parameters(), ref.parameters(), strict=True):
        assert_close(mine.full_tensor(), theirs)


def test_columns_that_the_ranks_do_not_divide(ranks: Any) -> None:
    ranks(4).run(uneven)


def invalid(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
    return told(lambda: fxshard.fully_shard(model, shard_placement_fn=lambda param: Shard(1)))


def test_a_dimension_that_a_parameter_has_not(ranks: Any) -> None:
    for said in ranks(2).run(invalid):
        assert "Return a dimension that it has" in said, said


def low(rank: int, world_size: int, param: Any, reduce: Any, reshard: bool | int) -> None:
    """Two ranks: with more, sums of columns round in another order than sums of rows."""
    model = made(stack)
    ref = copy.deepcopy(model)
    other = copy.deepcopy(ref).to(param)
    shard(
        model,
        mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce),
        shard_placement_fn=largest,
        reshard_after_forward=reshard,
    )
    optimizers = adam(ref), adam(model)
    x = torch.randn(4, 16, dtype=param)
    for step in range(10):
        losses = [each(x).sum() for each in (other, model)]
        with count_collectives() as seen:
            sum(losses).backward()
        assert_reduced_in(seen, ref, reduce or param)
        for mine, theirs in zip(ref.parameters(), other.parameters(), strict=True):
            mine.grad, theirs.grad = reduced(theirs.grad, reduce or param), None
        assert_close(losses[1], losses[0])
        assert_parity(ref, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for mine, theirs in zip(ref.parameters(), other.parameters(), strict=True):
            theirs.detach().copy_(mine)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.sample(4)
@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize(
    ("param", "reduce"), [(BF16, None), (FP16, None), (BF16, FP32), (FP32, BF16)]
)
def test_columns_in_low_precision(ranks: Any, param: Any, reduce: Any, reshard: bool | int) -> None:
    ranks(2).run(low, param, reduce, reshard)


@pytest.mark.parametrize("hybrid", [False, True])
def test_states_of_columns_are_saved_and_loaded(ranks: Any, hybrid: bool) -> None:
    ranks(4 if hybrid else 2).run(saved, 16, hybrid, largest)
