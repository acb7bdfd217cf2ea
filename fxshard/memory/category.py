"""Categories of memory and states of a module, under the names of torch's FSDPMemTracker."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np

# Headings of tables too narrow for each category: what is added up, one group after the other.
REST = "rest"
PARAMS = "Params\n+ All\nGather"
GRADS = "Grads\n+ Red.\nScat."
SHARDS = "Shards"
VALUES = "Act.\n+ Temp"
OTHER = "other"  # all that is left
GROUPS = (REST, PARAMS, GRADS, SHARDS, VALUES, OTHER)


class Category(enum.Enum):
    """What a storage is held for (torch/distributed/_tools/fsdp2_mem_tracker.py).

    Attributes:
        heading: of tables, at most seven letters per line.
        group: with which it is added up where there is no room, one of `GROUPS`.
        color: of charts.
        layer: its place in charts: from what lies still, at the bottom, to what comes and goes.
        column: its place in `CATEGORIES`: a dictionary of an Enum hashes in Python.
    """

    SHARDED_PARAM = "Sharded Param", "Shar-\nded\nParam", SHARDS, "#2b4c7e", 0
    UNSHARDED_PARAM = "Unsharded Param", "Un-\nshard.\nParam", PARAMS, "#4f8fd6", 6
    BUFFER = "Buffer", "Buffer", REST, "#9aa5b4", 2
    SHARDED_GRAD = "Sharded Grad", "Shar-\nded\nGrad", SHARDS, "#b4581a", 4
    UNSHARDED_GRAD = "Unsharded Grad", "Un-\nshard.\nGrad", GRADS, "#ef9a4d", 8
    ACTIVATION = "Activation", "Acti-\nvation", VALUES, "#3aa57e", 5
    TEMP = "Temp", "Temp", VALUES, "#e0607e", 11
    ALL_GATHER = "All Gather", "All\nGather", PARAMS, "#a9cdf5", 7
    REDUCE_SCATTER = "Reduce Scatter", "Reduce\nScat-\nter", GRADS, "#f6d08b", 9
    OPT_STATE = "OptState", "Opt\nState", REST, "#7b61b8", 1
    INPUTS = "Inputs", "Inputs", REST, "#c9d0da", 3
    # ours: of the model's own collectives, until the wait
    COMMUNICATION = "Communication Buffer", "Comm.\nBuffer", VALUES, "#8fcfb5", 10

    _value_: str
    heading: str
    group: str
    color: str
    layer: int
    column: int

    def __new__(cls, name: str, heading: str, group: str, color: str, layer: int) -> Category:
        made = object.__new__(cls)
        made._value_ = name
        made.heading, made.group, made.color, made.layer = heading, group, color, layer
        made.column = len(cls.__members__)
        return made


CATEGORIES = tuple(Category)

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
