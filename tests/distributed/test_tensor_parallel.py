"""Tensor parallelism beside FSDP, on real ranks: as torch's own FSDP2 with its own."""

import functools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from tests.distributed import tensor_parallel_cases as cases
from tests.distributed.tensor_parallel_cases import Job, Llama, Mlp

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def differing(rank: int, world_size: int, job: Job) -> dict[str, float]:
    return cases.differing(job, rank)


EQUAL = {
    "an MLP": Job(cases.of_an_mlp, model=Mlp),
    "sequences and logits": Job(
        cases.of_sequences_and_logits, "fully_shard", max_norm=0.1, steps=2
    ),
}
GRID = {
    "tensors": Job(),
    "fully_shard": Job(how="fully_shard"),
    "sequences": Job(cases.of_sequences),
    "outputs": Job(cases.of_outputs),
    "logits, compiled": Job(cases.of_sequences_and_logits),
    "uneven": Job(cases.of_sequences_and_logits, model=functools.partial(Llama, 25), steps=5),
    "low precision": Job(cases.of_sequences, precision=LOW),
    "recomputed": Job(cases.of_sequences, options={"checkpoint": "full"}),
    "transformers": Job(cases.of_transformers, model=cases.WithLogits),
    "accumulated": Job(micro_batches=3),
    "block by block": Job(cases.of_sequences, model=functools.partial(Llama, layers=8), steps=2),
    "hybrid": Job(cases.of_sequences, shape=(2, 1, 2)),
    "hybrid, fully_shard": Job(cases.of_sequences, "fully_shard", shape=(1, 2, 2)),
    "tensors only": Job(cases.of_sequences, shape=(1, 4)),
    "data only": Job(cases.of_sequences, shape=(4, 1)),
    "offloaded": Job(options={"offload": CPUOffloadPolicy(pin_memory=False)}),
    "activations": Job(options={"offload_activations": "1GiB"}),
    "activations of sequences": Job(
        cases.of_sequences, options={"offload_activations": ["layers.*"]}
    ),
    "one unit": Job(options={"units": []}),
    "unsharded between": Job(options={"strategy": "shard_grad_op"}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_bitwise_as_torchs_own(ranks: Any, name: str) -> None:
    assert ranks(4).run(differing, EQUAL[name]) == [{}] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_bitwise_as_torchs_own_in_each_way(ranks: Any, name: str) -> None:
    assert ranks(4).run(differing, GRID[name]) == [{}] * 4


@pytest.mark.slow
def test_sums_of_micro_batches_of_sequences(ranks: Any) -> None:
    """FSDP2 adds up what ranks have of the gradients of norms, and reduces the sum over them."""
    job = Job(cases.of_sequences, micro_batches=3, steps=1)
    for found in ranks(4).run(differing, job):
        gradients = {name: apart for name, apart in found.items() if "gradient of" in name}
        assert all("norm" in name and apart < 1e-7 for name, apart in gradients.items()), found
