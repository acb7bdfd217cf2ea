"""Plain attributes of modules that forward reads: a program depends on their values.

While a model is traced every read of an attribute is noted, by the class of the module: layers that
are alike read alike, also where one was traced for all. One that the class has, or that is absent,
may be put on the module later. At each call the attributes so named are compared with what they
were, with the collections and configurations that they hold: ``drop.p = 0`` asks for another
program.

Of an object of the user's, such as a trainer, what forward read of objects of its class counts: it
may count steps beside. Where that cannot be seen, all that it holds does.
"""

from __future__ import annotations

import array
import contextlib
import enum
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fxshard.capture.held import is_users, slots
from fxshard.capture.places import (
    ABSENT,
    PLAIN,
    Place,
    State,
    any_place,
    array_contents,
    names_of,
    state,
)
from fxshard.capture.swapped import STATE, UNIT, users_class

Reads = dict[type, set[str]]  # by class of a module: names of attributes

# nn.Module's, which say what is asked for elsewhere, and ours.
_OWN = frozenset(vars(nn.Module())) | vars(nn.Module).keys() - {"forward"} | {STATE, UNIT}
_HEAP = 1 << 9  # of the flags of a class: it was made by Python code
_sink: Reads | None = None


@contextlib.contextmanager
def noted(reads: Reads) -> Iterator[None]:
    """What `watching` sees while the block runs goes into `reads`."""
    global _sink
    before, _sink = _sink, reads
    try:
        yield
    finally:
        _sink = before


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """The model runs, to be traced: note which attributes it reads, if anybody asked."""
    reads = _sink
    if reads is None or "__getattribute__" in vars(nn.Module):
        yield
        return

    def read(module: Any, name: str) -> Any:
        if name not in _OWN and not name.startswith("__"):
            held = object.__getattribute__(module, "__dict__")
            if name in held or not _registered(held, name):
                reads.setdefault(users_class(module), set()).add(name)
                watch(held.get(name))
        return object.__getattribute__(module, name)

    watched: list[type] = []

    def read_of_object(value: Any, name: str) -> Any:
        reads.setdefault(type(value), set()).add(name)
        found = object.__getattribute__(value, name)
        watch(found)
        return found

    def watch(value: Any) -> None:
        """Note what is read of an object, or of those in a collection."""
        for cls in {type(each) for each in _objects(value)} - {*watched}:
            finds: Any = cls.__getattribute__
            if finds in (object.__getattribute__, read_of_object):
                reads.setdefault(cls, set())
                cls.__getattribute__ = read_of_object  # type: ignore[assignment]
                watched.append(cls)

    nn.Module.__getattribute__ = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
        for cls in watched:
            del cls.__getattribute__


def note_all(model: nn.Module) -> None:
    """Which attributes are read cannot be seen: note all."""
    if (reads := _sink) is not None:
        for module in model.modules():
            names = reads.setdefault(users_class(module), set())
            names |= vars(module).keys() - _OWN
            for cls in filter(is_users, users_class(module).__mro__):
                names |= {n for n, v in vars(cls).items() if not n.startswith("__") and _value(v)}
        for cls in reads.keys() - {users_class(module) for module in model.modules()}:
            reads[cls].add("__dict__")  # all of an object that other traces saw reads of


def _registered(held: Mapping[str, Any], name: str) -> bool:
    """True for a parameter, buffer or module: what they are is asked for elsewhere."""
    return any(name in held.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))


def _value(found: Any) -> bool:
    """True for what a class holds as a value, False for a method or a property."""
    return not hasattr(found, "__get__")


def _objects(value: Any) -> Iterator[Any]:
    """`value`, or what a collection holds however deep: those whose class can say what is read."""
    todo, seen = [value], set()
    while todo:
        each = todo.pop()
        if isinstance(each, (*PLAIN, nn.Module, torch.Tensor, np.ndarray)) or id(each) in seen:
            continue
        seen.add(id(each))
        match each:
            case dict():
                todo += each.values()
            case list() | tuple() | set() | frozenset() | deque():
                todo += each
            case _ if _tells(type(each)):
                yield each


def _tells(cls: type) -> bool:
    """True for a class of the user's that finds attributes as `object` does."""
    mine = not issubclass(cls, (type, types.ModuleType, enum.Enum)) and is_users(cls)
    return mine and bool(cls.__flags__ & _HEAP) and not hasattr(cls, "__getattr__")


