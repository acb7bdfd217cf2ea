"""How long a training step takes: fxshard beside FSDP2, FSDP1 and one process.

    python -m benchmarks.step_time --models small --steps 20
    python -m benchmarks.step_time --models small --profile torch --sides fsdp2 fxshard

Two gloo ranks, one thread each. All sides of a model live in the same two processes and take turns,
in an order that is turned round every round; before each step is a barrier. A step's time is that
of the slower rank. The loop is the user's: forward, loss, backward, AdamW (foreach), zero_grad.
"Wall" is what a clock on the wall says; "CPU" is the time that both ranks' processes were computing
(all threads), which other programs on the machine disturb less. "Selective" and "checkpointed"
recompute values in backward that FSDP2 saves (see Peak bytes).
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.figures import RESULTS, geometric_mean, ratio, spread, write
from benchmarks.models import EVERY, MODELS
from benchmarks.ranks import here, on_ranks
from benchmarks.sides import TITLES, Training, available

WORLD = 2
WARM = 3
PHASES = ("forward", "backward", "optimizer")
# ours, theirs, target of the geometric mean over models
CLAIMS = (("fxshard", "fsdp2", 0.90), ("fxshard-inductor", "fsdp2-compiled", 0.95))
BESIDE = (
    ("fxshard-selective", "fsdp2"),
    ("fxshard-full", "fsdp2"),
    ("fxshard", "fsdp1"),
    ("fxshard", "plain"),
    ("fsdp2", "plain"),
)

Times = dict[str, list[dict[str, float]]]  # side -> per step: phase -> seconds, and "cpu"


def timed(name: str, sides: list[str], steps: int) -> Times:
    """Seconds of each phase of each step of each side; runs on every rank."""
    return alternating({side: Training(EVERY[name], side) for side in sides}, steps)


def alternating(trainings: Mapping[str, Training], steps: int) -> Times:
    """The same of trainings that are there, by the names of their sides."""
    found: Times = {side: [] for side in trainings}
    for _ in range(WARM):
        for training in trainings.values():
            training.step()
    for number in range(steps):
        for side in list(trainings)[:: 1 if number % 2 == 0 else -1]:
            dist.barrier()
            found[side].append(one_step(trainings[side]))
    return found


def one_step(training: Training) -> dict[str, float]:
    """Run a step; seconds per phase, and those that this process was computing."""
    seconds = {}
    computing = time.process_time()
    last = time.perf_counter()
    for phase, run in training.phases():
        run()
        now = time.perf_counter()
        seconds[phase], last = now - last, now
    seconds["cpu"] = time.process_time() - computing
    return seconds


def merged(ranks: list[Times]) -> Times:
    """Of both ranks: of each phase and of the step the slower one's, of computing the sum."""
    found: Times = {}
    for side in ranks[0]:
        found[side] = []
        for steps in zip(*(rank[side] for rank in ranks), strict=True):
            row = {phase: max(step[phase] for step in steps) for phase in PHASES}
            row["step"] = max(sum(step[phase] for phase in PHASES) for step in steps)
            row["cpu"] = sum(step["cpu"] for step in steps)
            found[side].append(row)
    return found


def slowest(ranks: Sequence[Times], side: str, phases: Sequence[str] = PHASES) -> list[float]:
    """Seconds of each step of a side, or of some of its phases: of the slowest rank."""
    every = zip(*(rank[side] for rank in ranks), strict=True)
    return [max(sum(step[phase] for phase in phases) for step in steps) for steps in every]


