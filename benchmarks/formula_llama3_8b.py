"""One capture of a Llama-3-8B shape, and every batch, sequence and number of ranks from it.

    python -m benchmarks.formula_llama3_8b         # prints, and writes benchmarks/results/

Prints the formula of the peak, what fits 80 GiB, and how long questions take; draws the peak
against each size. Nothing of the model is allocated. CPU seconds are the process's.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from benchmarks.figures import RESULTS, ROOT, write
from benchmarks.shapes import LLAMA3_8B, call

RECORD = RESULTS / "formula_llama3_8b.json"
PLOT = ROOT / "docs" / "formula-llama3-8b.png"
POINTS = 1000


def planned() -> fxshard.Plan:
    """The plan, with batch and sequence open."""
    return fxshard.plan(
        LLAMA3_8B.model(),
        kwargs=call(2, 8192),
        world_size=64,
        mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        checkpoint="full",
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
        dynamic={
            "batch": [("input_ids", 0), ("labels", 0)],
            "seq": [("input_ids", 1), ("labels", 1)],
        },
    )


def seconds(function: Callable[[], Any], times: int = 9) -> float:
    """Median CPU seconds of a call; the first is not counted."""
    found = []
    for _ in range(times + 1):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return statistics.median(found[1:])


def main() -> None:
    """Plan, ask, write the figures."""
    start = time.process_time()
    plan = planned()
    planning = time.process_time() - start
    start = time.process_time()
    formula = plan.memory.formula()
    print(formula, "\n")
    building = time.process_time() - start
    draw = np.random.default_rng(0)
    sizes = {
        "batch": draw.integers(2, 65, POINTS),
        "seq": draw.integers(2, 131_072, POINTS),
        "world": 2 ** draw.integers(1, 11, POINTS),
    }
    bytes_at = formula.lambdify()
    cell = {"module": "model.layers.7", "state": "Peak Backward", "category": "Activation"}
    figures = {
        "graph_nodes": len(plan.program.graph.nodes),
        "live_ranges": len(plan.memory.ledger().ranges),
        "monomials": len(formula.vectors.basis.monomials),
        "candidates_of_the_peak": len(formula.vectors.choose),
        "planning_cpu_seconds": round(planning, 2),
        "first_formula_cpu_seconds": round(building, 2),
        "thousand_points_cpu_milliseconds": round(1e3 * seconds(lambda: bytes_at(**sizes)), 2),
        "cell_cpu_milliseconds": round(
            1e3 * seconds(lambda: plan.memory.formula(**cell).at(seq=4096)), 2
        ),
    }
    plan.memory.plot(
        PLOT,
        budget="80GiB",
        batch=range(2, 17),
        seq=range(2048, 65_537, 2048),
        world=[2**n for n in range(11)],
    )
    for what, fixed in (
        ("max_batch", {"seq": 8192}),
        ("max_seq", {"batch": 2}),
        ("min_world", {"batch": 4, "seq": 8192}),
    ):
        start = time.process_time()
        print(plan.solve(what, "80GiB", **fixed))
        print(f"{time.process_time() - start:.1f} CPU-seconds\n")
    print(json.dumps(figures, indent=2))
    write(RECORD, figures)


if __name__ == "__main__":
    main()
