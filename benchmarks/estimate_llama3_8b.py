"""What the estimate says of Llama-3-8B, and what torchtitan measured of it: docs/cost.md.

    python -m benchmarks.estimate_llama3_8b

Nothing runs but captures on meta tensors; the machine decides only how long the script takes.
"""

from __future__ import annotations

import dataclasses
import datetime
import platform
import time

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

import fxshard
from fxshard.cost.hardware import PRESETS
from fxshard.model_source import PRESETS as MODELS

SEQUENCE = 8192
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: tables 1 and 3, FSDP2 without compile.
# Llama 3.1 8B, 2 sequences of 8,192 a rank, selective activation checkpointing, bf16.
TORCHTITAN = {8: 5762, 128: 5605}  # ranks -> tokens per second and GPU
# Its GPUs: H100 with HBM2e of 2.4 TB/s, at 500 W.
GRAND_TETON = dataclasses.replace(PRESETS["h100"], name="h100, 2.4 TB/s", memory_bandwidth=2.4e12)


def model() -> nn.Module:
    """The preset, on meta."""
    values = {key: value for key, value in MODELS["llama3-8b"].items() if key != "model_type"}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**values, use_cache=False, attn_implementation="sdpa"))


def plan(batch: int, **options: object) -> fxshard.Plan:
    """A plan for 8 ranks."""
    tokens = torch.zeros(batch, SEQUENCE, dtype=torch.int64, device="meta")
    return fxshard.plan(
        model(),
        (),
        {"input_ids": tokens, "labels": tokens.clone()},
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
    for ranks, measured in TORCHTITAN.items():
        found = first.replan(world_size=ranks).estimate(GRAND_TETON)
        tokens = 2 * SEQUENCE / found.step_seconds
        rows.append((ranks, f"{measured:,}", f"{tokens:,.0f}", f"{tokens / measured:.2f}"))
    headers = ("ranks", "measured tokens/s", "estimated", "ratio")
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
