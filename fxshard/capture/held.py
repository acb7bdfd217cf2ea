"""What the modules of a model hold in plain attributes, and what its code holds: one walk of it.

A capture runs forward several times, with fewer blocks too. A `ModelSnapshot` puts back what those
runs change; a copy of a model takes tensors along that torch copies none of.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard._torch import fake_tensors
from fxshard._torch.modules import TENSOR_MARKS
from fxshard.capture.repeat.ghosts import Ghost

T = TypeVar("T")

ABSENT = object()  # of a slot without a value
_OURS = "_fxshard"  # how the names of our own attributes begin
LONG = 1000  # items of a list or a dict that code is not expected to change
_FOREIGN = (sys.stdlib_module_names | {"torch", "numpy", "fxshard"}) - {"types"}
_CODE = (type, types.FunctionType, types.MethodType, functools.partial)


def is_users(code: Any) -> bool:
    """True for a class or a function of the user's, False for one of a library that we know."""
    return str(code.__module__).partition(".")[0] not in _FOREIGN


def is_number(value: Any) -> bool:
    """True for an int or a float; flags are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def slots(value: Any) -> dict[str, Any]:
    """The attributes for which the class of an object has slots."""
    found = {}
    for cls in type(value).__mro__:
        names = vars(cls).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if isinstance(vars(cls).get(name), types.MemberDescriptorType):
                found[name] = getattr(value, name, ABSENT)
    return found


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """What a user has put on a parameter or a buffer, as ``p.no_weight_decay = True``; of other
    subclasses of tensors it cannot be told from what they consist of.
    """
    if type(tensor) not in (Tensor, nn.Parameter) and not isinstance(tensor, DTensor):
        return {}
    found = vars(tensor).items()
    return {n: v for n, v in found if n not in TENSOR_MARKS and not n.startswith(_OURS)}


def give_attributes(tensor: Tensor, attributes: Mapping[str, Any]) -> None:
    """Put on `tensor` what it does not have."""
    for name, value in attributes.items():
        vars(tensor).setdefault(name, value)


def copied(modules: T) -> T:
    """`copy.deepcopy`, of tensors too that autograd has made: torch copies none, here they come
    without their history, as a trace takes them.
    """
    memo: dict[int, Any] = {}
    own = []
    for value in _walked([modules], set(), functools.partial(_data, foreign=True)):
        if isinstance(value, Tensor):
            if not value.is_leaf:
                memo[id(value)] = copy.deepcopy(value.detach(), memo)
            own.append((id(value), own_attributes(value)))
    made = copy.deepcopy(modules, memo)
    for key, attributes in own:  # torch copies parameters without them
        if key in memo:
            give_attributes(memo[key], attributes)
    return made


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device: nothing as large as them is copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in model.parameters()
    }
    for p in model.parameters():
        give_attributes(memo[id(p)], own_attributes(p))
    return copy.deepcopy(model, memo)


class ModelSnapshot:
    """What a model holds, to be compared and put back.

    What its modules hold is put back, all of it. Of what its code holds (classes, closures and
    globals) only numbers and what tensors of a trace have replaced: a flag or a registry may belong
    together with something that is out of sight.

    Attributes:
        code: of what the code holds and no module does, each holder and a copy of its contents.
        has_iterators: something holds an iterator, which goes on in each run and never back.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        seen = {id(module) for module in modules}
        code: list[Any] = [type(module) for module in modules]
        self.has_iterators: bool = False
        self._modules = [(module, dict(vars(module))) for module in modules]
        self._held: list[tuple[nn.Module, str, Any, Any]] = []
        for module, attributes in self._modules:
            for name, value in attributes.items():
                for holder in _walked([value], seen, _data):
                    self.has_iterators |= _is_iterator(holder)
                    if isinstance(holder, _CODE):
                        code.append(holder)
                    elif (contents := _contents(holder)) is not None:
                        self._held.append((module, name, holder, contents))
        seen.difference_update(map(id, code))
        self.code: list[tuple[Any, Any]] = []
        for holder in _walked(code, seen, _data_and_code):
            self.has_iterators |= _is_iterator(holder)
            if (contents := _contents(holder)) is not None:
                self.code.append((holder, contents))

    def assigned(self) -> Iterator[tuple[nn.Module, str]]:
        """Public attributes that are not what they were."""
        for module, before in self._modules:
            for name, value in vars(module).items():
                if not name.startswith("_") and before.get(name, ABSENT) is not value:
                    yield module, name

    def changed(self) -> Iterator[tuple[nn.Module, str]]:
        """Public attributes that are what they were, and hold something else."""
        found = {
            (id(module), name): (module, name)
            for module, name, holder, before in self._held
            if not name.startswith("_") and not _equal(_contents(holder), before)
        }
        yield from found.values()

    def kept_by_code(self) -> Iterator[str]:
        """Where the code holds a tensor of a trace that it did not hold."""
        for holder, before in self.code:
            now = _contents(holder)
            of = holder.__name__ if isinstance(holder, type) else f"a {type(holder).__name__}"
            if isinstance(before, dict):
                for key, value in now.items():
                    if value is not before.get(key, ABSENT) and _is_traced(value):
                        yield f"{key!r} of {of}" if key != "" else "a variable"
            elif any(_is_traced(value) for value in now if all(value is not old for old in before)):
                yield of

    def restore(self) -> None:
        """Put all back in place: collections keep their identity, others may share them."""
        for _, _, holder, before in self._held:
            if not _equal(_contents(holder), before):
                _put(holder, before)
        for module, before in self._modules:
            _put(vars(module), before)
        for holder, before in self.code:
            now = _contents(holder)
            if not _equal(now, before):
                _put_part(holder, before, now)


