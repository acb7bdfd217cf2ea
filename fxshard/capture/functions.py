"""What functions compute, to tell whether one stands for another that was made anew.

``gradient_checkpointing_enable`` of transformers makes a new partial and registers a new hook each
time; trainers turn checkpointing off and on again around a forward. The functions are others, what
they compute is the same, and so is the program.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fxshard._torch import modules as torch_modules
from fxshard.capture import hf

# What is found in these does not change, or is asked for elsewhere (torch.is_grad_enabled).
_SETTLED = frozenset({"builtins", "functools", "math", "operator", "torch"})
_VALUES = (int, str, bytes, bool, type(None), torch.dtype, torch.device)
_ELSEWHERE = frozenset({"IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})  # what no key would show


class _UnknownError(Exception):
    """Two such values may compute other things, though they look alike."""


def meaning(function: Any) -> Hashable | None:
    """Equal for functions, and partials of them, that compute the same; None where that is unknown.

    A key holds what the function closed over, and what it finds in its file, as they are now. All
    of it must be constants, or functions of which that is known, or torch's.

    Args:
        function: a function, a partial, or anything else, of which nothing is known.
    """
    if not isinstance(function, (types.FunctionType, functools.partial)):
        return None
    try:
        return _key(function, {})
    except _UnknownError:
        return None


def _key(value: Any, inside: dict[int, int]) -> Hashable:
    """Args: `inside`: ids of the functions that this is a part of, each with how deep it is."""
    match value:
        case _ if type(value) in _VALUES:
            return type(value), value
        case float() | complex() if type(value) in (float, complex):
            return type(value), repr(value)  # -0.0 is not 0.0, NaN equals itself
        case tuple() if type(value) is tuple:
            return tuple, *_keys(value, inside)
        case functools.partial() if type(value) is functools.partial and not vars(value):
            bound = (*_keys(value.args, inside), *_named(value.keywords, inside))
            return functools.partial, _key(value.func, inside), bound
        case _ if _is_settled(value):
            return "torch's", _IdentityKey(value)
        case types.FunctionType() if id(value) in inside:
            return "again", inside[id(value)]
        case types.FunctionType() if not vars(value):
            return _key_of_function(value, {**inside, id(value): len(inside)})
    raise _UnknownError


def _key_of_function(function: types.FunctionType, inside: dict[int, int]) -> Hashable:
    names = _names(function.__code__)
    if names is None:
        raise _UnknownError
    variables = function.__globals__
    try:
        closed_over = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # one is empty
        raise _UnknownError from None
    return (
        function.__code__,
        *_keys(closed_over, inside),
        *_keys(function.__defaults__ or (), inside),
        *_named(function.__kwdefaults__ or {}, inside),
        *_named({name: variables[name] for name in sorted(names & variables.keys())}, inside),
    )


@functools.cache
def _names(code: types.CodeType) -> frozenset[str] | None:
    """The names in `code` and in the functions inside of it; None if it may use others."""
    codes = [*_codes(code)]
    names = frozenset(name for each in codes for name in each.co_names)
    if names & {"globals", "eval", "exec", "vars", "locals", "__import__"}:
        return None
    instructions = (each for one in codes for each in dis.get_instructions(one))
    return None if any(each.opname in _ELSEWHERE for each in instructions) else names


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    """`code`, and that of the functions inside of it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _keys(values: Iterable[Any], inside: dict[int, int]) -> Iterable[Hashable]:
    return [len(found := [_key(value, inside) for value in values]), *found]


def _named(values: Mapping[str, Any], inside: dict[int, int]) -> Iterable[Hashable]:
    return [(name, _key(value, inside)) for name, value in values.items()]


def _is_settled(value: Any) -> bool:
    """True for what torch's files and the like define: modules, classes and functions."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _SETTLED
    if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return False
    home, name = str(value.__module__), value.__qualname__
    # Under its own name: not what a decorator of torch's has made of a function of a user's.
    found = getattr(sys.modules.get(home), name, None)
    return home.partition(".")[0] in _SETTLED and found is value


class _IdentityKey:
    """Equal to the same object alone. The key keeps it alive: no other gets its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Hooks:
    """The hooks that programs depend on: a number for each, equal for those that do the same.

    Attributes:
        functions: those of the last `state` that are functions, or partials of some.
    """

    def __init__(self) -> None:
        self.functions: list[Any] = []
        self._numbers: tuple[int, ...] = ()
        self._state: tuple[int, ...] = ()
        self._first: dict[int, int] = {}  # number of a hook -> of the first that does the same
        self._by_meaning: dict[Hashable, int] = {}
        self._once: set[int] = set()  # to call these twice does nothing more

    def state(self, tree: list[nn.Module]) -> tuple[int, ...]:
        """Of the modules of `tree`, and of all modules; asked on every call."""
        on_all = torch_modules.global_hooks()
        numbers = (*torch_modules.hook_numbers(tree), *(number for _, number, _ in on_all))
        if numbers != self._numbers:
            self.functions.clear()
            of_each = [(module, torch_modules.module_hooks(module)) for module in tree]
            for place, (module, hooks) in enumerate([*of_each, (None, on_all)]):
                for kind, number, hook in hooks:
                    if isinstance(hook, (types.FunctionType, functools.partial)):
                        self.functions.append(hook)
                    if number not in self._first:
                        self._first[number] = self._same((place, kind), module, number, hook)
            found = [self._first[number] for number in numbers]
            again = zip([None, *found], found, strict=False)
            self._state = tuple(n for before, n in again if n != before or n not in self._once)
            self._numbers = numbers
        return self._state

    def _same(
        self, where: tuple[int, str], module: nn.Module | None, number: int, hook: Any
    ) -> int:
        """The first hook that does the same, or `number`."""
        means = meaning(hook)
        if means is None:
            return number
        key = (*where, torch_modules.how_called(module, number), means)
        first = self._by_meaning.setdefault(key, number)
        if hf.does_nothing_twice(hook):
            self._once.add(first)
        return first
