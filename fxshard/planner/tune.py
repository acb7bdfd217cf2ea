"""tune: the fastest configuration that fits. It plans those that no bound rules out.

Note: the order
===============
Exact figures cost a plan of the model; bounds (`fxshard.planner.bounds`) cost little. The candidate
with the lowest bound of time is planned next. A bound counts FLOPs at first, and all operators when
its candidate comes first. Of bounds that are about equal, candidates come last that are like one
that did not fit, or like one that fits with more prefetch. The best is known as soon as the lowest
bound left is at least its time, less `ENOUGH`. Every other plan after the first that fits extends
the front of memory against time: the candidate whose bounds are below it by the largest factor.
While nothing has fitted, every third plan is the one with the lowest bound of memory.

With a limit of plans, candidates that take at least `TOO_SLOW` times the best's time are not
planned for the front. Without one, the search ends when every configuration is planned, or proven
to be no better.

Offload is tried only if it is asked for or nothing fits without it (docs/tune.md). Of equally fast
configurations that fit, the best offloads no activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from fxshard.bytesize import size_text
from fxshard.config.world_size import grid
from fxshard.errors import ConfigError, DoesNotFitError
from fxshard.hardware import Hardware
from fxshard.ir.splitting import configured_units
from fxshard.planner.batches import Batches
from fxshard.planner.bounds import Bounds, traced
from fxshard.planner.result import Together, Trial, Tuning, ranked
from fxshard.planner.search import Search, first_line
from fxshard.planner.space import PREFETCH, Candidate, candidates, given_space
from fxshard.plans.answers import Tried
from fxshard.plans.workload import Workload

ENOUGH = 0.02  # a configuration that is faster by a smaller part is not searched for
TOO_SLOW = 2.0
PLANS = 8  # of the model, by default

Progress = Callable[[int, str], None]  # (plans made, what is going on)


def tuned(
    workload: Workload,
    hardware: Hardware,
    budget: int,
    shape: Together,
    *,
    batches: Sequence[int] | None = None,
    space: Mapping[str, Iterable[Any]] | None = None,
    plans: int | None = PLANS,
    progress: Progress = lambda count, what: None,
) -> Tuning:
    """Search; see `fxshard.tune`.

    Args:
        budget: bytes of one rank.
        shape: ranks that compute a sample together.
        progress: called with the number of plans that were made, and what is going on.
    """
    opened, values = Batches(workload, batches), given_space(space)
    tuner = Tuner(workload, opened, hardware, budget, values, plans, progress, shape)
    tuner.search_all()
    return found_by([tuner])


def found_by(tuners: Sequence[Tuner], others: Sequence[Trial] = ()) -> Tuning:
    """Compare what searches have found, one for each shape of the mesh.

    Args:
        tuners: after `Tuner.search_all`.
        others: what could not be searched.

    Raises:
        DoesNotFitError, ConfigError: see `fxshard.tune`.
    """
    fitting = [each for each in tuners if each.search.best is not None]
    if not fitting:
        min(tuners, key=Tuner.smallest).refuse()
    best = min(fitting, key=Tuner.best_time)
    slack = max(each.slack(best.best_time()) for each in tuners)
    for each in tuners:
        each.close_rest()
    trials = [*(trial for each in tuners for trial in each.trials), *others]
    return Tuning(
        ranked(trials, best.search.plan),
        *(best.budget, best.hardware, sum(len(each.planned) for each in tuners), slack),
    )


class Tuner:
    """A search, and what is known of every candidate so far."""

    def __init__(
        self,
        workload: Workload,
        batches: Batches,
        hardware: Hardware,
        budget: int,
        space: Mapping[str, Sequence[Any]],
        limit: int | None,
        progress: Progress,
        shape: Together,
    ) -> None:
        self.batches: Batches = batches
        self.hardware: Hardware = hardware
        self.shape: Together = shape
        self.budget: int = budget
        self.progress: Progress = progress
        self.limit: float | int = math.inf if limit is None else limit
        self.enough: float = 0.0 if limit is None else ENOUGH
        self.last_resort: bool = "offload" not in {*space, *workload.config.given}
        self.planned: list[Trial] = []
        self._kinds: dict[int, Any] = {}  # per rank of a candidate, what `_is_like` compares
        self.search: Search = Search(
            lambda each: batches.plan(each.batch, each.changes),
            budget,
            self._order,
            hardware=hardware,
        )
        units = len(configured_units(workload.module, workload.config))
        node = max(1, hardware.ranks_per_node // shape.tp)
        sharing = workload.config, workload.world_size, node
        every = candidates(*sharing, units, batches.sizes, space)
        self.trials: list[Trial] = [self._trial(workload, each) for each in every]
        legal = next((each for each in self.trials if not each.why), None)
        if legal is None:
            self.refuse()
        self.bounds: Bounds = Bounds(batches, hardware, legal, lambda what: self._tell(what))

    def search_all(self) -> None:
        """Bound and plan, until the best is known or the plans are used up."""
        for each in self.trials:
            self.bounds.bound(each)
            self._close_if_too_large(each)
        self._spend(self.limit)
        if self.last_resort and self.search.best is None:
            self.last_resort = False
            self._spend(len(self.planned) + self.limit)
        self.batches.forget()

    def _trial(self, work: Workload, candidate: Candidate) -> Trial:
        changes = {n: v for n, v in candidate.changes.items() if n != "world_size"}
        world = candidate.changes.get("world_size", work.world_size)
        config, why = work.config, ""
        try:
            config = work.config.changed(changes)
            grid(world, config)
        except ConfigError as error:
            why = f"refused: {first_line(error)}"
        shards, parts = world[-1] if isinstance(world, tuple) else world, self.shape.cp
        if not why and shards % parts:
            why = f"refused: {shards} ranks that share parameters are no multiple of cp={parts}"
        samples = self.batches.samples(candidate.batch)
        return Trial(candidate, config, world, samples, why, shape=self.shape)

    def _order(self, candidate: Candidate, tried: Tried) -> tuple[float, bool, int, int]:
        seconds = (tried.seconds or 0.0) / self.batches.samples(candidate.batch)
        return seconds, candidate.offloads, tried.peak_bytes or 0, candidate.rank

    def _tell(self, what: str) -> None:
        self.progress(len(self.planned), what)

    # -- what is planned --------------------------------------------------------------------------

    def _spend(self, limit: float) -> None:
        while len(self.planned) < limit:
            left = [each for each in self._open() if not self._is_last_resort(each)]
            chosen = self._choose(left) if left else None
            if chosen is None:
                return
            if chosen.refined:
                self._plan(chosen)
                continue
            stem = self.bounds.stem_of(chosen)
            for each in self._open():
                if not each.refined and self.bounds.stem_of(each) == stem:
                    self.bounds.refine(each)
                    self._close_if_too_large(each)

    def _open(self) -> list[Trial]:
        return [each for each in self.trials if not each.why and each.tried is None]

    def _fitting(self) -> list[Trial]:
        return [each for each in self.planned if each.fits]

    def _is_last_resort(self, each: Trial) -> bool:
        return self.last_resort and each.config.offload is not None

    def _choose(self, left: list[Trial]) -> Trial | None:
        """The candidate to plan next, or to refine; None: what is left is no better."""
        fitting = self._fitting()
        if not fitting:
            if len(self.planned) % 3 == 2:
                return min(left, key=lambda o: (o.least_bytes, o.least_seconds, o.candidate.rank))
            return min(left, key=self._by_time)
        best = min(each.sample_time or 0.0 for each in fitting)
        faster = [each for each in left if each.least_seconds < best * (1 - self.enough)]
        slowest = best * TOO_SLOW if self.limit < math.inf else math.inf
        moves = [
            (gain / (1 + 4 * self._unlikely(each)), -each.candidate.rank, i)
            for i, each in enumerate(left)
            if each.least_seconds <= slowest
            and (gain := self._gain(each, fitting)) > math.log1p(self.enough)
        ]
        if faster and (len(self.planned) % 2 or not moves):
            return min(faster, key=self._by_time)
        return left[max(moves)[-1]] if moves else None

    def _by_time(self, each: Trial) -> tuple[float, int, float, int]:
        """The lowest bound first; of about equal ones, those that are likelier to be the best."""
        about = round(math.log(max(each.least_seconds, 1e-12)) / ENOUGH)
        return about, self._unlikely(each), each.candidate.rank, each.least_bytes

    def _unlikely(self, each: Trial) -> int:
        return sum(self._is_like(each, other) for other in self.planned)

    def _is_like(self, each: Trial, other: Trial) -> bool:
        """True if `other`, planned, shows that `each` is unlikely to be better.

        They differ in prefetch and reduction only, and `other` prefetches no less or does not fit.
        """
        if other.candidate.batch != each.candidate.batch or self._kind(each) != self._kind(other):
            return False
        depths = [(getattr(other.config, n), getattr(each.config, n)) for n in PREFETCH]
        counted = [pair for pair in depths if all(isinstance(depth, int) for depth in pair)]
        return all(more >= less for more, less in counted) or not other.fits

    def _kind(self, each: Trial) -> Any:
        rank = each.candidate.rank
        if rank not in self._kinds:
            rest = each.candidate.key_without({*PREFETCH, "mixed_precision"})
            self._kinds[rank] = rest, traced(each.config.mixed_precision)
        return self._kinds[rank]

    def _gain(self, each: Trial, fitting: list[Trial]) -> float:
        """The logarithm of the factor by which its bounds are below the front."""
        return min(
            max(
                math.log((o.peak_bytes or 1) / max(each.least_bytes, 1)),
                math.log((o.sample_time or 1e-12) / max(each.least_seconds, 1e-12)),
            )
            for o in fitting
        )

    def _plan(self, each: Trial) -> None:
        self._tell(each.candidate.text)
        each.tried = self.search.ask(each.candidate)
        if each.peak_bytes is None:
            each.why = f"refused: {each.tried.why_not}"
            return
        self.planned.append(each)
        if not each.fits:
            each.why = f"does not fit: {each.tried.why_not}"
            if each.peak_bytes > self.budget:
                self._close_larger(each)

    # -- why others are not planned ---------------------------------------------------------------

    def _close_if_too_large(self, each: Trial) -> None:
        if not each.why and each.least_bytes > self.budget:
            each.why = (
                f"does not fit: at least {size_text(each.least_bytes)} of "
                f"{size_text(self.budget)}, by what is saved, parameters and optimizer states"
            )

    def _close_larger(self, each: Trial) -> None:
        """Close larger batches of a setting that does not fit: they need no less."""
        batch, setting = each.candidate.batch or 1, each.candidate.key_without(())
        for other in self._open():
            larger = (other.candidate.batch or 1) > batch
            if larger and other.candidate.key_without(()) == setting:
                other.why = (
                    f"does not fit: a batch of {batch} needs {size_text(each.peak_bytes or 0)} of "
                    f"{size_text(self.budget)} already"
                )

    def best_time(self) -> float:
        """Seconds per sample of the best, times the ranks that compute it together."""
        return min(each.measures[0] for each in self._fitting())

    def smallest(self) -> float:
        """Bytes of the smallest that was planned."""
        return min((each.peak_bytes or 0 for each in self.planned), default=math.inf)

    def slack(self, best: float) -> float:
        """The part of the best's time by which a candidate that was not planned may be faster."""
        left = [each.measures[0] for each in self._open() if not self._is_last_resort(each)]
        return max(0.0, 1 - min(left, default=best) / best)

    def close_rest(self) -> None:
        """Note why each remaining candidate was not planned."""
        fitting = self._fitting()
        best = min((each.sample_time or 0.0 for each in fitting), default=math.inf)
        whose = "the best's" if self.shape.ranks == 1 else "its mesh's best's"
        for each in self._open():
            ratio, least = each.least_seconds / best, size_text(each.least_bytes)
            if not fitting:
                each.why = f"not planned, what was of this mesh does not fit: at least {least}"
            elif self._is_last_resort(each):
                each.why = "not planned: offload is for what fits in no other way"
            elif self._gain(each, fitting) <= math.log1p(self.enough):
                by = "its operators" if each.refined else "its FLOPs"
                each.why = f"pruned: at least {ratio:.2f}x {whose} time by {by}, and {least}"
            else:
                count = len(self.planned)
                others = "1 other was" if count == 1 else f"{count} others were"
                least = f"at least {least} and {ratio:.2f}x {whose} time"
                each.why = f"not planned, {others}: {least}"

    def refuse(self) -> NoReturn:
        """Raise DoesNotFitError that names the smallest."""
        rest = [each for each in self.trials if each.tried is None and each.least_bytes]
        for each in sorted(rest, key=lambda o: (o.least_bytes, o.candidate.rank))[:3]:
            if each.least_bytes < min((o.peak_bytes or 0 for o in self.planned), default=math.inf):
                self._plan(each)
        if not self.planned:
            reasons = "; ".join(dict.fromkeys(o.why for o in self.trials if o.why))
            raise ConfigError(f"no configuration can be planned: {reasons}")
        small = min(self.planned, key=lambda o: (o.peak_bytes, o.candidate.rank))
        batch = f", batch {small.candidate.batch}" if small.candidate.batch is not None else ""
        raise DoesNotFitError(
            f"nothing fits {size_text(self.budget)}: the smallest of {len(self.planned)} that were "
            f"planned needs {size_text(small.peak_bytes or 0)} ({small.setting}{batch}). Of "
            f"{len(self.trials)} configurations all others need more by their bounds, or were "
            f"not planned. Use more ranks, a smaller batch or other values in space=..."
        )
