"""The optimizer on local shards and in the program, beside torch's over the same DTensors.

    python -m benchmarks.optimizer_step
    python -m benchmarks.optimizer_step --models tiny --steps 20

Times: two gloo ranks, one thread each; all ways live in the same two processes and take turns, in
an order that is turned round every round, with a barrier before each. "dtensor" is
``torch.optim.AdamW(model.parameters())``, "shards" is `FxshardModule.optimizer` after backward,
"backward" is the same with ``optimizer_in_backward=True``, "fsdp2" is ``torch.optim.AdamW`` over a
model of ``fully_shard``. Once the bare ``optimizer.step()``, with each of torch's implementations;
once the whole step. A time is that of the slower rank.

Bytes: the planned peak of a rank of 8, AdamW, after backward and in it.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fxshard
from benchmarks.figures import RESULTS, ratio, spread, write
from benchmarks.models import EVERY, Model, llama
from benchmarks.ranks import on_ranks
from benchmarks.sides import Setting, fsdp2

WARM = 3
BARE = ("dtensor", "shards", "fsdp2")
WHOLE = ("dtensor", "shards", "backward")
KINDS: dict[str, dict[str, bool]] = {
    "for loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def sharded(recipe: Model, kind: str, way: str) -> tuple[Any, torch.optim.Optimizer]:
    """The model and its optimizer."""
    make = functools.partial(torch.optim.AdamW, lr=1e-4, **KINDS[kind])
    torch.manual_seed(0)
    if way == "fsdp2":
        theirs = fsdp2(recipe, recipe.build(), Setting())
        return theirs, make(theirs.parameters())
    model = fxshard.compile(
        recipe.build(),
        units=[recipe.blocks],
        optimizer=make,
        optimizer_in_backward=way == "backward",
    )
    return model, make(model.parameters()) if way == "dtensor" else model.optimizer


def timed(name: str, kind: str, whole: bool, steps: int) -> dict[str, list[float]]:
    """Seconds of each step of each way; runs on every rank."""
    recipe = EVERY[name]
    batch = recipe.batch()
    args, kwargs = recipe.call(batch)
    ways = WHOLE if whole else BARE
    sides = {way: sharded(recipe, kind, way) for way in ways}
    if not whole:
        for model, _ in sides.values():
            recipe.loss(model(*args, **kwargs), batch[1]).backward()
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(WARM + steps):
        for way in ways if number % 2 == 0 else reversed(ways):
            model, optimizer = sides[way]
            dist.barrier()
            began = time.perf_counter()
            if whole:
                recipe.loss(model(*args, **kwargs), batch[1]).backward()
            optimizer.step()
            if whole:
                optimizer.zero_grad()
            if number >= WARM:
                found[way].append(time.perf_counter() - began)
    return found


def measured(name: str, kind: str, whole: bool, steps: int) -> dict[str, Any]:
    """Milliseconds of each way, and their ratios to torch's over DTensors."""
    ranks = on_ranks(2, timed, name, kind, whole, steps)
    slower = {way: [max(both) for both in zip(*(r[way] for r in ranks))] for way in ranks[0]}  # noqa: B905
    found: dict[str, Any] = {"model": name, "optimizer": kind}
    for way, seconds in slower.items():
        found[way] = {k: v * (1e3 if k != "count" else 1) for k, v in spread(seconds).items()}
        found[f"{way} / dtensor"] = ratio(seconds, slower["dtensor"])
    said = ", ".join(
        f"{way} {found[way]['median']:.2f} ms (x {found[f'{way} / dtensor']:.3f})" for way in slower
    )
    print(f"{name}, {kind}, {'whole step' if whole else 'optimizer.step()'}: {said}", flush=True)
    return found


def peaks(recipe: Model) -> dict[str, Any]:
    """Planned bytes of a rank of 8: after backward, in backward; blocks are checkpointed."""
    args, kwargs = recipe.call(recipe.batch())
    adamw = functools.partial(torch.optim.AdamW, lr=1e-4)
    plan = fxshard.plan(
        *(recipe.build(), args, kwargs),
        **{"world_size": 8, "units": [recipe.blocks], "optimizer": adamw, "checkpoint": "full"},
    )
    behind = plan.memory.peak_bytes
    inside = plan.replan(optimizer_in_backward=True).memory.peak_bytes
    name = recipe.title
    print(f"{name}, peak of a rank of 8: {behind:,} -> {inside:,} bytes", flush=True)
    return {"model": name, "behind": behind, "in backward": inside, "saved": behind - inside}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write where --out says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["tiny", "small"], choices=list(EVERY))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="one small model, three steps")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/optimizer_step.json")
    given = parser.parse_args(arguments)
    if given.smoke:
        given.models, given.steps = ["smoke"], 3
    result: dict[str, Any] = {"step": [], "whole": [], "peak": []}
    depth = 2 if given.smoke else 32
    deep = llama("deep", dim=256, depth=depth, vocab=1024, batch=1, seq=32)
    result["peak"].append(peaks(deep))
    for name in given.models:
        result["step"] += [measured(name, kind, False, given.steps) for kind in KINDS]
        result["whole"].append(measured(name, "foreach", True, given.steps))
    if given.out or not given.smoke:
        write(given.out or RESULTS / "optimizer_step.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
