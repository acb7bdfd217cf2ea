"""The storages of a step: made, held on to, let go; each writes a live range."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import fx

from fxshard.ir import tags
from fxshard.ir.schedule import Point
from fxshard.ir.units import Param
from fxshard.memory import symbolic
from fxshard.memory.category import Category
from fxshard.memory.ledger import BEFORE, Ledger, LiveRange, Moment, owner_of


class Storages:
    """The storages of a step with a reference count each; writes a `Ledger`.

    What the caller holds has no count: it lives throughout.
    """

    def __init__(self, held: Sequence[LiveRange] = ()) -> None:
        self._sizes: symbolic.Expressions = {}
        self._params: Mapping[str, Param] = {}
        self.ledger: Ledger = Ledger()
        self.ledger.ranges += [each.copied() for each in held]
        self.now = 0  # tick
        self._open: dict[int, LiveRange] = {}  # storage -> its range, if it is alive and not held
        self._refs: dict[int, int] = {}  # storage -> values that refer to it
        self._storages = len(held)

    def _allocate(self, node: fx.Node, category: Category, host: bool = False) -> list[int]:
        return [
            self._made(node, category, storage.nbytes(), i, host)
            for i, storage in enumerate(tags.storages(node))
        ]

    def _made(
        self, node: fx.Node, category: Category, size: int, place: int = 0, host: bool = False
    ) -> int:
        """The storage at `place` among those that `node` makes; a parameter's is its module's."""
        tag = tags.get(node)
        of_parameter = tag.fqn in self._params
        name = tag.fqn if tag.fqn and (of_parameter or node.op == "placeholder") else node.name
        module = owner_of(tag.fqn or "") if of_parameter else tag.module
        op = operation_of(node)
        made = LiveRange(0, name, op, module, category, size, host, line=tag.line)
        if self._sizes and node.name in self._sizes:
            made.formula = self._sizes[node.name][place]
        return self._new(made)

    def _new(self, made: LiveRange) -> int:
        token = self._storages
        self._storages += 1
        made.storage, made.born = token, self.now
        if self.now != BEFORE:
            made.stream = self.ledger.moments[self.now // 2].stream
        self.ledger.ranges.append(made)
        self._open[token] = made
        self._refs[token] = 1
        return token

    def _hold(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self._refs:
                self._refs[token] += 1

    def _release(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self._refs:
                self._refs[token] -= 1
                if not self._refs[token]:
                    self._end([token])

    def _end(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._refs.pop(token, None)
            ended = self._open.pop(token, None)
            if ended is not None:
                ended.died = self.now

    def _rewrite(self, token: int, node: fx.Node) -> None:
        """`node` writes its result over a storage: from now on the storage is that result's."""
        after, tag = self._changed(token), tags.get(node)
        after.name, after.op, after.line = node.name, operation_of(node), tag.line
        after.module = tag.module

    def _relabel(self, tokens: Sequence[int], category: Category) -> None:
        for token in tokens:
            self._changed(token).category = category

    def _changed(self, token: int) -> LiveRange:
        """A range of the same storage from now on."""
        before = self._open[token]
        before.died = self.now
        after = before.copied()
        after.born, after.died = self.now, None
        self._open[token] = after
        self.ledger.ranges.append(after)
        return after


def moment_of(place: Point) -> Moment:
    """A point of the schedule as data."""
    tag = tags.get(place.origin)
    op = "" if place.origin.op == "call_module" else operation_of(place.origin)
    kind: Literal["row", "size", "operator"] = "row"
    if place.node is not None:
        kind = "size" if isinstance(place.node.meta.get("val"), int) else "operator"
    inside = tag.checkpoint is not None
    where = place.origin.name, op, tag.module, tag.stream, tag.line, tag.call
    return Moment(*where, kind, inside, tag.recomputed)


def operation_of(node: fx.Node) -> str:
    """``aten.mm`` of a node that calls ``aten.mm.default``; of a getitem, that of its source."""
    while node.op == "call_function" and node.target is operator.getitem:
        node = tags.source(node)
    return str(node.target).removesuffix(".default")
