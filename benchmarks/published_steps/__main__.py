"""Dry runs of jobs whose peaks were published: writes docs/published-peaks.md.

    python -m benchmarks.published_steps              # all jobs, 15 minutes; writes the page
    python -m benchmarks.published_steps --only 8B    # some of them; prints the table
    python -m benchmarks.published_steps --page       # the page from the results that are there

No GPU, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.published_steps.jobs import JOBS, NOTES, SOURCES, figures

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "published-peaks.md"
RESULTS = ROOT / "benchmarks" / "results" / "published_steps.json"
GIB = 2**30

HEAD = """# Published peaks beside dry runs

Written by `python -m benchmarks.published_steps`; do not edit. Each row is a job that somebody ran
on GPUs with torch's own `fully_shard`, and published the peak of. Beside it is what
`fxshard.dry_run` says of the same steps on a machine without a GPU: the model of
`benchmarks/published_steps/llama.py`, three steps, the settings of the source. No constant was
chosen by these figures.

{table}

(torch {torch}, Python {python}, {date}. GiB. "active" and "reserved" are those of the statistics of
torch.cuda.)

What is known of differences:

{notes}

Sources:

{sources}
"""


def alone(number: int) -> list[dict[str, Any]]:
    """The rows of a job, in a process of its own: what it compiled is gone with it."""
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
        return pool.submit(figures, number).result()


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    told = [
        {
            "job": r["job"],
            "allocator": r["settings"],
            "peak": r["metric"],
            "published": f"{r['published_gib']:.2f}",
            "dry run": f"{r['bytes'] / GIB:.2f}",
            "off by": f"{100 * (r['bytes'] / GIB / r['published_gib'] - 1):+.1f}%",
            "reserved, expandable": f"{r['reserved_expandable'] / GIB:.2f}",
            "source": r["source"],
        }
        for r in rows
    ]
    return tabulate(told, headers="keys", tablefmt="github", disable_numparse=True)


def page(made: dict[str, Any]) -> str:
    """The text of the page."""
    sources = "\n".join(f"- {key}: {text}" for key, text in SOURCES.items())
    notes = "\n".join(f"- {note}" for note in NOTES)
    told = {key: made[key] for key in ("torch", "python", "date")}
    return HEAD.format(table=table(made["rows"]), notes=notes, sources=sources, **told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a job's name")
    parser.add_argument("--page", action="store_true", help="run nothing")
    asked = parser.parse_args()
    rows = []
    for number, job in enumerate(JOBS):
        if asked.only in job.name and not asked.page:
            rows += alone(number)
            print(table(rows[-len(job.figures) :]), f"{rows[-1]['cpu_s']} s", flush=True)
    if not (asked.only or asked.page):
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        made = {"date": time.strftime("%Y-%m-%d"), **versions, "rows": rows}
        RESULTS.write_text(json.dumps(made, indent=1) + "\n")
    if not asked.only:
        PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
