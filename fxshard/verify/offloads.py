"""Offloaded activations: what leaves comes back whole, once, in time; little is on its way."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxshard.ir import dump, ops, tags
from fxshard.ir.program import Fact, Program
from fxshard.verify import walk
from fxshard.verify.failure import fail

FACT = Fact.OFFLOADED


def offloaded(program: Program) -> None:
    """Each saved activation on the CPU is a copy of one that nothing reads any more, comes back
    once, as it was, and alone gives what is back.
    """
    if not _launches(program, ops.offload) and not _launches(program, ops.reload):
        return
    order, waits = walk.order(program), walk.by_pair(program, ops.wait)
    last: dict[int, fx.Node] = {}  # storage -> what reads it last
    for node in program.graph.nodes:
        last.update(dict.fromkeys(tags.read_ids(node), node))
    for launch in _launches(program, ops.offload):
        _in_phase(program, launch, "forward")
        items = _items(program, launch)
        for item, tensor in zip(items, tags.operands(launch), strict=True):
            if tags.get(item).fqn != f"%{tensor.name}":
                _fail(program, item, f"stands for {tags.get(item).fqn}, but takes %{tensor.name}.")
            for storage in tags.storage_ids(tensor):
                if order[last[storage]] > order[waits[tags.get(launch).pair][0]]:
                    what = f"reads %{tensor.name}, which is on the CPU by then."
                    _fail(program, last[storage], what)
        takers = {user for item in items for user in item.users if user.target is not ops.wait}
        if len(takers) != 1 or next(iter(takers)).target is not ops.reload:
            _fail(program, launch, f"has {len(takers)} readers, expected one reload.")
    for launch in _launches(program, ops.reload):
        _in_phase(program, launch, "backward")
        taken = tags.operands(launch)
        makers = {walk.maker(copy) for copy in taken}
        maker = next(iter(makers))
        if len(makers) != 1 or maker.target is not ops.offload or taken != _items(program, maker):
            _fail(program, launch, "does not take all that one offload has copied, in its order.")
        if ops.argument(launch, "device") != program.device:
            _fail(program, launch, f"does not copy to {program.device}.")
        both = zip(_items(program, launch), taken, tags.operands(maker), strict=True)
        for item, copy, tensor in both:
            if tags.get(item).fqn != tags.get(copy).fqn:
                _fail(program, item, f"stands for {tags.get(item).fqn}, but takes %{copy.name}.")
            if _layout(item) != _layout(tensor):
                what = f"is {dump.types(item.meta['val'])}, but %{tensor.name} lies otherwise."
                _fail(program, item, what)
    _few_leave(program)
    _few_wait(program, order, waits)


def _launches(program: Program, target: Any) -> list[fx.Node]:
    return list(program.graph.find_nodes(op="call_function", target=target))


def _items(program: Program, launch: fx.Node) -> list[fx.Node]:
    """The results of a launch in order."""
    found = sorted(launch.users, key=walk.item_index)
    if [walk.item_index(item) for item in found] != list(range(len(tags.operands(launch)))):
        _fail(program, launch, "has not one getitem per tensor that it takes.")
    return found


def _in_phase(program: Program, launch: fx.Node, phase: tags.Phase) -> None:
    if tags.get(launch).phase != phase:
        _fail(program, launch, f"is not in {phase}.")


def _layout(node: fx.Node) -> tuple[Any, ...]:
    val = node.meta["val"]
    strides = [n for n, size in zip(val.stride(), val.shape, strict=True) if size != 1]
    return tuple(val.shape), strides, val.dtype


def _few_leave(program: Program) -> None:
    """Where activations leave, those that left before are waited for: one unit's at a time."""
    leaving: dict[int | None, fx.Node] = {}
    computed = False
    for node in program.graph.nodes:
        if node.target is ops.wait:
            leaving.pop(tags.get(node).pair, None)
        elif node.target is ops.offload:
            if leaving and computed:
                what = f"is launched while what %{next(iter(leaving.values())).name} copies may "
                _fail(program, node, what + "still be on its way.")
            leaving[tags.get(node).pair], computed = node, False
        elif tags.get(node).role == "compute" and not tags.aliases_input(node):
            computed = True


def _few_wait(
    program: Program, order: dict[fx.Node, int], waits: dict[int | None, list[fx.Node]]
) -> None:
    """At most ahead + 1 units' activations are back and wait for their first use."""
    launches = _launches(program, ops.reload)
    uses: dict[fx.Node, int] = {}
    for launch in launches:
        users = walk.alias_readers(launch)
        readers = [user for user in users if not walk.is_item_of(user, launch)]
        if not readers:
            _fail(program, launch, "brings back what nothing reads.")
        uses[launch] = min(order[reader] for reader in readers)
    ordered = sorted(launches, key=lambda launch: order[waits[tags.get(launch).pair][0]])
    number: dict[fx.Node, int] = {}  # those whose waits stand together have one
    for launch in ordered:
        wait = waits[tags.get(launch).pair][0]
        joins = wait.prev.target is ops.wait and wait.prev.prev is not None and bool(number)
        joins = joins and any(wait.prev is waits[tags.get(other).pair][0] for other in number)
        number[launch] = max(number.values(), default=-1) + (not joins)
    for launch in launches:
        at = order[launch]
        ahead = {number[other] for other in launches if order[other] <= at < uses[other]}
        if len(ahead) > program.reload_ahead + 1:
            what = f"is the launch of {len(ahead)} units' activations before their use; the limit "
            _fail(program, launch, f"{what}is ahead + 1 = {program.reload_ahead + 1}.")


def _fail(program: Program, node: fx.Node, what: str) -> None:
    fail(program, FACT, node, f"%{node.name} {what}")
