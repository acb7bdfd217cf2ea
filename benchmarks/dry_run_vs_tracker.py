"""Peaks of FSDP2's steps: torch.profiler, a dry run and torch's FSDPMemTracker beside each other.

    python -m benchmarks.dry_run_vs_tracker

The models of benchmarks/vs_fsdp2, rank 0 of 8, bytes of the second step on the CPU. It prints the
table of docs/dry-run.md.
"""

from tabulate import tabulate

from benchmarks.vs_fsdp2.models import CASES, WIDE, WORLD, Case
from benchmarks.vs_fsdp2.peaks import measured_peak
from benchmarks.vs_fsdp2.tracked import fsdp2_rows, fully_sharded
from fxshard import dry_run
from fxshard._torch import process_groups

HEADERS = ("FSDP2, rank 0 of 8", "torch.profiler", "dry run", "FSDPMemTracker")


def _measured(case: Case) -> int:
    with process_groups.fake_process_group(0, WORLD):
        return measured_peak(*fully_sharded(case))


def dry(case: Case) -> int:
    """Peak of the second step in a dry run."""
    with dry_run(world_size=WORLD, device="cpu") as run:
        _, _, step = fully_sharded(case)
        for _ in range(2):
            step()
            run.step()
    return run.memory.peak_bytes


def main() -> None:
    rows = [
        (case.title, _measured(case), dry(case), fsdp2_rows(case)[1])
        for case in (*CASES.values(), WIDE)
    ]
    print(tabulate(rows, headers=HEADERS, tablefmt="github", intfmt=","))


if __name__ == "__main__":
    main()
