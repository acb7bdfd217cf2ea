"""test_fully_shard_memory.py: what a step takes, by torch.profiler, beside torch's own bounds.

torch's test counts CUDA's active bytes; here are those of the CPU, of one rank. Buffers that are
freed when Python drops them are the same.
"""

import gc
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from tests.oracles import profiler_peak_bytes
from tests.peers.fsdp2.common import Args, Transformer, made, shard


def peaks(rank: int, world_size: int, reshard: bool) -> None:
    """Forward, backward and step: bytes above the sharded model, which is there before each."""
    model = made(lambda: Transformer(Args(layers=3, dim=256, heads=4, vocab=32, tied=False)))
    whole = sum(param.numel() for param in model.parameters()) * 4
    block = sum(param.numel() for param in model.layers[0].parameters()) * 4
    rest = whole - 3 * block
    shards = (whole + 3) // 2
    activations = 200_000
    shard(model, reshard_after_forward=reshard)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    tokens = model.tokens(1, 4)
    model(tokens).sum().backward()  # traces; optimizer states come with the step below
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    kept: list[Any] = []

    def forward() -> None:
        kept.append(model(tokens).sum())

    def backward() -> None:
        kept.pop().backward()

    def both() -> None:
        forward()
        backward()

    in_forward = profiler_peak_bytes(forward)
    kept.pop().backward()
    optimizer.zero_grad()
    in_both = profiler_peak_bytes(both)
    if reshard:
        assert in_forward <= 3 * block + rest + activations
        assert in_both <= 3 * block + rest + shards + activations
    else:
        assert in_forward <= whole + block + activations
        assert in_both <= whole + 1.5 * block + activations + shards
    assert profiler_peak_bytes(optimizer.step) <= block + activations  # states are there already


@pytest.mark.parametrize("reshard", [True, False])
def test_peaks_of_a_step(ranks: Any, reshard: bool) -> None:
    ranks(2).run(peaks, reshard)
