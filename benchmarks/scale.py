"""Passes, verifier, liveness and report over 1,000 to 100,000 nodes, and over 8 to 1,024 units.

    python -m benchmarks.scale
    python -m benchmarks.scale --blocks 25 250 --units 8 64     # smaller

Stacks of residual MLP blocks on 8 ranks, in bf16 with fp32 reduction, every unit checkpointed, with
AdamW. In the first five rows every block is a unit, and stacks get deeper. In the others, 1,024
blocks are grouped into ever more units: one trace serves all of them. CPU seconds of each pass, of
each of the verifier's checks, of the recording of the optimizer, of the walk that finds live
ranges, of the ledger's sums, and of what is made of them; the trace is not in any of them. Linear
is: microseconds per node do not grow.

The graph has `nodes` nodes when all passes are over. The plot (docs/scaling.png) needs matplotlib.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import math
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from benchmarks.analysis_speed import Block
from benchmarks.figures import RESULTS, ROOT, write
from fxshard import verify
from fxshard.capture import trace
from fxshard.host import collector
from fxshard.memory import liveness
from fxshard.memory.held import held_ranges
from fxshard.memory.optimizer import trace_step

BLOCKS = (16, 50, 160, 500, 1600)
UNITS = (8, 32, 128, 1024)
LEAVES = 1024
WIDTH = 8
GROWTH_TARGET = 1.5  # microseconds per node of the largest graph to those of the smallest
PLOT = ROOT / "docs" / "scaling.png"
OPTIONS: dict[str, Any] = {
    "world_size": 8,
    "mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "checkpoint": "full",
    "optimizer": torch.optim.AdamW,
}


class Grouped(nn.Module):
    """So many blocks in groups of groups, and a scalar loss. float32 [*, WIDTH] in."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.groups = _group(sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.groups(x).square().mean()


def _group(sizes: Sequence[int]) -> nn.Module:
    if not sizes:
        return Block(WIDTH)
    return nn.Sequential(*(_group(sizes[1:]) for _ in range(sizes[0])))


class Clock:
    """CPU seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is added to that of a stage."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.process_time() - began
                self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

        return run


class Timed:
    """A pass, and the time that it takes."""

    def __init__(self, step: Any, clock: Clock) -> None:
        self.name, self.requires, self.ensures = step.name, step.requires, step.ensures
        self.apply = clock.timed(f"pass {step.name}", step.apply)


def measure(make: Callable[..., fxshard.Plan], **options: Any) -> dict[str, Any]:
    """One row: CPU seconds of every stage of the plan that `make` makes with these options."""
    clock = Clock()
    gc.collect()  # what was dropped of the row before
    checks = {
        fact: clock.timed(f"check {fact.name.lower()}", check)
        for fact, check in verify.CHECKS.items()
    }
    with (
        mock.patch.dict(verify.CHECKS, checks),
        mock.patch.object(trace, "capture", clock.timed("trace", trace.capture)),
        mock.patch.object(collector, "SWEEP", math.inf),
    ):
        began = time.process_time()
        plan = make(passes=lambda default: [Timed(step, clock) for step in default], **options)
        whole = time.process_time() - began
    clock.seconds["copy, lint"] = whole - sum(clock.seconds.values())
    record = clock.timed("record optimizer", trace_step)
    step = record(plan.program, plan.config.optimizer)
    held = clock.timed("held ranges", held_ranges)
    ranges = held(plan.workload.module, plan.workload.call, plan.program)
    asked: Any = types.SimpleNamespace(programs=plan.programs, lifecycle=list)
    analyse = clock.timed("liveness", liveness.analyse)
    report = analyse(plan.programs, ranges, step, plan=asked)
    ledger = clock.timed("ledger", lambda: (report.steady.totals, report.first.totals))
    ledger()
    stages: dict[str, Callable[[], Any]] = {
        "table": report.table,
        "dict": report.to_dict,
        "dump": plan.dump,
        "estimate": lambda: plan.estimate("h100"),
        "certificate": lambda: plan.certificate,
    }
    plan.__dict__["memory"] = report  # the dump asks for it
    plan.__dict__["optimizer_step"] = step
    for stage, run in stages.items():
        clock.timed(stage, run)()
    traced = clock.seconds.pop("trace", 0.0)
    nodes = len(plan.program.graph.nodes)
    return {
        "nodes": nodes,
        "units": len(plan.units),
        "parameters": len(plan.program.params),
        "trace_cpu_seconds": round(traced, 3),
        "cpu_seconds": {stage: round(spent, 6) for stage, spent in clock.seconds.items()},
        "microseconds_per_node": {
            name: round(1e6 * spent / nodes, 2) for name, spent in totals(clock.seconds).items()
        },
        "peak_bytes": report.peak_bytes,
    }


GROUPS = ("passes", "verifier", "liveness", "report")


def totals(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds of `GROUPS` of stages, and of all."""
    found = dict.fromkeys(GROUPS, 0.0)
    for stage, spent in seconds.items():
        name = "report"
        if stage.startswith("pass ") or stage == "copy, lint":
            name = "passes"
        elif stage.startswith("check "):
            name = "verifier"
        elif stage in ("record optimizer", "held ranges", "liveness", "ledger"):
            name = "liveness"
        found[name] += spent
    return found | {"all": sum(found.values())}


