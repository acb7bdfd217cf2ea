"""Memory of `fully_shard` and of fxshard side by side: writes docs/memory-vs-fsdp2.md.

    python -m benchmarks.memory_vs_fsdp2    # from the root of the repository

For each unit and state of each model: the bytes that torch's FSDPMemTracker sees under FSDP2, the
bytes that `fxshard.plan` says, and their difference, split over `CAUSES`. Both sides are listed
storage by storage, the lists are checked against the two tables' own figures, and what one list has
and the other has not is given to a cause by a rule that looks at both. What no rule takes is
printed, and the exit status is 1.

Beside it: the peaks that torch.profiler measures of both (it sees every allocation, in kernels
too), and the errors of two estimators whose formulas are written down here.

CPU and a fake process group of eight ranks; nothing is downloaded.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.figures import write_csv
from benchmarks.vs_fsdp2.causes import CAUSES, Comparison, compare
from benchmarks.vs_fsdp2.models import CASES, WIDE, WORLD, Case
from benchmarks.vs_fsdp2.peaks import estimates, peaks
from benchmarks.vs_fsdp2.planned import fxshard_rows, planned
from benchmarks.vs_fsdp2.tracked import faults, fsdp2_rows
from fxshard.config.checked import Config
from fxshard.memory.category import CATEGORIES, State

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "memory-vs-fsdp2.md"
ROWS = PAGE.with_suffix(".csv")
ESTIMATES = PAGE.with_name("memory-vs-fsdp2-estimators.csv")
RESULTS = ROOT / "benchmarks" / "results" / "memory_vs_fsdp2.json"

PEAK_HEADERS = (
    *("model", "FSDP2, profiler", "its tracker", "ratio", "fxshard, profiler", "its plan", "ratio"),
    "fxshard / FSDP2",
)


@dataclasses.dataclass(frozen=True)
class Result:
    """All of one case: its peaks in bytes, and its rows (none where only peaks are shown).

    `packed` is the plan's peak with small parameters packed.
    """

    case: Case
    peaks: dict[str, int]
    tracker: int
    plan: int
    packed: int
    estimates: dict[str, int]
    rows: list[Comparison]
    modules: int


def run(case: Case, *, rows: bool = True) -> Result:
    """Plan, track and measure one case."""
    plan = planned(case)
    theirs, tracker = fsdp2_rows(case)
    compared = compare(theirs, fxshard_rows(plan, case.policy)) if rows else []
    return Result(
        case,
        peaks(case),
        tracker,
        plan.memory.peak_bytes,
        plan.replan(pack_bytes=Config().pack_bytes).memory.peak_bytes,
        estimates(case),
        compared,
        len(plan.memory.modules()),
    )


def gaps(result: Result) -> list[str]:
    """What no rule explains, as lines; nothing is the claim."""
    found = []
    for row in result.rows:
        left = row.difference - sum(part.bytes for part in row.parts)
        if left or row.unexplained:
            where = f"{result.case.name}, {row.unit or '(root)'}, {row.state}"
            found.append(f"{where}: {left:,} bytes without a cause, of {row.unexplained}")
    return found


def page(results: list[Result], wide: Result, known: dict[str, int | bool], about: str) -> str:
    """The Markdown page."""
    rows = [row for result in results for row in result.rows]
    less = [row for row in rows if row.difference > 0]
    more = [row for row in rows if row.difference < 0]
    worst = min(rows, key=lambda row: row.difference)
    sections = [
        INTRODUCTION.format(about=about, world=WORLD),
        "## Peaks of a training step\n\n"
        + _table(PEAK_HEADERS, [_peak_row(result) for result in (*results, wide)], left=1)
        + "\n"
        + PEAKS_NOTE.format(
            notes="\n".join(_unseen(result) for result in results),
            packed=", ".join(f"{r.packed:,}" for r in (*results, wide)),
        ),
        f"## What the differences are made of\n\nOf {len(rows)} rows, fxshard holds less in "
        f"{len(less)}, the same in {len(rows) - len(less) - len(more)}, more in {len(more)} (at "
        f"most {-worst.difference:,} bytes, {worst.state} of `{worst.unit or '(root)'}`). Every "
        "difference is the sum of these causes; [memory-vs-fsdp2.csv](memory-vs-fsdp2.csv) has "
        "every row, with both sides by category.\n\n" + _causes(rows),
        BETTER.format(
            more=len(more),
            early=_largest(rows, "early gather"),
            reduce=_largest(rows, "early reduce"),
            cast=_largest(rows, "cast shard"),
            lower=sum(r.peaks["fxshard"] < r.peaks["fsdp2"] for r in (*results, wide)),
            models=len(results) + 1,
        ),
        _faults_section(known, results[0]),
        "## Estimators\n\n" + ESTIMATORS.format(**_errors([*results, wide])),
    ]
    return "\n\n".join(section.rstrip("\n") for section in sections) + "\n"


INTRODUCTION = """# Memory: fxshard beside FSDP2

Written by `python -m benchmarks.memory_vs_fsdp2` ({about}); do not edit, run it again.

