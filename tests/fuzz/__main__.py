"""`python -m tests.fuzz SEED`: replay a case, print it as code, and shrink it if it fails.

`python -m tests.fuzz --count 10000 --start 0`: many cases, and the table of what came out. Results
are appended to `--out`; started again with the same file, it goes on after the last one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.fuzz.case import Case, drawn_case
from tests.fuzz.judge import judged
from tests.fuzz.many import quiet, results, run, table
from tests.fuzz.script import script
from tests.fuzz.shrink import shrunk


def replay(seed: int, where: str, shrinks: bool) -> None:
    """One case: its class, and its code or that of a smaller one."""
    case = drawn_case(seed, {"here": False, "ranks": True}.get(where))
    verdict = judged(case)
    if shrinks and verdict.kind in ("wrong", "crash", "bytes", "refused"):

        def same(smaller: Case) -> bool:
            found = judged(smaller)
            head = found.reason.split(":")[0] == verdict.reason.split(":")[0]
            return found.kind == verdict.kind and (head or found.kind in ("wrong", "bytes"))

        case = shrunk(case, same)
        verdict = judged(case)
    print(script(case, verdict))
    print(f"# {verdict.kind}: {verdict.reason}")
    print("\n".join(f"# {line}" for line in verdict.detail.splitlines()[-40:]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="replay this case")
    parser.add_argument("--count", type=int, default=0, help="run so many cases")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz.jsonl"))
    parser.add_argument("--where", choices=("as drawn", "here", "ranks"), default="as drawn")
    parser.add_argument("--no-bytes", action="store_true", help="compare numbers alone")
    parser.add_argument("--no-shrink", action="store_true", help="print the case as it was drawn")
    args = parser.parse_args()
    if args.seed is not None:
        quiet()
        replay(args.seed, args.where, not args.no_shrink)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    run(args.start, args.count, args.out, args.where, not args.no_bytes)
    span = range(args.start, args.start + args.count)
    print(table([each for seed, each in results(args.out).items() if seed in span]))


if __name__ == "__main__":
    main()
