"""Recording of eager code on tensors without data: what its operators allocate and free.

For what a step does outside of the program: the optimizer, the user's loss.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fxshard._torch import collectives
from fxshard._torch.fake_tensors import FakeTensorMode, is_fake
from fxshard._torch.modes import TorchDispatchMode, is_wrapper
from fxshard._torch.operators import schema_of
from fxshard.ir import tags


@dataclasses.dataclass
class OperatorEvent:
    """One operator: what was allocated by it, and what died before the next one.

    Attributes:
        op: name of the operator.
        allocated: ``(storage number, bytes)``.
        freed: storage numbers.
    """

    op: str
    allocated: list[tuple[int, Any]]
    freed: list[int]


@functools.cache
def name_of(func: Any) -> str:
    """``aten.add_.Tensor``: torch puts it together at each call."""
    return str(func)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class Kernels:
    """Operators on meta tensors, each run once per layout of what it takes.

    torch's meta kernels are Python for most operators, and an optimizer calls the same ones on each
    parameter. What they give depends on layouts and plain values alone: where they made a tensor
    the first time, one like it is made; where they gave back an argument, that is given back.
    Everything else runs: views, values of other types, tensors with data.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Callable[[tuple[Any, ...]], Any] | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``."""
        key = _layout((args, tuple(kwargs.items())))
        if key is None:
            return func(*args, **kwargs)
        if (func, key) in self._known:
            replay = self._known[func, key]
            return func(*args, **kwargs) if replay is None else replay(args)
        parts = _elementwise(func, args, kwargs)
        if parts is not None:
            return self._each(func, args, kwargs, parts)
        result = func(*args, **kwargs)
        same = _layout((args, tuple(kwargs.items()))) == key  # else it has changed a layout
        self._known[func, key] = _repeat(result, args, kwargs) if same else None
        return result

    def _each(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> list[torch.Tensor] | None:
        """A foreach operator, on one of each kind of its elements."""
        kinds: dict[Any, int] = {}
        of = []
        for i in range(count):
            key = _layout(tuple(a[i] for a in args if isinstance(a, (list, tuple))))
            of.append(kinds.setdefault(key, len(kinds)))
        first = [of.index(kind) for kind in range(len(kinds))]
        some = [[a[i] for i in first] if isinstance(a, (list, tuple)) else a for a in args]
        made = func(*some, **kwargs)
        if made is None:
            return None
        return [torch.empty_like(made[kind]) for kind in of]


def _layout(value: Any) -> Any:
    """A key that is equal for values on which meta kernels do the same; None if there is none."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if not value.is_meta:
            return None
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if kind is tuple or kind is list:
        parts = tuple(map(_layout, value))
        return None if None in parts else parts
    return (kind, value) if kind in _PLAIN else None


_PLAIN = {int, float, bool, str, type(None)}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Of an operator that takes lists and makes each result of one element of each: their length.

    Source: the slow paths in aten/src/ATen/native/ForeachOpsKernels.cpp, which meta tensors take.
    """
    if not name_of(func).startswith("aten._foreach_"):
        return None
    if any(isinstance(value, (list, tuple, torch.Tensor)) for value in kwargs.values()):
        return None
    lengths = {len(a) for a in args if isinstance(a, (list, tuple))}
    returns = [str(made.type) for made in schema_of(func).returns]
    if len(lengths) != 1 or returns not in ([], ["List[Tensor]"]):
        return None
    return lengths.pop()


def _repeat(
    result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[tuple[Any, ...]], Any] | None:
    """How to get a result like `result` for arguments that are laid out alike; None: by running."""
    if result is None:
        return lambda given: None
    for i, each in enumerate(args):
        if each is result:
            return operator.itemgetter(i)
    if type(result) is not torch.Tensor or not result.is_meta:
        return None
    shape, stride, dtype = result.shape, result.stride(), result.dtype

    def make(given: tuple[Any, ...]) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    storage = result.untyped_storage()
    taken = {id(t.untyped_storage()) for t in tags.tensors([*args, *kwargs.values()])}
    fresh = id(storage) not in taken and not result.storage_offset()
    return make if fresh and storage.nbytes() == make(()).untyped_storage().nbytes() else None


# What `torch.tensor` ends with: its argument is no tensor of the user's, but what it has just made.
_FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class Recorder(TorchDispatchMode):
    """Notes when storages appear in the results of operators, and when they die."""

    def __init__(
        self, fake_mode: FakeTensorMode | None = None, run: Callable[..., Any] = _run
    ) -> None:
        """Args:
        fake_mode: in which real tensors from outside become fake ones.
        run: runs an operator: ``run(func, args, kwargs)``.
        """
        super().__init__()
        self._run = run
        self.outside: dict[int, torch.UntypedStorage] = {}  # by number: what operators only read
        self._fake_mode = fake_mode
        self._kept: list[torch.Tensor] = []
        self.events: list[OperatorEvent] = [OperatorEvent("start", [], [])]
        self.numbers: dict[int, int] = {}
        self.on_cpu: set[int] = set()  # numbers of what the CPU holds, unless it stands in
        self.stands_in = False  # what is made on the CPU takes the place of what is elsewhere
        self._references: list[Any] = []
        self._count = 0

    def know(self, storage: torch.UntypedStorage) -> int | None:
        """Number a storage; None if it is known already."""
        if id(storage) in self.numbers:
            return None
        number = self._count
        self._count += 1
        key = id(storage)
        self.numbers[key] = number
        if storage.device.type == "cpu" and not self.stands_in:
            self.on_cpu.add(number)

        def died(_: Any) -> None:
            self.numbers.pop(key, None)
            self.events[-1].freed.append(number)

        self._references.append(weakref.ref(storage, died))
        return number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # it runs the operator on what it holds: seen there
        kwargs = kwargs or {}
        if func is collectives.WRAP:
            return collectives.AsyncCollectiveTensor(args[0])
        if self._fake_mode is not None and func not in _FRESH:
            for tensor in tags.tensors([*args, *kwargs.values()]):
                self._read(tensor, self._fake_mode)
        result = self._run(func, args, kwargs)
        event = OperatorEvent(name_of(func), [], [])
        self.events.append(event)
        for tensor in tags.tensors(result):
            storage = tensor.untyped_storage()
            number = self.know(storage)
            if number is not None:
                event.allocated.append((number, storage.nbytes()))
        return result

    def _read(self, tensor: torch.Tensor, fake_mode: FakeTensorMode) -> None:
        """Note a tensor that was there before; the fake one that stands for it is its memo's."""
        fake = tensor if is_fake(tensor) else fake_mode.from_tensor(tensor)
        number = self.know(fake.untyped_storage())
        if number is not None:
            self.outside[number] = tensor.untyped_storage()
            self._kept.append(fake)  # else its memo forgets it, and the next reader gets another
