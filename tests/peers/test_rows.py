"""Rows name tests that exist, the texts of refusals are asserted, and the page is up to date."""

import ast
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


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.peers` writes it."""
    assert rows.PAGE.read_text() == rows.page(rows.read())
