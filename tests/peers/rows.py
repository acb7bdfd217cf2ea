"""What became of each method of torch's suites: the rows, read from `rows.csv`, and their page.

The columns of `rows.csv` are file, method, verdict, by, torch. The last says which torches have the
method, where not all do that fxshard runs on. What `by` says depends on the verdict:

    same            pytest ids of our tests, with spaces between them
    refused         a pytest id, then ": " and the text of the error, which that test asserts
    not applicable  why
    missing         what is not there, and what has to come
"""

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "peer-tests.md"
COLUMNS = ("file", "method", "verdict", "by", "torch")
VERDICTS = ("same", "refused", "not applicable", "missing")
SUITES = {  # folder -> heading
    "fsdp2": "FSDP2: `fully_shard`, torch's `test/distributed/_composable/fsdp/`",
    "fsdp1": "FSDP1: `FullyShardedDataParallel`, torch's `test/distributed/fsdp/`",
}

HEAD = """# PyTorch's own tests of FSDP, as tests of fxshard

Written by `python -m tests.peers` from `tests/peers/*/rows.csv`; do not edit. A row is a method of
PyTorch's test suites; our tests of the same behaviour are written anew, with the same models,
oracles and tolerances, and run on gloo ranks.

- **same**: the named tests assert what torch's method asserts, of fxshard.
- **refused**: fxshard says why not and what to do; the named test asserts the text.
- **not applicable**: there is nothing of the kind here, or it needs a GPU.
- **missing**: fxshard does not do it yet.

Where only some of torch's releases have a method, its row says which."""


@dataclass(frozen=True)
class Row:
    """One method of a suite of torch's."""

    suite: str  # "fsdp2"
    file: str  # "test_fully_shard_init.py"
    method: str  # "TestFullyShardMeshArg.test_invalid_mesh_ndim"
    verdict: str
    test_or_reason: str
    torch: str = ""  # "after 2.15"; all, if empty

    @property
    def tests(self) -> list[str]:
        """Pytest ids of the tests that stand for it."""
        if self.verdict == "same":
            return self.test_or_reason.split()
        return [self.test_or_reason.partition(": ")[0]] if self.verdict == "refused" else []

    @property
    def refusal(self) -> str:
        """A part of the error's text, of a refused one."""
        return self.test_or_reason.partition(": ")[2] if self.verdict == "refused" else ""


def read() -> list[Row]:
    """The rows of all suites, in the order of their files."""
    rows = []
    for suite in SUITES:
        path = FOLDER / suite / "rows.csv"
        if path.exists():
            with path.open(newline="") as lines:
                rows += [
                    Row(suite, *(row[key] or "" for key in COLUMNS))
                    for row in csv.DictReader(lines)
                ]
    return rows


def page(rows: Iterable[Row]) -> str:
    """The text of docs/peer-tests.md."""
    parts = [HEAD]
    for suite, heading in SUITES.items():
        files: dict[str, list[Row]] = {}
        for row in rows:
            if row.suite == suite:
                files.setdefault(row.file, []).append(row)
        if files:
            parts += [f"\n## {heading}\n", _counts(files)]
            parts += [_methods(file, chosen) for file, chosen in files.items()]
    return "\n".join(parts)


def _counts(files: dict[str, list[Row]]) -> str:
    counts = {f"`{f}`": Counter(row.verdict for row in rows) for f, rows in files.items()}
    counts["all"] = sum(counts.values(), Counter())
    table = [[file, *(str(count[v]) for v in VERDICTS)] for file, count in counts.items()]
    return _table(["file", *VERDICTS], table)


def _methods(file: str, rows: list[Row]) -> str:
    table = [[f"`{row.method}`{_since(row)}", row.verdict, _by(row)] for row in rows]
    return f"### {file}\n\n{_table(['method', 'here', 'by'], table)}"


def _since(row: Row) -> str:
    return f" (torch {row.torch})" if row.torch else ""


def _table(headers: list[str], rows: list[list[str]]) -> str:
    """Not padded: a changed row is one changed line."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _by(row: Row) -> str:
    tests = ", ".join(f"`{test.removeprefix('tests/peers/')}`" for test in row.tests)
    said = row.refusal if row.tests else row.test_or_reason
    said = said.replace("|", "\\|")
    return said if not tests else f'{tests}: "{said}"' if said else tests
