"""Corrections of DTensor's dispatch, for all DTensors on the mesh of a compiled model.

They hold for parameters, gradients, optimizer states, and what is computed from these:

- Random numbers are those that one process draws for the full tensor. On a mesh of CPUs DTensor
  lets each rank draw for its own rows; with equal seeds, all ranks would get equal rows. Here each
  rank draws for the full tensor and keeps its rows.
- Python numbers (``p.grad.norm().item()``) are those of the full tensor. DTensor gives this rank's
  partial value. The call is collective.
- What is written into a part of it that DTensor could only copy (``p.grad[0].zero_()``, where the
  rows lie on several ranks) is refused. DTensor loses it.
- ``torch.autograd.detect_anomaly`` looks for NaN in all rows on each rank: all raise alike.
  DTensor does not know the operator that it asks with.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fxshard._torch import autograd, dtensors, export, trees
from fxshard._torch.dtensors import sharded_like
from fxshard._torch.operators import schema_of
from fxshard.errors import StepError
from fxshard.runtime import copies
from fxshard.runtime.world.c10d import C10dWorld

_NUMBER = torch.ops.aten._local_scalar_dense.default
_IS_ANY_TRUE = torch.ops.aten._is_any_true.default
# Of models, by the hash of the mesh of their parameters; the newest comes last.
_worlds: dict[int, list[weakref.ref[C10dWorld]]] = {}


class _Drawn(threading.local):
    """Per generator, how to restore its state from before the operator that runs in this thread."""

    before: dict[int, Callable[..., Any]] | None = None


_drawn = _Drawn()


def as_one_process(mesh: DeviceMesh, world: C10dWorld) -> None:
    """From now on, random and Python numbers of DTensors on this mesh are those of one process."""
    if not _worlds:
        operators = (*_operators(), *_views(), _NUMBER, _IS_ANY_TRUE)
        dtensors.dtensor_handlers().update(dict.fromkeys(operators, _dispatched))
    alive = [ref for ref in _worlds.get(hash(mesh), ()) if ref() not in (None, world)]
    _worlds[hash(mesh)] = [*alive, weakref.ref(world)]


@contextlib.contextmanager
def undoing() -> Iterator[Callable[[], None]]:
    """Yield a function that restores the generators which the block has drawn from."""
    outer, _drawn.before = _drawn.before, {}
    mine = _drawn.before

    def undo() -> None:
        for put_back in mine.values():
            put_back()

    try:
        yield undo
    finally:
        _drawn.before = outer
        if outer is not None:
            for key, put_back in mine.items():
                outer.setdefault(key, put_back)


@functools.cache
def _operators() -> tuple[export.OpOverload, ...]:
    """All operators that draw random numbers, except attention, which draws for dropout only."""
    return tuple(
        operator
        for operator in _all_operators()
        if "attention" not in operator.name()
        if torch.Tag.nondeterministic_seeded in operator.tags
        if any(isinstance(a.type, torch.TensorType) for a in schema_of(operator).arguments)
    )


@functools.cache
def _views() -> frozenset[export.OpOverload]:
    """All operators that return views of their first argument."""
    return frozenset(operator for operator in _all_operators() if copies.aliases(operator)[1])


def _all_operators() -> Iterator[export.OpOverload]:
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if hasattr(packet, "overloads"):
            yield from (getattr(packet, overload) for overload in packet.overloads())


@torch.compiler.disable  # the backward of a compiled step calls it
def _dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs instead of DTensor's own dispatch of an operator."""
    tensors = [t for t in trees.tree_flatten((args, kwargs))[0] if isinstance(t, DTensor)]
    with autograd.plain_torch_functions():
        if all(hash(t.device_mesh) in _worlds for t in tensors):
            if func is _NUMBER:
                return _number(tensors[0])
            if func is _IS_ANY_TRUE:
                return func(tensors[0].full_tensor())
            if func in _views():
                with dtensors.without_dtensor_handler(func):
                    found = func(*args, **kwargs)
                return copies.as_parts(copies.copies_marked(found, args[0]))
            return _draw(func, args, kwargs, tensors)
        with dtensors.without_dtensor_handler(func):
            return func(*args, **kwargs)


