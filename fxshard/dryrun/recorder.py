"""Recorder: notes on a tape what each operator allocates, and what is freed after it."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxshard._torch import collectives
from fxshard._torch.export import DATA_DEPENDENT_ERRORS
from fxshard._torch.fake_tensors import FakeTensorMode, UnsupportedOperatorException, is_fake
from fxshard._torch.fully_sharded import replaced
from fxshard._torch.gradient_sums import IN_PLACE, GradientSums
from fxshard._torch.modes import (
    TorchDispatchMode,
    eager_kernel,
    is_composite,
    is_higher_order,
    is_wrapper,
    outside_function_modes,
    outside_modes,
)
from fxshard._torch.operators import schema_of
from fxshard._torch.transforms import in_memory
from fxshard._torch.trees import tree_iter, tree_map_tensors
from fxshard.capture.provenance import DEVICE_OF, user_line
from fxshard.dryrun import values
from fxshard.dryrun.position import Position
from fxshard.dryrun.tape import Tape
from fxshard.errors import CaptureError
from fxshard.memory.category import Category
from fxshard.memory.ledger import LiveRange, owner_of

name_of: Callable[[Any], str] = functools.cache(
    str
)  # of an operator: torch puts it together at each call

NOT_KNOWN: tuple[type[Exception], ...] = (
    *DATA_DEPENDENT_ERRORS,
    UnsupportedOperatorException,
    NotImplementedError,
)

# Operators that take functions, and run the same operators whatever the values are.
FOLLOWED = ("flex_attention", "flex_attention_backward")

# Operators that may give a storage another size: what their arguments had is looked at again.
RESIZING = ("aten.resize", "aten.set_", "aten.resize_as_")

# What kernels take for themselves: called with an operator, its arguments and its results.
Inside = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]


Placed = Callable[
    [Any, tuple[Any, ...], dict[str, Any]], tuple[dict[str, Any], bool]
]  # an operator and its arguments -> its keywords, and whether its results are on the host

META = torch.device("meta")
aten: Any = torch.ops.aten
_LIFT = aten.lift_fresh.default  # ends torch.tensor(...), of what was made unseen
_TO_COPY = aten._to_copy.default
_TO = aten.to.dtype_layout


def _all_on_device(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    return kwargs, False


class TapeRecorder(TorchDispatchMode):
    """Sees every operator on plain tensors, in the order in which the run calls them.

    Operators on tensor subclasses that wrap others (DTensor) are seen where they run on what is
    inside. A storage is known by a weak reference, which tells when it dies.

    Attributes:
        tape: what is written.
        position: where in the step the run is.
        inside: bytes that a kernel takes and gives back while it runs.
        reducing: integers that are made of nothing have values, as DDP's reducer reads them.
    """

    supports_higher_order_operators = True

    def __init__(
        self, tape: Tape, position: Position, fakes: FakeTensorMode, placed: Placed | None = None
    ) -> None:
        """Args:
        tape, position: see there.
        fakes: makes tensors without values of those with values.
        placed: says of an operator and its arguments with which keywords to run it, and whether
            its results lie in the host's memory; None: all is on the one device that there is.
        """
        super().__init__()
        self.tape: Tape = tape
        self.position: Position = position
        self.inside: Inside | None = None
        self.reducing = False
        self._sums = GradientSums()
        self._placed = placed or _all_on_device
        self._known: dict[int, LiveRange | None] = {}  # by id of a live storage; None: of no bytes
        self._hosts: dict[int, bool] = {}  # so: in whose memory it is, emptied ones too
        self._references: dict[int, Any] = {}
        self._fakes = fakes
        self._kept: list[Tensor] = []
        # Real storages that fake tensors were written into, by id, which another may have later.
        self._stale: dict[int, Any] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What torch.compile makes is seen when it runs; what it does to make it is not."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if is_higher_order(func):  # runs as in eager, operator by operator
            with self:
                return _eager_kernel(func)(*args, **kwargs)
        if func in IN_PLACE:
            func = self._sums.without_mode(func, args)
        if func is DEVICE_OF or func.namespace == "profiler":
            return func(*args, **kwargs)
        if func is collectives.WRAP:
            return collectives.AsyncCollectiveTensor(args[0])
        if is_composite(func):  # called below autograd, as DTensor does
            device = kwargs.get("device") if func is _TO else None
            with self:
                if device is not None and device.type == "cuda":  # C++ would look for it
                    return _TO_COPY(args[0], dtype=kwargs.get("dtype"), device=device)
                return func.decompose(*args, **kwargs)
        if (func.is_view and func is not _LIFT) or kwargs.get("device") == META:  # of no memory
            return self._run(func, args, kwargs)[0]
        kwargs, host = self._placed(func, args, kwargs)
        if func is _TO_COPY and not host and self._is_moved_already(args[0], kwargs):
            return self._run(aten.alias.default, args, {})[0]
        name = name_of(func)
        self.position.at_operator(lambda: self.storages((args, kwargs)))
        self._point(name)
        self._outside(args, kwargs)
        result, of_torch = self._run(func, args, kwargs)
        for tensor in _tensors(result):
            self._see(tensor.untyped_storage(), host=host or of_torch)
            self._sums.made(tensor)
        if name.startswith(RESIZING):
            self._look_again(args)
        if self.inside is not None and not host:
            self._take(self.inside(func, args, kwargs, result))
        return result

    def _is_moved_already(self, tensor: Tensor, kwargs: dict[str, Any]) -> bool:
        """True if a copy to the GPU would be none, as the tensor is there: C++ cannot know."""
        dtype = kwargs.get("dtype")
        return (
            self._placed is not _all_on_device
            and "device" in kwargs
            and self.is_on_device(tensor)
            and dtype in (None, tensor.dtype)
            and kwargs.get("memory_format") in (None, torch.preserve_format)
        )

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Run an operator: where every tensor has values and all are small, on these.

        Returns:
            Its result, and whether it is made of nothing by code of torch that needs its values.
        """
        if func is collectives.WAIT:
            if not is_fake(args[0]):  # torch warns at exit of what nobody waited for
                with outside_modes():
                    func(*args)
            return args[0], False
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        real = [tensor for tensor in given if self.has_values(tensor)]
        of_torch = not given and _called_for_values()
        alone = of_torch or (not given and self._keeps_values(func, args, kwargs))
        if given and len(real) == len(given):
            alone = func.is_view or sum(tensor.nbytes for tensor in real) <= VALUED_BYTES
        if alone or (given and _stays_on_meta(func, given, kwargs)):
            with outside_modes():
                return _finished(func, func(*args, **kwargs)), of_torch
        if not all(map(is_fake, given)):
            args, kwargs = tree_map_tensors(self._without_values, (args, kwargs))
            if schema_of(func).is_mutable:  # what is written into them is not known
                for tensor in real:
                    self._outdate(tensor.untyped_storage())
        answer = _assumed_finite(func, args)
        try:
            made = _finished(func, func(*args, **kwargs))
            if answer is not None and made.nbytes <= VALUED_BYTES:
                with outside_modes():
                    made = torch.full(made.shape, answer)
            return made, False
        except NOT_KNOWN as error:
            raise values.refusal(error, name_of(func)) from error

    def _keeps_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.reducing:
            return kwargs.get("dtype") in (torch.int32, torch.int64)
        return _keeps_values(func, args, kwargs)

    def _outdate(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        self._stale[key] = weakref.ref(storage, lambda _: self._stale.pop(key, None))

    def has_values(self, tensor: Tensor) -> bool:
        """True if a tensor has values, and they are those that it would have for real."""
        if is_fake(tensor) or tensor.is_meta:
            return False
        return id(tensor.untyped_storage()) not in self._stale

    def _without_values(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for one with values, in a storage that is not another one."""
        if is_fake(tensor):
            return tensor
        if tensor.is_meta:  # only its sizes are asked for: it has no memory
            with self._fakes:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        with outside_function_modes():  # it is on the CPU for C++: they may say otherwise
            fake = self._fakes.from_tensor(tensor)
        key = id(fake.untyped_storage())
        if key not in self._known:
            real = id(tensor.untyped_storage())
            self._known[key], self._hosts[key] = self._known.get(real), self._hosts.get(real, True)
            self._kept.append(fake)
        return fake

    def _point(self, op: str, *, kind: Any = None) -> int:
        moment = self.position.moment(op)
        if kind is not None:
            moment = moment._replace(kind=kind)
        return self.tape.point(moment, self.position.phase, self.position.micro_batch)

    def note(self, op: str, module: str | None = None) -> None:
        """Something happens that is no operator: a wait, a free."""
        moment = self.position.moment(op)._replace(kind="row")
        if module is not None:
            moment = moment._replace(module=module)
        self.tape.point(moment, self.position.phase, self.position.micro_batch)

    # -- storages --------------------------------------------------------------------------------

    def storages(self, tree: Any) -> Iterator[LiveRange]:
        """The live ranges of the tensors in `tree`, as far as they are known."""
        for tensor in _tensors(tree):
            found = self._known.get(id(tensor.untyped_storage()))
            if found is not None:
                yield found

    def mark(self, tensors: Iterable[Any], category: Category) -> None:
        """What a storage is held for turns out: from its birth on."""
        for found in self.storages(list(tensors)):
            found.category = category

    def owned(self, tensor: Tensor, fqn: str) -> None:
        """A storage is that of a parameter."""
        for found in self.storages(tensor):
            found.name, found.module, found.op, found.line = fqn, owner_of(fqn), "", ""

    def used_on(self, tensor: Tensor, stream: str) -> None:
        """``Tensor.record_stream``: its memory is not used again before `stream` has come there."""
        for found in self.storages(tensor):
            self.tape.used_on.setdefault(found.storage, set()).add(stream)

    def bytes_on_device(self) -> tuple[int, int]:
        """Bytes on the device now, and the most so far."""
        live = most = 0
        changes: list[tuple[int, int]] = []
        for each in self.tape.ranges:
            if not each.host:
                changes.append((each.born, each.bytes))
                changes += [] if each.died is None else [(each.died, -each.bytes)]
        for _, change in sorted(changes):
            live += change
            most = max(most, live)
        return live, most

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """True if a storage was seen before."""
        return id(storage) in self._known

    def is_on_device(self, tensor: Tensor) -> bool:
        """True if a tensor, or one inside of it, lies in the memory of the run's device."""
        keys = (id(each.untyped_storage()) for each in _tensors(tensor))
        return any(not self._hosts.get(key, True) for key in keys)

    def _outside(self, args: Any, kwargs: Any) -> None:
        """Tensors that were there before, or came from where no operator ran, as from NumPy."""
        for tensor in _tensors((args, kwargs)):
            if not self.knows(tensor.untyped_storage()):
                host = self._placed(None, (tensor,), {})[1]
                self._see(tensor.untyped_storage(), host=host, category=Category.INPUTS)

    def _see(
        self,
        storage: torch.UntypedStorage,
        *,
        host: bool,
        category: Category | None = None,
    ) -> None:
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes()
        category = category or self.position.category
        self._known[key] = self.tape.born(size, category, host=host) if size else None
        self._hosts[key] = host

        def died(_: Any) -> None:
            gone = self._known.pop(key, None)
            self._references.pop(key, None)
            self._hosts.pop(key, None)
            if gone is not None and gone.died is None:
                self.tape.died(gone)

        self._references[key] = weakref.ref(storage, died)

    def _look_again(self, args: Any) -> None:
        for tensor in _tensors(args):
            self.resized(tensor.untyped_storage())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage may have another size now: then the old memory is gone, and the new is there.

        Raises nothing for storages that were never seen: they are not of this run.
        """
        key = id(storage)
        if key not in self._known:
            return
        before = self._known[key]
        size, had = storage.nbytes(), 0 if before is None else before.bytes
        if size == had:
            return
        if size:
            self._point("resize_", kind="row")
            host = self._hosts[key]
            self._known[key] = self.tape.born(size, self.position.category, host=host)
        else:
            self._known[key] = None
        if before is not None and before.died is None:
            self.tape.died(before)

    def _take(self, size: int) -> None:
        """A kernel takes memory and gives it back."""
        if size:
            self.tape.died(self.tape.born(size, Category.TEMP, host=False))


def _eager_kernel(func: Any) -> Callable[..., Any]:
    found = eager_kernel(func) if func.name() in FOLLOWED else None
    if found is None:
        raise CaptureError(
            f"{user_line()}: {func.name()} runs functions inside of it that a dry run cannot "
            f"follow. Write out in the dry run what it does."
        )
    return found


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in `tree` that have memory."""
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor):
            yield from filter(has_storage, in_memory(leaf))


# Modules of torch that compute with numbers of ranks, of samples, of seeds.
WITH_VALUES = ("torch.distributed.device_mesh", "torch.distributed._mesh", "torch.utils.data")


def _stays_on_meta(func: Any, given: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """True if what an operator makes of meta tensors is on the meta device too.

    A copy from there to elsewhere is torch's own error.
    """
    device = kwargs.get("device")
    stays = device is None or device.type == "meta" or func is _TO_COPY
    return stays and all(tensor.is_meta for tensor in given)


VALUED_BYTES = 16 << 20  # tensors of up to so many bytes keep their values
_CONSTANTS = frozenset(getattr(aten, name) for name in ("zeros", "ones", "full"))
VALUED = _CONSTANTS | frozenset(
    getattr(aten, name)
    for name in (
        *("arange", "eye", "randint", "randperm"),
        *("scalar_tensor", "tril_indices", "triu_indices"),
    )
)


def _keeps_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an operator makes of nothing what code reads: positions, masks, tokens.

    These are integers, or of any dtype if they are constant: some masks are made in fp32.
    """
    if func.overloadpacket not in VALUED:
        return False
    with outside_modes():
        made = func(*args, **kwargs | {"device": "meta"})
    whole = not (made.dtype.is_floating_point or made.dtype.is_complex)
    valued = whole or func.overloadpacket in _CONSTANTS
    return valued and bool(made.nbytes <= VALUED_BYTES)


def _assumed_finite(func: Any, args: tuple[Any, ...]) -> bool | None:
    """The answer to ``isnan``, ``isinf``, ``isfinite`` and what these are made of; or None.

    Numbers that are not known are those of a training that goes well: finite.
    """
    if func in (aten.isnan.default, aten.isinf.default):
        return False
    if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]:
        return bool(func is aten.eq.Tensor)
    if func in (aten.eq.Scalar, aten.ne.Scalar) and abs(args[1]) == math.inf:
        return bool(func is aten.ne.Scalar)
    return None


def _finished(func: Any, result: Any) -> Any:
    """What an operator gave, with a work that has results if it is a collective on tensors."""
    if func.namespace != "c10d" or not isinstance(result, tuple):
        return result
    tensors = result[0]
    if not isinstance(tensors, list) or not all(isinstance(each, Tensor) for each in tensors):
        return result
    return tensors, collectives.finished(tensors)


def _called_for_values() -> bool:
    """True if a tensor is made of nothing by code that needs its values."""
    frame = sys._getframe(3)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith(WITH_VALUES):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def has_storage(tensor: Tensor) -> bool:
    """False for meta tensors, and for layouts that keep their memory in other tensors."""
    return tensor.layout is torch.strided and tensor.device.type != "meta"


@contextlib.contextmanager
def resizes_seen(recorder: TapeRecorder) -> Iterator[None]:
    """Storages are resized without an operator, as FSDP does to free what it has gathered."""
    plain = torch.UntypedStorage.resize_

    @functools.wraps(plain)
    def resize(storage: Any, size: int) -> Any:
        done = plain(storage, size)
        recorder.resized(storage)
        return done

    with replaced([(torch.UntypedStorage, "resize_", resize)]):
        yield
