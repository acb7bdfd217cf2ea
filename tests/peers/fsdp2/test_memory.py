"""test_fully_shard_memory.py: what a step takes, by the tracker, beside the bounds of torch's test.

The model has the sizes that torch's has. torch's test reads CUDA's active bytes; the tracker counts
bytes of tensors.
"""

import gc
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.multiprocessing.reductions import StorageWeakRef

import fxshard
from tests.peers.fsdp2.common import Args, Transformer, made, shard

ALLOWED = 16_000_000  # bytes, of activations and workspaces


def transformer() -> Transformer:
    return Transformer(Args(layers=3, dim=768, heads=12, vocab=32, tied=False))


@pytest.mark.slow
def test_the_peak_of_a_step_with_offload() -> None:
    """Within torch's bound with nothing launched ahead in backward (by default 5.0 blocks)."""
    model = transformer()
    block = sum(param.numel() for param in model.layers[0].parameters()) * 4
    plan = fxshard.plan(
        model,
        (model.tokens(1, 4),),
        world_size=2,
        units=["layers.*"],
        offload=CPUOffloadPolicy(),
        optimizer=torch.optim.Adam,
        backward_prefetch=0,
    )
    assert plan.memory.peak_bytes <= 3.6 * block + ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize(("reshard", "in_backward"), [(True, False), (False, False), (True, True)])
def test_the_peak_of_a_step(reshard: bool, in_backward: bool) -> None:
    model = transformer()
    whole = sum(param.numel() for param in model.parameters()) * 4
    block = sum(param.numel() for param in model.layers[0].parameters()) * 4
    shards, rest = (whole + 1) // 2, whole - 3 * block
    seen = fxshard.validate(
        model,
        (model.tokens(1, 4),),
        world_size=2,
        steps=1,
        units=["layers.*"],
        reshard_after_forward=reshard,
        optimizer=torch.optim.Adam,
        optimizer_in_backward=in_backward,
    )
    assert seen.max_abs_difference == 0
    if in_backward:  # the shards, the optimizer's two states of them, and a block's gradients
        bound = 3 * shards + 3 * block + block // 2 + rest
    elif reshard:  # a gathered block, its gradients, and what of them is being reduced
        bound = 2 * shards + 3 * block + rest
    else:
        bound = shards + whole + 1.5 * block
    assert seen.measured_peak_bytes <= bound + ALLOWED


def deleted(rank: int, world_size: int) -> None:
    """Sharding frees what was whole, and no shard outlives the model."""
    model = made(lambda: Transformer(Args(tied=False)))
    whole = [StorageWeakRef(param.untyped_storage()) for param in model.parameters()]
    shard(model)
    assert all(each.expired() for each in whole)
    shards = [StorageWeakRef(param.to_local().untyped_storage()) for param in model.parameters()]
    assert not any(each.expired() for each in shards)
    del model
    gc.collect()
    assert all(each.expired() for each in shards)


def test_a_model_that_is_deleted_leaves_no_shard(ranks: Any) -> None:
    ranks(2).run(deleted)
