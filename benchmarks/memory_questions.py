"""The code of docs/memory-questions.md, run: writes what it prints under each block.

    python -m benchmarks.memory_questions    # from the root of the repository

CPU only, no process group; nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[1] / "docs" / "memory-questions.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n.*?```\n)?", re.DOTALL)


def answered(page: str) -> tuple[str, dict[str, Any]]:
    """The page with what its code prints, and the names that the code leaves behind."""
    names: dict[str, Any] = {"__name__": "memory_questions"}

    def run(block: re.Match[str]) -> str:
        printed = io.StringIO()
        line = page.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(PAGE), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        out = printed.getvalue()
        return f"```python\n{block[1]}```\n" + (f"\n```text\n{out}```\n" if out else "")

    torch.manual_seed(0)
    return BLOCK.sub(run, page), names


def main() -> int:
    before = PAGE.read_text("utf-8")
    after, _ = answered(before)
    PAGE.write_text(after, "utf-8")
    print(f"{PAGE}: {'written' if after != before else 'as it was'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
