"""docs/tutorial.md, as its reader runs it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tutorial_prints_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", page, re.M | re.S)
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(text for kind, text in blocks if kind == "python"))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = words(done.stdout)
    shown = [line for kind, text in blocks if kind == "text" for line in words(text)]
    assert shown and [line for line in shown if line not in printed] == []


def words(text: str) -> list[list[str]]:
    """Line by line; how wide columns are is not the page's claim."""
    return [line.split() for line in text.splitlines()]
