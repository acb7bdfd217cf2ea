"""One rank over torch.distributed process groups: gloo, NCCL, or the fake one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from fxshard import compat
from fxshard.errors import RankMismatchError
from fxshard.world.backends import as_real, backend_of
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
    """What is in flight of one launch: works of torch.distributed."""

    works: list[dist.Work] = dataclasses.field(default_factory=list)


class C10dWorld:
    """Runs the collectives of a schedule on the process groups of a mesh.

    A launch makes the calls that `fxshard.world.backends` states. On CUDA they are issued from the
    stream that its tag says (`fxshard.verify.orders.STREAMS`); streams wait for events as the
    program's annotations say, and for nothing else. Buffers are allocated and freed on the compute
    stream, so that the caching allocator needs no ``record_stream`` (`fxshard.verify.orders` says
    why).

    Attributes:
        cuda: where streams and events come from; None on CPU, where nothing needs them.
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
                self.groups[f"reshard{size}"] = compat.new_group(mine, self.groups["shard"])
        self.reductions: dist.ProcessGroup | None = None
        self.peers = {name: Peers(group) for name, group in self.groups.items()}
        self._everyone = [peers for name, peers in self.peers.items() if "reshard" not in name]
        if mesh.ndim == 2 and mesh.size() == dist.get_world_size():
            self._everyone = [Peers(_default_group())]
        self._calls = 0
        self._left = False
        self._launched: dict[int, _Launch] = {}
        self.cuda: Any = torch.cuda if mesh.device_type == "cuda" else None
        self._streams: dict[str, Any] = {}
        self._events: dict[str, Any] = {}

    def all_gather(self, shards: list[Tensor], pair: int, group: str = "shard") -> list[Tensor]:
        members = self.groups[group]
        size = members.size()
        buffers = [s.new_empty((s.shape[0] * size, *s.shape[1:])) for s in shards]
        with self._launch("unshard", pair, group) as launch:
            for work in backend_of(members).all_gather(members, buffers, shards):
                launch.works.append(work)
        return buffers

    def reduce_scatter(
        self, grads: list[Tensor], pair: int, group: str = "shard", op: str = "avg"
    ) -> list[Tensor]:
        members = self.reductions or self.groups[group]
        size = members.size()
        results = [g.new_empty((g.shape[0] // size, *g.shape[1:])) for g in grads]
        options = dist.ReduceScatterOptions()
        options.reduceOp = OPS[op]
        with self._launch("reduce", pair, group) as launch:
            into, sent = list(map(as_real, results)), list(map(as_real, grads))
            launch.works.append(members.reduce_scatter_tensor_coalesced(into, sent, options))
        return results

    def all_reduce(
        self, grads: list[Tensor], pair: int, group: str = "replicate", op: str = "avg"
    ) -> list[Tensor]:
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = OPS[op]
        grads = [grad.resolve_conj() for grad in grads]
        with self._launch("all-reduce", pair, group) as launch:
            sent = list(map(as_real, grads))
            launch.works.append(self.groups[group].allreduce_coalesced(sent, options))
        return grads

    def comm_hook(self, grads: list[Tensor], pair: int) -> list[Tensor]:
        assert self.hook is not None
        results = grads
        group = "shard" if self.size > 1 else "replicate"
        if self.size > 1:
            results = [g.new_empty(g.numel() // self.size) for g in grads]
        with self._launch("reduce", pair, group):
            if self.size > 1:
                self.hook(grads[0], results[0])
            else:
                self.hook(grads[0])
        return results

    def cast(self, tensors: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        made = [torch.empty_like(t, dtype=dtype) for t in tensors]
        with self._launch("unshard", pair):
            compat.foreach_copy(made, tensors)
        return made

    def load(self, tensors: list[Tensor], device: torch.device, pair: int) -> list[Tensor]:
        made = [torch.empty_like(t, device=device) for t in tensors]
        with self._launch("load", pair):
            for to, tensor in zip(made, tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
        return made

    def store(self, tensors: list[Tensor], pair: int) -> list[Tensor]:
        pin = tensors[0].device.type == "cuda"
        made = [torch.empty_like(t, device="cpu", pin_memory=pin) for t in tensors]
        with self._launch("store", pair):
            for to, tensor in zip(made, tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
        return made

    def pack(self, shards: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        numels = [shard.numel() for shard in shards]
        flat = shards[0].new_empty(sum(numels), dtype=dtype)
        with self._launch("unshard", pair):
            parts = zip(flat.split(numels), shards, strict=True)
            compat.foreach_copy([part.view(shard.shape) for part, shard in parts], shards)
        return [flat]

    def unpack(self, packed: list[Tensor], chunks: list[list[int]]) -> list[Tensor]:
        numels = [math.prod(chunk) for chunk in chunks]
        size = packed[0].numel() // sum(numels)
        made = [packed[0].new_empty((size * rows, *rest)) for rows, *rest in chunks]
        parts = list(packed[0].view(size, -1).split(numels, 1))
        compat.foreach_copy([whole.view(size, -1) for whole in made], parts)
        return made

    def reshard(self, buffers: list[Tensor], group: str) -> list[Tensor]:
        size, rank = self.groups[group].size(), self.groups[group].rank()
        return [buffer.chunk(size)[rank].clone() for buffer in buffers]

    def wait(self, tensors: list[Tensor], pair: int) -> None:
        launch = self._launched.pop(pair)
        with self._explained("shard" if "shard" in self.groups else "replicate"):
            for work in launch.works:
                work.wait()
        if self.cuda is not None and tensors[0].device.type == "cpu":
            self._stream("store").synchronize()  # the CPU reads what was copied there

    def wait_event(self, stream: str, event: str) -> None:
        if self.cuda is not None:
            self._stream(stream).wait_event(self._events[event])

    def record_event(self, stream: str, event: str) -> None:
        if self.cuda is not None:
            if event not in self._events:
                self._events[event] = self.cuda.Event()
            self._events[event].record(self._stream(stream))

    def free(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    @contextlib.contextmanager
    def _launch(self, stream: str, pair: int, group: str | None = None) -> Iterator[_Launch]:
        """Issue work from `stream`."""
        launch = _Launch()
        self._launched[pair] = launch
        with contextlib.ExitStack() as stack:
            if self.cuda is not None:
                stack.enter_context(self.cuda.stream(self._stream(stream)))
            if group is not None:
                stack.enter_context(self._explained(group))
            yield launch
            if self.cuda is not None:
                while launch.works:
                    launch.works.pop().wait()  # `stream` waits for NCCL's own; the host goes on

    def _stream(self, name: str) -> Any:
        if name == "compute":
            return self.cuda.current_stream()
        if name not in self._streams:
            self._streams[name] = self.cuda.Stream()
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
        self.reductions = compat.new_group(ranks, self.groups["shard"])

    def begin_call(self) -> None:
        """A call of the model begins.

        Raises:
            RankMismatchError: this rank has left the process group.
        """
        if self._left:
            raise RankMismatchError(
                "this rank has left the process group, after it would have done something else "
                "than the other ranks: start again from the last checkpoint."
            )

    def run_call(self, digest: str, known: Mapping[str, Sequence[str]]) -> None:
        """The call runs a program with collectives that all agree on (see `Peers.note_call`).

        Calls without any are not counted: ranks may make as many as they like.
        """
        self._calls += 1
        for peers in self._everyone:
            peers.note_call(self._calls, digest, known, self._leave)

    def any_rank(self, flags: str) -> Callable[[], str]:
        """Tell all ranks of the mesh which of some things are true here ("0" or "1" for each).

        Call it on all ranks, in front of a collective; the result behind it.

        Returns:
            What gives a "1" wherever a rank has one; call it on all ranks, unless all are "1" here.
        """
        told = [peers for peers in self._everyone if not peers.alone]
        if "0" not in flags:
            for peers in told:
                peers.tell(flags)
            return lambda: flags
        first = [peers.tell(flags) for peers in told[:1]]

        def found() -> str:
            known = flags
            for i, peers in enumerate(told):  # the second group: copies of what the first knows
                known = peers.any_of(first.pop() if i == 0 else peers.tell(known), known)
            return known

        return found

    def agree(
        self, lines: Sequence[str], what: str, before: Collection[Sequence[str]] = ()
    ) -> None:
        """Compare `lines` over all ranks of the mesh; all raise, or none (see `Peers.agree`)."""
        for peers in self._everyone:
            peers.agree(lines, what, self._leave, self._calls + 1 if before else 0, before)

    def _leave(self) -> None:
        """Close the connections of this rank: others that wait for it in a collective fail now.

        gloo closes them when nothing refers to the group any more.
        """
        self._left = True
        for peers in (*self._everyone, *self.peers.values()):
            peers.drop()
        self.groups.clear()
        compat.forget_groups(self.mesh)
        self.reductions = None
        dist.destroy_process_group()
