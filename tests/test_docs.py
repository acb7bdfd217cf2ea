"""Links between pages lead somewhere, the README stays one page, the reference is complete."""

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
