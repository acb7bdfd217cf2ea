"""Bytes against time: fxshard's plans beside FSDP2 with each way of saving less activations.

    python -m benchmarks.front                  # an hour
    python -m benchmarks.front --models llama   # the page keeps the others as they were measured

Points of FSDP2: each block's activations all saved, selectively checkpointed (products and
attention are saved, as torchtitan has it per operator), or checkpointed in full; eager, and with
blocks compiled, there also with torch's `activation_memory_budget` of 0.25, 0.5 and 0.75. Beside
them plans of fxshard: the default, "selective", "full", budgets of bytes between, and small buckets
without prefetch; eager, and with Inductor.

Two gloo ranks, one thread each. What cannot live in one process (each compiled form of a block
needs Dynamo's cache for itself) runs in a group of its own beside eager FSDP2, turn by turn; its
time is the ratio to that one's median. Bytes are those of torch.profiler's memory events in one
steady step, above the sharded parameters, gradients and optimizer states, which no schedule avoids.

Of each point of FSDP2: the time of the fastest plan with at most its bytes, and the bytes of the
smallest plan with at most its time, as ratios to it. Beside eager points stand eager plans.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.figures import RESULTS, ROOT, geometric_mean, machine, spread, write
from benchmarks.models import FRONT
from benchmarks.points import (
    EVERY,
    REFERENCE,
    THEIRS,
    THEIRS_COMPILED,
    WORLD,
    Point,
    measured,
    plans,
)
from benchmarks.ranks import on_ranks

GOAL = 0.75
PAGE = ROOT / "docs" / "front.md"


def front(name: str, steps: int, compiled: bool = True) -> dict[str, Any]:
    """All points of a model: time as ratio to eager FSDP2, and bytes."""
    recipe = EVERY[name]
    groups: list[list[Point]] = [[*THEIRS, *plans(recipe, False)]]
    if compiled:
        groups += [[REFERENCE, *plans(recipe, True)]]
        groups += [[REFERENCE, point] for point in THEIRS_COMPILED]
    rows: dict[str, dict[str, Any]] = {}
    for points in groups:
        ranks = on_ranks(WORLD, measured, name, points, steps, timeout=1800)
        slower = {
            point.name: spread(
                [max(both) for both in zip(*(r[point.name]["seconds"] for r in ranks), strict=True)]
            )
            for point in points
        }
        for point in points:
            ratio = slower[point.name]["median"] / slower[REFERENCE.name]["median"]
            found = {
                "name": point.name,
                "ours": point.ours,
                "compiled": point.compiled,
                "time": round(ratio, 4),
                "ms": round(1e3 * slower[point.name]["median"], 2),
                "bytes": max(rank[point.name]["bytes"] for rank in ranks),
            }
            if rows.setdefault(point.name, found) is found:
                print(found, flush=True)
    every = list(rows.values())
    return {"model": name, "title": recipe.title, "where": machine(), "points": every}


def beside(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each point of FSDP2: our time at its bytes, our bytes at its time; None: no plan."""
    found = []
    for theirs in (p for p in points if not p["ours"]):
        ours = [p for p in points if p["ours"] and (theirs["compiled"] or not p["compiled"])]
        small = [p for p in ours if p["bytes"] <= theirs["bytes"]]
        quick = [p for p in ours if p["time"] <= theirs["time"]]
        faster = min(small, key=lambda p: p["time"], default=None)
        smaller = min(quick, key=lambda p: p["bytes"], default=None)
        found.append(
            {
                "theirs": theirs["name"],
                "time": faster and round(faster["time"] / theirs["time"], 4),
                "time_by": faster and faster["name"],
                "bytes": smaller and round(smaller["bytes"] / theirs["bytes"], 4),
                "bytes_by": smaller and smaller["name"],
            }
        )
    return found


