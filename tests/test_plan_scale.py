"""Planning allocates nothing and runs nothing: a 32-layer Llama-3-8B shape for 1,024 ranks."""

import json
import subprocess
import sys

SCRIPT = """
import json, resource, time
import torch, transformers
import torch.distributed as dist
import fxshard
from tests import oracles

config = transformers.LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, use_cache=False,
)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.zeros(1, 2048, dtype=torch.int64)
with oracles.count_collectives() as collectives:
    plan = fxshard.plan(
        model, (), {"input_ids": tokens, "labels": tokens}, world_size=1024,
        optimizer=torch.optim.AdamW,
    )
    report = plan.memory
print(json.dumps({
    "collectives": len(collectives.calls),
    "initialized": dist.is_initialized(),
    "meta": all(p.is_meta for p in model.parameters()),
    "peak": report.peak_bytes,
    "parameters": sum(p.numel() for p in model.parameters()),
    "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "cpu_seconds": time.process_time(),
}))
"""


def test_llama3_8b_for_1024_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameters"] == 8_030_261_248
    assert found["collectives"] == 0 and not found["initialized"] and found["meta"]
    # 8 billion fp32 parameters are 30 GiB; the process stays under 1.5.
    assert found["rss"] < 1.5 * 2**30
    assert found["cpu_seconds"] < 40
    assert found["peak"] > 2**30