The same models with the same units, precision, batch and optimizer (AdamW), on rank 0 of {world}:
once under torch's `fully_shard`, watched by torch's `FSDPMemTracker` while a step runs, and once
as `fxshard.plan` tells it without running anything. All figures are bytes of the second training
step, on CPU with a fake process group; they depend on shapes alone, not on the machine's speed.
The models are small so that every figure can be followed by hand: their proportions are not those
of a large model, but every cause below is a rule that scales with the unit or the batch. So that
small parameters are laid out as large ones, fxshard has `pack_bytes=0` here: by default those under
1 MiB share a buffer, out of which they are copied, as FSDP2 does with all.

The script lists every storage on both sides, checks that the lists add up to the two tools' own
figures, and gives each byte of difference to a cause by a rule that looks at both lists. If a byte
is left, it fails."""

PEAKS_NOTE = """
"Profiler" is torch.profiler's sum of every allocation and free on the CPU during the step, kernels
included, on top of what is held between steps. "Its plan" is `plan.memory.peak_bytes`: tensors
only. With parameters under 1 MiB packed, as by default, the plans' peaks are, in this order,
{packed}.

{notes}"""

BETTER = """### Where FSDP2 or its tracker does better

- In {more} rows FSDP2 holds less: by *early gather* (up to {early:,} bytes; fxshard has the next
  unit in flight one step earlier, which is what overlaps the all-gather with compute), *early
  reduce* (up to {reduce:,}), *cast shard* (up to {cast:,}), or because our backward of a unit
  reaches into the next one's (*other operator*). Of the step's peak, fxshard's is the lower
  one in {lower} of {models} models.
- fxshard frees and gathers the root's parameters again between forward and backward (*root kept*):
  one all-gather more than FSDP2's default does.
- The tracker watches a real run: it needs no capture, and it works on models that fxshard cannot
  trace.
