"""checkpoint: backward recomputes the values of activation checkpoints, instead of reading them.

Note: RNG
=========
A recomputed random operator must draw the same numbers. Forward takes the generator's state before
it. Backward sets the generator to that state, and afterwards back to where it was, so that what
backward and the caller draw later stays the same. Random operators that follow each other in
forward follow each other in backward, and share one state, as all of one checkpoint do in eager.
All this holds under ``preserve_rng_state=False`` too, where eager draws new numbers.

Note: buffers
=============
Forward writes buffers at its end, so recomputed operators read a copy of the old value. Buffers are
written once; eager writes them a second time when it recomputes (a batch norm's statistics move
twice).
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import torch
from torch import fx

from fxshard._torch.traced_collectives import note_repeats
from fxshard.capture import aliasing, fakes, rng, shapes
from fxshard.cost.activations import from_parameter, generator_of, random_before
from fxshard.errors import CaptureError
from fxshard.ir import tags
from fxshard.ir.program import Fact, Program

aten: Any = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Of a checkpoint only its inputs are saved, and what its policy saves.

    Values that only the checkpoint's own backward reads are recomputed before it. Values that
    others read in backward too (inputs of the next checkpoint) are saved, as in eager.

    Before::

        %h = aten.addmm(%b, %x, %w)            | checkpoint=0
        %y = aten.tanh(%h)                     | checkpoint=0
        %z = aten.sum(%y)
        %dh = aten.tanh_backward(%dy, %y)      | checkpoint=0     # backward

    After::

        %h = aten.addmm(%b, %x, %w)            | checkpoint=0
        %y = aten.tanh(%h)                     | checkpoint=0
        %z = aten.sum(%y)
        %h_recomputed = aten.addmm(%b, %x, %w)        | checkpoint=0     # backward
        %y_recomputed = aten.tanh(%h_recomputed)      | checkpoint=0
        %dh = aten.tanh_backward(%dy, %y_recomputed)  | checkpoint=0
    """

    name: ClassVar[str] = "checkpoint"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.RECOMPUTED})

    def apply(self, program: Program) -> None:
        regions = by_checkpoint(program.phase("forward"))
        backward = by_checkpoint(program.phase("backward"))
        previous = random_before(program)
        # From the last to the first: recomputation reads values of earlier checkpoints.
        for number in sorted(regions, reverse=True):
            recompute(program, number, regions[number], backward.get(number, []), previous)


def by_checkpoint(nodes: list[fx.Node]) -> dict[int, list[fx.Node]]:
    """Those of `nodes` that are in a checkpoint, by its number."""
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        number = tags.get(node).checkpoint
        if number is not None:
            found.setdefault(number, []).append(node)
    return found


def recompute(
    program: Program,
    number: int,
    region: list[fx.Node],
    backward: list[fx.Node],
    previous: dict[fx.Node, fx.Node | None],
) -> None:
    """Let the backward nodes of checkpoint `number` read copies of what they need of `region`.

    Args:
        region, backward: the nodes of the checkpoint in forward and in backward, in order.
        previous: from `random_before`.
    """
    inside = set(region)
    kept = {node for node in region if is_kept(node, number)}
    readers = {
        reader: wanted
        for reader in backward
        if (wanted := [n for n in reader.all_input_nodes if n in inside and n not in kept])
    }
    if not readers:
        return
    chain = needed([n for wanted in readers.values() for n in wanted], inside - kept)
    copies = copy_before(program, chain, next(iter(readers)), number, previous)
    for reader, wanted in readers.items():
        for node in wanted:
            reader.replace_input_with(node, copies[node])
    for node, copy in copies.items():  # backward reads some of them through views
        program.refresh_views(copy, tags.storage_ids(node) - tags.storage_ids(copy))
    for node in reversed(region):  # forward no longer makes what only backward needed
        if not node.users and not tags.is_random(node) and not tags.writes(node):
            program.graph.erase_node(node)


def is_kept(node: fx.Node, number: int) -> bool:
    """True if `node` of checkpoint `number` is saved: by its policy, or since others read it."""
    if from_parameter(node):
        return False
    made = tags.source(node) if node.target is operator.getitem else node
    return (
        tags.get(node).save
        or tags.get(made).save
        or any(tags.get(user).checkpoint != number for user in tags.backward_users(node))
    )


