"""The parameters of a compiled model outside of its programs.

A submodule that is called alone, another method of the model, and what `torch.utils.checkpoint`
repeats in backward read parameters as they read any tensor. Under a process group these are
DTensors, with which plain tensors do not mix. So they are of a subclass that gathers itself where
code computes with it: the value is whole, on every rank, in the dtype that is stored, and its
gradient is reduced to the shard. What works on shards alike on all ranks stays with DTensor:
optimizers, norms without gradients, state dicts, initialisation in place.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxshard import compat, reading
from fxshard.errors import StepError
from fxshard.runtime import Runtime
from fxshard.sharding import Slot
from fxshard.state import sharded_like
from fxshard.swapped import as_users_own
from fxshard.world.c10d import C10dWorld

_PLACE = "_fxshard_place"  # attribute of a parameter: its runtime, and its FQN
_ACCESS = ("__get__", "__set__", "__delete__")  # of an attribute of a tensor
_ITEMS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
_SELF = ("view_as", "expand_as")  # how torch finds where a gradient goes
_KEPT = ("detach", "clone", "cpu", "cuda", "to_local", "full_tensor", "redistribute")


class GatheringTensor(DTensor):
    """A DTensor that is whole where it meets plain tensors, or where a gradient is asked of it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with compat.plain_torch_functions():
            name = getattr(func, "__name__", "")
            if name in _ACCESS:
                return func(*args, **kwargs)
            leaves, spec = compat.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if name in _SELF and len({id(tensor) for tensor in tensors}) == 1:
                return func(*args, **kwargs)
            in_place = name in _ITEMS or (name.endswith("_") and not name.endswith("__"))
            if in_place and isinstance(tensors[0], DTensor):
                return _written(func, leaves, spec, tensors[0])
            if not any(not isinstance(t, DTensor) and t.dim() for t in tensors):
                try:
                    found = func(*args, **kwargs)
                except (NotImplementedError, RuntimeError):  # DTensor cannot, whole tensors may
                    pass
                else:
                    if not (torch.is_grad_enabled() and _computes(found, tensors)):
                        return found if _is_kept(name) else _gathering(found)
            whole = [_whole(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]
            args, kwargs = compat.tree_unflatten(whole, spec)
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the DTensor that it is."""
        own = self.__dict__
        self.__dict__ = {key: value for key, value in own.items() if key != _PLACE}
        self.__class__ = DTensor  # type: ignore[assignment]
        try:
            return self.__reduce_ex__(protocol)
        finally:
            self.__class__, self.__dict__ = GatheringTensor, own


def let_gather(runtime: Runtime) -> None:
    """Let the sharded parameters of a model gather themselves; again, for new ones among them."""
    if isinstance(runtime.world, C10dWorld):
        for fqn, slot in runtime.slots.items():
            tensor: Any = slot.tensor
            if type(tensor) is DTensor:
                tensor.__class__ = GatheringTensor
                setattr(tensor, _PLACE, (weakref.ref(runtime), fqn))


def whole_for_autograd(runtime: Runtime, slot: Slot) -> Tensor:
    """A parameter, whole, whose gradient is reduced to the shard; collective.

    Raises:
        StepError: see `_require_readable`.
    """
    _require_readable(runtime, slot)
    whole: Tensor = reading.Gather.apply(slot.tensor, runtime.root, slot, slot.param.dtype)
    return whole


def _require_readable(runtime: Runtime, slot: Slot) -> None:
    """Before a parameter is gathered.

    Raises:
        StepError: something else than the options decides what becomes of its gradient; or see
            `Slot.settle`.
    """
    for said, clashes in {
        "optimizer_in_backward": runtime.config.optimizer_in_backward,
        "register_comm_hook": runtime.comm_hook,
    }.items():
        if clashes and torch.is_grad_enabled() and slot.tensor.requires_grad:
            raise StepError(
                f"parameter {slot.param.fqn!r} is read with gradients outside of the model's "
                f"forward, and with {said} its gradient would not go the same way as those of the "
                f"program. Read it under torch.no_grad(), or make the reading code part of forward."
            )
    slot.settle()


@contextlib.contextmanager
def as_plain(runtime: Runtime) -> Iterator[None]:
    """For the time of the block the model is as its user wrote it, with whole parameters.

    All ranks enter, or none. Then the values are here, and without gradients what ranks do inside
    may differ. With gradients enabled those of whole parameters are reduced to the shards, each
    when backward comes to it: all ranks must call backward, through the same parameters in the same
    order. Values that are written inside are lost.

    Raises:
        RankMismatchError: some ranks do something else.
        StepError: see `_require_readable`.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(runtime.world, C10dWorld) and not runtime.summoned:
            runtime.reshard()
            if torch.is_grad_enabled():
                slots = list(runtime.slots.values())
                for slot in slots:
                    _require_readable(runtime, slot)
                runtime.together("a method that runs on whole parameters, with gradients")
                wholes = [whole_for_autograd(runtime, slot) for slot in slots]
                stack.enter_context(runtime.holding(slots, wholes))
            else:
                stack.enter_context(runtime.whole_now(writeback=False))
        stack.enter_context(as_users_own(runtime.model, hooks=True))
        yield


def _whole(tensor: DTensor) -> Tensor:
    reference, fqn = getattr(tensor, _PLACE, (None, ""))
    runtime = reference() if reference is not None else None
    slot = runtime.slots.get(fqn) if runtime is not None else None
    if runtime is None or slot is None or slot.tensor is not tensor:
        return tensor.full_tensor()
    return whole_for_autograd(runtime, slot)


def _written(func: Any, leaves: list[Any], spec: Any, into: DTensor) -> Any:
    """What writes into a parameter writes this rank's rows."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.dim():
            if leaf.shape != into.shape:
                raise StepError(
                    f"{func.__name__} writes a tensor of shape {list(leaf.shape)} into a sharded "
                    f"parameter of shape {list(into.shape)}. Write into the whole one: with "
                    f"model.summon_full_params(): ..."
                )
            leaves[i] = sharded_like(leaf, into)
    args, kwargs = compat.tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def _is_kept(name: str) -> bool:
    """True for what makes tensors that are kept and saved as DTensors are: optimizer states."""
    return name in _KEPT or name.endswith("_like") or name.startswith("new_")


def _computes(found: Any, given: Sequence[Tensor]) -> bool:
    """True if autograd would follow what an operator has made of the given tensors."""
    leaves, _ = compat.tree_flatten(found)
    known = set(map(id, given))
    return any(isinstance(t, Tensor) and t.requires_grad and id(t) not in known for t in leaves)


def _gathering(found: Any) -> Any:
    """What an operator has made of a parameter may meet plain tensors next."""
    for tensor in compat.tree_flatten(found)[0]:
        if type(tensor) is DTensor:
            tensor.__class__ = GatheringTensor
    return found
