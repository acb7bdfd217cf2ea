"""A stand-in for the package triton, where there is none, while Inductor generates code for a GPU.

Inductor writes source text for Triton and asks the package for names and types only. What is
generated here is never compiled.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

_MODULES: dict[str, types.ModuleType] = {}  # made once: types that code compares stay the same


class _Thing:
    """Whatever it is asked for is another one; as a decorator it changes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else _Thing()


class _Finder:
    """Finds ``triton`` and every module in it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__version__ = "3.7.0"  # type: ignore[attr-defined]

        def get(name: str) -> Any:
            # Versions of Triton that have this class want other text.
            if name.startswith("__") or name == "AttrsDescriptor":
                raise AttributeError(name)
            is_class = name[:1].isupper() or name == "dtype"
            setattr(module, name, type(name, (), {}) if is_class else _Thing())
            return module.__dict__[name]

        module.__getattr__ = get  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "triton.backends":
            module.backends = {"nvidia": _Thing()}  # type: ignore[attr-defined]


def is_missing() -> bool:
    """True if triton cannot be imported here."""
    return importlib.util.find_spec("triton") is None


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """While the block runs, triton can be imported; where it is installed, nothing changes.

    Modules that import it at their top and should not keep the stand-in are to be imported before.
    """
    if not is_missing():
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    sys.modules.update(_MODULES)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            _MODULES[name] = sys.modules.pop(name)
