"""What `offload_activations` saves and costs.

    python -m benchmarks.offload_activations

Llama 3 8B at its published size (bf16, gradients reduced in fp32, the loss in chunks, AdamW),
planned without running anything: peak bytes of the device and of the CPU, what is alive between
forward and backward, and the estimated step on H100s, whose times `True` goes by; with each block
checkpointed and without.
"""

from __future__ import annotations

import sys
from typing import Any

import fxshard
from benchmarks.figures import RESULTS, asked, write
from benchmarks.gpu.models import ON_GPU, Recipe, tiny_llama, tokens
from benchmarks.passes import planned
from fxshard.ir import ops, tags

HARDWARE = "h100"
CHECKPOINTS = ("full", "selective", None)
CHOSEN: tuple[Any, ...] = (None, True, ("layers.*",))


def figures(plan: fxshard.Plan) -> dict[str, Any]:
    """What a plan takes."""
    memory, estimate = plan.memory, plan.estimate(HARDWARE)
    launches = plan.program.graph.find_nodes(op="call_function", target=ops.offload)
    backward = next(phase for phase in memory.phases() if phase.phase == "backward")
    return {
        "peak_bytes": memory.peak_bytes,
        "between_bytes": sum(backward.start),
        "host_peak_bytes": memory.host_peak_bytes,
        "offloaded_tensors": sum(len(tags.operands(launch)) for launch in launches),
        "step_ms": round(1e3 * estimate.step_seconds, 3),
        "exposed_ms": round(1e3 * estimate.exposed_communication_seconds, 3),
    }


def rows(recipe: Recipe, world: int) -> list[dict[str, Any]]:
    """The plan with each setting."""
    plan = planned(recipe, world).replan(chunk_loss=True)
    found: list[dict[str, Any]] = []
    for checkpoint in CHECKPOINTS:
        for chosen in CHOSEN:
            changed = plan.replan(checkpoint=checkpoint, offload_activations=chosen)
            named = {"checkpoint": checkpoint, "offload_activations": chosen}
            found.append({**named, "world_size": world, **figures(changed)})
            print(found[-1], flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Plan, print, and write where --out says."""
    given = asked(__doc__, arguments)
    recipe = ON_GPU["llama-8b"]
    if given.smoke:
        recipe = Recipe(tiny_llama, tokens(2, 64, 512), precision=None, attention="default")
    found = rows(recipe, 8 if given.smoke else 64)
    if given.out or not given.smoke:
        write(
            given.out or RESULTS / "offload_activations.json", {"hardware": HARDWARE, "rows": found}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