class Attributes:
    """What the attributes that programs depend on say now, as a number: equal if all are equal.

    A program depends on what was read as it was traced. What traces in other states have read since
    is nothing to it: so a state is known again by the attributes that were noted in it.
    """

    def __init__(self) -> None:
        self.reads: Reads = {}
        self._noted: Reads = {}  # a copy of `reads`, shared by the states that it is of
        self._places: list[Place] = []
        self._states: list[tuple[Reads, State]] = [({}, [])]
        self._number = 0

    def number(self, tree: Iterable[nn.Module]) -> int:
        """Of the state that the modules of `tree`, all of the model, are in."""
        if _size(self.reads) != _size(self._noted):
            self._noted = {cls: {*names} for cls, names in self.reads.items()}
            self._places = _places(tree, self._noted)
            self._states[self._number] = (self._noted, state(self._places))
        elif not all(place.is_same() for place in self._places):
            self._places = _places(tree, self._noted)
            self._number = self._known_again([*tree])
        return self._number

    def _known_again(self, tree: list[nn.Module]) -> int:
        """The number of the state that `_places` hold now; a new one if it was in none before."""
        now = state(self._places)
        seen = {id(self._noted): now}
        for number, (noted, before) in enumerate(self._states):
            if id(noted) not in seen:
                seen[id(noted)] = state(_places(tree, noted))
            if seen[id(noted)] == before:
                # From now on what was read elsewhere counts here too: a trace may read it.
                self._states[number] = (self._noted, now)
                return number
        self._states.append((self._noted, now))
        return len(self._states) - 1


def _size(reads: Reads) -> int:
    return sum(map(len, reads.values()))


def _places(tree: Iterable[nn.Module], reads: Reads) -> list[Place]:
    """Where to look: attributes of modules and classes, and what is held by them, however deep."""
    found: list[Place] = []
    modules = list(tree)
    seen = {id(module) for module in modules}
    classes: set[type] = set()

    def look(place: Place) -> None:
        found.append(place)
        for value in place.before:
            if not isinstance(value, PLAIN) and id(value) not in seen:
                inside = _inside(value, reads)
                if inside is not None or isinstance(value, nn.Module):
                    seen.add(id(value))
                if inside is not None:
                    look(any_place(inside))
                elif isinstance(value, nn.Module):
                    look_at(value)

    def look_at(module: nn.Module) -> None:
        cls = users_class(module)
        of_class = names = tuple(sorted(reads.get(cls, ())))
        if not names:
            return
        if module is modules[0]:  # compiling it takes its forward off
            names = tuple(name for name in names if name != "forward")
        held = vars(module)
        look(names_of(held, names))
        absent = tuple(n for n in names if n not in held and not hasattr(cls, n))
        if absent:
            look(any_place(lambda: tuple(_registered(held, name) for name in absent)))
        if cls not in classes:
            classes.add(cls)
            for owner, of_owner in _by_owner(cls, of_class).items():
                look(names_of(vars(owner), of_owner))

    for module in modules:
        look_at(module)
    return found


def _by_owner(cls: type, names: tuple[str, ...]) -> dict[type, tuple[str, ...]]:
    """The class that each name is found in; `cls` for those that none has."""
    found: dict[type, tuple[str, ...]] = {}
    for name in names:
        owner = next((each for each in cls.__mro__ if name in vars(each)), cls)
        found[owner] = (*found.get(owner, ()), name)
    return found


def _inside(value: Any, reads: Reads) -> Callable[[], tuple[Any, ...]] | None:
    """How to read what a collection, a configuration or an array holds; None for all else."""
    names = tuple(sorted(reads.get(type(value), ())))
    known = type(value) in reads and "__dict__" not in names
    match value:
        case dict():
            return lambda: (*value, *value.values())
        case list() | tuple() | set() | frozenset() | deque():
            return lambda: tuple(value)
        case np.memmap() if not value.flags.writeable:
            return None
        case np.ndarray() | bytearray() | array.array():
            return lambda: array_contents(value)
        case nn.Module() | torch.Tensor() | type() | types.ModuleType() | enum.Enum():
            return None
    if known and _tells(type(value)):
        return lambda: _read(value, names)
    if is_users(type(value)):  # as transformers' PretrainedConfig
        if slots(value):
            return lambda: (*_items(getattr(value, "__dict__", {})), *slots(value).values())
        if hasattr(value, "__dict__"):
            return lambda: _items(vars(value))
    elif hasattr(value, "__dict__") and not callable(value):
        return lambda: _items({n: v for n, v in vars(value).items() if isinstance(v, PLAIN)})
    return None


def _read(value: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Attributes of an object itself, not of its class."""
    held: Mapping[str, Any] = {**slots(value), **getattr(value, "__dict__", {})}
    return tuple(held.get(name, ABSENT) for name in names)


def _items(held: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*held, *held.values())
