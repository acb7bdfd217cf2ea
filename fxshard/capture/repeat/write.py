"""The graph of a model of fewer blocks -> the graph of all of them, node by node."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxshard._torch import checkpointing, export, fake_tensors, graphs
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.capture import provenance
from fxshard.capture.provenance import STACKS, stack_of
from fxshard.capture.repeat.places import (
    OUTSIDE,
    BlockPlace,
    Label,
    Runs,
    SequenceItem,
    Stamp,
    Unproven,
    Wider,
    among_left,
    cut,
    name_at,
    place_of,
)
from fxshard.capture.repeat.prove import Repeats
from fxshard.capture.repeat.rehearse import as_text, call_items, call_labels
from fxshard.ir import tags
from fxshard.ir.calls import Call

_NUMBERED = re.compile(r"(.*?)_(\d+)$")


@dataclasses.dataclass(frozen=True)
class Noted:
    """Where each node of a graph was traced.

    Attributes:
        order: every operator, in the order in which the trace made it.
        places: of each of them.
        calls: items of the calls that they ran in.
        firsts: per base of a name, the number of its first node; 0 is not written.
    """

    order: list[fx.Node]
    places: dict[fx.Node, BlockPlace]
    calls: list[SequenceItem]
    firsts: dict[str, int]


def note(
    graph: fx.Graph, made: dict[fx.Graph, list[fx.Node]], calls: Sequence[Call], runs: Runs
) -> Noted:
    """Note where the nodes of `graph`, just traced, belong.

    Args:
        graph: of the model with fewer blocks.
        made: its nodes, those too that were dead, if `graphs.nodes_made` has found them.
        calls: its calls; FQNs are those among all blocks.
        runs: what was left out.

    Raises:
        Unproven: the blocks cannot be told apart in it.
    """
    nodes = made.get(graph) or list(graph.nodes)
    if not graphs.has_names_of(graph, nodes):
        raise Unproven("the trace has dropped operators, and their names with them")
    labels = call_labels(calls, runs)
    items = call_items(calls, labels, runs)
    order = [n for n in nodes if n.op not in ("placeholder", "output")]
    count: dict[str, int] = {}
    firsts: dict[str, int] = {}
    phase = "forward"
    phases: dict[str, list[fx.Node]] = {"forward": [], "backward": []}
    for node in order:
        base, number = _numbered(node.name)
        if base not in firsts:
            firsts[base] = number  # 1 where the base is a word of Python's, such as sum
            count[base] = number - 1
        if _next_name(count, base) != node.name:
            raise Unproven(f"the trace names a node {node.name}, which another number was due for")
        if provenance.is_backward(node):
            phase = "backward"
        phases[phase].append(node)
    places: dict[fx.Node, BlockPlace] = {}
    for kind, nodes in phases.items():
        found: list[Label] = []
        for node in nodes:
            call = None if graphs.sums_gradients(node) else provenance.call_in(stack_of(node, kind))
            found.append(None if call is None else labels[call])
        at = cut(found, descending=kind == "backward")
        places |= {n: BlockPlace(kind, *where) for n, where in zip(nodes, at, strict=True)}
    return Noted(order, places, items, firsts)


def _numbered(name: str) -> tuple[str, int]:
    found = _NUMBERED.match(name)
    return (found[1], int(found[2])) if found else (name, 0)


def _next_name(count: dict[str, int], base: str) -> str:
    """The name that `torch.fx` gives to the next node of this base (``create_name``)."""
    number = count[base] + 1
    count[base] = number
    return f"{base}_{number}" if number else base


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """A joint graph with what its inputs and outputs are (see `export.export_joint`)."""

    graph: fx.Graph
    sources: list[Any]
    targets: list[Any]


@dataclasses.dataclass(slots=True)
class _WrittenPlace:
    """What a place holds in the full graph."""

    node: fx.Node
    storages: list[torch.UntypedStorage]


@dataclasses.dataclass(frozen=True, slots=True)
class _NodeRecipe:
    """What all images of a node have in common; a deep model has a hundred of each.

    Attributes:
        template: the node.
        reads: its arguments name nodes, the first of its references.
        metadata: of its images, without those of its `stack`.
        storages: each storage of its value, and which one of the node that owns it; that is itself
            if it says so.
        stack: of its module, by the phase that it is in.
        module: FQN in that stack.
        call: it names a call.
        checkpoint: it ran in one.
    """

    template: fx.Node
    reads: bool
    metadata: dict[str, Any]
    storages: list[tuple[torch.UntypedStorage, int, bool]]
    stack: dict[str, Any] | None
    module: str | None
    call: bool
    checkpoint: bool


def written(
    traced: JointGraph, noted: Noted, repeats: Repeats, mode: FakeTensorMode, training: bool
) -> JointGraph:
    """The graph of the full model from that of the shortened one.

    Args:
        traced: values are fake ones of `mode` without symbols.
        noted: where its nodes were traced.
        repeats: what was left out.
        mode: owner of the fake values.
        training: the graph has a backward.

    Raises:
        Unproven: its blocks are not images of each other, in backward say.
    """
    return _GraphWriter(traced, noted, repeats, mode, training).write()


class _GraphWriter:
    """Writes the full graph: see `written`."""

    def __init__(
        self,
        traced: JointGraph,
        noted: Noted,
        repeats: Repeats,
        mode: FakeTensorMode,
        training: bool,
    ) -> None:
        self.traced, self.noted, self.mode, self.training = traced, noted, mode, training
        self.runs, self.names = repeats.runs, repeats.names
        self._call_numbers = {item.place: i for i, item in enumerate(repeats.calls)}
        self._owners: dict[int, tuple[BlockPlace, int]] = {}
        self._nodes: dict[BlockPlace, fx.Node] = {}
        self._places: dict[fx.Node, BlockPlace] = {}
        self._regions: dict[int, BlockPlace] = {}
        self._region_numbers: dict[BlockPlace, int] = {}
        self._written: dict[BlockPlace, _WrittenPlace] = {}
        self._items: dict[BlockPlace, SequenceItem] = {}
        self._recipes: dict[BlockPlace, _NodeRecipe] = {}
        self._stacks: dict[Any, dict[str, Any]] = {}  # one for all that were run in one line
        self.graph = fx.Graph()
        try:
            self.stamp = Stamp(self.runs, self._sequences())
        except Unproven as reason:  # forward is proven: what reaches over blocks is backward
            raise Wider(str(reason)) from None

    # -- what was traced ---------------------------------------------------------------------------

    def _sequences(self) -> dict[str, list[SequenceItem]]:
        found: dict[str, list[SequenceItem]] = {"call": self.noted.calls, "leaf": [], "size": []}
        found |= {"forward": [], "backward": [], "result": []}
        (output,) = self.traced.graph.find_nodes(op="output")
        for node, desc in zip(
            self.traced.graph.find_nodes(op="placeholder"), self.traced.sources, strict=True
        ):
            source = export.input_source(desc)
            found["leaf"].append(self._item(node, self._leaf(source), source[0]))
        for node in self.traced.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            place = self.noted.places[node]
            if "partitioner_tag" not in node.meta and place.kind == "forward" and _is_size(node):
                place = _outside("size", len(found["size"]))
                if found["forward"]:
                    raise Unproven("a size is computed after the operators that need it")
            found[place.kind].append(self._item(node, place, node.target))
        found["result"] = self._results(output)
        return found

    def _item(self, node: fx.Node, place: BlockPlace, what: Any) -> SequenceItem:
        refs: list[BlockPlace] = []

        def argument(read: fx.Node) -> str:
            refs.append(self._places[read])
            return "%"

        args = fx.node.map_arg((node.args, node.kwargs), argument)
        storages: list[int] = []
        own = 0
        for storage in tags.storages(node):
            storages.append(id(storage))
            if id(storage) not in self._owners:
                self._owners[id(storage)] = (place, own)
                own += 1
        key: list[Any] = [node.op, what, as_text(args), _value_key(node.meta.get("val"), storages)]
        for number in storages:
            owner, ordinal = self._owners[number]
            refs.append(owner)
            key.append(ordinal)
        key += [_own(node), tuple(sorted(set(node.meta) & _FLAGS))]
        if place.kind in STACKS:
            stack = stack_of(node, place.kind)
            module, call = provenance.module_in(stack), provenance.call_in(stack)
            key += [provenance.line_in(stack), provenance.without_gradient(stack), module is None]
            key += [node.meta.get("partitioner_tag"), checkpointing.is_saved_by_policy(node)]
            if module is not None:
                refs.append(among_left(place_of(module, self.runs, "module"), self.runs))
            if call is not None:
                refs.append(self.noted.calls[call].place)
            region = checkpointing.checkpoint_of(node)
            if region is not None:
                if region not in self._regions:
                    taken = [r for r in self._regions.values() if r[1:3] == place[1:3]]
                    self._regions[region] = BlockPlace("region", place.run, place.block, len(taken))
                refs.append(self._regions[region])
        self._nodes[place], self._places[node] = node, place
        item = self._items[place] = SequenceItem(place, tuple(key), tuple(refs))
        return item

    def _results(self, output: fx.Node) -> list[SequenceItem]:
        """Outputs of the graph as items: changes of leaves, results, a gradient per leaf."""
        values: Any = output.args[0]
        leaves = [place for place in self._leaves() if not _is_tangent(place)]
        tail = len(values) - len(leaves) if self.training else len(values)
        items: list[SequenceItem] = []
        for i, (value, desc) in enumerate(zip(values, self.traced.targets, strict=True)):
            kind, source = export.output_source(desc)
            if i >= tail:
                place = leaves[i - tail]
                if kind != "none" and (kind != "grad" or self._leaf(source) != place):
                    raise Unproven("gradients are not in the order of what they are of")
                place = _of(place, "grad")
            elif kind == "mutation":
                place = _of(self._leaf(source), "mutation")
                if items and items[-1].place.position[0] == "output":
                    raise Unproven("changes are not in front of results")
            elif kind == "output":
                place = _outside("result", ("output", i))
            else:
                raise Unproven(f"the trace has an output of the kind {kind!r}")
            refs = (self._places[value],) if isinstance(value, fx.Node) else ()
            constant = "" if isinstance(value, fx.Node) else as_text(value)
            item = self._items[place] = SequenceItem(place, (kind, constant), refs)
            items.append(item)
        order = [
            leaves.index(i.place._replace(kind="leaf", position=i.place.position[1]))
            for i in items
            if i.place.position[0] == "mutation"
        ]
        if order != sorted(order):
            raise Unproven("changes are not in the order of what they are of")
        return items

    def _leaves(self) -> list[BlockPlace]:
        return [self._places[n] for n in self.traced.graph.find_nodes(op="placeholder")]

    def _leaf(self, source: Any) -> BlockPlace:
        what, name = source
        if what in ("param", "buffer"):
            return place_of(name.removeprefix("model."), self.runs)
        return _outside("leaf", source)

    # -- what is written ---------------------------------------------------------------------------

    def write(self) -> JointGraph:
        """The full graph.

        Raises:
            Unproven: it does not follow from what was traced.
        """
        full = self._full_leaves()
        for i, (item, shift, desc) in enumerate(full):
            template = self._nodes[item.place]
            name = template.name if _is_tangent(item.place) else self._input(i)
            node = self._node(item, shift, "placeholder", name, name)
            node.meta["desc"] = desc
        names = self._names()
        for kind in ("size", "forward", "backward"):
            for item, shift in self.stamp.written(kind):
                template = self._nodes[item.place]
                traced = (
                    item if kind != "size" else SequenceItem(self.noted.places[template], None, ())
                )
                name = names[self.stamp.place(traced, shift)]
                self._node(item, shift, template.op, template.target, name)
        self._reserve(names)
        values, targets = self._full_results(full)
        output = self.graph.output(tuple(values))
        (before,) = self.traced.graph.find_nodes(op="output")
        output.meta.update(before.meta, desc=targets)
        return JointGraph(self.graph, [desc for _, _, desc in full], targets)

    def _full_leaves(self) -> list[tuple[SequenceItem, int, Any]]:
        """Item, distance and descriptor of each placeholder of the full graph."""
        placeholders = list(self.traced.graph.find_nodes(op="placeholder"))
        descs = {self._places[n]: d for n, d in zip(placeholders, self.traced.sources, strict=True)}
        of_model = [p for p, d in descs.items() if export.input_source(d)[0] in ("param", "buffer")]
        found: list[tuple[SequenceItem, int, Any]] = []
        for name in (*self.names[0], *self.names[1]):
            place = place_of(name, self.runs)
            source, shift = self._source(place)
            if source not in descs:
                raise Unproven(f"the trace does not have {name}")
            desc = export.of_name(descs[source], f"model.{name}")
            found.append((self._items[source], shift, desc))
        kept = [item.place for item, shift, _ in found if not shift]
        if kept != of_model or [self._places[n] for n in placeholders][: len(kept)] != kept:
            raise Unproven("parameters and buffers are traced in another order")
        found += [(self._items[p], 0, d) for p, d in descs.items() if p not in set(kept)]
        for i, node in enumerate(placeholders):
            if not _is_tangent(self._places[node]) and node.name != self._input(i):
                raise Unproven(f"the trace names an input {node.name}")
        return found

    def _input(self, i: int) -> str:
        """The name that the trace gives to its input `i`."""
        return f"primals_{i + 1}" if self.training else f"arg{i}_1"

    def _source(self, place: BlockPlace) -> tuple[BlockPlace, int]:
        """What a place of the full model is an image of, and how many blocks from it."""
        if place.run == OUTSIDE:
            return place, 0
        run = self.runs[place.run]
        short = run.short(place.block)
        if short is not None:
            return place._replace(block=short), 0
        template = run.template(place.block)
        return place._replace(block=template), place.block - template

    def _names(self) -> dict[BlockPlace, str]:
        """The names that a full trace gives, by where it makes a node."""
        by_kind: dict[str, list[SequenceItem]] = {"forward": [], "backward": []}
        nodes: dict[BlockPlace, fx.Node] = {}
        for node in self.noted.order:
            place = self.noted.places[node]
            by_kind[place.kind].append(SequenceItem(place, None, ()))
            nodes[place] = node
        naming = Stamp(self.runs, by_kind)
        count = {base: number - 1 for base, number in self.noted.firsts.items()}
        found: dict[BlockPlace, str] = {}
        for kind in by_kind:
            for item, shift in naming.written(kind):
                base, _ = _numbered(nodes[item.place].name)
                found[naming.place(item, shift)] = _next_name(count, base)
        return found

    def _reserve(self, names: dict[BlockPlace, str]) -> None:
        """Take the names of nodes that are dead, as the trace has."""
        taken = {node.name for node in self.graph.nodes}
        for name in names.values():
            if name not in taken:
                dead = self.graph.create_node("call_function", _dead, (), {}, name)
                if dead.name != name:
                    raise Unproven(f"the name {name} is taken")
                self.graph.erase_node(dead)

    def _node(self, item: SequenceItem, shift: int, op: str, target: Any, name: str) -> fx.Node:
        recipe = self._recipes.get(item.place)
        if recipe is None:
            recipe = self._recipes[item.place] = self._recipe(item)
        rest = iter(self.stamp.refs(item, shift))
        template = recipe.template
        if recipe.reads:
            args, kwargs = fx.node.map_arg(
                (template.args, template.kwargs), lambda _: self._at(next(rest)).node
            )
        else:
            args, kwargs = template.args, template.kwargs
        node = graphs.append_node(self.graph, op, target, args, kwargs, name)
        if node.name != name:
            raise Unproven(f"the name {name} is taken")
        node.meta.update(recipe.metadata)
        own = self._value(recipe, node, shift == 0, rest)
        self._written[self.stamp.place(item, shift)] = _WrittenPlace(node, own)
        if item.place.kind in STACKS:
            self._origin(recipe, item.place.kind, node, rest)
        return node

    def _recipe(self, item: SequenceItem) -> _NodeRecipe:
        template = self._nodes[item.place]
        read: list[fx.Node] = []
        fx.node.map_arg((template.args, template.kwargs), read.append)
        kind = item.place.kind
        stack = stack_of(template, kind) if kind in STACKS else None
        left = {*_LEFT, *(STACKS.values() if stack else ())}
        storages = []
        for storage in tags.storages(template):
            owner, ordinal = self._owners[id(storage)]
            storages.append((storage, ordinal, owner == item.place))
        return _NodeRecipe(
            template=template,
            reads=bool(read),
            metadata={k: v for k, v in template.meta.items() if k not in left},
            storages=storages,
            stack=stack,
            module=provenance.module_in(stack),
            call=provenance.call_in(stack) is not None,
            checkpoint=kind in STACKS and checkpointing.checkpoint_of(template) is not None,
        )

    def _at(self, place: BlockPlace) -> _WrittenPlace:
        found = self._written.get(place)
        if found is None:
            raise Unproven(f"nothing is written at {tuple(place)}")
        return found

    def _value(
        self, recipe: _NodeRecipe, node: fx.Node, stays: bool, refs: Iterator[BlockPlace]
    ) -> list[torch.UntypedStorage]:
        """Give the node the value of its template, in storages of its own or in those it reads.

        Args: `stays`: the node is the template itself, in the full graph.

        Returns those of its own.
        """
        moved = False
        own: list[torch.UntypedStorage] = []
        storages: dict[int, torch.UntypedStorage] = {}
        for before, ordinal, is_own in recipe.storages:
            at = next(refs)
            if not is_own:
                after = self._at(at).storages[ordinal]
            else:
                after = before if stays else fake_tensors.fake_storage(before.nbytes())
                own.append(after)
            storages[id(before)] = after
            moved = moved or after is not before
        if moved:
            node.meta["val"] = self._moved(recipe.metadata["val"], storages)
        return own

    def _moved(self, value: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
        if isinstance(value, Tensor):
            storage = storages[id(value.untyped_storage())]
            where = value.size(), value.stride(), int(value.storage_offset())
            moved = fake_tensors.fake_of(self.mode, storage, *where, value.dtype, value.device)
            return moved.requires_grad_() if value.requires_grad and value.is_leaf else moved
        if isinstance(value, (list, tuple)):
            return type(value)([self._moved(v, storages) for v in value])
        return value

    def _origin(
        self, recipe: _NodeRecipe, kind: str, node: fx.Node, refs: Iterator[BlockPlace]
    ) -> None:
        """Say the module, the call, the line and the checkpoint of the node."""
        stack = recipe.stack
        if stack:
            module = None if recipe.module is None else next(refs)
            call = next(refs) if recipe.call else None
            what = (stack.get(provenance.LINE), stack.get(provenance.NO_GRAD), module, call)
            here = self._stacks.get(what)
            if here is None:
                here = self._stacks[what] = self._stack_at(recipe, module, call)
            node.meta[STACKS[kind]] = here
        if recipe.checkpoint:
            region = next(refs)
            number = self._region_numbers.setdefault(region, len(self._region_numbers))
            checkpointing.in_checkpoint(node.meta, number)

    def _stack_at(
        self, recipe: _NodeRecipe, module: BlockPlace | None, call: BlockPlace | None
    ) -> Any:
        """The stack of `recipe` in another module and call."""
        stack = recipe.stack or {}
        here = {key: stack[key] for key in (provenance.LINE, provenance.NO_GRAD) if key in stack}
        if module is not None and recipe.module is not None:
            name = name_at(module, self.runs)
            here = {name: (name, stack[recipe.module][1]), **here}
        if call is not None:
            number = self._call_numbers.get(call)
            if number is None:
                raise Unproven("an operator runs in a call that the rehearsal does not have")
            here[provenance.CALL] = (number, stack[provenance.CALL][1])
        return here

    def _full_results(
        self, full: list[tuple[SequenceItem, int, Any]]
    ) -> tuple[list[Any], list[Any]]:
        """Values and descriptors of the full graph's output."""
        (output,) = self.traced.graph.find_nodes(op="output")
        before: Any = output.args[0]
        items = self.stamp.sequences["result"]
        each = zip(items, before, self.traced.targets, strict=True)
        results = {item.place: (item, value, desc) for item, value, desc in each}
        values: list[Any] = []
        found: list[Any] = []

        def put(place: BlockPlace, shift: int, name: Any) -> None:
            item, value, desc = results[place]
            refs = self.stamp.refs(item, shift)
            values.append(self._at(refs[0]).node if refs else value)
            renamed = name is not None and desc is not None
            found.append(export.of_name(desc, name) if renamed else desc)

        def leaves(what: str) -> None:
            for item, shift, desc in full:
                place = _of(item.place, what)
                if place in results:
                    kind, name = export.input_source(desc)
                    named = kind in ("param", "buffer")
                    put(place, shift, name if named else None)

        leaves("mutation")
        for place in results:
            if place.position[0] == "output":
                put(place, 0, None)
        leaves("grad")
        return values, found


