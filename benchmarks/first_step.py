"""Time to the first step: fxshard beside FSDP2 with compiled blocks, at 4 and at 32 layers.

    python -m benchmarks.first_step

Two gloo ranks, one thread each; every case has fresh processes and empty caches (Inductor's among
them). The clock runs from the finished plain model, on all ranks at once, to the end of the first
step: sharding, capture, passes, compiling, forward, backward, AdamW. "Warm" is the same again in
fresh processes with the caches that the first left. "Flat" is 32 layers to 4.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.figures import RESULTS, geometric_mean, write
from benchmarks.models import Model, llama
from benchmarks.ranks import RankFailed, here, on_ranks
from benchmarks.sides import TITLES, Training, available

WORLD = 2
DEPTHS = (4, 32)
PEER = "fsdp2-compiled"
SIDES = ("fsdp2", PEER, "fxshard", "fxshard-inductor")
FLAT_TARGET = 1.5
PATIENCE = 300.0  # seconds for one case


def recipe(depth: int, smoke: bool) -> Model:
    """Llama's shape, narrow: what is timed is not its arithmetic."""
    if smoke:
        return llama("smoke", dim=64, depth=depth, vocab=128, batch=1, seq=16)
    return llama("first", dim=128, depth=depth, vocab=512, batch=2, seq=64)


def measure(side: str, depth: int, smoke: bool) -> dict[str, float]:
    """Seconds of this rank; runs on every rank."""
    chosen = recipe(depth, smoke)
    torch.manual_seed(0)
    model = chosen.build()  # not timed: the same for all
    dist.barrier()
    began, computing = time.perf_counter(), time.process_time()
    training = Training(chosen, side, model=model)
    training.step()
    dist.barrier()
    first, cpu = time.perf_counter() - began, time.process_time() - computing
    began = time.perf_counter()
    training.step()
    return {"first": first, "cpu": cpu, "second": time.perf_counter() - began}


def case(side: str, depth: int, smoke: bool, folder: str) -> dict[str, Any]:
    """One side at one depth with the caches in `folder`."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "XDG_CACHE_HOME": f"{folder}/xdg",
    }
    start = here if smoke else on_ranks
    ranks = start(WORLD, measure, side, depth, smoke, timeout=PATIENCE, environment=caches)
    return {
        "first_seconds": round(max(rank["first"] for rank in ranks), 3),
        "cpu_seconds": round(sum(rank["cpu"] for rank in ranks), 3),
        "second_seconds": round(max(rank["second"] for rank in ranks), 3),
    }


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Against the peer at each depth, and flat in depth."""
    cold = {(row["side"], row["layers"]): row["cold"] for row in rows if "cold" in row}
    depths = sorted({layers for _, layers in cold})
    found = []
    for side in ("fxshard", "fxshard-inductor"):
        pairs = [(side, d) for d in depths if (side, d) in cold and (PEER, d) in cold]
        if pairs:
            each = {
                str(d): round(cold[side, d]["first_seconds"] / cold[PEER, d]["first_seconds"], 4)
                for _, d in pairs
            }
            mean = geometric_mean(each.values())
            found.append(
                {
                    "claim": f"time to first step, {TITLES[side]} / {TITLES[PEER]}",
                    "layers": each,
                    "geometric_mean": round(mean, 4),
                    "target": 1.0,
                    "met": mean <= 1.0,
                }
            )
    for side in SIDES:
        ends = [cold.get((side, depth)) for depth in (depths[0], depths[-1])] if depths else []
        if len(depths) > 1 and all(ends):
            value = ends[1]["first_seconds"] / ends[0]["first_seconds"]  # type: ignore[index]
            found.append(
                {
                    "claim": f"{TITLES[side]}, {depths[-1]} layers / {depths[0]}",
                    "value": round(value, 3),
                    "target": FLAT_TARGET if side.startswith("fxshard") else None,
                    "met": value <= FLAT_TARGET if side.startswith("fxshard") else None,
                }
            )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write where --out says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", nargs="+", type=int, default=[*DEPTHS])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("--warm", action="store_true", help="each again with its caches")
    parser.add_argument("--smoke", action="store_true", help="one small model, nothing compiled")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/first_step.json")
    given = parser.parse_args(arguments)
    everything = given.sides == [*SIDES] and given.depths == [*DEPTHS]
    if given.smoke:
        given.depths, given.sides, everything = [2], ["fxshard"], False
    rows = []
    for depth in given.depths:
        for side in given.sides:
            if side not in available():
                continue
            row: dict[str, Any] = {"side": side, "title": TITLES[side], "layers": depth}
            folder = tempfile.mkdtemp(prefix="fxshard-first-step-")
            try:
                row["cold"] = case(side, depth, given.smoke, folder)
                if given.warm or side == "fxshard-inductor":
                    row["warm"] = case(side, depth, given.smoke, folder)
            except RankFailed as error:
                row["failed"] = str(error)[-2000:]
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            rows.append(row)
            print(row, flush=True)
    result = {"ranks": WORLD, "model": recipe(4, given.smoke).title, "cases": rows}
    result["claims"] = claims(rows)
    for claim in result["claims"]:
        print(claim)
    if given.out or everything:
        write(given.out or RESULTS / "first_step.json", result)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
