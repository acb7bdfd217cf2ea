"""The engine of every search over plans: plan a candidate once, judge it, keep the best that fits.

`memory_budget` (`fxshard.planner.budget`), `Plan.largest_batch`, `Plan.longest_sequence` and
`Plan.solve` (`limits`) and `fxshard.tune` (`tune`) differ in which candidate they ask for next.
Only `Search.ask` decides whether a plan fits, and only `edge` searches between a number that fits
and one that does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fxshard.bytesize import excess_text
from fxshard.errors import DoesNotFitError, FxshardError
from fxshard.hardware import Hardware
from fxshard.planner.space import PREFETCH, Candidate
from fxshard.plans.answers import Tried
from fxshard.plans.plan import Plan

# Options of the step: the sharded model is made in the same way for all of their values.
OF_STEP = {*PREFETCH, "checkpoint", "offload_activations", "reshard_after_forward"}


@dataclasses.dataclass
class Search:
    """The candidates of one search that were planned so far.

    Attributes:
        make: the plan of a candidate.
        budget: bytes of one rank, as for `MemoryReport.assert_fits`.
        order: a sort key; the first of those that fit is the best, of equal ones the earliest.
        hardware: for times; None: none are needed.
        refusals: errors that mean that a candidate cannot be planned. Others are raised.
        tried: the results, in the order of planning.
        best: the first in `order` of those that fit; None while nothing does.
        plan: its plan. Other plans are not kept: they hold their graphs.
    """

    make: Callable[[Candidate], Plan]
    budget: int
    order: Callable[[Candidate, Tried], Any]
    hardware: str | Hardware | None = None
    refusals: tuple[type[FxshardError], ...] = (FxshardError,)
    tried: list[Tried] = dataclasses.field(default_factory=list)
    best: Tried | None = None
    plan: Plan | None = None
    _least: Any = None  # the order of the best
    _known: dict[Any, Tried] = dataclasses.field(default_factory=dict)
    _makeable: set[Any] = dataclasses.field(default_factory=set)  # fits while the model is made

    def ask(self, candidate: Candidate) -> Tried:
        """Plan a candidate, unless it was planned before, and judge whether it fits.

        Args:
            candidate: what to plan.

        Returns:
            Its bytes, its seconds, and why it does not fit.
        """
        if candidate.key not in self._known:
            found, plan = self._judged(candidate)
            self._known[candidate.key] = found
            self.tried.append(found)
            if found.fits:
                order = self.order(candidate, found)
                if self.best is None or order < self._least:
                    self.best, self.plan, self._least = found, plan, order
        return self._known[candidate.key]

    def _judged(self, candidate: Candidate) -> tuple[Tried, Plan | None]:
        changes = candidate.changes
        try:
            plan = self.make(candidate)
            memory = plan.memory
            seconds = plan.estimate(self.hardware).step_seconds if self.hardware else None
        except self.refusals as error:
            return Tried(changes=changes, why_not=first_line(error)), None
        peak = max(memory.peak_bytes, memory.first_step_peak_bytes)
        why = excess_text(peak, self.budget)
        if peak <= self.budget:
            why = self._why_not_made(candidate, plan)
        return Tried(changes=changes, peak_bytes=peak, seconds=seconds, why_not=why), plan

    def _why_not_made(self, candidate: Candidate, plan: Plan) -> str:
        """What besides the peaks of a step is too much: making the model, or CUDA's allocator."""
        making = candidate.key_without(OF_STEP)
        if making in self._makeable and plan.config.device != "cuda":
            return ""
        try:
            plan.memory.assert_fits(self.budget)
        except DoesNotFitError as error:
            return first_line(error)
        self._makeable.add(making)
        return ""


def edge(
    fits: Callable[[int], bool | None],
    good: int,
    bad: int,
    guess: Callable[[int, int], int | None],
) -> int:
    """Search the edge between numbers that fit and numbers that do not.

    Args:
        fits: called with numbers between `good` and `bad`.
        good: fits, or is assumed to; above `bad` if smaller numbers need more.
        bad: does not fit, or is assumed not to.
        guess: from both, the number between them to try next; None: they are near enough.

    Returns:
        The last `good`.
    """
    while (number := guess(good, bad)) is not None:
        good, bad = (number, bad) if fits(number) else (good, number)
    return good


def middle(good: int, bad: int) -> int | None:
    """The `guess` of bisection, down to neighbours."""
    return None if abs(bad - good) <= 1 else (good + bad) // 2


def first_line(error: Exception) -> str:
    """The first line of an error's text, for a table."""
    return " ".join(str(error).partition("\n")[0].split()).rstrip(".")
