"""One rank over torch.distributed process groups: gloo, NCCL, or the fake one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from fxshard._torch import optimizers, process_groups
from fxshard.errors import ConfigError
from fxshard.ir import layout, ops
from fxshard.ir.tensor_parallel import among, group_name
from fxshard.runtime.world.agreement import AgreeingRank, Explained
from fxshard.runtime.world.aliases import Aliases
from fxshard.runtime.world.backends import as_bytes, as_real, backend_of
from fxshard.runtime.world.peers import Peers

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


def new_empty(tensor: Tensor, shape: Sequence[int], **options: Any) -> Tensor:
    """``tensor.new_empty``, for a launch that writes all of it. See `unfilled`."""
    with unfilled():
        return tensor.new_empty(shape, **options)


def empty_like(tensor: Tensor, **options: Any) -> Tensor:
    """``torch.empty_like``, for a launch that writes all of it. See `unfilled`."""
    with unfilled():
        return torch.empty_like(tensor, **options)


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """What is made inside holds anything, also under ``torch.use_deterministic_algorithms``.

    That fills new memory with NaN by a kernel of the compute stream. The stream of a launch does
    not wait for it, so it could come after what the launch has written.
    """
    deterministic: Any = torch.utils.deterministic
    before = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = before


@dataclasses.dataclass
class _Launch:
    """What is in flight of one launch: works of torch.distributed, and what they have.

    It is the context that they are issued in; `explained` is of its group.
    """

    works: list[dist.Work] = dataclasses.field(default_factory=list)
    held: Aliases = dataclasses.field(default_factory=Aliases)
    explained: Explained | None = None

    def __enter__(self) -> _Launch:
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.explained is not None:
            self.explained.__exit__(*raised)

    def alias(self, tensor: Tensor) -> Tensor:
        """What to give to a collective in place of `tensor`."""
        return self.held.of(tensor)

    def aliases(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self.held.of(tensor) for tensor in tensors]


@dataclasses.dataclass(frozen=True)
class Members:
    """The ranks that share the parameters on one mesh.

    Attributes:
        mesh: 1-D, or 2-D replicate x shard.
        grid: how many they are.
        rank: the number of this one among those that share a parameter.
        sharded: False: a 1-D mesh is one of replicas.
    """

    mesh: DeviceMesh
    grid: layout.Grid
    rank: int
    sharded: bool = True

    @classmethod
    def of(
        cls, mesh: DeviceMesh, name: str = "", *, sharded: bool = True, batches: int = 0
    ) -> Members:
        """The ranks of a mesh; `name` and `batches`: see `layout.Grid`.

        Raises:
            ConfigError: see `require_order`.
        """
        require_order(mesh)
        last = mesh.ndim - 1
        shards = mesh.size(last) if sharded else 1
        replicas = mesh.size(0) if mesh.ndim == 2 or not sharded else 1
        rank = mesh.get_local_rank(last) if sharded else 0
        return cls(mesh, layout.Grid(shards, replicas, name, batches), rank, sharded)

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """By the names that operators use, the replicas' first."""
        found = {}
        if self.mesh.ndim == 2 or not self.sharded:
            found[self.grid.group("replicate")] = self.mesh.get_group(0)
        if self.sharded:
            found[self.grid.group("shard")] = self.mesh.get_group(self.mesh.ndim - 1)
        return found

    def placements(self, dim: int = 0) -> list[Placement]:
        """Of a parameter on `mesh` that is sharded along a dimension."""
        every = layout.placements(dim)
        return [every[name.partition("@")[0]] for name in self.groups]


def require_order(mesh: DeviceMesh) -> None:
    """Check that process groups number the ranks of a 1-D or 2-D mesh as the mesh does.

    Collectives go by the one, and torch's checkpoints of DTensors by the other. Each rank comes to
    the same answer.

    Raises:
        ConfigError: they do not.
    """
    rows = mesh.mesh
    if mesh.ndim == 1:
        right = dist.get_process_group_ranks(mesh.get_group()) == rows.tolist()
    else:
        order = rows.argsort(0)
        right = bool((rows.diff(dim=1) > 0).all() and (order == order[:, :1]).all())
    if not right:
        raise ConfigError(
            f"the mesh has ranks {rows.tolist()}, and process groups order theirs by number: a "
            f"rank would hold other rows than the mesh says, and save them as those. Let ranks "
            f"ascend along the dimension that parameters are sharded over, and be in one order "
            f"along that of replicas, as init_device_mesh has them."
        )


