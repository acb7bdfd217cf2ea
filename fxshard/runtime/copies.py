"""What user code gets of a sharded parameter that is a copy: it is read, and writes are refused.

A view of a gathered parameter, or one that DTensor makes of other memory than the shards, shares
nothing with the parameter. What is written into it would be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxshard._torch import autograd, modes, transforms, trees
from fxshard._torch import dtensors as torch_dtensors
from fxshard._torch.operators import schema_of
from fxshard._torch.storages import storage_id
from fxshard.errors import StepError
from fxshard.runtime.replaced import PLACE, place_of

GATHERS = "gathers_itself"  # an attribute of a class that knows what to do with both
ACCESS = ("__get__", "__set__", "__delete__")  # of an attribute of a tensor
_ITEMS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
_NO_TENSORS = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.memory_format}
)
_NOT_VALUES = ("requires_grad_", "share_memory_", "rename_")  # in place, but no writes of values


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among arguments or results, in their order."""
    found: list[Tensor] = []
    if not _found_in(tree, found):
        found = [leaf for leaf in trees.tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
    return found


def _found_in(value: Any, found: list[Tensor]) -> bool:
    """Append the tensors; False if something may hold others. Most calls hold only what is asked
    for here, and `tree_flatten` takes ten times as long.
    """
    kind = type(value)
    if kind is dict:
        value = value.values()
    elif kind is not tuple and kind is not list:
        if isinstance(value, Tensor):
            found.append(value)
            return True
        return kind in _NO_TENSORS
    for each in value:  # noqa: SIM110, all() takes twice as long
        if not _found_in(each, found):
            return False
    return True


def name_of(func: Any) -> str:
    """The name of a function; of an operator's overload, as ``add_.Tensor``, the operator's."""
    return str(getattr(func, "__name__", "")).partition(".")[0]


def is_in_place(name: str) -> bool:
    return name in _ITEMS or (name.endswith("_") and not name.endswith("__"))


class CopiedView(Tensor):
    """A view of a gathered copy of a parameter, with autograd history; it is read-only."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def mark(found: Any) -> Any:
            given = [t for t in tensors_in((args, kwargs)) if isinstance(t, CopiedView)]
            return as_views(found, given, place_of(given[0]))

        return _read(func, types, args, kwargs or {}, mark)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with autograd.plain_torch_functions():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _read(func: Any, types: Any, args: Any, kwargs: Any, mark: Callable[[Any], Any]) -> Any:
    """Run a function that must not write into a copy; `mark` makes what it returns read-only."""
    if any(hasattr(each, GATHERS) for each in types):
        return NotImplemented
    with autograd.plain_torch_functions():
        if (name := name_of(func)) not in ACCESS:
            refuse_into_views(name, args, kwargs)
        return mark(func(*args, **kwargs))


def refuse_into_views(name: str, args: Any, kwargs: Any) -> None:
    """Raise StepError if a function writes into a `CopiedView` or a `CopiedPart`."""
    written = tensors_in(kwargs["out"]) if "out" in kwargs else []
    if is_in_place(name) and name not in _NOT_VALUES:
        written += tensors_in([*args, *kwargs.values()][:1])  # nn.init passes a keyword
    for tensor in written:
        if isinstance(tensor, CopiedView | CopiedPart):
            raise lost(tensor, name)


def as_views(found: Any, of: Iterable[Tensor], place: Any) -> Any:
    """`found`, in which tensors that share memory with any of `of` are made `CopiedView`."""
    known = {key for tensor in of for key in memory(tensor)}
    if is_array(found):
        found.flags.writeable = False  # in one process it would be the parameter's memory
        return found
    leaves, spec = trees.tree_flatten(found)
    for i, leaf in enumerate(leaves):
        if type(leaf) is Tensor and not known.isdisjoint(memory(leaf)):
            leaves[i] = leaf.as_subclass(CopiedView)
            setattr(leaves[i], PLACE, place)
    return trees.tree_unflatten(leaves, spec)


def memory(tensor: Tensor) -> set[int]:
    """The storages of a tensor, below transforms of torch.func that run."""
    return {storage_id(each) for each in transforms.in_memory(tensor)}


def is_array(found: Any) -> bool:
    """True for an array of numpy, which may share memory with a tensor."""
    return type(found).__module__ == "numpy" and hasattr(found, "flags")


class CopiedPart(DTensor):
    """What DTensor made for a view where the rows of other ranks had to come: a copy; read-only."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if name_of(func) == "__deepcopy__":
            return args[0].detach().clone()  # memory of its own: a plain DTensor
        return _read(func, types, args, kwargs or {}, as_parts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a plain DTensor."""
        self.__class__ = DTensor  # type: ignore[assignment]
        try:
            return self.__reduce_ex__(protocol)
        finally:
            self.__class__ = CopiedPart


def as_parts(found: Any) -> Any:
    """`found`, in which DTensors over a marked copy (see `mark_copy`) are made `CopiedPart`."""
    for leaf in tensors_in(found):
        if type(leaf) is DTensor and is_copy(leaf):
            leaf.__class__ = CopiedPart
    return found


def copies_marked(found: Any, of: DTensor) -> Any:
    """`found`, of an operator that returns views of `of`; those that share no memory with it are
    marked. Of a subclass, whose storage says nothing, that cannot be told.
    """
    if type(torch_dtensors.local_tensor(of)) is not Tensor:
        return found
    for tensor in _dtensors(found):
        if storage_id(storage(tensor)) != storage_id(storage(of)):
            mark_copy(storage(tensor))
    return found


class RefuseLostWrites(modes.TorchDispatchMode):
    """Refuses writes that DTensor would lose silently.

    Where DTensor cannot make a view of the shards, it returns a view of a copy. Such copies are
    marked here, and writes into them raise.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written, views = aliases(func)
        for i in written:
            for tensor in _dtensors(args[i]):
                refuse_copy(tensor, func.overloadpacket.__name__)
        found = func(*args, **kwargs)
        return copies_marked(found, args[0]) if views and isinstance(args[0], DTensor) else found


def _dtensors(value: Any) -> list[DTensor]:
    """Those in an argument or a result of an operator."""
    values = value if isinstance(value, list | tuple) else (value,)
    return [each for each in values if isinstance(each, DTensor)]


@functools.cache
def aliases(func: Any) -> tuple[tuple[int, ...], bool]:
    """Which arguments an operator writes, and whether it returns a view of the first one."""
    aliases = [a.alias_info for a in schema_of(func).arguments if not a.kwarg_only]
    written = tuple(i for i, alias in enumerate(aliases) if alias is not None and alias.is_write)
    views = not written and bool(aliases) and aliases[0] is not None
    return written, views


def storage(tensor: DTensor) -> torch.UntypedStorage:
    return torch_dtensors.local_tensor(tensor).untyped_storage()


def mark_copy(storage: torch.UntypedStorage) -> None:
    """What is written into it from now on would be lost, and is refused."""
    storage._fxshard_copy = True  # type: ignore[attr-defined]


def is_copy(tensor: DTensor) -> bool:
    return getattr(storage(tensor), "_fxshard_copy", False)


def refuse_copy(tensor: DTensor, name: str) -> None:
    """Raise StepError if what is written into is a view of a copy of a parameter."""
    if is_copy(tensor):
        raise lost(tensor, name)


def named(tensor: Tensor) -> str:
    """The parameter that a tensor is, or was made of."""
    _, fqn = getattr(tensor, PLACE, (None, ""))
    return f"parameter {fqn!r}" if fqn else "a parameter"


def lost(tensor: Tensor, name: str) -> StepError:
    if isinstance(tensor, CopiedPart):
        return StepError(
            f"{name} writes into a part of a sharded DTensor, a gradient say, that is a copy here, "
            f"as its rows lie on several ranks: it would be lost. Write into all rows, and keep "
            f"this rank's: full = p.grad.full_tensor(); full[...] = ...; p.grad = "
            f"distribute_tensor(full, p.grad.device_mesh, p.grad.placements)."
        )
    return StepError(
        f"{name} writes into a part of {named(tensor)} that is a copy here, or of its gradient: it "
        f"is sharded, and this would be lost. Write with an index or a method of it (param[...] = "
        f"value, p.grad[...] = value, param.mul_(2)), or inside of model.summon_full_params()."
    )
