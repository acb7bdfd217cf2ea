"""Plots as PNG: the front of memory against time, and the peak against a size."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fxshard.bytesize import SIZES, size_text
from fxshard.errors import ConfigError
from fxshard.host import files

Peak = Callable[..., Any]  # (batch=..., seq=..., world=...) int64 arrays -> int64 array of bytes
POINTS = 200  # of a curve, at most
BLUE, GREY, RED, GREEN = "#2b4c7e", "#b9c0ca", "#b4581a", "#3aa57e"


@dataclasses.dataclass(frozen=True)
class Dot:
    """One configuration in the plot of the front.

    Attributes:
        label: what it is.
        peak_bytes: on one rank.
        seconds: per sample.
        fits: within the budget.
        on_front: nothing that fits is better.
        is_best: the fastest that fits.
    """

    label: str
    peak_bytes: int
    seconds: float
    fits: bool
    on_front: bool = False
    is_best: bool = False


@dataclasses.dataclass(frozen=True)
class PeakCurve:
    """Peak bytes along one size, all others fixed.

    Attributes:
        name: of the size: "batch", "seq" or "world".
        at: its values.
        bytes: the peak at each.
        fixed: the others, as text.
    """

    name: str
    at: tuple[int, ...]
    bytes: tuple[int, ...]
    fixed: str = ""

    @property
    def is_log(self) -> bool:
        """True if its values span so much that they are drawn by powers of 2."""
        return min(self.at) > 0 and max(self.at) >= 100 * min(self.at)


def curves(
    peak: Peak, sizes: Mapping[str, Sequence[int]], here: Mapping[str, int]
) -> list[PeakCurve]:
    """A curve along each size.

    Args:
        peak: ``peak(batch=array, seq=array, world=array) -> array``: int64 of equal shapes, bytes.
        sizes: per name the values to be drawn, ascending; more than `POINTS` are thinned out.
        here: the values at which the others are held.
    """
    found = []
    for name, values in sizes.items():
        thinned = sorted({values[i] for i in _spread(len(values))})
        at = np.array(thinned, dtype=np.int64)
        given = {other: np.full_like(at, size) for other, size in here.items()} | {name: at}
        held = ", ".join(f"{other} {size:,}" for other, size in here.items() if other != name)
        totals = tuple(int(total) for total in peak(**given))
        found.append(PeakCurve(name, tuple(thinned), totals, held))
    return found


def _spread(count: int) -> list[int]:
    return [round(i) for i in np.linspace(0, count - 1, min(count, POINTS))]


def scale_of(largest: int) -> tuple[str, int]:
    """The unit in which an axis up to `largest` bytes is drawn."""
    unit = next((u for u in ("GiB", "MiB", "KiB") if largest >= SIZES[u]), "B")
    return unit, SIZES[unit]


def plot_front(path: str | Path, dots: Sequence[Dot], budget: int) -> None:
    """Memory against time: all dots in grey, the front as a line, the budget, the best.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure, (axes,) = _figure(1)
    unit, scale = scale_of(max(budget, *(dot.peak_bytes for dot in dots)))

    def at(chosen: Sequence[Dot]) -> tuple[list[float], list[float]]:
        return [d.peak_bytes / scale for d in chosen], [1e3 * d.seconds for d in chosen]

    others = [dot for dot in dots if not dot.on_front]
    front = sorted((dot for dot in dots if dot.on_front), key=lambda dot: dot.peak_bytes)
    best = [dot for dot in dots if dot.is_best]
    axes.scatter(*at(others), s=22, color=GREY, label="planned", zorder=2)
    style = {"drawstyle": "steps-post", "color": BLUE, "markersize": 5}
    axes.plot(*at(front), "o-", label="front", zorder=3, **style)
    if best:
        label = f"best: {size_text(best[0].peak_bytes)}, {1e3 * best[0].seconds:.4g} ms"
        style = {"marker": "*", "s": 190, "color": GREEN, "edgecolors": "white"}
        axes.scatter(*at(best), label=label, zorder=4, **style)
    axes.axvline(budget / scale, color=RED, linestyle="--", label=f"budget, {size_text(budget)}")
    axes.set(xlabel=f"peak of one rank, {unit}", ylabel="estimated ms per sample")
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    _save(figure, path)


def plot_curves(path: str | Path, drawn: Sequence[PeakCurve], budget: int | None = None) -> None:
    """The peak against each size, side by side, with the budget as a line.

    Raises:
        ConfigError: matplotlib is not installed, or there is no curve.
    """
    if not drawn:
        raise ConfigError("plot_curves: no curve was given; see fxshard.memory.views.plots.curves.")
    figure, every = _figure(len(drawn))
    for axes, curve in zip(every, drawn, strict=True):
        unit, scale = scale_of(max(*curve.bytes, budget or 0))
        axes.plot(curve.at, [b / scale for b in curve.bytes], color=BLUE, label="peak")
        if budget is not None:
            text = f"budget, {size_text(budget)}"
            axes.axhline(budget / scale, color=RED, linestyle="--", label=text)
        if curve.is_log:
            axes.set_xscale("log", base=2)
        axes.set(ylabel=f"peak of one rank, {unit}")
        axes.set_xlabel(curve.name, parse_math=False)
        axes.set_title(curve.fixed, parse_math=False)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    _save(figure, path)


def _figure(columns: int) -> tuple[Any, list[Any]]:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'fxshard[plot]'.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 5.0 * columns, 4.4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: no window, no state is left
    every = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for axes in every:
        axes.grid(color="#e6e8ec", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    return figure, every


def _save(figure: Any, path: str | Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    try:
        files.write(path, drawn.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}.") from error
