"""Writes docs/benchmarks.md, and tables beside it, from benchmarks/results/*.json.

    python -m benchmarks.page

Nothing is measured here: each section is made from the file of one script, with its own date. The
page has one table, of what is claimed; the figures of each model or size are in docs/benchmarks/.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks import first_step, limit, overhead, passes, peak_bytes, plan_405b, scale, step_time
from benchmarks.figures import RESULTS, ROOT, write_csv
from benchmarks.sides import TITLES

PAGE = ROOT / "docs" / "benchmarks.md"
TABLES = ROOT / "docs" / "benchmarks"
MIB = 2**20
Result = dict[str, Any]
Rows = list[dict[str, Any]]

HEAD = """# Benchmarks

Written by `python -m benchmarks.page` from `benchmarks/results/`; do not edit. `make bench`
measures everything again and writes this page. A ratio below 1: fxshard is faster or smaller; of
several models it is the geometric mean. The sections say what was measured, how and when, and name
a table of the figures of each model or size. `benchmarks/results/` has all that was measured:
medians, quartiles, phases, stages."""


def table(rows: Iterable[dict[str, Any]]) -> str:
    """A Markdown table."""
    return tabulate(list(rows), headers="keys", tablefmt="github", disable_numparse=True)


def verdicts(section: str, claims: list[dict[str, Any]]) -> Rows:
    """A line per claim of a section."""
    rows = []
    for claim in claims:
        value = claim.get("geometric_mean", claim.get("value"))
        target, met = claim["target"], claim["met"]
        rows.append(
            {
                "section": section,
                "claim": claim["claim"],
                "measured": f"{value:.3f}",
                "target": "-" if target is None else f"at most {target:g}",
                "met": "-" if met is None else "yes" if met else "no",
            }
        )
    return rows


def step_time_section(result: Result) -> Rows:
    """Table of benchmarks/step_time.py: each model's ratios of medians."""
    rows = []
    for model in result["models"]:
        row = {"model": model["title"]}
        for pair, each in model["ratios"].items():
            ours, theirs = (TITLES[side] for side in pair.split(" / "))
            row[f"{ours} / {theirs}"] = f"{each['step']:.3f}"
        rows.append(row)
    return rows


def peak_bytes_section(result: Result) -> Rows:
    """Table of benchmarks/peak_bytes.py."""
    rows = []
    for case in result["models"]:
        ours = {each["schedule"]: each["peak"] for each in case["fxshard"]}
        rows.append(
            {
                "model": case["title"],
                "ranks": case["world_size"],
                "setting": case["setting"],
                "FSDP2, MiB": f"{case['fsdp2']['peak'] / MIB:.2f}",
                "fxshard": f"{ours['default'] / MIB:.2f}",
                "ratio": f"{case['ratios']['default']:.3f}",
                "selective": f"{case['ratios']['selective']:.3f}",
                "best": f"{ours[case['best']] / MIB:.2f}",
                "ratio of the best": f"{case['ratios']['best']:.3f}",
                "by": case["best"],
            }
        )
    return rows


def first_step_section(result: Result) -> Rows:
    """Table of benchmarks/first_step.py."""
    rows = []
    for case in result["cases"]:
        row = {"layers": case["layers"], "side": case["title"]}
        for which in ("cold", "warm"):
            row[f"{which}, s"] = f"{case[which]['first_seconds']:.1f}" if which in case else "-"
        row["second step, s"] = (
            f"{case['cold']['second_seconds']:.3f}" if "cold" in case else case.get("failed", "-")
        )
        rows.append(row)
    return rows


def limit_section(result: Result) -> Rows:
    """Table of benchmarks/limit.py: where the time of a step goes, and both ratios."""
    rows = []
    for model in result["models"]:
        step = model["milliseconds"]["step"]["median"]
        rows.append(
            {
                "model": model["title"],
                "step, ms": f"{step:.1f}",
                **{name: f"{each / step:.1%}" for name, each in model["waterfall"].items()},
                "collectives alone": f"{model['milliseconds']['collectives']['median'] / step:.1%}",
                "step / limit": f"{model['ratios']['step']:.3f}",
                "peak, MiB": f"{model['bytes']['peak'] / MIB:.2f}",
                "peak / least": f"{model['ratios']['peak']:.3f}",
            }
        )
    return rows


def planning_section(result: Result) -> Rows:
    """First table of benchmarks/overhead.py: planning."""
    return [
        {
            "operators": row["nodes"],
            "capture, CPU s": f"{row['capture_cpu_seconds']:.2f}",
            "passes": f"{row['passes_cpu_seconds']:.2f}",
            "analysis": f"{row['analysis_cpu_seconds']:.2f}",
            "share of capture": f"{row['share_of_capture']:.1%}",
            "µs per operator": f"{row['microseconds_per_node']:.0f}",
        }
        for row in result["planning"]
    ]


