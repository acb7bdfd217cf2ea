"""Parameters of tensor parallelism while forward is traced: DTensors around the tensors traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fxshard.errors import CaptureError
from fxshard.ir.tensor_parallel import Placed


class Around:
    """The places of a model that hold such parameters.

    Args:
        model: before its parameters are exchanged for those that are traced.
        placed: by identity of a parameter.
    """

    def __init__(self, model: nn.Module, placed: Mapping[int, Placed]) -> None:
        self._places: list[tuple[nn.Module, dict[str, Placed]]] = []
        for module in model.modules() if placed else ():
            own = {k: placed[id(p)] for k, p in module._parameters.items() if id(p) in placed}
            if own:
                self._places.append((module, own))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For the time of the block these places give DTensors.

        Each is made where it is read first, so that the operators of its gradient come right after
        those of its reader's, and not at the end of backward.
        """
        made: dict[int, DTensor] = {}
        before = [module.__dict__["_parameters"] for module, _ in self._places]
        try:
            for module, placed in self._places:
                module.__dict__["_parameters"] = _HeldParameters(module._parameters, placed, made)
            yield
        finally:
            for (module, _), parameters in zip(self._places, before, strict=True):
                module.__dict__["_parameters"] = parameters


class _HeldParameters(dict[str, Any]):
    """What stands for the ``_parameters`` of a module."""

    def __init__(
        self, held: Mapping[str, Any], placed: Mapping[str, Placed], made: dict[int, DTensor]
    ) -> None:
        super().__init__(held)
        self._placed, self._made = placed, made
        self._set: dict[str, Any] = {}  # what forward has put here

    def __getitem__(self, key: str) -> Any:
        if key in self._set:
            return self._set[key]
        held = super().__getitem__(key)
        if key not in self._placed:
            return held
        if id(held) not in self._made:
            self._made[id(held)] = self._placed[key].around(held)
        return self._made[id(held)]

    def __setitem__(self, key: str, value: Any) -> None:
        """As forward does that computes with what this rank has, and puts the DTensor back."""
        super().__setitem__(key, value)
        self._set[key] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


def returned(name: str, value: Any) -> Placed | None:
    """Where a DTensor is that a model returns; None of anything else.

    Raises:
        CaptureError: ranks have sums of it that are not added up.
    """
    if not isinstance(value, DTensor):
        return None
    if any(place.is_partial() for place in value.placements):
        raise CaptureError(
            f"output {name} is a DTensor of placements {tuple(value.placements)}: what ranks have "
            f"of it is not added up yet. Redistribute it in forward (to Replicate() or Shard(dim))."
        )
    shape, stride = tuple(value.shape), value.stride()
    return Placed(value.device_mesh, tuple(value.placements), shape, stride)


def local(value: Any) -> Any:
    """What this rank has of a DTensor, with its history; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value