def summary(name: str, times: Times) -> dict[str, Any]:
    """Milliseconds per side (median and quartiles), and the ratios of medians."""
    sides = {
        side: {
            what: {key: round(1e3 * value, 3) if key != "count" else value for key, value in
                   spread([row[what] for row in rows]).items()}
            for what in ("step", *PHASES, "cpu")
        }
        for side, rows in times.items()
    }  # fmt: skip
    ratios = {
        f"{a} / {b}": {
            what: round(ratio([r[what] for r in times[a]], [r[what] for r in times[b]]), 4)
            for what in ("step", *PHASES, "cpu")
        }
        for a, b in (*((a, b) for a, b, _ in CLAIMS), *BESIDE)
        if a in times and b in times
    }
    return {"model": name, "title": EVERY[name].title, "milliseconds": sides, "ratios": ratios}


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means over models against their targets."""
    found = []
    for a, b, target in CLAIMS:
        each = [row["ratios"][f"{a} / {b}"] for row in rows if f"{a} / {b}" in row["ratios"]]
        if each:
            mean = geometric_mean(one["step"] for one in each)
            found.append(
                {
                    "claim": f"{TITLES[a]} / {TITLES[b]}",
                    "geometric_mean": round(mean, 4),
                    "of_cpu_time": round(geometric_mean(one["cpu"] for one in each), 4),
                    "target": target,
                    "met": mean <= target,
                }
            )
    return found


def profiled(name: str, sides: list[str], steps: int, how: str) -> dict[str, str]:
    """Per side a table of what takes the time itself, of this rank."""
    found = {}
    for side in sides:
        training = Training(EVERY[name], side)
        for _ in range(WARM):
            training.step()
        dist.barrier()
        if how == "torch":
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                for _ in range(steps):
                    training.step()
            found[side] = seen.key_averages().table(
                sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60
            )
        else:
            # Backward of a CPU graph runs in the thread that calls it, so cProfile sees it too.
            watch = cProfile.Profile()
            watch.enable()
            for _ in range(steps):
                training.step()
            watch.disable()
            text = io.StringIO()
            pstats.Stats(watch, stream=text).sort_stats("tottime").print_stats(45)
            found[side] = text.getvalue()
    return found


def shown(row: dict[str, Any]) -> str:
    """A model's figures as text."""
    head = ("", "step", "(q1", "q3)", *PHASES, "cpu")
    lines = [f"{row['model']}: {row['title']}; ms", ("{:<18}" + "{:>10}" * 7).format(*head)]
    for side, figures in row["milliseconds"].items():
        step = figures["step"]
        rest = (figures[what]["median"] for what in (*PHASES, "cpu"))
        values = (step["median"], step["q1"], step["q3"], *rest)
        lines.append(f"{side:<18}" + "".join(f"{value:>10.2f}" for value in values))
    for pair, each in row["ratios"].items():
        lines.append(f"  {pair:<34}" + "  ".join(f"{what} {r:.3f}" for what, r in each.items()))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write where --out says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=[*EVERY], default=[*MODELS])
    parser.add_argument("--sides", nargs="+", choices=available(), default=available())
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--profile", choices=("torch", "python"), help="instead of the times")
    parser.add_argument("--smoke", action="store_true", help="a model without weight, two steps")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/step_time.json")
    given = parser.parse_args(arguments)
    if given.smoke:
        given.models, given.steps = ["smoke"], 2
        given.sides = [side for side in given.sides if "compiled" not in side and "ind" not in side]
    if given.profile:
        for name in given.models:
            for side, table in on_ranks(
                WORLD, profiled, name, given.sides, given.steps, given.profile
            )[0].items():
                print(f"== {name}, {side}, {given.steps} steps, rank 0\n{table}")
        return 0
    rows = []
    for name in given.models:
        ranks = here if given.smoke else on_ranks
        row = summary(name, merged(ranks(WORLD, timed, name, given.sides, given.steps)))
        rows.append(row)
        print(shown(row), flush=True)
    result = {"ranks": WORLD, "threads": 1, "steps": given.steps, "models": rows}
    result["claims"] = claims(rows)
    for claim in result["claims"]:
        print(claim)
    everything = given.models == [*MODELS] and given.sides == available()
    if given.out or everything:
        write(given.out or RESULTS / "step_time.json", result)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
