"""CHANGELOG.md as Keep a Changelog 1.1.0 has it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"Added", "Changed", "Deprecated", "Fixed", "Removed", "Security"}


def test_versions_and_kinds_of_changes() -> None:
    """What is unreleased may have other headings until it is released."""
    first, *sections = re.split(r"(?m)^## ", (ROOT / "CHANGELOG.md").read_text())
    assert first.startswith("# Changelog") and "keepachangelog.com/en/1.1.0" in first
    headings = [section.split("\n", 1)[0] for section in sections]
    assert headings[0] == "[Unreleased]"
    for heading, section in list(zip(headings, sections, strict=True))[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading), heading
        kinds = re.findall(r"(?m)^### (.*)$", section)
        assert kinds and len(kinds) == len(set(kinds)) and set(kinds) <= KINDS, heading


def test_the_version_to_cite_is_that_of_pyproject() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
