"""The face: what ``fxshard`` promises by name, by type and in docstrings."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fxshard
from fxshard.config.checked import Config
from fxshard.config.docs import option_docs
from fxshard.config.options import Options

ROOT = Path(fxshard.__file__).parent.parent
FOR_IT = "fxshard.integrations.torchtitan"
TORCHTITAN = importlib.util.find_spec("torchtitan") is not None
VERBS = ("compile", "plan", "shard", "tune", "validate")


def everything() -> Iterator[str]:
    """Every module of the package, but the script, and what is for a framework that is not here."""
    for found in pkgutil.walk_packages(fxshard.__path__, "fxshard."):
        if found.name != "fxshard.__main__" and (TORCHTITAN or not found.name.startswith(FOR_IT)):
            yield found.name


def test_every_error_is_named() -> None:
    """Those that users can catch: the public subclasses of FxshardError, wherever they are."""
    for name in everything():
        importlib.import_module(name)

    def below(kind: type) -> Iterator[type]:
        yield kind
        for sub in kind.__subclasses__():
            if sub.__module__.startswith("fxshard"):
                yield from below(sub)

    found = {e.__name__ for e in below(fxshard.FxshardError) if not e.__name__.startswith("_")}
    assert found == {name for name in fxshard.__all__ if name.endswith("Error")}
    homes = {getattr(fxshard, name).__module__ for name in found}
    assert homes == {"fxshard.errors"}


def test_no_module_shadows_a_name() -> None:
    for name in everything():
        importlib.import_module(name)
    modules = {found.name for found in pkgutil.iter_modules(fxshard.__path__)}
    assert not modules & set(fxshard.__all__)
    for verb in VERBS:
        assert inspect.isfunction(getattr(fxshard, verb))
    assert dir(fxshard) == sorted(fxshard.__all__)


def test_errors_and_help_do_without_torch() -> None:
    code = (
        "import sys, fxshard; from fxshard.cli.main import main; fxshard.DoesNotFitError\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


# -- options -----------------------------------------------------------------------------------


def test_options_are_the_fields_of_config() -> None:
    of_config = typing.get_type_hints(Config)
    del of_config["given"]
    assert typing.get_type_hints(Options) == of_config
    assert list(Options.__annotations__) == Config.names()
    assert not Options.__required_keys__


def test_every_option_has_a_docstring() -> None:
    told = option_docs()
    assert list(told) == Config.names()
    assert all(said.endswith(".") and len(said) > 20 for said in told.values())


@pytest.mark.parametrize("verb", [*VERBS, "default_passes"])
def test_help_shows_every_option_with_its_default(verb: str) -> None:
    said = " ".join((inspect.getdoc(getattr(fxshard, verb)) or "").split())
    for field in dataclasses.fields(Config):
        if field.name != "given":
            doc = option_docs()[field.name]
            assert f" {field.name}: (default {field.default!r}) {doc}" in said
    parameters = inspect.signature(getattr(fxshard, verb)).parameters
    assert parameters["options"].annotation == "Unpack[Options]"


# A line that a type checker refuses says so, and why.
USER = """
import torch
import fxshard
from fxshard import Options

model = torch.nn.Linear(2, 2)
fxshard.plan(model, world_size=2, max_inflight=3, backend="inductor", pack_bytes="2MiB")
fxshard.compile(model, world_size=2, units=["*"], checkpoint={"*": "full"}, sync_module_states=True)
chosen: Options = {"reduce_op": "sum", "max_variants": 3}
fxshard.shard(model, world_size=2, **chosen)
fxshard.plan(model, world_size=2).replan(world_size=4, max_inflight=2)

