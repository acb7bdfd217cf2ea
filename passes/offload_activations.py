"""offload-activations: saved activations are on the CPU from forward to backward."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import sympy
from torch import fx

from fxshard.capture import shapes
from fxshard.cost import leaving
from fxshard.cost.leaving import LEAST_BYTES, Runs
from fxshard.hardware import Hardware, hardware_of
from fxshard.ir import ops, tags, transfers
from fxshard.ir.domain import LAYOUT, OPEN
from fxshard.ir.names import is_under
from fxshard.ir.program import Fact, Program


@dataclasses.dataclass(frozen=True)
class SavedActivation:
    """A storage that forward makes and backward reads.

    Attributes:
        base: the tensor that is all of it.
        aliases: `base` and the views of it that backward reads, with the chain of views from
            `base` to each.
        bytes: its size.
        last: place, in forward, of the last operator that touches it.
        first: place, in backward, of the first one.
        modules: FQNs of those whose backward reads it.
        marked: assign-checkpoints has chosen it.
    """

    base: fx.Node
    aliases: dict[fx.Node, list[fx.Node]]
    bytes: int
    last: int
    first: int
    modules: frozenset[str]
    marked: bool


@dataclasses.dataclass(frozen=True)
class OffloadGroup:
    """What leaves together and comes back together.

    Attributes:
        leaves: number of the run in forward after which it is launched.
        returns: number of the run in backward before which it is there.
        saved: its storages, in the order in which they are made.
    """

    leaves: int
    returns: int
    saved: tuple[SavedActivation, ...]


@dataclasses.dataclass(frozen=True)
class OffloadActivations:
    """Saved activations are copied to the CPU after their last use in forward, and come back.

    Those of a unit leave together, after its last operator in forward, and are launched back
    together: before the backward of the unit that is `ahead` units earlier in backward. The compute
    stream waits for the copies that leave where the next unit's are launched, so that at most those
    of one unit are on their way; from there on their memory on the device is free. So at most
    ``ahead + 1`` units' activations are back that backward has not begun to read.

    A storage is copied once, whatever views of it are saved; backward takes the views again, of
    what came back. On the device stay: what the caller holds (inputs, parameters, buffers, outputs
    of the model), what an operator writes in place or a collective has made, and what is no dense
    tensor that views lead from.

    Attributes:
        chosen: None: what assign-checkpoints has chosen; True: as much as the link to the CPU
            carries while `hardware` computes: of each unit, the largest first; an integer: those
            that forward makes first, at most so many bytes; FQNs: those that the backwards of these
            modules read.
        ahead: units.
        hardware: whose times decide where `chosen` is True.

    Before::

        %h = aten.mm(%x, %w)
        %y = aten.tanh(%h)
        ...                                             # the next units
        %dh = aten.tanh_backward(%dy, %y)               # backward

    After::

        %h = aten.mm(%x, %w)
        %y = aten.tanh(%h)
        %offload_4 = fxshard.offload([%y])
        %y_on_cpu = getitem(%offload_4, 0)
        ...                                             # the next unit
        %wait_4 = fxshard.wait([%y_on_cpu, %y])
        ...
        %reload_5 = fxshard.reload([%y_on_cpu], "cuda") # backward
        %y_back = getitem(%reload_5, 0)
        ...                                             # the backward of the unit after it
        %wait_5 = fxshard.wait([%y_back, %y_on_cpu])
        %dh = aten.tanh_backward(%dy, %y_back)
    """

    name: ClassVar[str] = "offload-activations"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.OFFLOADED})

    chosen: bool | int | tuple[str, ...] | None = True
    ahead: int = 1
    hardware: str | Hardware = "h100"

    def apply(self, program: Program) -> None:
        program.reload_ahead = self.ahead
        forward, backward = Runs(program.phase("forward")), Runs(program.phase("backward"))
        groups = grouped(self._chosen(candidates(program), forward, backward), forward, backward)
        if not groups:
            return
        pair = itertools.count(1 + max(tags.get(node).pair or 0 for node in program.graph.nodes))
        on_cpu = leave(program, groups, forward, pair)
        come_back(program, groups, on_cpu, backward, self.ahead, pair)
        for node in reversed(forward.nodes):  # views that backward alone has read
            if not node.users and tags.aliases_input(node) and not tags.writes(node):
                program.graph.erase_node(node)

    def _chosen(
        self, found: list[SavedActivation], forward: Runs, backward: Runs
    ) -> list[SavedActivation]:
        if self.chosen is None:
            return [each for each in found if each.marked]
        if self.chosen is True:
            hardware = hardware_of(self.hardware)
            return list(while_it_computes(found, forward, backward, hardware, self.ahead))
        if isinstance(self.chosen, int):
            sizes = itertools.accumulate(each.bytes for each in found)
            return [each for each, size in zip(found, sizes, strict=True) if size <= self.chosen]
        named = self.chosen
        return [s for s in found if any(is_under(m, name) for m in s.modules for name in named)]


def candidates(program: Program) -> list[SavedActivation]:
    """The storages that may leave, in the order in which forward makes them."""
    later = {node: place for place, node in enumerate(program.phase("backward"))}
    readers: dict[int, list[fx.Node]] = {}
    for node in later:
        for storage in tags.read_ids(node) | tags.storage_ids(node):
            readers.setdefault(storage, []).append(node)
    found = []
    for storage, moved in leaving.movable(program).items():
        aliases = aliases_of(moved, later) if storage in readers else None
        if aliases:
            size = tags.storages(moved.base)[0].nbytes()
            users = [user for alias in aliases for user in alias.users if user in later]
            modules = frozenset(tags.get(user).module for user in users)
            marked = any(tags.get(node).offload for node in moved.inside)
            places = moved.last, later[readers[storage][0]]
            found.append(SavedActivation(moved.base, aliases, size, *places, modules, marked))
    return found


def aliases_of(
    moved: leaving.Movable, later: dict[fx.Node, int]
) -> dict[fx.Node, list[fx.Node]] | None:
    """What backward reads of a storage, with the views from its base to it; None: not by views."""
    read = [node for node in moved.inside if any(user in later for user in node.users)]
    chains = {node: leaving.views_from(moved.base, node) for node in read}
    found = {node: chain for node, chain in chains.items() if chain is not None}
    return found if len(found) == len(chains) else None


def grouped(chosen: Iterable[SavedActivation], forward: Runs, backward: Runs) -> list[OffloadGroup]:
    """Storages by the runs after and before which they move, in the order in which they leave."""
    found: dict[tuple[int, int], list[SavedActivation]] = {}
    for each in chosen:
        key = forward.of(each.last), backward.of(each.first)
        if not leaving.stays(key, forward):
            found.setdefault(key, []).append(each)
    return [OffloadGroup(*key, tuple(found[key])) for key in sorted(found)]


def while_it_computes(
    found: list[SavedActivation], forward: Runs, backward: Runs, hardware: Hardware, ahead: int
) -> Iterator[SavedActivation]:
    """Those for whose copies neither phase has to wait, by the estimated times: the largest."""
    groups = grouped((s for s in found if s.bytes >= LEAST_BYTES), forward, backward)
    ways = [(group.leaves, group.returns) for group in groups]
    left, arrive = leaving.rooms(ways, forward, backward, hardware, ahead)
    for group in groups:
        for each in sorted(group.saved, key=lambda saved: -saved.bytes):
            if each.bytes <= min(left[group.leaves], arrive[group.returns]):
                left[group.leaves] -= each.bytes
                arrive[group.returns] -= each.bytes
                yield each


def leave(
    program: Program, groups: list[OffloadGroup], forward: Runs, pair: Iterator[int]
) -> list[list[fx.Node]]:
    """Insert the copies to the CPU, and the waits for them; returns the copies of each group."""
    found: list[list[fx.Node]] = []
    waiting: list[tuple[list[fx.Node], tags.Meta]] = []
    for _, together in itertools.groupby(groups, lambda group: group.leaves):
        those = list(together)
        last = max(forward.ends[those[0].leaves], *(s.last for g in those for s in g.saved))
        anchor = forward.nodes[last]
        while anchor.next.target is operator.getitem:
            anchor = anchor.next
        end = Inserter(program, anchor)
        end.waits(waiting)
        waiting = []
        for group in those:
            bases = [saved.base for saved in group.saved]
            unit = tags.get(forward.nodes[forward.ends[group.leaves]]).unit or 0
            tag = tag_of(program, "forward", unit, next(pair))
            items = end.launch(ops.offload, (bases,), bases, "on_cpu", tag)
            waiting.append(([*items, *bases], tag))
            found.append(items)
    Inserter(program, program.phase("forward")[-1]).waits(waiting)
    return found


def come_back(
    program: Program,
    groups: list[OffloadGroup],
    on_cpu: list[list[fx.Node]],
    backward: Runs,
    ahead: int,
    pair: Iterator[int],
) -> None:
    """Insert the copies from the CPU, the waits for them, and the views of them."""
    by_run: dict[int, list[tuple[OffloadGroup, list[fx.Node]]]] = {}
    for group, copies in zip(groups, on_cpu, strict=True):
        by_run.setdefault(group.returns, []).append((group, copies))
    runs = sorted(by_run)
    before = [backward.nodes[backward.starts[run]] for run in runs]
    back: list[tuple[SavedActivation, fx.Node]] = []
    launched: dict[int, list[tuple[list[fx.Node], tags.Meta]]] = {}

    def launch(at: int, end: Inserter) -> None:
        """The copies for the run `at` of `runs`."""
        for group, copies in by_run[runs[at]]:
            tag = tag_of(program, "backward", tags.get(before[at]).unit or 0, next(pair))
            bases = [saved.base for saved in group.saved]
            args = (copies, program.device)
            items = end.launch(ops.reload, args, bases, "back", tag)
            launched.setdefault(at, []).append(([*items, *copies], tag))
            back.extend(zip(group.saved, items, strict=True))

    first = Inserter(program, backward.nodes[0].prev)
    for at in range(min(ahead, len(runs))):
        launch(at, first)
    for at in range(len(runs)):
        end = Inserter(program, before[at].prev)
        if not ahead:
            launch(at, end)
        end.waits(launched[at])
        if ahead and at + ahead < len(runs):
            launch(at + ahead, end)
    for saved, item in back:  # after the waits: what is read first may be a view
        replace(program, saved, item, backward)


class Inserter:
    """Appends operators one after the other.

    Attributes:
        at: the last one; at first, what they come after.
    """

    def __init__(self, program: Program, at: fx.Node) -> None:
        self.program: Program = program
        self.at: fx.Node = at

    def launch(
        self,
        target: Any,
        args: tuple[Any, ...],
        bases: Sequence[fx.Node],
        suffix: str,
        tag: tags.Meta,
    ) -> list[fx.Node]:
        """Append a launch, and a getitem per tensor, named and sized as `bases`."""
        graph = self.program.graph
        with graph.inserting_after(self.at):
            made = transfers.node(graph, target, args, f"{ops.OPERATORS[target].name}_{tag.pair}")
        values = self.program.refake(made)
        tags.put(made, tag, values)
        self.at = made
        items = []
        for i, (base, value) in enumerate(zip(bases, values, strict=True)):
            with graph.inserting_after(self.at):
                item = graph.create_node(
                    "call_function", operator.getitem, (made, i), name=f"{base.name}_{suffix}"
                )
            own = tags.changed(tag, module=tags.get(base).module, fqn=f"%{base.name}")
            tags.put(item, own, value)
            shapes.take_along(base, item)
            items.append(item)
            self.at = item
        self._note_sizes(made, bases)
        return items

    def _note_sizes(self, made: fx.Node, bases: Sequence[fx.Node]) -> None:
        """What is open of the sizes of `bases` is open of the list of their copies."""
        if any(LAYOUT in base.meta for base in bases):
            each = (base.meta.get(LAYOUT) or fixed_layout(base) for base in bases)
            made.meta[LAYOUT] = tuple(itertools.chain.from_iterable(each))
        if any(OPEN in base.meta for base in bases):
            made.meta[OPEN] = [base.meta.get(OPEN) for base in bases]

    def waits(self, launched: Iterable[tuple[list[fx.Node], tags.Meta]]) -> None:
        """Append the wait of each launch."""
        graph = self.program.graph
        for operands, tag in launched:
            with graph.inserting_after(self.at):
                self.at = transfers.insert_wait(self.program, operands, tag)


def tag_of(program: Program, phase: tags.Phase, unit: int, pair: int) -> tags.Meta:
    """The tag of a launch."""
    module = program.units[unit].fqn
    return tags.Meta(phase, "transfer", module=module, unit=unit, pair=pair)


def fixed_layout(node: fx.Node) -> Any:
    """Sizes and strides that are those of all calls, as `LAYOUT` has them."""
    val = node.meta["val"]
    size, stride = (tuple(map(sympy.Integer, at)) for at in (val.shape, val.stride()))
    return ((size, stride),)


def replace(program: Program, saved: SavedActivation, item: fx.Node, backward: Runs) -> None:
    """Let backward read `item` in the place of a storage, through the same views.

    Each run takes views of its own, so that none is handed from region to region. Those of a
    launch, which its wait takes too, are one for all.
    """
    places = {node: place for place, node in enumerate(backward.nodes)}
    for alias, chain in saved.aliases.items():
        readers = sorted((u for u in alias.users if u in places), key=places.__getitem__)
        shared = any(tags.get(reader).role != "compute" for reader in readers)
        made: dict[int, fx.Node] = {}
        for reader in readers:
            run = 0 if shared else backward.of(places[reader])
            if run not in made:
                made[run] = item
                for view in chain:
                    made[run] = view_of(program, view, made[run], reader)
            reader.replace_input_with(alias, made[run])
            program.refresh_views(made[run], tags.storage_ids(alias))


def view_of(program: Program, view: fx.Node, source: fx.Node, reader: fx.Node) -> fx.Node:
    """A copy of `view`, of `source`, right before `reader`."""
    mine, graph = tags.get(reader), program.graph
    with graph.inserting_before(reader):
        copy = graph.node_copy(view, lambda node: source)
    copy.meta = {}
    tag = tags.changed(tags.get(view), phase="backward", module=mine.module, unit=mine.unit)
    tag = tags.changed(tag, checkpoint=None, save=False, offload=False)
    tags.put(copy, tag, program.refake(copy))
    shapes.take_along(view, copy)
    return copy
