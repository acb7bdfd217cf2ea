"""Categories of memory and states of a module, under the names of torch's FSDPMemTracker."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np


class Category(enum.Enum):
    """What a storage is held for (torch/distributed/_tools/fsdp2_mem_tracker.py)."""

    SHARDED_PARAM = "Sharded Param"
    UNSHARDED_PARAM = "Unsharded Param"
    BUFFER = "Buffer"
    SHARDED_GRAD = "Sharded Grad"
    UNSHARDED_GRAD = "Unsharded Grad"
    ACTIVATION = "Activation"
    TEMP = "Temp"
    ALL_GATHER = "All Gather"
    REDUCE_SCATTER = "Reduce Scatter"
    OPT_STATE = "OptState"
    INPUTS = "Inputs"
    COMMUNICATION = "Communication Buffer"  # ours: of the model's own collectives, until the wait

    column: int  # its place in `CATEGORIES`: a dictionary of an Enum hashes in Python


CATEGORIES = tuple(Category)
for _column, _category in enumerate(CATEGORIES):
    _category.column = _column

# From the launch of a gather to its free, and what is sent to be reduced.
SENT = (Category.ALL_GATHER, Category.UNSHARDED_PARAM, Category.REDUCE_SCATTER)


class State(enum.Enum):
    """Moments in the life of a module in a step, and its two peaks.

    Pre- and Post-Forward AC: around what its activation checkpoint recomputes in backward.
    """

    BEFORE_PRE_FORWARD = "Before Pre-Forward"
    AFTER_PRE_FORWARD = "After Pre-Forward"
    BEFORE_POST_FORWARD = "Before Post-Forward"
    AFTER_POST_FORWARD = "After Post-Forward"
    PEAK_FORWARD = "Peak Forward"
    PRE_FORWARD_AC = "Pre-Forward AC"
    POST_FORWARD_AC = "Post-Forward AC"
    BEFORE_PRE_BACKWARD = "Before Pre-Backward"
    AFTER_PRE_BACKWARD = "After Pre-Backward"
    BEFORE_POST_BACKWARD = "Before Post-Backward"
    AFTER_POST_BACKWARD = "After Post-Backward"
    PEAK_BACKWARD = "Peak Backward"


Matrix = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass
class Curve:
    """Bytes of one phase in one memory: rows of categories, in the order of `CATEGORIES`.

    Attributes:
        start: alive when the phase begins.
        after: ``[points, categories]``, alive after each point.
        during: ``[points, categories]``, the most alive between that point and the one before.
    """

    start: list[int]
    after: Matrix
    during: Matrix

    @property
    def peak_bytes(self) -> int:
        """The most alive at once."""
        return max(sum(self.start), int(self.during.sum(1).max(initial=0)))

    @property
    def end_bytes(self) -> int:
        """Alive when the phase is over."""
        return int(self.after[-1].sum()) if len(self.after) else sum(self.start)

    @classmethod
    def nothing(cls, points: int) -> Curve:
        """No byte at any of so many points."""
        zeros = np.zeros((points, len(CATEGORIES)), dtype=np.int64)
        return cls([0] * len(CATEGORIES), zeros, zeros)
