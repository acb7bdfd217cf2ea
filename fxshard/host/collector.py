"""Python's garbage collector stands still where many objects are made that stay.

It would walk all of them again each time that some were made: the nodes of a large graph, the
modules of torch while they are imported. With it, time grows faster than the graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

SWEEP = 2_000_000  # objects made old since the last full collection, before there may be another

_kept = 0
_limit = SWEEP  # as many as there were after the last: a collection takes as long as there are


@contextlib.contextmanager
def paused(*, sweep: bool = False) -> Iterator[None]:
    """No collection inside; a decorator too.

    What was made inside is old afterwards: else it would be walked at the next collection of each
    generation, three times in all, which takes as long as a pass over the graph each time.

    Args:
        sweep: where earlier work may have been dropped: a full collection first, if so much has
            been made old that some may be garbage. The collector itself does not count that.
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
