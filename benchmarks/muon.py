"""Llama 3 8B with Muon over the matrices of its blocks beside AdamW: bytes and estimated time.

    python -m benchmarks.muon                      # prints, and writes benchmarks/results/

As `benchmarks.plan_llama3_8b`: planned on the CPU, from meta tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from torch.optim import AdamW, Muon, Optimizer

import fxshard
from benchmarks.figures import RESULTS, write
from benchmarks.shapes import LLAMA3_8B, call

SEQUENCE, WORLD = 8192, 64
RECORD = RESULTS / "muon.json"


def muon(named_parameters: Iterable[tuple[str, Any]]) -> list[Optimizer]:
    """Muon for matrices inside of blocks, AdamW for embedding, head and vectors."""
    named = list(named_parameters)
    inside = {name for name, p in named if p.dim() == 2 and ".layers." in name}
    return [
        Muon([p for name, p in named if name in inside], lr=3e-4, adjust_lr_fn="match_rms_adamw"),
        AdamW([p for name, p in named if name not in inside], lr=3e-4),
    ]


def figures(plan: fxshard.Plan) -> dict[str, Any]:
    """Bytes of rank 0, and milliseconds on H100s."""
    estimate = plan.estimate("h100")
    step = plan.optimizer_step
    assert step is not None
    phase = next(p for p in plan.memory.phases() if p.phase == "optimizer")
    rows = [row for row in estimate.rows if row.phase == "optimizer"]
    traffic = estimate.traffic().get("all-to-all")
    return {
        "peak_bytes": plan.memory.peak_bytes,
        "state_bytes": sum(step.state[number].bytes for number in step.held),
        "optimizer_peak_bytes": phase.peak_bytes,
        "all_to_alls": 0 if traffic is None else traffic.collectives,
        "sent_bytes": 0 if traffic is None else traffic.link_bytes + traffic.network_bytes,
        "owner_flops": step.sent.flops,
        "optimizer_ms": 1e3 * (max(r.end for r in rows) - min(r.start for r in rows)),
        "step_ms": 1e3 * estimate.step_seconds,
    }


def main() -> None:
    """Plan, print the owners, write the figures."""
    options = {"world_size": WORLD, "checkpoint": "full"}
    plan = fxshard.plan(LLAMA3_8B.model(), kwargs=call(1, SEQUENCE), optimizer=AdamW, **options)
    found = {"world_size": WORLD, "sequence": SEQUENCE, "adamw": figures(plan)}
    plan = plan.replan(optimizer=muon)
    print(plan.dump("optimizer"))
    found["muon"] = figures(plan)
    print(json.dumps(found, indent=2))
    write(RECORD, found)


if __name__ == "__main__":
    main()
