"""Joint graph -> outer schedule and compute regions.

The outer schedule is one FX graph per phase whose operators are the ``fxshard::`` ones and calls
of regions. A region is a run of compute operators between two of them, of one unit; equal runs
(identical layers) share one region, stored once.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import operator
from typing import Any

from torch import fx

from fxshard import meta, shapes
from fxshard.program import Program
from fxshard.regions import Compiled, stays_apart
from fxshard.units import is_under

COMPUTE: tuple[meta.Role, ...] = ("compute", "pad", "settle")


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

    def phases(self) -> list[tuple[meta.Phase, fx.Graph]]:
        """The outer graphs in execution order."""
        both: list[tuple[meta.Phase, fx.Graph | None]] = [
            ("forward", self.forward),
            ("backward", self.backward),
        ]
        return [(phase, graph) for phase, graph in both if graph is not None]


def relative(module: str, base: str) -> str:
    """`module` seen from `base`: "." is base itself, ".x" inside it; others stay absolute."""
    if not is_under(module, base):
        return module
    return "." + module[len(base) :].removeprefix(".")


def saved_values(program: Program) -> list[fx.Node]:
    """Forward operators whose value backward reads, in order of production."""
    return [
        node
        for node in program.phase("forward")
        if any(u.op != "output" and meta.get(u).phase == "backward" for u in node.users)
    ]


def build(program: Program) -> Schedule:
    """Outline the joint graph. The graph itself is left as it is."""
    regions: dict[str, Region] = {}  # by digest
    saved = saved_values(program)
    values = program.values
    outputs = [v for v, r in zip(values, program.results, strict=True) if r.kind == "output"]
    grads = [v for v, r in zip(values, program.results, strict=True) if r.kind != "output"]
    forward = _outer(program, "forward", [], (tuple(outputs), tuple(saved)), regions)
    backward = None
    if program.signature.training:
        backward = _outer(program, "backward", saved, tuple(grads), regions)
    return Schedule(forward, backward, {region.name: region for region in regions.values()})


def _outer(
    program: Program,
    phase: meta.Phase,
    saved: list[fx.Node],
    results: Any,
    regions: dict[str, Region],
) -> fx.Graph:
    nodes = program.phase(phase)
    outer = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    read = {n for node in nodes for n in node.all_input_nodes}
    fx.node.map_arg(results, read.add)
    for node in program.graph.find_nodes(op="placeholder"):
        if node in read or (phase == "backward" and meta.get(node).role == "tangent"):
            env[node] = _copied(outer.placeholder(node.name), node)
    for node in saved:
        env[node] = _copied(outer.placeholder(node.name), node)
    run: list[fx.Node] = []
    for node in nodes:
        tag = meta.get(node)
        if run and (
            tag.role not in COMPUTE
            or tag.unit != meta.get(run[-1]).unit
            or (program.compiled and stays_apart(node) != stays_apart(run[-1]))
        ):
            _call_region(program, outer, env, run, regions)
            run = []
        if tag.role in COMPUTE:
            run.append(node)
        else:
            env[node] = _copied(outer.node_copy(node, env.__getitem__), node)
    if run:
        _call_region(program, outer, env, run, regions)
    output = outer.output(fx.node.map_arg(results, env.__getitem__))
    meta.put(output, meta.Meta(phase, "output"))
    return outer


def _copied(copy: fx.Node, node: fx.Node) -> fx.Node:
    copy.meta = dict(node.meta)
    return copy


def _call_region(
    program: Program,
    outer: fx.Graph,
    env: dict[fx.Node, fx.Node],
    run: list[fx.Node],
    regions: dict[str, Region],
) -> None:
    """Append a call of the region equal to `run`, made if there is none yet."""
    inside = set(run)
    unit = program.units[meta.get(run[0]).unit or 0]
    inputs = list(dict.fromkeys(n for node in run for n in node.all_input_nodes if n not in inside))
    outputs = [node for node in run if any(user not in inside for user in node.users)]
    text = describe(run, inputs, outputs, unit.fqn)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest not in regions:
        name = f"region_{len(regions)}"
        regions[digest] = _make_region(name, run, inputs, outputs, unit.fqn, digest)
    region = regions[digest]
    given, name = tuple(env[n] for n in inputs), _next_name(region.name, outer)
    call = outer.create_node("call_module", region.name, given, name=name)
    tag = meta.Meta(meta.get(run[0]).phase, "compute", module=unit.fqn, unit=unit.index)
    meta.put(call, tag, tuple(n.meta["val"] for n in outputs))
    call.meta["run"] = tuple(run)  # where the operators of the region come from, in this call
    for i, node in enumerate(outputs):
        pick = outer.create_node("call_function", operator.getitem, (call, i), name=node.name)
        env[node] = meta.put(pick, meta.changed(tag, module=meta.get(node).module))
        pick.meta["val"] = node.meta["val"]


def _next_name(region: str, outer: fx.Graph) -> str:
    """The name of a call of ``region_<k>``: that, or the number behind that of the last call.

    Left to choose, FX of torch 2.11 takes other numbers than later ones (torch/fx/graph.py,
    ``create_name``), and the text of a plan would depend on it.
    """
    last = next((node.name for node in reversed(outer.nodes) if node.op == "call_module"), None)
    if last is None:
        return region
    number, before = (int(name.removeprefix("region_")) for name in (region, last))
    return f"region_{max(number, before + 1)}"


def _make_region(
    name: str,
    run: list[fx.Node],
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    base: str,
    digest: str,
) -> Region:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        env[node] = _copied(graph.placeholder(f"a{i}"), node)
    for node in run:
        env[node] = _copied(graph.node_copy(node, env.__getitem__), node)
        meta.update(env[node], module=relative(meta.get(node).module, base))
    graph.output(tuple(env[node] for node in outputs))
    return Region(name, graph, digest)


def describe(run: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node], base: str) -> str:
    """A text that is equal for two runs exactly when one region can stand for both.

    It has the operators with arguments by position; shape, stride, dtype, device and aliases of
    what comes in; which values leave; and the module of each operator relative to `base`. Where
    sizes are open it has their symbols: equal numbers of the example call say nothing, and a size
    that depends on the data has a symbol of its own in each run.
    """
    number = {node: i for i, node in enumerate([*inputs, *run])}

    def local(node: fx.Node) -> str:
        return f"%{number[node]}"

    aliases: dict[int, int] = {}  # storage -> its number: inputs that share one stay apart
    lines = [
        f"{_metadata(n)} {[aliases.setdefault(s, len(aliases)) for s in meta.storage_ids(n)]}"
        for n in inputs
    ]
    for node in run:
        args = fx.node.map_arg(node.args, lambda n: _Local(local(n)))
        kwargs = fx.node.map_arg(node.kwargs, lambda n: _Local(local(n)))
        module = relative(meta.get(node).module, base)
        lines.append(f"{node.target} {args} {kwargs} {meta.get(node).role} {module}{_open(node)}")
    lines.append(" ".join(local(node) for node in outputs))
    return "\n".join(lines)


class _Local(str):
    """A value by its position in a run; prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _metadata(node: fx.Node) -> str:
    return " ".join(
        f"{tuple(t.shape)}:{t.stride()}:{t.storage_offset()}:{t.dtype}:{t.device}"
        for t in meta.tensors(node.meta["val"])
    ) + _open(node)


def _open(node: fx.Node) -> str:
    """Sizes and strides in symbols; nothing if `node` has none."""
    layout = node.meta.get(shapes.LAYOUT)
    return f" {layout}" if layout else ""


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
        return meta.get(self.origin).module


def points(schedule: Schedule, graph: fx.Graph) -> list[Point]:
    """The points of a phase in execution order: behind each operator and behind each row.

    Picks of results are part of the row that made them.
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
    """Behind each operator, or each step of the code in place of them but the last, its return."""
    if region.compiled is not None:
        return [Point(row, row, row) for _ in region.compiled.steps[:-1]]
    return [Point(row, *pair) for pair in zip(region.body, row.meta["run"], strict=True)]


def last_reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Per node, the values that nobody reads after it (itself, if nobody reads it at all)."""
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
