"""One rank over a torch.distributed process group: gloo, NCCL, or the fake one."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from fxshard import compat
from fxshard.errors import RankDiedError, RankMismatchError
from fxshard.world import census

CENSUS_SECONDS = 5.0  # how long a survivor waits for the others before it calls them missing


@dataclasses.dataclass
class _Launch:
    work: dist.Work
    stream: torch.cuda.Stream | None


class C10dWorld:
    """Runs the collectives of a schedule on the process group of a 1-D mesh.

    Each launch is one coalesced collective. On CUDA it is issued from a stream of its own
    ("unshard", "reduce") that first waits for the compute stream, as the schedule's events say;
    buffers are allocated and freed on the compute stream, behind the wait, so that the caching
    allocator needs no ``record_stream``.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.placements: list[Placement] = [Shard(0)]
        self.fake = dist.get_backend(self.group) == "fake"
        self.global_ranks = dist.get_process_group_ranks(self.group)
        self._launched: dict[int, _Launch] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}
        if not self.fake:
            key = f"fxshard/identity/{self.rank}"
            compat.group_store(self.group).set(key, census.identity())

    def all_gather(self, shards: list[Tensor], pair: int) -> list[Tensor]:
        buffers = [s.new_empty((s.shape[0] * self.size, *s.shape[1:])) for s in shards]
        with self._side_stream("unshard", shards[0].device) as stream:
            try:
                work = self.group.allgather_into_tensor_coalesced(buffers, shards)
            except RuntimeError as error:
                raise self._explained(error) from error
        self._launched[pair] = _Launch(work, stream)
        return buffers

    def reduce_scatter(self, grads: list[Tensor], pair: int) -> list[Tensor]:
        results = [g.new_empty((g.shape[0] // self.size, *g.shape[1:])) for g in grads]
        options = dist.ReduceScatterOptions()
        # ReduceOp.AVG over one rank may be wrong on NCCL; the sum of one is its average.
        # (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)
        operation = dist.ReduceOp.AVG if self.size > 1 else dist.ReduceOp.SUM
        options.reduceOp = operation  # type: ignore[assignment]
        with self._side_stream("reduce", grads[0].device) as stream:
            try:
                work = self.group.reduce_scatter_tensor_coalesced(results, grads, options)
            except RuntimeError as error:
                raise self._explained(error) from error
        self._launched[pair] = _Launch(work, stream)
        return results

    def wait(self, tensors: list[Tensor], pair: int) -> None:
        launch = self._launched.pop(pair)
        try:
            if launch.stream is None:
                launch.work.wait()
                return
            with torch.cuda.stream(launch.stream):
                launch.work.wait()
            torch.cuda.current_stream().wait_stream(launch.stream)
        except RuntimeError as error:
            raise self._explained(error) from error

    def free(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    def _side_stream(self, name: str, device: torch.device) -> _SideStream:
        if device.type != "cuda":
            return _SideStream(None)
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(device)
        return _SideStream(self._streams[name])

    # -- agreement between ranks, outside of the collectives ------------------------------------

    def agree(self, lines: Sequence[str], what: str) -> None:
        """Compare `lines` with rank 0's, through the store; all ranks raise, or none.

        No collective is issued, so that ranks that disagree cannot hang in one.

        Raises:
            RankMismatchError: names the first rank that differs and its first differing line, or
                the ranks that never asked.
            RankDiedError: a rank died before it asked.
        """
        if self.fake or self.size == 1:
            return
        store = compat.group_store(self.group)
        # Each rank counts its own questions in the store: the n-th ones belong together.
        base = f"fxshard/agree/{store.add(f'fxshard/agree/rank{self.rank}', 1)}"
        text = "\n".join(lines)
        digest = hashlib.sha256(text.encode()).hexdigest()
        store.set(f"fxshard/reason/{self.rank}", f"waits for all ranks to agree on {what}")
        store.set(f"{base}/asked/{self.rank}", "")
        try:
            if self.rank == 0:
                store.set(f"{base}/text", text)
                store.set(f"{base}/digest", digest)
            store.wait([f"{base}/digest"], self._patience())
            if store.get(f"{base}/digest").decode() != digest:
                store.set(f"{base}/why", self._difference(store.get(f"{base}/text").decode(), text))
                store.add(f"{base}/bad", 1)
            if store.add(f"{base}/seen", 1) == self.size:
                store.set(f"{base}/done", "1")
            store.wait([f"{base}/done"], self._patience())
        except RuntimeError as error:
            absent = [r for r in range(self.size) if not store.check([f"{base}/asked/{r}"])]
            here = f"{self._name(self.rank)} waited {self._patience()} to agree on {what}"
            gone = [rank for rank in absent if census.is_dead(self._told("identity", rank))]
            if gone:
                raise RankDiedError(f"{here}, but {self._names(gone)} died or left.") from error
            raise RankMismatchError(
                f"{here}; {self._names(absent)} never asked. Call the model on all ranks alike: "
                f"same arguments, train/eval and grad mode."
            ) from error
        store.set(f"fxshard/reason/{self.rank}", "")
        if store.add(f"{base}/bad", 0):
            raise RankMismatchError(
                f"ranks differ in {what}. {store.get(f'{base}/why').decode()} "
                f"Build the same model and call it alike on every rank."
            )

    def _difference(self, reference: str, own: str) -> str:
        theirs, ours = reference.splitlines(), own.splitlines()
        for i in range(max(len(theirs), len(ours))):
            a = theirs[i] if i < len(theirs) else "(nothing)"
            b = ours[i] if i < len(ours) else "(nothing)"
            if a != b:
                return (
                    f"First difference, line {i + 1}: {self._name(0)} has '{a}', "
                    f"{self._name(self.rank)} '{b}'."
                )
        return ""

    def _patience(self) -> datetime.timedelta:
        return compat.group_timeout(self.group)

    def _name(self, rank: int) -> str:
        """The rank as the user knows it: its number among all processes."""
        return f"rank {self.global_ranks[rank]}"

    def _names(self, ranks: Sequence[int]) -> str:
        return f"rank {', '.join(str(self.global_ranks[rank]) for rank in ranks)}"

    def _explained(self, error: RuntimeError) -> RuntimeError:
        """The error of a failed collective, with the ranks that are dead or stuck elsewhere."""
        if self.fake:
            return error
        here = f"a collective failed on {self._name(self.rank)}"
        try:
            others = [rank for rank in range(self.size) if rank != self.rank]
            reasons = {rank: why for rank in others if (why := self._told("reason", rank))}
            if reasons:
                who = "; ".join(f"{self._name(rank)} {why}" for rank, why in reasons.items())
                return RankMismatchError(
                    f"{here} because the ranks did not do the same: {who}. Call the model on all "
                    f"ranks alike. Cause: {error}"
                )
            silent, dead = self._census(others)
        except RuntimeError:
            return RankDiedError(
                f"{here} and the store cannot be reached: the rank that hosts it (rank 0 unless "
                f"torchrun does) is gone. Cause: {error}"
            )
        alive = [rank for rank in silent if dead[rank] is False]
        if len(silent) > len(alive):
            gone = [rank for rank in silent if dead[rank]] or [r for r in silent if r not in alive]
            return RankDiedError(
                f"{here}: {self._names(gone)} of {self.size} died or left. Look at its log first; "
                f"restart from the last checkpoint. Cause: {error}"
            )
        if alive:
            return RankMismatchError(
                f"{here}: {self._names(alive)} of {self.size} is alive but did not take part. Call "
                f"the model on all ranks alike. Cause: {error}"
            )
        return error

    def _census(self, others: list[int]) -> tuple[list[int], dict[int, bool | None]]:
        """Sign; return who else has not after a while, and whether they are dead, if known."""
        store = compat.group_store(self.group)
        base = f"fxshard/census/{store.add(f'fxshard/census/rank{self.rank}', 1)}"
        store.set(f"{base}/{self.rank}", "")
        who = {rank: self._told("identity", rank) for rank in others}
        deadline = time.monotonic() + CENSUS_SECONDS
        while True:
            silent = [rank for rank in others if not store.check([f"{base}/{rank}"])]
            dead = {rank: census.is_dead(who[rank]) for rank in silent}
            if not silent or any(dead.values()) or time.monotonic() > deadline:
                return silent, dead
            time.sleep(0.05)

    def _told(self, what: str, rank: int) -> str:
        store = compat.group_store(self.group)
        key = f"fxshard/{what}/{rank}"
        return store.get(key).decode() if store.check([key]) else ""


class _SideStream:
    """Enter a stream that has waited for the compute stream; on CPU there is none."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self.context = torch.cuda.stream(stream)

    def __enter__(self) -> torch.cuda.Stream | None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            self.context.__enter__()
        return self.stream

    def __exit__(self, *exc: object) -> None:
        if self.stream is not None:
            self.context.__exit__(*exc)
