"""Worlds: what the ``fxshard::`` operators of a schedule are bound to when it runs.

`fxshard.world.c10d` runs one rank over a torch.distributed process group (gloo, NCCL, or the fake
group, which moves no data); `fxshard.world.in_process` runs all ranks inside this process.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class World(Protocol):
    """The verbs that emitted code calls. `pair` ties the wait and the free to the launch."""

    def all_gather(self, shards: list[Tensor], pair: int) -> list[Tensor]:
        """Launch: shards ``[chunk, ...]`` -> fresh buffers ``[size * chunk, ...]``."""

    def reduce_scatter(self, grads: list[Tensor], pair: int) -> list[Tensor]:
        """Launch: gradients ``[size * chunk, ...]`` -> fresh averages ``[chunk, ...]``."""

    def wait(self, tensors: list[Tensor], pair: int) -> None:
        """Let the compute stream wait for the launch `pair`, which wrote `tensors`."""

    def free(self, tensors: list[Tensor]) -> None:
        """Give the storages of `tensors` back now."""
