"""One rank over torch.distributed process groups: gloo, NCCL, or the fake one."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from fxshard._torch import optimizers, process_groups
from fxshard.errors import RankDiedError, RankMismatchError
from fxshard.ir import layout, ops
from fxshard.ir.tensor_parallel import group_name
from fxshard.runtime.world import peers as patience
from fxshard.runtime.world.backends import as_real, backend_of
from fxshard.runtime.world.peers import Cause, Peers

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


# What a rank does at the begin of a call, as ranks compare it.
_EXPECTED = "a call of the model, or a backward"
_BEFORE_BACKWARD = "a call of the model before the backward of the last one"


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
        """The ranks of a mesh; `name` and `batches`: see `layout.Grid`."""
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


def _among(some: DeviceMesh, mesh: DeviceMesh) -> bool:
    """True if the ranks of `some` are ranks of `mesh` too."""
    return {*some.mesh.flatten().tolist()} <= {*mesh.mesh.flatten().tolist()}


class C10dWorld:
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

    _worlds: ClassVar[weakref.WeakSet[C10dWorld]] = weakref.WeakSet()  # all of this process

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        sharded: bool = True,
        reshard: Iterable[int] = (),
        beside: DeviceMesh | None = None,
        others: Iterable[Members] = (),
    ) -> None:
        """Args:
        mesh: of the ranks.
        sharded: False: a 1-D mesh is one of replicas.
        reshard: sizes of the groups that units are resharded to after forward.
        beside: the dimension of tensor parallelism.
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
                group = process_groups.new_group(mine, parent)
                self.groups[each.grid.group(f"reshard{size}")] = group
        everyone = [*own.groups]
        if beside is not None:
            self.groups[group_name(beside)] = beside.get_group()
            if not _among(beside, mesh):
                everyone.append(group_name(beside))
        if mesh.device_type == "cpu":
            process_groups.gather_one_by_one()  # also for all-gathers that torch makes
        self.reductions: dict[str, dist.ProcessGroup] = {}
        self.peers: dict[str, Peers] = {name: Peers(group) for name, group in self.groups.items()}
        self._everyone = [self.peers[name] for name in everyone]
        outside = beside is not None and not _among(beside, mesh)
        ranks = mesh.size() * (beside.size() if beside is not None and outside else 1)
        if len(self._everyone) > 1 and ranks == dist.get_world_size():
            self._everyone = [Peers(_default_group())]
            near = self.peers["shard" if sharded else "replicate"]
            self._everyone[0].next_shard = near.global_ranks[near.next_shard]
        self._peers = list(dict.fromkeys([*self._everyone, *self.peers.values()]))
        self._calls = 0  # phases with collectives that this rank has begun: calls and backwards
        # By number, forwards whose backward has collectives and has not begun; a dead reference
        # means that it never will.
        self._due: dict[int, weakref.ref[Any]] = {}
        self._issued = 0  # collectives that this rank has launched
        self._left = ""  # why this rank has left the process group
        self._worlds.add(self)
        self._launched: dict[int, _Launch] = {}
        self.cuda: Any = torch.cuda if mesh.device_type == "cuda" else None
        self._streams: dict[str, Any] = {}
        self._events: dict[str, Any] = {}

    @property
    def grids(self) -> dict[str, layout.Grid]:
        """The ranks of each mesh, by its name."""
        return {name: members.grid for name, members in self.meshes.items()}

    def all_gather(self, shards: list[Tensor], pair: int, group: str = "shard") -> list[Tensor]:
        members = self.groups[group]
        size = members.size()
        buffers = [s.new_empty(layout.gathered(s.shape, size)) for s in shards]
        with self._launch(ops.all_gather, pair, group) as launch:
            for work in backend_of(members).all_gather(members, buffers, shards):
                launch.works.append(work)
        return buffers

    def reduce_scatter(
        self, grads: list[Tensor], pair: int, group: str = "shard", op: str = "avg"
    ) -> list[Tensor]:
        members = self.reductions.get(group) or self.groups[group]
        size = members.size()
        results = [g.new_empty(layout.part(g.shape, size)) for g in grads]
        options = dist.ReduceScatterOptions()
        options.reduceOp = OPS[op]
        with self._launch(ops.reduce_scatter, pair, group) as launch:
            into, sent = list(map(as_real, results)), list(map(as_real, grads))
            launch.works.append(members.reduce_scatter_tensor_coalesced(into, sent, options))
        return results

    def all_reduce(
        self, grads: list[Tensor], pair: int, group: str = "replicate", op: str = "avg"
    ) -> list[Tensor]:
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = OPS[op]
        grads = [grad.resolve_conj() for grad in grads]
        with self._launch(ops.all_reduce, pair, group) as launch:
            # Flat: gloo copies the one tensor of a launch back from a view of its shape, which must
            # have its strides, also those of dimensions with one element.
            sent = [as_real(grad).view(-1) for grad in grads]
            launch.works.append(self.groups[group].allreduce_coalesced(sent, options))
        return grads

    def reduce_now(
        self, tensors: list[Tensor], group: str = "shard", op: str = "max"
    ) -> list[Tensor]:
        made = [tensor.clone() for tensor in tensors]
        options = dist.AllreduceOptions()
        options.reduceOp = OPS[op]
        self._issued += 1
        with self._explained(group):
            for tensor in made:
                work = self.groups[group].allreduce([as_real(tensor).view(-1)], options)
                if self.cuda is None:
                    self._finish(work)
                else:
                    work.wait()  # the compute stream, not the host
        return made

    def all_to_all(
        self, into: Tensor, sent: Tensor, received: Sequence[int], given: Sequence[int]
    ) -> None:
        """Send each rank of the shard group its part of `sent`; over when the next operator reads.

        Args:
            into, sent: flat; the parts from and for each rank, one after the other.
            received, given: their lengths in elements.
        """
        self._issued += 1
        with self._explained("shard"):
            lengths = list(received), list(given)
            work = self.groups["shard"].alltoall_base(into, sent, *lengths)
            if self.cuda is None:
                self._finish(work)
            else:
                work.wait()  # the compute stream, not the host

    def model_all_gather(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str
    ) -> list[Tensor]:
        members = process_groups.called(ranks)
        size = members.size()
        buffers = [t.new_empty(layout.gathered(t.shape, size)) for t in tensors]
        with self._launch(ops.model_all_gather, pair, group, stream=group) as launch:
            for work in backend_of(members).all_gather(members, buffers, tensors):
                launch.works.append(work)
        return buffers

    def model_reduce_scatter(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str, op: str
    ) -> list[Tensor]:
        members = process_groups.called(ranks)
        results = [t.new_empty(layout.part(t.shape, members.size())) for t in tensors]
        options = dist.ReduceScatterOptions()
        options.reduceOp = OPS[op]
        with self._launch(ops.model_reduce_scatter, pair, group, stream=group) as launch:
            into, sent = list(map(as_real, results)), list(map(as_real, tensors))
            launch.works.append(members.reduce_scatter_tensor_coalesced(into, sent, options))
        return results

    def model_all_reduce(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str, op: str
    ) -> list[Tensor]:
        made = [tensor.new_empty(tensor.shape) for tensor in tensors]
        options = dist.AllreduceOptions()
        options.reduceOp = OPS[op]
        with self._launch(ops.model_all_reduce, pair, group, stream=group) as launch:
            for copy, tensor in zip(made, tensors, strict=True):
                copy.copy_(tensor)
                work = process_groups.called(ranks).allreduce([as_real(copy)], options)
                launch.works.append(work)
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
        made = [tensor.new_empty((sum(into), *tensor.shape[1:])) for tensor in tensors]
        lengths = list(into), list(sent)
        with self._launch(ops.model_all_to_all, pair, group, stream=group) as launch:
            for rows, tensor in zip(made, tensors, strict=True):
                works = process_groups.called(ranks).alltoall_base(rows, tensor, *lengths)
                launch.works.append(works)
        return made

    def model_broadcast(
        self, tensors: list[Tensor], pair: int, group: str, ranks: str, root: int
    ) -> list[Tensor]:
        made = [tensor.new_empty(tensor.shape) for tensor in tensors]
        options = dist.BroadcastOptions()
        options.rootRank = root
        with self._launch(ops.model_broadcast, pair, group, stream=group) as launch:
            for copy, tensor in zip(made, tensors, strict=True):
                copy.copy_(tensor)
                launch.works.append(process_groups.called(ranks).broadcast([copy], options))
        return made

    def comm_hook(self, grads: list[Tensor], pair: int) -> list[Tensor]:
        assert self.hook is not None
        results = grads
        group = "shard" if self.size > 1 else "replicate"
        if self.size > 1:
            results = [g.new_empty(layout.part(g.shape, self.size)) for g in grads]
        with self._launch(ops.comm_hook, pair, group):
            if self.size > 1:
                self.hook(grads[0], results[0])
            else:
                self.hook(grads[0])
        return results

    def cast(self, tensors: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        made = [torch.empty_like(t, dtype=dtype) for t in tensors]
        with self._launch(ops.cast, pair):
            optimizers.foreach_copy(made, tensors)
        return made

    def load(self, tensors: list[Tensor], device: torch.device, pair: int) -> list[Tensor]:
        made = [torch.empty_like(t, device=device) for t in tensors]
        with self._launch(ops.load, pair):
            for to, tensor in zip(made, tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
        return made

    def store(self, tensors: list[Tensor], pair: int) -> list[Tensor]:
        pin = tensors[0].device.type == "cuda"
        made = [torch.empty_like(t, device="cpu", pin_memory=pin) for t in tensors]
        with self._launch(ops.store, pair):
            for to, tensor in zip(made, tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
        return made

    def pack(self, shards: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        flat = shards[0].new_empty(sum(shard.numel() for shard in shards), dtype=dtype)
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
        size = packed[0].numel() // sum(map(math.prod, chunks))
        shapes = layout.unpacked(size, chunks, dims, lengths)
        made = [packed[0].new_empty(shape) for shape in shapes]
        pairs = layout.unpacked_places(packed[0], made, chunks, dims)
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
        with self._explained("shard" if "shard" in self.groups else "replicate"):
            for work in self._launched.get(pair, _Launch()).works:  # nothing, of what was kept
                self._finish(work)
        self._launched.pop(pair, None)
        if self.cuda is not None and tensors[0].device.type == "cpu":
            self._stream("store").synchronize()  # the CPU reads the copies

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

    @contextlib.contextmanager
    def _launch(
        self, operator: Any, pair: int, group: str | None = None, stream: str = ""
    ) -> Iterator[_Launch]:
        """Issue work of `operator` from its stream; in a group, it is a collective."""
        launch = _Launch()
        self._launched[pair] = launch
        self._issued += group is not None
        with contextlib.ExitStack() as stack:
            if self.cuda is not None:
                issuing = self._stream(stream or ops.OPERATORS[operator].stream)
                stack.enter_context(self.cuda.stream(issuing))
            if group is not None:
                stack.enter_context(self._explained(group))
            yield launch
            if self.cuda is not None:
                while launch.works:
                    launch.works.pop().wait()  # the stream waits for NCCL's stream, not the host

    def _finish(self, work: dist.Work) -> None:
        """Wait for `work`; raise if another rank shows that it will never be over."""
        while not _over(work, patience.LOOK_SECONDS):
            cause = self._cause() or _first(p.never_over(self._issued) for p in self._everyone)
            if cause is not None:
                self._note_cause(cause)
                raise self._everyone[0].failure(cause)

    def _stream(self, name: str) -> Any:
        if name == "compute":
            return self.cuda.current_stream()
        if name not in self._streams:
            # Of high priority: a kernel of NCCL begins before those of the compute stream that wait
            # for a multiprocessor. FSDP2 has it for gathers and reductions (``FSDPCommContext``).
            self._streams[name] = self.cuda.Stream(priority=-1)
        return self._streams[name]

    @contextlib.contextmanager
    def _explained(self, group: str) -> Iterator[None]:
        try:
            yield
        except (RankDiedError, RankMismatchError):
            raise
        except RuntimeError as error:
            if all(peers.alone for peers in self._peers):
                raise
            try:
                cause = self._cause() or self._peers_of(group).cause_of_failure()
                if cause is not None:
                    self._note_cause(cause)
                    cause = self._cause()  # that of the first rank that noted one
            except RuntimeError:
                cause = (
                    RankDiedError,
                    " and the store cannot be reached: the rank that hosts it (rank 0 unless "
                    "torchrun does) is gone.",
                )
            if cause is None:
                raise
            raise self._peers_of(group).failure(cause, error) from error

    def _peers_of(self, group: str) -> Peers:
        """Of a group that the model makes itself nothing is known: those of all ranks."""
        return self.peers.get(group) or self._everyone[0]

    def _cause(self) -> Cause | None:
        """Why no collective works any more, if any rank has noted it."""
        return _first(peers.cause() for peers in self._peers)

    def _note_cause(self, cause: Cause) -> None:
        for peers in self._peers:
            peers.note_cause(cause)

    @contextlib.contextmanager
    def phase(self, name: str, communicates: bool) -> Iterator[None]:
        """Run a phase in the block. However it ends, nothing of it runs on afterwards.

        If it ends with an exception on all ranks after the same collective, the next call may run.
        Otherwise later collectives would not match: this rank leaves the process group, so that the
        others fail too, and the exception gets a note.

        Args:
            name: of the phase, for messages.
            communicates: it has collectives.

        Raises:
            RankMismatchError: this rank has left the process group before.
        """
        self.require_joined()
        if communicates and name == "backward":
            self._calls += 1
            for peers in self._everyone:
                peers.note_backward(self._calls)
        try:
            yield
        except BaseException as error:
            works = self._let_go()
            if communicates and not self._all_stopped(name, error, works):
                self._part(name, error, works)
            raise

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

    def _all_stopped(self, name: str, error: BaseException, works: list[dist.Work]) -> bool:
        """Wait for `works`; True if all ranks have stopped after the same collective."""
        if isinstance(error, RankDiedError | RankMismatchError):
            return False
        what = f"stopped in the middle of {name} ({_summary(error)})"
        pause, over = 0.001, 0.0  # seconds; when all works of this rank were over
        try:
            for peers in self._everyone:
                peers.note_stop(self._issued, what)
            while True:
                if not over and not (works := _pending(works)):
                    over = time.monotonic()
                    for peers in self._everyone:
                        peers.note_over()
                alike = [peers.stopped_alike(self._issued) for peers in self._everyone]
                if False in alike:
                    return False
                if over and None not in alike:
                    return True
                if over and time.monotonic() - over > patience.STOP_SECONDS:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        except (RuntimeError, KeyboardInterrupt):  # no store, or the user interrupts
            return False

    def _part(self, name: str, error: BaseException, works: list[dist.Work]) -> None:
        """Leave the process group after a phase that not all ranks stopped alike.

        The group is not closed while a work is in flight: that would wait for it.
        """
        why = f"stopped in the middle of {name} ({_summary(error)})"
        deadline = time.monotonic() + patience.CENSUS_SECONDS
        self._note_left(why)  # before it waits for works
        while (works := _pending(works)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not works:
            self._leave(why)
        self._left = why
        if not isinstance(error, RankDiedError | RankMismatchError):
            error.add_note(
                "fxshard: not all ranks stopped alike, so that their collectives would not meet "
                "any more. This rank has left the process group: start again from the last "
                "checkpoint."
            )

    def separate_reductions(self) -> None:
        """Give reduce-scatters communicators of their own; collective over the shard groups."""
        for name, group in self.groups.items():
            if layout.kind_of_group(name) == "shard":
                ranks = dist.get_process_group_ranks(group)
                self.reductions[name] = process_groups.new_group(ranks, group)

    def require_joined(self) -> None:
        """Check before a call of the model, and before each of its phases.

        Raises:
            RankMismatchError: this rank has left the process group.
        """
        if self._left:
            raise RankMismatchError(
                f"this rank has left the process group: it {self._left}. Start again from the "
                f"last checkpoint."
            )

    def run_call(self, digest: str, known: Mapping[str, Sequence[str]]) -> None:
        """Note a call whose program has collectives and all ranks know (see `Peers.note_call`).

        Calls without collectives are not counted: each rank may make any number. A call before the
        backward of an earlier one waits for all ranks: if only one rank left out its backward, it
        would gather while the others reduce. A forward that all ranks have dropped is forgotten.

        Raises:
            RankMismatchError: not all ranks run what this one does.
        """
        if self._due:
            lines = [_BEFORE_BACKWARD, f"backwards to come: {len(self._due)}"]
            self.agree(lines, "what they do to the model", [[_EXPECTED]])
            held = self.any_rank("".join("01"[ref() is not None] for ref in self._due.values()))()
            due = zip(self._due.items(), held, strict=True)
            self._due = {number: ref for (number, ref), flag in due if flag == "1"}
        self._calls += 1
        for peers in self._everyone:
            peers.note_call(self._calls, digest, known, self._leave)

    def await_backward(self, call: object) -> None:
        """Note that this call's backward has collectives; it cannot run once `call` is dead."""
        self._due[self._calls] = weakref.ref(call)

    def begin_backward(self, call: object) -> None:
        """Note that the backward of this call begins."""
        self._due = {number: ref for number, ref in self._due.items() if ref() is not call}

    def together(self, what: str, having: Sequence[str] = ()) -> None:
        """Check that all ranks do `what` to the model, after the same call of it.

        Args:
            what: for messages.
            having: what else must be equal on all ranks.

        Raises:
            RankMismatchError: some ranks call the model, do something else, or ran another program.
        """
        self.require_joined()
        ran = next((f"after program {p.last}" for p in self._everyone if p.last), "before any call")
        lines = [what, ran, *having]
        self.agree(lines, "what they do to the model", [["a call of the model"]])

    def any_rank(self, flags: str) -> Callable[[], str]:
        """Send flags ("0" or "1" each) to all ranks of the mesh.

        Call it on all ranks before a collective, and the returned function after it.

        Returns:
            A function that returns "1" for each flag that is set on any rank; call it on all ranks
            that have a "0".
        """
        groups = [peers for peers in self._everyone if not peers.alone]
        if "0" not in flags:
            for peers in groups:
                peers.tell(flags)
            return lambda: flags
        first = [peers.tell(flags) for peers in groups[:1]]

        def found() -> str:
            known = flags
            for i, peers in enumerate(groups):  # the second one gets what the first has found
                known = peers.any_of(first.pop() if i == 0 else peers.tell(known), known)
            return known

        return found

    def agree(
        self, lines: Sequence[str], what: str, before: Collection[Sequence[str]] = ()
    ) -> None:
        """Compare `lines` over all ranks of the mesh; all raise, or none (see `Peers.agree`).

        If no group has all ranks, the groups along one dimension of the mesh compare first, then
        those along the next, with the result of those before, and then all but the last again.
        """
        failed: RuntimeError | None = None
        for peers in [*self._everyone, *self._everyone[:-1]]:
            sent = lines if failed is None else [*lines, "another group of ranks does not agree"]
            try:
                peers.agree(sent, what, self._leave, self._calls + 1 if before else 0, before)
            except (RankMismatchError, RankDiedError) as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def exchange(self, text: str, what: str) -> dict[str, list[int]]:
        """Send a text to all ranks of the mesh, before a call of the model (see `Peers.exchange`).

        Args:
            text: of this rank.
            what: it says, for messages.

        Returns:
            per text, the (global) ranks that sent it; the same on all ranks.
        """
        found: dict[str, list[int]] = {}
        for number, peers in enumerate(self._everyone):
            sent = text if number == 0 else json.dumps(found, sort_keys=True)
            try:
                told = peers.exchange(sent, what, self._leave, self._calls + 1)
            except (RankMismatchError, RankDiedError) as error:
                if len(self._everyone) > 1:  # ranks of other groups wait for this one
                    self._leave(_summary(error))
                raise
            rows = [told] if number == 0 else list(map(json.loads, told))
            found = {}
            for each, ranks in sorted((e, r) for row in rows for e, r in row.items()):
                found[each] = sorted({*found.get(each, []), *ranks})
        return found

    def _leave(self, why: str) -> None:
        """Close the connections of this rank: others that wait for it in a collective fail now.

        gloo closes them when nothing refers to the process groups of any world any more.
        """
        self._note_left(why)
        for world in list(self._worlds):
            world._forget_groups(why)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _note_left(self, why: str) -> None:
        """Note that this rank leaves, in all stores that can be reached."""
        for peers in self._peers:
            with contextlib.suppress(RuntimeError):
                peers.note_left(why)

    def _forget_groups(self, why: str) -> None:
        self._left = why
        for peers in self._peers:
            peers.drop()
        self.groups.clear()
        for members in self.meshes.values():
            process_groups.forget_groups(members.mesh)
        self.reductions.clear()


def _over(work: dist.Work, seconds: float) -> bool:
    """Wait for `work` for some seconds; True if it is over.

    ``is_completed`` is not right for all works of gloo.

    Raises:
        RuntimeError: it has failed.
    """
    start = time.monotonic()
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if time.monotonic() - start < seconds:
            raise
        return False
    return True


def _pending(works: list[dist.Work]) -> list[dist.Work]:
    """The works that have neither failed nor ended."""
    pending = []
    for work in works:
        with contextlib.suppress(RuntimeError):
            if not _over(work, 0.01):
                pending.append(work)
    return pending


def _first(causes: Iterable[Cause | None]) -> Cause | None:
    return next((cause for cause in causes if cause is not None), None)


def _summary(error: BaseException) -> str:
    """Class and first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
