"""What forward has read of the caller's, and backward reads again: it must be as it was."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fxshard._torch import autograd
from fxshard.runtime.sharding import Slot


@dataclasses.dataclass(frozen=True)
class ReadTensor:
    """A parameter, buffer or input that forward has read.

    Backward reads this tensor, as autograd would, whatever has taken its place in the model since.

    Attributes:
        key: its role and FQN.
        what: its name in messages.
        tensor: of which `version` tells how often it had been written in place.
        slot: of a sharded parameter, whose rows backward reads.
        rows: of a sharded parameter, how often they had been moved, and written in place: what
            operates on a DTensor does not count as that.
    """

    key: tuple[str, str]
    what: str
    tensor: Tensor
    version: int
    slot: Slot | None
    rows: tuple[int, int]

    @classmethod
    def noted(
        cls, key: tuple[str, str], what: str, tensor: Tensor, slot: Slot | None
    ) -> ReadTensor:
        """As it is now."""
        return cls(key, what, tensor, autograd.version(tensor), slot, _rows_of(slot))

    def has_changed(self) -> bool:
        """True if it was written in place since, or moved to other memory."""
        with autograd.plain_torch_functions():  # to ask a parameter for its version is no use of it
            now = autograd.version(self.tensor), _rows_of(self.slot)
        return now != (self.version, self.rows)


def _rows_of(slot: Slot | None) -> tuple[int, int]:
    return (0, 0) if slot is None else (slot.moves, autograd.version(slot.sent(0)))
