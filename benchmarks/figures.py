"""Medians, quartiles, ratios, and how results are written."""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles (as ``numpy.percentile`` has them), and how many values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values to take a median of")
    if len(values) == 1:
        low = middle = high = values[0]
    else:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high, "count": len(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of ours to median of theirs."""
    return spread(ours)["median"] / spread(theirs)["median"]


def geometric_mean(values: Iterable[float]) -> float:
    """The n-th root of the product of n positive values.

    Raises:
        ValueError: there are none, or one is not positive.
    """
    found = list(values)
    if not found or min(found) <= 0:
        raise ValueError(f"no geometric mean of {found}")
    return math.exp(math.fsum(map(math.log, found)) / len(found))


def machine() -> dict[str, Any]:
    """What it was measured on, and when."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "cpu": _cpu(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
    }


def _version(package: str) -> str | None:
    """None if it is not installed, as where only torch is."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in info.open() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def asked(
    doc: str | None, arguments: list[str] | None, smoke: str = "a small model"
) -> argparse.Namespace:
    """``--smoke`` and ``--out``, of a script whose docstring is `doc`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help=smoke)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/NAME.json")
    return parser.parse_args(arguments)


def write(path: Path, result: dict[str, Any]) -> None:
    """Machine and date, then the result, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine(), **result}, indent=1) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table that is too long for its page, beside it; the first row names the columns."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
