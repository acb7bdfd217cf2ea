"""The bytes of a step as formulas of open sizes and of the number of ranks.

Every live range has a size that is a sum of a few monomials with whole coefficients (batch x
sequence, batch x sequence squared, 1 / world, ...), and ranges are born and die in the same order
for all sizes. So what is alive at a point is one vector of integers over those monomials,
the peak is the largest of such vectors, and few of them can be the largest anywhere. sympy is how a
formula is shown and handed out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy

from fxshard.bytesize import size_text
from fxshard.errors import ConfigError, OutOfRangeError
from fxshard.memory.category import Category, Matrix
from fxshard.memory.ledger import Ledger, LiveRange
from fxshard.memory.symbolic import WORLD, WorldKind, evaluate

EXACT = 2**53  # below it a float64 holds every integer
MOST = 2**62  # bytes, and products of sizes: up to there int64 counts right
BLOCK = 512  # bytes: CUDA's caching allocator rounds every size up to a multiple of it

Point = Mapping[str, Any]  # sizes by name: ints or int64 arrays


@dataclasses.dataclass(frozen=True)
class Range:
    """Where a formula holds.

    Attributes:
        example: the sizes of the plan, and ``world``.
        open: names of the sizes that may be others.
        conditions: what must be true of the sizes, and where the trace asked for it.
        kind: of the world sizes; others have a formula of their own.
        kind_of: tells the kind of a world size.
    """

    example: dict[str, int]
    open: tuple[str, ...]
    conditions: tuple[tuple[sympy.Basic, str], ...]
    kind: WorldKind
    kind_of: Callable[[int], WorldKind]

    def complete(self, sizes: Point) -> dict[str, Any]:
        """`sizes`, with those of the plan for what is not named.

        Raises:
            ConfigError: there is no such name; names those that there are.
            ConfigError: or a size is no integer.
            OutOfRangeError: a size is below 1.
        """
        for name, value in sizes.items():
            if name not in self.example:
                raise ConfigError(
                    f"no size {name!r}: this plan has {', '.join(map(repr, self.example))}. Name "
                    f"others where it is made: fxshard.plan(..., dynamic={{{name!r}: "
                    f"[(argument, dimension)]}})."
                )
            found = np.asarray(value)
            is_bool = found.dtype == np.bool_ or isinstance(value, bool)
            if found.ndim > 1 or is_bool or not np.issubdtype(found.dtype, np.integer):
                raise ConfigError(
                    f"{name}={value!r}: a size is an int, or an array [points] of ints."
                )
            if found.size and found.min() < 1:
                raise OutOfRangeError(f"{name}={found.min()}: a size is at least 1.")
        return {**self.example, **sizes}

    @property
    def least(self) -> dict[sympy.Symbol, int]:
        """The least that sizes can be, where a condition is just that."""
        return {
            condition.lhs: int(condition.rhs)
            for condition, _ in self.conditions
            if isinstance(condition, sympy.Ge)
            and condition.lhs.is_Symbol
            and condition.rhs.is_Integer
        }

    def around(self) -> dict[str, list[int]]:
        """Sizes near those of the plan for which the formula holds, by name."""
        found: dict[str, list[int]] = {}
        for name, here in self.example.items():
            many = np.arange(1, 4 * here + 1)
            if name == "world":
                many = 2 ** np.arange(len(bin(16 * here)) - 2)
            elif name not in self.open:
                continue
            point = {other: np.full_like(many, size) for other, size in self.example.items()}
            point[name] = many
            held = [np.asarray(evaluate(c, point), dtype=bool) for c, _ in self.conditions]
            found[name] = many[np.logical_and.reduce(held, initial=True)].tolist()
        return found

    def check(self, sizes: Point) -> None:
        """Raise OutOfRangeError where a condition does not hold, with what to do instead."""
        for condition, where in self.conditions:
            holds = np.asarray(evaluate(condition, sizes), dtype=bool)
            if not holds.all():
                arrays = np.broadcast_arrays(holds, *sizes.values())
                at = int(np.argmin(arrays[0].ravel()))
                point = {n: int(a.ravel()[at]) for n, a in zip(sizes, arrays[1:], strict=True)}
                open_sizes = {name: size for name, size in point.items() if name != "world"}
                given = ", ".join(f"{name}={size}" for name, size in open_sizes.items())
                raise OutOfRangeError(
                    f"the formula holds while {condition} ({where}), and does not for {given}. "
                    f"Plan such a call on its own: plan.at({given}).memory has its bytes and "
                    f"formulas."
                )

    def __str__(self) -> str:
        names = [name for name in self.open if name != "world"]
        held = [str(condition) for condition, _ in self.conditions]
        alone, padded, _ = self.kind
        ranks = "world = 1" if alone else "every world that divides all numbers of rows"
        if padded:
            ranks = f"every world that divides all numbers of rows but {sorted(padded)}"
        text = f"{', '.join(names)} open; " if names else ""
        return f"{text}{', '.join([*held, ranks])}"


class Basis:
    """Monomials, and expressions as vectors over them.

    Attributes:
        monomials: numerators of those of the second group included.
        vectors: int64 ``[expressions, monomials]``, times `scale`.
        denominators: what monomials are divided by; the first is 1.
        over: per monomial, the place of its denominator among them.
        scale: the least common denominator of all other coefficients.
    """

    def __init__(self, expressions: Sequence[sympy.Expr]) -> None:
        places: dict[tuple[sympy.Expr, sympy.Expr], int] = {}
        entries: list[dict[int, sympy.Rational]] = []
        for expression in expressions:
            entry: dict[int, sympy.Rational] = defaultdict(lambda: sympy.Integer(0))
            for monomial, factor in sympy.expand(expression).as_coefficients_dict().items():
                if not factor.is_Rational:  # a float of the user's: a monomial as it is
                    monomial, factor = monomial * factor, sympy.Integer(1)
                entry[places.setdefault(sympy.fraction(monomial), len(places))] += factor
            entries.append(entry)
        self.monomials: list[Any] = [monomial for monomial, _ in places]
        self.denominators: list[Any] = list(
            dict.fromkeys([sympy.Integer(1), *(over for _, over in places)])
        )
        self.over: Any = np.array([self.denominators.index(over) for _, over in places], dtype=int)
        factors = [factor for entry in entries for factor in entry.values()]
        self.scale: int = math.lcm(1, *(int(factor.q) for factor in factors))
        self.vectors: Any = np.zeros((len(entries), len(places)), dtype=np.int64)
        for i, entry in enumerate(entries):
            for place, factor in entry.items():
                self.vectors[i, place] = int(factor * self.scale)

    def shifted(self, least: Mapping[sympy.Symbol, int]) -> Basis:
        """Each monomial, in terms of how far sizes are above the least that they can be."""
        further = {size: size + count for size, count in least.items()}
        both = zip(self.monomials, self.over, strict=True)
        monomials = [monomial / self.denominators[over] for monomial, over in both]
        return Basis([monomial.xreplace(further) for monomial in monomials])

    def values(self, sizes: Point) -> Matrix:
        """int64 ``[points, monomials]``: the monomials (numerators) at some points."""
        floats = {name: np.asarray(size, dtype=np.float64) for name, size in sizes.items()}
        rough = [np.asarray(evaluate(monomial, floats)) for monomial in self.monomials]
        if any((np.abs(each) > MOST).any() for each in rough):
            raise OutOfRangeError(
                "sizes of which a product is beyond 2**62: no one has that memory."
            )
        found = [np.asarray(evaluate(monomial, sizes)) for monomial in self.monomials]
        shape = np.broadcast_shapes((1,), *(np.shape(size) for size in sizes.values()))
        columns = [np.broadcast_to(each, shape).astype(np.int64) for each in found]
        return np.stack(columns, axis=1) if columns else np.zeros((*shape, 0), dtype=np.int64)

    def bytes(self, rows: Matrix, sizes: Point, values: Matrix | None = None) -> Matrix:
        """int64 ``[points, rows]``: vectors at some points.

        Args:
            rows: int64 ``[rows, monomials]``, times `scale`.
            sizes: the points.
            values: from `values`, if they are known.
        """
        values = self.values(sizes) if values is None else values
        found = np.zeros((len(values), len(rows)), dtype=np.int64)
        for number, denominator in enumerate(self.denominators):
            at = self.over == number
            if at.any():
                below = np.broadcast_to(evaluate(denominator, sizes), (len(values),))
                found += _times(values[:, at], rows[:, at]) // below[:, None]
        return found // self.scale if self.scale > 1 else found

    def expression(self, row: Matrix) -> sympy.Expr:
        """A vector as a sum."""
        terms = [
            sympy.Integer(int(factor)) * monomial / (self.scale * self.denominators[over])
            for factor, monomial, over in zip(row, self.monomials, self.over, strict=True)
            if factor
        ]
        return sympy.Add(*terms)


def _times(values: Matrix, rows: Matrix) -> Matrix:
    """``values @ rows.T``, by float64, which is faster, where that is exact."""
    most = np.abs(values).max(axis=0, initial=0).astype(object) @ np.abs(rows).max(
        axis=0, initial=0
    ).astype(object)
    if most > MOST:
        raise OutOfRangeError("sizes that need more than 2**62 bytes: no one has that memory.")
    if most < EXACT:
        product = values.astype(np.float64) @ rows.T.astype(np.float64)
        return product.astype(np.int64)
    return values @ rows.T


@dataclasses.dataclass(frozen=True)
class Part:
    """Which live ranges are added up.

    Attributes:
        first_step: of the first step.
        host: on the CPU, with offload.
        rounded: every storage takes whole blocks of CUDA's allocator.
        category, module: only what is of that category, or owned by that module.
    """

    first_step: bool
    host: bool
    rounded: bool
    category: Category | None = None
    module: str | None = None

    def has(self, each: LiveRange) -> bool:
        """True for a live range of it."""
        of_category = self.category in (None, each.category)
        return each.host == self.host and of_category and self.module in (None, each.module)


@dataclasses.dataclass(frozen=True)
class Term:
    """A part of what is alive at a point.

    Attributes:
        count: of how many layers; 1 for what is in no layer, or differs between layers.
        category, module: its name there; "*" stands for the number of a layer.
        each: int64 ``[monomials]``: of one of them.
    """

    count: int
    category: str
    module: str
    each: Matrix


_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number between dots


class StepFormulas:
    """The live ranges of a step, as vectors.

    Attributes:
        range: where they hold.
        basis: monomials.
    """

    def __init__(self, ledgers: tuple[Ledger, Ledger], valid: Range) -> None:
        """Args: `ledgers`: of the first and of the steady step, whose ranges have formulas.

        Raises:
            AssertionError: a formula is wrong at the sizes of the plan.
        """
        self.range: Range = valid
        self._ledgers = ledgers
        distinct: dict[sympy.Expr, int] = {}
        self._numbers = tuple(
            np.array([distinct.setdefault(formula_of(r), len(distinct)) for r in ledger.ranges])
            for ledger in ledgers
        )
        self.basis: Basis = Basis(list(distinct))
        self._distinct = list(distinct)
        found = self.basis.bytes(self.basis.vectors, valid.example)[0]
        for ledger, numbers in zip(ledgers, self._numbers, strict=True):
            for each, number in zip(ledger.ranges, numbers, strict=True):
                assert found[number] == each.bytes, (
                    f"the formula {formula_of(each)} of {each.name} ({each.op} of {each.module}) "
                    f"gives {found[number]} bytes, and {each.bytes} are planned"
                )

    @functools.cached_property
    def _rounded(self) -> Basis:
        return Basis(list(map(_whole_blocks, self._distinct)))

    def sized(self, sizes: Point, first_step: bool) -> Ledger:
        """The ledger for other sizes."""
        ledger, numbers = self._of_step(first_step)
        found = self.basis.bytes(self.basis.vectors, sizes)[0].tolist()
        made = Ledger()
        made.moments, made.phases = ledger.moments, ledger.phases
        made.ranges = [
            dataclasses.replace(each, bytes=found[number])
            for each, number in zip(ledger.ranges, numbers.tolist(), strict=True)
        ]
        return made

    def curve(self, ticks: Sequence[int], part: Part) -> Matrix:
        """int64 ``[ticks, monomials]``: what is alive at some ticks, in ascending order."""
        ledger, numbers = self._of_step(part.first_step)
        vectors = self.basis_of(part.rounded).vectors
        wanted = [i for i, each in enumerate(ledger.ranges) if part.has(each)]
        end = 2 * len(ledger.moments)
        born = [max(ledger.ranges[i].born, 0) for i in wanted]
        died = [end if (d := ledger.ranges[i].died) is None else d for i in wanted]
        change = np.zeros((len(ticks) + 1, vectors.shape[1]), dtype=np.int64)
        of = vectors[numbers[np.array(wanted, dtype=int)]]
        np.add.at(change, np.searchsorted(ticks, born, side="left"), of)
        np.add.at(change, np.searchsorted(ticks, died, side="left"), -of)
        return change.cumsum(0)[:-1]

    @functools.cache  # noqa: B019 - lives as long as its plan
    def largest(self, ticks: range, part: Part) -> tuple[list[int], Matrix]:
        """Those of some ticks at which most may be alive for some sizes, and `curve` there."""
        rows = self.curve(ticks, part)
        from_least = self.basis_of(part.rounded).shifted(self.range.least)
        positive = [not m.has(sympy.floor, sympy.Mod) for m in from_least.monomials]
        kept = largest_somewhere(rows @ from_least.vectors, np.array(positive, dtype=bool))
        return [ticks[i] for i in kept], rows[kept]

    def basis_of(self, rounded: bool) -> Basis:
        """The monomials of `curve`."""
        return self._rounded if rounded else self.basis

    def terms(self, tick: int, part: Part) -> tuple[Term, ...]:
        """What is alive at a tick; equal layers as one term."""
        vectors = self.basis_of(part.rounded).vectors
        ledger, numbers = self._of_step(part.first_step)
        sums: dict[tuple[str, str], Matrix] = {}
        for each, number in zip(ledger.ranges, numbers, strict=True):
            if each.is_alive(tick) and part.has(each):
                key = each.category.value, each.module
                sums[key] = sums.get(key, 0) + vectors[number]
        found: dict[tuple[str, str, bytes], Term] = {}
        for (category, module), vector in sums.items():
            place = category, _LAYER.sub("*", module) or "root", vector.tobytes()
            count = found[place].count + 1 if place in found else 1
            found[place] = Term(count, *place[:2], vector)
        return tuple(term for term in found.values() if term.each.any())

    def _of_step(self, first_step: bool) -> tuple[Ledger, Any]:
        """A ledger, and per range the number of its expression."""
        return self._ledgers[not first_step], self._numbers[not first_step]


def formula_of(each: LiveRange) -> sympy.Expr:
    """The bytes of a range as an expression."""
    return sympy.Integer(each.bytes) if each.formula is None else each.formula


def _whole_blocks(expression: sympy.Expr) -> sympy.Expr:
    """Rounded up to blocks, without a ceiling where every coefficient is a multiple of one."""
    factors = sympy.expand(expression).as_coefficients_dict()
    whole = all(factor.is_Integer and factor % BLOCK == 0 for factor in factors.values())
    if whole and WORLD not in expression.free_symbols:
        return expression
    return BLOCK * sympy.ceiling(expression / BLOCK)


def largest_somewhere(rows: Matrix, positive: Any) -> list[int]:
    """Those of `rows` that no other one is above in all monomials, in their order.

    Monomials are never negative. Of equal rows the first stays.

    Args:
        rows: int64 ``[rows, monomials]``.
        positive: per monomial: it is never 0 either, so that more of it is more.
    """
    _, firsts = np.unique(rows, axis=0, return_index=True)
    order = sorted(firsts.tolist(), key=lambda i: -int(rows[i].sum()))
    kept: list[int] = []
    tops = np.zeros((len(order), rows.shape[1]), dtype=np.int64)
    for i in order:
        others = tops[: len(kept)]
        above = (others >= rows[i]).all(axis=1)
        if (above & (others > rows[i])[:, positive].any(axis=1)).any():
            continue
        tops[len(kept)] = rows[i]
        kept.append(i)
    return sorted(kept)


@dataclasses.dataclass(frozen=True, eq=False)
class Vectors:
    """What a formula is made of: at some points the row of `value` where `choose` is the largest.

    Attributes:
        basis: the monomials.
        choose, value: int64 ``[rows, monomials]``.
        range: where it holds.
        terms: what it is made of at the sizes of the plan.
        of_world: the same question for the kind of another world size.
        known: its answers so far.
    """

    basis: Basis
    choose: Matrix
    value: Matrix
    range: Range
    terms: tuple[Term, ...]
    of_world: Callable[[int], Formula]
    known: dict[WorldKind, Formula] = dataclasses.field(default_factory=dict)

    def bytes(self, sizes: Point) -> Matrix:
        """int64 ``[points]``."""
        monomials = self.basis.values(sizes)
        totals = self.basis.bytes(self.choose, sizes, monomials)
        if self.value is self.choose:
            return totals.max(axis=1)
        values = self.basis.bytes(self.value, sizes, monomials)
        return np.take_along_axis(values, totals.argmax(axis=1)[:, None], axis=1)[:, 0]

    @property
    def expression(self) -> sympy.Expr:
        """As sympy has it: a `Max`, or a `Piecewise` over which point is the peak."""
        values = [self.basis.expression(row) for row in self.value]
        if len(set(values)) == 1:
            return values[0]
        if self.value is self.choose:
            return sympy.Max(*values, evaluate=False)
        totals = [self.basis.expression(row) for row in self.choose]
        most = sympy.Max(*totals, evaluate=False)  # sympy would try for seconds to decide which
        pieces = [
            (value, sympy.Ge(total, most, evaluate=False))
            for value, total in zip(values[:-1], totals[:-1], strict=True)
        ]
        return sympy.Piecewise(*pieces, (values[-1], True), evaluate=False)


if TYPE_CHECKING:

    class _Expr:
        """sympy has no types."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _Expr = sympy.Expr


