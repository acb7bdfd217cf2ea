"""How long the memory analysis takes after capture, over 1,000 to 100,000 operators.

    python benchmarks/analysis_speed.py [--out benchmarks/results/analysis_speed.json] [BLOCKS ...]

A stack of residual MLP blocks, one unit each, on 8 ranks with AdamW. Times are CPU seconds of this
process. "plan" is the trace and the passes, "optimizer capture" the recording of AdamW's own steps;
"analysis" is what follows: live ranges of the first and of the steady step, and the peak; "table"
is every state of every module with its global and its own bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxshard
from fxshard.memory import liveness
from fxshard.memory.held import held_ranges
from fxshard.memory.optimizer import trace_step

BLOCKS = (25, 75, 250, 750, 2500)


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x)), float32 [*, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """A number of blocks and a scalar loss."""

    def __init__(self, blocks: int, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def measure(blocks: int) -> dict[str, Any]:
    """One row of the table."""
    with torch.device("meta"):
        model, x = Stack(blocks), torch.empty(8, 64)
    begin = time.process_time()
    plan = fxshard.plan(model, (x,), world_size=8, optimizer=torch.optim.AdamW)
    planned = time.process_time()
    step = trace_step(plan.program, torch.optim.AdamW)
    recorded = time.process_time()
    held = held_ranges(model, plan.workload.call, plan.program)
    report = liveness.analyse(plan.programs, held, step)
    peak = report.peak_bytes
    analysed = time.process_time()
    rows = len(report.rows()) + len(report.owned())
    done = time.process_time()
    points = {p.name: p.points for p in report.ledger().phases}
    nodes = points["forward"] + points["backward"]
    return {
        "blocks": blocks,
        "nodes": nodes,
        "plan_cpu_seconds": round(planned - begin, 2),
        "optimizer_capture_cpu_seconds": round(recorded - planned, 2),
        "analysis_cpu_seconds": round(analysed - recorded, 3),
        "table_cpu_seconds": round(done - analysed, 3),
        "analysis_microseconds_per_node": round(1e6 * (analysed - recorded) / nodes, 1),
        "rows": rows // 2,
        "peak_bytes": peak,
    }


def main() -> None:
    """Print the table; write it where --out says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("blocks", nargs="*", type=int, default=BLOCKS)
    args = parser.parse_args()
    measure(5)  # imports and caches
    found = []
    for blocks in args.blocks:
        found.append(measure(blocks))
        print(json.dumps(found[-1]), flush=True)
    if args.out:
        result = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cases": found,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
