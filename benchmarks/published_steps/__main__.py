"""Dry runs of jobs whose peaks were published: writes docs/published-peaks.md.

    python -m benchmarks.published_steps               # all jobs, 20 minutes; writes the page
    python -m benchmarks.published_steps --only tt165  # some, into the results that are there
    python -m benchmarks.published_steps --page        # the page from the results that are there

No GPU, and nothing is downloaded. Jobs in float8 need torchao's Python files:
`pip install torchao`.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.published_steps.jobs import JOBS, figures, job_of, measured, metric_of
from benchmarks.published_steps.remarks import HEAD, remark_of, remarks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "published-peaks.md"
RESULTS = ROOT / "benchmarks" / "results" / "published_steps.json"
GIB = 2**30


def alone(name: str) -> dict[str, Any]:
    """In a process of its own: what it compiled is gone with it."""
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
        return pool.submit(measured, name).result()


def beside(row: dict[str, str], found: dict[str, Any]) -> tuple[str, str, str]:
    """The dry run's peak of a figure, how far off it is, and "near", "between" or "far"."""
    published, kind = float(row["gib"]), metric_of(row)
    gib = found[kind] / GIB
    off = 100 * (gib / published - 1)
    verdict = "near" if abs(off) < 1 else "far"
    if "least" not in found or kind == "allocated":
        return f"{gib:.2f}", f"{off:+.1f}%", verdict
    least = found["least"][kind] / GIB
    text = f"{least:.2f} to {gib:.2f}"
    return (
        (text, "between", "between")
        if least <= published <= gib
        else (text, f"{off:+.1f}%", verdict)
    )


def page(results: dict[str, Any]) -> str:
    """The text of the page: a row for each published figure."""
    rows, verdicts = [], collections.Counter[str]()
    for name, row in figures().items():
        job = job_of(name)
        text, off, verdict = ("-", "-", "missing") if job is None else beside(row, results[job])
        verdicts[verdict] += 1
        cells = {"figure": name, "peak": metric_of(row), "published": f"{float(row['gib']):.2f}"}
        rows.append(cells | {"dry run": text, "off by": off, "remark": remark_of(name)})
    made = [results[job] for job in JOBS]
    about = {
        key: ", ".join(sorted({each[key] for each in made})) for key in ("torch", "python", "date")
    }
    kinds = ("near", "between", "far", "missing")
    return HEAD.format(
        table=tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True),
        remarks=remarks(),
        all=len(rows),
        run=len(rows) - verdicts["missing"],
        **{kind: verdicts[kind] for kind in kinds},
        **about,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="the beginning of a job's name")
    parser.add_argument("--page", action="store_true", help="run nothing")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    for name in JOBS:
        if not asked.page and name.startswith(asked.only or ""):
            results[name] = alone(name)
            told = {kind: round(results[name][kind] / GIB, 2) for kind in ("allocated", "reserved")}
            print(name, told, f"{results[name]['cpu_s']} s", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
