"""Each name of `fxshard._torch` has a contract here: a torch upgrade says which one changed."""

import ast
import importlib
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import fxshard._torch

ROOT = Path(__file__).parents[2]
SUBJECTS = [module.name for module in pkgutil.iter_modules(fxshard._torch.__path__)]


def assigned(path: Path) -> set[str]:
    """Public constants and aliases of a file, which do not know where they are from."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign)) else []:
            found |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_name_has_a_contract(subject: str) -> None:
    module = importlib.import_module(f"fxshard._torch.{subject}")
    own = {
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    }
    own |= set(getattr(module, "__all__", []))
    own |= assigned(Path(str(module.__file__)))
    text = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in sorted(own) if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize(
    "line",
    ["import torch._C", "x.untyped_storage()._cdata", 'getattr(node.target, "_schema", None)'],
)
def test_what_is_private_to_torch_is_refused_elsewhere(line: str) -> None:
    offences = runpy.run_path(str(ROOT / ".ci" / "private_imports.py"))["offences"]
    assert list(offences(ast.parse(line)))
    assert not list(offences(ast.parse("self._own; module._parameters; torch.ops.aten._to_copy")))
