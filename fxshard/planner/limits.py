"""The largest batch, the longest sequence, the fewest ranks: one size at the edge of a budget.

Each size that is tried is planned in full, so the answer is no estimate: it fits, and the next size
does not. Which sizes to try is guessed. `Plan.solve` follows the formulas of the plan until a plan
contradicts them. Otherwise a parabola through the three nearest peaks gives the next size. (The
bytes alive at a point of a fixed program are a polynomial of the size: of the first degree in the
batch, and of the second in the sequence, for the scores of attention. So the peak is piecewise
polynomial.) If the guess is right, two more plans end the search. Every fourth guess is the middle,
for models that do not behave so. If a larger size can need less, there are several such edges, and
the answer is one of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import torch

from fxshard._torch import trees
from fxshard.arguments import check_count
from fxshard.bytesize import counts, parse_budget
from fxshard.errors import CaptureError, ConfigError, DoesNotFitError, OutOfRangeError
from fxshard.planner.batches import has_dimension, resized
from fxshard.planner.search import Search, edge, middle
from fxshard.planner.space import Candidate
from fxshard.plans.answers import Limit, Solution, Tried
from fxshard.plans.plan import Plan

MOST_DOUBLED = 18  # times: more ranks than anyone has
FARTHEST = 16  # the next guess is at most this many times the largest size that fits

Likely = Callable[[int], bool | None]  # does a size fit by the formulas; None: they do not tell


def solve(
    plan: Plan, what: str, budget: int | str, multiple_of: int, fixed: dict[str, int]
) -> Solution[Plan]:
    """See `Plan.solve`."""
    check_count("multiple_of", multiple_of)
    sizes = plan.memory.formulas.range.example
    names = [f"max_{n}" for n in sizes if n != "world"] + ["min_world"]
    if what not in names:
        raise ConfigError(
            f"solve({what!r}): this plan knows {', '.join(names)}. Sizes get their names where it "
            f"is made: fxshard.plan(..., dynamic={{name: [(argument, dimension)]}})."
        )
    goal, _, name = what.partition("_")
    if name in fixed:
        raise ConfigError(f"solve({what!r}, {name}={fixed[name]!r}): leave out what is asked for.")
    point = plan.memory.formulas.range.complete(counts(fixed))
    before, limit = point.pop(name), parse_budget(budget)
    peaks = [plan.memory.formula(first_step=first) for first in (False, True)]

    def made(size: int) -> Plan:
        return plan.at(**{**point, name: size}, traced=True)

    def likely(size: int) -> bool | None:
        try:
            return max(peak.at(**{**point, name: size}) for peak in peaks) <= limit
        except OutOfRangeError:
            return None

    search = Sizes(made, name, limit, before, multiple_of, likely)
    if goal == "max":
        inputs = max(_bytes_of(plan.inputs_with(name, {**point, name: sizes[name]})), 1)
        size = search.largest((limit * sizes[name] // inputs) // multiple_of + 2)
        beyond = size + multiple_of
    else:
        size = search.smallest(likely)
        beyond = size - multiple_of
    return Solution(**search.found(what, size, max(beyond, 0)), fixed=point)


def largest(
    plan: Plan, budget: int | str, what: str, dim: int, multiple_of: int = 1
) -> Limit[Plan]:
    """The largest size of dimension `dim` of the batch with which the step fits.

    Args:
        plan: the plan whose batch is changed, and nothing else. Inputs of other sizes are meta
            tensors.
        budget: bytes, or text such as "80GiB", as for `MemoryReport.assert_fits`.
        what: the name of the dimension in messages.
        dim: changed in every input whose size in `dim` is that of the first input that has such a
            dimension.
        multiple_of: try only multiples of this.

    Raises:
        DoesNotFitError: not even `multiple_of` fits; the text shows what is alive at its peak.
        ConfigError: the call has no tensor with such a dimension, or that dimension has no bytes;
            or ``loss`` cannot take another size.
        CaptureError: the model refuses a size of `multiple_of`.
    """
    check_count("multiple_of", multiple_of)
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        raise ConfigError(f"dim={dim!r}: expected the number of a dimension, from 0.")
    limit = parse_budget(budget)
    tensors, before = _with_dimension(plan, what, dim)

    def made(size: int) -> Plan:
        if size == before:
            return plan
        args, kwargs = resized(plan.workload.call, dim, before, size)
        try:
            found = plan.replan(args=args, kwargs=kwargs)
            _ = found.memory  # where the loss is traced
        except ConfigError as error:
            if plan.workload.loss is None:
                raise
            raise ConfigError(
                f"a {what} of {size} instead of {before}: {error} If it holds tensors of the "
                f"batch, they keep their size: pass them to the model, and let it compute the loss."
            ) from error
        return found

    search = Sizes(made, what, limit, before, multiple_of)
    # The inputs alone are above the budget from here on: no search goes farther.
    size = search.largest((limit * before // _bytes_of(tensors.values())) // multiple_of + 1)
    return Limit(
        **search.found(what, size, size + multiple_of),
        dim=dim,
        tensors=tuple(tensors),
        before=before,
        multiple_of=multiple_of,
    )


def _with_dimension(plan: Plan, what: str, dim: int) -> tuple[dict[str, torch.Tensor], int]:
    """The inputs that have the dimension, by name, and its size.

    Raises:
        ConfigError: none has; or they have no bytes.
    """
    leaves, _ = trees.tree_flatten(plan.workload.call)
    names = plan.program.signature.input_names
    tensors = {
        name: leaf for name, leaf in zip(names, leaves, strict=True) if has_dimension(leaf, dim)
    }
    if not tensors:
        raise ConfigError(
            f"no tensor of the call has a dimension {dim} for the {what}; its inputs are "
            f"{', '.join(names) or 'none'}."
        )
    before = int(next(iter(tensors.values())).shape[dim])
    same = {name: t for name, t in tensors.items() if t.shape[dim] == before}
    if not _bytes_of(same.values()):
        raise ConfigError(f"{', '.join(same)}: no bytes, whatever the {what}.")
    return same, before


def _bytes_of(tensors: Iterable[Any]) -> int:
    distinct = {id(t): t for t in tensors}.values()
    return sum(t.numel() * t.element_size() for t in distinct)


@dataclasses.dataclass
class Sizes:
    """A search for the edge of one size; counts are of multiples.

    Attributes:
        make: the plan of a size.
        what: its name.
        budget: bytes of one rank.
        before: the size in the plan that the search starts from.
        multiple_of: try only multiples of this.
        likely: whether a size fits by the formulas.
        candidates: what was planned, by size.
    """

    make: Callable[[int], Plan]
    what: str
    budget: int
    before: int
    multiple_of: int
    likely: Likely | None = None
    candidates: dict[int, Tried] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start: int = max(self.before // self.multiple_of, 1)
        self.search: Search = Search(
            lambda each: self.make(each.changes[self.what]),
            self.budget,
            lambda each, _: each.rank,
            refusals=(CaptureError,),
        )

    def fits(self, count: int) -> bool:
        """Plan a size; the last one that fits is the best of the search."""
        size, rank = count * self.multiple_of, -len(self.candidates)
        self.candidates[size] = self.search.ask(Candidate({self.what: size}, rank=rank))
        return self.candidates[size].fits

    def found(self, what: str, size: int, beyond: int) -> dict[str, Any]:
        """The fields of an `Edge`."""
        planned = dict(sorted(self.candidates.items()))
        proof = {"budget_bytes": self.budget, "plan": self.search.plan, "candidates": planned}
        return {"what": what, "size": size, "beyond": beyond, **proof}

    def largest(self, beyond: int) -> int:
        """The largest size that fits; `beyond` is a count that cannot.

        Raises:
            DoesNotFitError: not even the smallest does.
            CaptureError: the model refuses the smallest.
        """
        good = edge(self.fits, 0, max(beyond, 2), self._guess)
        while good and self.fits(good + 1):  # `beyond` was too small
            good = edge(self.fits, good + 1, 2 * (good + 1), self._guess)
        if not good:
            size = self.multiple_of
            raise DoesNotFitError(f"not even a {self.what} of {size} fits: {self._reason(1)}")
        return good * self.multiple_of

    def smallest(self, likely: Likely) -> int:
        """The smallest number of ranks that fits, of those with a smaller one that does not.

        Raises:
            DoesNotFitError: none was found.
            CaptureError: the model refuses the size that it has.
        """
        first, step = self.start, self.multiple_of
        # Doubled from both: padding makes the peak of some numbers of ranks larger than of fewer.
        doubled = {count << turn for count in (1, first) for turn in range(MOST_DOUBLED)}
        counts = sorted(doubled, key=lambda count: (count < first, count))
        good = next((c for c in counts if likely(c * step) and self.fits(c)), first)
        if not self.fits(good):
            raise DoesNotFitError(
                f"no number of ranks is enough, of {first * step} doubled {MOST_DOUBLED} times "
                f"and of powers of 2. With {first * step}: {self._reason(first)}"
            )
        return edge(self.fits, good, 0, self._guess) * step

    def _reason(self, count: int) -> str:
        """Why a count does not fit, with what is alive at its peak."""
        try:
            self.make(count * self.multiple_of).memory.assert_fits(self.budget)
        except DoesNotFitError as error:
            return str(error)
        raise AssertionError(f"{self.what}: {count} was planned twice, and fits once")

    def _guess(self, good: int, bad: int) -> int | None:
        """The count to try next, between one that fits and one that does not."""
        halfway, likely = middle(good, bad), self._trusted()
        if halfway is None:
            return None
        if likely is not None:
            found = edge(likely, good, bad, middle)
            return found if found != good else good + (1 if bad > good else -1)
        if bad < good:
            return halfway
        guess = self._by_parabola(good, bad) if self.candidates else self.start
        return min(max(guess, good + 1), bad - 1)

    def _trusted(self) -> Callable[[int], bool] | None:
        """Whether a count fits by the formulas; None if a plan has contradicted them."""
        likely = self.likely
        if likely is None:
            return None
        if any(bool(likely(size)) != each.fits for size, each in self.candidates.items()):
            return None
        return lambda count: bool(likely(count * self.multiple_of))

    def _by_parabola(self, good: int, bad: int) -> int:
        """The count at which a parabola through the nearest peaks (three, or two) is the budget."""
        if not good:
            return 1
        tried = {size // self.multiple_of: each for size, each in self.candidates.items()}
        budget, closed = self.budget, tried.get(bad)
        other_reason = closed is not None and (closed.peak_bytes or 0) <= budget
        if other_reason or (closed is not None and len(tried) % 4 == 0):
            return (good + bad) // 2
        known = {n: each.peak_bytes for n, each in tried.items() if each.peak_bytes is not None}
        nearest = sorted(known.items(), key=lambda pair: abs(pair[1] - budget))[:3]
        if len(nearest) == 1:
            return 2 * good
        end = bad if closed is not None else min(bad, FARTHEST * good)
        return edge(lambda n: _through(nearest, n) <= budget, good, end, middle)


def _through(points: list[tuple[int, int]], at: int) -> int:
    """The polynomial through some points, at `at` (Lagrange's form), rounded down."""
    total = Fraction(0)
    for x, y in points:
        others = [other for other, _ in points if other != x]
        term = Fraction(y)
        for other in others:
            term *= Fraction(at - other, x - other)
        total += term
    return math.floor(total)
