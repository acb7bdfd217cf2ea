"""What a laptop says of the memory that `benchmarks.gpu.emulated_network` measured on a GPU.

    python -m benchmarks.gpu.predicted    # no GPU; half a minute per case

FSDP2's steps are dry-run, fxshard's are planned, both without a GPU, and each is held against
``torch.cuda.max_memory_allocated`` of its side in benchmarks/results/emulated_network_cuda.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import fxshard
from benchmarks.figures import RESULTS, write
from benchmarks.gpu.case import adamw, pinned, planned
from benchmarks.gpu.emulated_network import built, recipe_of
from benchmarks.gpu.models import Recipe
from benchmarks.ranks import alone

MEASURED = RESULTS / "emulated_network_cuda.json"
STEPS = 3  # the first without optimizer state; then what repeats


def of_fsdp2(recipe: Recipe, world: int) -> int:
    """Bytes by a dry run of what the GPU ran."""
    with fxshard.dry_run(world_size=world, device="h200") as run, pinned(recipe):
        model, batch = built(recipe, "fsdp2", world, torch.device("cuda"))
        optimizer = adamw(model.parameters(), foreach=True)
        for _ in range(STEPS):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            run.step()
    return run.device_memory().allocated


def of_fxshard(recipe: Recipe, world: int) -> int:
    """Bytes by a plan."""
    plan = planned(recipe, world, "cuda", units=["layers.*"])
    return int(plan.memory.device_memory().allocated)


PREDICT = {"fsdp2": of_fsdp2, "fxshard": of_fxshard}


def predicted(case: tuple[str, int, str | None], side: str) -> int:
    """``max_memory_allocated`` of a side of a case, in bytes, without a GPU."""
    name, world, checkpoint = case
    return PREDICT[side](recipe_of(name, checkpoint, "cuda"), world)


def main(arguments: list[str] | None = None) -> int:
    """Predict, compare, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", help="default: all that were measured")
    parser.add_argument("--out", type=Path, default=RESULTS / "predicted_cuda.json")
    given = parser.parse_args(arguments)
    measured = json.loads(MEASURED.read_text())
    rows: list[dict[str, Any]] = []
    for row in measured["cases"]:
        if given.models and row["model"] not in given.models:
            continue
        case = row["model"], row["world_size"], row["checkpoint"]
        for side in PREDICT:
            seen = row[side]["max_memory_allocated"]
            said = alone(predicted, case, side)
            rows.append(
                {"model": case[0], "world_size": case[1], "checkpoint": case[2], "side": side}
                | {"predicted": said, "measured": seen, "difference": said - seen}
            )
            print(f"{case}, {side}: {said:,} predicted, {seen:,} measured, {said - seen:+,}")
    kept = {key: measured[key] for key in ("date", "gpu", "torch")}
    write(given.out, {"measured_on": kept, "cases": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
