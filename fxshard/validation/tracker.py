"""Runtime tracker: bytes alive while a program runs.

It shares no code with the analysis. It watches operators through a `TorchDispatchMode`, and the
birth and death of storages through weak references. The category of a storage follows from what
happens to it: gathered into, waited for, sent to a reduction, found in the optimizer's state.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxshard._torch.fake_tensors import is_fake
from fxshard._torch.modes import TorchDispatchMode, is_wrapper
from fxshard._torch.trees import tree_flatten
from fxshard.codegen.world import World
from fxshard.memory.category import CATEGORIES, Category, Curve, Matrix
from fxshard.validation.eager_collectives import EagerCollectives


@dataclasses.dataclass
class Measured:
    """Measured bytes of one phase: rows of categories, as in the analysis.

    Attributes:
        phase: its name.
        start: alive when it began.
        after: ``[points, categories]``, alive at each point.
        during: ``[points, categories]``, at the moment with most bytes since the point before.
        host: the same for CPU memory, with offload; zeros without.
    """

    phase: str
    start: list[int]
    after: Matrix
    during: Matrix
    host: Curve


@dataclasses.dataclass
class _TrackedStorage:
    category: Category  # when it was born
    bytes: int
    now: Category
    host: bool = False
    copied_from: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class _TrackedEvent:
    kind: str  # "alloc", "ran", "free", "label", "begin", "point"
    number: int = -1
    label: Category | None = None
    phase: str = ""


COMPUTED = (Category.ACTIVATION, Category.TEMP)

# What `torch.tensor` calls on a tensor that it has just made.
_OF_NEW_DATA = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class Tracker(TorchDispatchMode):
    """Records while it is entered; `begin` and `at` mark phases and points."""

    def __init__(self, offloaded: bool = False) -> None:
        """Args: `offloaded`: what the optimizer makes is on the host, beside its parameters."""
        super().__init__()
        self._offloaded = offloaded
        self._collectives = EagerCollectives()
        self._storages: list[_TrackedStorage] = []
        self._events: list[_TrackedEvent] = []
        self._numbers: dict[int, int] = {}  # id of a live storage -> its number
        self._references: dict[int, Any] = {}
        self._packed: set[int] = set()  # storages of what is gathered and copied out of
        self._in_step = False
        self._arrived: dict[int, int] = {}  # what the model received -> place of the event
        self.of_model = False  # a collective of the model's is being launched
        self.waiting = False  # for a collective: tensors that gloo makes then are its own
        self.phase: str = "start"

    # -- marks ------------------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self.phase = phase
        self._events.append(_TrackedEvent("begin", phase=phase))

    def at(self) -> None:
        """A point: bytes are counted here."""
        self._events.append(_TrackedEvent("point"))

    def know(self, tensors: Iterable[Tensor], category: Category, host: bool = False) -> None:
        """Tensors that exist before the recording."""
        for tensor in tensors:
            self._see(tensor, category, host)

    def mark(self, tensors: Iterable[Tensor], category: Category, host: bool = False) -> None:
        """Set the category of tensors, from their birth on."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            number = self._numbers.get(id(local.untyped_storage()))
            if number is not None:
                self._set(number, category)
                self._storages[number].host = host

    def _set(self, number: int, category: Category) -> None:
        """From its birth on; of what a collective of the model's wrote, since it is there."""
        storage = self._storages[number]
        storage.now = category
        if number in self._arrived:
            self._events[self._arrived[number]] = _TrackedEvent("label", number, category)
        else:
            storage.category = category

    def gradients(self, params: Iterable[Tensor]) -> None:
        """Mark every ``.grad`` that was not sent to a reduction as a sharded gradient."""
        for param in params:
            if param.grad is not None:
                self.gradient(param.grad)

    def gradient(self, grad: Tensor | None) -> None:
        """The same for a gradient that arrives at a parameter, and may be added to ``.grad``."""
        if grad is None:
            return
        grad = grad.to_local() if isinstance(grad, DTensor) else grad
        if self._storages[self._number(grad)].now in (Category.TEMP, Category.ACTIVATION):
            self.mark([grad], Category.SHARDED_GRAD)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark all tensors in the optimizer's state, from their birth on."""
        leaves, _ = tree_flatten(list(optimizer.state.values()))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
                self._see(local, Category.OPT_STATE, self._offloaded)
                self.mark([local], Category.OPT_STATE, self._offloaded)

    def stepping(
        self, grads: list[list[Tensor]], step: Callable[[], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Call `step`, which steps an optimizer with gradients inside of backward."""
        for grad in (grad for rank in grads for grad in rank):
            self.gradient(grad)
        self._in_step = True
        optimizer = step()
        self._in_step = False
        self.optimizer_state(optimizer)
        return optimizer

    # -- watching ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # DTensor runs the operator on local tensors: see it there
        kwargs = kwargs or {}
        if self.phase in ("loss", "loss backward") and func not in _OF_NEW_DATA:
            self._read((args, kwargs))
        result = self._collectives.run(func, args, kwargs)
        self._events.append(_TrackedEvent("ran"))  # what dies after it is still alive
        leaves, _ = tree_flatten(result)
        default = Category.ACTIVATION if self.phase in ("forward", "loss") else Category.TEMP
        host = self._offloaded and (self.phase == "optimizer" or self._in_step)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not self.waiting:
                self._see(leaf, default, host)
        if _only_copies(str(func), kwargs) and _holds_memory(result):
            sources = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            numbers = (self._numbers.get(id(source.untyped_storage())) for source in sources)
            self._copied(self._number(result), tuple(n for n in numbers if n is not None))
        name = "" if self.of_model else str(func)
        if name.startswith("c10d._allgather_base_"):
            self.mark(args[:1], Category.ALL_GATHER)
        elif name.startswith("c10d.allgather_into_tensor_coalesced_"):
            self.mark(args[0], Category.ALL_GATHER)
        elif name.startswith("c10d.reduce_scatter_tensor_coalesced_"):
            self.mark(args[0], Category.SHARDED_GRAD)
            self.sent(args[1])
        elif name.startswith("c10d.allreduce_coalesced_"):
            for tensor in args[0]:
                number = self._number(tensor)
                if self._storages[number].now is not Category.SHARDED_GRAD:
                    self._sent(number)
                    self._label(number, Category.SHARDED_GRAD)
        return result

    def _read(self, arguments: Any) -> None:
        """The user's loss reads these; tensors that are new here existed from the start."""
        leaves, _ = tree_flatten(arguments)
        for leaf in leaves:
            count = len(self._storages)
            if isinstance(leaf, Tensor):
                self._see(leaf, Category.INPUTS)
            if len(self._storages) > count:
                self._events.insert(0, self._events.pop())

    def _copied(self, number: int, sources: tuple[int, ...]) -> None:
        """Note a copy: it may be sent to a reduction, or be a reduced gradient in another dtype.

        Copies that the user's loss makes are not noted: they are gradients of outputs.
        """
        if self.phase == "loss backward":
            return
        storage = self._storages[number]
        storage.copied_from = sources
        if any(self._storages[source].now is Category.SHARDED_GRAD for source in sources):
            self._set(number, Category.SHARDED_GRAD)

    def _label(self, number: int, category: Category) -> None:
        """Change the category of a storage from now on."""
        self._storages[number].now = category
        self._events.append(_TrackedEvent("label", number, category))

    def sent(self, tensors: Iterable[Tensor]) -> None:
        """Tensors go into a reduction."""
        for tensor in tensors:
            self._sent(self._number(tensor))

    def reduced(self, tensors: Iterable[Tensor]) -> None:
        """Tensors are reduced gradients from now on."""
        for tensor in tensors:
            self._label(self._number(tensor), Category.SHARDED_GRAD)

    def _sent(self, number: int) -> None:
        """A storage goes into a reduction: it is a gradient, or a copy of one."""
        storage = self._storages[number]
        if storage.now is Category.UNSHARDED_GRAD:
            return  # an accumulated one
        if not storage.copied_from:
            self._set(number, Category.UNSHARDED_GRAD)
            return
        self._set(number, Category.REDUCE_SCATTER)
        for source in storage.copied_from:
            self._sent(source)

    def _number(self, tensor: Tensor) -> int:
        return self._numbers[id(tensor.untyped_storage())]

    def _see(self, tensor: Tensor, category: Category, host: bool = False) -> None:
        if not _holds_memory(tensor):
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._numbers:
            return
        number = len(self._storages)
        self._storages.append(_TrackedStorage(category, storage.nbytes(), category, host))
        self._numbers[key] = number
        self._events.append(_TrackedEvent("alloc", number))

        def died(_: Any) -> None:
            self._numbers.pop(key, None)
            self._references.pop(number, None)
            self._events.append(_TrackedEvent("free", number))

        self._references[number] = weakref.ref(storage, died)

    def waited(self, tensors: Iterable[Tensor]) -> None:
        """A wait returned: a gathered buffer is an unsharded parameter from now on.

        What a collective of the model's wrote is one of its tensors.
        """
        for tensor in tensors:
            number = self._number(tensor)
            if self._storages[number].now is Category.ALL_GATHER:
                self._label(number, Category.UNSHARDED_PARAM)
            elif self._storages[number].now is Category.COMMUNICATION:
                self._arrived[number] = len(self._events)
                forward = self.phase == "forward"
                self._label(number, Category.ACTIVATION if forward else Category.TEMP)

    def unpacked(self, tensors: Iterable[Tensor]) -> None:
        """Gathered buffers are copied out of: they were no unsharded parameters all along."""
        self._packed.update(map(self._number, tensors))

    def gathered(self, shards: Iterable[Tensor]) -> None:
        """What was computed of a shard only to be sent is *All Gather*."""
        for shard in shards:
            number = self._numbers.get(id(shard.untyped_storage()))
            if number is not None and self._storages[number].now in COMPUTED:
                self.mark([shard], Category.ALL_GATHER)

    def resized(self, tensors: Iterable[Tensor]) -> None:
        """Storages may have been given back while tensors still refer to them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                self._events.append(_TrackedEvent("free", self._numbers[id(storage)]))

    # -- results ----------------------------------------------------------------------------------

    def measured(self) -> list[Measured]:
        """Replay the record: one `Measured` per `begin`, in order."""
        live = np.zeros(2 * len(CATEGORIES), dtype=np.int64)
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
            if event.kind == "ran":
                if _device_total(live) > _device_total(top):
                    top = live.copy()
                continue
            number = event.number
            size = self._storages[number].bytes
            shift = len(CATEGORIES) if self._storages[number].host else 0
            if event.kind == "alloc":
                gone[number] = False
                live[label[number].column + shift] += size
            elif gone[number]:
                continue
            elif event.kind == "free":
                gone[number] = True
                live[label[number].column + shift] -= size
            elif event.label is Category.UNSHARDED_PARAM and number in self._packed:
                continue
            elif event.label is not None:
                live[label[number].column + shift] -= size
                label[number] = event.label
                live[label[number].column + shift] += size
            if _device_total(live) >= _device_total(top):
                top = live.copy()
        return [_measured(*phase) for phase in phases]


def _measured(phase: str, start: Any, after: list[Any], during: list[Any]) -> Measured:
    half = len(CATEGORIES)
    wide, most = _matrix(after), _filled(after, during)
    host = Curve([int(v) for v in start[half:]], wide[:, half:], most[:, half:])
    return Measured(phase, [int(v) for v in start[:half]], wide[:, :half], most[:, :half], host)


def _device_total(row: Any) -> int:
    return int(row[: len(CATEGORIES)].sum())


class WatchedWorld:
    """A World that reports to the tracker what torch's operators do not show, such as waits."""

    def __init__(self, world: World, tracker: Tracker) -> None:
        self._world, self._tracker = world, tracker

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._world, name)
        return self._of_model(found) if name.startswith("model_") else found

    def _of_model(self, launch: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        """A collective that the model calls itself."""

        def watched(tensors: list[Tensor], **options: Any) -> list[Tensor]:
            self._tracker.of_model = True
            made = launch(tensors, **options)
            self._tracker.of_model = False
            self._tracker.mark(made, Category.COMMUNICATION)
            return made

        return watched

    def all_gather(self, shards: list[Tensor], pair: int, group: str = "shard") -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        made = self._world.all_gather(shards, pair, group)
        self._tracker.gathered(shards)
        return made

    def reduce_now(
        self, tensors: list[Tensor], group: str = "shard", op: str = "max"
    ) -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        made = self._world.reduce_now(tensors, group, op)
        self._tracker.mark(made, Category.ALL_GATHER)
        return made

    def reduce_norms(
        self, norms: list[Tensor], pair: int, group: str = "shard", op: str = "sum"
    ) -> list[Tensor]:
        """See `fxshard.runtime.world.World`: these are no gradients."""
        self._tracker.of_model = True
        made = self._world.reduce_norms(norms, pair, group, op)
        self._tracker.of_model = False
        return made

    def comm_hook(self, grads: list[Tensor], pair: int) -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        self._tracker.sent(grads)
        made = self._world.comm_hook(grads, pair)
        self._tracker.reduced(made)
        return made

    def cast(self, tensors: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        made = self._world.cast(tensors, dtype, pair)
        self._tracker.mark(made, Category.ALL_GATHER)
        return made

    def load(self, tensors: list[Tensor], device: torch.device, pair: int) -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        made = self._world.load(tensors, device, pair)
        self._tracker.mark(made, Category.ALL_GATHER)
        return made

    def store(self, tensors: list[Tensor], pair: int) -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        for tensor in tensors:
            self._tracker.gradient(tensor)  # with one rank nothing else shows what it is
        made = self._world.store(tensors, pair)
        self._tracker.mark(made, Category.SHARDED_GRAD, host=True)
        return made

    def offload(self, tensors: list[Tensor], pair: int) -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        made = self._world.offload(tensors, pair)
        self._tracker.mark(made, Category.ACTIVATION, host=True)
        return made

    def reload(self, tensors: list[Tensor], device: torch.device, pair: int) -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        made = self._world.reload(tensors, device, pair)
        self._tracker.mark(made, Category.ACTIVATION)
        return made

    def pack(self, shards: list[Tensor], dtype: torch.dtype, pair: int) -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        made = self._world.pack(shards, dtype, pair)
        self._tracker.mark(made, Category.ALL_GATHER)
        return made

    def unpack(self, packed: list[Tensor], *given: Any, **options: Any) -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        made = self._world.unpack(packed, *given, **options)
        self._tracker.unpacked(packed)
        self._tracker.mark(made, Category.UNSHARDED_PARAM)
        return made

    def reshard(self, buffers: list[Tensor], group: str, **options: Any) -> list[Tensor]:
        """See `fxshard.runtime.world.World`."""
        made = self._world.reshard(buffers, group, **options)
        self._tracker.mark(made, Category.SHARDED_PARAM)
        return made

    def wait(self, tensors: list[Tensor], pair: int) -> None:
        """See `fxshard.runtime.world.World`."""
        self._tracker.waiting = True
        self._world.wait(tensors, pair)
        self._tracker.waiting = False
        self._tracker.waited(tensors)

    def join(self, params: list[Tensor]) -> None:
        """See `fxshard.runtime.world.World`."""
        self._world.join(params)

    def free(self, tensors: list[Tensor]) -> None:
        """See `fxshard.runtime.world.World`."""
        self._world.free(tensors)
        self._tracker.resized(tensors)


def _only_copies(name: str, kwargs: dict[str, Any]) -> bool:
    """True for an operator that copies its operands: casts, packs, pads or concatenates them."""
    if name == "aten.clone.default":
        return kwargs.get("memory_format") is torch.contiguous_format
    return name in ("aten._to_copy.default", "aten.cat.default", "aten.constant_pad_nd.default")


def _holds_memory(tensor: Tensor) -> bool:
    """False for the meta and fake tensors of traces and of DTensor's shape rules, and for wrappers.

    A wrapper, such as an asynchronous collective's result, has a storage of its own with a size,
    and no memory: that is of what it holds, which an operator gave before.
    """
    return not (tensor.is_meta or is_fake(tensor) or is_wrapper(type(tensor)))


def _matrix(rows: Sequence[Any]) -> Matrix:
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2 * len(CATEGORIES))


def _filled(after: Sequence[Any], during: Sequence[Any]) -> Matrix:
    """`during`; where nothing ran between two points, the row of the point in `after`."""
    return _matrix([a if d[0] == -1 else d for a, d in zip(after, during, strict=True)])
