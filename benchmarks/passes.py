"""What each pass wins: the same step planned with it, without it, or with another of its options.

    python -m benchmarks.passes

Llama 3 8B at its published size on 64 ranks (bf16, gradients reduced in fp32, every block
checkpointed, 1 x 8192 tokens per rank, AdamW), planned for an H200 without running anything: peak
bytes of tensors on a rank (what a run then measures, to the byte: tests/memory/),
collectives per step, and the estimate of step time and exposed communication (docs/cost.md says
what it stands on). One row per option; each differs from the first in what it names only.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import fxshard
from benchmarks.figures import RESULTS, asked, write
from benchmarks.gpu.models import ON_GPU, Recipe, tiny_llama, tokens
from fxshard.errors import FxshardError
from fxshard.ir import ops

HARDWARE = "h200"
COLLECTIVES = (ops.all_gather, ops.reduce_scatter, ops.all_reduce)
# pass, what is changed
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    ("prefetch", {"forward_prefetch": 0, "backward_prefetch": 0}),
    ("prefetch", {"backward_prefetch": "post"}),
    ("prefetch", {"forward_prefetch": 2, "backward_prefetch": 2}),
    ("prefetch", {"max_inflight": 2}),
    ("bucket", {"max_bucket_bytes": "50MiB"}),
    ("bucket", {"min_bucket_bytes": "200MiB"}),
    ("bucket", {"pack_bytes": 0}),
    ("checkpoint", {"checkpoint": "selective"}),
    ("checkpoint", {"checkpoint": None}),
    ("checkpoint", {"checkpoint": "10GiB"}),
    ("insert-step", {"optimizer_in_backward": True}),
)


def planned(recipe: Recipe, world: int) -> Any:
    """The plan with all options at their defaults."""
    meta = torch.device("meta")
    with meta:
        model = recipe.model()
    return fxshard.plan(
        model,
        recipe.batch(meta),
        world_size=world,
        units=["layers.*"],
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
        **recipe.options(),
    )


def figures(plan: Any) -> dict[str, Any]:
    """Bytes, collectives and estimated seconds of a plan."""
    estimate = plan.estimate(HARDWARE)
    launches = [
        node
        for _, graph in plan.program.schedule.phases()
        for node in graph.nodes
        if node.target in COLLECTIVES
    ]
    return {
        "peak_bytes": plan.memory.peak_bytes,
        "collectives": len(launches),
        "buffers": sum(len(node.args[0]) for node in launches),
        "step_ms": round(1e3 * estimate.step_seconds, 3),
        "exposed_ms": round(1e3 * estimate.exposed_communication_seconds, 3),
    }


def said(changes: dict[str, Any]) -> str:
    """Options as text."""
    return ", ".join(f"{key}={value!r}" for key, value in changes.items()) or "default"


def main(arguments: list[str] | None = None) -> int:
    """Plan, print, and write where --out says."""
    given = asked(__doc__, arguments, "a small model, two variants")
    recipe, world, variants = ON_GPU["llama-8b"], 64, VARIANTS
    if given.smoke:
        recipe = Recipe(tiny_llama, tokens(2, 64, 512), precision=None, attention="default")
        world, variants = 8, VARIANTS[:2]
    rows: list[dict[str, Any]] = []
    plan = planned(recipe, world)
    for name, changes in variants:
        began = time.process_time()
        row: dict[str, Any] = {"pass": name, "options": said(changes)}
        try:
            row |= figures(plan.replan(**changes))
        except FxshardError as error:
            row["refused"] = str(error)[:500]
        row["cpu_seconds"] = round(time.process_time() - began, 2)
        if rows and "peak_bytes" in row:
            base = rows[0]
            row["ratios"] = {
                key: round(row[key] / base[key], 4) for key in ("peak_bytes", "step_ms")
            }
        rows.append(row)
        print(row, flush=True)
    if given.out or not given.smoke:
        write(
            given.out or RESULTS / "passes.json",
            {"hardware": HARDWARE, "world_size": world, "rows": rows},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
