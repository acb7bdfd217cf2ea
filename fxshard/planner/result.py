"""What came out of tuning: the best, the front, and why each loser lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxshard.bytesize import size_text
from fxshard.config import Config
from fxshard.cost.hardware import Hardware
from fxshard.memory.views.plots import Dot
from fxshard.planner.space import Point
from fxshard.plans.plan import Plan

ROWS = 10  # of losers in the table


@dataclasses.dataclass(frozen=True)
class Trial:
    """One configuration, and what became of it.

    Attributes:
        number: its place in `Tuning.trials`, from 1; the best is the first.
        options: for `fxshard.compile` and `fxshard.plan`, with what the user has given; the world
            size is apart.
        world_size: number of ranks; for a hybrid strategy a pair, replicas x shards.
        batch: samples per rank and micro-batch; None: the call has no such dimension.
        samples: per rank and step; 1 if there is no batch.
        config: `options`, checked; None if they were refused.
        setting: what was searched, as text.
        peak_bytes: the larger of the peaks of the first and of a later step, of a plan of the
            whole model; None if it was not planned.
        step_time: estimated seconds per step of that plan; None likewise.
        fits: it was planned, and is within the budget.
        on_front: nothing that fits is better in one of memory and time per sample, and no worse
            in the other.
        why: of the best, "best"; of others, why not.
        plan: of the best; None of others.
    """

    number: int
    options: dict[str, Any]
    world_size: int | tuple[int, int]
    batch: int | None
    samples: int
    config: Config | None
    setting: str
    peak_bytes: int | None
    step_time: float | None
    fits: bool
    on_front: bool = False
    why: str = ""
    plan: Plan | None = None

    @property
    def sample_time(self) -> float | None:
        """Seconds per step and sample of a rank."""
        return None if self.step_time is None else self.step_time / self.samples


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of `fxshard.tune`; ``str()`` is a table.

    Attributes:
        trials: every configuration of the space: what fits by time, then what does not, then what
            was not planned.
        budget_bytes: of one rank.
        hardware: times are for it.
        planned: how many plans of the whole model were made.
        slack: by how much a configuration that was not planned may be faster than the best, as a
            part of its time: 0.01 is one percent.
    """

    trials: tuple[Trial, ...]
    budget_bytes: int
    hardware: Hardware
    planned: int
    slack: float

    @property
    def best(self) -> Trial:
        """The fastest per sample that fits."""
        return self.trials[0]

    @property
    def front(self) -> tuple[Trial, ...]:
        """Of what fits, the Pareto front of memory against time per sample, the fastest first."""
        return tuple(trial for trial in self.trials if trial.on_front)

    def dots(self) -> list[Dot]:
        """What was planned, for `fxshard.memory.views.plots`."""
        from fxshard.memory.views.plots import Dot

        return [
            Dot(t.setting, t.peak_bytes, t.sample_time, t.fits, t.on_front, t.number == 1)
            for t in self.trials
            if t.peak_bytes is not None and t.sample_time is not None
        ]

    def plot(self, path: str | Path) -> None:
        """Memory against time per sample, as PNG.

        Args:
            path: of the file.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        from fxshard.memory.views.plots import plot_front

        plot_front(path, self.dots(), self.budget_bytes)

    def table(self, *, rows: int | None = ROWS) -> str:
        """One line per configuration.

        Args:
            rows: how many of those that are not on the front; None: all.

        Returns:
            Text; each peak with its unit, times in milliseconds per sample.
        """
        front = {trial.number for trial in self.front}
        others = [trial for trial in self.trials if trial.number not in front]
        shown = others if rows is None else others[:rows]
        chosen = sorted([*self.front, *shown], key=lambda trial: trial.number)
        lines = [_row(trial) for trial in chosen]
        headers = ("#", "configuration", "batch", "peak", "ms / sample", "")
        text = tabulate(lines, headers, disable_numparse=True)
        left = len(others) - len(shown)
        return f"{text}\n... and {left} more." if left else text

    def summary(self) -> str:
        """What was searched, and what the best is."""
        best = self.best
        proof = f"what was not planned may take up to {self.slack:.1%} less time"
        if not self.slack:
            proof = "nothing else is faster"
        return (
            f"Best of {len(self.trials)} configurations for {size_text(self.budget_bytes)} on "
            f"{self.hardware.name}: {best.setting}"
            f"{f', batch {best.batch}' if best.batch is not None else ''}; "
            f"{size_text(best.peak_bytes or 0)}, {1e3 * (best.step_time or 0):.4g} ms a step "
            f"estimated.\n{self.planned} planned whole; {proof} (docs/tune.md)."
        )

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.table()}"


def _row(trial: Trial) -> tuple[str, ...]:
    peak = "-" if trial.peak_bytes is None else size_text(trial.peak_bytes)
    time = "-" if trial.sample_time is None else f"{1e3 * trial.sample_time:.4g}"
    mark = "front: " if trial.on_front and trial.number > 1 else ""
    batch = "-" if trial.batch is None else str(trial.batch)
    return f"{trial.number}", trial.setting, batch, peak, time, mark + trial.why


@dataclasses.dataclass
class Outcome:
    """What the search knows of a point.

    Attributes:
        point: the configuration.
        config, world_size: with the user's options.
        least_seconds, least_bytes: per sample, and at the peak, at least.
        refined: `least_seconds` counts every operator, not only FLOPs.
        peak_bytes, seconds: per sample, of its plan.
        fits: it was planned, and fits.
        closed: "" while it may still be planned; else why not.
        plan: while it is the best.
    """

    point: Point
    config: Config
    world_size: int | tuple[int, int]
    least_seconds: float = 0.0
    least_bytes: int = 0
    refined: bool = False
    peak_bytes: int | None = None
    seconds: float | None = None
    fits: bool = False
    closed: str = ""
    plan: Plan | None = None


def verdicts(outcomes: Sequence[Outcome], samples_of: Any, given: frozenset[str]) -> list[Trial]:
    """Trials in order, each with its reason.

    Args:
        outcomes: of all points.
        samples_of: per batch, the samples of a rank in a step.
        given: names of the options that the user has given.
    """
    ordered = sorted(outcomes, key=_order)
    front = _front([each for each in ordered if each.fits])
    best = ordered[0] if ordered and ordered[0].fits else None
    found = []
    for number, each in enumerate(ordered, start=1):
        samples = samples_of(each.point.batch)
        names = given | (each.point.changes.keys() - {"world_size"})
        changes = each.point.changes
        options = {name: changes.get(name, getattr(each.config, name)) for name in sorted(names)}
        trial = Trial(
            *(number, options, each.world_size, each.point.batch, samples, each.config),
            setting=each.point.text,
            peak_bytes=each.peak_bytes,
            step_time=None if each.seconds is None else each.seconds * samples,
            fits=each.fits,
            on_front=number - 1 in front,
            why=each.closed or _why(ordered, number - 1, front, best),
            plan=each.plan if each is best else None,
        )
        found.append(trial)
    return found


def _order(each: Outcome) -> tuple[Any, ...]:
    seconds = each.least_seconds if each.seconds is None else each.seconds
    kind = 0 if each.fits else 1 if each.peak_bytes is not None else 2
    size = each.least_bytes if each.peak_bytes is None else each.peak_bytes
    return kind, seconds, size, each.point.rank


def _front(fitting: Sequence[Outcome]) -> set[int]:
    """Positions of the front in a list by time; of equal ones the first."""
    found, least = set(), None
    for position, each in enumerate(fitting):
        assert each.peak_bytes is not None
        if least is None or each.peak_bytes < least:
            found.add(position)
            least = each.peak_bytes
    return found


def _why(ordered: Sequence[Outcome], at: int, front: set[int], best: Outcome | None) -> str:
    """Of what fits: how it compares with the best, or with what dominates it."""
    mine = ordered[at]
    if best is None or mine is best:
        return "best"
    assert best.seconds is not None and best.peak_bytes is not None
    assert mine.seconds is not None and mine.peak_bytes is not None
    if at in front:
        saved = size_text(best.peak_bytes - mine.peak_bytes)
        return f"slower: {_times(mine.seconds, best.seconds)} of the best, {saved} less"
    by = max(i for i in front if i < at)  # the smallest of those that are as fast
    other = ordered[by]
    assert other.seconds is not None and other.peak_bytes is not None
    more = mine.peak_bytes - other.peak_bytes
    memory = f"{size_text(more)} more" if more else "same memory"
    if mine.seconds == other.seconds:
        time = "same time"
    elif other is best and not more:
        return f"slower: {_times(mine.seconds, best.seconds)} of the best, same memory"
    else:
        time = f"{_times(mine.seconds, other.seconds)} its time"
    return f"dominated by #{by + 1}: {time}, {memory}"


def _times(seconds: float, others: float) -> str:
    ratio = seconds / others
    return f"{ratio:.2f}x" if ratio >= 1.005 else f"{ratio:.4f}x"