def deeper(blocks: int) -> dict[str, Any]:
    """A row of the first table: every block a unit."""
    with torch.device("meta"):
        model, x = Grouped([blocks]), torch.empty(4, WIDTH)
    make = functools.partial(fxshard.plan, model, (x,), **OPTIONS)
    return {"blocks": blocks, **measure(make, units=["groups.*"])}


def regrouped(counts: Sequence[int], leaves: int) -> list[dict[str, Any]]:
    """The second table: `leaves` blocks in ever more units; each count divides the next."""
    sizes = [count // before for before, count in itertools.pairwise((1, *counts, leaves))]
    with torch.device("meta"):
        model, x = Grouped(sizes), torch.empty(4, WIDTH)
    plan = fxshard.plan(model, (x,), **OPTIONS, units=["groups.*"])
    return [
        {"blocks": leaves, **measure(plan.replan, units=[".".join(["groups", *"*" * depth])])}
        for depth in range(1, len(counts) + 1)
    ]


def growth(rows: Sequence[dict[str, Any]], group: str) -> float:
    """Microseconds per node of the last row to those of the first."""
    last, first = (rows[i]["microseconds_per_node"][group] for i in (-1, 0))
    return float(last / first)


def claims_of(
    by_nodes: Sequence[dict[str, Any]], by_units: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Linear or not, table by table and group by group."""
    said = {}
    for rows, what in ((by_nodes, "nodes"), (by_units, "units")):
        said[f"µs per node, {rows[-1][what]:,} {what} / {rows[0][what]:,}"] = rows
    found = []
    for claim, rows in said.items():
        for group in GROUPS:
            value = round(growth(rows, group), 3)
            met = value <= GROWTH_TARGET
            found.append(
                {"claim": f"{group}: {claim}", "value": value, "target": GROWTH_TARGET, "met": met}
            )
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """Both tables as a picture: seconds over nodes, microseconds per node over units."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    nodes = [row["nodes"] for row in result["by_nodes"]]
    for group in GROUPS:
        seconds = [
            row["microseconds_per_node"][group] * row["nodes"] / 1e6 for row in result["by_nodes"]
        ]
        (line,) = left.loglog(nodes, seconds, marker="o", label=group)
        ideal = [seconds[0] * count / nodes[0] for count in nodes]
        left.loglog(nodes, ideal, linestyle=":", linewidth=1, color=line.get_color())
        units = [row["units"] - 1 for row in result["by_units"]]
        right.plot(
            units,
            [row["microseconds_per_node"][group] for row in result["by_units"]],
            marker="o",
            label=group,
        )
    left.set(xlabel="nodes of the graph", ylabel="CPU seconds", title="a unit per block")
    left.legend()
    right.set_xscale("log", base=2)
    title = f"{result['by_units'][0]['blocks']:,} blocks in more units"
    right.set(xlabel="units", ylabel="CPU µs per node", ylim=(0, None), title=title)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, plot, and write where --out says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", nargs="+", type=int, default=[*BLOCKS])
    parser.add_argument("--units", nargs="+", type=int, default=[*UNITS])
    parser.add_argument("--leaves", type=int, default=LEAVES, help="blocks of the second table")
    parser.add_argument("--smoke", action="store_true", help="two small graphs, and no plot")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/scale.json")
    given = parser.parse_args(arguments)
    everything = (given.blocks, given.units, given.leaves) == ([*BLOCKS], [*UNITS], LEAVES)
    if given.smoke:
        given.blocks, given.units, given.leaves, everything = [1, 2], [2, 4], 4, False
    if any(b % a for a, b in itertools.pairwise([*given.units, given.leaves])):
        parser.error("each number of units must divide the next, and the last one --leaves")
    deeper(2)  # imports and caches
    by_nodes = []
    for blocks in given.blocks:
        by_nodes.append(deeper(blocks))
        print(by_nodes[-1], flush=True)
    by_units = regrouped(given.units, given.leaves)
    for row in by_units:
        print(row, flush=True)
    result = {
        "claims": claims_of(by_nodes, by_units),
        "by_nodes": by_nodes,
        "by_units": by_units,
    }
    for claim in result["claims"]:
        print(claim)
    if everything:
        plot(result, PLOT)
    if given.out or everything:
        write(given.out or RESULTS / "scale.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
