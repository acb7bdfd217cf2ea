"""From the joint graph to its schedule: runs of compute operators become regions."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from fxshard.ir import tags
from fxshard.ir.compiled import stays_apart
from fxshard.ir.domain import LAYOUT
from fxshard.ir.program import Program
from fxshard.ir.schedule import Region, Schedule, relative

GATHER: tuple[tags.Role, ...] = ("pre_gather", "post_gather")  # in regions of their own
COMPUTE: tuple[tags.Role, ...] = ("compute", "pad", "post_reduction", *GATHER)


class _RegionsByDigest(dict[str, Region]):
    """By digest; those that are in `known` need not be made."""

    def __init__(self, known: dict[str, Region]) -> None:
        super().__init__()
        self.known = known


def saved_values(program: Program) -> list[fx.Node]:
    """Forward operators whose value backward reads, in order of production."""
    return [node for node in program.phase("forward") if tags.backward_users(node)]


def build(program: Program, known: Iterable[Region] = ()) -> Schedule:
    """Outline the joint graph. The graph itself is left as it is.

    Args:
        known: regions that serve again where they are equal, instead of new ones.
    """
    regions = _RegionsByDigest({region.digest: region for region in known})
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
    phase: tags.Phase,
    saved: list[fx.Node],
    results: Any,
    regions: _RegionsByDigest,
) -> fx.Graph:
    nodes = program.phase(phase)
    outer = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    read = {n for node in nodes for n in node.all_input_nodes}
    fx.node.map_arg(results, read.add)
    for node in program.graph.find_nodes(op="placeholder"):
        if node in read or (phase == "backward" and tags.get(node).role == "tangent"):
            env[node] = _copied(outer.placeholder(node.name), node)
    for node in saved:
        env[node] = _copied(outer.placeholder(node.name), node)
    run: list[fx.Node] = []
    for node in nodes:
        tag = tags.get(node)
        if run and (
            tag.role not in COMPUTE
            or belongs_to(node) != belongs_to(run[-1])
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
    tags.put(output, tags.Meta(phase, "output"))
    return outer


def belongs_to(node: fx.Node) -> tuple[int | None, str]:
    """Equal for operators that may be in one region."""
    tag = tags.get(node)
    return tag.unit, tag.role if tag.role in GATHER else "compute"


def _copied(copy: fx.Node, node: fx.Node) -> fx.Node:
    copy.meta = dict(node.meta)
    return copy


def _call_region(
    program: Program,
    outer: fx.Graph,
    env: dict[fx.Node, fx.Node],
    run: list[fx.Node],
    regions: _RegionsByDigest,
) -> None:
    """Append a call of the region equal to `run`, made if there is none yet."""
    inside = set(run)
    unit = program.units[tags.get(run[0]).unit or 0]
    inputs = list(dict.fromkeys(n for node in run for n in node.all_input_nodes if n not in inside))
    outputs = [node for node in run if any(user not in inside for user in node.users)]
    text = describe(run, inputs, outputs, unit.fqn)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest not in regions:
        name = f"region_{len(regions)}"
        if digest in regions.known:
            regions[digest] = dataclasses.replace(regions.known[digest], name=name)
        else:
            regions[digest] = _make_region(name, run, inputs, outputs, unit.fqn, digest)
    region = regions[digest]
    given, name = tuple(env[n] for n in inputs), _next_name(region.name, outer)
    call = outer.create_node("call_module", region.name, given, name=name)
    tag = tags.Meta(tags.get(run[0]).phase, "compute", module=unit.fqn, unit=unit.index)
    tags.put(call, tag, tuple(n.meta["val"] for n in outputs))
    call.meta["run"] = tuple(run)  # where the operators of the region come from, in this call
    for i, node in enumerate(outputs):
        item = outer.create_node("call_function", operator.getitem, (call, i), name=node.name)
        env[node] = tags.put(item, tags.changed(tag, module=tags.get(node).module))
        item.meta["val"] = node.meta["val"]


def _next_name(region: str, outer: fx.Graph) -> str:
    """The name of a call of ``region_<k>``: that, or the number after that of the last call.

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
        tags.update(env[node], module=relative(tags.get(node).module, base))
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
        f"{_metadata(n)} {[aliases.setdefault(s, len(aliases)) for s in tags.storage_ids(n)]}"
        for n in inputs
    ]
    for node in run:
        args = fx.node.map_arg(node.args, lambda n: _Local(local(n)))
        kwargs = fx.node.map_arg(node.kwargs, lambda n: _Local(local(n)))
        module = relative(tags.get(node).module, base)
        lines.append(f"{node.target} {args} {kwargs} {tags.get(node).role} {module}{_open(node)}")
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
        for t in tags.tensors(node.meta["val"])
    ) + _open(node)


def _open(node: fx.Node) -> str:
    """Sizes and strides in symbols; nothing if `node` has none."""
    layout = node.meta.get(LAYOUT)
    return f" {layout}" if layout else ""
