"""The reports of a model that runs as several graphs, and their sum."""

from __future__ import annotations

import dataclasses

from fxshard.memory.report import MemoryReport


@dataclasses.dataclass(frozen=True)
class GraphReports:
    """One report per graph that Dynamo has captured, in the order in which they first ran.

    Attributes:
        graphs: the reports. A graph that was captured for several layers, sizes or modes has one
            for each.
    """

    graphs: tuple[MemoryReport, ...]
