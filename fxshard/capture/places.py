"""Where a program's facts lie: names in a holder, the contents of a collection; what they held.

By identity first, as nearly all of them are at nearly all calls; by value where that fails, of
functions by what they compute.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np
import torch

from fxshard.capture.functions import meaning

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
ABSENT = object()  # of a name that a holder has not
_LARGE = 1 << 16  # bytes of a NumPy array of which a digest is kept

State = list[tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Something to look at: what it held, and whether it still does."""

    before: tuple[Any, ...]
    is_same: Callable[[], bool]


def always() -> bool:
    """Of what cannot change, such as a tuple."""
    return True


def any_place(read: Callable[[], tuple[Any, ...]]) -> Place:
    before = read()

    def is_same() -> bool:
        now = read()
        if len(now) != len(before):
            return False
        return all(map(is_, now, before)) or all(map(_alike, now, before))

    return Place(before, is_same)


def array_contents(values: Any) -> tuple[Any, ...]:
    """Of a NumPy array, an `array.array` or a bytearray; of many bytes a digest."""
    if not isinstance(values, np.ndarray):
        return (bytes(values),)
    if values.dtype.hasobject:
        return (str(values.shape), *values.flat)
    kind = str(values.dtype), str(values.shape)
    if values.nbytes <= _LARGE:
        return *kind, values.tobytes()
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return *kind, hashlib.sha256(flat.data).digest()


def names_of(held: Mapping[str, Any], names: tuple[str, ...]) -> Place:
    """Attributes of a module or a class. Most names are those of methods: no module has them."""
    before = tuple(map(held.get, names, repeat(ABSENT)))
    there = [(name, value) for name, value in zip(names, before, strict=True) if name in held]
    own, values = [name for name, _ in there], [value for _, value in there]
    absent, keys, get = frozenset(n for n in names if n not in held), held.keys(), held.get

    def is_same() -> bool:
        if not keys.isdisjoint(absent):
            return False
        if not own or all(map(is_, map(get, own, repeat(ABSENT)), values)):
            return True
        return all(map(_alike, map(get, own, repeat(ABSENT)), values))

    return Place(before, is_same)


def _alike(now: Any, before: Any) -> bool:
    if now is before:
        return True
    return type(now) is type(before) and isinstance(now, PLAIN) and bool(now == before)


def state(places: list[Place]) -> State:
    """What all places hold, to compare with: what is looked into by kind, all else by identity."""
    return [tuple(map(_frozen, place.before)) for place in places]


def _frozen(value: Any) -> Any:
    if value is ABSENT:  # most are
        return value
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, (dict, list, tuple, set, frozenset, deque, np.ndarray)):
        inside = not isinstance(value, np.memmap) or value.flags.writeable
        return type(value) if inside else _SameObject(value)
    means = meaning(value)
    return _SameObject(value) if means is None else means


class _SameObject:
    """Equal to one object alone, and to nothing that looks like it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]
