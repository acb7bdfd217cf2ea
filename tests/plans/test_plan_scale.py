"""Nothing runs in plan: Llama-3-8B for 1024 ranks, on one CPU, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PLAN = """
import json, time
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
import fxshard
from tests.oracles import count_collectives

config = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    use_cache=False, attn_implementation="sdpa", dtype=torch.float32,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
    tokens = torch.zeros(1, 2048, dtype=torch.long)

largest = 0

class Allocations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        global largest
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                largest = max(largest, tensor.untyped_storage().nbytes())
        return result

begin = time.process_time()
with count_collectives() as seen, Allocations():
    plan = fxshard.plan(
        model, (), {"input_ids": tokens, "labels": tokens}, world_size=1024,
        optimizer=torch.optim.AdamW,
    )
    memory = plan.memory
    table = memory.table(depth=1)
done = time.process_time()
with count_collectives() as seen_by_estimate, Allocations():
    plan.estimate("h100")
estimated = time.process_time() - done
# Of this program alone: ru_maxrss has that of the process that started it, too.
status = open("/proc/self/status").read()
most_resident = int(status.partition("VmHWM:")[2].split()[0]) * 1024
print(json.dumps({
    "cpu_seconds": done - begin,
    "estimate_cpu_seconds": estimated,
    "screens": [
        plan.dump(hardware=hardware).splitlines() for hardware in (None, "h100")
    ],
    "rss_bytes": most_resident,
    "collectives": seen.count() + seen_by_estimate.count(),
    "process_group": dist.is_initialized(),
    "largest_real_tensor": largest,
    "parameters": sum(p.numel() for p in model.parameters()),
    "all_meta": all(p.is_meta for p in model.parameters()),
    "units": len(plan.units),
    "peak_bytes": memory.peak_bytes,
    "sharded_bytes": sum(
        4 * -(-p.shape[0] // 1024) * torch.Size(p.shape[1:]).numel()
        for unit in plan.units for p in unit.params
    ),
    "table_rows": len(table.splitlines()),
}))
"""


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PLAN],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_nothing_runs(planned: dict[str, Any]) -> None:
    assert planned["collectives"] == 0
    assert not planned["process_group"]


def test_no_parameter_is_allocated(planned: dict[str, Any]) -> None:
    assert planned["all_meta"]
    assert planned["parameters"] == 8_030_261_248
    assert planned["largest_real_tensor"] < 2**20


def test_the_report_is_that_of_the_whole_model(planned: dict[str, Any]) -> None:
    assert planned["units"] == 33
    # Parameters, gradients and AdamW's two moments, sharded; and at least one whole layer.
    layer = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    assert planned["peak_bytes"] > 4 * planned["sharded_bytes"] + layer
    assert planned["table_rows"] > 10


def test_it_is_cheap(planned: dict[str, Any]) -> None:
    """CPU seconds, not wall-clock: they do not depend on what else the machine does."""
    assert planned["rss_bytes"] < 1.5 * 2**30
    assert planned["cpu_seconds"] < 40
    assert planned["estimate_cpu_seconds"] < 1


def test_the_dump_fits_on_a_screen(planned: dict[str, Any]) -> None:
    """Forward and backward of 32 layers: at most 50 lines of at most 120 columns."""
    plain, timed = planned["screens"]
    assert len(plain) == len(timed) <= 50
    assert max(map(len, plain)) < max(map(len, timed)) <= 120
    for phase, most in (("forward", 10), ("backward", 20)):
        blocks = [line for line in timed if line.startswith("x ") and f" {phase} " in line]
        counts = [int(line.split()[1]) for line in blocks]
        assert counts and max(counts) >= 32 - 3
        assert len([line for line in timed if f" {phase} " in line]) >= most
    # A layer of forward: its unshard is waited for and unpacked, the next launched; it computes.
    block = [line for line in plain if line.startswith(("x ", '  "')) and " forward " in line]
    assert [line.split("  forward  ")[1].split()[0] for line in block] == [
        *("unpack", "pack,", "compute")
    ]
