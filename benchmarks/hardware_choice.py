"""What bytes of checkpoints choose for each kind of GPU, and what an H100's choice costs there.

    python -m benchmarks.hardware_choice

Plans Llama 3 8B on 64 ranks, as benchmarks/joint_choice.py does, with `checkpoint=` a number of
bytes. Nothing runs. Steps are estimates; those of an H100's choice are the same plan on other GPUs.
"""

from __future__ import annotations

import sys
from typing import Any

import fxshard
from benchmarks.figures import RESULTS, asked, write
from benchmarks.gpu.models import ON_GPU, Recipe, tiny_llama, tokens
from benchmarks.joint_choice import HARDWARE, figures
from benchmarks.passes import planned
from fxshard.hardware import PRESETS

BUDGET = 8 * 2**30


def row(plan: fxshard.Plan, name: str, chosen_for_other: fxshard.Plan) -> dict[str, Any]:
    """One kind of GPU."""
    own = plan.replan(hardware=name)
    told = figures(own)
    told["step_ms"] = round(1e3 * own.estimate().step_seconds, 1)
    other = round(1e3 * chosen_for_other.estimate(name).step_seconds, 1)
    return {"hardware": name, **told, "step_ms_as_for_other": other}


def main(arguments: list[str] | None = None) -> int:
    """Plan, print, and write where --out says."""
    given = asked(__doc__, arguments)
    recipe, world, budget = ON_GPU["llama-8b"], 64, BUDGET
    if given.smoke:
        recipe = Recipe(tiny_llama, tokens(2, 64, 512), precision=None, attention="default")
        world, budget = 8, 3 * 2**19
    plan = planned(recipe, world).replan(chunk_loss=True, checkpoint=budget, hardware=HARDWARE)
    plan = plan.replan(offload_activations=True)
    rows = []
    for name in PRESETS:
        rows.append(row(plan, name, plan))
        print(rows[-1], flush=True)
    found = {"other": HARDWARE, "budget_bytes": budget, "world_size": world, "rows": rows}
    if given.out or not given.smoke:
        write(given.out or RESULTS / "hardware_choice.json", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
