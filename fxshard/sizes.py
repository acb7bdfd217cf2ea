"""Bytes as text: "80GiB" -> bytes, bytes -> "80.00 GiB"."""

from __future__ import annotations

import re

from fxshard.errors import ConfigError

SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"\s*([0-9.]+)\s*(B|KiB|MiB|GiB|TiB)?\s*")


def parse_bytes(budget: int | str) -> int:
    """Bytes of 123, "123", "80GiB", "512 MiB".

    Raises:
        ConfigError: not of that form.
    """
    if isinstance(budget, int):
        return budget
    match = _SIZE.fullmatch(budget)
    if match is None:
        raise ConfigError(f"{budget!r} is no size; write bytes or for example '80GiB'.")
    scale = {**SIZES, "TiB": 2**40}[match[2] or "B"]
    return int(float(match[1]) * scale)


def is_size(value: object) -> bool:
    """True if `parse_bytes` takes it."""
    if isinstance(value, str):
        return _SIZE.fullmatch(value) is not None
    return isinstance(value, int) and not isinstance(value, bool)


def size_text(size: int) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    for unit, scale in reversed(SIZES.items()):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}" if scale > 1 else f"{size} B"
    return "0 B"
