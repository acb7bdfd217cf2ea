"""Python's garbage collector stands still where many objects are made that stay.

It would walk all of them again each time that some were made: the nodes of a large graph, the
modules of torch while they are imported. With it, time grows faster than the graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collection inside; a decorator too."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
