"""Trees of containers, as torch.utils._pytree has them, with dataclasses opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._pytree import TreeSpec

__all__ = [
    "LEAF",
    "TreeSpec",
    "exchanged",
    "spec_of",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_iter",
    "tree_map_tensors",
    "tree_unflatten",
]


class _Record:
    """A dataclass instance as a container of a tree.

    pytree opens registered dataclasses only, and registering a user's class would change how all of
    torch treats it.
    """

    def __init__(self, value: Any) -> None:
        self.type = type(value)
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        self.fields = {name: _opened(getattr(value, name)) for name in names}


def _record_leaves(record: _Record) -> tuple[list[Any], Any]:
    return list(record.fields.values()), (record.type, tuple(record.fields))


def _record_leaves_with_path(record: _Record) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, context = _record_leaves(record)
    keys = [_pytree.GetAttrKey(name) for name in context[1]]
    return list(zip(keys, leaves, strict=True)), context


def _record_rebuilt(values: Any, context: Any) -> Any:
    """The dataclass itself, without running its ``__init__`` again."""
    made = object.__new__(context[0])
    for name, value in zip(context[1], values, strict=True):
        object.__setattr__(made, name, value)
    return made


_pytree.register_pytree_node(
    _Record, _record_leaves, _record_rebuilt, flatten_with_keys_fn=_record_leaves_with_path
)


def _is_record(leaf: Any) -> bool:
    return hasattr(type(leaf), "__dataclass_fields__")


def _opened(tree: Any) -> Any:
    """`tree` with every dataclass instance that pytree takes for a leaf as a `_Record`."""
    leaves, spec = _pytree.tree_flatten(tree)
    return tree_unflatten([_Record(x) if _is_record(x) else x for x in leaves], spec)


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of nested containers; dataclass instances are containers too."""
    leaves, spec = _pytree.tree_flatten(tree)
    if any(map(_is_record, leaves)):
        return _pytree.tree_flatten(_opened(tree))
    return leaves, spec


def tree_unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """The inverse of `tree_flatten`; torch's makes a plain tuple of a `torch.Size`."""
    if not _has_sizes(spec):
        return _pytree.tree_unflatten(leaves, spec)
    return _unflattened(iter(leaves), spec)


def _has_sizes(spec: TreeSpec) -> bool:
    return spec.type is torch.Size or any(map(_has_sizes, spec.children()))


def _unflattened(leaves: Iterator[Any], spec: TreeSpec) -> Any:
    if spec.is_leaf():
        return next(leaves)
    parts = [_unflattened(leaves, child) for child in spec.children()]
    if spec.type is torch.Size and all(isinstance(part, (int, torch.SymInt)) for part in parts):
        return torch.Size(parts)
    return _pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)


LEAF: TreeSpec = _pytree.tree_flatten(0)[1]


def spec_of(type_: Any, context: Any, children: list[TreeSpec]) -> TreeSpec:
    """The structure that `tree_flatten` gives of a container.

    (``treespec_loads`` of torch/utils/_pytree.py makes it of JSON, and imports what that names.)

    Raises:
        ValueError: pytree does not know such a container, or not in this process.
    """
    if not callable(type_) or type_ not in _pytree.SUPPORTED_NODES:
        raise ValueError(f"pytree does not know {type_!r}: import what registers it")
    return TreeSpec(type_, context, children)


def exchanged(tree: Any, others: dict[int, Any]) -> Any:
    """`tree` with leaves replaced by `others`, by their ``id``."""
    if not others:
        return tree
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([others.get(id(leaf), leaf) for leaf in leaves], spec)


def tree_flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    """As `tree_flatten`, each leaf with its path of keys."""
    return _pytree.tree_flatten_with_path(_opened(tree))


def tree_map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` with ``fn`` of every tensor in it; Dynamo can trace it."""
    return _pytree.tree_map_only(torch.Tensor, fn, tree)


tree_iter = _pytree.tree_iter
