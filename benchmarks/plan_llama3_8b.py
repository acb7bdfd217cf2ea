"""Plan a 32-layer Llama-3-8B shape for 1,024 ranks on CPU: the report, its time and its memory.

    python benchmarks/plan_llama3_8b.py            # prints, and writes benchmarks/results/

Nothing is downloaded and nothing of the model is allocated: it is built on the meta device from a
config. CPU seconds are the process's, imports and all; RSS is its peak.
"""

from __future__ import annotations

import functools
import json
import platform
import resource
import time
from pathlib import Path

import torch
import transformers

import fxshard

SEQUENCE, WORLD = 8192, 1024
RESULTS = Path(__file__).parent / "results" / "plan_llama3_8b.json"


def main() -> None:
    """Plan, print the table, write the figures."""
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64)
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-4)
    plan = fxshard.plan(
        model,
        kwargs={"input_ids": tokens, "labels": tokens},
        world_size=WORLD,
        optimizer=optimizer,
    )
    print(plan.dump())
    print()
    print(plan.memory.table(depth=3, units="GiB"))
    print()
    print(plan.memory.explain_peak(5, levers=False))
    figures = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "world_size": WORLD,
        "sequence": SEQUENCE,
        "graph_nodes": len(plan.program.graph.nodes),
        "regions": len(plan.program.schedule.regions) if plan.program.schedule else 0,
        "peak_bytes": plan.memory.peak_bytes,
        "cpu_seconds": round(time.process_time(), 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(figures, indent=2))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
