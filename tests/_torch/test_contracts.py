"""Each name of `fxshard._torch` has a contract here: a torch upgrade says which one changed."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import fxshard._torch

SUBJECTS = [module.name for module in pkgutil.iter_modules(fxshard._torch.__path__)]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_name_has_a_contract(subject: str) -> None:
    module = importlib.import_module(f"fxshard._torch.{subject}")
    own = {
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    }
    own |= set(getattr(module, "__all__", []))
    text = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in sorted(own) if not re.search(rf"\b{name}\b", text)] == []
