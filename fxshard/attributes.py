"""Plain attributes of modules that forward reads: a program depends on their values.

While a model is traced every read of an attribute that an object itself has is noted, by the class
of the module: layers that are alike read alike, also where one was traced for all. At each call the
attributes so named are compared with what they were: ``drop.p = 0`` asks for another program.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxshard.swapped import STATE, users_class

Reads = dict[type, set[str]]  # by class of a module: names of attributes

# nn.Module's, which say what is asked for elsewhere, and ours.
_OWN = frozenset(vars(nn.Module())) | {STATE}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
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
        if name not in _OWN and name in object.__getattribute__(module, "__dict__"):
            reads.setdefault(type(module), set()).add(name)
        return object.__getattribute__(module, name)

    nn.Module.__getattribute__ = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__


def note_all(model: nn.Module) -> None:
    """Which attributes are read cannot be seen: note all."""
    if (reads := _sink) is not None:
        for module in model.modules():
            reads.setdefault(users_class(module), set()).update(vars(module).keys() - _OWN)


class Attributes:
    """What the attributes that programs depend on say now, as a number: equal if all are equal."""

    def __init__(self, reads: Reads | None = None) -> None:
        self.reads: Reads = {} if reads is None else reads
        self._watched = 0  # how many of them are looked at
        self._places: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self._states: list[list[tuple[Any, ...]]] = [[]]
        self._number = 0

    def number(self, tree: Iterable[nn.Module]) -> int:
        """Of the state that the modules of `tree`, all of the model, are in."""
        if (size := sum(map(len, self.reads.values()))) != self._watched:
            self._watched, self._places = size, list(_places(tree, self.reads))
            # What other states said of the attributes that are new here is not known.
            self._states = [[] for _ in self._states]
            self._states[self._number] = [_values(*place) for place in self._places]
        elif not all(map(_same, self._places, self._states[self._number])):
            now = [_values(*place) for place in self._places]
            if now not in self._states:
                self._states.append(now)
            self._number = self._states.index(now)
        return self._number


def _places(
    tree: Iterable[nn.Module], reads: Reads
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Where to look: attributes of modules, and of configurations that they hold."""
    seen: set[int] = set()
    for module in tree:
        names = tuple(sorted(reads.get(users_class(module), ())))
        if names:
            yield vars(module), names
        for value in map(vars(module).get, names):
            if _is_configuration(value) and id(value) not in seen:
                seen.add(id(value))
                plain = tuple(name for name, held in vars(value).items() if _is_plain(held))
                yield vars(value), plain


def _is_configuration(value: Any) -> bool:
    """An object of the user's that holds values, such as transformers' PretrainedConfig."""
    others = (nn.Module, torch.Tensor, type, types.ModuleType)
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, others)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


def _values(held: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(_frozen(held.get(name)) for name in names)


def _frozen(value: Any) -> Any:
    """A value to compare with: collections as they are now, other objects by identity."""
    return copy.deepcopy(value) if _is_plain(value) else _Same(value)


class _Same:
    """Equal to one object alone, and to nothing that looks like it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return self.value is (other.value if isinstance(other, _Same) else other)

    __hash__ = None  # type: ignore[assignment]


def _same(place: tuple[dict[str, Any], tuple[str, ...]], before: tuple[Any, ...]) -> bool:
    held, names = place
    return before == tuple(map(held.get, names))
