"""Pauses Python's garbage collector while many objects are made that stay.

The collector would walk all of them again and again: the nodes of a large graph, the modules of
torch during import. Without a pause, time grows faster than the graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

SWEEP = 2_000_000  # new objects in the oldest generation before another full collection

_kept = 0
_limit = SWEEP  # or the number of objects at the last one, as its time grows with that number


@contextlib.contextmanager
def off() -> Iterator[None]:
    """No collections in the block: what lies in cycles lives on. Nothing is done about it after."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def paused(*, sweep: bool = False) -> Iterator[None]:
    """Pause collections in the block; also a decorator.

    New objects of the block are moved to the oldest generation at the end. Otherwise the next
    collection of each generation would walk them, each as slow as a pass over the graph.

    Args:
        sweep: run a full collection first if `SWEEP` objects were moved so since the last one: some
            may be garbage, and the collector does not count them.
    """
    global _kept, _limit
    enabled = gc.isenabled()
    if sweep and enabled and _kept > _limit:
        gc.collect()
        _kept, _limit = 0, max(SWEEP, len(gc.get_objects()))
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _kept += gc.get_count()[0]
            if not gc.get_freeze_count():  # the user's own frozen objects stay frozen
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
