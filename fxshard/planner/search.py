"""The search: plan what may be best, and nothing that a bound rules out.

Note: the order
===============
Exact figures cost a plan of the whole model; bounds (`fxshard.planner.bounds`) cost little. The one
with the least bound of time is planned next; a bound starts as that of FLOPs, and counts all
operators when its turn comes. Among bounds that are about equal, those come last that are like one
that did not fit, or like one that fits with more prefetch. The best is known as soon as the least
bound left is no less than its time, less `ENOUGH`. Every other plan behind the first that fits goes
to the front of memory against time: to the one whose bounds are below it by the largest factor.
While nothing has fitted, every third plan is the one with the least bound of memory.

With a limit of plans, what takes at least `TOO_SLOW` times the best's time is not looked at for the
front. Without one, the search ends when every configuration is planned, or proven to be no better.

Offload that nobody asked for is tried only where nothing fits without it: the optimizer's step on
the CPU has no figures in the cost model, which would favour it.

Black-box optimizers (Optuna's samplers, scipy.optimize's) were weighed and left: they propose from
what they have seen, know no bounds, and prove nothing; the space is finite, and its order is worth
more than its exploration.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from fxshard._torch import trees
from fxshard.bytesize import is_count, size_text
from fxshard.config import Config, Precision, grid
from fxshard.cost.hardware import Hardware
from fxshard.errors import ConfigError, DoesNotFitError, FxshardError
from fxshard.ir.program import Program, input_name
from fxshard.ir.units import configured_units
from fxshard.planner import what_ifs
from fxshard.planner.bounds import Resident, Stem, bounded, flop_seconds, stem_passes
from fxshard.planner.result import Outcome, Tuning, verdicts
from fxshard.planner.space import DOUBLINGS, PREFETCH, given_space, points
from fxshard.plans.plan import Plan, Steps, make_plan
from fxshard.plans.workload import Workload

ENOUGH = 0.02  # what is not faster by more than this part is not searched for
TOO_SLOW = 2.0
PLANS = 8  # of the whole model, unless told otherwise
BATCH = "batch"  # name of the open size

Progress = Callable[[int, str], None]  # (plans made, what is going on)


def tuned(
    workload: Workload,
    hardware: Hardware,
    budget: int,
    *,
    batches: Sequence[int] | None = None,
    space: Mapping[str, Iterable[Any]] | None = None,
    plans: int | None = PLANS,
    progress: Progress = lambda count, what: None,
) -> Tuning:
    """Search; see `fxshard.tune`."""
    return _Search(workload, hardware, budget, batches, space, plans, progress).run()


class _Search:
    """What is known of every point so far."""

    def __init__(
        self,
        workload: Workload,
        hardware: Hardware,
        budget: int,
        batches: Sequence[int] | None,
        space: Mapping[str, Iterable[Any]] | None,
        limit: int | None,
        progress: Progress,
    ) -> None:
        self.hardware, self.budget, self.progress = hardware, budget, progress
        self.limit = math.inf if limit is None else limit
        self.enough = 0.0 if limit is None else ENOUGH
        self.given = workload.config.given
        self.user_dynamic = workload.config.dynamic
        self.captures: dict[Any, Program] = {}
        self.steps: Steps = {}
        self.programs: dict[Any, Program] = {}  # stems
        self.planned = 0
        self.tried: list[Outcome] = []  # what was planned
        self.kinds: dict[int, Any] = {}  # per place of a point, what `_is_like` compares
        self.made: set[Any] = set()  # what is known to fit while the model is made
        self.stems: dict[Any, Stem | FxshardError] = {}
        self.calls: dict[int | None, Any] = {}
        self.example = _batch_of(workload)
        sizes, space = self._batches(batches), given_space(space)
        self.open = next((size for size in sizes if size and size > 1), sizes[0])
        self.workload = self._opened(workload)
        units = len(configured_units(workload.module, workload.config))
        every = points(workload.config, workload.world_size, hardware, units, sizes, space)
        self.last_resort = "offload" not in space
        self.outcomes: list[Outcome] = []
        for point in every:
            changes = {n: v for n, v in point.changes.items() if n != "world_size"}
            world = point.changes.get("world_size", workload.world_size)
            try:
                config, closed = workload.config.changed(changes), ""
                grid(world, config)
            except ConfigError as error:
                config, closed = workload.config, _refused(error)
            self.outcomes.append(Outcome(point, config, world, closed=closed))
        legal = next((each for each in self.outcomes if not each.closed), None)
        if legal is None:
            self._refuse()
        ranks = ("strategy", "world_size")  # of a strategy only some worlds are legal
        self.sharding = {n: v for n, v in legal.point.changes.items() if n in ranks}
        precision = {"mixed_precision": legal.config.mixed_precision}
        self.first = self._planned(self._at(self.open, self._stem_changes(precision)))
        self.resident = Resident(self.first)

    def run(self) -> Tuning:
        self._bound_all()
        self._spend(self.limit)
        if self.last_resort and not any(each.fits for each in self.outcomes):
            self.last_resort = False
            self._spend(self.planned + self.limit)
        if not any(each.fits for each in self.outcomes):
            self._refuse()
        slack = self._slack()
        self._close_rest()
        trials = verdicts(self.outcomes, self._samples, self.given)
        return Tuning(tuple(trials), self.budget, self.hardware, self.planned, slack)

    # -- the call, at a batch ---------------------------------------------------------------------

    def _batches(self, asked: Sequence[int] | None) -> list[int | None]:
        if self.example is None:
            if asked is not None:
                raise ConfigError("batches=...: the call has no tensor with a dimension for it.")
            return [None]
        if asked is None:
            return [self.example << power for power in range(DOUBLINGS + 1)]
        sizes = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, bytes) else []
        if not sizes or not all(map(is_count, sizes)):
            raise ConfigError(
                f"batches={asked!r}: expected a list of whole numbers >= 1, such as [1, 2, 4]."
            )
        return [*sorted(set(sizes))]

    def _opened(self, workload: Workload) -> Workload:
        """With the batch left open, as the user has named it or else wherever tensors have it."""
        if self.example is None or self.user_dynamic:
            return workload
        leaves, _ = trees.tree_flatten_with_path(workload.call)
        places = [
            (input_name(path), 0)
            for path, leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == self.example
        ]
        contiguous = all(leaf.is_contiguous() for _, leaf in leaves if _is_batched(leaf, self))
        dynamic = {BATCH: places} if contiguous else None
        return workload.changed({"dynamic": dynamic})

    def _at(self, batch: int | None, changes: dict[str, Any]) -> Workload:
        """The workload with another batch, and some options set."""
        if batch not in self.calls:
            call = self.workload.call
            if batch != self.example:
                plan = Plan((), self.workload)
                call = what_ifs.resized(plan, 0, self.example, batch or 1)
            self.calls[batch] = call
        args, kwargs = self.calls[batch]
        return self.workload.changed({**changes, "args": args, "kwargs": kwargs})

    def _planned(self, workload: Workload) -> Plan:
        return make_plan(workload, captures=self.captures, steps=self.steps, stems=self.programs)

    def _samples(self, batch: int | None) -> int:
        return (batch or 1) * self.workload.micro_batches

    # -- bounds -----------------------------------------------------------------------------------

    def _bound_all(self) -> None:
        """Bytes and FLOPs of every point; what is above the budget is closed."""
        for each in self.outcomes:
            if each.closed or not bounded(each.config, each.point.changes):
                continue
            precision = _traced(each.config.mixed_precision)
            if precision not in self._captured():
                each.least_seconds = self._by_dtype(each)
                each.least_bytes = self.resident.of(each.config, each.world_size, 0)
            else:
                self._bound(each)
            self._close_if_too_large(each)

    def _captured(self) -> set[Any]:
        return {precision for precision, *_ in self.stems} | {
            _traced(self.first.config.mixed_precision)
        }

    def _bound(self, each: Outcome) -> None:
        """By the stem of the open batch: its FLOPs, and what it saves at the point's batch."""
        stem = self._stem(each, self.open)
        if isinstance(stem, FxshardError):
            if each.point.batch == self.open:  # another batch may do
                each.closed = _refused(stem)
            return
        batch, opened = each.point.batch or 1, self.open or 1
        flops = stem.flops(batch / opened)
        each.least_seconds = self._per_sample(each, flop_seconds(flops, self.hardware))
        saved = stem.saved_bytes({n: self.open or 1 for n in stem.symbols})
        if batch != opened:
            sizes = dict.fromkeys(self._batch_names(stem), batch)
            fixed = {n: s for n, s in self._other_sizes(stem).items() if n not in sizes}
            saved = stem.saved_bytes({**fixed, **sizes}) if sizes else 0
        each.least_bytes = self.resident.of(each.config, each.world_size, saved, stem.reread_bytes)

    def _batch_names(self, stem: Stem) -> list[str]:
        domain = self.first.program.domain
        if domain is None:
            return []
        return [n for n in stem.symbols if any(dim == 0 for _, dim in domain.places[n])]

    def _other_sizes(self, stem: Stem) -> dict[str, int]:
        domain = self.first.program.domain
        sizes: dict[str, int] = {}
        for name in stem.symbols:
            assert domain is not None
            leaf, dim = domain.places[name][0]
            found: Any = domain.example[leaf]
            sizes[name] = found if dim is None else found[dim]
        return sizes

    def _by_dtype(self, each: Outcome) -> float:
        """FLOPs of a precision that was not traced: those of one that was, in its dtype.

        Taken for granted: what is multiplied in the dtype of the parameters there, is here.
        """
        first = self._stem(self.outcomes[0], self.open, self.first.config)
        there, here = self._dtype(self.first.config), self._dtype(each.config)
        if isinstance(first, FxshardError) or there is None or here is None:
            return 0.0
        flops: dict[torch.dtype, float] = {}
        for dtype, count in first.flops((each.point.batch or 1) / (self.open or 1)).items():
            own = here if dtype == there else dtype
            flops[own] = flops.get(own, 0.0) + count
        return self._per_sample(each, flop_seconds(flops, self.hardware))

    def _dtype(self, config: Config) -> torch.dtype | None:
        """In which parameters are multiplied, if it is one."""
        if isinstance(config.mixed_precision, Mapping):
            return None
        given = config.mixed_precision
        chosen = None if given is None else Precision.of(given).param_dtype
        params = self.first.program.params.values()
        return chosen or next((p.dtype for p in params if p.dtype.is_floating_point), None)

    def _per_sample(self, each: Outcome, compute: float) -> float:
        optimizer = self.resident.optimizer_seconds(each.config, each.world_size, self.hardware)
        count = self.workload.micro_batches
        return (compute * count + optimizer) / self._samples(each.point.batch)

    def _stem(
        self, each: Outcome, batch: int | None, config: Config | None = None
    ) -> Stem | FxshardError:
        config = config or each.config
        checkpoint, key = config.checkpoint, self._stem_key(config, batch)
        if key not in self.stems:
            self.progress(self.planned, f"tracing and bounding checkpoint={checkpoint}")
            changes: dict[str, Any] = {"mixed_precision": config.mixed_precision}
            if checkpoint is not None or "checkpoint" in self.given:
                changes["checkpoint"] = checkpoint
            try:
                plan = self._planned(self._at(batch, self._stem_changes(changes)))
                self.stems[key] = Stem.of(plan.program, self.hardware)
            except FxshardError as error:
                self.stems[key] = error
        return self.stems[key]

    def _stem_changes(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Those that make a stem; how it is sharded does not matter, as long as it is legal."""
        return {**self.sharding, **changes, "passes": stem_passes}

    def _stem_key(self, config: Config, batch: int | None) -> tuple[str, str, int | None]:
        return _traced(config.mixed_precision), repr(config.checkpoint), batch

    def _refine(self, each: Outcome) -> None:
        """Count all operators at the point's own batch."""
        each.refined = True
        if not bounded(each.config, each.point.changes):
            return
        if each.least_bytes == 0 or _traced(each.config.mixed_precision) not in self._captured():
            self._bound(each)
        if each.closed:
            return
        stem = self._stem(each, each.point.batch)
        if isinstance(stem, Stem):
            each.least_seconds = max(each.least_seconds, self._per_sample(each, stem.seconds))
            saved = sum(size for size, _ in stem.saved)
            least = self.resident.of(each.config, each.world_size, saved, stem.reread_bytes)
            each.least_bytes = max(each.least_bytes, least)
            self._close_if_too_large(each)
        else:
            each.closed = _refused(stem)

    def _close_if_too_large(self, each: Outcome) -> None:
        if not each.closed and each.least_bytes > self.budget:
            each.closed = (
                f"does not fit: at least {size_text(each.least_bytes)} of "
                f"{size_text(self.budget)}, by what is saved, parameters and optimizer states"
            )

    # -- what is planned --------------------------------------------------------------------------

    def _spend(self, limit: float) -> None:
        while self.planned < limit:
            left = [o for o in self._open() if not self._is_last_resort(o)]
            chosen = self._choose(left) if left else None
            if chosen is None:
                return
            if chosen.refined:
                self._plan(chosen)
                continue
            stem = self._stem_key(chosen.config, chosen.point.batch)
            for each in self._open():
                if not each.refined and self._stem_key(each.config, each.point.batch) == stem:
                    self._refine(each)

    def _open(self) -> list[Outcome]:
        return [o for o in self.outcomes if not o.closed and o.peak_bytes is None]

    def _is_last_resort(self, each: Outcome) -> bool:
        return self.last_resort and "offload" not in self.given and each.config.offload is not None

    def _choose(self, left: list[Outcome]) -> Outcome | None:
        fitting = [o for o in self.outcomes if o.fits]
        if not fitting:
            if self.planned % 3 == 2:
                return min(left, key=lambda o: (o.least_bytes, o.least_seconds, o.point.rank))
            return min(left, key=self._by_time)
        best = min(o.seconds or 0.0 for o in fitting)
        faster = [each for each in left if each.least_seconds < best * (1 - self.enough)]
        slowest = best * TOO_SLOW if self.limit < math.inf else math.inf
        moves = [
            (gain / (1 + 4 * self._unlikely(each)), -each.point.rank, i)
            for i, each in enumerate(left)
            if each.least_seconds <= slowest
            and (gain := self._gain(each, fitting)) > math.log1p(self.enough)
        ]
        if faster and (self.planned % 2 or not moves):
            return min(faster, key=self._by_time)
        return left[max(moves)[-1]] if moves else None

    def _by_time(self, each: Outcome) -> tuple[float, int, float, int]:
        """The least bound first; of those that are about equal, what is likelier to be the best."""
        about = round(math.log(max(each.least_seconds, 1e-12)) / ENOUGH)
        return about, self._unlikely(each), each.point.rank, each.least_bytes

    def _unlikely(self, each: Outcome) -> int:
        return sum(self._is_like(each, other) for other in self.tried)

    def _is_like(self, each: Outcome, other: Outcome) -> bool:
        """True if `other` was planned, with all but prefetch and reduction alike, to no avail."""
        if other.point.batch != each.point.batch or self._alike(each) != self._alike(other):
            return False
        more = all(
            getattr(other.config, name) >= getattr(each.config, name)
            for name in PREFETCH
            if isinstance(getattr(each.config, name), int)
            and isinstance(getattr(other.config, name), int)
        )
        return more or not other.fits

    def _alike(self, each: Outcome) -> Any:
        if each.point.rank not in self.kinds:
            config, aside = each.config, {*PREFETCH, "mixed_precision"}
            rest = {n: repr(v) for n, v in each.point.changes.items() if n not in aside}
            self.kinds[each.point.rank] = rest, _traced(config.mixed_precision)
        return self.kinds[each.point.rank]

    def _gain(self, each: Outcome, fitting: list[Outcome]) -> float:
        """By which factor, as a logarithm, its bounds are below the front."""
        return min(
            max(
                math.log((o.peak_bytes or 1) / max(each.least_bytes, 1)),
                math.log((o.seconds or 1e-12) / max(each.least_seconds, 1e-12)),
            )
            for o in fitting
        )

    def _plan(self, each: Outcome) -> None:
        self.progress(self.planned, each.point.text)
        changes = each.point.changes
        try:
            plan = self._planned(self._at(each.point.batch, changes))
            memory = plan.memory
            self.planned += 1
            each.peak_bytes = max(memory.peak_bytes, memory.first_step_peak_bytes)
            seconds = plan.estimate(self.hardware).step_seconds
            each.seconds = seconds / self._samples(each.point.batch)
            each.closed = self._too_large(each, plan)
        except FxshardError as error:
            each.closed = _refused(error)
        each.fits = not each.closed
        if each.peak_bytes is not None:
            self.tried.append(each)
        if each.fits:
            self._keep(each, plan)
        elif each.peak_bytes is not None and each.peak_bytes > self.budget:
            self._close_larger(each)

    def _too_large(self, each: Outcome, plan: Plan) -> str:
        """Why it does not fit, or ""; where only the schedule differs the model is made once."""
        peak = each.peak_bytes or 0
        if peak > self.budget:
            return f"does not fit: {size_text(peak)} of {size_text(self.budget)}"
        schedule = {*PREFETCH, "checkpoint", "reshard_after_forward"}
        key = tuple((n, repr(v)) for n, v in each.point.changes.items() if n not in schedule)
        if key in self.made and each.config.device != "cuda":
            return ""
        try:
            plan.memory.assert_fits(self.budget)
        except DoesNotFitError as error:
            return f"does not fit: {str(error).splitlines()[0]}"
        self.made.add(key)
        return ""

    def _keep(self, each: Outcome, plan: Plan) -> None:
        """The plan of the best so far; those of others would hold their graphs."""
        fitting = [o for o in self.outcomes if o.fits]
        best = min(fitting, key=lambda o: (o.seconds, o.peak_bytes, o.point.rank))
        for other in fitting:
            other.plan = (plan if other is each else other.plan) if other is best else None

    def _close_larger(self, each: Outcome) -> None:
        """Larger batches of what does not fit: a step of more samples needs no less."""
        batch, setting = each.point.batch or 1, each.point.without_batch()
        for other in self.outcomes:
            larger = (other.point.batch or 1) > batch and other.point.without_batch() == setting
            if larger and not other.closed and other.peak_bytes is None:
                other.closed = (
                    f"does not fit: a batch of {batch} needs {size_text(each.peak_bytes or 0)} of "
                    f"{size_text(self.budget)} already"
                )

    # -- what is left -----------------------------------------------------------------------------

    def _slack(self) -> float:
        """By how much something that was not planned may be faster than the best."""
        best = min(o.seconds or 0.0 for o in self.outcomes if o.fits)
        left = [o.least_seconds for o in self._open() if not self._is_last_resort(o)]
        return max(0.0, 1 - min(left, default=best) / best)

    def _close_rest(self) -> None:
        """Reasons of what was not planned."""
        fitting = [o for o in self.outcomes if o.fits]
        best = min(o.seconds or 0.0 for o in fitting)
        for each in self.outcomes:
            if each.closed or each.peak_bytes is not None:
                continue
            if self._is_last_resort(each):
                each.closed = "not planned: offload is for what fits in no other way"
                continue
            ratio = each.least_seconds / best
            by = "its operators" if each.refined else "its FLOPs"
            least = f"at least {size_text(each.least_bytes)} and {ratio:.2f}x the best's time"
            if self._gain(each, fitting) <= math.log1p(self.enough):
                slower = f"at least {ratio:.2f}x the best's time by {by}"
                each.closed = f"pruned: {slower}, and {size_text(each.least_bytes)}"
            else:
                others = "1 other was" if self.planned == 1 else f"{self.planned} others were"
                each.closed = f"not planned, {others}: {least}"

    def _refuse(self) -> NoReturn:
        """Raise DoesNotFitError that names the smallest."""
        known = [o for o in self.outcomes if o.peak_bytes is not None]
        rest = [o for o in self.outcomes if o.peak_bytes is None and o.least_bytes]
        lowest = min((o.peak_bytes or 0 for o in known), default=math.inf)
        for each in sorted(rest, key=lambda o: (o.least_bytes, o.point.rank))[:3]:
            if each.least_bytes < lowest:
                self._plan(each)
                lowest = min(lowest, each.peak_bytes or math.inf)
        known = [o for o in self.outcomes if o.peak_bytes is not None]
        if not known:
            reasons = "; ".join(dict.fromkeys(o.closed for o in self.outcomes if o.closed))
            raise ConfigError(f"no configuration can be planned: {reasons}")
        small = min(known, key=lambda o: (o.peak_bytes, o.point.rank))
        batch = f", batch {small.point.batch}" if small.point.batch is not None else ""
        raise DoesNotFitError(
            f"nothing fits {size_text(self.budget)}: the smallest of {len(known)} that were "
            f"planned needs {size_text(small.peak_bytes or 0)} ({small.point.text}{batch}). Of "
            f"{len(self.outcomes)} configurations all others need more by their bounds, or were "
            f"not planned. Use more ranks, a smaller batch or other values in space=..."
        )


def _is_batched(leaf: Any, search: _Search) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == search.example


def _batch_of(workload: Workload) -> int | None:
    return what_ifs.batch_size(Plan((), workload))


def _traced(policy: Any) -> Any:
    """What of a precision the trace sees: all but how gradients are reduced."""
    if policy is None or isinstance(policy, Mapping):
        return repr(policy)
    seen = dataclasses.replace(
        Precision.of(policy),
        reduce_dtype=None,
        keep_low_precision_grads=False,
        reduce_as_stored=False,
    )
    return repr(seen)


def _refused(error: Exception) -> str:
    return "refused: " + " ".join(str(error).split("\n")[0].split())
