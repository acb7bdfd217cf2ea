"""Joint graph -> outer schedule and compute regions.

The outer schedule is one FX graph per phase whose operators are the ``fxshard::`` ones and calls
of regions. A region is a run of compute operators between two of them, of one unit; equal runs
(identical layers) share one region, stored once.
"""

from __future__ import annotations

import collections
import dataclasses
import operator

from torch import fx

from fxshard.ir import tags
from fxshard.ir.compiled import Compiled
from fxshard.ir.names import is_under


@dataclasses.dataclass(frozen=True)
class Region:
    """A run of compute operators, shared by all calls that are equal to it.

    Attributes:
        name: ``region_<k>``, in order of first call.
        graph: placeholders in order of first use; the output is a tuple. Module names are
            relative to the calling row's module (see `relative`).
        digest: SHA-256 of operators, arguments and metadata; equal runs have equal digests.
        compiled: the code that runs in place of the operators, if there is some.
    """

    name: str
    graph: fx.Graph
    digest: str
    compiled: Compiled | None = None

    @property
    def body(self) -> list[fx.Node]:
        """The operators in execution order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The two-level form of a Program.

    Attributes:
        forward: outer graph; placeholders are shards, buffers and inputs; returns
            ``(outputs, saved)``.
        backward: outer graph; placeholders are what it reads of shards, buffers, inputs, saved
            values, and tangents; returns the gradients. None for inference.
        regions: by name.
    """

    forward: fx.Graph
    backward: fx.Graph | None
    regions: dict[str, Region]

    def phases(self) -> list[tuple[tags.Phase, fx.Graph]]:
        """The outer graphs in execution order."""
        both: list[tuple[tags.Phase, fx.Graph | None]] = [
            ("forward", self.forward),
            ("backward", self.backward),
        ]
        return [(phase, graph) for phase, graph in both if graph is not None]


def relative(module: str, base: str) -> str:
    """`module` seen from `base`: "." is base itself, ".x" inside it; others stay absolute."""
    if not is_under(module, base):
        return module
    return "." + module[len(base) :].removeprefix(".")


@dataclasses.dataclass(frozen=True)
class Point:
    """A place between two operations of a phase, where bytes are counted and compared.

    Attributes:
        row: the row of the outer schedule.
        node: the operator inside the row's region, or None: the row itself is done. In a compiled
            region, a step of its code: the row.
        origin: the node of the joint graph that `node` stands for in this call of the region; the
            row, if there is none.
    """

    row: fx.Node
    node: fx.Node | None
    origin: fx.Node

    @property
    def module(self) -> str:
        """FQN of the module that ran last."""
        return tags.get(self.origin).module


def points(schedule: Schedule, graph: fx.Graph) -> list[Point]:
    """The points of a phase in execution order: after each operator and after each row.

    The getitems of a row are part of it.
    """
    found: list[Point] = []
    for row in graph.nodes:
        if row.op == "call_module":
            found += _inner_points(schedule.regions[str(row.target)], row)
        elif row.op != "call_function" or row.target is operator.getitem:
            continue
        found.append(Point(row, None, row))
    return found


def _inner_points(region: Region, row: fx.Node) -> list[Point]:
    """After each operator, or each step of the code in place of them but the last, its return."""
    if region.compiled is not None:
        return [Point(row, row, row) for _ in region.compiled.steps[:-1]]
    return [Point(row, *pair) for pair in zip(region.body, row.meta["run"], strict=True)]


def last_reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Per node, the values that nothing reads after it (itself, if nothing reads it at all)."""
    dead: dict[fx.Node, list[fx.Node]] = collections.defaultdict(list)
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        inputs = node.all_input_nodes
        last = [source for source in inputs if source not in seen]
        if last:
            dead[node] += last
            seen.update(last)
        if node.op != "placeholder" and not node.users:
            dead[node].append(node)
    return dead
