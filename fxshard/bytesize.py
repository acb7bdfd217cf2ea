"""Sizes: bytes as text, and numbers that users give.

"80GiB" are 80 * 2**30 bytes, "80GB" are 80 * 10**9, as on a GPU's box; what is printed is in powers
of 2: "74.51 GiB".
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping
from typing import Any

from fxshard.errors import ConfigError

SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_UNITS = {
    **SIZES,
    "TiB": 2**40,
    **{"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([KMGT]i?B|B)?\s*")


def parse_bytes(size: int | str) -> int:
    """Bytes of 123, "123", "80GiB", "512 MiB", "80GB".

    Raises:
        ConfigError: not of that form.
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is not None:
        return int(float(match[1]) * _UNITS[match[2] or "B"])
    if isinstance(size, str) or not _is_integer(size):
        raise ConfigError(
            f"{size!r} is no size; write bytes, '80GiB' (2**30 each) or '80GB' (10**9)."
        )
    return int(size)


def parse_budget(budget: int | str) -> int:
    """As `parse_bytes`, of what must hold something.

    Raises:
        ConfigError: not of that form, or no byte.
    """
    found = parse_bytes(budget)
    if found < 1:
        raise ConfigError(f"a budget of {budget!r}: expected at least 1 byte, such as '80GiB'.")
    return found


def is_size(value: object) -> bool:
    """True if `parse_bytes` takes it."""
    return _SIZE.fullmatch(value) is not None if isinstance(value, str) else _is_integer(value)


def is_count(value: Any) -> bool:
    """True if it is an integer, at least 1."""
    return _is_integer(value) and value >= 1


def counts(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of dimensions, by name, as ints.

    Raises:
        ConfigError: one is no integer, or below 1.
    """
    for name, size in sizes.items():
        if not is_count(size):
            raise ConfigError(f"{name}={size!r}: a size is an integer, at least 1.")
    return {name: int(size) for name, size in sizes.items()}


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def size_text(size: int) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    for unit, scale in reversed(SIZES.items()):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}" if scale > 1 else f"{size} B"
    return "0 B"


def excess_text(needed: int, given: int) -> str:
    """By how many bytes a budget is too small."""
    return (
        f"{size_text(needed)} needed, {size_text(given)} given: {size_text(needed - given)} "
        f"too much"
    )
