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
import dataclasses
import itertools
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from fxshard import compat, levers
from fxshard.errors import CaptureError, ConfigError
from fxshard.memory.explain import size_text
from fxshard.memory.report import DoesNotFitError, parse_bytes

if TYPE_CHECKING:
    from fxshard.plans import Plan

FARTHEST = 16  # how many times the largest size that fits the next guess may be


@dataclasses.dataclass(frozen=True)
class Limit:
    """The largest size of one dimension of the batch that fits a budget; ``str()`` tells it.

    Attributes:
        what: "batch" or "sequence".
        dim: which dimension.
        size: fits; `size` + `multiple_of` does not.
        tensors: names of the inputs whose dimension `dim` was changed.
        before: its size in the plan that was asked.
        budget_bytes: what it must fit, as `MemoryReport.assert_fits` says.
        plan: the plan of `size`.
        tried: per size that was planned the larger of its two peaks in bytes; None if it cannot
            be planned.
        multiple_of: only multiples of this were asked for.
        why_not: why `size` + `multiple_of` cannot be planned, or does not fit.
    """

    what: str
    dim: int
    size: int
    tensors: tuple[str, ...]
    before: int
    budget_bytes: int
    plan: Plan
    tried: dict[int, int | None]
    multiple_of: int = 1
    why_not: str = ""

    @property
    def peak_bytes(self) -> int:
        """With `size`: the larger of the peaks of the first and of a later step."""
        return self.tried[self.size] or 0

    @property
    def next_peak_bytes(self) -> int | None:
        """The same with `size` + `multiple_of`; None if that cannot be planned."""
        return self.tried[self.size + self.multiple_of]

    def __str__(self) -> str:
        following, peak = self.size + self.multiple_of, self.next_peak_bytes
        beyond = f"cannot be planned: {self.why_not}"
        if peak is not None:
            beyond = f"does not fit: {self.why_not}"
        if peak is not None and peak > self.budget_bytes:
            beyond = f"needs {size_text(peak)}"
        return (
            f"{self.what} of {self.size}: needs {size_text(self.peak_bytes)} of "
            f"{size_text(self.budget_bytes)}; {following} {beyond}.\nDimension {self.dim} of "
            f"{', '.join(self.tensors)} was changed; {len(self.tried)} sizes were planned."
        )


def largest(plan: Plan, budget: int | str, what: str, dim: int, multiple_of: int = 1) -> Limit:
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
    if not isinstance(multiple_of, int) or multiple_of < 1:
        raise ConfigError(f"multiple_of={multiple_of!r}: expected an integer >= 1.")
    search = _Search(plan, parse_bytes(budget), what, dim, multiple_of)
    size = search.run()
    return Limit(
        what,
        dim,
        size,
        search.tensors,
        search.before,
        search.budget,
        search.best,
        dict(sorted(search.tried.items())),
        multiple_of,
        search.refused.get(size + multiple_of, ""),
    )


class _Search:
    """The sizes asked for so far.

    Attributes:
        before: size of the dimension in the plan.
        tensors: names of the inputs that have it.
        tried: per size its peak; None if it cannot be planned.
        refused: per size that does not fit, or cannot be planned, why.
        best: the plan of the largest size that fits.
        least: why the smallest does not.
    """

    def __init__(self, plan: Plan, budget: int, what: str, dim: int, multiple_of: int) -> None:
        self.plan, self.budget, self.what, self.dim = plan, budget, what, dim
        self.multiple_of = multiple_of
        leaves, _ = compat.tree_flatten(plan.workload.call)
        names = plan.program.signature.input_names
        has = [(n, t) for n, t in zip(names, leaves, strict=True) if _has(t, dim)]
        if not has:
            raise ConfigError(
                f"no tensor of the call has a dimension {dim} for the {what}; its inputs are "
                f"{', '.join(names) or 'none'}."
            )
        self.before = int(has[0][1].shape[dim])
        same = {name: t for name, t in has if t.shape[dim] == self.before}
        self.tensors = tuple(same)
        distinct = {id(t): t for t in same.values()}.values()
        whole = sum(t.numel() * t.element_size() for t in distinct)
        if not whole:
            raise ConfigError(f"{', '.join(same)}: no bytes, whatever the {what}.")
        # The inputs alone are above the budget from here on: no search goes farther.
        self.beyond = (budget * self.before // whole) // multiple_of + 1
        self.tried: dict[int, int | None] = {}
        self.refused: dict[int, str] = {}
        self.best = plan

    def run(self) -> int:
        """The largest size that fits."""
        low, high = max(self.before // self.multiple_of, 1), self.beyond
        if not self.fits(low):
            low, high = 1, low
            if high == 1 or not self.fits(1):
                raise DoesNotFitError(
                    f"not even a {self.what} of {self.multiple_of} fits: {self.least}"
                )
        for turn in itertools.count():
            guess = high  # of a size behind the last one, only by how much it is too large
            if high - low > 1:
                guess = min(max(self._guess(low, high, turn), low + 1), high - 1)
            elif high * self.multiple_of in self.tried:
                break
            if self.fits(guess):
                low, high = guess, max(high, guess + 1)
            else:
                high = guess
        return low * self.multiple_of

    def fits(self, count: int) -> bool:
        """Plan the size of `count` multiples."""
        size = count * self.multiple_of
        plan = self.plan
        try:
            if size != self.before:
                args, kwargs = levers.resized(plan, self.dim, self.before, size)
                plan = plan.replan(args=args, kwargs=kwargs)
            memory = plan.memory
        except ConfigError as error:
            if plan.workload.loss is None:
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
            if count == 1:
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
