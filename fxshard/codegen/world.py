"""Worlds: what the ``fxshard::`` operators of a schedule are bound to when it runs.

`fxshard.runtime.world.c10d` runs one rank over a torch.distributed process group (gloo, NCCL, or
the fake group, which moves no data); `fxshard.runtime.world.in_process` runs all ranks inside this
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, fx


class World(Protocol):
    """The verbs that emitted code calls: a method per operator of ours. `pair` ties a wait to its
    launch. `fxshard.ir.ops` says what each operator is.

    `group` is "shard", "replicate" or "reshard<n>"; `op` is "avg", "sum", "max" or "min".
    """

    def phase(self, name: str, communicates: bool) -> AbstractContextManager[None]:
        """A phase runs inside; however it ends, none of its work is still running afterwards.

        `communicates`: it has collectives, so that ranks compare where an exception ended it.
        """

    def all_gather(self, shards: list[Tensor], pair: int, group: str = "shard") -> list[Tensor]:
        """Launch: shards ``[chunk, ...]`` -> fresh buffers ``[size * chunk, ...]``."""

    def reduce_scatter(
        self, grads: list[Tensor], pair: int, group: str = "shard", op: str = "avg"
    ) -> list[Tensor]:
        """Launch: gradients ``[size * chunk, ...]`` -> fresh reduced ones ``[chunk, ...]``."""

    def all_reduce(
        self, grads: list[Tensor], pair: int, group: str = "replicate", op: str = "avg"
    ) -> list[Tensor]:
        """Launch: gradients reduced in place; returns them."""

    def reduce_norms(
        self, norms: list[Tensor], pair: int, group: str = "shard", op: str = "sum"
    ) -> list[Tensor]:
        """Launch: norms of gradients, summed up over the ranks in place; returns them."""

    def reduce_now(
        self, tensors: list[Tensor], group: str = "shard", op: str = "max"
    ) -> list[Tensor]:
        """Fresh tensors, reduced over the ranks, for which the compute stream waits."""

    # Collectives of the model's own: fresh tensors; `ranks` is torch's name of the group.

    def model_all_gather(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str
    ) -> list[Tensor]:
        """Launch: contiguous tensors ``[n, ...]`` -> ``[size * n, ...]``."""

    def model_reduce_scatter(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str, op: str
    ) -> list[Tensor]:
        """Launch: contiguous tensors ``[size * n, ...]`` -> ``[n, ...]``."""

    def model_all_reduce(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str, op: str
    ) -> list[Tensor]:
        """Launch: tensors -> contiguous ones, reduced."""

    def model_all_to_all(
        self,
        tensors: list[Tensor],
        pair: int,
        group: str,
        ranks: str,
        into: Sequence[int],
        sent: Sequence[int],
    ) -> list[Tensor]:
        """Launch: contiguous tensors ``[sum(sent), ...]`` -> ``[sum(into), ...]``."""

    def model_broadcast(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str, root: int
    ) -> list[Tensor]:
        """Launch: contiguous tensors -> those of the rank `root` of all."""

    def comm_hook(self, grads: list[Tensor], pair: int) -> list[Tensor]:
        """Launch: the user's reduction of a flat tensor ``[size * n]`` -> ``[n]``."""

    def cast(self, tensors: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        """Launch, or what an all-gather sends: fresh copies in `dtype`."""

    def load(self, tensors: list[Tensor], device: torch.device, pair: int) -> list[Tensor]:
        """Launch, or what is cast or sent next: fresh copies on `device`."""

    def store(self, tensors: list[Tensor], pair: int) -> list[Tensor]:
        """Launch: fresh copies on the CPU."""

    def offload(self, tensors: list[Tensor], pair: int) -> list[Tensor]:
        """Launch: copies on the CPU, laid out as dense tensors are."""

    def reload(self, tensors: list[Tensor], device: torch.device, pair: int) -> list[Tensor]:
        """Launch: copies on `device`, laid out as those."""

    def pack(self, shards: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        """What is sent next: one fresh flat tensor in `dtype`, the concatenated shards."""

    def unpack(
        self,
        packed: list[Tensor],
        chunks: list[list[int]],
        dims: Sequence[int] = (),
        lengths: Sequence[int] = (),
    ) -> list[Tensor]:
        """Of a gathered buffer: a fresh tensor per parameter, all ranks' chunks of it.

        `dims` and `lengths` are those of `fxshard.ir.ops`.
        """

    def reshard(
        self,
        buffers: list[Tensor],
        group: str,
        dims: Sequence[int] = (),
        rows: Sequence[int] = (),
    ) -> list[Tensor]:
        """Fresh copies of this rank's rows, of as many parts as `group` has ranks."""

    def wait(self, tensors: list[Tensor], pair: int) -> None:
        """What comes next runs after the launch `pair`, which wrote `tensors`.

        Where there are streams, `wait_event` has ordered the two.
        """

    def wait_event(self, stream: str, event: str) -> None:
        """What `stream` is given from now on runs after what came before `event`."""

    def record_event(self, stream: str, event: str) -> None:
        """`event` comes after all that `stream` was given so far."""

    def synchronize(self, stream: str) -> None:
        """The host waits for all that `stream` was given so far: it reads it next."""

    def join(self, params: list[Tensor]) -> None:
        """Nothing: other ranks read these unsharded parameters here."""

    def free(self, tensors: list[Tensor]) -> None:
        """Give the storages of `tensors` back now."""


@runtime_checkable
class AllRanks(Protocol):
    """A world that runs every rank inside this process, from the outer graph of a phase."""

    def phase(self, name: str, communicates: bool) -> AbstractContextManager[None]:
        """See `World.phase`."""

    def run(
        self,
        graph: fx.Graph,
        regions: Mapping[str, Callable[..., Any]],
        random: set[str],
        args: Sequence[list[Any]],
    ) -> list[Any]:
        """The results of a phase, per rank.

        Args:
            graph: its outer graph.
            regions: functions of the regions that it calls, by name.
            random: names of those that draw random numbers.
            args: per rank, the values of the placeholders.
        """
