"""Operators: what they take, write and return."""

from __future__ import annotations

from typing import Any


def schema_of(operator: Any) -> Any:
    """The `torch.FunctionSchema` of an overload: ``arguments``, ``returns``, ``is_mutable``.

    None of what is no overload of an operator.
    """
    return getattr(operator, "_schema", None)