class Formula(_Expr):
    """Bytes as a sympy expression of open sizes and ``world``; all of them positive integers.

    ``str()`` is short: what the bytes are at the sizes of the plan, per-layer terms folded, the
    largest first. `expression` is all of it.
    """

    vectors: Vectors

    def __new__(cls, expression: sympy.Expr, vectors: Vectors | None = None) -> Any:
        if vectors is None:  # sympy makes parts anew when it replaces symbols: those are its own
            return sympy.sympify(expression)
        made = sympy.Expr.__new__(cls, expression)
        made.vectors = vectors
        return made

    @property
    def expression(self) -> sympy.Expr:
        """The full expression, of sympy's own classes."""
        return self.args[0]

    @property
    def range(self) -> Range:
        """Where it holds."""
        return self.vectors.range

    def at(self, **sizes: int) -> int:
        """Bytes at some sizes; those that are not named are the plan's.

        Raises:
            OutOfRangeError: it does not hold there; says why, and what to do.
            ConfigError: there is no such size.
        """
        return int(self.lambdify()(**sizes)[0])

    def lambdify(self) -> Callable[..., Matrix]:
        """A function of ints or int64 arrays by name: int64 bytes, one per point.

        It raises as `at`. World sizes of another kind (other rows are padded) are planned at their
        first use, from the same capture.
        """

        def bytes_at(**sizes: Any) -> Matrix:
            point = self.range.complete(sizes)
            point = {name: np.asarray(value, dtype=np.int64) for name, value in point.items()}
            shape = np.broadcast_shapes((1,), *(np.shape(size) for size in point.values()))
            world = np.broadcast_to(point["world"], shape)
            if world.size and (world == world.flat[0]).all():
                return self._for(int(world.flat[0]))._bytes(point)
            point = {name: np.broadcast_to(size, shape) for name, size in point.items()}
            kinds: dict[Any, list[int]] = defaultdict(list)
            for each in np.unique(world).tolist():
                kinds[self.range.kind_of(each)].append(each)
            found = np.zeros(shape, dtype=np.int64)
            for worlds in kinds.values():
                here = np.isin(world, worlds)
                part = {name: size[here] for name, size in point.items()}
                found[here] = self._for(worlds[0])._bytes(part)
            return found

        return bytes_at

    def _bytes(self, point: Point) -> Matrix:
        self.range.check(point)
        return self.vectors.bytes(point)

    def _for(self, world: int) -> Formula:
        """The same question to the kind of a world size."""
        kind = self.range.kind_of(world)
        if kind == self.range.kind:
            return self
        known = self.vectors.known
        if kind not in known:
            known[kind] = self.vectors.of_world(world)
        return known[kind]

    def latex(self) -> str:
        """The sum that is the largest at the sizes of the plan, and of how many, as LaTeX."""
        _, place = _at_example(self)
        text: str = sympy.latex(self.vectors.basis.expression(self.vectors.value[place]))
        others = len(self.vectors.value) - 1
        return rf"\max\left({text},\ \ldots_{{{others}}}\right)" if others else text

    def _latex(self, printer: Any) -> str:
        return self.latex()

    def _sympystr(self, printer: Any) -> str:
        return _text(self)


