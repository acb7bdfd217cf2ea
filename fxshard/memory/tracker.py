"""Runtime tracker: bytes alive while a program really runs, seen from outside of it.

It shares no code with the analysis: it watches operators through a `TorchDispatchMode`, and the
birth and death of storages through weak references. What a storage is held for follows from what
happens to it: gathered into, waited for, sent to a reduction, found in the optimizer's state.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxshard.compat import TorchDispatchMode, is_fake, tree_flatten
from fxshard.memory.category import CATEGORIES, COLUMN, Category, is_reduce_copy
from fxshard.world import World

Matrix = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass
class Measured:
    """Bytes of one phase as they were: rows of categories, as in the analysis.

    Attributes:
        phase: its name.
        start: alive when it began.
        after: ``[points, categories]``, alive at each point.
        during: ``[points, categories]``, at the moment with most bytes since the point before.
    """

    phase: str
    start: list[int]
    after: Matrix
    during: Matrix


@dataclasses.dataclass
class _Storage:
    category: Category
    bytes: int
    copied_from: int | None = None


@dataclasses.dataclass(frozen=True)
class _Event:
    kind: str  # "alloc", "free", "label", "begin", "point"
    number: int = -1
    label: Category | None = None
    phase: str = ""


class Tracker(TorchDispatchMode):
    """Records while it is entered. `begin` and `at` mark phases and points; the rest is watched."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[_Storage] = []
        self._events: list[_Event] = []
        self._numbers: dict[int, int] = {}  # id of a live storage -> its number
        self._references: dict[int, Any] = {}
        self._phase = "start"

    # -- marks ------------------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self._phase = phase
        self._events.append(_Event("begin", phase=phase))

    def at(self) -> None:
        """A point: bytes are counted here."""
        self._events.append(_Event("point"))

    def know(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Tensors that were there before."""
        for tensor in tensors:
            self._see(tensor, category)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """What is in the optimizer's state now has been state since it was made."""
        leaves, _ = tree_flatten(list(optimizer.state.values()))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
                number = self._numbers.get(id(local.untyped_storage()))
                if number is not None:
                    self._storages[number].category = Category.OPT_STATE

    # -- watching ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor runs the operator on local tensors: see it there
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        leaves, _ = tree_flatten(result)
        default = Category.ACTIVATION if self._phase == "forward" else Category.TEMP
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._see(leaf, default)
        if is_reduce_copy(func, kwargs) and _holds_memory(result):
            self._storages[self._number(result)].copied_from = self._number(args[0])
        name = str(func)
        if name.startswith("c10d.allgather_into_tensor_coalesced_"):
            for tensor in args[0]:
                self._storages[self._number(tensor)].category = Category.ALL_GATHER
        elif name.startswith("c10d.reduce_scatter_tensor_coalesced_"):
            for tensor in args[0]:
                self._storages[self._number(tensor)].category = Category.SHARDED_GRAD
            for tensor in args[1]:
                self._sent(self._number(tensor))
        return result

    def _sent(self, number: int) -> None:
        """A storage goes into a reduction: it is a gradient, or a copy of one."""
        storage = self._storages[number]
        if storage.copied_from is None:
            storage.category = Category.UNSHARDED_GRAD
            return
        storage.category = Category.REDUCE_SCATTER
        self._sent(storage.copied_from)

    def _number(self, tensor: Tensor) -> int:
        return self._numbers[id(tensor.untyped_storage())]

    def _see(self, tensor: Tensor, category: Category) -> None:
        if not _holds_memory(tensor):
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._numbers:
            return
        number = len(self._storages)
        self._storages.append(_Storage(category, storage.nbytes()))
        self._numbers[key] = number
        self._events.append(_Event("alloc", number))

        def died(_: Any) -> None:
            self._numbers.pop(key, None)
            self._references.pop(number, None)
            self._events.append(_Event("free", number))

        self._references[number] = weakref.ref(storage, died)

    def waited(self, tensors: Iterable[Tensor]) -> None:
        """A wait returned: a gathered buffer is an unsharded parameter from now on."""
        for tensor in tensors:
            number = self._number(tensor)
            if self._storages[number].category is Category.ALL_GATHER:
                self._events.append(_Event("label", number, Category.UNSHARDED_PARAM))

    def resized(self, tensors: Iterable[Tensor]) -> None:
        """Storages may have been given back while tensors still refer to them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                self._events.append(_Event("free", self._numbers[id(storage)]))

    # -- results ----------------------------------------------------------------------------------

    def measured(self) -> list[Measured]:
        """Replay the record: one `Measured` per `begin`, in order."""
        live = np.zeros(len(CATEGORIES), dtype=np.int64)
        label = [storage.category for storage in self._storages]
        gone = [True] * len(self._storages)
        phases: list[tuple[str, Any, list[Any], list[Any]]] = []
        top = live.copy()
        for event in self._events:
            if event.kind == "begin":
                phases.append((event.phase, live.copy(), [], []))
                top = live.copy()
                continue
            if event.kind == "point":
                phases[-1][2].append(live.copy())
                phases[-1][3].append(top)
                top = np.full_like(live, -1)
                continue
            number = event.number
            size = self._storages[number].bytes
            if event.kind == "alloc":
                gone[number] = False
                live[COLUMN[label[number]]] += size
            elif gone[number]:
                continue
            elif event.kind == "free":
                gone[number] = True
                live[COLUMN[label[number]]] -= size
            elif event.label is not None:
                live[COLUMN[label[number]]] -= size
                label[number] = event.label
                live[COLUMN[label[number]]] += size
            if live.sum() >= top.sum():
                top = live.copy()
        return [
            Measured(name, [int(v) for v in start], _matrix(after), _filled(after, during))
            for name, start, after, during in phases
        ]


class WatchedWorld:
    """A World that tells the tracker of waits and frees, which no operator shows."""

    def __init__(self, world: World, tracker: Tracker) -> None:
        self._world, self._tracker = world, tracker

    def all_gather(self, shards: list[Tensor], pair: int) -> list[Tensor]:
        """See `fxshard.world.World`."""
        return self._world.all_gather(shards, pair)

    def reduce_scatter(self, grads: list[Tensor], pair: int) -> list[Tensor]:
        """See `fxshard.world.World`."""
        return self._world.reduce_scatter(grads, pair)

    def wait(self, tensors: list[Tensor], pair: int) -> None:
        """See `fxshard.world.World`."""
        self._world.wait(tensors, pair)
        self._tracker.waited(tensors)

    def free(self, tensors: list[Tensor]) -> None:
        """See `fxshard.world.World`."""
        self._world.free(tensors)
        self._tracker.resized(tensors)


def _holds_memory(tensor: Tensor) -> bool:
    """False for what traces and DTensor's shape rules compute with."""
    return not (tensor.is_meta or is_fake(tensor))


def _matrix(rows: Sequence[Any]) -> Matrix:
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(CATEGORIES))


def _filled(after: Sequence[Any], during: Sequence[Any]) -> Matrix:
    """Where nothing happened between two points, the moment is the point."""
    return _matrix([a if d[0] == -1 else d for a, d in zip(after, during, strict=True)])
