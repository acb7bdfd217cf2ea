"""Globals and closures that forward reads: a program depends on their values too.

A trace does not tell when Python reads a variable, so the code says it: that of forward, and of
whatever of the user's it names, functions and methods of modules and of objects. Of an object that
a variable holds (a configuration, a module of the user's), the attributes count that this code
names. At each call all of them are compared with what they were: ``USE_BIAS = False``, or another
function in a file of a library, asks for another program.

What forward reads of files and clocks counts as it was in the traced call.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import dataclasses
import dis
import enum
import functools
import operator
import os
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from fxshard.capture.functions import meaning
from fxshard.capture.held import LONG, is_users, slots
from fxshard.capture.places import (
    ABSENT,
    PLAIN,
    Place,
    State,
    always,
    any_place,
    array_contents,
    names_of,
    state,
)
from fxshard.capture.swapped import users_class

# Methods that are called without being named.
_UNNAMED = frozenset(
    {"forward", "backward", "setup_context", "__call__", "__init__", "__getitem__", "__get__"}
    | {"__enter__", "__exit__", "__missing__", "__iter__", "__len__", "__contains__", "__bool__"}
)
# With these, code reads what it names as a string.
_BY_STRING = frozenset({"getattr", "hasattr", "attrgetter", "vars", "__dict__", "globals"})
_ENVIRONMENT = frozenset({"environ", "getenv"})
_OF_FUNCTIONS, _OF_TENSORS = "functions", "tensors"  # attributes that a user has put on them
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NOT_READ = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}
_Function = types.FunctionType
_Names = frozenset[str]


class Variables:
    """What the variables that programs depend on say now, as a number: equal if all are equal.

    Attributes:
        changed: the name of the one that was seen to change last, and its file; "" for none.
    """

    def __init__(self) -> None:
        self.changed: str = ""
        self._tree: Iterable[nn.Module] = ()
        self._given: tuple[list[nn.Module], Sequence[Any]] = [], ()
        self._written: dict[tuple[int, str], Any] = {}  # what a trace has changed: id and name
        self._states: list[State] = []
        self._number = 0
        self._looks: dict[int, _Look] = {}  # by number: where was looked in a state

    def number(self, tree: Iterable[nn.Module], held: Sequence[Any] = ()) -> int:
        """Of the state that the variables are in which forward reads.

        Args:
            tree: all modules of the model: their own attributes are asked for elsewhere.
            held: functions, modules or objects that are called beside, as a variable may hold them.
        """
        if tree is not self._tree or [*map(id, held)] != [*map(id, self._given[1])]:
            self._tree, self._given = tree, (list(tree), [*held])
            self._looks.clear()
        look = self._looks.get(self._number)
        if look is None or not look.is_same():
            self.changed = look.changed() if look is not None else ""
            again = (number for number, each in self._looks.items() if each.is_same())
            self._number = next(again, -1)
            if self._number < 0:
                self._look()
        return self._number

    def _look(self) -> None:
        """Look everywhere, and find the number of the state."""
        look = _Look(*_places(*self._given, self._written))
        now = state(look.places)
        if now not in self._states:
            self._states.append(now)
        self._number = self._states.index(now)
        self._looks[self._number] = look

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """The model is traced in the block: what forward itself changes (a log, a cache, a context)
        would say at each call that it is another one, and does not count.
        """
        held, whole, _ = _places(*self._given, self._written)
        before = [
            (key, there, {name: there.get(name, ABSENT) for name in names})
            for key, (there, names) in held.items()
        ]
        yield
        written = {
            (key, name): there
            for key, there, values in before
            for name, value in values.items()
            if there.get(name, ABSENT) is not value
        }
        written |= {(key, ""): of for key, (of, place) in whole.items() if not place.is_same()}
        if written and self._looks:
            self._written |= written
            self._looks.clear()
            look = self._looks[self._number] = _Look(*_places(*self._given, self._written))
            self._states[self._number] = state(look.places)


class _Look:
    """Where was looked, and what was there.

    Attributes:
        places: all of it.
    """

    def __init__(self, held: _Held, whole: _Whole, twins: Place) -> None:
        self._held = [(there, tuple(sorted(names))) for there, names in held.values()]
        self._named = [names_of(*each) for each in self._held]
        self.places: list[Place] = [*self._named, *(place for _, place in whole.values())]
        self._checks = [p.is_same for p in (*self.places, twins) if p.is_same is not always]

    def is_same(self) -> bool:
        return all(is_same() for is_same in self._checks)

    def changed(self) -> str:
        """The name of a variable that is another now, and its file."""
        for (there, names), place in zip(self._held, self._named, strict=True):
            if not place.is_same():
                for name, before in zip(names, place.before, strict=True):
                    if there.get(name, ABSENT) is not before:
                        return f"{name} of {there['__name__']}" if "__name__" in there else name
        return ""


_Held = dict[int, tuple[Mapping[str, Any], set[str]]]  # by id: variables, and the names that count
_Whole = dict[int, tuple[Any, Place]]  # by id: what is looked into whole


def _places(
    tree: list[nn.Module], others: Sequence[Any], written: Collection[tuple[int, str]]
) -> tuple[_Held, _Whole, Place]:
    """Where to look: the variables of all code that forward may run, and what they hold.

    The last place is of functions that compute what others do: it tells whether they still do, and
    is no part of a state. A hook is left behind each time that checkpointing is turned on.

    Args:
        tree, others: what runs, as in `Variables.number`.
        written: what does not count: the id of what holds it and its name, "" for the whole.
    """
    held: _Held = {}
    found: _Whole = {}
    modules = {id(module) for module in tree}
    looked: set[tuple[int, _Names]] = set()
    by_methods: dict[type[Any], _Names] = {}

    def read(
        variables: Mapping[str, Any], names: Collection[str], attributes: _Names, of: Any = None
    ) -> None:
        """Args: `of`: what is always the same, where `variables` are made anew."""
        key = id(variables if of is None else of)
        kept = [name for name in names if (key, name) not in written]
        held.setdefault(key, (variables, set()))[1].update(kept)
        for name in kept:
            if (value := variables.get(name, ABSENT)) is not ABSENT:
                look(value, attributes)

    def look(value: Any, attributes: _Names) -> None:
        if isinstance(value, (Tensor, enum.Enum, _Function, *PLAIN)):
            return
        if (key := (id(value), attributes)) in looked:
            return
        looked.add(key)
        match value:
            case nn.Module():
                if id(value) not in modules:
                    modules.add(id(value))
                    read(vars(value), vars(value).keys() - _NOT_READ, attributes)
            case functools.partial():
                for each in (value.func, value.args, value.keywords):
                    look(each, attributes)
            case types.MethodType():
                look(value.__self__, attributes)
            case types.CellType():
                look_whole(value, lambda: _contents(value), attributes)
            case contextvars.ContextVar():
                look_whole(value, lambda: (value.get(ABSENT),), attributes)
            case weakref.ref():
                look_whole(value, lambda: (value() is None,), attributes)
                look(value(), attributes)
            case dict():
                if len(value) <= LONG:
                    look_whole(value, lambda: (*dict.keys(value), *dict.values(value)), attributes)
            case types.MappingProxyType():
                look_whole(value, lambda: (*value, *value.values()), attributes)
            case tuple() | frozenset():
                look_whole(value, lambda: tuple(value), attributes)
            case list() | set() | deque():
                if len(value) <= LONG:
                    look_whole(value, lambda: tuple(value), attributes)
            case UserDict() | UserList() | ChainMap():
                look(value.maps if isinstance(value, ChainMap) else value.data, attributes)
                look_at_object(value, attributes)
            case np.ndarray() | bytearray() | array.array():
                if not isinstance(value, np.memmap) or value.flags.writeable:
                    look_whole(value, lambda: array_contents(value), attributes)
            case types.ModuleType():
                if _is_users_file(value.__name__):
                    read(vars(value), attributes & vars(value).keys(), attributes)
            case type():
                for cls in filter(is_users, value.__mro__):
                    read(vars(cls), attributes, attributes, cls)
            case _ if not callable(value) or is_users(type(value)):
                look_at_object(value, attributes)

    def look_at_object(value: Any, attributes: _Names) -> None:
        attributes |= named_by_methods(type(value))
        variables = getattr(value, "__dict__", None)
        if isinstance(variables, dict):
            hidden = is_users(type(value)) and hasattr(type(value), "__getattr__")
            read(variables, {*variables} if hidden else attributes, attributes)
        if is_users(type(value)):
            look(type(value), attributes)
            if slots(value):
                names = sorted(attributes & slots(value).keys())
                look_whole(
                    value, lambda: tuple(getattr(value, n, ABSENT) for n in names), attributes
                )

    def named_by_methods(cls: type[Any]) -> _Names:
        """What the methods of an object read of it."""
        if cls in by_methods:
            return by_methods[cls]
        methods = chain.from_iterable(
            _inside(value)
            for each in filter(is_users, cls.__mro__)
            for value in vars(each).values()
        )
        codes = (_read(each.__code__) for each in methods if id(each) in functions)
        by_methods[cls] = frozenset().union(*(code.attributes for code in codes))
        return by_methods[cls]

    def look_whole(value: Any, contents: Any, attributes: _Names) -> None:
        if (id(value), "") in written:
            return
        if id(value) not in found:
            place = any_place(contents)
            if type(value) in (tuple, frozenset):
                place = dataclasses.replace(place, is_same=always)
            found[id(value)] = value, place
        for each in found[id(value)][1].before:
            look(each, attributes)

    functions = _functions(tree, others)
    twins = _twins(functions.values())
    functions = {key: each for key, each in functions.items() if key not in twins}
    for each in others:
        look(each, frozenset())
    attributes: _Names = frozenset()
    for function in functions.values():
        code = _read(function.__code__)
        attributes |= code.attributes
        if _is_users_file(function.__globals__.get("__name__")):
            read(function.__globals__, code.names, code.attributes)
        for value in (
            *(function.__closure__ or ()),
            function.__defaults__,
            function.__kwdefaults__,
        ):
            look(value, code.attributes)
        if not _ENVIRONMENT.isdisjoint(code.names | code.attributes):
            found[id(os.environ)] = os.environ, _environment()
    every = [*functions.values()]
    for what in ("__code__", "__defaults__", "__kwdefaults__"):
        having = [each for each in every if getattr(each, what) is not None]
        look_whole(what, functools.partial(_of_each, having, what), frozenset())
    own = [vars(each) for each in every]
    look_whole(_OF_FUNCTIONS, lambda: tuple(map(len, own)), attributes)
    for variables in filter(None, own):
        read(variables, attributes, attributes)
    holders = [each for m in tree for each in (m._parameters, m._buffers) if each]
    look_whole(_OF_TENSORS, lambda: tuple(_on_tensors(holders, attributes)), attributes)
    of_twins = any_place(lambda: tuple(chain.from_iterable(map(_parts, twins.values()))))
    return held, found, of_twins


def _twins(functions: Iterable[_Function]) -> dict[int, _Function]:
    """Those that compute what another one does, by their ids."""
    by_code: dict[tuple[types.CodeType, int], list[_Function]] = {}
    for each in functions:
        by_code.setdefault((each.__code__, id(each.__globals__)), []).append(each)
    twins = {}
    for alike in by_code.values():
        known = set()
        for each in alike if len(alike) > 1 else ():
            if (means := meaning(each)) is not None:
                if means in known:
                    twins[id(each)] = each
                known.add(means)
    return twins


def _parts(function: _Function) -> Iterator[Any]:
    """What makes a function another one, with the same variables of its file."""
    yield from (function.__code__, len(vars(function)))
    for values in (function.__defaults__ or (), (function.__kwdefaults__ or {}).values()):
        yield from (len(values), *values)
    for cell in function.__closure__ or ():
        yield from _contents(cell)


def _functions(tree: list[nn.Module], others: Sequence[Any]) -> dict[int, _Function]:
    """All of the user's that forward may run, by the names in its code; some more than it runs. By
    their ids.
    """
    found: dict[int, _Function] = {}
    classes: dict[type, None] = {}
    names = set(_UNNAMED)
    todo: list[Any] = []
    added: set[int] = set()

    def add(value: Any) -> None:
        """A class gives its methods, once their names are known."""
        if id(value) in added:
            return
        added.add(id(value))
        match value:
            case type() if is_users(value) and value not in classes:
                for cls in filter(is_users, value.__mro__):
                    if cls not in classes:
                        classes[cls] = None
                        todo.extend(vars(cls).get(name) for name in names)
            case nn.Module():
                for module in value.modules():
                    add(users_class(module))
                    for each in vars(module).values():
                        add(each)
            case types.MethodType():
                todo.append(value)
                add(value.__self__)
            case _Function() | property() | staticmethod() | classmethod():
                todo.append(value)
            case functools.partial() | functools.partialmethod() | functools.cached_property():
                todo.append(value.func)
            case functools._lru_cache_wrapper():
                add(value.__wrapped__)
            case _ if is_users(type(value)):
                add(type(value))

    for module in tree:
        add(users_class(module))
        for value in vars(module).values():
            if not isinstance(value, nn.Module):
                add(value)
    for value in others:
        add(value)
    while todo:
        for function in _inside(todo.pop()):
            if id(function) in found:
                continue
            found[id(function)] = function
            read, attributes = _read(function.__code__)
            for cell in function.__closure__ or ():
                for value in _contents(cell):
                    add(value)
            if not _is_users_file(function.__globals__.get("__name__")):
                continue  # a decorator of torch's: what it decorates lies in its closure
            for name in read:
                value = function.__globals__.get(name)
                add(value)
                if isinstance(value, types.ModuleType) and _is_users_file(value.__name__):
                    for attribute in attributes & vars(value).keys():
                        add(vars(value)[attribute])
            new = attributes - names
            names |= new
            todo.extend(vars(cls)[name] for cls in classes for name in new & vars(cls).keys())
    return found


def _inside(value: Any) -> Iterator[_Function]:
    """The functions that a method of any kind is made of."""
    match value:
        case _Function():
            yield value
        case property():
            yield from (each for each in (value.fget, value.fset) if isinstance(each, _Function))
        case staticmethod() | classmethod() | types.MethodType():
            yield from _inside(value.__func__)
        case functools.partial() | functools.partialmethod() | functools.cached_property():
            yield from _inside(value.func)


def _on_tensors(holders: Iterable[Mapping[str, Tensor | None]], names: _Names) -> Iterator[Any]:
    """What a user has put on the tensors that there are now, by name and value; most have none."""
    for holder in holders:
        for tensor in holder.values():
            if tensor is not None and (own := tensor.__dict__):
                for name in names & own.keys():
                    yield from (name, own[name])


def _of_each(functions: list[_Function], what: str) -> tuple[Any, ...]:
    return tuple(map(operator.attrgetter(what), functions))


def _environment() -> Place:
    now = vars(os.environ)["_data"]  # as bytes: os.environ decodes each on each read
    before = dict(now)
    return Place((*before, *before.values()), lambda: now == before)


class _NamesRead(NamedTuple):
    """Attributes:
    names: the globals that it reads, with the functions inside of it.
    attributes: the names of attributes that it reads, of whatever.
    """

    names: _Names
    attributes: _Names


@functools.cache
def _read(code: types.CodeType) -> _NamesRead:
    instructions = [*dis.get_instructions(code)]
    names = {str(each.argval) for each in instructions if each.opname in _GLOBAL}
    attributes = {str(each.argval) for each in instructions if each.opname in _ATTRIBUTE}
    if not _BY_STRING.isdisjoint(names | attributes):
        said = {part for each in code.co_consts for part in str(each).split(".")}
        attributes |= said
        names |= said if "globals" in names else set()
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            inside = _read(each)
            names |= inside.names
            attributes |= inside.attributes
    return _NamesRead(frozenset(names), frozenset(attributes))


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _is_users_file(name: Any) -> bool:
    return isinstance(name, str) and is_users(types.SimpleNamespace(__module__=name))
