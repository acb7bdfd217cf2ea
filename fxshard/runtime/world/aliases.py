"""What a backend gets to send is given back when its work is over, whoever still refers to it.

A thread of gloo tells that a work is over, and drops the tensors of that work a moment later. What
the step frees in between would be alive a little longer than the program says, and one run would
differ from the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NOTHING = torch.empty(0)


class Aliases:
    """Tensors that works in flight have instead of those that the step has."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []

    def of(self, tensor: Tensor) -> Tensor:
        """What to give to a collective in place of `tensor`."""
        self._made.append(tensor.detach())
        return self._made[-1]

    def instead(self, tensor: Tensor) -> Tensor:
        """What the step has in place of `tensor`, which a collective has made and holds."""
        self._made.append(tensor)
        return tensor.detach()

    def drop(self) -> None:
        """Let none of them refer to memory any more: all works are over."""
        while self._made:
            self._made.pop().data = _NOTHING