fxshard.plan(model, world_size=2, max_inflght=3)  # refused: max_inflght
fxshard.compile(model, world_size=2, backend="indcutor")  # refused: indcutor
fxshard.shard(model, world_size=2, sync_module_states="yes")  # refused: sync_module_states
fxshard.validate(model, world_size=2, max_variants="3")  # refused: max_variants
fxshard.tune(model, world_size=2, hardware="h100", reduce_op="mean")  # refused: mean
fxshard.plan(model, world_size=2).replan(max_inflight="2")  # refused: max_inflight
wrong: Options = {"max_variant": 3}  # refused: max_variant
"""


def check_refused(found: dict[int, str]) -> None:
    """Errors by line are those that `USER` announces."""
    lines = dict(enumerate(USER.splitlines(), 1))
    refused = {n: line.partition("# refused: ")[2] for n, line in lines.items() if "# ref" in line}
    assert found.keys() == refused.keys(), found
    for number, what in refused.items():
        assert what in found[number]


def test_mypy_refuses_what_is_no_option(tmp_path: Path) -> None:
    """Of fxshard it reads the face alone: all of it, with torch, takes minutes."""
    api = pytest.importorskip("mypy.api")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    rooms = [path for room in ("api", "config") for path in (ROOT / "fxshard" / room).glob("*.py")]
    plans = (ROOT / "fxshard" / "plans" / name for name in ("plan.py", "workload.py"))
    face = (ROOT / "fxshard" / "__init__.py", *sorted(rooms), *plans)
    out, errors, _ = api.run(
        [
            *("--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")),
            *("--follow-imports=skip", "--ignore-missing-imports", "--no-error-summary"),
            *("--python-version=3.11", "--explicit-package-bases"),
            *map(str, face),
            str(tmp_path / "user.py"),
        ]
    )
    assert not errors
    found: dict[int, str] = {}
    for line, kind, text in re.findall(r"user\.py:(\d+): (\w+): (.*)", out):
        if kind == "error":
            found[int(line)] = found.get(int(line), "") + text
    check_refused(found)


def test_pyright_refuses_what_is_no_option(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)], "pythonVersion": "3.11"})
    )
    quiet = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, env=quiet, capture_output=True, text=True)
    told = json.loads(done.stdout)["generalDiagnostics"]
    found: dict[int, str] = {}
    for each in told:
        if each["severity"] == "error":
            line = each["range"]["start"]["line"] + 1
            found[line] = found.get(line, "") + each["message"] + USER.splitlines()[line - 1]
    check_refused(found)


# -- docstrings --------------------------------------------------------------------------------


def public() -> dict[str, Callable[..., Any] | property]:
    """Every public function, and every public method of ours of a public class."""
    found: dict[str, Any] = {}
    for name in fxshard.__all__:
        value = getattr(fxshard, name)
        if inspect.isfunction(value):
            found[name] = value
        elif inspect.isclass(value):
            for kind in value.__mro__:
                if kind.__module__.startswith("fxshard."):
                    for own, member in vars(kind).items():
                        if not own.startswith("_"):
                            found.setdefault(f"{name}.{own}", member)
    return found


PUBLIC = public()


def test_every_public_class_says_what_it_is() -> None:
    for name in fxshard.__all__:
        value = getattr(fxshard, name)
        if inspect.isclass(value):
            assert vars(value).get("__doc__"), name


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_name_every_parameter(name: str) -> None:
    member = PUBLIC[name]
    function: Any = inspect.unwrap(getattr(member, "__func__", member))
    if isinstance(member, property):
        function = member.fget
    function = getattr(function, "func", function)  # of a cached property
    if not inspect.isfunction(function):
        return
    doc = inspect.getdoc(member) or inspect.getdoc(function) or ""
    assert doc, name
    section = re.search(r"^Args:\n((?: +.*\n?|\n)*)", doc, re.M)
    heads = re.findall(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", section[1] if section else "", re.M)
    told = {one.strip("*") for head in heads for one in head.split(", ")}
    taken = {p for p in inspect.signature(function).parameters if p not in ("self", "cls")}
    assert told == taken, f"{name}: not documented: {taken - told}; not there: {told - taken}"
    returned = inspect.signature(function).return_annotation
    gives = returned not in (None, "None", "Iterator[None]")
    if gives and (taken or "." not in name):
        assert "\nReturns:\n" in doc
    for error in raised(function):
        assert re.search(rf"\b{error}\b", doc), f"{name} raises {error}"


def raised(function: Callable[..., Any]) -> set[str]:
    """Names of the errors that a function raises itself."""
    found, seen = set(), [*ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body]
    while seen:
        node = seen.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(ast.unparse(node.exc.func).rpartition(".")[2])
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            seen += ast.iter_child_nodes(node)
    return found


def test_type_checkers_and_docs_see_every_name() -> None:
    tree = ast.parse(Path(fxshard.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in typed.body if isinstance(node, ast.ImportFrom))
    assert {alias.name for node in imports for alias in node.names} == {*fxshard.__all__}
