"""What the estimate says of Llama-3-8B, and what torchtitan measured of it: docs/cost.md.

    python -m benchmarks.estimate_llama3_8b

Nothing runs but captures on meta tensors; the machine decides only how long the script takes.
"""

from __future__ import annotations

import datetime
import platform
import time

import torch
from tabulate import tabulate
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from benchmarks.published import GPUS, MEASURED
from benchmarks.shapes import LLAMA3_8B, call
from fxshard.hardware import PRESETS

SEQUENCE = 8192
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TORCHTITAN = [each for each in MEASURED if each.source == "torchtitan-h100"]


def plan(batch: int, **options: object) -> fxshard.Plan:
    """A plan for 8 ranks."""
    return fxshard.plan(
        LLAMA3_8B.model(),
        kwargs=call(batch, SEQUENCE),
        world_size=8,
        optimizer=torch.optim.AdamW,
        mixed_precision=BF16,
        **options,
    )


def main() -> None:
    """Print both tables."""
    today = datetime.date.today().isoformat()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {today}\n")
    rows = []
    seconds = 0.0
    first = plan(1)
    for ranks in (8, 64, 1024):
        made = first.replan(world_size=ranks)
        made.estimate("h100")  # records the optimizer's step
        for name in PRESETS:
            begin = time.process_time()
            found = made.estimate(name)
            seconds = max(seconds, time.process_time() - begin)
            rows.append(
                (
                    name,
                    ranks,
                    f"{1e3 * found.step_seconds:,.0f}",
                    f"{1e3 * found.compute_seconds:,.0f}",
                    f"{1e3 * found.communication_seconds:,.0f}",
                    f"{1e3 * found.exposed_communication_seconds:,.0f}",
                    f"{found.mfu:.1%}",
                    f"{SEQUENCE / found.step_seconds:,.0f}",
                )
            )
    headers = ("GPU", "ranks", "step ms", "compute", "communication", "exposed", "MFU", "tokens/s")
    print(tabulate(sorted(rows), headers, tablefmt="github", disable_numparse=True))
    nodes = len(made.program.graph.nodes)
    print(f"\nAn estimate of {nodes:,} nodes took {seconds:.3f} s of CPU time at most.\n")
    rows = []
    first = plan(2, checkpoint="selective")
    for said in TORCHTITAN:
        found = first.replan(world_size=said.world).estimate(GPUS[said.gpu])
        tokens = 2 * SEQUENCE / found.step_seconds
        ratio = tokens / said.tokens
        rows.append((said.world, f"{said.tokens:,}", f"{tokens:,.0f}", f"{ratio:.2f}"))
    headers = ("ranks", "measured tokens/s", "estimated", "ratio")
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
