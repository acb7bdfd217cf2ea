"""GitHub's workflows. actionlint (in .github/workflows/lint.yml) checks them as such; here is what
must hold of this project's."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(file: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(file.read_text())
    found["on"] = found.pop(True)  # what YAML 1.1 makes of the key
    return found


def test_there_are_those() -> None:
    names = ["docs", "lint", "publish", "tests", "wheels"]
    assert [file.stem for file in WORKFLOWS] == [read(file)["name"] for file in WORKFLOWS] == names


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_no_job_may_write_or_run_for_ever(file: Path) -> None:
    """But for uploading a release and the site, which need no secret."""
    workflow = read(file)
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in file.read_text() and "pull_request_target" not in workflow["on"]
    for name, job in workflow["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 350, name
        more = {"publish": {"id-token"}, "deploy": {"id-token", "pages"}}.get(name, set())
        assert job.get("permissions", {}).keys() == more, name
        for step in job.get("steps", ()):
            # what others write is handed to a script in a variable, and is no part of it
            assert "${{ github." not in step.get("run", ""), name


def test_each_python_is_tried() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    minor = [c.rpartition(" ")[2] for c in classifiers if ":: Python :: 3." in c]
    for file, job in (("tests", "fast"), ("wheels", "install")):
        jobs = read(ROOT / f".github/workflows/{file}.yml")["jobs"]
        assert jobs[job]["strategy"]["matrix"]["python"] == minor


def test_what_is_published_was_installed_before() -> None:
    jobs = read(ROOT / ".github/workflows/publish.yml")["jobs"]
    assert jobs["publish"]["needs"] == "wheels"
    assert jobs["wheels"]["uses"] == "./.github/workflows/wheels.yml"
    *_, upload = jobs["publish"]["steps"]
    assert upload["uses"].startswith("pypa/gh-action-pypi-publish@") and "with" not in upload
