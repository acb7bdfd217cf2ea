"""Context parallelism beside FSDP, on real ranks: as torch's FSDP2 with its own, and as eager."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.distributed import context_parallel_cases as cases
from tests.distributed.context_parallel_cases import Job

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

FAST = {
    "compile": Job(rotate="alltoall"),
    "fully_shard": Job("fully_shard"),
}
SLOW = {
    "allgather": Job(),
    "not causal": Job(causal=False),
    "contexts only": Job(shape=(1, 4), rotate="alltoall"),
    "hybrid": Job(shape=(2, 1, 2)),
    "hybrid, fully_shard": Job("fully_shard", shape=(1, 2, 2)),
    "low precision": Job(precision=LOW),
    "recomputed": Job(options={"checkpoint": "full"}, rotate="alltoall"),
    "unsharded between": Job(options={"strategy": "shard_grad_op"}),
}


def differing(rank: int, world_size: int, job: Job) -> dict[str, float]:
    """By name, what differs from FSDP2 with torch's own, and by how much."""
    ours = cases.trained(job, rank)
    theirs = cases.trained(Job(**{**vars(job), "how": "fsdp2", "options": {}}), rank)
    assert ours.keys() == theirs.keys()
    apart = {
        name: (ours[name].double() - theirs[name].double()).abs().max().item() for name in ours
    }
    return {name: each for name, each in apart.items() if each}


def from_eager(rank: int, world_size: int, job: Job) -> float:
    """The largest relative distance from one process with whole sequences."""
    ours, alone = cases.trained(job, rank), cases.alone(job)
    return max(
        ((ours[name] - value).norm() / value.norm().clamp(min=1e-6)).item()
        for name, value in alone.items()
        if name.startswith("0 ")
    )


@pytest.mark.parametrize("name", FAST)
def test_bitwise_as_torchs_own(ranks: Any, name: str) -> None:
    assert ranks(4).run(differing, FAST[name]) == [{}] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_bitwise_as_torchs_own_in_each_way(ranks: Any, name: str) -> None:
    assert ranks(4).run(differing, SLOW[name]) == [{}] * 4


@pytest.mark.parametrize("causal", [True, False])
def test_as_eager_on_whole_sequences(ranks: Any, causal: bool) -> None:
    job = Job(shape=(2, 2), causal=causal, steps=1)
    assert max(ranks(4).run(from_eager, job)) < 1e-5
