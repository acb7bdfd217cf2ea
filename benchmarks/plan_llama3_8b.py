"""Plan a 32-layer Llama-3-8B shape for 1,024 ranks on CPU: the report, its time and its memory.

    python -m benchmarks.plan_llama3_8b            # prints, and writes benchmarks/results/

Nothing is downloaded and nothing of the model is allocated: it is built on the meta device from a
config. CPU seconds are the process's, imports and all; RSS is its peak.
"""

from __future__ import annotations

import functools
import json
import resource
import time

import torch

import fxshard
from benchmarks.figures import RESULTS, write
from benchmarks.shapes import LLAMA3_8B, call

SEQUENCE, WORLD = 8192, 1024
RECORD = RESULTS / "plan_llama3_8b.json"


def main() -> None:
    """Plan, print the table, write the figures."""
    plan = fxshard.plan(
        LLAMA3_8B.model(),
        kwargs=call(1, SEQUENCE),
        world_size=WORLD,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
    )
    print(plan.dump())
    print()
    print(plan.memory.table(depth=3, units="GiB"))
    print()
    print(plan.memory.explain_peak(5, what_ifs=False))
    figures = {
        "parameters": LLAMA3_8B.parameters,
        "world_size": WORLD,
        "sequence": SEQUENCE,
        "graph_nodes": len(plan.program.graph.nodes),
        "regions": len(plan.program.schedule.regions) if plan.program.schedule else 0,
        "peak_bytes": plan.memory.peak_bytes,
        "cpu_seconds": round(time.process_time(), 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(figures, indent=2))
    write(RECORD, figures)


if __name__ == "__main__":
    main()
