"""Calls of modules in a forward."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one module in a forward.

    Attributes:
        module: its FQN.
        number: 0 for its first call in this forward.
        parent: index of the call that it ran inside of; None for the root's.
    """

    module: str
    number: int
    parent: int | None
