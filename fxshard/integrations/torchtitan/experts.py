"""What torchtitan's experts need to be traced: a kernel of Triton, as operators of torch."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def let_experts_be_traced() -> None:
    """Let torchtitan's padding of what experts get be a part of a graph, in this process.

    It writes the order of rows by a kernel of Triton that it launches itself, which no graph of
    ATen holds, and which asks for a GPU.
    (torchtitan/models/moe/kernels.py, ``fill_indices_wrapper``)
    """
    kernels: Any = sys.modules.get("torchtitan.models.moe.kernels")
    if hasattr(kernels, "fill_indices_wrapper"):
        kernels.fill_indices_wrapper = fill_indices


def fill_indices(
    tokens_per_expert_group: Tensor,
    start_index_values: Tensor,
    write_offsets: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    block_size: int = 128,
    max_blocks: int = 1024,
) -> Tensor:
    """Which row comes to each place where the rows of an expert, from all ranks, are neighbours.

    Arguments have the names and order of torchtitan's.

    Args:
        tokens_per_expert_group: how many rows each rank sends each expert, rank by rank.
        start_index_values: where these begin, in the order in which they have come.
        write_offsets: where the rows of each expert begin.
        experts_per_rank, num_ranks: how many there are.
        max_len: how many places there are.
        block_size, max_blocks: of no use here.

    Returns:
        i32[max_len]; -1 where no row comes.
    """

    def by_expert(values: Tensor) -> Tensor:
        return values.view(num_ranks, experts_per_rank).t()

    counts = by_expert(tokens_per_expert_group)
    firsts = (write_offsets[:, None] + counts.cumsum(1) - counts).flatten()
    counts, starts = counts.flatten(), by_expert(start_index_values).flatten()
    places = torch.arange(max_len, device=counts.device, dtype=firsts.dtype)
    run = torch.searchsorted(firsts, places, right=True) - 1
    inside = places - firsts[run]
    return torch.where(inside < counts[run], starts[run] + inside, -1).to(torch.int32)
