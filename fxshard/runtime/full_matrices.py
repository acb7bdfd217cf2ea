"""Updates of full matrices over the shards of a model: Muon's, and those of users' optimizers.

`torch.optim.Muon` over DTensors would gather each matrix several times in each of its Newton-Schulz
steps, on every rank, and FSDP2's refuse its last operator. Here a step of it sends each matrix to
one rank (`fxshard.codegen.full_matrices`). The optimizer stays torch's, with its groups and its
state over DTensors; a hook before its step puts another object in its place for the call.
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
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxshard._torch.dtensors import dtensor_like, local_part, sharded_like
from fxshard.codegen import full_matrices, muon
from fxshard.codegen.full_matrices import Exchange, Matrix, MatrixPlace, Rounds, Update
from fxshard.errors import StepError
from fxshard.memory.exchange import several_meshes
from fxshard.runtime.replaced import PLACE
from fxshard.runtime.store.reads import ReadableStore
from fxshard.runtime.world.c10d import C10dWorld


@functools.cache
def let_step() -> None:
    """Let every step of a Muon over sharded parameters send matrices to their owners."""
    register_optimizer_step_pre_hook(_in_place_of)


@torch.no_grad()
def full_matrix_updates(
    params: Sequence[Tensor],
    matrices: Sequence[Tensor],
    update: Callable[[Tensor, Tensor], Tensor],
    *,
    flops: Callable[[Tensor], int] | None = None,
) -> list[Tensor]:
    """Updates that need all rows of a matrix, for an optimizer to call in its step. Collective.

    Each matrix is sent to one rank of its shard group, its owner, which alone computes the update.
    Owners are chosen by FLOPs, when a parameter is first updated: what `update` keeps of it stays
    on one rank. Plain parameters are updated where they are: the same
    optimizer runs in eager PyTorch, and is planned (option ``optimizer``).

    Args:
        params: parameters of models that fxshard has sharded, or plain ones; of one dimension or
            more. The same, in the same order, on all ranks.
        matrices: per parameter a tensor of its shape, sharded as it is, such as its gradient or
            momentum; sent in its dtype.
        update: called as ``update(param, full)`` on the owner. `full` has all rows, and may be
            written into; its update has the same shape, and is sent in the dtype of the matrix.
        flops: of the update of a parameter, to balance ranks; None: in proportion to
            ``rows * columns * min(rows, columns)``, dimensions after the first counting as columns.

    Returns:
        Per parameter its update, sharded as it is: ``param.add_(update, alpha=-lr)``.

    Raises:
        StepError: a tensor is not sharded as its parameter, or has no rows to send; an update has
            another shape; a parameter is of a tensor subclass, or offloaded to another device; or
            parameters are on several meshes.
        RankMismatchError: not all ranks update these matrices.
    """
    found = dict[int, Tensor]()
    together: dict[int, list[tuple[int, Matrix, Exchange]]] = {}
    for i, (param, tensor) in enumerate(zip(params, matrices, strict=True)):
        place = _place(param)
        if place is None:
            found[i] = update(param, tensor.clone())
        else:
            each = i, _matrix(place, param, tensor, flops), place.exchange
            together.setdefault(_group(place), []).append(each)
    for members in together.values():
        numbers = [i for i, _, _ in members]
        of = [(params[i], matrices[i]) for i in numbers]
        made = _together(of, [matrix for _, matrix, _ in members], update, members[0][2])
        found |= zip(numbers, made, strict=True)
    return [found[i] for i in range(len(params))]


def _together(
    pairs: Sequence[tuple[Tensor, Tensor]],
    matrices: Sequence[Matrix],
    update: Callable[[Tensor, Tensor], Tensor],
    exchange: Exchange,
) -> list[Tensor]:
    """Updates of parameters of one model, of each and a tensor like it."""
    found: list[Tensor] = [param for param, _ in pairs]

    def keep(at: int, rows: Tensor) -> None:
        param = found[at]
        found[at] = dtensor_like(rows, param) if isinstance(param, DTensor) else rows

    rows_and_update = Update(
        rows=lambda at: local_part(pairs[at][1]),
        full=lambda at, full: update(pairs[at][0], full),
        apply=keep,
    )
    owners = exchange.owners if isinstance(exchange, _OnRanks) else None
    full_matrices.step(matrices, rows_and_update, exchange, owners)
    return found


def _matrix(
    place: MatrixPlace, param: Tensor, tensor: Tensor, flops: Callable[[Tensor], int] | None
) -> Matrix:
    _require_alike(place, param, tensor)
    if not param.dim() or tensor.is_complex():
        what = "has no rows" if not param.dim() else "has a complex matrix, which gloo cannot send"
        raise StepError(
            f"full_matrix_updates: parameter {place.fqn!r} {what}. Step it element by element."
        )
    made = Matrix(place.fqn, place.layout, tensor.dtype, 0)
    counted = made.product if flops is None else int(flops(param))
    return dataclasses.replace(made, flops=counted)


# -- where a parameter is --------------------------------------------------------------------------


# Of a model, the owner of each parameter by FQN, for updates that keep something there.
_owners: weakref.WeakKeyDictionary[ReadableStore, dict[str, int]] = weakref.WeakKeyDictionary()


class _OnRanks:
    """The exchange between the ranks of a model's shard group."""

    def __init__(self, store: ReadableStore, world: C10dWorld) -> None:
        self._store, self._world = store, world
        self.size, self.rank = world.size, world.rank
        self.device = torch.device(store.device)
        self.owners = _owners.setdefault(store, {})

    @contextlib.contextmanager
    def stepping(self, matrices: Sequence[Matrix], schedule: Rounds) -> Iterator[None]:
        """See `fxshard.codegen.full_matrices.Exchange`."""
        what = "an update of full matrices (a step of Muon)"
        self._store.require_sharded(what)
        if self.size == 1:
            yield
            return
        self._world.together(what, full_matrices.lines(matrices, schedule))
        with self._world.phase(what, communicates=True):
            yield

    def all_to_all(
        self, into: Tensor, sent: Tensor, received: Sequence[int], given: Sequence[int]
    ) -> None:
        """See `fxshard.codegen.full_matrices.Exchange`."""
        self._world.all_to_all(into, sent, received, given)


