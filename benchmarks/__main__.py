"""All benchmarks that need no GPU, one after the other, and the page: `make bench`.

Each script runs in a process of its own and writes benchmarks/results/<name>.json; one that fails
is named at the end, the others run all the same. Exit status 1 if one failed; whether targets are
met is in the page, not in the status.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks import page
from benchmarks.figures import ROOT

SCRIPTS = (
    *("step_time", "peak_bytes", "first_step", "limit", "overhead"),
    *("passes", "scale", "plan_405b"),
)


def main() -> int:
    """Run the scripts; the page is made from what they wrote."""
    failed, began = [], time.monotonic()
    for name in SCRIPTS:
        since = time.monotonic()
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - since:.0f} s", flush=True)
    page.main()
    print(f"all: {time.monotonic() - began:.0f} s" + (f"; failed: {failed}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
