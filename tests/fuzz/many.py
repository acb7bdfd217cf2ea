"""Many cases in processes that may die, and the table of what came out."""

from __future__ import annotations

import collections
import json
import logging
import multiprocessing as mp
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from fxshard.config.checked import Config
from tests.fuzz.case import Case, drawn_case
from tests.fuzz.judge import CLASSES, Verdict, judged_here, judged_on_ranks
from tests.fuzz.operators import OPERATORS
from tests.ranks import RankError, Ranks

CHUNK = 60  # cases of one process; what they leave behind ends with it
JOB = 6  # cases of one job of a pool of ranks
POOL_TIMEOUT_S = 240


def quiet() -> None:
    """One thread, and nothing of what fxshard and torch log."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)


def row(case: Case, verdict: Verdict, seconds: float) -> dict[str, Any]:
    """A result, for JSON."""
    return {
        "seed": case.seed,
        "kind": verdict.kind,
        "reason": verdict.reason,
        "detail": verdict.detail[-4000:] if verdict.kind in ("wrong", "crash", "bytes") else "",
        "unknown": verdict.unknown,
        "processes": case.processes,
        "world": str(case.world),
        "options": [name for name, _ in case.options],
        "operators": sorted(case.operators()),
        "seconds": round(seconds, 2),
    }


def chunk(seeds: list[int], out: str, where: str, sizes: bool) -> None:
    """Run cases in this process and append a line for each."""
    quiet()
    real = {"here": False, "ranks": True}.get(where)
    waiting: dict[int, list[Case]] = {}
    pools: dict[int, Ranks] = {}
    with open(out, "a") as file:

        def say(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        def flush(size: int) -> None:
            cases = waiting.pop(size, [])
            if not cases:
                return
            began = time.monotonic()
            pool = pools.setdefault(size, Ranks(size, timeout_s=POOL_TIMEOUT_S))
            try:
                verdicts = judged_on_ranks(cases, pool, sizes=sizes)
            except RankError as error:
                verdicts = [Verdict("crash", "the pool failed", str(error))] * len(cases)
            each = (time.monotonic() - began) / len(cases)
            for case, verdict in zip(cases, verdicts, strict=True):
                say(**row(case, verdict, each))

        for seed in seeds:
            say(start=seed)
            case = drawn_case(seed, real)
            if case.processes:
                waiting.setdefault(case.ranks, []).append(case)
                if len(waiting[case.ranks]) == JOB:
                    flush(case.ranks)
                continue
            began = time.monotonic()
            verdict = judged_here(case, sizes=sizes)
            say(**row(case, verdict, time.monotonic() - began))
        for size in list(waiting):
            flush(size)
    for pool in pools.values():
        pool.close()


def results(out: Path) -> dict[int, dict[str, Any]]:
    """Seed -> result, of all that a file holds."""
    if not out.exists():
        return {}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return {each["seed"]: each for each in rows if "seed" in each}


def run(start: int, count: int, out: Path, where: str, sizes: bool) -> None:
    """Run what `out` has no result of yet; a process that dies costs the case it was at."""
    left = [seed for seed in range(start, start + count) if seed not in results(out)]
    context = mp.get_context("spawn")
    while left:
        seeds = left[:CHUNK]
        process = context.Process(target=chunk, args=(seeds, str(out), where, sizes))
        process.start()
        process.join()
        done = results(out)
        if process.exitcode:
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            last = next(line["start"] for line in reversed(lines) if "start" in line)
            if last not in done:
                dead = {"seed": last, "kind": "crash", "reason": f"died, {process.exitcode}"}
                with out.open("a") as file:
                    file.write(json.dumps(dead) + "\n")
                done = results(out)
        left = [seed for seed in left if seed not in done]
        counts = collections.Counter(each["kind"] for each in done.values())
        print(f"{len(done)} cases: {dict(counts)}", file=sys.stderr, flush=True)


def table(found: list[dict[str, Any]]) -> str:
    """Counts per class, reasons, and coverage of options and operators."""
    kinds = collections.Counter(each["kind"] for each in found)
    total = len(found)
    real = [each for each in found if each.get("processes")]
    parts = [
        tabulate(
            [
                (
                    kind,
                    kinds[kind],
                    f"{kinds[kind] / max(total, 1):.1%}",
                    sum(each["kind"] == kind for each in real),
                )
                for kind in CLASSES
            ],
            (f"of {total} cases", "count", "share", f"of {len(real)} on real ranks"),
        )
    ]
    for kind in CLASSES[1:]:
        reasons = collections.Counter(
            each["reason"][:110] for each in found if each["kind"] == kind
        )
        seeds = {each["reason"][:110]: each["seed"] for each in found if each["kind"] == kind}
        rows = [(count, reason, seeds[reason]) for reason, count in reasons.most_common(25)]
        if rows:
            parts.append(tabulate(rows, (kind, "reason", "a seed")))
    unknown = sum(bool(each.get("unknown")) for each in found)
    parts.append(f"bytes that depend on the data: {unknown} cases")
    used = collections.Counter(name for each in found for name in each.get("options", ()))
    names = [name for name in Config.__dataclass_fields__]
    parts.append(
        f"options drawn, {sum(name in used for name in names)} of {len(names)}: "
        + ", ".join(f"{name} {used[name]}" for name in names)
    )
    ops = collections.Counter(name for each in found for name in each.get("operators", ()))
    parts.append(
        f"operators, {sum(name in ops for name in OPERATORS)} of {len(OPERATORS)}: "
        + ", ".join(f"{name} {ops[name]}" for name in OPERATORS)
    )
    return "\n\n".join(parts)