def _number(tensor: DTensor) -> Any:
    """What ``tensor.item()`` gives; collective unless all ranks have it.

    Raises:
        RankMismatchError: some ranks do something else.
    """
    if all(place.is_replicate() for place in tensor.placements):
        return dtensors.local_tensor(tensor).item()
    world = next((w for ref in reversed(_worlds[hash(tensor.device_mesh)]) if (w := ref())), None)
    if world is not None:
        require_together(world)
    return tensor.full_tensor().item()


def require_together(world: C10dWorld) -> None:
    """Raise RankMismatchError unless all ranks read all rows of a sharded tensor now."""
    world.require_joined()
    what = "a read of all rows of a sharded tensor (item(), float(...), if ..., numpy())"
    world.agree([what], "what they do to the model", [["a call of the model"]])


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[DTensor]) -> Any:
    """Draw for the full tensors; results of the first one's shape are this rank's rows."""
    name = func.overloadpacket.__name__
    written = _written(func, args, kwargs)
    for tensor in written:
        if any(place.is_partial() for place in tensor.placements):
            raise StepError(
                f"{name} draws random numbers into what was computed of a sharded parameter, and "
                f"is not summed over the ranks yet. Draw into a tensor of its own: "
                f"torch.empty_like(x).{name}(...)."
            )
    first = tensors[0]
    in_place = any(first is tensor for tensor in written)
    # If the first one is filled, no value of it is read, and it need not be gathered.
    fills = name.endswith("_like") or (in_place and not name.startswith("rrelu"))
    unsharded = {
        id(t): _empty_unsharded(t) if t is first and fills else t.full_tensor().clone()
        for t in tensors
    }
    _note(kwargs.get("generator"), unsharded[id(first)].device)
    found = func(*trees.exchanged(args, unsharded), **trees.exchanged(kwargs, unsharded))
    for tensor in written:
        tensor.copy_(sharded_like(unsharded[id(tensor)], tensor))
    given = {id(unsharded[id(tensor)]): tensor for tensor in tensors}
    leaves, spec = trees.tree_flatten(found)
    made = [given[id(leaf)] if id(leaf) in given else _placed(leaf, first) for leaf in leaves]
    return trees.tree_unflatten(made, spec)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """The arguments that an operator writes."""
    declared = schema_of(func).arguments
    given = [
        *zip(declared, args, strict=False),
        *((argument, kwargs[argument.name]) for argument in declared if argument.name in kwargs),
    ]
    writes = [
        value
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for value in writes if isinstance(value, DTensor)]


def _note(generator: torch.Generator | None, device: torch.device) -> None:
    """Remember the state of a generator before its first draw in an `undoing` block."""
    before = _drawn.before
    if before is None or id(generator) in before or device.type == "meta":
        return
    if generator is not None:
        before[id(generator)] = functools.partial(generator.set_state, generator.get_state())
    elif device.type == "cpu":
        before[id(None)] = functools.partial(torch.set_rng_state, torch.get_rng_state())
    else:
        module: Any = torch.get_device_module(device)
        state = module.get_rng_state(device)
        before[id(None)] = functools.partial(module.set_rng_state, state, device)


def _placed(value: Any, like: DTensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    partial = any(place.is_partial() for place in like.placements)
    if value.shape == like.shape and not partial:
        return sharded_like(value, like)
    return replicated(value, like)


def _empty_unsharded(like: DTensor) -> Tensor:
    device = dtensors.local_tensor(like).device
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def replicated(value: Tensor, like: DTensor) -> DTensor:
    """A replicated DTensor of `value`, on the mesh of `like`."""
    mesh = like.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
