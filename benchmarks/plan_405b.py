"""Llama-3 405B on 1,024 ranks: what its report costs, beside torch's FSDPMemTracker.

    python -m benchmarks.plan_405b
    python -m benchmarks.plan_405b --layers 8                 # a shallower model

126 layers, batch 1, sequence 8,192, bf16 with fp32 reduction, every layer checkpointed, AdamW;
built from a config on the meta device: nothing is downloaded, nothing of it is allocated. Each side
runs in a fresh process; CPU seconds (user and system) and peak RSS are the process's as the kernel
counts them, from the start of the interpreter until the report is there, with all imports.

fxshard: `fxshard.plan` and the full report: peak, peak by category, and the table of every
module's states as text. FSDPMemTracker: the same model under FakeTensorMode, `fully_shard` on each
layer and the root over a fake process group of 1,024 ranks, watched for one iteration (forward,
backward, AdamW's step), and its own tables. What its figures mean, and its faults:
docs/memory-vs-fsdp2.md; its step is the first, in which the optimizer makes its states.

Machines differ: on a slower one (2026-11-21, two busy cores) it was 12.4 CPU seconds, above the
target, beside 120 of FSDPMemTracker. The ratio of the two is what to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
LAYERS, WIDTH, SEQUENCE, WORLD = 126, 16_384, 8192, 1024
CPU_TARGET, RSS_TARGET = 10.0, 2**30
MARK = "RESULT "


def model_of(layers: int, width: int) -> Any:
    """Hugging Face's Llama of the 405B shape if `width` is 16,384, on the current device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=width,
        intermediate_size=13 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=max(width // 2048, 1),
        max_position_embeddings=SEQUENCE,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def fxshard_side(layers: int, width: int) -> dict[str, Any]:
    """Plan, and the whole report."""
    seconds: dict[str, float] = {}

    def done(stage: str) -> None:
        seconds[stage] = round(time.process_time() - sum(seconds.values()), 3)

    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    done("import torch")
    import transformers  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    done("import transformers")
    import fxshard
    from fxshard.capture import trace

    done("import fxshard")
    with torch.device("meta"):
        model, tokens = model_of(layers, width), torch.zeros(1, SEQUENCE, dtype=torch.int64)
    done("model")
    traced = [0.0]
    capture = trace.capture

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return capture(*args, **kwargs)
        finally:
            traced[0] += time.process_time() - began

    with mock.patch.object(trace, "capture", timed):
        plan = fxshard.plan(
            model,
            kwargs={"input_ids": tokens, "labels": tokens},
            world_size=WORLD,
            mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            checkpoint="full",
            optimizer=torch.optim.AdamW,
        )
    done("passes and checks")
    seconds["passes and checks"] = round(seconds["passes and checks"] - traced[0], 3)
    seconds["capture"] = round(traced[0], 3)
    memory = plan.memory
    found = {
        "peak_bytes": memory.peak_bytes,
        "by_category": {c.value: size for c, size in memory.peak_by_category.items() if size},
    }
    done("live ranges")
    text = memory.table(units="GiB")
    done("table")
    print(text)
    return {
        **found,
        "first_step_peak_bytes": memory.first_step_peak_bytes,
        "modules": len(memory.modules()),
        "nodes": len(plan.program.graph.nodes),
        "parameters": sum(p.numel() for p in model.parameters()),
        "cpu_seconds_by_stage": seconds,
    }


def tracker_side(layers: int, width: int) -> dict[str, Any]:
    """One iteration of FSDP2 under FakeTensorMode, watched by torch's tracker."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import masking_utils

    torch.distributed.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        # It looks at values of position_ids, which fake tensors have not; fxshard does the same.
        nothing = mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
        with nothing, FakeTensorMode():
            with torch.device("cpu"):
                model = model_of(layers, width)
                tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64)
            parameters = sum(p.numel() for p in model.parameters())
            model.gradient_checkpointing_enable({"use_reentrant": False})
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters())
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((tokens,))
            with tracker:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            (peak,) = tracker.get_tracker_snapshot("peak").values()
            found = {str(getattr(kind, "value", kind)): int(size) for kind, size in peak.items()}
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                tracker.display_modulewise_snapshots(depth=5, units="GiB", tabulate=True)
    finally:
        torch.distributed.destroy_process_group()
    print(text.getvalue())
    return {
        "peak_bytes": found.pop("Total"),
        "by_category": {kind: size for kind, size in found.items() if size},
        "modules": len(tracker.memory_tracking),
        "parameters": parameters,
    }


SIDES = {"fxshard": fxshard_side, "FSDPMemTracker": tracker_side}


def measured(side: str, layers: int, width: int) -> dict[str, Any]:
    """A side in this process, and what the process has taken until it was done."""
    found = SIDES[side](layers, width)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "side": side,
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_rss_bytes": used.ru_maxrss * 1024,
        **found,
    }


def alone(side: str, layers: int) -> dict[str, Any]:
    """`measured`, in a process of its own.

    Raises:
        RuntimeError: it failed; with what it printed last.
    """
    command = [sys.executable, "-m", "benchmarks.plan_405b"]
    command += ["--side", side, "--layers", f"{layers}"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    results = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
    if process.returncode or not results:
        last = "\n".join(process.stdout.splitlines()[-30:])
        raise RuntimeError(f"{side} ended with {process.returncode}:\n{last}")
    print(process.stdout.replace(results[-1], ""))
    found: dict[str, Any] = json.loads(results[-1].removeprefix(MARK))
    return found


def claims_of(ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets, and the mark to beat."""
    ratio = ours["cpu_seconds"] / theirs["cpu_seconds"]
    said = [
        ("CPU seconds of the full report, with imports", ours["cpu_seconds"], CPU_TARGET),
        ("peak RSS, GiB", ours["peak_rss_bytes"] / 2**30, RSS_TARGET / 2**30),
        ("CPU seconds, fxshard / FSDPMemTracker", ratio, 1.0),
    ]
    return [
        {"claim": claim, "value": round(value, 3), "target": target, "met": value < target}
        for claim, value, target in said
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run both sides, print the table, and write where --out says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--side", choices=[*SIDES], help="only that side, in this process")
    parser.add_argument("--smoke", action="store_true", help="two narrow layers, in this process")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/plan_405b.json")
    given = parser.parse_args(arguments)
    if given.side:
        print(MARK + json.dumps(measured(given.side, given.layers, WIDTH)))
        return 0
    layers = 2 if given.smoke else given.layers
    sides = [measured(side, 2, 128) if given.smoke else alone(side, layers) for side in SIDES]
    result = {"layers": layers, "sides": sides, "claims": claims_of(*sides)}
    for side in sides:
        rss, peak = side["peak_rss_bytes"] / 2**20, side["peak_bytes"] / 2**30
        print(
            f"{side['side']:16} {side['cpu_seconds']:7.2f} CPU s {rss:7,.0f} MiB RSS  "
            f"peak {peak:8.2f} GiB  {side['modules']:,} modules"
        )
    print(sides[0]["cpu_seconds_by_stage"])
    for claim in result["claims"]:
        print(claim)
    if given.out or layers == LAYERS:
        from benchmarks.figures import RESULTS, write

        write(given.out or RESULTS / "plan_405b.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
