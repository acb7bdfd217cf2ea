"""A module's own tensors, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Give `module` and all below it their tensors again: an initialisation may reach down."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (slots, dict(slots))
        for below in module.modules()
        for slots in (below._parameters, below._buffers)
    ]
    try:
        yield
    finally:
        for slots, tensors in before:
            slots.clear()
            slots.update(tensors)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    both: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
