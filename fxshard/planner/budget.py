"""memory_budget: the settings with which a step fits into memory, at the least estimated time.

Free is what the user has left at its default: resharding after forward, prefetch, activation
checkpointing, and offload, which is tried last and only on accelerators. A setting counts as
fitting if `MemoryReport.assert_fits` says so of its plan; its time is that of
`fxshard.cost.timeline`, on an H100, whatever the device: for a model on the CPU it stands for the
order only. Every setting that is tried is planned whole, from the first capture.

Note: what is not tried
=======================
Without checkpoints each resharding and prefetch is planned, less prefetch only if more does not
fit. What does not fit is planned with budgets of saved activations, unless its time without any is
above that of one that fits already. A smaller budget takes from a point of the step what is not
saved any more, at most. So of a plan that needs too much, the next budget is what it saves less
what is too much, until that is below the least that can be saved. What is made again in place of it
makes this no proof: if nothing fits, of the setting with the lowest peak budgets are tried in equal
steps, and "full" and "selective". Where CUDA's allocator is what finds no room, budgets go down in
equal steps, and then halve what lies between.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from fxshard.bytesize import parse_bytes, size_text
from fxshard.errors import ConfigError, DoesNotFitError, TooLittleError
from fxshard.plans.answers import Picked, Tried, tried_table
from fxshard.plans.plan import Plan

HARDWARE = "h100"
RESHARD = "reshard_after_forward"
PREFETCH = ("forward_prefetch", "backward_prefetch")
PICKED = ("strategy", RESHARD, *PREFETCH, "checkpoint", "offload")
DEPTHS = (2, 1, 0)  # of prefetch
STEPS = 8  # budgets of activations that are tried downwards, where none is known to fit
HALVINGS = 3  # of what lies between a budget that fits and one that does not
ENOUGH = 1.01  # times what compute alone takes: a setting as fast as that ends the search


def fitting(plan: Plan) -> Plan:
    """The fastest plan found that fits the ``memory_budget`` of `plan`; its ``picked`` says more.

    Args:
        plan: with all that is free at its default.

    Raises:
        DoesNotFitError: none was found; the text has every setting that was tried.
    """
    return _Search(plan).run()


class _Search:
    """Settings that were planned so far, and the best of those that fit."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.given = plan, plan.config.given
        self.budget = parse_bytes(plan.config.memory_budget or 0)
        self.tried: list[Tried] = []
        self.plans: list[Plan | None] = []  # of what fits
        self.kept: list[int] = []  # bytes of activations between forward and backward
        self.saved = kept_bytes(plan)
        self.checkpoints = len(plan.units) > 1 and "checkpoint" not in self.given
        self.floor = self._least_saved() if self.checkpoints else self.saved

    def run(self) -> Plan:
        for offload in self._offloads():
            if not self._can_be_made(offload):
                continue
            self._without_checkpoints(offload)
            if self.checkpoints:
                self._with_checkpoints(offload)
            if self._best() is not None:
                break
        best = self._best()
        if best is None:
            raise DoesNotFitError(
                f"memory_budget={size_text(self.budget)}: nothing that was tried fits.\n"
                f"{tried_table(self.tried)}\n{self._advice()}"
            )
        found, plan = self.tried[best], self.plans[best]
        assert plan is not None and found.peak_bytes is not None and found.seconds is not None
        plan.picked = Picked(
            *(self.budget, found.changes, found.peak_bytes, found.seconds, tuple(self.tried)),
            self.plan.workload,
        )
        return plan

    # -- what is free ----------------------------------------------------------------------------

    def _offloads(self) -> list[dict[str, Any]]:
        device = self.plan.config.device or self.plan.program.device.type
        if "offload" in self.given or device == "cpu":
            return [{}]
        return [{}, {"offload": CPUOffloadPolicy()}]

    def _schedules(self) -> list[dict[str, Any]]:
        """Resharding and prefetch, the default first."""
        if self.plan.program.world_size == 1:
            return [{}]
        reshards: list[dict[str, Any]] = [{}]
        if not self.given & {"strategy", RESHARD}:
            reshards = [{RESHARD: True}, {RESHARD: False}]
        names = set(PREFETCH) - self.given
        depths = [dict.fromkeys(sorted(names), depth) for depth in DEPTHS] if names else [{}]
        both = [{**reshard, **depth} for reshard, depth in itertools.product(reshards, depths)]
        config = self.plan.config
        return sorted(both, key=lambda each: any(getattr(config, n) != each[n] for n in names))

    def _least_saved(self) -> int:
        """The fewest bytes of activations that checkpoints can leave between the phases."""
        try:
            self.plan.replan(checkpoint=0)
        except TooLittleError as error:
            return error.least_bytes
        return 0

    # -- the search ------------------------------------------------------------------------------

    def _can_be_made(self, offload: dict[str, Any]) -> bool:
        """True if the sharded model fits while it is made, which no schedule changes."""
        plan = self.plan.replan(**offload) if offload else self.plan
        made = [p.peak_bytes for p in plan.memory.lifecycle if p.name.startswith("init")]
        if max(made, default=0) > self.budget:
            self._try({**self._schedules()[0], **offload})
            return False
        return True

    def _without_checkpoints(self, offload: dict[str, Any]) -> None:
        for schedule in self._schedules():
            if self._fits_with_more(schedule, offload):
                continue
            at = self._try({**schedule, **offload})
            plan = self.plans[at]
            if plan is None or self.tried[at].why_not:
                continue
            alone = plan.estimate(HARDWARE).compute_seconds
            if (self.tried[at].seconds or 0.0) <= ENOUGH * alone:
                return

    def _fits_with_more(self, schedule: dict[str, Any], offload: dict[str, Any]) -> bool:
        """True if it fits with more prefetch already: with less no step is faster."""
        return any(
            not each.why_not
            and each.changes.keys() == {**schedule, **offload}.keys()
            and each.changes.get(RESHARD) == schedule.get(RESHARD)
            and any(each.changes[name] > schedule[name] for name in PREFETCH if name in schedule)
            for each in self.tried
        )

    def _with_checkpoints(self, offload: dict[str, Any]) -> None:
        plain = [
            (at, each)
            for at, each in enumerate(self.tried)
            if ("offload" in each.changes) == bool(offload)
            and each.why_not
            and each.peak_bytes is not None
        ]
        plain.sort(key=lambda pair: (pair[1].seconds or 0.0, pair[1].peak_bytes or 0, pair[0]))
        seen: set[Any] = set()
        for at, each in plain:
            alike = each.seconds, each.peak_bytes
            if alike not in seen and not self._is_too_slow(each):
                self._search_budget(at)
            seen.add(alike)
        if plain and self._best() is None:
            _, lowest = min(plain, key=lambda pair: pair[1].peak_bytes or 0)
            self._try_all_sizes(lowest)

    def _is_too_slow(self, each: Tried) -> bool:
        best = self._best()
        return best is not None and (each.seconds or 0.0) >= (self.tried[best].seconds or 0.0)

    def _search_budget(self, at: int) -> None:
        """The largest budget of saved activations with which one setting fits: see the note."""
        changes = self.tried[at].changes
        fails, fits, stepped = self.kept[at], None, False
        step = max((self.kept[at] - self.floor) // STEPS, 1)
        while fits is None:
            excess = (self.tried[at].peak_bytes or 0) - self.budget
            stepped = excess <= 0  # CUDA's allocator is what finds no room
            fails = self.kept[at]
            size = fails - (step if stepped else excess)
            if size < self.floor:
                return
            at = self._try({**changes, "checkpoint": size})
            if not self.tried[at].why_not:
                fits = size
        for _ in range(HALVINGS if stepped else 0):
            middle = (fits + fails) // 2
            if self.tried[self._try({**changes, "checkpoint": middle})].why_not:
                fails = middle
            else:
                fits = middle

    def _try_all_sizes(self, each: Tried) -> None:
        """Before it is refused: budgets down to the least, and what is no budget."""
        most = self.saved - max((each.peak_bytes or 0) - self.budget, 0)  # see the note above
        if most < self.floor:
            return
        step = max((most - self.floor) // STEPS, 1)
        for policy in (self.floor, "full", "selective", *range(self.floor + step, most, step)):
            at = self._try({**each.changes, "checkpoint": policy})
            if not self.tried[at].why_not:
                return

    def _try(self, changes: dict[str, Any]) -> int:
        """Plan one setting; returns its place in `tried`."""
        for at, each in enumerate(self.tried):
            if each.changes == changes:
                return at
        plan, found, kept = None, Tried(changes, None, None), 0
        try:
            plan = self.plan.replan(**changes)
            memory, kept = plan.memory, kept_bytes(plan)
            peak = max(memory.peak_bytes, memory.first_step_peak_bytes)
            found = Tried(changes, peak, plan.estimate(HARDWARE).step_seconds)
            if peak > self.budget:
                found = dataclasses.replace(found, why_not=self._excess(peak, changes))
            else:
                memory.assert_fits(self.budget)
        except (DoesNotFitError, ConfigError) as error:
            why = " ".join(str(error).partition("\n")[0].partition(": ")[0].split())
            found = dataclasses.replace(found, why_not=why)
        self.tried.append(found)
        self.plans.append(None if found.why_not else plan)
        self.kept.append(kept)
        return len(self.tried) - 1

    def _excess(self, peak: int, changes: dict[str, Any]) -> str:
        text = f"{size_text(peak - self.budget)} too much"
        free = self.saved - self.floor
        if not self.checkpoints or "checkpoint" in changes or peak - free <= self.budget:
            return text
        return f"{text}, checkpoints take off {size_text(free)} at most"

    def _best(self) -> int | None:
        fitting = [i for i, each in enumerate(self.tried) if not each.why_not]
        return min(fitting, key=lambda i: (self.tried[i].seconds or 0.0, i), default=None)

    def _advice(self) -> str:
        fixed = [name for name in PICKED if name in self.given]
        held = f" {', '.join(fixed)} stayed as given." if fixed else ""
        what = "checkpoints can leave no less than" if self.checkpoints else "there are"
        return (
            f"Between forward and backward {what} {size_text(self.floor)} of activations.{held} "
            f"Use more ranks, a smaller batch or lower precision; Plan.memory.explain_peak() "
            f"shows what is alive and what else would save."
        )


def kept_bytes(plan: Plan) -> int:
    """Bytes of activations that live between forward and backward of the last micro-batch."""
    return sum(each.bytes for each in plan.memory.kept_for_backward())
