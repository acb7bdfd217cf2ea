"""What searches over plans find: data, with the plan that proves it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from tabulate import tabulate

from fxshard.bytesize import size_text
from fxshard.hardware import hardware_of
from fxshard.plans.workload import Workload

P = TypeVar("P")  # the plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """A candidate of a search that was planned: its bytes, its time, and whether it fits.

    Attributes:
        changes: arguments of `Plan.replan`, or sizes by name, that make it.
        peak_bytes: the larger of the peaks of the first and of a later step; None if it cannot be
            planned.
        seconds: estimated, per step; None likewise, and where no times are asked for.
        why_not: why it does not fit, or cannot be planned; "" if it fits.
    """

    changes: dict[str, Any]
    peak_bytes: int | None = None
    seconds: float | None = None
    why_not: str = ""

    @property
    def fits(self) -> bool:
        """It was planned, and is within the budget."""
        return not self.why_not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge(Generic[P]):
    """Where the sizes that fit a budget end, with the plans that prove it.

    Attributes:
        what: "batch", "sequence", "max_batch", "min_world", ...
        size: fits; `beyond` does not.
        beyond: the next size that was asked for: larger, or of "min_world" smaller; 0: there is
            none.
        budget_bytes: what it must fit, as of `MemoryReport.assert_fits`.
        plan: the plan of `size`.
        candidates: what was planned, by size.
    """

    what: str
    size: int
    beyond: int
    budget_bytes: int
    plan: P
    candidates: dict[int, Tried]

    @property
    def tried(self) -> dict[int, int | None]:
        """Per size that was planned its peak in bytes; None if it cannot be planned."""
        return {size: each.peak_bytes for size, each in self.candidates.items()}

    @property
    def peak_bytes(self) -> int:
        """With `size`: the larger of the peaks of the first and of a later step."""
        return self.tried[self.size] or 0

    @property
    def beyond_peak_bytes(self) -> int | None:
        """The same with `beyond`; None if that cannot be planned, or is nothing."""
        return self.tried.get(self.beyond)

    @property
    def why_not(self) -> str:
        """Why `beyond` does not fit, or cannot be planned; "" if there is none."""
        return self.candidates[self.beyond].why_not if self.beyond else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit(Edge[P]):
    """The largest size of one dimension of the batch that fits a budget; ``str()`` is a summary.

    Attributes:
        dim: which dimension.
        tensors: names of the inputs whose dimension `dim` was changed.
        before: its size in the plan that the search started from.
        multiple_of: only multiples of this were tried; `beyond` is the next one after `size`.
    """

    dim: int
    tensors: tuple[str, ...]
    before: int
    multiple_of: int = 1

    @property
    def next_peak_bytes(self) -> int | None:
        """The peak with `size` + `multiple_of`; None if that cannot be planned."""
        return self.beyond_peak_bytes

    def __str__(self) -> str:
        peak = self.next_peak_bytes
        beyond = f"{'cannot be planned' if peak is None else 'does not fit'}: {self.why_not}"
        if peak is not None and peak > self.budget_bytes:
            beyond = f"needs {size_text(peak)}"
        return (
            f"{self.what} of {self.size}: needs {size_text(self.peak_bytes)} of "
            f"{size_text(self.budget_bytes)}; {self.beyond} {beyond}.\nDimension {self.dim} of "
            f"{', '.join(self.tensors)} was changed; {len(self.tried)} sizes were planned."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution(Edge[P]):
    """The edge of what fits, in one size, each plan traced on its own; ``str()`` is a summary.

    Attributes:
        fixed: the other sizes.
    """

    fixed: dict[str, int]

    def __str__(self) -> str:
        others = ", ".join(f"{name}={size}" for name, size in self.fixed.items())
        text = (
            f"{self.what} = {self.size}{f' with {others}' if others else ''}: needs "
            f"{size_text(self.peak_bytes)} of {size_text(self.budget_bytes)}"
        )
        if self.beyond:
            text += f"; {self.beyond} does not fit: {self.why_not}"
        return f"{text}.\nProof: {len(self.tried)} sizes were traced and planned on their own."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen(Tried):
    """What ``memory_budget`` has chosen; ``str()`` is one line.

    Attributes:
        budget_bytes: the budget.
        tried: every setting that was planned.
        asked: what the user asked for.
    """

    peak_bytes: int
    seconds: float
    budget_bytes: int
    tried: tuple[Tried, ...]
    asked: Workload

    def __str__(self) -> str:
        return (
            f"memory_budget={size_text(self.budget_bytes)}: {setting_text(self.changes)}; needs "
            f"{size_text(self.peak_bytes)}, {self.seconds * 1e3:.3g} ms per step estimated on "
            f"{hardware_of(self.asked.config.hardware).name} ({len(self.tried)} settings tried)"
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


def tried_table(tried: Sequence[Tried]) -> str:
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
