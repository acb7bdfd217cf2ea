"""The largest batch or the longest sequence that fits a budget, found by planning the step again.

Each size that is asked for is planned whole, so the answer is no estimate: `Limit.size` fits, and
the next size does not. Which sizes to ask for is guessed: of a fixed program the bytes alive at a
point are a polynomial of the size (of the first degree in the batch, of the second in the sequence,
with attention's scores), so the peak is one piece by piece. A parabola through the three nearest
peaks says where it meets the budget; where it is right, two more plans end the search. Every fourth
guess is the middle, for models of which nothing of this is so. If a larger size can need less, the
answer is one of several such edges.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import torch

from fxshard._torch import trees
from fxshard.arguments import check_count
from fxshard.bytesize import counts, parse_budget
from fxshard.errors import CaptureError, ConfigError, DoesNotFitError, OutOfRangeError
from fxshard.planner import what_ifs
from fxshard.plans.answers import Limit, Solution
from fxshard.plans.plan import Plan

MOST_DOUBLED = 18  # times: more ranks than anyone has
FARTHEST = 16  # how many times the largest size that fits the next guess may be


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

    def planned(size: int) -> Plan:
        return plan.at(**{**point, name: size}, traced=True)

    peaks = [plan.memory.formula(first_step=first) for first in (False, True)]

    def likely(size: int) -> bool | None:
        try:
            return max(peak.at(**{**point, name: size}) for peak in peaks) <= limit
        except OutOfRangeError:
            return None

    search = _Search(planned, name, limit, before, multiple_of, likely=likely)
    if goal == "max":
        inputs = max(_bytes_of(plan.inputs_with(name, {**point, name: sizes[name]})), 1)
        search.beyond = (limit * sizes[name] // inputs) // multiple_of + 2
        size = search.run()
        beyond = size + multiple_of
    else:
        size = search.run_down()
        beyond = size - multiple_of
    return Solution(
        *(what, size, max(beyond, 0), point, limit, search.best),
        *(dict(sorted(search.tried.items())), search.refused.get(beyond, "")),
    )


def _bytes_of(tensors: Iterable[Any]) -> int:
    distinct = {id(t): t for t in tensors}.values()
    return sum(t.numel() * t.element_size() for t in distinct)


def largest(
    plan: Plan, budget: int | str, what: str, dim: int, multiple_of: int = 1
) -> Limit[Plan]:
    """The largest size of dimension `dim` of the batch with which the step fits.

    Args:
        plan: what is changed; all but the batch stays. Its own tensors are left alone: the others
            are meta tensors.
        budget: bytes, or text such as "80GiB", which `MemoryReport.assert_fits` is asked.
        what: how messages call the dimension.
        dim: of every input whose size in `dim` is that of the first input that has such a
            dimension.
        multiple_of: ask only for multiples of this.

    Raises:
        DoesNotFitError: not even `multiple_of` fits; tells what is alive at its peak.
        ConfigError: the call has no tensor with such a dimension, or that dimension has no bytes;
            or ``loss`` cannot take another size.
        CaptureError: the model refuses a size of `multiple_of`.
    """
    check_count("multiple_of", multiple_of)
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        raise ConfigError(f"dim={dim!r}: expected the number of a dimension, from 0.")
    limit = parse_budget(budget)
    tensors, before = _with_dimension(plan, what, dim)

    def planned(size: int) -> Plan:
        if size == before:
            return plan
        args, kwargs = what_ifs.resized(plan, dim, before, size)
        return plan.replan(args=args, kwargs=kwargs)

    search = _Search(planned, what, limit, before, multiple_of, plan.workload.loss is not None)
    # The inputs alone are above the budget from here on: no search goes farther.
    search.beyond = (limit * before // _bytes_of(tensors.values())) // multiple_of + 1
    size = search.run()
    return Limit(
        what,
        dim,
        size,
        tuple(tensors),
        before,
        limit,
        search.best,
        dict(sorted(search.tried.items())),
        multiple_of,
        search.refused.get(size + multiple_of, ""),
    )


def _with_dimension(plan: Plan, what: str, dim: int) -> tuple[dict[str, torch.Tensor], int]:
    """The inputs that have the dimension, by name, and its size.

    Raises:
        ConfigError: none has; or they have no bytes.
    """
    leaves, _ = trees.tree_flatten(plan.workload.call)
    names = plan.program.signature.input_names
    has = [(n, t) for n, t in zip(names, leaves, strict=True) if _has(t, dim)]
    if not has:
        raise ConfigError(
            f"no tensor of the call has a dimension {dim} for the {what}; its inputs are "
            f"{', '.join(names) or 'none'}."
        )
    before = int(has[0][1].shape[dim])
    same = {name: t for name, t in has if t.shape[dim] == before}
    if not _bytes_of(same.values()):
        raise ConfigError(f"{', '.join(same)}: no bytes, whatever the {what}.")
    return same, before


class _Search:
    """The sizes asked for so far.

    Attributes:
        before: the size in the plan that was asked.
        beyond: a number of multiples that cannot fit.
        tried: per size its peak; None if it cannot be planned.
        refused: per size that does not fit, or cannot be planned, why.
        best: the plan of the largest size that fits.
        least: why the smallest does not.
    """

    best: Plan
    beyond = 2

    def __init__(
        self,
        planned: Callable[[int], Plan],
        what: str,
        budget: int,
        before: int,
        multiple_of: int,
        has_loss: bool = False,
        likely: Callable[[int], bool | None] | None = None,
    ) -> None:
        """Args: `planned`: makes the plan of a size. `likely`: says whether a size may fit."""
        self.planned, self.what, self.budget = planned, what, budget
        self.before, self.multiple_of = before, multiple_of
        self.has_loss, self.likely = has_loss, likely
        self.tried: dict[int, int | None] = {}
        self.refused: dict[int, str] = {}

    def run(self) -> int:
        """The largest size that fits."""
        low, high = max(self.before // self.multiple_of, 1), self.beyond
        if self.likely is not None:
            low = self._likely_edge(1, high)
        if not self.fits(low):
            low, high = 1, low
            if high == 1 or not self.fits(1):
                raise DoesNotFitError(
                    f"not even a {self.what} of {self.multiple_of} fits: {self.least}"
                )
        elif self.likely is not None and not self.fits(low + 1):
            return low * self.multiple_of
        for turn in itertools.count():
            guess = high  # of a size behind the last one, only by how much it is too large
            if high - low > 1:
                guess = min(max(self._guess(low, high, turn), low + 1), high - 1)
            elif high * self.multiple_of in self.tried:
                break
            if self.fits(guess):
                low, high = guess, high if guess < high else 2 * guess
            else:
                high = guess
        return low * self.multiple_of

    def _likely_edge(self, low: int, high: int) -> int:
        """The largest number of multiples that is likely to fit, at least `low`."""
        assert self.likely is not None
        while high - low > 1:
            middle = (low + high) // 2
            if self.likely(middle * self.multiple_of):
                low = middle
            else:
                high = middle
        return low

    def run_down(self) -> int:
        """The smallest number of ranks that fits, of those with a smaller one that does not."""
        assert self.likely is not None
        step, first = self.multiple_of, max(self.before // self.multiple_of, 1)
        # Doubled from both: padding makes the peak of some numbers of ranks larger than of fewer.
        doubled = {count << turn for count in (1, first) for turn in range(MOST_DOUBLED)}
        counts = [count for count in sorted(doubled) if count >= first]
        counts += [count for count in sorted(doubled) if count < first]
        good = next((c for c in counts if self.likely(c * step) and self.fits(c)), None)
        if good is None:
            self.fits(first)  # why is to be told
            raise DoesNotFitError(
                f"no number of ranks is enough, of {counts[0] * step} doubled {MOST_DOUBLED} times "
                f"and of powers of 2. With {first * step}: {self.least}"
            )
        bad = 0
        while good - bad > 1:
            low, high = bad, good
            while high - low > 1:  # where it is likely: then that one is planned
                middle = (low + high) // 2
                low, high = (low, middle) if self.likely(middle * step) else (middle, high)
            guess = high if high < good else high - 1
            if self.fits(guess):
                good = guess
            else:
                bad = guess
        self.fits(good)  # so that its plan is the last that fitted
        return good * step

    def fits(self, count: int) -> bool:
        """Plan the size of `count` multiples."""
        size = count * self.multiple_of
        try:
            plan = self.planned(size)
            memory = plan.memory
        except ConfigError as error:
            if not self.has_loss:
                raise
            raise ConfigError(
                f"a {self.what} of {size} instead of {self.before}: {error} If it holds tensors of "
                f"the batch, they keep their size: pass them to the model, and let it compute the "
                f"loss."
            ) from error
        except CaptureError as error:
            if count == 1:
                raise
            self.tried[size], self.refused[size] = None, " ".join(str(error).split()).rstrip(".")
            return False
        self.tried[size] = max(memory.peak_bytes, memory.first_step_peak_bytes)
        try:
            memory.assert_fits(self.budget)
        except DoesNotFitError as error:
            self.refused[size] = str(error).partition("\n")[0].rstrip(".")
            self.least = error
            return False
        self.best = plan
        return True

    def _guess(self, low: int, high: int, turn: int) -> int:
        """A number of multiples between two, of which one fits and the other does not."""
        closed = high * self.multiple_of in self.tried
        above = self.tried.get(high * self.multiple_of)
        other_reason = closed and (above is None or above <= self.budget)
        if other_reason or (closed and turn % 4 == 3):
            return (low + high) // 2
        known = {n // self.multiple_of: p for n, p in self.tried.items() if p is not None}
        nearest = sorted(known, key=lambda count: abs(known[count] - self.budget))[:3]
        if len(nearest) == 1:
            return 2 * low
        points = [(count, known[count]) for count in nearest]
        end = high if closed else min(high, FARTHEST * low)
        inside = range(low + 1, end)
        fitting = bisect.bisect_right(inside, self.budget, key=lambda n: _through(points, n))
        return low + max(fitting, 1)


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


def _has(leaf: Any, dim: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > dim >= 0