def running_section(result: Result) -> Rows:
    """Second table of benchmarks/overhead.py: steps of operators without work."""
    ran = result["running"]
    return [
        {
            "way": name,
            "operators": ran["operators"],
            "views of these": ran["views"],
            "CPU µs per operator": f"{each['median']:.2f}",
            "quartiles": f"{each['q1']:.2f} to {each['q3']:.2f}",
        }
        for name, each in ran["microseconds_per_operator"].items()
    ]


def passes_section(result: Result) -> Rows:
    """Table of benchmarks/passes.py."""
    rows = []
    for row in result["rows"]:
        line = {"pass": row["pass"] or "-", "options": row["options"]}
        if "refused" in row:
            line["peak, GiB"] = "refused"
        else:
            line |= {
                "peak, GiB": f"{row['peak_bytes'] / 2**30:.2f}",
                "collectives": row["collectives"],
                "buffers": row["buffers"],
                "step, ms": f"{row['step_ms']:.1f}",
                "exposed, ms": f"{row['exposed_ms']:.1f}",
            }
        rows.append(line)
    return rows


def scale_section(result: Result) -> Rows:
    """Table of benchmarks/scale.py."""
    return [
        {
            "nodes": row["nodes"],
            "units": f"{row['units'] - 1} and the root",
            **{f"{k}, µs per node": f"{v:.1f}" for k, v in row["microseconds_per_node"].items()},
            "all, CPU s": f"{row['microseconds_per_node']['all'] * row['nodes'] / 1e6:.2f}",
        }
        for which in ("by_nodes", "by_units")
        for row in result[which]
    ]


def plan_405b_section(result: Result) -> Rows:
    """Table of benchmarks/plan_405b.py."""
    rows = [
        {
            "side": side["side"],
            "CPU s": f"{side['cpu_seconds']:.1f}",
            "peak RSS, MiB": f"{side['peak_rss_bytes'] / MIB:.0f}",
            "says as peak, GiB": f"{side['peak_bytes'] / 2**30:.2f}",
            "modules with figures": side["modules"],
        }
        for side in result["sides"]
    ]
    return rows


Section = tuple[str, Any, dict[str, Callable[[Result], Rows]]]  # title, script, tables by name

SECTIONS: tuple[Section, ...] = (
    ("Step time", step_time, {"step_time": step_time_section}),
    ("Peak bytes", peak_bytes, {"peak_bytes": peak_bytes_section}),
    ("Time to the first step", first_step, {"first_step": first_step_section}),
    ("Distance to the limit", limit, {"limit": limit_section}),
    ("Own overhead", overhead, {"planning": planning_section, "running": running_section}),
    ("What each pass wins", passes, {"passes": passes_section}),
    ("Scale", scale, {"scale": scale_section}),
    ("405 billion parameters", plan_405b, {"plan_405b": plan_405b_section}),
)
PICTURE = "![CPU seconds over nodes, and microseconds per node over units](scaling.png)"


def read(results: Path, script: Any) -> Result | None:
    """What a script left in a folder of results; None: nothing."""
    path = results / f"{_name(script)}.json"
    return json.loads(path.read_text()) if path.exists() else None


def page(results: Path) -> str:
    """The page of what is in a folder of results; a script without a result is named as missing."""
    claims: Rows = []
    parts = []
    for title, script, tables in SECTIONS:
        parts.append(f"## {title}")
        parts.append(_about(script.__doc__ or ""))
        result = read(results, script)
        if result is None:
            parts.append(f"No result yet: run `python -m benchmarks.{_name(script)}`.")
            continue
        claims += verdicts(
            f"[{title}](#{title.lower().replace(' ', '-')})", result.get("claims", [])
        )
        facts = f"{result['machine']}, {result['cpu']}, load {result['load']} at the end"
        versions = f"Python {result['python']}, torch {result['torch']}"
        links = ", ".join(f"[{name}.csv](benchmarks/{name}.csv)" for name in tables)
        parts.append(f"{result['date']}; {facts}; {versions}. Figures: {links}.")
        if script is scale:
            parts.append(PICTURE)
    head = [HEAD, table(claims)] if claims else [HEAD]
    return "\n\n".join([*head, *parts]) + "\n"


def tables(results: Path) -> dict[str, Rows]:
    """The tables beside the page, by name."""
    found: dict[str, Rows] = {}
    for _, script, makers in SECTIONS:
        result = read(results, script)
        if result is not None:
            found |= {name: rows_of(result) for name, rows_of in makers.items()}
    return found


def _name(script: Any) -> str:
    return str(script.__name__.rpartition(".")[2])


def _about(doc: str) -> str:
    """A script's docstring as Markdown: its indented command lines become a block of code."""
    parts = []
    for part in doc.strip().split("\n\n"):
        lines = part.splitlines()
        if all(line.startswith("    ") for line in lines):
            part = "\n".join(["```sh", *(line[4:] for line in lines), "```"])
        parts.append(part)
    return "\n\n".join(parts)


def main() -> int:
    """Write the page and its tables."""
    PAGE.write_text(page(RESULTS))
    TABLES.mkdir(exist_ok=True)
    for name, rows in tables(RESULTS).items():
        write_csv(TABLES / f"{name}.csv", rows)
    print(f"wrote {PAGE} and {TABLES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
