"""Numbers that forward may count outside of its modules.

A capture runs forward several times, with fewer blocks too, and what a class, a global or a closure
counts decides in some models what a block does. `trace` puts the attributes of modules back itself;
here is what else the code of a model is seen to hold. Numbers only: a flag or a registry may belong
together with something that is out of sight.

What a module counts in each run of its forward no program can go on with: `counting` finds it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

ABSENT = object()  # of a slot without a value
LONG = 1000  # items of a list or a dict that nobody counts in
_FOREIGN = (sys.stdlib_module_names | {"torch", "numpy", "fxshard"}) - {"types"}


@contextlib.contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Afterwards the numbers that the code of `model` holds are what they were."""
    before = [(holder, found) for holder in held(model) if (found := _numbers(holder))]
    try:
        yield
    finally:
        for holder, found in before:
            now = _numbers(holder)
            for key, number in found.items():
                if key in now and now[key] is not number:
                    _put(holder, key, number)


def of_modules(model: nn.Module) -> dict[tuple[int, str, Any], float]:
    """The numbers that modules hold: as attributes, or in a dict or a list that is one."""
    found: dict[tuple[int, str, Any], float] = {}
    for i, module in enumerate(model.modules()):
        held = vars(module)
        found |= {(i, name, None): number for name, number in _numbers(held).items()}
        for name, value in held.items():
            if isinstance(value, (dict, list)) and not name.startswith("_"):
                found |= {(i, name, key): number for key, number in _numbers(value).items()}
    return found


def counting(model: nn.Module, seen: list[dict[tuple[int, str, Any], float]]) -> list[str]:
    """``self.steps of Net``: numbers that go on in each run of forward.

    Args:
        seen: what `of_modules` gave before the first run and after each.
    """
    if len(seen) < 3:
        return []
    first, second, third = seen[-3:]
    counts = [
        at for at, n in third.items() if second.get(at, n) != n and first.get(at) != second[at]
    ]
    modules = list(model.modules())
    return [
        f"self.{name}{'' if key is None else f'[{key!r}]'} of {type(modules[i]).__name__}"
        for i, name, key in counts
    ]


def has_iterators(model: nn.Module) -> bool:
    """True if the code of `model` holds an iterator: it goes on in each run, and never back."""
    kinds = types.GeneratorType
    return any(isinstance(v, kinds) or type(v).__module__ == "itertools" for v in held(model))


def held(model: nn.Module) -> Iterator[Any]:
    """What the code of `model` holds beside tensors and modules, each object once."""
    todo: list[Any] = [v for m in model.modules() for v in (type(m), *vars(m).values())]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) not in seen and not isinstance(value, (Tensor, nn.Module, int, float, str)):
            seen.add(id(value))
            yield value
            todo += _parts(value)


def _parts(value: Any) -> Iterable[Any]:
    """What is held by one thing; nothing where it is not the model's."""
    match value:
        case dict() if "__builtins__" in value:  # of a file: its functions say what of it they read
            return ()
        case dict() | list() if len(value) > LONG:
            return ()
        case dict():
            return list(value.values())
        case list() | tuple() | set() | collections.deque():
            return list(value)
        case types.CellType():
            return _numbers(value, object).values()
        case functools.partial():
            return (value.func, value.args, value.keywords)
        case types.MethodType():
            return (value.__func__, value.__self__)
        case types.FunctionType() if is_users(value):
            return (value.__closure__, value.__defaults__, value.__globals__, *_read(value))
        case type() if is_users(value):
            return (*value.__bases__, *vars(value).values())
        case type() | types.ModuleType() | types.FunctionType():
            return ()
    return (getattr(value, "__dict__", None),) if is_users(type(value)) else ()


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


def is_users(code: Any) -> bool:
    """True for a class or a function of the user's, False for one of a library that we know."""
    return str(code.__module__).partition(".")[0] not in _FOREIGN


def _numbers(holder: Any, kind: Any = (int, float)) -> dict[Any, Any]:
    """The numbers in what can be assigned to, by key; flags are none."""
    items: Iterable[tuple[Any, Any]] = ()
    match holder:
        case dict() | list() if len(holder) <= LONG or "__builtins__" in holder:
            items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        case types.CellType():
            with contextlib.suppress(ValueError):  # it is empty
                items = [("", holder.cell_contents)]
        case type():
            items = vars(holder).items()
    return {k: v for k, v in items if isinstance(v, kind) and not isinstance(v, bool)}


def _put(holder: Any, key: Any, number: float) -> None:
    match holder:
        case dict() | list():
            holder[key] = number
        case types.CellType():
            holder.cell_contents = number
        case _:
            setattr(holder, key, number)


def slots(value: Any) -> dict[str, Any]:
    """The attributes for which the class of an object has slots."""
    found = {}
    for cls in type(value).__mro__:
        names = vars(cls).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if isinstance(vars(cls).get(name), types.MemberDescriptorType):
                found[name] = getattr(value, name, ABSENT)
    return found