def needed(wanted: list[fx.Node], lost: set[fx.Node]) -> list[fx.Node]:
    """The nodes to recompute for `wanted`, which is not saved, in forward order."""
    found: set[fx.Node] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        todo += [
            source
            for source in node.all_input_nodes
            if source in lost or (source.op == "call_function" and from_parameter(source))
        ]
    return sorted(found)  # nodes know their place in the graph


def copy_before(
    program: Program,
    chain: list[fx.Node],
    before: fx.Node,
    number: int,
    previous: dict[fx.Node, fx.Node | None],
) -> dict[fx.Node, fx.Node]:
    """Copy the nodes of `chain` to where `before` stands; returns the copy of each."""
    graph = program.graph
    copies: dict[fx.Node, fx.Node] = {}
    ends: dict[torch.device, tuple[fx.Node, tags.Meta]] = {}  # where each generator was
    last: dict[torch.device, fx.Node] = {}  # random operator that was recomputed last

    def source(node: fx.Node) -> fx.Node:
        return copies[node] if node in copies else unwritten(program, node)

    for node in chain:
        if node.target is torch.ops.aten._local_scalar_dense.default:
            raise CaptureError(
                f"%{node.name} of {tags.get(node).module or 'the root module'} is a number read "
                f"from data, which is not read again in backward, and nobody has said that it is "
                f"saved: assign-checkpoints has not run."
            )
        tag = tags.changed(
            tags.get(node),
            phase="backward",
            checkpoint=number,
            recomputed=True,
            save=False,
            offload=False,
        )
        device = generator_of(node)
        if device is not None:
            with graph.inserting_before(before):
                if device not in ends:
                    ends[device] = (get_state(program, device, tag, f"{node.name}_now"), tag)
            if device not in last or last[device] is not previous[node]:
                with graph.inserting_before(node):
                    own = tags.changed(tags.get(node), save=False, offload=False)
                    state = get_state(program, device, own, f"{node.name}_state")
                with graph.inserting_before(before):
                    set_state(program, state, device, tag)
            last[device] = node
        args = fx.node.map_arg(node.args, source)
        kwargs = fx.node.map_arg(node.kwargs, source)
        with graph.inserting_before(before):
            copy = graph.create_node(
                "call_function", node.target, args, kwargs, name=f"{node.name}_recomputed"
            )
        val = program.repeated(copy, node)
        if val is None:
            val = fakes.of_kernel(program, copy, program.refake(copy))
        copies[node] = tags.put(copy, tag, val)
        shapes.take_along(node, copy)
        note_repeats(copy, node)
    with graph.inserting_before(before):
        for device, (state, tag) in ends.items():
            set_state(program, state, device, tag)
    return copies


def get_state(program: Program, device: torch.device, tag: tags.Meta, name: str) -> fx.Node:
    """Append ``get_rng_state`` at the insertion point."""
    node = program.graph.create_node("call_function", rng.get_rng_state, (device,), name=name)
    return tags.put(node, tag, program.refake(node))


def set_state(program: Program, state: fx.Node, device: torch.device, tag: tags.Meta) -> None:
    """Append ``set_rng_state`` at the insertion point."""
    args = (state, device)
    node = program.graph.create_node("call_function", rng.set_rng_state, args, name="set_rng_state")
    tags.put(node, tag)


def unwritten(program: Program, node: fx.Node) -> fx.Node:
    """What a copy of a reader of `node` reads: `node`, or its old value if forward writes it.

    `node` may be a buffer, or a view of one that the checkpoint was given.
    """
    holder = written_holder(program, node)
    if holder is None:
        return node
    if node is not holder:
        aliasing.keep_old_value(program, holder)
        return node
    for user in node.users:  # writes are at the end of forward: any copy has the old value
        if user.target is aten.clone.default and tags.get(user).checkpoint is None:
            return user
    first = next(n for n in program.graph.nodes if n.op == "call_function")
    name = f"{node.name}_before"
    with program.graph.inserting_before(first):
        copy = program.graph.create_node("call_function", aten.clone.default, (node,), name=name)
    tag = tags.changed(tags.get(first), checkpoint=None, save=False, offload=False, call=None)
    return tags.put(copy, tag, program.refake(copy))


def written_holder(program: Program, node: fx.Node) -> fx.Node | None:
    """The placeholder in whose memory `node` lies, if forward writes it."""
    while node.op != "placeholder":
        if not tags.aliases_input(node):
            return None
        mine = tags.storage_ids(node)
        node = next(n for n in node.all_input_nodes if tags.storage_ids(n) & mine)
    return node if any(tags.writes(user) for user in node.users) else None