def _dead() -> None:
    """In place of the operator of a node that is dead."""


_LEFT = ("fxshard_storages",)
_FLAGS = frozenset({"is_gradient_acc", "autograd_backward", "recompute"})


def _own(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """What fxshard has noted of the value (`shapes.LAYOUT`, say): copies carry it along."""
    noted = (k for k in node.meta if k.startswith("fxshard_") and k not in _LEFT)
    return tuple((key, str(node.meta[key])) for key in sorted(noted))


def _outside(kind: str, position: Any) -> BlockPlace:
    return BlockPlace(kind, OUTSIDE, 0, position)


def _of(leaf: BlockPlace, what: str) -> BlockPlace:
    return leaf._replace(kind="result", position=(what, leaf.position))


def _is_tangent(leaf: BlockPlace) -> bool:
    return leaf.run == OUTSIDE and leaf.position[0] == "tangent"


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (bool, int, float))


def _value_key(value: Any, storages: list[int]) -> Any:
    """All of a fake value but the identity of its storages."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return (
            *(value.dtype, tuple(value.shape), value.stride(), value.storage_offset()),
            *(value.device, value.requires_grad, storages.index(id(storage)), storage.nbytes()),
        )
    if isinstance(value, (list, tuple)):
        return tuple(_value_key(v, storages) for v in value)
    return as_text(value)
