"""Sizes that a model finds in its data: who finds them, and how large the user says they are.

Rows that a mask selects, tokens that an expert receives: such a size is a number only while the
program runs. The option ``data_sizes`` says how large it is, at most; bytes and times are computed
for that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
from torch import fx

from fxshard.capture import provenance
from fxshard.errors import ConfigError
from fxshard.ir.domain import FoundSize
from fxshard.ir.names import matches

Told = int | Mapping[str, int | Sequence[int]] | None  # the option


def found(
    graph: fx.Graph,
    symbols: Callable[[fx.Node], Iterable[sympy.Symbol]],
    told: Told,
    bounds: Callable[[sympy.Symbol], tuple[Any, Any]],
) -> tuple[FoundSize, ...]:
    """The sizes that a traced graph finds in its data, in the order of forward.

    Args:
        graph: as it was traced.
        symbols: those of a node's value that the inputs do not give.
        told: how large the user says they are.
        bounds: the least and the largest number that the trace lets a symbol be.

    Raises:
        ConfigError: a pattern of `told` has no such module, a sequence has not one number for each
            size that its modules find, or a number is smaller than the model needs.
    """
    finds: defaultdict[str, dict[sympy.Symbol, str]] = defaultdict(dict)
    known: set[sympy.Symbol] = set()
    for node in graph.nodes:
        for symbol in symbols(node):
            if symbol not in known:
                known.add(symbol)
                stack = provenance.stack_of(node, "forward")
                module = provenance.module_in(stack) or ""
                finds[module][symbol] = provenance.line_text(provenance.line_in(stack))
    sizes = {module: _sizes(module, list(lines.values()), told) for module, lines in finds.items()}
    if isinstance(told, Mapping):
        _check_patterns(told, finds)
    return tuple(
        FoundSize(symbol, module, line, _within(size, *bounds(symbol), module, line))
        for module, lines in finds.items()
        for (symbol, line), size in zip(lines.items(), sizes[module], strict=True)
    )


def _within(size: int | None, least: Any, most: Any, module: str, line: str) -> int | None:
    """The size that is told, no larger than the trace knows that it can be."""
    if size is None:
        return None
    if size < least:
        raise ConfigError(
            f"data_sizes: {size} is told of what {module or 'the root module'} finds in its data "
            f"({line}), which the model needs at least {least} of."
        )
    return int(min(size, most))


def _sizes(module: str, lines: list[str], told: Told) -> Sequence[int | None]:
    """How large the sizes are that a module finds at these lines; None: nothing is said."""
    if not isinstance(told, Mapping):
        return [told] * len(lines)
    said = next((size for pattern, size in told.items() if matches(pattern, module)), None)
    if not isinstance(said, Sequence):
        return [said] * len(lines)
    if len(said) != len(lines):
        raise ConfigError(
            f"data_sizes: {len(said)} numbers are told of {module or 'the root module'}, which "
            f"finds {len(lines)} sizes in its data: {'; '.join(lines)}. Give a number for each, in "
            f"this order, or one for all."
        )
    return said


def _check_patterns(told: Mapping[str, Any], finds: Mapping[str, Any]) -> None:
    if not finds:
        return
    for pattern in told:
        if not any(matches(pattern, module) for module in finds):
            raise ConfigError(
                f"data_sizes: no module {pattern!r} finds a size in its data. These do: "
                f"{', '.join(map(repr, finds))}."
            )