def _place(param: Tensor) -> MatrixPlace | None:
    """Where the rows of a sharded parameter are; None: it is a plain one, or not ours."""
    reference, fqn = getattr(param, PLACE, (None, ""))
    store: Any = reference() if reference is not None else None
    if store is None or not isinstance(param, DTensor):
        return full_matrices.place_of(param)
    slot = store.slots[fqn]
    store.require_plain([slot], "has an update that needs all of its rows (Muon)")
    if local_part(param).device.type != store.device:
        raise StepError(
            f"parameter {fqn!r} is on {local_part(param).device.type}, and its ranks communicate "
            f"on {store.device}: updates of full matrices (Muon) are not made of offloaded shards. "
            f"Leave offload out."
        )
    if len(store.world.grids) > 1:
        raise StepError(several_meshes(fqn))
    return MatrixPlace(fqn, slot.layout, _exchange(store))


def _exchange(store: ReadableStore) -> _OnRanks:
    assert isinstance(store.world, C10dWorld)  # parameters are DTensors
    return _OnRanks(store, store.world)


def _group(place: MatrixPlace) -> int:
    """A number of the ranks that update together, and of the model."""
    exchange = place.exchange
    return id(exchange._store) if isinstance(exchange, _OnRanks) else id(exchange)


def _require_alike(place: MatrixPlace, param: Tensor, tensor: Tensor) -> None:
    placements = [t.placements if isinstance(t, DTensor) else None for t in (param, tensor)]
    if placements[0] != placements[1] or tensor.shape != param.shape:
        raise StepError(
            f"parameter {place.fqn!r}, of shape {list(param.shape)} and placements "
            f"{placements[0]}, is updated with a tensor of shape {list(tensor.shape)} and "
            f"placements {placements[1]}: expected its gradient, or a tensor sharded as it is."
        )


# -- torch.optim.Muon ------------------------------------------------------------------------------


def _in_place_of(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """What torch's ``Muon.step`` is called with; None: with what it was given."""
    if type(optimizer) is not Muon:
        return None
    every = (param for group in optimizer.param_groups for param in group["params"])
    if not any(map(_is_ours, every)):
        return None
    return (muon.InPlaceOf(optimizer, _is_ours, _step), *args[1:]), kwargs


def _is_ours(param: Tensor) -> bool:
    reference, _ = getattr(param, PLACE, (None, ""))
    return isinstance(param, DTensor) and reference is not None and reference() is not None


def _step(optimizer: Optimizer, held: Sequence[muon.Held]) -> None:
    together: dict[int, list[muon.Stepped]] = {}
    exchanges: dict[int, Exchange] = {}
    for param, group in held:
        place, grad = _place(param), param.grad
        assert place is not None and grad is not None  # see `_is_ours`
        _require_alike(place, param, grad)
        exchanges.setdefault(_group(place), place.exchange)
        rows = local_part(param), local_part(grad), _momentum(optimizer, param)
        each = muon.Stepped(place.fqn, place.layout, *rows, group)
        together.setdefault(_group(place), []).append(each)
    for number, every in together.items():
        muon.step(every, exchanges[number])


def _momentum(optimizer: Optimizer, param: Tensor) -> Tensor:
    """This rank's rows of the momentum; of a full one that was loaded each rank takes its own."""

    def zeros() -> Tensor:
        assert isinstance(param, DTensor) and param.grad is not None
        return dtensor_like(torch.zeros_like(local_part(param.grad)), param)

    found = muon.momentum_of(optimizer, param, zeros)
    if not isinstance(found, DTensor) and found.shape == param.shape:
        assert isinstance(param, DTensor)
        found = dtensor_like(local_part(sharded_like(found, param)).clone(), param)
        optimizer.state[param]["momentum_buffer"] = found
    return local_part(found)
