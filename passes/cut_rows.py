"""cut-rows: a linear layer does not compute the rows of its result that are cut off after it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, cast

import torch
from torch import fx

from fxshard.capture import fakes
from fxshard.ir import tags
from fxshard.ir.domain import OPEN
from fxshard.ir.program import Fact, Program
from fxshard.ir.rows import PRODUCTS, erase_unread, is_weight

aten: Any = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclasses.dataclass(frozen=True)
class CutRows:
    """A slice of rows of a product with a weight becomes a slice of the operand's rows.

    So are written the logits of a loss over the tokens that follow, ``logits[:, :-1]``, which
    chunk-loss then finds as it finds others. In backward the gradient of the operand gets the rows
    of zeros that the gradient of the result had.

    Before::

        %mm = aten.mm(%x, %t)                                       # 2 x 6 rows of 8
        %y = aten.view(%mm, [2, 6, 50])
        %cut = aten.slice(%y, 1, 0, -1)
        %dy = aten.slice_backward(%dcut, [2, 6, 50], 1, 0, -1, 1)   # backward
        %dmm = aten.view(%dy, [12, 50])
        %dx = aten.mm(%dmm, %w)

    After::

        %rows = aten.view(%x, [2, 6, 8])
        %kept = aten.clone(aten.slice(%rows, 1, 0, -1))
        %mm = aten.mm(aten.view(%kept, [10, 8]), %t)
        %cut = aten.view(%mm, [2, 5, 50])
        %dkept = aten.mm(aten.view(%dcut, [10, 50]), %w)            # backward
        %dx = aten.slice_backward(aten.view(%dkept, [2, 5, 8]), [2, 6, 8], 1, 0, -1, 1)
    """

    name: ClassVar[str] = "cut-rows"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TAGGED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        for node in program.phase("forward"):
            if node.target in PRODUCTS and not node.kwargs and OPEN not in node.meta:
                while (found := _found(program, node)) is not None:
                    node = _Cut(program, *found).write()  # cut once more


def _found(
    program: Program, product: fx.Node
) -> tuple[list[fx.Node], fx.Node, list[fx.Node]] | None:
    """What stands between a product and a slice of its rows, and in backward.

    Returns:
        The product, views and casts of it; the slice; and, from the gradient of the slice on, the
        same in backward, if there is one.
    """
    if not is_weight(cast("fx.Node", product.args[-1])):
        return None
    chain = [product]
    returned = set(program.values)
    while True:
        if len(chain[-1].users) != 1 or chain[-1] in returned:
            return None
        (user,) = chain[-1].users
        if user.target is aten.slice.Tensor:
            break
        if user.target not in (*VIEWS, aten._to_copy.default):
            return None
        chain.append(user)
    shape = tuple(chain[-1].meta["val"].shape)
    dim = int(cast("int", user.args[1])) % len(shape)
    width = product.meta["val"].shape[1]
    if dim >= len(shape) - 1 or shape[-1] != width:
        return None
    if not program.signature.training:
        return chain, user, []
    for node in program.phase("backward"):
        if node.target is not aten.slice_backward.default or node in returned:
            continue
        back = _backward_chain(node, product)
        same = list(cast("Any", node.args[1])) == list(shape) and node.args[2] == dim
        if back and same and _bounds(node, 3) == _bounds(user, 2):
            return chain, user, back
    gradients = any(tags.get(user).phase == "backward" for n in chain for user in n.users)
    return None if gradients or _has_gradient(program, product) else (chain, user, [])


def _has_gradient(program: Program, product: fx.Node) -> bool:
    """True if backward multiplies by the weight or the rows of a product, or may."""
    names = {n.name for n in product.all_input_nodes}
    backward = program.phase("backward")
    made = [n for n in backward if any(s.name in names for s in n.all_input_nodes)]
    return any(n.target in (*PRODUCTS, aten.t.default) for n in made)


def _bounds(node: fx.Node, first: int) -> tuple[Any, ...]:
    args: list[Any] = [*node.args, *[None] * 3]
    start, stop, step = args[first : first + 3]
    return start or 0, stop, step or 1


def _backward_chain(start: fx.Node, product: fx.Node) -> list[fx.Node]:
    """From the gradient of a slice to the matrix that gradients of `product` are computed from.

    Empty if other operators than those read it.
    """
    chain = [start]
    while chain[-1].meta["val"].shape != product.meta["val"].shape:
        if len(chain[-1].users) != 1:
            return []
        (user,) = chain[-1].users
        if user.target not in (*VIEWS, aten._to_copy.default):
            return []
        chain.append(user)
    return chain if all(_is_gradient(user, chain[-1], product) for user in chain[-1].users) else []


def _is_gradient(user: fx.Node, gradient: fx.Node, product: fx.Node) -> bool:
    """True if `user` makes a gradient of an operand of `product`."""
    rows = product.args[-2]
    if user.target is aten.t.default:
        return all(u.target is aten.mm.default and u.args[1] is rows for u in user.users)
    if user.target is aten.sum.dim_IntList:
        return list(cast("Any", user.args[1])) == [0]
    weight = user.args[-1]
    by_weight = isinstance(weight, fx.Node) and weight is not gradient and is_weight(weight)
    return user.target is aten.mm.default and by_weight


class _Cut:
    """Writes one cut."""

    def __init__(
        self, program: Program, chain: list[fx.Node], cut: fx.Node, back: list[fx.Node]
    ) -> None:
        self.program, self.chain, self.cut, self.back = program, chain, cut, back
        self.product = chain[0]
        self.before = tuple(chain[-1].meta["val"].shape)  # of the result, with all rows
        self.after = tuple(cut.meta["val"].shape)
        self.count = cut.meta["val"].numel() // self.after[-1]

    def write(self) -> fx.Node:
        """Rewrite; returns the new product."""
        *added, rows, weight = self.product.args
        source = cast("fx.Node", rows)
        width = source.meta["val"].shape[1]
        with self.program.graph.inserting_before(self.product):
            full = self._emit(aten.view.default, (source, [*self.before[:-1], width]), self.product)
            kept = self._emit(aten.slice.Tensor, (full, *self.cut.args[1:]), self.product)
            if not kept.meta["val"].is_contiguous():
                dense = {"memory_format": torch.contiguous_format}
                kept = self._emit(aten.clone.default, (kept,), self.product, dense)
            flat = self._emit(aten.view.default, (kept, [self.count, width]), self.product)
            made = self._emit(self.product.target, (*added, flat, weight), self.product)
        with self.program.graph.inserting_before(self.cut):
            shaped = self._emit(aten.view.default, (made, [*self.after]), self.cut)
            for cast_ in self.chain[1:]:
                if cast_.target is aten._to_copy.default:
                    shaped = self._emit(cast_.target, (shaped,), cast_, cast_.kwargs)
        self._replace(self.cut, shaped)
        if self.back:
            self._write_backward(flat, width)
        erase_unread(self.program.graph, [*self.chain, self.cut, *self.back])
        return made

    def _write_backward(self, rows: fx.Node, width: int) -> None:
        start, last = self.back[0], self.back[-1]
        with self.program.graph.inserting_before(start):
            gradient = tags.source(start)
            for cast_ in self.back[1:]:
                if cast_.target is aten._to_copy.default:
                    gradient = self._emit(cast_.target, (gradient,), cast_, cast_.kwargs)
            sizes = [self.count, self.after[-1]]
            gradient = self._emit(aten.view.default, (gradient, sizes), last)
        for user in list(last.users):
            with self.program.graph.inserting_before(user):
                if user.target is aten.t.default:
                    turned = self._emit(user.target, (gradient,), user)
            if user.target is aten.t.default:
                for product in list(user.users):
                    with self.program.graph.inserting_before(product):
                        made = self._emit(product.target, (turned, rows), product)
                    self._replace(product, made)
                    self.program.graph.erase_node(product)
                self.program.graph.erase_node(user)
                continue
            with self.program.graph.inserting_before(user):
                made = self._emit(user.target, (gradient, *user.args[1:]), user)
                if user.target is aten.mm.default:
                    made = self._padded(made, user, width)
            self._replace(user, made)
            self.program.graph.erase_node(user)

    def _padded(self, made: fx.Node, like: fx.Node, width: int) -> fx.Node:
        """The gradient of all rows, from that of those that are kept."""
        shaped = self._emit(aten.view.default, (made, [*self.after[:-1], width]), like)
        sizes = [*self.before[:-1], width]
        args = (shaped, sizes, *self.back[0].args[2:])
        padded = self._emit(aten.slice_backward.default, args, like)
        count = padded.meta["val"].numel() // width
        return self._emit(aten.view.default, (padded, [count, width]), like)

    def _emit(
        self, target: Any, args: Any, like: fx.Node, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        node = self.program.graph.create_node(
            "call_function", target, args, dict(kwargs or {}), name=f"{like.name}_cut"
        )
        val = fakes.of_kernel(self.program, node, self.program.refake(node))
        return tags.put(node, tags.get(like), val)

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        stale = tags.storage_ids(old)
        old.replace_all_uses_with(new)
        self.program.refresh_views(new, stale)