# -- the walk --------------------------------------------------------------------------------------


def _walked(
    values: Iterable[Any], seen: set[int], parts: Callable[[Any], Iterable[Any]]
) -> Iterator[Any]:
    """Each object that is held by `values`, themselves too, once and not if `seen` has its id.

    Args:
        values: where to begin.
        seen: ids; those of what is walked are added.
        parts: what one object holds.
    """
    todo = list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, (str, bytes, int, float, type(None))) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        todo += parts(value)


def _data(value: Any, *, foreign: bool = False) -> list[Any]:
    """What a collection, or an object of the user's, holds.

    Args: `foreign`: look into objects of libraries too.
    """
    found: list[Any] = []
    match value:
        case Tensor() | type() | types.ModuleType() | types.FunctionType():
            return []
        case types.MethodType():
            return [value.__self__]
        case dict():
            found += value.values()
        case list() | tuple() | set() | frozenset() | collections.deque():
            found += value
        case functools.partial():
            found += (value.args, value.keywords)
    if foreign or isinstance(value, nn.Module) or is_users(type(value)):
        found += (getattr(value, "__dict__", None), *slots(value).values())
    return found


def _data_and_code(value: Any) -> Iterable[Any]:
    """The same, and what functions and classes of the user's hold; modules are another's."""
    match value:
        case dict() if "__builtins__" in value:  # of a file: its functions say what of it they read
            return ()
        case dict() | list() if len(value) > LONG:
            return ()
        case nn.Module():
            return ()
        case types.CellType():
            return _contents(value).values()
        case functools.partial():
            return (value.func, value.args, value.keywords)
        case types.MethodType():
            return (value.__func__, value.__self__)
        case types.FunctionType() if is_users(value):
            return (value.__closure__, value.__defaults__, value.__globals__, *_read(value))
        case type() if is_users(value):
            return (*value.__bases__, *vars(value).values())
    return _data(value)


def _read(function: types.FunctionType) -> Iterator[Any]:
    """What a function reads of its file: what is defined there, and any dict or list."""
    variables, names = function.__globals__, _names(function.__code__)
    here = variables.get("__name__")
    for name in variables.copy() if "globals" in names else names:
        value = variables.get(name)
        if isinstance(value, (dict, list)) or getattr(value, "__module__", None) == here:
            yield value


def _names(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in `code`, and in the functions inside of it."""
    inside = (_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inside)


def _is_iterator(value: Any) -> bool:
    return isinstance(value, types.GeneratorType) or type(value).__module__ == "itertools"


def _is_traced(value: Any) -> bool:
    """True for a tensor of a trace, and for what holds one."""
    return any(
        isinstance(each, Ghost) or (isinstance(each, Tensor) and fake_tensors.is_fake(each))
        for each in _walked([value], set(), _data)
    )


# -- what a holder holds ---------------------------------------------------------------------------


def _contents(holder: Any) -> Any:
    """A copy of what can be changed in a holder; None for what holds nothing."""
    match holder:
        case dict():
            return dict(holder)
        case list() | collections.deque():
            return list(holder)
        case set():
            return set(holder)
        case types.CellType():
            with contextlib.suppress(ValueError):  # it is empty
                return {"": holder.cell_contents}
            return {}
        case type():
            return dict(vars(holder))
        case Tensor() | types.ModuleType() | types.FunctionType() | types.MethodType():
            return None
    looked_into = isinstance(holder, nn.Module) or is_users(type(holder))
    return (looked_into and slots(holder)) or None


def _equal(now: Any, before: Any) -> bool:
    """True if both are the same objects, in the same places."""
    if len(now) != len(before):
        return False
    if isinstance(before, set):
        return {*map(id, now)} == {*map(id, before)}
    if isinstance(before, dict):
        if any(a is not b for a, b in zip(now, before, strict=True)):
            return False
        now, before = now.values(), before.values()
    return all(a is b for a, b in zip(now, before, strict=True))


def _put(holder: Any, before: Any) -> None:
    """Put back all that a collection or an object with slots held."""
    match holder:
        case dict():
            if [key for key in holder if key in before] != list(before):
                holder.clear()  # some are gone: all are put in again, in their order
            for key in [key for key in holder if key not in before]:
                del holder[key]
            for key, value in before.items():
                if holder.get(key, ABSENT) is not value:
                    holder[key] = value
        case list():
            holder[:] = before
        case collections.deque():
            holder.clear()
            holder.extend(before)
        case set():
            holder.clear()
            holder.update(before)
        case _:
            for name, value in before.items():
                _put_one(holder, name, value)


def _put_part(holder: Any, before: Any, now: Any) -> None:
    """Put back numbers, and what a tensor of a trace, or what holds one, has come in place of."""
    if isinstance(before, dict):
        for key, value in now.items():
            old = before.get(key, ABSENT)
            if value is not old and ((is_number(old) and is_number(value)) or _is_traced(value)):
                _put_one(holder, key, old)
        return
    known = {*map(id, before)}
    if any(_is_traced(value) for value in now if id(value) not in known):
        _put(holder, before)
    elif isinstance(holder, list):
        for i, (value, old) in enumerate(zip(now, before, strict=False)):
            if is_number(old) and is_number(value):
                holder[i] = old


def _put_one(holder: Any, key: Any, value: Any) -> None:
    match holder:
        case dict() if value is ABSENT:
            del holder[key]
        case dict():
            holder[key] = value
        case types.CellType() if value is ABSENT:
            del holder.cell_contents
        case types.CellType():
            holder.cell_contents = value
        case _ if value is not ABSENT:
            setattr(holder, key, value)
        case _ if hasattr(holder, key):
            delattr(holder, key)
