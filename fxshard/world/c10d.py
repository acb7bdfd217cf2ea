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

from fxshard import compat
from fxshard.errors import RankDiedError, RankMismatchError

CENSUS_SECONDS = 5.0  # how long survivors wait for each other before they name the missing


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
        self.fake = dist.get_backend(self.group) == "fake"
        self._launched: dict[int, _Launch] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}

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
                says that some ranks never asked.
        """
        if self.fake or self.size == 1:
            return
        store = compat.group_store(self.group)
        # Each rank counts its own questions in the store: the n-th ones belong together.
        base = f"fxshard/agree/{store.add(f'fxshard/agree/rank{self.rank}', 1)}"
        text = "\n".join(lines)
        digest = hashlib.sha256(text.encode()).hexdigest()
        store.set(f"fxshard/reason/{self.rank}", f"waits for all ranks to agree on {what}")
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
        except dist.DistStoreError as error:
            raise RankMismatchError(
                f"rank {self.rank} waited {self._patience()} for the other ranks to agree on "
                f"{what}; some never asked. Call the model on all ranks alike: same arguments, "
                f"train/eval and grad mode."
            ) from error
        if store.add(f"{base}/bad", 0):
            raise RankMismatchError(
                f"ranks differ in {what}. {store.get(f'{base}/why').decode()} "
                f"Build the same model and call it alike on every rank."
            )
        store.set(f"fxshard/reason/{self.rank}", "")

    def _difference(self, reference: str, own: str) -> str:
        theirs, ours = reference.splitlines(), own.splitlines()
        for i in range(max(len(theirs), len(ours))):
            a = theirs[i] if i < len(theirs) else "(nothing)"
            b = ours[i] if i < len(ours) else "(nothing)"
            if a != b:
                return f"First difference, line {i + 1}: rank 0 has '{a}', rank {self.rank} '{b}'."
        return ""

    def _patience(self) -> datetime.timedelta:
        return compat.group_timeout(self.group)

    def _explained(self, error: RuntimeError) -> RuntimeError:
        """The error of a failed collective, with the ranks that are gone or stuck elsewhere.

        Every survivor signs a list in the store; who has not signed is dead.
        """
        if self.fake:
            return error
        try:
            store = compat.group_store(self.group)
            base = f"fxshard/census/{store.add(f'fxshard/census/rank{self.rank}', 1)}"
            store.set(f"{base}/{self.rank}", "alive")
            deadline = time.monotonic() + CENSUS_SECONDS
            missing = [rank for rank in range(self.size) if rank != self.rank]
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not store.check([f"{base}/{rank}"])]
                time.sleep(0.05)
            reasons = {
                rank: store.get(f"fxshard/reason/{rank}").decode()
                for rank in range(self.size)
                if store.check([f"fxshard/reason/{rank}"])
            }
        except RuntimeError:
            return RankDiedError(
                f"a collective failed on rank {self.rank} and the store cannot be reached: the "
                f"rank that hosts it (rank 0 unless torchrun does) is gone. Cause: {error}"
            )
        stuck = {rank: why for rank, why in reasons.items() if why and rank != self.rank}
        if stuck:
            who = "; ".join(f"rank {rank} {why}" for rank, why in stuck.items())
            return RankMismatchError(
                f"a collective failed on rank {self.rank} because the ranks did not do the same: "
                f"{who}. Call the model on all ranks alike. Cause: {error}"
            )
        if missing:
            names = ", ".join(map(str, missing))
            return RankDiedError(
                f"a collective failed on rank {self.rank}: rank {names} of {self.size} died or "
                f"left. Look at its log first; restart from the last checkpoint. Cause: {error}"
            )
        return error


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
