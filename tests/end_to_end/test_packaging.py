"""fxshard.passes lives in the top-level folder passes/: every way to install or run must find it.

Each test builds from a copy of the checkout, because setuptools writes build/ and *.egg-info into
the tree it builds. Nothing is downloaded: the build tools and torch are those of this environment.
"""

import filecmp
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import fxshard

ROOT = Path(__file__).resolve().parents[2]
# Folders that are no source, at the top of the checkout.
NOT_SOURCE = (".git", ".venv*", "build", "dist", "runs", "shared", "site")
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
PIP_INSTALL = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed"]

# Imports each module named in argv, then prints a line "name<TAB>file" for each.
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    print(name, importlib.import_module(name).__file__, sep="\\t")
"""


def run(argv: Sequence[str | Path], *, cwd: Path, path: Path | None = None) -> str:
    """Standard output of a command; on failure the test fails with all that it said."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | OFFLINE
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [str(a) for a in argv], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"{argv} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def source_files(root: Path) -> set[str]:
    """Every file of the package, by the path it must have once installed."""
    found = set()
    for folder, installed in ((root / "fxshard", "fxshard"), (root / "passes", "fxshard/passes")):
        # os.walk does not follow the symlink fxshard/passes: passes/ is walked by itself.
        for parent, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            inside = Path(parent).relative_to(folder)
            found |= {
                (installed / inside / name).as_posix() for name in names if not name.startswith(".")
            }
    return found


def pass_modules(root: Path) -> list[str]:
    stems = sorted(file.stem for file in (root / "passes").glob("*.py"))
    return ["fxshard.passes" if stem == "__init__" else f"fxshard.passes.{stem}" for stem in stems]


def check_imports(
    folder: Path, root: Path, *, cwd: Path, path: Path | None = None, python: Path | None = None
) -> None:
    """Every pass imports, and from `folder`: not from the checkout that runs these tests."""
    names = pass_modules(root)
    output = run([python or sys.executable, "-c", IMPORT_ALL, *names], cwd=cwd, path=path)
    files = dict(line.split("\t") for line in output.splitlines() if "\t" in line)
    assert sorted(files) == sorted(names)
    for name, file in files.items():
        stem = "__init__" if name == "fxshard.passes" else name.removeprefix("fxshard.passes.")
        expected = folder / f"{stem}.py"
        assert Path(file).resolve() == expected.resolve(), name


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = shutil.ignore_patterns("__pycache__", "*.egg-info", "*_cache")
    on_top = shutil.ignore_patterns(*NOT_SOURCE)

    def ignore(folder: str, names: list[str]) -> set[str]:
        return made(folder, names) | (on_top(folder, names) if Path(folder) == ROOT else set())

    copy = tmp_path_factory.mktemp("packaging") / "checkout"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    run(
        [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, checkout],
        cwd=out,
    )
    (archive,) = out.glob("*.tar.gz")
    shutil.unpack_archive(archive, out, filter="data")
    (folder,) = (entry for entry in out.iterdir() if entry.is_dir())
    return folder


def wheel_of(source: Path, out: Path) -> Path:
    """The wheel built from `source`, unpacked into `out`."""
    built = out / "wheel"
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", built, source], cwd=out)
    (archive,) = built.glob("*.whl")
    site = out / "site"
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(site)
    return site


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout, unpacked."""
    return wheel_of(checkout, tmp_path_factory.mktemp("wheel"))


def test_every_package_is_listed() -> None:
    """A folder with Python files in it is shipped only if pyproject.toml names it."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {Path(file).parent for file in source_files(ROOT) if file.endswith(".py")}
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in folders)


def test_every_public_name_is_there() -> None:
    """They are imported when first asked for: none may be promised and lead nowhere."""
    found = {name: getattr(fxshard, name) for name in fxshard.__all__}
    assert all(callable(value) for value in found.values())
    assert dir(fxshard) == sorted(found)


def test_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    found = (file.relative_to(wheel) for file in wheel.rglob("*") if file.is_file())
    shipped = {file.as_posix() for file in found if "__pycache__" not in file.parts}
    assert {file for file in shipped if ".dist-info/" not in file} == source_files(checkout)
    check_imports(wheel / "fxshard/passes", checkout, cwd=tmp_path, path=wheel)


# What a user of the backend writes, in a process that has not imported fxshard before.
COMPILE = """
import torch, torch._dynamo
assert "fxshard" in torch._dynamo.list_backends(), torch._dynamo.list_backends()
import fxshard
from torch._dynamo.backends import registry
model = fxshard.shard(torch.nn.Linear(4, 4), world_size=2)
assert "fxshard" not in registry._COMPILER_FNS  # found by its entry point, not registered
torch.compile(model, backend="fxshard", fullgraph=True)(torch.randn(2, 4)).sum().backward()
model.compile(backend="fxshard")
model(torch.randn(2, 4))
print(registry._COMPILER_FNS["fxshard"].__module__, fxshard.__file__, len(fxshard.reports(model)))
"""


def test_torch_compile_finds_the_backend_of_a_wheel(wheel: Path, tmp_path: Path) -> None:
    module, file, graphs = run([sys.executable, "-c", COMPILE], cwd=tmp_path, path=wheel).split()
    assert module == "fxshard.dynamo.graphs"
    assert Path(file).is_relative_to(wheel)
    assert int(graphs) == 1


def test_the_version_is_that_of_pyproject(wheel: Path, tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = run([sys.executable, "-m", "fxshard", "--version"], cwd=tmp_path, path=wheel)
    assert told == f"fxshard {project['version']}\n"
    minor = [c.rpartition(" ")[2] for c in project["classifiers"] if ":: Python :: 3." in c]
    assert minor == ["3.11", "3.12", "3.13", "3.14"] and project["requires-python"] == ">=3.11"


def test_sdist(checkout: Path, sdist: Path, wheel: Path, tmp_path: Path) -> None:
    # No symlink in it: package-dir alone carries this build, as where git makes no symlinks.
    assert {"CHANGELOG.md", "LICENSE", "README.md"} <= {file.name for file in sdist.iterdir()}
    assert (sdist / "passes").is_dir() and not (sdist / "fxshard/passes").exists()
    site = wheel_of(sdist, tmp_path)
    names = source_files(site)
    assert names == source_files(checkout)
    # byte by byte what test_wheel imports
    assert filecmp.cmpfiles(wheel, site, names, shallow=False)[1:] == ([], [])


def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", venv], cwd=tmp_path)
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run([python, "-c", code], cwd=tmp_path).strip())
    # torch and setuptools come from this environment. As a line of a .pth file its site-packages
    # is one more folder to search: .pth files inside it, which may name this checkout, are unread.
    (site / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python]
    run([*pip, *PIP_INSTALL, "--editable", checkout], cwd=tmp_path)
    check_imports(checkout / "passes", checkout, cwd=tmp_path, python=python)


def test_from_the_checkout(checkout: Path) -> None:
    check_imports(checkout / "passes", checkout, cwd=checkout)


def test_the_name_passes_is_refused(checkout: Path) -> None:
    code = "try: import passes\nexcept ImportError as error: print(error.name, error)"
    output = run([sys.executable, "-c", code], cwd=checkout)
    assert output.startswith("passes ")
    assert "fxshard.passes" in output
