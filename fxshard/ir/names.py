"""FQNs: what they are inside of, and which of them a pattern means."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import nn

from fxshard.errors import UnitError


def owner_of(fqns: Sequence[str], candidates: Container[str]) -> str:
    """The longest of `candidates` that is an ancestor of (or equal to) every one of `fqns`.

    "" if there is none. Looks at the ancestors of the first, not at all candidates.
    """
    ancestor, *rest = fqns
    while ancestor:
        if ancestor in candidates and all(is_under(fqn, ancestor) for fqn in rest):
            break
        ancestor = ancestor.rpartition(".")[0]
    return ancestor


def unit_of(fqns: Sequence[str], index: Mapping[str, int]) -> int:
    """The innermost unit that holds all of `fqns`, of modules or tensors.

    Args:
        index: see `index_of`.
    """
    each = {index[owner_of([fqn], index)] for fqn in fqns}
    return each.pop() if len(each) == 1 else index[owner_of(fqns, index)]


def is_under(fqn: str, ancestor: str) -> bool:
    """True if `fqn` is `ancestor` or inside it ("" contains everything)."""
    return not ancestor or fqn == ancestor or fqn.startswith(ancestor + ".")


def matches(pattern: str, fqn: str) -> bool:
    """True if an FQN is one of a pattern: ``*`` stands for one name, ``**`` for any number."""
    return _glob(pattern.split("."), fqn.split("."))


def _glob(pattern: list[str], names: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_glob(pattern[1:], names[i:]) for i in range(len(names) + 1))
    return (
        bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and _glob(pattern[1:], names[1:])
    )


def modules_matching(model: nn.Module, item: Any) -> set[str]:
    if isinstance(item, type) and issubclass(item, nn.Module):
        found = {name for name, module in model.named_modules() if isinstance(module, item)}
        what = f"class {item.__name__}"
    elif isinstance(item, str):
        found = {n for n, _ in model.named_modules() if n and matches(item, n)}
        what = f"pattern {item!r}"
    else:
        raise UnitError(f"units holds {item!r}: expected a module class or an FQN glob.")
    if not found:
        some = ", ".join(name for name, _ in list(model.named_modules())[1:9])
        raise UnitError(
            f"units: {what} matches no module of {type(model).__name__}. "
            f"Its modules begin: {some}. ('*' matches one name, '**' any number.)"
        )
    return found
