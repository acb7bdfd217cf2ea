"""What ``help()`` says of options: what `Options` does."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from fxshard.config import options
from fxshard.config.checked import Config
from fxshard.config.options import Options


@functools.cache
def option_docs() -> dict[str, str]:
    """What `Options` says of each option, in one line; empty where there is no source to read."""
    try:
        source = inspect.getsource(options)
    except OSError:
        return {}
    found = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in found if node.name == Options.__name__)
    return {
        key.target.id: " ".join(str(doc.value.value).split())
        for key, doc in itertools.pairwise(body)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


F = TypeVar("F", bound=Callable[..., Any])


def with_options(function: F) -> F:
    """Put every option, with its default and what `Options` says of it, into ``**options:``."""
    lines = (function.__doc__ or "").splitlines()
    start = next((n for n, line in enumerate(lines) if line.lstrip().startswith("**options:")), -1)
    if start < 0:
        return function
    margin = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while end < len(lines) and len(lines[end]) - len(lines[end].lstrip()) > margin:
        end += 1
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    listed = [
        textwrap.fill(
            f"{name}: (default {defaults[name]!r}) {doc}",
            width=100,
            initial_indent=" " * (margin + 4),
            subsequent_indent=" " * (margin + 8),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, doc in option_docs().items()
    ]
    function.__doc__ = "\n".join([*lines[:end], *listed, *lines[end:]])
    return function
