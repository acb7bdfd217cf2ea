"""Storages that are alive, and rows of a memory table, in terms that both sides know."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from fxshard.memory.category import CATEGORIES


@dataclasses.dataclass(frozen=True)
class Thing:
    """A storage that is alive, on either side, in terms that both sides know.

    Attributes:
        kind: "shard", "flat" (FSDP2's all-gather buffer, in flight), "kept flat" (the same after
            its copy-out), "flight" (ours: gathered into, not waited for), "cast shard", "copy" (an
            unsharded parameter), "gradient" (unsharded), "held" (a gradient that only the tracker
            refers to), "sent" (a copy that goes into the reduction), "reduced" (sharded gradient),
            "values" (activations and temporaries), or the category of what both hold throughout.
        unit: FQN of its unit.
        bytes: its size.
        category: the tracker's name of it.
        number: on FSDP2's side the same storage has the same number in all rows.
        saved: (FSDP2) autograd has saved it for backward.
        fresh: (ours) it was made since the unit in question began its backward.
    """

    kind: str
    unit: str
    bytes: int
    category: str
    number: int = -1
    saved: bool = False
    fresh: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """What is alive when a unit is in a state.

    Attributes:
        things: every storage.
        at: at a peak, the operator that runs, and the unit that it runs in.
        elsewhere: (ours) the cause by which the state is at another moment than FSDP2's, or "".
        unread: (ours) of units that are gathered or in flight, the bytes of parameters that are
            not.
        freed: (ours) units whose gathered parameters have been freed in this phase.
    """

    things: tuple[Thing, ...]
    at: tuple[str, str] = ("", "")
    elsewhere: str = ""
    unread: Mapping[str, int] = dataclasses.field(default_factory=dict)
    freed: frozenset[str] = frozenset()

    def figures(self) -> dict[str, int]:
        """Bytes per category, without zeros."""
        found: collections.Counter[str] = collections.Counter()
        for thing in self.things:
            found[thing.category] += thing.bytes
        return {c.value: found[c.value] for c in CATEGORIES if found[c.value]}

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(thing.bytes for thing in self.things)


Rows = dict[tuple[str, str], Row]  # (FQN of the unit, state) -> what is alive


def unit_of(fqn: str, units: Iterable[str]) -> str:
    """The innermost unit that a module lies in; "" is the root."""
    inside = (u for u in units if u and (fqn == u or fqn.startswith(u + ".")))
    return max(inside, key=len, default="")
