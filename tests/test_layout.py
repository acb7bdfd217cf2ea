"""How the files of fxshard lie, and what their classes are called.

No circles between files, few beside the rooms, docs/layout.md names each, long tests say why, and a
class name has one meaning.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ROOT / "fxshard"
TESTS = ROOT / "tests"
MOST_FILES = 8  # of fxshard/ itself
MOST_LINES = 600  # of a file of tests/ that does not say why it has more

# Data that is shown by views: it imports a view where it is asked to show itself, and the view the
# data. Nothing else imports upward, for types either.
VIEWS = {
    ("fxshard.memory.report", "fxshard.memory.views"),
    ("fxshard.memory.oom.explain", "fxshard.memory.views.oom"),
    ("fxshard.cost.timeline", "fxshard.cost.perfetto"),
}


def modules() -> dict[str, Path]:
    """Every module of fxshard, by its dotted name."""
    found = {}
    for path in [*ROOMS.rglob("*.py"), *(ROOT / "passes").glob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "passes" in parts[:2]:
            parts = ("fxshard", *parts[parts.index("passes") :])
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """What a file imports of fxshard, wherever in it: at the top, in functions, for types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fxshard":
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("fxshard."))


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one file (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in sorted(arrows[node]):
            if other not in index:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            component = set()
            while node not in component:
                component.add(stack.pop())
            if len(component) > 1:
                found.append(component)

    for node in sorted(arrows):
        if node not in index:
            visit(node)
    return found


def is_view(source: str, target: str) -> bool:
    return any(source == data and target.startswith(view) for data, view in VIEWS)


def test_there_are_no_circles() -> None:
    known = modules()
    arrows: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        if name == "fxshard":  # names its parts when they are asked for
            continue
        arrows[name] = {
            target for target in imported(path, known) if target != name and target in known
        }
        arrows[name] = {target for target in arrows[name] if not is_view(name, target)}
    assert circles(arrows) == []


def test_circles_are_found() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert circles(arrows) == [{"a", "b", "c"}]


def test_few_files_stand_beside_the_rooms() -> None:
    assert len(list(ROOMS.glob("*.py"))) <= MOST_FILES


@pytest.mark.parametrize("path", sorted(ROOMS.rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_every_room_says_what_it_is_for(path: Path) -> None:
    room = path.parent.relative_to(ROOT).as_posix()
    assert ast.get_docstring(ast.parse(path.read_text()))
    assert f"`{room}/" in (ROOT / "docs" / "layout.md").read_text() or room == "fxshard"


def test_tests_mirror_the_rooms() -> None:
    rooms = {path.parent.name for path in ROOMS.glob("*/__init__.py")}
    assert rooms - {path.parent.name for path in TESTS.glob("*/test_*.py")} == set()


def test_files_that_the_layout_names_exist() -> None:
    text = (ROOT / "docs" / "layout.md").read_text()
    named = re.findall(r"`((?:fxshard|passes|tests|benchmarks|examples)/[\w./]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_layout_names_every_file_where_it_tells_of_its_room() -> None:
    text = (ROOT / "docs" / "layout.md").read_text().partition("\n## ")[0]
    told: dict[str, Counter[str]] = {}
    for room, paragraphs in re.findall(r"^\*\*`(\S+?)`\*\*(.*?)(?=^\*\*`|\Z)", text, re.M | re.S):
        told[room] = Counter(re.findall(r"`(?:[\w/]*/)?(\w+\.py)`", f"`{room}`{paragraphs}"))
    for path in modules().values():
        room, *inside = path.relative_to(ROOT).as_posix().removeprefix("fxshard/").split("/")
        if path.name != "__init__.py" and inside:
            room = "passes/" if room == "passes" else f"fxshard/{room}/"
            told[room][path.name] -= 1  # two files of a name in a room are named twice
    few = {(room, name) for room, names in told.items() for name in names if names[name] < 0}
    assert sorted(few) == []
    beside = {path.name for path in ROOMS.glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(beside) if name not in text] == []


def test_long_files_of_tests_say_why() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in TESTS.rglob("*.py")}
    long = {name: text for name, text in files.items() if len(text.splitlines()) > MOST_LINES}
    docs = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in long.items()}
    assert [name for name, doc in sorted(docs.items()) if "One file because " not in doc] == []


def classes(files: dict[str, str]) -> dict[str, list[str]]:
    """Where each class is defined, by its name without a leading underscore; nested ones too."""
    found: dict[str, list[str]] = defaultdict(list)
    for file, text in sorted(files.items()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name.removeprefix("_")].append(f"{file}:{node.lineno}")
    return found


def test_a_class_name_has_one_meaning() -> None:
    """A class that imitates one of torch (`dryrun.streams.Event`) has torch's name for itself."""
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in modules().values()}
    found = classes(files)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_two_classes_of_one_name_are_found() -> None:
    files = {"a.py": "class Row: ...", "b.py": "def f():\n    class _Row: ...\nclass Rows: ..."}
    assert classes(files) == {"Row": ["a.py:1", "b.py:2"], "Rows": ["b.py:3"]}
