"""What is found by searching over plans: data, with the plan that proves it."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

from tabulate import tabulate

from fxshard.bytesize import size_text
from fxshard.plans.workload import Workload

P = TypeVar("P")  # the plan


@dataclasses.dataclass(frozen=True)
class Limit(Generic[P]):
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
    plan: P
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


@dataclasses.dataclass(frozen=True)
class Solution(Generic[P]):
    """The edge of what fits, in one size, with its proof; ``str()`` tells it.

    Attributes:
        what: "max_batch", "min_world", ...
        size: fits, by the plan of a call of that size, traced on its own; `beyond` does not.
        beyond: the next larger size, or the next smaller number of ranks; 0: there is none.
        fixed: the other sizes.
        budget_bytes: what it must fit, as `MemoryReport.assert_fits` says.
        plan: the plan of `size`.
        tried: per size that was planned the larger of its two peaks in bytes; None if it cannot
            be planned.
        why_not: why `beyond` does not fit, or cannot be planned; "" if there is none.
    """

    what: str
    size: int
    beyond: int
    fixed: dict[str, int]
    budget_bytes: int
    plan: P
    tried: dict[int, int | None]
    why_not: str

    @property
    def peak_bytes(self) -> int:
        """With `size`: the larger of the peaks of the first and of a later step."""
        return self.tried[self.size] or 0

    @property
    def beyond_peak_bytes(self) -> int | None:
        """The same with `beyond`; None if that cannot be planned, or is nothing."""
        return self.tried.get(self.beyond)

    def __str__(self) -> str:
        others = ", ".join(f"{name}={size}" for name, size in self.fixed.items())
        text = (
            f"{self.what} = {self.size}{f' with {others}' if others else ''}: needs "
            f"{size_text(self.peak_bytes)} of {size_text(self.budget_bytes)}"
        )
        if self.beyond:
            text += f"; {self.beyond} does not fit: {self.why_not}"
        return f"{text}.\nProof: {len(self.tried)} sizes were traced and planned on their own."


@dataclasses.dataclass(frozen=True)
class Tried:
    """One setting that was planned.

    Attributes:
        changes: arguments of `Plan.replan`.
        peak_bytes: the larger of the peaks of the first and of a later step; None if it cannot be
            planned.
        seconds: estimated, per step; None likewise.
        why_not: why it does not fit, or cannot be planned; "" if it fits.
    """

    changes: dict[str, Any]
    peak_bytes: int | None
    seconds: float | None
    why_not: str = ""


@dataclasses.dataclass(frozen=True)
class Picked:
    """What ``memory_budget`` has chosen; ``str()`` says it in a line.

    Attributes:
        budget_bytes: the budget.
        changes: the options that were chosen.
        peak_bytes: the larger of the peaks of the first and of a later step.
        seconds: estimated, per step.
        tried: every setting that was planned.
        asked: what the user asked for.
    """

    budget_bytes: int
    changes: dict[str, Any]
    peak_bytes: int
    seconds: float
    tried: tuple[Tried, ...]
    asked: Workload

    def __str__(self) -> str:
        return (
            f"memory_budget={size_text(self.budget_bytes)}: {setting_text(self.changes)}; needs "
            f"{size_text(self.peak_bytes)}, {self.seconds * 1e3:.3g} ms per step estimated "
            f"({len(self.tried)} settings tried)"
        )

    def table(self) -> str:
        """Every setting that was planned, with its peak, its time and why it does not fit."""
        return tried_table(self.tried)


def setting_text(changes: dict[str, Any]) -> str:
    """``reshard_after_forward=False, checkpoint=40.00 GiB``."""

    def value(name: str, given: Any) -> str:
        if name == "checkpoint" and isinstance(given, int):
            return size_text(given)
        return type(given).__name__ if name == "offload" else str(given)

    return ", ".join(f"{n}={value(n, v)}" for n, v in changes.items()) or "as given"


def tried_table(tried: list[Tried] | tuple[Tried, ...]) -> str:
    """One line per setting: what it is, its peak, its estimated time, why it does not fit."""
    rows = [
        (
            setting_text(each.changes),
            "-" if each.peak_bytes is None else size_text(each.peak_bytes),
            "-" if each.seconds is None else f"{each.seconds * 1e3:.4g} ms",
            each.why_not or "fits",
        )
        for each in tried
    ]
    headers = ("setting", "peak", "estimated step", "")
    return str(tabulate(rows, headers, disable_numparse=True))
