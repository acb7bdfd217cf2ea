"""What plans say of a GPU's memory, against what it says itself: run.sh runs this.

Per model and world size one process (benchmarks/gpu/case.py) plans, runs three steps of one rank on
a fake process group, and compares phase by phase: allocated within 1%, reserved within 3%. Without
a GPU small models run on the CPU, where torch.profiler measures, to the byte.

Writes <date>-<gpu>.json and .md, after each case. Exit status: 0, whatever the targets say; 1 if
one is missed and --strict is given; 2 if a case failed, did not fit or found no time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.gpu.case import ALLOCATED_TARGET, RESERVED_TARGET
from benchmarks.gpu.models import ON_CPU, ON_GPU
from fxshard.capture.cuda.operators import TARGET

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CASE_SECONDS = 240.0
LEAST_SECONDS = 15.0  # no case is begun with less left
MIB = 1 << 20

CPU_CASES = (("gpt-tiny", 8), ("llama-tiny", 64), ("convnet-tiny", 8))
GPU_CASES = tuple(  # small ones first; torch's own attention once: its workspace is not known
    (name, world)
    for name in ON_GPU
    for world in ((8,) if ON_GPU[name].attention == "default" else (8, 64))
)

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Session:
    """How cases are run.

    Attributes:
        cpu: on the CPU, with small models.
        folder: for the files of the processes.
        deadline: of ``time.monotonic``, for all.
    """

    cpu: bool
    folder: Path
    deadline: float

    def run(self, name: str, world: int) -> Row:
        """One case in a process of its own; whatever becomes of it."""
        found: Row = {"model": name, "world_size": world}
        left = min(CASE_SECONDS, self.deadline - time.monotonic())
        if left < LEAST_SECONDS:
            return found | {"status": "not run", "why": "no time was left"}
        out = self.folder / f"{_slug(name)}-{world}.json"
        command = [sys.executable, "-m", "benchmarks.gpu.case", name, str(world), str(out)]
        command += ["--cpu"] if self.cpu else ["--lock", str(self.folder / "lock")]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=_environment(self.cpu),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=left,
            )
        except subprocess.TimeoutExpired as error:
            said = error.stdout or b""
            text = said if isinstance(said, str) else said.decode(errors="replace")
            return found | {"status": "timed out", "why": f"{left:.0f} s; {_last_lines(text)}"}
        if done.returncode or not out.exists():
            why = f"exit status {done.returncode}: {_last_lines(done.stdout)}"
            return found | {"status": "failed", "why": why}
        return found | json.loads(out.read_text())


def _environment(cpu: bool) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = {**os.environ, "PYTHONPATH": path}
    if not cpu:
        found.setdefault("CUDA_VISIBLE_DEVICES", "0")
    return found


def _last_lines(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if not line.startswith("USDT:")]
    return "\n".join(lines[-12:])


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def machine(cpu: bool) -> Row:
    """What it was measured on."""
    found: Row = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF")
        or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "planned_for": dataclasses.asdict(TARGET),
    }
    if cpu:
        return found | {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "gpu": properties.name,
        "bytes": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "not known"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "not known"


# -- results ---------------------------------------------------------------------------------------


def missed(row: Row) -> bool:
    """True if the case ran and a target is missed."""
    if row["status"] != "ok":
        return False
    capture = not (row["capture"]["equal"] and row["capture"]["bytes_equal"])
    figures = not row["exact"] if "exact" in row else not all(row["within"].values())
    return capture or figures


def verdict(rows: Sequence[Row], seconds: float) -> str:
    """One line on all cases."""
    ran = [row for row in rows if row["status"] == "ok"]
    parts = [f"{len(ran)} of {len(rows)} cases ran in {seconds:.0f} s"]
    if any("exact" in row for row in ran):
        parts.append(f"to the byte: {sum(row['exact'] for row in ran)}")
    for name, target in (("allocated", ALLOCATED_TARGET), ("reserved", RESERVED_TARGET)):
        within = [row["within"][name] for row in ran if "within" in row]
        if within:
            parts.append(f"{name} within {target:.0%}: {sum(within)}")
    same = sum(row["capture"]["equal"] and row["capture"]["bytes_equal"] for row in ran)
    parts.append(f"captures equal: {same}")
    return "; ".join(parts) + "."


def page(about: Row, rows: Sequence[Row], line: str) -> str:
    """The results in Markdown."""
    title = about["gpu"] or "CPU"
    facts = ", ".join(f"{k} {v}" for k, v in about.items() if v not in (None, "", "gpu"))
    parts = [f"# Memory: planned and measured, {title}", facts + ".", line]
    parts.append(_table(_summary(row) for row in rows))
    ran = [row for row in rows if row["status"] == "ok"]
    if ran:
        parts += ["## Phase by phase, MiB", _table(line for row in ran for line in _phases(row))]
    for row in rows:
        parts += _notes(row)
    return "\n\n".join(parts) + "\n"


def _table(rows: Any) -> str:
    return tabulate(list(rows), headers="keys", tablefmt="github", disable_numparse=True)


def _summary(row: Row) -> dict[str, Any]:
    found = {"model": row["model"], "ranks": row["world_size"], "status": row["status"]}
    ran = row["status"] == "ok"
    if "parameters" in row:
        peak = row["static_peak"]
        found |= {
            "parameters": f"{row['parameters']:,}",
            "checkpoint": row["checkpoint"] or "-",
            "attention": row["attention"],
            "CUDA: allocated, MiB": _mib(peak["allocated"]),
            "reserved, MiB": _mib(peak["reserved"]),
        }
    if ran and "exact" in row:
        found["worst difference, bytes"] = max((r["difference"] for r in row["phases"]), key=abs)
    if ran and "within" in row:
        for name in row["phases"][0]["error"]:
            found[f"{name}, worst"] = _percent(
                max((r["error"][name] for r in row["phases"]), key=abs)
            )
    if ran:
        same = row["capture"]["equal"] and row["capture"]["bytes_equal"]
        found["capture"] = "equal" if same else "differs"
        unknown = row["unknown_kernels_cpu"] if "exact" in row else [*row["unknown_kernels"]]
        found["kernels not known"] = ", ".join(unknown) or "-"
    return found


def _phases(row: Row) -> list[dict[str, Any]]:
    found = []
    for each in row["phases"]:
        line = {
            "model": row["model"],
            "ranks": row["world_size"],
            "step": each["step"],
            "phase": each["phase"],
        }
        if "error" in each:
            for name in ("allocated", "reserved"):
                line |= {
                    f"{name}, planned": _mib(each["static"][name]),
                    "measured" if name == "allocated" else "measured ": _mib(
                        each["measured"][name]
                    ),
                    "error" if name == "allocated" else "error ": _percent(each["error"][name]),
                }
        else:
            line |= {
                "planned, bytes": f"{each['static']:,}",
                "measured": f"{each['measured']:,}",
                "difference": each["difference"],
            }
        found.append(line)
    return found


def _notes(row: Row) -> list[str]:
    """What the tables have no room for."""
    title = f"## {row['model']} on {row['world_size']} ranks"
    if row["status"] != "ok":
        return [f"{title}: {row['status']}", f"```\n{row['why']}\n```"]
    found = []
    if row["capture"]["differences"]:
        found.append("\n".join(f"- {line}" for line in row["capture"]["differences"]))
    blocks = row.get("blocks", {}).get("static_minus_traced", [])
    if missed(row) and blocks:
        found.append("Blocks at the peak, planned less traced:")
        found.append(_table(blocks))
    return [title, *found] if found else []


def _mib(value: int) -> str:
    return f"{value / MIB:,.1f}"


def _percent(value: float) -> str:
    return f"{value:+.2%}"


# -- the run ---------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, write the results; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="small models on the CPU")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--only", nargs="+", help="models", choices=[*ON_GPU, *ON_CPU])
    parser.add_argument("--worlds", nargs="+", type=int, help="world sizes")
    parser.add_argument("--jobs", type=int, default=2, help="cases planned at once (default 2)")
    parser.add_argument("--minutes", type=float, default=7.5, help="for all of it (default 7.5)")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a target is missed")
    given = parser.parse_args(arguments)
    cpu = given.cpu or not torch.cuda.is_available()
    if cpu and not given.cpu:
        print(f"torch {torch.__version__} sees no GPU: small models on the CPU.")
    cases = [
        (name, world)
        for name, world in (CPU_CASES if cpu else GPU_CASES)
        if (not given.only or name in given.only) and (not given.worlds or world in given.worlds)
    ]
    if not cases:
        parser.error("no such case: --only and --worlds leave none of them.")
    out = given.out or (Path(tempfile.mkdtemp(prefix="fxshard-gpu-")) if cpu else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    about = machine(cpu)
    began = time.monotonic()
    rows = {case: _waiting(*case) for case in cases}
    stem = out / f"{about['date']}-{_slug(about['gpu'] or 'cpu')}"
    writes = threading.Lock()

    with tempfile.TemporaryDirectory() as folder:
        session = Session(cpu, Path(folder), began + 60 * given.minutes)

        def run(case: tuple[str, int]) -> None:
            row = session.run(*case)
            with writes:
                rows[case] = row
                _write(stem, about, list(rows.values()), time.monotonic() - began)
                print(f"{row['model']}, {row['world_size']} ranks: {row['status']}", flush=True)
                if row["status"] != "ok":
                    print(row["why"], flush=True)

        with concurrent.futures.ThreadPoolExecutor(max(1, given.jobs)) as pool:
            list(pool.map(run, cases))
    found = list(rows.values())
    print(f"\n{page(about, found, verdict(found, time.monotonic() - began))}")
    print(f"wrote {stem}.json and {stem}.md")
    if any(row["status"] != "ok" for row in found):
        return 2
    return int(given.strict and any(map(missed, found)))


def _waiting(name: str, world: int) -> Row:
    why = "the run ended before it"
    return {"model": name, "world_size": world, "status": "not run", "why": why}


def _write(stem: Path, about: Row, rows: Sequence[Row], seconds: float) -> None:
    line = verdict(rows, seconds)
    targets = {"allocated": ALLOCATED_TARGET, "reserved": RESERVED_TARGET}
    figures = {**about, "seconds": round(seconds, 1), "targets": targets, "verdict": line}
    figures["cases"] = list(rows)
    stem.with_name(stem.name + ".json").write_text(json.dumps(figures, indent=1) + "\n")
    stem.with_name(stem.name + ".md").write_text(page(about, rows, line))


if __name__ == "__main__":
    sys.exit(main())