def _at_example(formula: Formula) -> tuple[int, int]:
    """Bytes at the sizes of the plan, and which row they are."""
    vectors, example = formula.vectors, formula.range.example
    totals = vectors.basis.bytes(vectors.choose, example)[0]
    place = int(totals.argmax())
    return int(vectors.basis.bytes(vectors.value, example)[0][place]), place


def _text(formula: Formula) -> str:
    vectors, example = formula.vectors, formula.range.example
    total, _ = _at_example(formula)
    sizes = ", ".join(f"{name}={size}" for name, size in example.items())
    others = len(vectors.value) - 1
    title = f"{size_text(total)} at {sizes}"
    if others:
        title += f" (elsewhere one of {others} other moments may be larger)"
    weighed = []
    for term in vectors.terms:
        weight = term.count * int(vectors.basis.bytes(term.each[None], example)[0, 0])
        text = str(vectors.basis.expression(term.each))
        if term.count > 1:
            text = f"{term.count} * ({text})" if " " in text else f"{term.count} * {text}"
        weighed.append((weight, f"  {text}    # {term.category}, {term.module}"))
    lines = [f"{text}: {size_text(w)}" for w, text in sorted(weighed, key=lambda pair: -pair[0])]
    more = [f"  and {len(lines) - 12} smaller terms"] if len(lines) > 12 else []
    return "\n".join([title, *lines[:12], *more, f"  holds for {formula.range}"])


def largest(
    step: StepFormulas, ticks: range, part: Part, of_world: Callable[[int], Formula]
) -> Formula:
    """Bytes of a part of a step, where the most is alive of some ticks; see `MemoryReport.formula`.

    Args:
        step: the live ranges.
        ticks: the moments.
        part: what is added up.
        of_world: the same of a plan for another number of ranks.
    """
    everything = dataclasses.replace(part, category=None, module=None)
    kept, choose = step.largest(ticks, everything)
    value = choose if part == everything else step.curve(kept, part)
    basis = step.basis_of(part.rounded)
    tick = kept[int(basis.bytes(choose, step.range.example)[0].argmax())]
    vectors = Vectors(basis, choose, value, step.range, step.terms(tick, part), of_world)
    return Formula(vectors.expression, vectors)
