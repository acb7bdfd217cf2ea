"""A phase outside of the step, and how its ledger is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from fxshard.memory.category import CATEGORIES, Category
from fxshard.memory.ledger import BEFORE, HALF, Ledger, LiveRange, Moment
from fxshard.memory.recording import OperatorEvent


@dataclasses.dataclass(frozen=True)
class LifecyclePhase:
    """One phase outside of the step, on rank 0.

    Attributes:
        name: what runs, for example "init" or "save_checkpoint".
        ledger: what is alive in it, and when.
        unknown: what else takes memory that cannot be known ahead, as ``(what, why)``; in no
            figure.
    """

    name: str
    ledger: Ledger
    unknown: tuple[tuple[str, str], ...] = ()

    @property
    def start_bytes(self) -> int:
        """Alive on the device when it begins."""
        return int(self.ledger.totals[0])

    @property
    def peak_bytes(self) -> int:
        """The most alive at once on the device."""
        return int(self.ledger.totals.max())

    @property
    def end_bytes(self) -> int:
        """Alive on the device when it is over."""
        return int(self.ledger.totals[-1])

    @property
    def peak_tick(self) -> int:
        """Where the device's peak is, or the host's if the device holds nothing."""
        totals = self.ledger.totals if self.peak_bytes else self.ledger.host_totals
        return int(totals.argmax())

    @property
    def host_peak_bytes(self) -> int:
        """The most alive at once on the CPU while the program computes elsewhere."""
        return int(self.ledger.host_totals.max())

    @property
    def host_end_bytes(self) -> int:
        """Alive there when it is over."""
        return int(self.ledger.host_totals[-1])

    @property
    def peak_node(self) -> str:
        """What runs there."""
        return self.ledger.moments[self.peak_tick // 2].node

    def alive_at_peak(self) -> list[LiveRange]:
        """Largest first; those on the device add up to `peak_bytes`."""
        alive = self.ledger.alive(self.peak_tick)
        return sorted(alive, key=lambda each: (-each.bytes, each.storage))

    def to_dict(self) -> dict[str, Any]:
        """Figures as plain values; bytes."""
        row = self.ledger.bytes[self.peak_tick, :HALF]
        return {
            "name": self.name,
            "start_bytes": self.start_bytes,
            "peak_bytes": self.peak_bytes,
            "end_bytes": self.end_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "host_end_bytes": self.host_end_bytes,
            "peak_node": self.peak_node,
            "peak_by_category": {
                c.value: int(v) for c, v in zip(CATEGORIES, row, strict=True) if v
            },
            "unknown": [{"what": what, "bytes": None, "why": why} for what, why in self.unknown],
        }


class Script:
    """Writes the ledger of a phase: one point per operator that allocates."""

    def __init__(self, name: str, held: Iterable[LiveRange] = ()) -> None:
        self.name = name
        self.ledger: Ledger = Ledger()
        self.ledger.begin(name, -1)
        for each in held:
            self.hold(each)

    def hold(self, made: LiveRange) -> LiveRange:
        """What is there from before."""
        made = made.copied()
        made.storage, made.born = len(self.ledger.ranges), BEFORE
        self.ledger.ranges.append(made)
        return made

    def run(self, node: str, *made: LiveRange, op: str = "", module: str = "") -> None:
        """A point: an operator has made those."""
        tick = 2 * self.ledger.add([Moment(node, op, module)])
        for each in made:
            each.storage, each.born = len(self.ledger.ranges), tick
            self.ledger.ranges.append(each)

    def make(
        self,
        node: str,
        name: str,
        category: Category,
        size: int,
        *,
        op: str = "",
        module: str = "",
        host: bool = False,
    ) -> LiveRange:
        """A point: an operator has made one storage."""
        made = LiveRange(0, name, op, module, category, size, host)
        self.run(node, made, op=op, module=module)
        return made

    def drop(self, *ranges: LiveRange) -> None:
        """They are gone after the last operator."""
        for each in ranges:
            each.died = 2 * len(self.ledger.moments) - 1

    def replay(
        self,
        events: Iterable[OperatorEvent],
        made_by: Callable[[str, int, int], LiveRange],
        ranges: dict[int, LiveRange],
        module: str,
    ) -> None:
        """What recorded operators allocate and free.

        Args:
            events: in order.
            made_by: from operator, number and bytes of a storage to its range.
            ranges: what is alive, by number; it is kept up to date.
            module: in which they run.
        """
        for event in events:
            made = {number: made_by(event.op, number, size) for number, size in event.allocated}
            ranges |= made
            self.run(event.op, *made.values(), op=event.op, module=module)
            self.drop(*(ranges.pop(number) for number in event.freed if number in ranges))

    def done(self, *unknown: tuple[str, str]) -> LifecyclePhase:
        """The phase."""
        self.run(f"{self.name} returned")
        return LifecyclePhase(self.name, self.ledger, unknown)