- Nearly all the tracker's figures are exactly FSDP2's memory: only *tracker's loop variable* is its
  own doing."""

ESTIMATORS = """The formulas of two common estimators, on the same models. Errors are relative to
the peak that the profiler measures of what the estimator speaks of: DeepSpeed's of a sharded step
(here FSDP2's: DeepSpeed is not run), accelerate's of a step on one device without sharding. Both
count bytes per parameter for weights, gradients and optimizer state, and leave activations out. So
their errors depend on the proportions of a model, and the widest model, with few activations, is
the kindest to them ([memory-vs-fsdp2-estimators.csv](memory-vs-fsdp2-estimators.csv)).

- DeepSpeed (`estimate_zero3_model_states_mem_needs` in deepspeed/runtime/zero/stage3.py, without
  offload): 4 bytes x parameters of the largest layer + 18 bytes x parameters / ranks. It assumes
  16-bit training. Its error: {zero3}.
- accelerate (`estimate_training_usage` in accelerate/commands/estimate.py, Adam; the largest stage,
  as `accelerate estimate-memory` prints): 4 x the bytes of parameters and buffers in fp32, 2 x for
  bf16. Its error: {accelerate}.
- `fxshard.plan`, of its own step: {plan}."""


def _table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *, left: int) -> str:
    """A Markdown table; all columns but the first `left` are set to the right."""
    lines = [
        "| " + " | ".join(headers) + " |",
        "|" + "|".join("---" if i < left else "---:" for i in range(len(headers))) + "|",
    ]
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _peak_row(result: Result) -> list[Any]:
    theirs, ours = result.peaks["fsdp2"], result.peaks["fxshard"]
    return [
        result.case.title,
        *(theirs, result.tracker, f"{result.tracker / theirs:.3f}"),
        *(ours, result.plan, f"{result.plan / ours:.3f}"),
        f"{ours / theirs:.3f}",
    ]


def _unseen(result: Result) -> str:
    """What the profiler sees and tracker or plan do not."""
    theirs = result.peaks["fsdp2"] - result.tracker
    ours = result.peaks["fxshard"] - result.plan
    state = torch.get_rng_state().nbytes
    line = (
        f"- {result.case.title}: the profiler sees {theirs:,} bytes more than the tracker, and "
        f"{ours:,} more than the plan"
    )
    if theirs and not theirs % state and not ours:
        return (
            f"{line}. These are {theirs // state} states of the random number generator ({state:,} "
            "bytes each), which `torch.utils.checkpoint` saves for each region and no operator "
            "makes. fxshard saves none for regions without random numbers."
        )
    if theirs and theirs == ours:
        return f"{line}: the same on both sides, temporaries inside the CPU's kernels."
    return f"{line}."


def _causes(rows: list[Comparison]) -> str:
    used = collections.Counter(cause for row in rows for cause in {p.cause for p in row.parts})
    return "\n".join(
        f"- *{c.name}* ({c.who}; in {used[c.name]} rows): {c.what} {c.evidence}"
        for c in CAUSES.values()
        if used[c.name]
    )


def _largest(rows: list[Comparison], cause: str) -> int:
    """The most bytes that our side holds more by one cause."""
    return -min((p.bytes for row in rows for p in row.parts if p.cause == cause), default=0)


def _ordered(result: Result) -> list[Comparison]:
    states = [state.value for state in State]
    units = list(dict.fromkeys(sorted(row.unit for row in result.rows)))
    return sorted(result.rows, key=lambda row: (units.index(row.unit), states.index(row.state)))


def case_rows(result: Result) -> list[dict[str, Any]]:
    """Lines of the file beside the page: bytes of each unit in each state, and by category."""
    found = []
    for row in _ordered(result):
        parts: collections.Counter[str] = collections.Counter()
        for part in row.parts:
            parts[part.cause] += part.bytes
        found.append(
            {
                "model": result.case.title,
                "unit": row.unit or "(root)",
                "state": row.state,
                "FSDP2": sum(row.theirs.values()),
                "fxshard": sum(row.ours.values()),
                "difference": row.difference,
                "made of": ", ".join(f"{cause} {size:+d}" for cause, size in parts.items() if size),
                **{f"{c.value}: FSDP2": row.theirs.get(c.value, 0) for c in CATEGORIES},
                **{f"{c.value}: fxshard": row.ours.get(c.value, 0) for c in CATEGORIES},
            }
        )
    return found


def _faults_section(known: dict[str, int | bool], dense: Result) -> str:
    raises = "raises NotImplementedError" if known["a second step raises"] else "is tracked"
    return f"""## Limits of the tracker that do not show above

Each shown by a run of its own, of the first model:

- It reports boundaries of units only: {known["modules in its table"]} modules are in its table, \
{dense.modules} in `plan.memory.table()`. The file has its rows.
- A second forward of the root under the same tracker {raises}: the first step, in which the \
optimizer makes its state, was run before it.
- A peak outside the root's forward and backward is in none of its rows: with the loss outside \
the model its peak is {known["peak with the loss outside"]:,} bytes, and the largest figure in its \
table {known["largest figure in its table"]:,}. The models above make their loss inside.
- Categories: a gradient is Temp or Activation until its unit's post-backward, and then what is \
sent is a copy of it, Reduce Scatter. For fxshard a gradient is Unsharded Grad from its birth, and \
where it is sent as it is there is no Reduce Scatter. That moves bytes between columns, not in \
totals."""


def estimate_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Lines of the file of estimators: bytes, and errors against what the profiler measures."""
    rows = []
    for result in results:
        theirs, ours, single = (result.peaks[k] for k in ("fsdp2", "fxshard", "one device"))
        zero3, adam = result.estimates["DeepSpeed"], result.estimates["accelerate"]
        rows.append(
            {
                "model": result.case.title,
                "fxshard, profiler": ours,
                "its plan: error": f"{result.plan / ours - 1:+.1%}",
                "FSDP2, profiler": theirs,
                "DeepSpeed ZeRO-3": zero3,
                "DeepSpeed ZeRO-3: error": f"{zero3 / theirs - 1:+.1%}",
                "one device, profiler": single,
                "accelerate": adam,
                "accelerate: error": f"{adam / single - 1:+.1%}",
            }
        )
    return rows


def _errors(results: Sequence[Result]) -> dict[str, str]:
    """From the largest error to the smallest, of each estimator."""
    rows, said = estimate_rows(results), {}
    for key, column in (
        ("plan", "its plan: error"),
        ("zero3", "DeepSpeed ZeRO-3: error"),
        ("accelerate", "accelerate: error"),
    ):
        found = sorted((row[column] for row in rows), key=lambda error: float(error[:-1]))
        said[key] = found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
    return said


def _json(results: list[Result], wide: Result, known: dict[str, Any], about: dict[str, Any]) -> str:
    figures = {
        **about,
        "models": {
            result.case.name: {
                "measured_peaks": result.peaks,
                "tracker_peak": result.tracker,
                "plan_peak": result.plan,
                "packed_plan_peak": result.packed,
                "estimates": result.estimates,
                "rows": [
                    {
                        "unit": row.unit,
                        "state": row.state,
                        "fsdp2": row.theirs,
                        "fxshard": row.ours,
                        "difference": row.difference,
                        "causes": [[part.cause, part.unit, part.bytes] for part in row.parts],
                    }
                    for row in _ordered(result)
                ],
            }
            for result in (*results, wide)
        },
        "tracker": known,
    }
    text = json.dumps(figures)  # a row of the table is a line
    return text.replace('{"unit"', '\n{"unit"').replace('"rows": []', '"rows": []') + "\n"


def main() -> int:
    """Run everything, write page and figures; 1 if a difference has no explanation."""
    torch.set_num_threads(1)
    results = [run(case) for case in CASES.values()]
    wide = run(WIDE, rows=False)
    known = faults()
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, 1 thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "world_size": WORLD,
    }
    about = (
        f"{machine['date']}, {machine['machine']}, Python {machine['python']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}"
    )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(_json(results, wide, known, machine))
    PAGE.write_text(page(results, wide, known, about))
    write_csv(ROWS, [row for result in results for row in case_rows(result)])
    write_csv(ESTIMATES, estimate_rows([*results, wide]))
    left = [line for result in results for line in gaps(result)]
    rows = sum(len(result.rows) for result in results)
    print("\n".join(left) or f"{rows} rows, every difference explained; wrote {PAGE}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
