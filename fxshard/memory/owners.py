"""The bytes of a ledger per owner (a module, the loss, the optimizer), at any tick."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fxshard.memory.category import Matrix
from fxshard.memory.ledger import WIDTH, Ledger
from fxshard.memory.states import Where


def owned_rows(
    ledger: Ledger, ticks: Mapping[Where, int], shown: Callable[[str], str] = str
) -> dict[Where, Matrix]:
    """Per row of the table, int64 ``[WIDTH]``: what its module owns, as columns of `Ledger.bytes`.

    Args:
        ledger: the step.
        ticks: the tick of each row.
        shown: owner -> the module that its bytes are shown with; the identity, if each is shown.
    """
    events: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    names: dict[str, str] = {}
    for each, column in zip(ledger.ranges, ledger.columns, strict=True):
        if each.module not in names:
            names[each.module] = shown(each.module)
        mine = events[names[each.module]]
        mine.append((max(each.born, 0), column, each.bytes))
        if each.died is not None:
            mine.append((each.died, column, -each.bytes))
    curves = {owner: _curve(found) for owner, found in events.items()}
    nothing = np.zeros(WIDTH, dtype=np.int64)
    found = {}
    for where, tick in ticks.items():
        index = -1
        if where.module in curves:
            times, sums = curves[where.module]
            index = int(np.searchsorted(times, tick, side="right")) - 1
        found[where] = sums[index] if index >= 0 else nothing
    return found


def owners_at(ledger: Ledger, tick: int, shown: Callable[[str], str] = str) -> dict[str, int]:
    """Bytes on the device by owner, at one tick; they sum to ``ledger.totals[tick]``."""
    found: dict[str, int] = defaultdict(int)
    for each in ledger.alive(tick):
        if not each.host and each.bytes:
            found[shown(each.module)] += each.bytes
    return dict(found)


def nearest(modules: Iterable[str], others: Iterable[str] = ()) -> Callable[[str], str]:
    """Owner -> itself if it is among `modules` or `others`, else its nearest ancestor there."""
    known = {"", *modules, *others}

    def shown(owner: str) -> str:
        while owner not in known:
            owner = owner.rpartition(".")[0]
        return owner

    return shown


def _curve(events: list[tuple[int, int, int]]) -> tuple[Matrix, Matrix]:
    """Ticks, ascending, and int64 ``[events, WIDTH]``: what is owned from each of them on."""
    ticks, columns, sizes = np.array(sorted(events), dtype=np.int64).T
    change = np.zeros((len(ticks), WIDTH), dtype=np.int64)
    change[np.arange(len(ticks)), columns] = sizes
    return ticks, change.cumsum(0)