def claims(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over all points of all models, and at how many fxshard is in front."""
    pairs = [pair for row in rows for pair in row["beside"]]
    both = [(pair["time"], pair["bytes"]) for pair in pairs]
    there = {
        what: [pair[what] for pair in pairs if pair[what] is not None] for what in ("time", "bytes")
    }
    return {
        "points": len(pairs),
        "in_front": sum(t is not None and b is not None and (t < 1 or b < 1) for t, b in both),
        "goal": GOAL,
        **{what: round(geometric_mean(each), 4) if each else None for what, each in there.items()},
        "without_a_plan": {what: len(pairs) - len(each) for what, each in there.items()},
    }


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Both fronts of each model, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(rows), figsize=(4 * len(rows), 4), squeeze=False)
    for axis, row in zip(axes[0], rows, strict=True):
        for ours, colour, label in ((False, "#b4581a", "FSDP2"), (True, "#2b4c7e", "fxshard")):
            for compiled, marker in ((False, "o"), (True, "^")):
                some = [p for p in row["points"] if (p["ours"], p["compiled"]) == (ours, compiled)]
                name = f"{label}, compiled" if compiled else label
                places = [p["bytes"] / 2**20 for p in some], [p["time"] for p in some]
                axis.scatter(*places, c=colour, marker=marker, s=22, label=name)
        axis.set_title(row["title"], fontsize=8)
        axis.set_xlabel("MiB above what is sharded", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("step time, of eager FSDP2's", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def page(result: dict[str, Any]) -> str:
    """docs/front.md."""
    claim = result["claims"]
    rows = [
        {
            "model": row["title"],
            "FSDP2's point": pair["theirs"].removeprefix("FSDP2, "),
            "time at its bytes": _said(pair["time"], pair["time_by"]),
            "bytes at its time": _said(pair["bytes"], pair["bytes_by"]),
        }
        for row in result["models"]
        for pair in row["beside"]
    ]
    missing = claim["without_a_plan"]
    where: dict[str, list[str]] = {}
    for row in result["models"]:
        where.setdefault(_where(row["where"]), []).append(row["title"])
    measured = [
        f"{said}: {', '.join(titles)}" if len(where) > 1 else said for said, titles in where.items()
    ]
    return "\n".join(
        [
            "# Bytes against time, beside FSDP2\n",
            "Written by `python -m benchmarks.front`; do not edit.\n",
            "\n".join((__doc__ or "").split("\n")[4:]).strip() + "\n",
            *(f"{said}.\n" for said in measured),
            f"At {claim['in_front']} of {claim['points']} points fxshard has a plan that is no "
            f"worse in one and better in the other. Geometric means: {claim['time']} of the time "
            f"at equal bytes, {claim['bytes']} of the bytes at equal time (goal: {claim['goal']} "
            f"each); {missing['time']} points with no plan as small, {missing['bytes']} with none "
            f"as fast.\n",
            "![Both fronts of each model](front.png)\n",
            tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True) + "\n",
        ]
    )


def _where(found: dict[str, Any]) -> str:
    return (
        f"{found['date']}; {found['machine']}, {found['cpu']}, load {found['load']}; "
        f"Python {found['python']}, torch {found['torch']}"
    )


def _said(value: float | None, by: str | None) -> str:
    return (
        "none" if value is None or by is None else f"{value:.3f} ({by.removeprefix('fxshard, ')})"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write the results, the page and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=[*EVERY], default=[*FRONT])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="a model without weight, eager")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/front.json")
    given = parser.parse_args(arguments)
    if given.smoke:
        given.models, given.steps = ["smoke"], 2
    rows = []
    for name in given.models:
        row = front(name, given.steps, compiled=not given.smoke)
        rows.append({**row, "beside": beside(row["points"])})
    out = given.out or RESULTS / "front.json"
    if not given.smoke and out.exists():
        kept = [row for row in json.loads(out.read_text())["models"] if row["model"] in FRONT]
        rows = list({row["model"]: row for row in [*kept, *rows]}.values())
    result = {"ranks": WORLD, "steps": given.steps, "models": rows, "claims": claims(rows)}
    print(result["claims"])
    if given.out or not given.smoke:
        write(out, result)
        if not given.out:
            write_page(out)
    return 0


def write_page(results: Path) -> None:
    """docs/front.md and docs/front.png, of the results of an earlier run."""
    result = json.loads(results.read_text())
    PAGE.write_text(page(result))
    plot(result["models"], PAGE.with_suffix(".png"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
