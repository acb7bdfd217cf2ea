"""memory_budget: the settings with which a step fits into memory, at the least estimated time.

Searched are those of these options that the user has left at their defaults: resharding after
forward, prefetch, activation checkpointing, and offload, which is tried last and only on
accelerators. There, bytes of checkpoints choose what is offloaded too, unless the user forbids it
(`fxshard.cost.activations`). Times are those of `fxshard.cost.timeline` on the option `hardware`,
whatever the device: for a model on the CPU only their order counts. Every setting that is tried is
planned in full, from the first capture.

Note: what is not tried
=======================
Without checkpoints each resharding and prefetch is planned, less prefetch only if more does not
fit. A setting that does not fit is planned with budgets of saved activations, unless it is slower
without them than one that fits already, or no faster and no smaller than another one. A smaller
budget lowers the bytes at any point of the step by at most what is no longer saved. So after a plan
that needs too much, the next budget is what it saves less the excess, until that is below the least
that can be saved. Recomputed values need memory too, so this is no proof: if nothing fits, the
setting with the lowest peak is tried with budgets in equal steps, and with "full" and "selective".
If only CUDA's allocator finds no room, budgets go down in equal steps, and then by bisection.

Where activations may be offloaded, budgets that choose both are tried first. If what they find is
slower than the setting without checkpoints, so are budgets that only recompute, and offloading
alone: the result is never worse than either.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fxshard.bytesize import parse_bytes, size_text
from fxshard.config.checked import Config
from fxshard.config.checkpoints import CHECKPOINTS
from fxshard.errors import ConfigError, DoesNotFitError, TooLittleError
from fxshard.pipeline import Observer
from fxshard.planner.search import Search, edge, middle
from fxshard.planner.space import PREFETCH, RESHARD, Candidate, Choice, schedules
from fxshard.plans.answers import Chosen, Tried, tried_table
from fxshard.plans.plan import Plan, make_plan
from fxshard.plans.workload import Workload
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld

log: logging.Logger = logging.getLogger("fxshard")

FREE = ("strategy", RESHARD, *PREFETCH, "checkpoint", "offload", "offload_activations")
STEPS = 8  # of budgets of activations where none can be computed; then as many parts of a step
ENOUGH = 1.01  # times the compute time alone: a setting that is as fast ends the search


def fitting(plan: Plan) -> Plan:
    """The fastest plan found that fits the ``memory_budget`` of `plan`.

    Args:
        plan: with all searched options at their defaults.

    Returns:
        The plan; its ``chosen`` lists what was tried.

    Raises:
        DoesNotFitError: none was found; the text has every setting that was tried.
    """
    return _Fastest(plan).run()


def planned(workload: Workload, observe: Observer | None = None) -> Plan:
    """The plan of a workload; with a ``memory_budget``, the fastest found that fits."""
    plan = make_plan(workload, observe=observe)
    return plan if workload.config.memory_budget is None else fitting(plan)


def within_budget(
    module: nn.Module, call: Any, world: C10dWorld | InProcessWorld, config: Config
) -> Config:
    """`config` with what ``memory_budget`` chooses; the same on all ranks."""
    ranks = world.size if config.strategy != "no_shard" else world.replicas
    size = (world.replicas, world.size) if config.hybrid else ranks
    plan = planned(Workload(module, call, size, config))
    log.info("fxshard: %s", plan.chosen)
    return plan.config


class _Fastest:
    """The search from one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.given = plan, plan.config.given
        self.saved: dict[Any, int] = {}  # per candidate, bytes of activations kept for backward
        self.search = Search(
            self._make,
            parse_bytes(plan.config.memory_budget or 0),
            lambda _, tried: tried.seconds,
            hardware=plan.config.hardware,
            refusals=(DoesNotFitError, ConfigError),
        )
        self.most_saved = self.least_saved = saved_bytes(plan)
        self.checkpoints = len(plan.units) > 1 and "checkpoint" not in self.given
        self.offloads = self._may_offload()
        self.least: dict[bool, int] = {}  # by whether a budget is of recomputation alone
        if self.checkpoints:
            self.least_saved = self._least_saved({})

    def run(self) -> Plan:
        for offload in self._offloads():
            self._try_all(offload)
            found, plan = self.search.best, self.search.plan
            if found is not None and plan is not None:
                plan.chosen = Chosen(
                    **vars(found),
                    budget_bytes=self.search.budget,
                    tried=tuple(self.search.tried),
                    asked=self.plan.workload,
                )
                return plan
        raise DoesNotFitError(
            f"memory_budget={size_text(self.search.budget)}: nothing that was tried fits.\n"
            f"{tried_table(self.search.tried)}\n{self._advice()}"
        )

    def _make(self, candidate: Candidate) -> Plan:
        made = self.plan.replan(**candidate.changes)
        self.saved[candidate.key] = saved_bytes(made)
        return made

    def _ask(self, changes: Choice) -> Tried:
        return self.search.ask(Candidate(changes))

    def _offloads(self) -> list[Choice]:
        if "offload" in self.given or not self._on_accelerator():
            return [{}]
        return [{}, {"offload": CPUOffloadPolicy()}]

    def _on_accelerator(self) -> bool:
        return (self.plan.config.device or self.plan.program.device.type) != "cpu"

    def _may_offload(self) -> bool:
        """True if activations are offloaded where that is the fastest, without being asked for."""
        free = self.plan.config.offload_activations is None
        chosen = self.plan.config.changed({"checkpoint": 0}).chooses_offloads
        return free and (chosen or (chosen is None and self._on_accelerator()))

    def _try_all(self, offload: Choice) -> None:
        """Every schedule, then checkpoints with those that do not fit."""
        settings = [{**each, **offload} for each in schedules(self.plan.config, self.plan.program)]
        if not self._can_be_made(offload):
            self._ask(settings[0])
            return
        failed = self._without_checkpoints(settings)
        if not failed or not (self.checkpoints or self.offloads):
            return
        least = math.inf  # the peak of those before
        for each in sorted(failed, key=lambda each: (each.seconds, each.peak_bytes)):
            if (each.peak_bytes or 0) >= least:
                continue  # no faster, and no smaller
            least, best = each.peak_bytes or 0, self.search.best
            if best is None or (each.seconds or 0.0) < (best.seconds or 0.0):
                self._relieved(each)
        if self.search.best is None and self.checkpoints:
            self._try_all_budgets(min(failed, key=lambda each: each.peak_bytes or 0))

    def _can_be_made(self, offload: Choice) -> bool:
        """True if the sharded model fits while it is made, which no schedule changes."""
        plan = self.plan.replan(**offload) if offload else self.plan
        made = [p.peak_bytes for p in plan.memory.lifecycle if p.name.startswith("init")]
        return max(made, default=0) <= self.search.budget

    def _without_checkpoints(self, settings: list[Choice]) -> list[Tried]:
        """Plan those of the settings that may be the fastest; returns those that need too much."""
        tried: list[Tried] = []
        for changes in settings:
            if any(each.fits and _prefetches_more(each.changes, changes) for each in tried):
                continue  # less prefetch makes no step faster
            tried.append(self._ask(changes))
            if self.search.best is tried[-1] and self.search.plan is not None:
                alone = self.search.plan.estimate().compute_seconds
                if (tried[-1].seconds or 0.0) <= ENOUGH * alone:
                    break
        return [each for each in tried if not each.fits and each.peak_bytes is not None]

    def _leaves(self, changes: Choice) -> bool:
        return self.offloads and changes.get("offload") is None

    def _relieved(self, plain: Tried) -> None:
        """One setting with less that is saved on the device."""
        leaves, alone = self._leaves(plain.changes), {"offload_activations": False}
        if self.checkpoints:
            self._with_checkpoints(plain, {} if leaves or not self.offloads else alone)
        best = self.search.best
        if not leaves:
            return
        if best is None or (plain.seconds or 0.0) < (best.seconds or 0.0):
            self._ask({**plain.changes, "offload_activations": True})
            if self.checkpoints:
                self._with_checkpoints(plain, alone)

    def _with_checkpoints(self, plain: Tried, alone: Choice) -> None:
        """The largest budget of saved activations with which one setting fits: see the note.

        Args:
            plain: the setting.
            alone: what is changed besides, so that only recomputation is chosen.
        """
        least, failed = self._least_saved(alone), [plain]
        most = self._saved_with(plain)
        step = max((most - least) // STEPS, 1)

        def fits(size: int) -> bool:
            tried = self._ask({**plain.changes, "checkpoint": size, **alone})
            if not tried.fits:
                failed.append(tried)
            return tried.fits

        def guess(good: int, bad: int) -> int | None:
            excess = (failed[-1].peak_bytes or 0) - self.search.budget
            by_steps = excess <= 0  # only CUDA's allocator finds no room
            if good >= least:
                return middle(good, bad) if by_steps and bad - good > step // STEPS else None
            size = self._saved_with(failed[-1]) - (step if by_steps else excess)
            return size if size >= least else None

        edge(fits, least - 1, most, guess)

    def _least_saved(self, alone: Choice) -> int:
        """The fewest bytes of activations that checkpoints can leave between the phases."""
        if bool(alone) not in self.least:
            self.least[bool(alone)] = 0
            try:
                self.plan.replan(checkpoint=0, **alone)
            except TooLittleError as error:
                self.least[bool(alone)] = error.least_bytes
        return self.least[bool(alone)]

    def _saved_with(self, tried: Tried) -> int:
        return self.saved.get(Candidate(tried.changes).key, 0)

    def _try_all_budgets(self, plain: Tried) -> None:
        """Before refusing: budgets in equal steps, and the policies that have no budget."""
        most = self.most_saved - max((plain.peak_bytes or 0) - self.search.budget, 0)
        least = self.least_saved
        if most < least:
            return
        step = max((most - least) // STEPS, 1)
        policies: list[Choice] = [{"checkpoint": policy} for policy in CHECKPOINTS]
        if self._leaves(plain.changes):
            policies = [{**each, "offload_activations": True} for each in policies] + policies
        sizes = [{"checkpoint": size} for size in (least, *range(least + step, most, step))]
        for policy in (sizes[0], *policies, *sizes[1:]):
            if self._ask({**plain.changes, **policy}).fits:
                return

    def _advice(self) -> str:
        fixed = [name for name in FREE if name in self.given]
        held = f" {', '.join(fixed)} stayed as given." if fixed else ""
        either = "checkpoints and offloading" if self.offloads else "checkpoints"
        what = f"{either} can leave no less than" if self.checkpoints else "there are"
        return (
            f"Between forward and backward {what} {size_text(self.least_saved)} of activations."
            f"{held} Use more ranks, a smaller batch or lower precision; "
            f"Plan.memory.explain_peak() shows what is alive and what else would save."
        )


def _prefetches_more(changes: Choice, others: Choice) -> bool:
    """True if two settings are alike, and one prefetches more."""
    rest = {name for name in changes if name not in PREFETCH}
    return all(changes[name] == others[name] for name in rest) and any(
        changes[name] > others[name] for name in PREFETCH if name in others
    )


def saved_bytes(plan: Plan) -> int:
    """Bytes of activations on the device between forward and backward of the last micro-batch."""
    return sum(each.bytes for each in plan.memory.kept_for_backward() if not each.on_cpu)
