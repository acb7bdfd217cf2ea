"""What `chunk_loss` saves and costs.

    python -m benchmarks.chunk_loss

Peak bytes: Llama 3 8B at its published size (bf16, gradients reduced in fp32, every block
checkpointed, AdamW), planned without running anything, with the logits in full and by chunks: what
a run then measures, to the byte (tests/end_to_end/test_chunk_loss.py), and the estimated step on
H200s. Time: CPU time of steps of a small model with a large vocabulary, in one process, with and
without in turn; the ratio of their medians. Absolute times say nothing of other machines.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import fxshard
from benchmarks.figures import RESULTS, asked, ratio, spread, write
from benchmarks.gpu.models import ON_GPU, Llama, Recipe, tiny_llama, tokens
from benchmarks.passes import HARDWARE, planned

ROWS: tuple[bool | int, ...] = (False, True, 256)
SIZES = {"vocab": 16_384, "dim": 256, "heads": 4, "kv_heads": 2, "hidden": 512, "depth": 2}
SEQ = 512


def peaks(recipe: Recipe, world: int, seq: int) -> list[dict[str, Any]]:
    """The plan with each number of rows."""
    plan = planned(recipe, world)
    found: list[dict[str, Any]] = []
    for rows in ROWS:
        changed = plan.replan(chunk_loss=rows)
        top = changed.memory.peak_at
        row = {
            "world_size": world,
            "seq": seq,
            "chunk_loss": rows,
            "peak_bytes": changed.memory.peak_bytes,
            "peak_in": f"{top.phase}, {top.node} of {top.module or 'the root'}",
            "nodes": len(changed.program.graph.nodes),
            "step_ms": round(1e3 * changed.estimate(HARDWARE).step_seconds, 3),
        }
        if found:
            row["ratios"] = {
                key: round(row[key] / found[0][key], 4) for key in ("peak_bytes", "step_ms")
            }
        found.append(row)
        print(row, flush=True)
    return found


def step_seconds(model: Any, batch: torch.Tensor) -> float:
    """CPU time of a forward and backward, which others on the machine disturb least."""
    began = time.process_time()
    model(batch).backward()
    took = time.process_time() - began
    model.zero_grad(set_to_none=True)
    return took


def times(count: int, seq: int) -> list[dict[str, Any]]:
    """Steps in turn, without and with chunks."""
    batch = torch.randint(SIZES["vocab"], (1, seq))
    models = {}
    for rows in ROWS:
        torch.manual_seed(0)
        model = Llama(seq=seq, tied=False, **SIZES)
        models[rows] = fxshard.compile(model, world_size=1, units=["layers.*"], chunk_loss=rows)
        step_seconds(models[rows], batch)  # captures
    taken: dict[bool | int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(count):
        for rows, model in models.items():
            taken[rows].append(step_seconds(model, batch))
    found = []
    for rows, seconds in taken.items():
        row = {
            "chunk_loss": rows,
            "cpu_seconds": {key: round(value, 4) for key, value in spread(seconds).items()},
            "ratio": round(ratio(seconds, taken[False]), 4),
        }
        found.append(row)
        print(row, flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Plan, measure, print, and write where --out says."""
    given = asked(__doc__, arguments, "a small model, few steps")
    if given.smoke:
        recipe = Recipe(tiny_llama, tokens(2, 64, 512), precision=None, attention="default")
        found = {"peaks": peaks(recipe, 8, 64), "times": times(1, 32)}
    else:
        recipe = ON_GPU["llama-8b"]
        (batch,) = recipe.batch(torch.device("meta"))
        rows = peaks(recipe, 64, batch.shape[1])
        found = {"peaks": rows, "times": times(9, SEQ)}
    if given.out or not given.smoke:
        out = given.out or RESULTS / "chunk_loss.json"
        write(out, {"hardware": HARDWARE, "model": {**SIZES, "seq": SEQ}, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
