"""What modules hold in plain attributes: collections, and objects of the user's, however deep.

A trace puts it back as it was; a copy of a model takes tensors along that torch copies none of.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from fxshard._torch import fake_tensors
from fxshard.capture import counters
from fxshard.capture.counters import ABSENT, slots
from fxshard.capture.repeat.ghosts import Ghost

T = TypeVar("T")


def walked(values: Iterable[Any], seen: set[int], *, foreign: bool = False) -> Iterator[Any]:
    """Each object that is held by `values`, themselves too, once and not if `seen` has its id.

    Args:
        values: where to begin.
        seen: ids; those of what is walked are added.
        foreign: look into objects of libraries too.
    """
    todo = list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, (str, bytes, int, float, type(None))) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        match value:
            case Tensor() | type() | types.ModuleType() | types.FunctionType():
                pass
            case dict():
                todo += value.values()
            case list() | tuple() | set() | frozenset() | collections.deque():
                todo += value
            case functools.partial():
                todo += (value.args, value.keywords)
            case types.MethodType():
                todo.append(value.__self__)
        if _is_looked_into(value, foreign):
            todo += (getattr(value, "__dict__", None), *slots(value).values())


def _is_looked_into(value: Any, foreign: bool) -> bool:
    if isinstance(value, (Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    return foreign or isinstance(value, nn.Module) or counters.is_users(type(value))


def copied(modules: T) -> T:
    """`copy.deepcopy`, of tensors too that autograd has made: torch copies none, here they come
    without their history, as a trace takes them.
    """
    memo: dict[int, Any] = {}
    for value in walked([modules], set(), foreign=True):
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = copy.deepcopy(value.detach(), memo)
    return copy.deepcopy(modules, memo)


class Snapshot:
    """What the modules of a model hold, to be told of and put back.

    Of classes, closures and globals of its code, tensors alone that a trace has left there are
    taken out: the rest may belong together with something that is out of sight.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        seen = {id(module) for module in modules}
        self._modules = [(module, dict(vars(module))) for module in modules]
        self._held: list[tuple[nn.Module, str, Any, Any]] = []
        for module, attributes in self._modules:
            for name, value in attributes.items():
                for holder in walked([value], seen):
                    contents = _contents(holder)
                    if contents is not None:
                        self._held.append((module, name, holder, contents))
        self._code: list[tuple[Any, Any]] = []
        for holder in counters.held(model):
            if id(holder) not in seen:
                contents = _code_contents(holder)
                if contents is not None:
                    self._code.append((holder, contents))

    def assigned(self) -> Iterator[tuple[nn.Module, str]]:
        """Public attributes that are not what they were."""
        for module, before in self._modules:
            for name, value in vars(module).items():
                if not name.startswith("_") and before.get(name, ABSENT) is not value:
                    yield module, name

    def changed(self) -> Iterator[tuple[nn.Module, str]]:
        """Public attributes that are what they were, and hold something else."""
        told = set()
        for module, name, holder, before in self._held:
            if name.startswith("_") or (id(module), name) in told:
                continue
            if not _equal(_contents(holder), before):
                told.add((id(module), name))
                yield module, name

    def restore(self) -> None:
        """Put all back in place: collections keep their identity, others may share them."""
        for _, _, holder, before in self._held:
            if not _equal(_contents(holder), before):
                _put(holder, before)
        for module, before in self._modules:
            _put_items(vars(module), before)
        for holder, before in self._code:
            now = _code_contents(holder)
            if not _equal(now, before):
                _take_out(holder, before, now)


def _contents(holder: Any) -> Any:
    """A copy of what a collection or an object with slots holds; None for what holds nothing."""
    match holder:
        case dict():
            return dict(holder)
        case list() | collections.deque():
            return list(holder)
        case set():
            return set(holder)
    return (_is_looked_into(holder, False) and slots(holder)) or None


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
    match holder:
        case dict():
            _put_items(holder, before)
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
                if value is not ABSENT:
                    setattr(holder, name, value)
                elif hasattr(holder, name):
                    delattr(holder, name)


def _put_items(holder: dict[Any, Any], before: dict[Any, Any]) -> None:
    kept = [key for key in holder if key in before]
    if kept != list(before):  # some are gone: all are put in again, in their order
        holder.clear()
    for key in [key for key in holder if key not in before]:
        del holder[key]
    for key, value in before.items():
        if holder.get(key, ABSENT) is not value:
            holder[key] = value


def _code_contents(holder: Any) -> Any:
    """The same of what code holds: cells and classes too."""
    match holder:
        case types.CellType():
            with contextlib.suppress(ValueError):  # it is empty
                return {"": holder.cell_contents}
            return {}
        case type():
            return dict(vars(holder))
        case dict() | list() | set() | collections.deque():
            return _contents(holder)
    return None


def _take_out(holder: Any, before: Any, now: Any) -> None:
    """Put back what a tensor of a trace, or something that holds one, has come in place of."""
    if not isinstance(before, dict):
        known = {*map(id, before)}
        if any(_is_traced(value) for value in now if id(value) not in known):
            _put(holder, before)
        return
    for key, value in now.items():
        old = before.get(key, ABSENT)
        if value is old or not _is_traced(value):
            continue
        match holder:
            case types.CellType() if old is ABSENT:
                del holder.cell_contents
            case types.CellType():
                holder.cell_contents = old
            case type() if old is ABSENT:
                delattr(holder, key)
            case type():
                setattr(holder, key, old)
            case _ if old is ABSENT:
                del holder[key]
            case _:
                holder[key] = old


def _is_traced(value: Any) -> bool:
    return any(
        isinstance(each, Ghost) or (isinstance(each, Tensor) and fake_tensors.is_fake(each))
        for each in walked([value], set())
    )
