"""The sizes that a program serves, where some of them are open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

import sympy
from torch import fx

Place = tuple[int, int | None]  # flat leaf of the call, and its dimension; None: the leaf, an int


Symbols = Mapping[str, tuple[Place, ...]]  # name of a size -> where the call has it


Sizes = tuple[tuple[int, ...] | int | None, ...]  # per leaf: of a tensor, an int, anything else


Layout = tuple[tuple[sympy.Basic, ...], tuple[sympy.Basic, ...]]  # sizes and strides of a tensor


FIXED = "a size that the program has as a number is another in this call"


@dataclasses.dataclass(frozen=True)
class FoundSize:
    """A size that the model finds in its data.

    Attributes:
        symbol: it.
        module: FQN of the module that finds it.
        line: of the user's code, for people.
        size: how large the user says it is; None: nothing is said, and what depends on it is made
            up.
    """

    symbol: sympy.Symbol
    module: str
    line: str
    size: int | None


@dataclasses.dataclass(frozen=True)
class Domain:
    """The sizes that a program serves.

    Attributes:
        example: the sizes of the call that was traced; those without a name must be the same.
        places: per name of a symbolic size, where the call has it.
        symbols: per name, its symbol.
        conditions: what the trace assumed of the sizes, and where torch asked for it.
        found: the sizes that the model finds in its data.
    """

    example: Sizes
    places: Symbols
    symbols: Mapping[str, sympy.Symbol]
    conditions: tuple[tuple[sympy.Basic, str], ...]
    found: tuple[FoundSize, ...] = ()

    def refusal(self, sizes: Sizes) -> str | None:
        """Why a call with these sizes needs another program; None if this one serves it."""
        values: dict[sympy.Symbol, int] = {}
        for name, places in self.places.items():
            found = {size_at(sizes, place) for place in places}
            if len(found) != 1:
                return f"{name} has one size in the program, and {sorted(found)} in this call"
            values[self.symbols[name]] = found.pop()
        if _without(sizes, self.places) != _without(self.example, self.places):
            return FIXED
        for condition, where in self.conditions:
            if condition.xreplace(values) != sympy.true:
                return f"the program holds for {self.in_names(condition)} only ({where})"
        return None

    def in_names(self, condition: sympy.Basic) -> str:
        """A condition in the names of the sizes."""
        names = {symbol: sympy.Symbol(name) for name, symbol in self.symbols.items()}
        return str(condition.xreplace(names))

    @property
    def text(self) -> str:
        """What it leaves open, for people: ``open: batch, seq while seq <= 16``."""
        notable = [
            self.in_names(c)
            for c, _ in self.conditions
            if not (isinstance(c, sympy.Ge) and c.args[1] == 2)
        ]
        more = f" and {len(notable) - 4} more" if len(notable) > 5 else ""
        held = f" while {', '.join(notable[:4] if more else notable)}{more}" if notable else ""
        told = len([each for each in self.found if each.size is not None])
        data = f"; {len(self.found)} sizes from data, {told} of them told" if self.found else ""
        return f"open: {', '.join(self.free) or 'nothing'}{held}{data}"

    @property
    def from_data(self) -> frozenset[sympy.Basic]:
        """The sizes that the model finds in its data: they differ between calls, and ranks."""
        return frozenset(each.symbol for each in self.found)

    @property
    def unknown(self) -> frozenset[sympy.Basic]:
        """The sizes that the model finds in its data and of which nothing is said."""
        return frozenset(each.symbol for each in self.found if each.size is None)

    @property
    def free(self) -> tuple[str, ...]:
        """Names of the sizes that no condition holds to one number."""
        fixed = {
            side
            for condition, _ in self.conditions
            if isinstance(condition, sympy.Eq) and any(s.is_Integer for s in condition.args)
            for side in condition.args
        }
        return tuple(name for name, symbol in self.symbols.items() if symbol not in fixed)


def size_at(sizes: Sizes, place: Place) -> int:
    """The size that a call has at `place`."""
    leaf, dim = place
    found: Any = sizes[leaf]
    return int(found if dim is None else found[dim])


def _without(sizes: Sizes, places: Symbols) -> list[Any]:
    """The sizes that have no name."""
    named = {place for at in places.values() for place in at}
    return [
        [size for dim, size in enumerate(shape) if (leaf, dim) not in named]
        if isinstance(shape, tuple)
        else shape
        for leaf, shape in enumerate(sizes)
        if (leaf, None) not in named
    ]


@dataclasses.dataclass(frozen=True)
class OpenTensor:
    """Where a tensor lies, in symbols of the inputs' sizes.

    Attributes:
        size, stride, offset: as of ``as_strided``, in elements.
        nbytes: of its storage.
    """

    size: tuple[sympy.Basic, ...]
    stride: tuple[sympy.Basic, ...]
    offset: sympy.Basic
    nbytes: sympy.Basic

    @property
    def is_fixed(self) -> bool:
        """True if it has no symbols."""
        every = (*self.size, *self.stride, self.offset, self.nbytes)
        return not any(each.free_symbols for each in every)


# Metadata keys of a node that has symbols:
LAYOUT = "fxshard_layout"  # the Layout of each of its tensors
OPEN = "fxshard_open"  # where each of them lies; missing on what was made after the trace


def depends_on(node: fx.Node, symbols: Set[sympy.Basic]) -> bool:
    """True if a size or a stride of `node` does."""
    sizes = (size for each in node.meta.get(LAYOUT, ()) for side in each for size in side)
    return any(size.free_symbols & symbols for size in sizes)
