"""Links lead somewhere, each page is in nav, the README is one page, the reference is complete.

`make docs` builds the site and fails at every warning; what is tested here needs no mkdocs.
"""

import importlib.util
import re
from pathlib import Path

import pytest

import fxshard

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples/README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    inside = [target for target in targets if "://" not in target]
    assert [target for target in inside if not (page.parent / target).exists()] == []


def test_each_page_is_in_nav_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"^ +- .*?([\w./-]+\.md)$", nav, re.M)
    docs = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if "docs" in page.parts]
    assert sorted(named) == sorted([*docs, "index.md", "examples/README.md"])
    decisions = [name for name in named if re.match(r"adr/\d", name)]
    assert decisions == sorted(decisions)


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 160


def test_tests_that_pages_name_exist() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(
            r"`((?:tests|benchmarks|examples)/[\w/]+\.py)`", page.read_text("utf-8")
        )
    }
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_reference_has_every_public_name() -> None:
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^::: fxshard\.(\w+)$", "\n".join(map(Path.read_text, pages)), re.M)
    assert sorted(named) == sorted(fxshard.__all__)


def test_make_docs_finds_missing_docstrings() -> None:
    """As a warning, which ends the build: nothing between mkdocs and the terminal may hide it."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / ".ci" / "docs_site.py")
    assert spec and spec.loader
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)

    class Silent:
        def verb(self) -> None: ...

    Silent.__module__ = "fxshard.nowhere"
    assert [*site.undocumented("fxshard.Silent", Silent)] == [
        "fxshard.Silent",
        "fxshard.Silent.verb",
    ]
    for name in fxshard.__all__:
        assert [*site.undocumented(name, getattr(fxshard, name))] == []
    (command,) = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text("utf-8"))
    assert command.split() == ["mkdocs", "build", "--strict"]


def test_a_decision_tells_of_each_name_beyond_the_design() -> None:
    """The names of the design, and those of the table in ADR 55, are the face."""
    text = (ROOT / "docs/adr/0055-what-the-face-has-beyond-the-design.md").read_text("utf-8")
    beyond = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", text, re.M)))
    design = {name for name in fxshard.__all__ if name.endswith("Error")} | {
        *("plan", "compile", "shard", "fully_shard", "validate", "tune", "fsdp2_memory"),
        *("Plan", "FxshardModule", "MemoryReport", "Validation", "Tuning", "Options"),
        *("Pass", "Pipeline", "default_passes", "save_checkpoint", "load_checkpoint"),
    }
    assert sorted(beyond) == sorted({*fxshard.__all__} - design)
