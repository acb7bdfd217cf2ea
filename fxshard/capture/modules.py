"""The tensors that modules hold as parameters and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def slots(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Each place in which a module of `model` holds one: the dict, the key, the tensor."""
    for module in model.modules():
        for tensors in _dicts(module):
            yield from [(tensors, key, t) for key, t in tensors.items() if t is not None]


@contextlib.contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Give `module` and all below it their tensors again: an initialisation may reach down."""
    before = [(tensors, dict(tensors)) for each in module.modules() for tensors in _dicts(each)]
    try:
        yield
    finally:
        for tensors, kept in before:
            tensors.clear()
            tensors.update(kept)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor, of those that `module` itself holds."""
    return {k: t for tensors in _dicts(module) for k, t in tensors.items() if t is not None}


def _dicts(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def join(path: str, name: str) -> str:
    """The FQN of what the module at `path` calls `name`."""
    return f"{path}.{name}" if path else name


# What wrappers of torch put into names: checkpoint_wrapper, torch.compile, FSDP1.
CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
WRAPPERS = (CHECKPOINT_WRAPPED, "_orig_mod", "_fsdp_wrapped_module")


def without_wrappers(fqn: str) -> str:
    """The FQN that a module or parameter would have if nothing were wrapped."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)
