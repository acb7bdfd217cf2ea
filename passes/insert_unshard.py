"""insert-unshard: gather each unit's parameters in front of where it computes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from fxshard import meta, ops
from fxshard.program import Fact, Program
from fxshard.units import Param, Unit

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class InsertUnshard:
    """One all-gather per unit and phase, of the parameters that the phase reads.

    The placeholders of whole parameters become placeholders of this rank's padded shards.
    A launch and its wait stand together here; `prefetch` pulls them apart.

    Before::

        %w : f32[5,4] = param
        %mm = aten.mm(%x, %w)

    After (world size 2)::

        %w_shard : f32[3,4] = shard
        %unshard_0 = fxshard.all_gather([%w_shard], 2)
        %getitem = getitem(%unshard_0, 0)         # f32[6,4]
        %wait_0 = fxshard.wait([%getitem])
        %w = aten.slice(%getitem, 0, 0, 5)        # a view: cuts the padding
        %mm = aten.mm(%x, %w)
    """

    name: ClassVar[str] = "insert-unshard"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.UNSHARD_PAIRED, Fact.PARAMS_UNSHARDED, Fact.NO_PARAM_SAVED}
    )

    def apply(self, program: Program) -> None:
        wholes = {
            meta.get(node).fqn: node
            for node in program.graph.find_nodes(op="placeholder")
            if meta.get(node).role == "param"
        }
        shards = {
            param.fqn: add_shard(program, param, wholes[param.fqn])
            for param in program.params.values()
        }
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        entries = first_nodes(program)
        phases: tuple[meta.Phase, ...] = ("forward", "backward")
        pair = 0
        for phase in phases:
            todo: list[tuple[fx.Node, Unit, list[Param]]] = []
            for unit in program.units:
                read = {
                    param.fqn: users
                    for param in unit.params
                    if (users := readers(wholes[param.fqn], phase))
                }
                if not read:
                    continue
                first = min((u for users in read.values() for u in users), key=order.__getitem__)
                entry = entries.get((phase, unit.index)) if unit.index else None
                at = min((first, entry or first), key=order.__getitem__)
                todo.append((at, unit, [p for p in unit.params if p.fqn in read]))
            for at, unit, params in sorted(todo, key=lambda item: order[item[0]]):
                gather(program, unit, params, phase, at, pair, wholes, shards)
                pair += 1
        for node in wholes.values():
            program.graph.erase_node(node)


def add_shard(program: Program, param: Param, whole: fx.Node) -> fx.Node:
    """Placeholder of this rank's padded shard of `param`, shape ``[ceil(rows/world), ...]``."""
    with program.graph.inserting_before(whole):
        node = program.graph.placeholder("shard_" + param.fqn.replace(".", "_"))
    tag = meta.Meta("forward", "shard", unit=param.unit, fqn=param.fqn)
    device = whole.meta["val"].device
    return meta.put(node, tag, program.fake(param.chunk(program.world_size), param.dtype, device))


def first_nodes(program: Program) -> dict[tuple[meta.Phase, int | None], fx.Node]:
    """First operator of each unit in each phase."""
    found: dict[tuple[meta.Phase, int | None], fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            tag = meta.get(node)
            found.setdefault((tag.phase, tag.unit), node)
    return found


def readers(whole: fx.Node, phase: meta.Phase) -> list[fx.Node]:
    """Operators of `phase` that read the whole parameter directly."""
    return [user for user in whole.users if meta.get(user).phase == phase]


def gather(
    program: Program,
    unit: Unit,
    params: list[Param],
    phase: meta.Phase,
    at: fx.Node,
    pair: int,
    wholes: dict[str | None, fx.Node],
    shards: dict[str, fx.Node],
) -> None:
    """Insert launch, wait and padding views in front of `at`; readers read the result."""
    graph = program.graph
    tag = meta.Meta(phase, "unshard", module=unit.fqn, unit=unit.index, pair=pair)
    sources = [shards[param.fqn] for param in params]
    with graph.inserting_before(at):
        picks = ops.insert_launch(program, ops.all_gather, sources, [p.fqn for p in params], tag)
        for param, pick in zip(params, picks, strict=True):
            whole, full = wholes[param.fqn], pick
            if pick.meta["val"].shape[0] != param.shape[0]:
                args = (pick, 0, 0, param.shape[0])
                full = graph.call_function(aten.slice.Tensor, args)
                cut = dataclasses.replace(tag, fqn=param.fqn)
                meta.put(full, cut, program.refake(full))
            for user in readers(whole, phase):
                user.replace_input_with(whole, full)
            program.refresh_views(full, meta.storage_ids(whole))
