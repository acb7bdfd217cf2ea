"""The result of tuning: the best, the front, and why the others are not the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxshard.bytesize import size_text
from fxshard.config.checked import Config
from fxshard.hardware import Hardware
from fxshard.memory.views.plots import Dot
from fxshard.planner.space import Candidate
from fxshard.plans.answers import Tried
from fxshard.plans.plan import Plan
from fxshard.runtime.world.mesh import CONTEXTS

ROWS = 10  # of losers in the table
TP = "tp"  # what torchtitan calls the dimension of tensor parallelism


@dataclasses.dataclass(frozen=True)
class Together:
    """How many ranks compute a sample together.

    Attributes:
        tp: of tensor parallelism.
        cp: that have parts of its sequences; parameters are sharded over them too.
    """

    tp: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        """Of both."""
        return self.tp * self.cp

    @property
    def dims(self) -> dict[str, int]:
        """Dimensions of a mesh with more than one rank, the outermost first."""
        return {name: size for name, size in ((CONTEXTS, self.cp), (TP, self.tp)) if size > 1}


@dataclasses.dataclass
class Trial:
    """One configuration, and its result.

    Attributes:
        candidate: what was searched.
        config: its options, checked; the user's own if they were refused.
        world_size: number of ranks; for a hybrid strategy a pair, replicas x shards.
        samples: per rank and step; 1 if there is no batch.
        why: "best", or why it is not the best; "" while it may still be planned.
        least_seconds, least_bytes: bounds, per sample and at the peak; 0 where none are known.
        refined: `least_seconds` counts every operator, not only FLOPs.
        tried: bytes and seconds of its plan; None if it was not planned.
        number: its place in `Tuning.trials`, from 1; the best is the first.
        on_front: nothing that fits is better in one of memory and time per sample, and no worse
            in the other.
        plan: of the best; None of others.
        shape: ranks that compute a sample together.
    """

    candidate: Candidate
    config: Config
    world_size: int | tuple[int, int]
    samples: int
    why: str = ""
    least_seconds: float = 0.0
    least_bytes: int = 0
    refined: bool = False
    tried: Tried | None = None
    number: int = 0
    on_front: bool = False
    plan: Plan | None = None
    shape: Together = Together()

    @property
    def together(self) -> int:
        """How many ranks compute a sample together."""
        return self.shape.ranks

    @property
    def mesh(self) -> dict[str, int]:
        """Its mesh, by torchtitan's names of dimensions.

        Without "tp" `parallelize` has no use, and without "cp" a `context` of attention has none.
        ``init_device_mesh("cuda", tuple(mesh.values()), mesh_dim_names=tuple(mesh))`` makes it.
        """
        pair = self.world_size
        *replicas, shards = pair if isinstance(pair, tuple) else (pair,)
        found = dict(zip(("dp_replicate",), replicas, strict=False))
        return {**found, "dp_shard": shards // self.shape.cp, **self.shape.dims}

    @property
    def options(self) -> dict[str, Any]:
        """For `fxshard.compile` and `fxshard.plan`, with what the user has given.

        The world size is apart.
        """
        changes = self.candidate.changes
        names = self.config.given | changes.keys() - {"world_size"}
        return {name: changes.get(name, getattr(self.config, name)) for name in sorted(names)}

    @property
    def batch(self) -> int | None:
        """Samples per rank and micro-batch; None: the call has no such dimension."""
        return self.candidate.batch

    @property
    def setting(self) -> str:
        """What was searched, as text."""
        sizes = (f"{name}={size}" for name, size in reversed(self.shape.dims.items()))
        return ", ".join([*sizes, self.candidate.text])

    @property
    def fits(self) -> bool:
        """It was planned, and is within the budget."""
        return self.tried is not None and self.tried.fits

    @property
    def peak_bytes(self) -> int | None:
        """The larger of the peaks of the first and of a later step; None if it was not planned."""
        return None if self.tried is None else self.tried.peak_bytes

    @property
    def step_time(self) -> float | None:
        """Estimated seconds per step; None if it was not planned."""
        return None if self.tried is None else self.tried.seconds

    @property
    def sample_time(self) -> float | None:
        """Seconds per step and sample of a rank, or of ranks that compute it together."""
        return None if self.step_time is None else self.step_time / self.samples

    @property
    def measures(self) -> tuple[float, int]:
        """Seconds per sample, of all ranks together that compute it, and bytes at the peak.

        Of its plan, or else at least.
        """
        if self.sample_time is None or self.peak_bytes is None:
            return self.least_seconds * self.together, self.least_bytes
        return self.sample_time * self.together, self.peak_bytes


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of `fxshard.tune`; ``str()`` is a table.

    Attributes:
        trials: every configuration of the space: what fits by time, then what does not, then what
            was not planned.
        budget_bytes: of one rank.
        hardware: times are for it.
        planned: how many plans of the full model were made.
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
            Dot(t.setting, t.peak_bytes, t.measures[0], t.fits, t.on_front, t.number == 1)
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
        each = "GPU ms" if any(trial.together > 1 for trial in self.trials) else "ms"
        headers = ("#", "configuration", "batch", "peak", f"{each} / sample", "")
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
            f"estimated.\n{self.planned} planned in full; {proof} (docs/tune.md)."
        )

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.table()}"


def _row(trial: Trial) -> tuple[str, ...]:
    peak = "-" if trial.peak_bytes is None else size_text(trial.peak_bytes)
    time = "-" if trial.sample_time is None else f"{1e3 * trial.measures[0]:.4g}"
    mark = "front: " if trial.on_front and trial.number > 1 else ""
    batch = "-" if trial.batch is None else str(trial.batch)
    return f"{trial.number}", trial.setting, batch, peak, time, mark + trial.why


def ranked(trials: Iterable[Trial], best_plan: Plan | None) -> tuple[Trial, ...]:
    """Trials in order: what fits, what does not, what was not planned; each with its reason.

    Args:
        trials: all of a search.
        best_plan: the plan of the best.
    """
    ordered = sorted(trials, key=_order)
    front: list[Trial] = []  # by time, so that each needs less memory than those before it
    for number, each in enumerate(ordered, start=1):
        each.number = number
        if not each.fits:
            continue
        each.on_front = not front or each.measures[1] < front[-1].measures[1]
        each.why = _compared(each, front) if front else "best"
        each.plan = None if front else best_plan
        if each.on_front:
            front.append(each)
    return tuple(ordered)


def _order(each: Trial) -> tuple[Any, ...]:
    kind = 0 if each.fits else 1 if each.peak_bytes is not None else 2
    seconds, peak = each.measures
    return kind, seconds, each.candidate.offloads, peak, each.candidate.rank


def _compared(mine: Trial, front: Sequence[Trial]) -> str:
    """How a trial that fits compares with the best, or with the one on the front that dominates."""
    best, other = front[0], front[-1]
    (seconds, peak), (best_seconds, best_peak) = mine.measures, best.measures
    slower = f"slower: {_times(seconds, best_seconds)} of the best"
    slower = slower if seconds != best_seconds else "same time"
    if mine.on_front:
        return f"{slower}, {size_text(best_peak - peak)} less"
    other_seconds, other_peak = other.measures
    if other is best and peak == other_peak and seconds != other_seconds:
        return f"{slower}, same memory"
    memory = f"{size_text(peak - other_peak)} more" if peak != other_peak else "same memory"
    ratio = _times(seconds, other_seconds)
    time = f"{ratio} its time" if seconds != other_seconds else "same time"
    return f"dominated by #{other.number}: {time}, {memory}"


def _times(seconds: float, others: float) -> str:
    ratio = seconds / others
    return f"{ratio:.2f}x" if ratio >= 1.005 else f"{ratio:.4f}x"