class C10dWorld(AgreeingRank):
    """Runs the collectives of a schedule on the process groups of a mesh.

    A launch makes the calls that `fxshard.runtime.world.backends` decides. On CUDA they are issued
    from the stream of the operator (`fxshard.ir.ops`). Streams wait for the events of the program,
    and for nothing else. Buffers are allocated and freed on the compute stream, so the caching
    allocator needs no ``record_stream`` (`fxshard.verify.orders` explains why).

    Attributes:
        cuda: ``torch.cuda``, for streams and events; None on CPU, which needs none.
        mesh: 1-D, or 2-D replicate x shard.
        size: ranks that share a parameter; `rank` is this one's number among them.
        replicas: groups of ranks that hold the same shards.
        groups: by the names that operators use.
        reductions: by the names of groups, those of their reduce-scatters, where they are others.
        meshes: the ranks of each mesh, by its name; "" is `mesh`. They are among those of `mesh`.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        sharded: bool = True,
        reshard: Iterable[int] = (),
        beside: Sequence[DeviceMesh] = (),
        others: Iterable[Members] = (),
    ) -> None:
        """Args:
        mesh: of the ranks.
        sharded: False: a 1-D mesh is one of replicas.
        reshard: sizes of the groups that units are resharded to after forward.
        beside: the dimensions of tensor parallelism and experts, see `placed_meshes`.
        others: meshes that some parameters are on instead.
        """
        self.mesh = mesh
        self.hook: Callable[..., None] | None = None  # the user's, with its state bound
        own = Members.of(mesh, sharded=sharded)
        self.meshes: dict[str, Members] = {each.grid.name: each for each in (own, *others)}
        self.groups: dict[str, dist.ProcessGroup] = {}
        for each in self.meshes.values():
            self.groups |= each.groups
        self.size: int = own.grid.shards
        self.rank: int = own.rank
        self.replicas: int = own.grid.replicas
        for each, size in itertools.product(self.meshes.values(), sorted(set(reshard))):
            if size < each.grid.shards:
                rows = each.mesh.mesh.reshape(-1, size).tolist()
                (mine,) = [row for row in rows if dist.get_rank() in row]
                parent = self.groups[each.grid.group("shard")]
                group = process_groups.shared_group(mine, parent)
                self.groups[each.grid.group(f"reshard{size}")] = group
        everyone, ranks = [*own.groups], mesh.size()
        self.groups |= {group_name(other): other.get_group() for other in beside}
        if beside and not among(beside[0], mesh):  # with it all ranks can be reached
            everyone.append(group_name(beside[0]))
            ranks *= beside[0].size()
        process_groups.let_go_before_exit()
        coalesce = all(backend_of(group).coalesces_gathers for group in self.groups.values())
        if mesh.device_type == "cpu" and not coalesce:
            process_groups.gather_one_by_one()  # also for all-gathers that torch makes
        self.reductions: dict[str, dist.ProcessGroup] = {}
        peers = {name: Peers(group) for name, group in self.groups.items()}
        every = [peers[name] for name in everyone]
        if len(every) > 1 and ranks == dist.get_world_size():
            every = [Peers(_default_group())]
            near = peers["shard" if sharded else "replicate"]
            every[0].next_shard = near.global_ranks[near.next_shard]
        super().__init__(every, peers)
        self._launched: dict[int, _Launch] = {}
        self.cuda: Any = torch.cuda if mesh.device_type == "cuda" else None
        self._streams: dict[str, Any] = {}
        self._events: dict[str, Any] = {}

    @property
    def grids(self) -> dict[str, layout.Grid]:
        """The ranks of each mesh, by its name."""
        return {name: members.grid for name, members in self.meshes.items()}

    def all_gather(
        self, shards: list[Tensor], pair: int, group: str = "shard", *, freed: bool = True
    ) -> list[Tensor]:
        """`freed`: see `_gather`; True of programs, False of what eager code gathers and drops."""
        return self._gather(shards, self.groups[group], ops.all_gather, pair, group, freed=freed)

    def reduce_scatter(
        self, grads: list[Tensor], pair: int, group: str = "shard", op: str = "avg"
    ) -> list[Tensor]:
        members = self.reductions.get(group) or self.groups[group]
        return self._reduce(grads, op, members, ops.reduce_scatter, pair, group)

    def _gather(
        self, tensors: list[Tensor], members: Any, *launched: Any, freed: bool = True
    ) -> list[Tensor]:
        """`launched`: see `_launch`; `freed`: buffers are by `free`, and not by being dropped."""
        buffers = [new_empty(t, layout.gathered(t.shape, members.size())) for t in tensors]
        with self._launch(*launched) as launch:
            into, sent = list(map(as_bytes, buffers)), launch.aliases(map(as_bytes, tensors))
            alias = None if freed else launch.alias
            launch.works += backend_of(members).all_gather(members, into, sent, alias)
        return buffers

    def _reduce(self, tensors: list[Tensor], op: str, members: Any, *launched: Any) -> list[Tensor]:
        """`launched`: see `_launch`."""
        results = [new_empty(t, layout.part(t.shape, members.size())) for t in tensors]
        options = dist.ReduceScatterOptions()
        options.reduceOp = OPS[op]
        with self._launch(*launched) as launch:
            into, sent = list(map(as_real, results)), launch.aliases(map(as_real, tensors))
            launch.works.append(members.reduce_scatter_tensor_coalesced(into, sent, options))
        return results

    def all_reduce(
        self, grads: list[Tensor], pair: int, group: str = "replicate", op: str = "avg"
    ) -> list[Tensor]:
        return self._all_reduce([grad.resolve_conj() for grad in grads], pair, group, op)

    def reduce_norms(
        self, norms: list[Tensor], pair: int, group: str = "shard", op: str = "sum"
    ) -> list[Tensor]:
        return self._all_reduce(norms, pair, group, op, ops.reduce_norms)

    def _all_reduce(
        self, grads: list[Tensor], pair: int, group: str, op: str, operator: Any = ops.all_reduce
    ) -> list[Tensor]:
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = OPS[op]
        with self._launch(operator, pair, group) as launch:
            # Flat: gloo copies the one tensor of a launch back from a view of its shape, which must
            # have its strides, also those of dimensions with one element.
            sent = launch.aliases(as_real(grad).view(-1) for grad in grads)
            launch.works.append(self.groups[group].allreduce_coalesced(sent, options))
        return grads

    def reduce_now(
        self, tensors: list[Tensor], group: str = "shard", op: str = "max"
    ) -> list[Tensor]:
        made = [tensor.clone() for tensor in tensors]
        options = dist.AllreduceOptions()
        options.reduceOp = OPS[op]
        with self._at_once(group) as launch:
            sent = [as_real(tensor).view(-1) for tensor in made]
            call = self.groups[group].allreduce
            launch.works += [call([each], options) for each in launch.aliases(sent)]
        return made

    def all_to_all(
        self, into: Tensor, sent: Tensor, received: Sequence[int], given: Sequence[int]
    ) -> None:
        """Send each rank of the shard group its part of `sent`; over when the next operator reads.

        Args:
            into, sent: flat; the parts from and for each rank, one after the other.
            received, given: their lengths in elements.
        """
        lengths = list(received), list(given)
        with self._at_once("shard") as launch:
            call = self.groups["shard"].alltoall_base
            launch.works.append(call(launch.alias(into), launch.alias(sent), *lengths))

    def model_all_gather(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str
    ) -> list[Tensor]:
        members = process_groups.called(ranks)
        launched = ops.model_all_gather, pair, group, group
        return self._gather(tensors, members, *launched, freed=False)

    def model_reduce_scatter(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str, op: str
    ) -> list[Tensor]:
        members = process_groups.called(ranks)
        return self._reduce(tensors, op, members, ops.model_reduce_scatter, pair, group, group)

    def model_all_reduce(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str, op: str
    ) -> list[Tensor]:
        made = [new_empty(tensor, tensor.shape) for tensor in tensors]
        options = dist.AllreduceOptions()
        options.reduceOp = OPS[op]
        with self._launch(ops.model_all_reduce, pair, group, stream=group) as launch:
            for copy, tensor in zip(made, tensors, strict=True):
                copy.copy_(tensor)
                sent = launch.aliases([as_real(copy)])
                launch.works.append(process_groups.called(ranks).allreduce(sent, options))
        return made

    def model_all_to_all(
        self,
        tensors: list[Tensor],
        pair: int,
        group: str,
        ranks: str,
        into: Sequence[int],
        sent: Sequence[int],
    ) -> list[Tensor]:
        made = [new_empty(tensor, (sum(into), *tensor.shape[1:])) for tensor in tensors]
        lengths = list(into), list(sent)
        with self._launch(ops.model_all_to_all, pair, group, stream=group) as launch:
            for rows, tensor in zip(made, tensors, strict=True):
                call = process_groups.called(ranks).alltoall_base
                launch.works.append(call(launch.alias(rows), launch.alias(tensor), *lengths))
        return made

    def model_broadcast(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str, root: int
    ) -> list[Tensor]:
        made = [new_empty(tensor, tensor.shape) for tensor in tensors]
        options = dist.BroadcastOptions()
        options.rootRank = root
        with self._launch(ops.model_broadcast, pair, group, stream=group) as launch:
            for copy, tensor in zip(made, tensors, strict=True):
                copy.copy_(tensor)
                held = launch.aliases([copy])
                launch.works.append(process_groups.called(ranks).broadcast(held, options))
        return made

    def comm_hook(self, grads: list[Tensor], pair: int) -> list[Tensor]:
        assert self.hook is not None
        results = grads
        group = "shard" if self.size > 1 else "replicate"
        if self.size > 1:
            results = [new_empty(g, layout.part(g.shape, self.size)) for g in grads]
        with self._launch(ops.comm_hook, pair, group):
            if self.size > 1:
                self.hook(grads[0], results[0])
            else:
                self.hook(grads[0])
        return results

    def cast(self, tensors: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        made = [empty_like(t, dtype=dtype) for t in tensors]
        with self._launch(ops.cast, pair):
            optimizers.foreach_copy(made, tensors)
        return made

    def load(self, tensors: list[Tensor], device: torch.device, pair: int) -> list[Tensor]:
        made = [empty_like(t, device=device) for t in tensors]
        with self._launch(ops.load, pair):
            for to, tensor in zip(made, tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
        return made

    def reload(self, tensors: list[Tensor], device: torch.device, pair: int) -> list[Tensor]:
        return self.load(tensors, device, pair)

    def store(self, tensors: list[Tensor], pair: int) -> list[Tensor]:
        pin = tensors[0].device.type == "cuda"
        made = [empty_like(t, device="cpu", pin_memory=pin) for t in tensors]
        with self._launch(ops.store, pair):
            for to, tensor in zip(made, tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
        return made

    def offload(self, tensors: list[Tensor], pair: int) -> list[Tensor]:
        return self.store(tensors, pair)

    def pack(self, shards: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        flat = new_empty(shards[0], (sum(shard.numel() for shard in shards),), dtype=dtype)
        with self._launch(ops.pack, pair):
            pieces = layout.pieces(flat, [shard.shape for shard in shards])
            optimizers.foreach_copy(pieces, shards)
        return [flat]

    def unpack(
        self,
        packed: list[Tensor],
        chunks: list[list[int]],
        dims: Sequence[int] = (),
        lengths: Sequence[int] = (),
    ) -> list[Tensor]:
        made, pairs = layout.unpacked_places(packed[0], chunks, dims, lengths)
        optimizers.foreach_copy([place for _, place in pairs], [sent for sent, _ in pairs])
        return made

    def reshard(
        self,
        buffers: list[Tensor],
        group: str,
        dims: Sequence[int] = (),
        rows: Sequence[int] = (),
    ) -> list[Tensor]:
        size, rank = self.groups[group].size(), self.groups[group].rank()
        if dims:
            every = zip(buffers, dims, rows, strict=True)
            return [layout.chunk_of(*each, rank) for each in every]
        return [layout.part_of(buffer, rank, size).clone() for buffer in buffers]

    def wait(self, tensors: list[Tensor], pair: int) -> None:
        with self.explained("shard" if "shard" in self.groups else "replicate"):
            if pair in self._launched:  # it is not, if what it gathers was kept
                self._finish(self._launched[pair])
        self._launched.pop(pair, None)

    def synchronize(self, stream: str) -> None:
        if self.cuda is not None:
            self._stream(stream).synchronize()

    def wait_event(self, stream: str, event: str) -> None:
        if self.cuda is not None:
            self._stream(stream).wait_event(self._events[event])

    def record_event(self, stream: str, event: str) -> None:
        if self.cuda is not None:
            if event not in self._events:
                self._events[event] = self.cuda.Event()
            self._events[event].record(self._stream(stream))

    def join(self, params: list[Tensor]) -> None:
        pass

    def free(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    def _launch(
        self, operator: Any, pair: int, group: str | None = None, stream: str = ""
    ) -> contextlib.AbstractContextManager[_Launch]:
        """Issue work of `operator` from its stream; in a group, it is a collective."""
        launch = self._launched[pair] = _Launch()
        self._issued += group is not None
        if group is not None:
            launch.explained = self.explained(group)
        if self.cuda is None:
            return launch
        return self._on_stream(launch, stream or ops.OPERATORS[operator].stream)

    @contextlib.contextmanager
    def _on_stream(self, launch: _Launch, stream: str) -> Iterator[_Launch]:
        with self.cuda.stream(self._stream(stream)), launch:
            yield launch
            while launch.works:
                launch.works.pop().wait()  # the stream waits for NCCL's stream, not the host

    @contextlib.contextmanager
    def _at_once(self, group: str) -> Iterator[_Launch]:
        """Works that are over before the next operator reads what they write."""
        self._issued += 1
        launch = _Launch()
        with self.explained(group):
            yield launch
            if self.cuda is None:
                self._finish(launch)
            else:
                for work in launch.works:
                    work.wait()  # the compute stream, not the host

    def _finish(self, launch: _Launch) -> None:
        """Wait on the host for all of a launch; it holds no memory any more."""
        for work in launch.works:
            self.finish(work)
        launch.held.drop()

    def _stream(self, name: str) -> Any:
        if name == "compute":
            return self.cuda.current_stream()
        if name not in self._streams:
            # Of high priority: a kernel of NCCL begins before those of the compute stream that wait
            # for a multiprocessor. FSDP2 has it for gathers and reductions (``FSDPCommContext``).
            self._streams[name] = self.cuda.Stream(priority=-1)
        return self._streams[name]

    def separate_reductions(self) -> None:
        """Give reduce-scatters communicators of their own; collective over the shard groups."""
        for name, group in self.groups.items():
            if layout.kind_of_group(name) == "shard":
                ranks = dist.get_process_group_ranks(group)
                self.reductions[name] = process_groups.new_group(ranks, group)

    def _let_go(self) -> list[dist.Work]:
        """Forget what is in flight; returns it.

        The compute stream waits for all other streams, so that freed memory can be used again. On
        the CPU a work of gloo holds its tensors until it is over.
        """
        for stream in self._streams.values():
            self.cuda.current_stream().wait_stream(stream)
        works = [work for launch in self._launched.values() for work in launch.works]
        self._launched.clear()
        return works

    def _forget_groups(self, why: str) -> None:
        super()._forget_groups(why)
        self.groups.clear()
        for members in self.meshes.values():
            process_groups.forget_groups(members.mesh)
        self.reductions.clear()
