"""A whole step as one program, beside the loop that it replaces.

    python -m benchmarks.compile_step
    python -m benchmarks.compile_step --models tiny --steps 20

Times: two gloo ranks, one thread each; both ways live in the same two processes and take turns, in
an order that is turned round every round, with a barrier before each. "loop" is zero_grad, forward,
loss, backward, ``model.clip_grad_norm_`` and ``model.optimizer.step()`` of a compiled model, "step"
is `fxshard.compile_step`; AdamW, foreach. A time is the CPU time of a process (all of its threads),
of the rank that took more.

Bytes: the planned peak of a rank of 2. That of the loop is planned with its loss, without what
clipping takes for a moment, and with the logits dropped before backward.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fxshard
from benchmarks.figures import RESULTS, ratio, spread, write
from benchmarks.models import EVERY, Model
from benchmarks.ranks import on_ranks

WARM = 3
MAX_NORM = 1.0
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4, foreach=True)


def sides(recipe: Model, max_norm: float | None) -> dict[str, Callable[[], torch.Tensor]]:
    """A step of each way, on one batch."""
    inputs, targets = recipe.batch()
    torch.manual_seed(0)
    model: Any = fxshard.compile(recipe.build(), units=[recipe.blocks], optimizer=ADAMW)
    torch.manual_seed(0)
    other = recipe.build()
    optimizer = ADAMW(other.parameters())
    step = fxshard.compile_step(
        other, recipe.loss, optimizer, max_norm=max_norm, units=[recipe.blocks]
    )

    def loop() -> torch.Tensor:
        loss = recipe.loss(model(inputs), targets)
        loss.backward()
        if max_norm is not None:
            model.clip_grad_norm_(max_norm)
        model.optimizer.step()
        model.optimizer.zero_grad()
        return loss.detach()

    return {"loop": loop, "step": lambda: step(inputs, targets)}


def timed(name: str, max_norm: float | None, steps: int) -> dict[str, list[float]]:
    """CPU seconds of each step of each way; runs on every rank."""
    both = sides(EVERY[name], max_norm)
    found: dict[str, list[float]] = {way: [] for way in both}
    for number in range(WARM + steps):
        losses = {}
        for way in both if number % 2 == 0 else reversed(both):
            dist.barrier()
            began = time.process_time()
            losses[way] = both[way]()
            if number >= WARM:
                found[way].append(time.process_time() - began)
        assert torch.equal(losses["loop"], losses["step"])
    return found


def measured(name: str, max_norm: float | None, steps: int) -> dict[str, Any]:
    """Milliseconds of each way, and their ratio."""
    ranks = on_ranks(2, timed, name, max_norm, steps)
    more = {
        way: [max(each) for each in zip(*(r[way] for r in ranks), strict=True)] for way in ranks[0]
    }
    found: dict[str, Any] = {"model": name, "max_norm": max_norm}
    for way, seconds in more.items():
        found[way] = {k: v * (1e3 if k != "count" else 1) for k, v in spread(seconds).items()}
    found["step / loop"] = ratio(more["step"], more["loop"])
    said = ", ".join(f"{way} {found[way]['median']:.2f} ms" for way in more)
    print(f"{name}, max_norm={max_norm}: {said}, x {found['step / loop']:.3f}", flush=True)
    return found


def peaks(name: str, checkpoint: str | None) -> dict[str, Any]:
    """Planned bytes of a rank of 2: of the loop, and of steps with and without clipping."""
    recipe = EVERY[name]
    inputs, targets = recipe.batch()
    options: dict[str, Any] = {"world_size": 2, "units": [recipe.blocks], "checkpoint": checkpoint}
    plan = fxshard.plan(
        *(recipe.build(), (inputs,)),
        **options,
        optimizer=ADAMW,
        loss=lambda output: recipe.loss(output, targets),
        keep_outputs=False,
    )
    loop = plan.memory.peak_bytes
    found: dict[str, Any] = {"model": name, "checkpoint": checkpoint, "loop": loop}
    inside = plan.replan(optimizer_in_backward=True)
    found["loop, optimizer_in_backward"] = inside.memory.peak_bytes
    for way, max_norm in (("step", None), ("step, clipped", MAX_NORM)):
        model = recipe.build()
        step = fxshard.compile_step(
            *(model, recipe.loss, ADAMW(model.parameters())),
            **options,
            max_norm=max_norm,
            args=(inputs, targets),
        )
        found[way] = step.memory.peak_bytes
    print(f"{name}, peak bytes of a rank of 2: {found}", flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write where --out says."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--models", nargs="+", default=["tiny", "small"], choices=list(EVERY))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="one small model, three steps")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/compile_step.json")
    given = parser.parse_args(arguments)
    if given.smoke:
        given.models, given.steps = ["smoke"], 3
    result: dict[str, Any] = {"steps": [], "peaks": []}
    for name in given.models:
        result["peaks"] += [peaks(name, checkpoint) for checkpoint in (None, "full")]
        result["steps"] += [measured(name, norm, given.steps) for norm in (MAX_NORM, None)]
    if given.out or not given.smoke:
        write(given.out or RESULTS / "compile_step.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
