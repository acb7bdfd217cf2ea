"""One rank over torch.distributed process groups: gloo, NCCL, or the fake one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from fxshard import compat
from fxshard.world.peers import Peers

OPS: dict[str, Any] = {
    "avg": dist.ReduceOp.AVG,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@dataclasses.dataclass
class _Launch:
    work: dist.Work | None
    stream: torch.cuda.Stream | None


class C10dWorld:
    """Runs the collectives of a schedule on the process groups of a mesh.

    Each launch is one coalesced collective. On CUDA it is issued from a stream of its own
    ("unshard", "reduce", "load", "store") that first waits for the compute stream, as the
    schedule's events say; buffers are allocated and freed on the compute stream, behind the wait,
    so that the caching allocator needs no ``record_stream``.

    Attributes:
        mesh: 1-D, or 2-D replicate x shard.
        placements: of a parameter on `mesh`.
        size: ranks that share a parameter; `rank` is this one's number among them.
        replicas: groups of ranks that hold the same shards.
        groups: by the names that operators use.
        reductions: the group of reduce-scatters, if it is not that of all-gathers.
    """

    def __init__(
        self, mesh: DeviceMesh, *, sharded: bool = True, reshard: Iterable[int] = ()
    ) -> None:
        """Args:
        mesh: of the ranks.
        sharded: False: a 1-D mesh is one of replicas.
        reshard: sizes of the groups that units are resharded to after forward.
        """
        self.mesh = mesh
        self.hook: Callable[..., None] | None = None  # takes what the user's takes behind its state
        self.placements: list[Placement] = [Shard(0)]
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.size, self.rank, self.replicas = 1, 0, 1
        if mesh.ndim == 2:
            self.placements = [Replicate(), Shard(0)]
        elif not sharded:
            self.placements = [Replicate()]
        if mesh.ndim == 2 or not sharded:
            self.groups["replicate"] = mesh.get_group(0)
            self.replicas = mesh.size(0)
        if sharded:
            self.groups["shard"] = mesh.get_group(mesh.ndim - 1)
            self.size, self.rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        for size in sorted(set(reshard)):
            if size < self.size:
                rows = mesh.mesh.reshape(-1, size).tolist()
                (mine,) = [row for row in rows if dist.get_rank() in row]
                # Not by all ranks of the process group: some may be in another mesh, or in none.
                group = dist.new_group(mine, use_local_synchronization=True)
                self.groups[f"reshard{size}"] = group
        self.reductions: dist.ProcessGroup | None = None
        self.peers = {name: Peers(group) for name, group in self.groups.items()}
        self._everyone = [peers for name, peers in self.peers.items() if "reshard" not in name]
        if mesh.ndim == 2 and mesh.size() == dist.get_world_size():
            self._everyone = [Peers(_default_group())]
        self._launched: dict[int, _Launch] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}

    def all_gather(self, shards: list[Tensor], pair: int, group: str = "shard") -> list[Tensor]:
        size = self.groups[group].size()
        buffers = [s.new_empty((s.shape[0] * size, *s.shape[1:])) for s in shards]
        with self._launch("unshard", pair, shards, group, behind=("load",)) as launch:
            launch.work = self.groups[group].allgather_into_tensor_coalesced(buffers, shards)
        return buffers

    def reduce_scatter(
        self, grads: list[Tensor], pair: int, group: str = "shard", op: str = "avg"
    ) -> list[Tensor]:
        members = self.reductions or self.groups[group]
        size = members.size()
        results = [g.new_empty((g.shape[0] // size, *g.shape[1:])) for g in grads]
        options = dist.ReduceScatterOptions()
        options.reduceOp = OPS[op]
        with self._launch("reduce", pair, grads, group) as launch:
            launch.work = members.reduce_scatter_tensor_coalesced(results, grads, options)
        return results

    def all_reduce(
        self, grads: list[Tensor], pair: int, group: str = "replicate", op: str = "avg"
    ) -> list[Tensor]:
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = OPS[op]
        with self._launch("reduce", pair, grads, group) as launch:
            launch.work = self.groups[group].allreduce_coalesced(grads, options)
        return grads

    def comm_hook(self, grads: list[Tensor], pair: int) -> list[Tensor]:
        assert self.hook is not None
        results = grads
        group = "shard" if self.size > 1 else "replicate"
        with self._launch("reduce", pair, grads, group):
            if self.size > 1:
                results = [g.new_empty(g.numel() // self.size) for g in grads]
                self.hook(grads[0], results[0])
            else:
                self.hook(grads[0])
        return results

    def cast(self, tensors: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        made = [torch.empty_like(t, dtype=dtype) for t in tensors]
        with self._launch("unshard", pair, tensors, behind=("load",)):
            compat.foreach_copy(made, tensors)
        return made

    def load(self, tensors: list[Tensor], device: torch.device, pair: int) -> list[Tensor]:
        made = [torch.empty_like(t, device=device) for t in tensors]
        with self._launch("load", pair, made):
            for to, tensor in zip(made, tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
        return made

    def store(self, tensors: list[Tensor], pair: int) -> list[Tensor]:
        pin = tensors[0].device.type == "cuda"
        made = [torch.empty_like(t, device="cpu", pin_memory=pin) for t in tensors]
        with self._launch("store", pair, tensors):
            for to, tensor in zip(made, tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
        return made

    def reshard(self, buffers: list[Tensor], group: str) -> list[Tensor]:
        size, rank = self.groups[group].size(), self.groups[group].rank()
        return [buffer.chunk(size)[rank].clone() for buffer in buffers]

    def wait(self, tensors: list[Tensor], pair: int) -> None:
        launch = self._launched.pop(pair)
        with self._explained("shard" if "shard" in self.groups else "replicate"):
            if launch.stream is None:
                if launch.work is not None:
                    launch.work.wait()
                return
            if launch.work is not None:
                with torch.cuda.stream(launch.stream):
                    launch.work.wait()
            torch.cuda.current_stream().wait_stream(launch.stream)
            if tensors[0].device.type == "cpu":
                launch.stream.synchronize()  # the CPU reads what was copied there

    def free(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    @contextlib.contextmanager
    def _launch(
        self,
        name: str,
        pair: int,
        tensors: list[Tensor],
        group: str | None = None,
        behind: tuple[str, ...] = (),
    ) -> Iterator[_Launch]:
        """Issue work from the stream `name`, behind the compute stream and those in `behind`."""
        launch = _Launch(None, None)
        self._launched[pair] = launch
        with contextlib.ExitStack() as stack:
            if tensors[0].device.type == "cuda":
                launch.stream = self._stream(name, tensors[0].device)
                launch.stream.wait_stream(torch.cuda.current_stream())
                for other in behind:
                    if other in self._streams:
                        launch.stream.wait_stream(self._streams[other])
                stack.enter_context(torch.cuda.stream(launch.stream))
            if group is not None:
                stack.enter_context(self._explained(group))
            yield launch

    def _stream(self, name: str, device: torch.device) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(device)
        return self._streams[name]

    @contextlib.contextmanager
    def _explained(self, group: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.peers[group].explained(error) from error

    def separate_reductions(self) -> None:
        """Give reduce-scatters a communicator of their own; collective over the shard group."""
        ranks = dist.get_process_group_ranks(self.groups["shard"])
        self.reductions = dist.new_group(ranks, use_local_synchronization=True)

    def agree(self, lines: Sequence[str], what: str) -> None:
        """Compare `lines` over all ranks of the mesh; all raise, or none (see `Peers.agree`)."""
        for peers in self._everyone:
            peers.agree(lines, what)
