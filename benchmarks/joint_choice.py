"""What bytes of checkpoints choose: keep, recompute or offload, against recomputation alone.

    python -m benchmarks.joint_choice

Llama 3 8B at its published size on 64 ranks (bf16, gradients reduced in fp32, the loss in chunks,
AdamW, 1 x 8192 tokens per rank), planned without running anything. Per budget of saved activations:
how many tensors leave and operators run again, bytes on the device and on the CPU, the estimated
step on H100s, and the CPU seconds of the decision, which a plan takes besides.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import fxshard
from benchmarks.figures import RESULTS, asked, write
from benchmarks.gpu.models import ON_GPU, Recipe, tiny_llama, tokens
from benchmarks.passes import planned
from fxshard.cost import activations
from fxshard.cost.operators import node_seconds
from fxshard.errors import TooLittleError
from fxshard.hardware import PRESETS
from fxshard.ir import ops, tags

HARDWARE = "h100"
GIB = (1.5, 3, 5, 8, 12, 20, 30, 40, 50)


def figures(plan: fxshard.Plan) -> dict[str, Any]:
    """What a plan takes."""
    memory, program = plan.memory, plan.program
    launches = program.graph.find_nodes(op="call_function", target=ops.offload)
    return {
        "offloaded": sum(len(tags.operands(launch)) for launch in launches),
        "recomputed": sum(memory.recomputed().values()),
        "saved_bytes": sum(k.bytes for k in memory.kept_for_backward() if not k.on_cpu),
        "peak_bytes": max(memory.peak_bytes, memory.first_step_peak_bytes),
        "host_peak_bytes": memory.host_peak_bytes,
        "step_ms": round(1e3 * plan.estimate(HARDWARE).step_seconds, 1),
    }


def row(plan: fxshard.Plan, budget: int) -> dict[str, Any]:
    """A budget, with both choices; None where the bytes are too few."""
    found: dict[str, Any] = {"budget_bytes": budget}
    for name, allowed in (("joint", True), ("recompute_only", False)):
        try:
            found[name] = figures(plan.replan(checkpoint=budget, offload_activations=allowed))
        except TooLittleError:
            found[name] = None
    return found


def decision_seconds(plan: fxshard.Plan, budget: int) -> dict[str, float]:
    """CPU seconds of the choice alone, on a program that has not chosen yet."""

    def stem(default: list[Any]) -> list[Any]:
        names = [step.name for step in default]
        return default[: names.index("checkpoint")]

    program = plan.replan(checkpoint="full", passes=stem).program
    found, chosen = {}, PRESETS[HARDWARE]
    for name, hardware in (("joint", chosen), ("recompute_only", None)):
        start = time.process_time()
        activations.choose(program, budget, lambda node: node_seconds(node, chosen), hardware)
        found[name] = round(time.process_time() - start, 2)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Plan, print, and write where --out says."""
    given = asked(__doc__, arguments)
    recipe, world, sizes = ON_GPU["llama-8b"], 64, [int(gib * 2**30) for gib in GIB]
    if given.smoke:
        recipe = Recipe(tiny_llama, tokens(2, 64, 512), precision=None, attention="default")
        world, sizes = 8, [3 * 2**19]
    plan = planned(recipe, world).replan(chunk_loss=True, checkpoint=None)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        rows.append(row(plan, size))
        print(rows[-1], flush=True)
    found = {
        "hardware": HARDWARE,
        "world_size": world,
        "plain": figures(plan),
        "rows": rows,
        "decision_cpu_seconds": decision_seconds(plan, sizes[len(sizes) // 2]),
    }
    print(found["plain"], found["decision_cpu_seconds"])
    if given.out or not given.smoke:
        write(given.out or RESULTS / "joint_choice.json", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
