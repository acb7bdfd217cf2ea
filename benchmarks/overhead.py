"""Own overhead: passes and analysis beside the capture, the executor beside bare operators.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --layers 4 16         # smaller graphs

Planning: Hugging Face's Llama of more and more layers, one unit each, on 8 ranks; CPU seconds of
the capture (what torch's tracing takes), of the passes with their checks, and of the memory
analysis up to the peak, over graphs of 1,000 to 100,000 operators. Linear is: microseconds per
operator do not grow. Of layers that are alike only the first ones are traced, and the others are
copied from them: beside that, passes and checks, which go through every operator, take a large
share. Python's collector stands still, as it does inside of `fxshard.plan`.

Running: a stack of residual MLP blocks with tensors so small that operators have no work, on rank 0
of a fake group of 2. CPU microseconds per operator of a step of the emitted program; of calling the
same operators with the same arguments in a bare loop, which is what dispatch alone costs; and of
eager PyTorch's and FSDP2's step of the same model, over the same number of operators.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fxshard
from benchmarks.analysis_speed import Stack
from benchmarks.figures import RESULTS, ratio, spread, write
from benchmarks.models import llama
from benchmarks.ranks import here, on_ranks
from fxshard._torch import process_groups
from fxshard.capture import trace

LAYERS = (4, 40, 400)
SHARE_TARGET = 0.10  # of the capture's time
GROWTH_TARGET = 1.5  # microseconds per operator of the largest graph to those of the smallest
WIDTH, DEPTH = 8, 40


def planning(layers: int) -> dict[str, Any]:
    """CPU seconds of capture, passes and analysis of a Llama of so many layers."""
    recipe = llama("llama", dim=64, depth=layers, vocab=256, batch=1, seq=16)
    taken: list[float] = []
    original = trace.capture

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        found = original(*args, **kwargs)
        taken.append(time.process_time() - began)
        return found

    with torch.device("meta"):
        model, call = recipe.build(), recipe.call(recipe.batch())
    gc.collect()
    gc.disable()
    with mock.patch.object(trace, "capture", timed):
        began = time.process_time()
        plan = fxshard.plan(model, *call, world_size=8)
        whole = time.process_time() - began
    began = time.process_time()
    memory = plan.memory
    peak = memory.peak_bytes
    analysis = time.process_time() - began
    gc.enable()
    nodes = sum(p.points for p in memory.ledger().phases if p.name in ("forward", "backward"))
    capture = sum(taken)
    passes = whole - capture
    return {
        "layers": layers,
        "nodes": nodes,
        "capture_cpu_seconds": round(capture, 3),
        "passes_cpu_seconds": round(passes, 3),
        "analysis_cpu_seconds": round(analysis, 3),
        "share_of_capture": round((passes + analysis) / capture, 4),
        "microseconds_per_node": round(1e6 * (passes + analysis) / nodes, 2),
        "peak_bytes": peak,
    }


class Recorded(TorchDispatchMode):
    """Notes every operator with stand-ins for its arguments (what was gathered is freed later)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.calls.append((func, *tree_map_only(Tensor, _copied, (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _copied(tensor: Tensor) -> Tensor:
    """Zeros of the same layout, overlapping ones (``expand``) too."""
    ends = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = torch.zeros(1 + sum(ends) if tensor.numel() else 0, dtype=tensor.dtype)
    return span.as_strided(tensor.shape, tensor.stride())


def running(steps: int) -> dict[str, Any]:
    """CPU microseconds per operator of a step without work."""
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH)

    def step_of(model: torch.nn.Module) -> Callable[[], None]:
        def step() -> None:
            model(x).backward()
            model.zero_grad(set_to_none=True)

        return step

    eager = step_of(Stack(DEPTH, WIDTH))
    with process_groups.fake_process_group(0, 2):
        peer = Stack(DEPTH, WIDTH)
        for block in peer.blocks:
            fully_shard(block)
        fully_shard(peer)
        ours = fxshard.compile(Stack(DEPTH, WIDTH), args=(x,))
        for each in (step_of(peer), step_of(ours), eager):
            each(), each()
        with Recorded() as recorded:
            step_of(ours)()
        calls = recorded.calls
        views = sum(_is_view(func) for func, _, _ in calls)

        def bare() -> None:
            with torch.no_grad():
                for func, args, kwargs in calls:
                    func(*args, **kwargs)

        ways: dict[str, Callable[[], None]] = {
            "fxshard": step_of(ours),
            "bare operators": bare,
            "eager": eager,
            "fsdp2": step_of(peer),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(steps):
            for name, run in ways.items():
                began = time.process_time()
                run()
                times[name].append(1e6 * (time.process_time() - began) / len(calls))
    return {
        "operators": len(calls),
        "views": views,
        "microseconds_per_operator": {name: spread(each) for name, each in times.items()},
        "overhead_microseconds_per_operator": round(
            spread(times["fxshard"])["median"] - spread(times["bare operators"])["median"], 3
        ),
        "ratios": {
            f"fxshard / {name}": round(ratio(times["fxshard"], times[name]), 4)
            for name in ways
            if name != "fxshard"
        },
    }


def _is_view(func: Any) -> bool:
    return bool(func.is_view)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write where --out says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[*LAYERS])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--smoke", action="store_true", help="two small graphs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/overhead.json")
    given = parser.parse_args(arguments)
    everything = given.layers == [*LAYERS]
    if given.smoke:
        given.layers, given.steps, everything = [1, 2], 3, False
    (executed,) = (here if given.smoke else on_ranks)(0, running, given.steps)
    print(executed, flush=True)
    rows = []
    planning(1)  # imports and caches
    for layers in given.layers:
        rows.append(planning(layers))
        print(rows[-1], flush=True)
    share = max(row["share_of_capture"] for row in rows)
    growth = rows[-1]["microseconds_per_node"] / rows[0]["microseconds_per_node"]
    claims = [
        {
            "claim": "passes and analysis, share of the capture's time (largest)",
            "value": share,
            "target": SHARE_TARGET,
            "met": share <= SHARE_TARGET,
        },
        {
            "claim": "microseconds per operator, largest graph / smallest",
            "value": round(growth, 3),
            "target": GROWTH_TARGET,
            "met": growth <= GROWTH_TARGET,
        },
    ]
    for claim in claims:
        print(claim)
    if given.out or everything:
        result = {"planning": rows, "running": executed, "claims": claims}
        write(given.out or RESULTS / "overhead.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
