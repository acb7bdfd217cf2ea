"""Unsharded parameters in eager code: their collectives, and what autograd saves of them.

The collectives are those of the world, as in programs. `fxshard.runtime.store.reads` decides which
parameter is gathered and how its gradient is reduced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Shard

from fxshard._torch import autograd
from fxshard._torch.dtensors import local_part
from fxshard._torch.storages import storage_id
from fxshard.errors import StepError
from fxshard.ir import layout
from fxshard.runtime.sharding import Slot
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld

_PAIR = -1  # number of a launch and its wait; one serves all, as each ends before the next begins

Division = tuple[float | None, str, float | None]  # see `InsertReduce.division`


# -- rows between ranks ----------------------------------------------------------------------------


def gathered(
    shards: Sequence[Tensor], world: C10dWorld, pack_bytes: int = 0, mesh: str = ""
) -> list[Tensor]:
    """The shards of all ranks, each ``[size * chunk, ...]``; `shards` if each rank has all.

    Args:
        shards: of one dtype.
        world: the ranks.
        mesh: the name of the mesh that the parameters are on.
        pack_bytes: what is smaller, all ranks' rows together, is sent in one buffer.
    """
    world.require_joined()
    grid = world.grids[mesh]
    if grid.shards == 1:
        return list(shards)
    small = [i for i, shard in enumerate(shards) if 0 < shard.nbytes * grid.shards < pack_bytes]
    small = small if len(small) > 1 else []
    alone = [i for i in range(len(shards)) if i not in small]
    with _launched(world, "unshard"):
        sent = [shards[i].contiguous() for i in alone]
        sent += world.pack([shards[i] for i in small], shards[0].dtype, _PAIR) if small else []
        rows = world.all_gather(sent, _PAIR, grid.group("shard"), freed=False)
        world.wait(rows, _PAIR)
    found = dict(zip(alone, rows, strict=False))
    if small:
        found |= zip(
            small, world.unpack(rows[-1:], [list(shards[i].shape) for i in small]), strict=True
        )
    return [found[i] for i in range(len(shards))]


def all_rows(tensor: DTensor, world: C10dWorld) -> Tensor:
    """All rows of a DTensor, on every rank; of any placement."""
    dim = next((p.dim for p in tensor.placements if isinstance(p, Shard)), 0)
    on = next((each for each in world.meshes.values() if each.mesh == tensor.device_mesh), None)
    if on is None or list(tensor.placements) != on.placements(dim):
        world.require_joined()
        return tensor.full_tensor()
    local = local_part(tensor).detach().to(torch.device(world.mesh.device_type))
    if on.grid.shards == 1:
        return gathered([local], world, mesh=on.grid.name)[0]
    cut = layout.ParamLayout(
        *(tuple(tensor.shape), tensor.dtype, 0, (on.grid.replicas, on.grid.shards)),
        placements=tuple(layout.placements(dim).values()),
    )
    if local.shape != cut.shard_shape:
        local = layout.chunk_of(local, dim, cut.shard_shape[dim], 0)
    return layout.joined(gathered([local], world, mesh=on.grid.name)[0], cut)


def reduced(
    grads: Sequence[Tensor],
    world: C10dWorld | InProcessWorld,
    division: Division,
    partial: Sequence[Sequence[Tensor]] = (),
    *,
    fully: bool = True,
    mesh: str = "",
) -> list[Tensor]:
    """Gradients ``[size * chunk, ...]`` of each rank -> this rank's rows of each ``[chunk, ...]``.

    In one process all ranks have the same gradients, and all rows are here.

    Args:
        grads: of one dtype; written in place.
        world: the ranks.
        division: the divisor before the reduction, its operation, and the divisor after it.
        partial: of each gradient, what is added to it after the reduce-scatter.
        fully: False: the results are such partial sums.
        mesh: the name of the mesh that the parameters are on.
    """
    before, op, after = division
    found = [grad if before is None else grad.div_(before) for grad in grads]
    if isinstance(world, InProcessWorld):
        found = [grad.mul_(world.ranks if op == "sum" else 1) for grad in found]
    else:
        found = _over_ranks(found, world, op, partial, fully, mesh)
    return [grad if after is None or not fully else grad.div_(after) for grad in found]


def _over_ranks(
    grads: list[Tensor],
    world: C10dWorld,
    op: str,
    partial: Sequence[Sequence[Tensor]],
    fully: bool,
    mesh: str,
) -> list[Tensor]:
    world.require_joined()
    grid = world.grids[mesh]
    if grid.shards > 1:
        with _launched(world, "reduce"):
            grads = world.reduce_scatter(grads, _PAIR, grid.group("shard"), op)
            world.wait(grads, _PAIR)
    for grad, sums in zip(grads, partial, strict=False):
        for total in sums:
            grad.add_(total)
    if grid.replicas > 1 and fully:
        with _launched(world, "all-reduce"):
            grads = world.all_reduce(grads, _PAIR, grid.group("replicate"), op)
            world.wait(grads, _PAIR)
    return grads


@contextlib.contextmanager
def _launched(world: C10dWorld, stream: str) -> Iterator[None]:
    """A launch on `stream` comes after what was computed so far, and before what is next."""
    with world.phase("a read of a parameter in eager code", communicates=True):
        world.record_event("compute", "eager code")
        world.wait_event(stream, "eager code")
        yield
        world.record_event(stream, "eager read")
        world.wait_event("compute", "eager read")


# -- what autograd saves ---------------------------------------------------------------------------


class Forwards:
    """The eager forwards of one model that are running.

    In these, autograd does not save an unsharded parameter or a view of it, but a function that
    gathers it again.

    Attributes:
        inside: how many are running, nested.
        alive: the unsharded parameters, by the address of their storage.
    """

    def __init__(self) -> None:
        self.inside: int = 0
        self.alive: weakref.WeakValueDictionary[int, Gathered] = weakref.WeakValueDictionary()
        self._hooks: list[contextlib.AbstractContextManager[Any]] = []
        self._around: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def __reduce__(self) -> Any:
        """A copy of the model has no running forward."""
        return Forwards, ()

    @torch.compiler.disable
    def enter(self) -> None:
        """An eager forward begins."""
        self.inside += 1
        around = autograd.saved_tensors_hooks_on_top() if self.inside == 1 else None
        self._around = around or self._around
        hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if autograd.saved_tensors_hooks_allowed():  # if not, what is gathered is saved
            hooks = saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    @torch.compiler.disable
    def leave(self) -> None:
        """It is over."""
        self.inside -= 1
        self._hooks.pop().__exit__(None, None, None)
        if not self.inside:
            self._around = None

    @property
    def computing(self) -> bool:
        """True in forward, and in backward, where torch.utils.checkpoint recomputes parts of it."""
        return self.inside > 0 or autograd.in_backward()

    def note(self, source: Gathered, tensor: Tensor) -> None:
        """Note that `tensor` holds all rows of a parameter."""
        self.alive[storage_id(tensor)] = source
        # The storage object that Python sees lives as long as the memory does.
        tensor.untyped_storage()._fxshard_gathered = source  # type: ignore[attr-defined]

    def name_of(self, tensor: Tensor) -> str | None:
        """FQN of the unsharded parameter that `tensor` is, or is a view of; else None."""
        source = self.alive.get(storage_id(tensor))
        return None if source is None else source.slot.param.fqn

    @torch.compiler.disable
    def _pack(self, tensor: Tensor) -> Any:
        source = self.alive.get(storage_id(tensor))
        if source is not None:
            size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            now: Tensor = source.slot.tensor
            before = weakref.ref(now), autograd.version(now), source.slot.moves
            # Not `source` itself, which must die with the memory.
            return functools.partial(
                _again, source.slot, source.gather, before, size, stride, offset
            )
        if self._around is not None:  # the user's hooks: autograd calls the innermost pair only
            pack, unpack = self._around
            return functools.partial(unpack, pack(tensor))
        return tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """A parameter that is unsharded, as long as its memory lives.

    Attributes:
        slot: the parameter.
        gather: gathers it again.
    """

    slot: Slot
    gather: Callable[[], Tensor]


def _again(
    slot: Slot,
    gather: Callable[[], Tensor],
    before: tuple[weakref.ref[Tensor], int, int],
    size: Any,
    stride: Any,
    offset: int,
) -> Tensor:
    """A view of an unsharded parameter, gathered again.

    Raises:
        StepError: the parameter was changed since `before`, or exchanged.
    """
    reference, version, moves = before
    tensor = reference()  # functional_call may have taken it out of the module tree again
    written = tensor is not None and autograd.version(tensor) != version
    if written or slot.moves != moves:
        raise StepError(
            f"parameter {slot.param.fqn!r} was changed in place between a forward and its "
            f"backward, which reads it. Call backward first (before optimizer.step())."
        )
    return gather().as_strided(size, stride, offset)


@torch.compiler.disable
def _unpack(saved: Any) -> Tensor:
    found: Tensor = saved if isinstance(saved, Tensor) else saved()
    return found
