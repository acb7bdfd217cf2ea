"""Rows name tests that exist, texts of refusals are asserted, page and table are up to date."""

import ast
import csv
import functools

from tests.peers import rows
from tests.peers.rows import ROOT, VERDICTS, Row


@functools.cache
def parsed(file: str) -> tuple[set[str], list[str]]:
    """The names of functions of a file of tests, and its strings."""
    nodes = list(ast.walk(ast.parse((ROOT / file).read_text())))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return names, strings


def complaint(row: Row) -> str:
    """What is wrong with a row; empty if nothing is."""
    if row.verdict not in VERDICTS:
        return f"verdict {row.verdict!r}"
    if not row.tests:
        return "" if row.test_or_reason else "no reason"
    for test in row.tests:
        file, _, name = test.partition("::")
        if not (ROOT / file).is_file():
            return f"no file {file}"
        names, strings = parsed(file)
        if not name.startswith("test_") or name.partition("[")[0] not in names:
            return f"no test {test}"
        if row.verdict == "refused" and not any(row.refusal in string for string in strings):
            return f"{file} does not assert {row.refusal!r}"
    return "no text" if row.verdict == "refused" and not row.refusal else ""


def test_each_row_is_true_to_its_tests() -> None:
    found = rows.read()
    assert found
    assert [(row.method, complaint(row)) for row in found if complaint(row)] == []


def test_no_method_has_two_rows() -> None:
    keys = [(row.suite, row.file, row.method) for row in rows.read()]
    assert [key for key in keys if keys.count(key) > 1] == []


def test_wrong_rows_are_noticed() -> None:
    here = "tests/peers/test_rows.py"
    wrong = {
        "verdict 'good'": ("good", here),
        "no reason": ("missing", ""),
        "no file tests/none.py": ("same", "tests/none.py::test_a"),
        f"no test {here}::test_none": (
            "same",
            f"{here}::test_wrong_rows_are_noticed {here}::test_none",
        ),
        f"no test {here}::complaint": ("same", f"{here}::complaint"),
        "no text": ("refused", f"{here}::test_wrong_rows_are_noticed"),
        f"{here} does not assert '{'X' * 9}'": (
            "refused",
            f"{here}::test_wrong_rows_are_noticed: {'X' * 9}",
        ),
    }
    for said, (verdict, by) in wrong.items():
        assert complaint(Row("fsdp2", "f.py", "T.m", verdict, by)) == said
    right = Row("fsdp2", "f.py", "T.m", "refused", f"{here}::test_wrong_rows_are_noticed: no text")
    assert complaint(right) == ""


def test_the_page_and_its_table_are_up_to_date() -> None:
    """`python -m tests.peers` writes both; the table has every row, and all that is known of it."""
    assert rows.PAGE.read_text() == rows.page(rows.read())
    text = rows.TABLE.read_text()
    assert text == rows.table(rows.read())
    written = list(csv.DictReader(text.splitlines()))
    assert [Row(each["suite"], *(each[key] for key in rows.COLUMNS)) for each in written] == [
        *rows.read()
    ]
    said = {(each["file"], each["method"].partition(" (")[0]): each for each in written}
    for run in rows.read_as_they_are():
        of_it = said[run.file, run.method]
        assert [of_it[key] for key in ("as it is", "why", "commit")] == [
            *(run.outcome, run.why, run.commit),
        ]


def test_the_page_is_short() -> None:
    """One table, of files; what is said of methods is in the CSV."""
    text = rows.PAGE.read_text()
    assert len(text.splitlines()) <= 200 and text.count("\n| ---") == 1
