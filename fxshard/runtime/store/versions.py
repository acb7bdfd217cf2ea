"""What a parameter's shards are, and how often they were written: is what was made of them old?"""

from __future__ import annotations

import dataclasses
import weakref

from torch import Tensor

from fxshard._torch import autograd
from fxshard.runtime.sharding import Slot

State = list[tuple[weakref.ref[Tensor], int]]  # see `state_of`


@dataclasses.dataclass(frozen=True)
class KeptParameter:
    """An unsharded parameter that a backward has left.

    Attributes:
        rows: with padding, per rank of this process.
        state: of its shards at that time (`state_of`).
    """

    rows: list[Tensor]
    state: State


def state_of(slot: Slot) -> State:
    """Of a parameter and its shards, which tensors they are and how often they were written."""
    tensors = (slot.tensor, *slot.shards)
    return [(weakref.ref(tensor), autograd.version(tensor)) for tensor in tensors]


def is_unchanged(slot: Slot, before: State) -> bool:
    """True if nothing was written into a parameter since, or put in its place."""
    now = (slot.tensor, *slot.shards)
    return len(now) == len(before) and all(
        known() is tensor and autograd.version(tensor) == version
        for tensor, (known, version) in zip(now, before, strict=True)
    )
