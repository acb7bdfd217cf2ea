"""The option ``dynamic``: names of open sizes, and where a call has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SizeName(str):
    """Name of an open size that was a ``torch.export.Dim``.

    Attributes:
        least, most: its bounds.
    """

    least: int
    most: float

    @classmethod
    def of(cls, given: Any) -> str:
        """The name that the user gave, or that of a ``Dim``."""
        if isinstance(given, str):
            return given
        name = cls(given.__name__)
        most = float(given.max)
        name.least, name.most = max(int(given.min), 1), int(most) if most.is_integer() else most
        return name


def named_sizes(given: Any) -> dict[str, tuple[tuple[str, int], ...]]:
    """``dynamic`` as names of sizes and where a call has them, however it is written."""
    found: dict[str, list[tuple[str, int]]] = {}
    for key, places in given.items():
        if isinstance(places, Mapping):  # argument -> dimension -> Dim, as torch.export has it
            for dim, name in places.items():
                if name is not None:
                    found.setdefault(SizeName.of(name), []).append((str(key), _dimension(dim)))
        else:
            several = [(str(argument), _dimension(dim)) for argument, dim in places]
            if not several or not key:
                raise ValueError("a size without a name, or of no dimension")
            found.setdefault(SizeName.of(key), []).extend(several)
    return {name: tuple(places) for name, places in found.items()}


def _dimension(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a dimension is an integer >= 0")
    return int(value)
