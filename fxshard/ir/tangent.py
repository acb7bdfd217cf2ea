"""Where the gradient of a loss enters what is computed row by row, and that all is linear in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from fxshard.ir import tags
from fxshard.ir.rows import MEAN, NLL, NotByRowsError, RowRegion, outside

aten: Any = torch.ops.aten

OF_FIRST = {  # in their first operand, whatever the others are
    *(aten.neg.default, aten.view.default, aten._unsafe_view.default, aten.expand.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.t.default),
    *(aten._to_copy.default, aten.clone.default, aten.slice.Tensor, aten.select.int),
    *(aten.slice_backward.default, aten.select_backward.default, aten.gather.default),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
    *(aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar, aten.nll_loss_backward.default),
    *(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default),
    *(aten.tanh_backward.default, aten.sigmoid_backward.default, aten.silu_backward.default),
    *(aten.gelu_backward.default, aten.threshold_backward.default),
}
OF_ONE = {aten.mul.Tensor, aten.mm.default}  # in each of them alone
OF_BOTH = {aten.add.Tensor, aten.sub.Tensor}  # in both together
CONSTANT = {  # whose value depends on no operand's
    *(aten.new_zeros.default, aten.new_full.default, aten.full_like.default),
    *(aten.zeros_like.default, aten.ones_like.default),
}


def is_linear(node: fx.Node, scaled: Callable[[fx.Node], bool]) -> bool:
    """True if the value of `node` is `k` times itself when all `scaled` operands are `k` times."""
    places = [n for n, a in enumerate(node.args) if isinstance(a, fx.Node) and scaled(a)]
    if any(isinstance(v, fx.Node) and scaled(v) for v in node.kwargs.values()):
        return False
    if node.target in OF_FIRST:
        return places == [0]
    if node.target in OF_ONE:
        return len(places) == 1
    if node.target in OF_BOTH:
        return places == [0, 1]
    if node.target is aten.masked_fill.Scalar:
        return places == [0] and bool(node.args[2] == 0)
    if node.target is aten.where.self:
        return set(places) <= {1, 2} and all(n in places or is_zero(node.args[n]) for n in (1, 2))
    if node.target in (aten.scatter_add.default, aten.scatter.src):
        return places == [0, 3] or (places == [3] and is_zero(node.args[0]))
    return False


def is_zero(value: Any) -> bool:
    """True for zeros that a node makes."""
    if not isinstance(value, fx.Node):
        return False
    if value.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default):
        return True
    if value.target in (aten.full.default, aten.full_like.default):
        return bool(value.args[1] == 0)
    return value.target is aten.scalar_tensor.default and bool(value.args[0] == 0)


class Tangent:
    """Where the gradient of the loss enters a region.

    Attributes:
        node: the last scalar through which all of it comes; None: the region has no gradient.
        counts: gradients below what float16 can hold are divided by how many labels count.
    """

    def __init__(self, region: RowRegion) -> None:
        """Find it.

        Raises:
            NotByRowsError: it is no scalar, or gradients are not linear in it.
        """
        self.region = region
        self._depends: dict[fx.Node, bool] = {}
        given = [n for n in outside(region) if self._on_tangents(n)]
        self.node: fx.Node | None = self._entry(given)
        self._scaled: dict[fx.Node, bool] = {}
        for node in sorted(region.forms):
            self._check(node)
        means = any(n.target is NLL and n.args[3] == MEAN for n in region.forms)
        half = any(n.meta["val"].dtype is torch.float16 for n in region.forms if self.scales(n))
        self.counts: bool = means and half

    def scales(self, node: fx.Node) -> bool:
        """True if the value of `node` is proportional to the tangent."""
        if node is self.node:
            return True
        if node.op != "call_function" or tags.get(node).phase != "backward":
            return False
        if node not in self._scaled:
            constant = node.target in CONSTANT
            self._scaled[node] = not constant and any(map(self.scales, node.all_input_nodes))
        return self._scaled[node]

    def _on_tangents(self, node: fx.Node) -> bool:
        """True if `node` is computed from a gradient that arrives at an output."""
        if node.op == "placeholder":
            return tags.get(node).role == "tangent"
        if node not in self._depends:
            self._depends[node] = tags.get(node).phase == "backward" and any(
                map(self._on_tangents, node.all_input_nodes)
            )
        return self._depends[node]

    def _entry(self, given: list[fx.Node]) -> fx.Node | None:
        if not given:
            return None
        upward = above(given, None, self._on_tangents)
        for node in sorted(upward, reverse=True):
            rest = above(given, node, self._on_tangents)
            if not any(n.op == "placeholder" for n in rest):
                if node.meta["val"].dim() == 0:
                    return node
                break
        raise NotByRowsError(
            "gradients arrive at it in several ways, which only backward brings together: return "
            "one loss, the sum of its parts"
        )

    def _check(self, node: fx.Node) -> None:
        """See that `node`, and what scalars it is given in backward, are linear in the tangent."""
        todo = [node]
        for each in todo:
            if each is self.node or not self.scales(each):
                continue
            if not is_linear(each, self.scales):
                raise NotByRowsError(
                    f"{each.target} {tags.place(each)} is not linear in the gradient that arrives"
                )
            todo += [n for n in each.all_input_nodes if n not in self.region.forms]


def above(
    nodes: Iterable[fx.Node], stop: fx.Node | None, wanted: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """`nodes` and what they are computed from, as far as it is `wanted`, but not through `stop`."""
    found: set[fx.Node] = set()
    todo = [node for node in nodes if node is not stop]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [n for n in node.all_input_nodes if n is not stop and wanted(n)]
    return found
