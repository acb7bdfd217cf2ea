"""Tune a Llama-3-8B shape for H100s: the fastest configuration that fits 80 GB, and the front.

    python -m benchmarks.tune_llama3_8b            # 64 ranks; --world-size 8 for one node

Nothing runs and nothing is allocated. CPU seconds are the process's: `tune` alone, and with imports
and the building of the model. Writes benchmarks/results/tune_llama3_8b_<ranks>.json and .png.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import time

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from benchmarks.figures import RESULTS, write
from benchmarks.plan_llama3_8b import SEQUENCE
from benchmarks.shapes import LLAMA3_8B, call

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def main() -> None:
    """Tune, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="of the example; doubled from there")
    parser.add_argument("--precision", action="store_true", help="search it too; else bf16, fp32")
    parser.add_argument("--plans", type=int, default=8)
    given = parser.parse_args()
    start = time.process_time()
    result = fxshard.tune(
        LLAMA3_8B.model(),
        kwargs=call(given.batch, SEQUENCE),
        world_size=given.world_size,
        hardware="h100",
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
        plans=given.plans,
        **({} if given.precision else {"mixed_precision": BF16}),
    )
    seconds = time.process_time() - start
    print(result)
    figures = {
        "world_size": given.world_size,
        "sequence": SEQUENCE,
        "configurations": len(result.trials),
        "planned": result.planned,
        "slack": round(result.slack, 4),
        "best": result.best.setting,
        "batch": result.best.batch,
        "peak_bytes": result.best.peak_bytes,
        "step_seconds": result.best.step_time,
        "tune_cpu_seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time(), 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(figures, indent=2))
    path = RESULTS / f"tune_llama3_8b_{given.world_size}.json"
    write(path, figures)
    result.plot(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
