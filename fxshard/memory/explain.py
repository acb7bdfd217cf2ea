"""What is alive at the peak, and what each what-if would save."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from fxshard.bytesize import size_text
from fxshard.capture.provenance import line_text
from fxshard.memory.category import Category
from fxshard.memory.ledger import Ledger, LiveRange


@dataclasses.dataclass(frozen=True)
class Alive:
    """One storage that is alive at the peak.

    Attributes:
        name: parameter or buffer FQN, input, or the node that made it.
        op: operator that made it; "" for what was there before the step.
        module: FQN of the module that owns it ("" is the root).
        category: see `Category`.
        bytes: its size.
        line: line of user code that made it, ``path:line in function``, or "".
        born, died: ``(phase, node)`` that made it and after which it is gone; None for what is
            there before the step, or outlives it.
        stream: where the operator runs that made it.
    """

    name: str
    op: str
    module: str
    category: Category
    bytes: int
    line: str
    born: tuple[str, str] | None
    died: tuple[str, str] | None
    stream: str


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """One change of the step, and what it would save.

    Attributes:
        name: what it is.
        changes: arguments of `Plan.replan` that make it.
        peak_bytes: of the plan with it; None if it cannot be made.
        saves_bytes: the peak now less `peak_bytes`; negative if it costs memory.
        why_not: why it cannot be made.
    """

    name: str
    changes: dict[str, Any]
    peak_bytes: int | None
    saves_bytes: int | None
    why_not: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The peak of the steady step, explained; ``str()`` of it is the text.

    Attributes:
        where: phase, node, module and line of the peak, as a clause.
        peak_bytes: the peak.
        alive: everything alive there, largest first; the bytes add up to `peak_bytes`.
        what_ifs: what could be changed, best first; empty if they were not asked for.
        top: how many of `alive` the text shows one by one.
    """

    where: str
    peak_bytes: int
    alive: tuple[Alive, ...]
    what_ifs: tuple[WhatIf, ...] = ()
    top: int = 20

    def __str__(self) -> str:
        peak = f"{size_text(self.peak_bytes)} ({self.peak_bytes:,} bytes)"
        lines = [f"Peak {peak} in {self.where}; alive:"]
        for each in self.alive[: self.top]:
            lines += _lines(each)
        rest = self.alive[self.top :]
        if rest:
            left = sum(each.bytes for each in rest)
            lines.append(f"  {size_text(left):>12}  {len(rest):,} more, each smaller")
        if self.what_ifs:
            lines += ["", "What would change it (each figure is that of a plan made so):"]
            lines += [f"  {what_if_text(each)}" for each in self.what_ifs]
        return "\n".join(lines)


def alive_things(alive: Iterable[LiveRange], ledger: Ledger) -> tuple[Alive, ...]:
    """Live ranges of a ledger for people."""

    def place_of(tick: int) -> tuple[str, str]:
        moment = ledger.moments[min(tick // 2, len(ledger.moments) - 1)]
        return ledger.at(tick)[0].name, moment.node

    return tuple(
        Alive(
            *(each.name, each.op, each.module, each.category, each.bytes, each.line),
            born=None if each.born < 0 else place_of(each.born),
            died=None if each.died is None else place_of(each.died),
            stream=each.stream,
        )
        for each in alive
    )


def _lines(each: Alive) -> list[str]:
    of = f" of {each.module}" if each.module and each.module not in each.name else ""
    op = f", by {each.op}" if each.op and each.op not in each.name else ""
    first = f"  {size_text(each.bytes):>12}  {each.category.value}: {each.name}{of}{op}"
    if each.born is None and each.died is None:
        return [f"{first}, throughout"]
    since = "before the step" if each.born is None else " ".join(each.born)
    until = "after the step" if each.died is None else " ".join(each.died)
    stream = f", on stream {each.stream}" if each.stream != "compute" else ""
    code = [f"{'':16}{line_text(each.line)}"] if each.line else []
    return [first, f"{'':16}from {since} until {until}{stream}", *code]


def what_if_text(each: WhatIf) -> str:
    """A what-if on one line."""
    if each.saves_bytes is None or each.peak_bytes is None:
        return f"{'-':>12}  {each.name}: {each.why_not}"
    word = "saves" if each.saves_bytes >= 0 else "costs"
    size = size_text(abs(each.saves_bytes))
    return f"{size:>12}  {word}: {each.name} (peak {size_text(each.peak_bytes)})"
