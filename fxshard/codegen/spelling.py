"""How emitted code spells an operator: as Python's own binding of it, where there is one.

``x.view([2, 3])`` and ``torch.mm(x, y)`` reach the same kernels as ``torch.ops.aten.view.default``
and ``torch.ops.aten.mm.default`` in half the time: they parse their arguments in C++, where
`OpOverload.__call__` (torch/_ops.py) goes through the operator's boxed schema. About half of the
operators of a transformer's step are views, whose cost is this call and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxshard.ir import domain

aten: Any = torch.ops.aten

# Spelled ``torch.name(arguments)``: the arguments of the operator, in its order and by its names.
FUNCTIONS = frozenset(
    {
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(aten.neg.default, aten.rsqrt.default, aten.sqrt.default, aten.pow.Tensor_Scalar),
        *(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.cat.default),
        *(aten.stack.default, aten.clone.default, aten.tanh.default, aten.sigmoid.default),
        *(aten.relu.default, aten.exp.default, aten.log.default, aten.abs.default),
        *(aten.cos.default, aten.sin.default, aten.where.self, aten.embedding.default),
        *(aten.native_layer_norm.default, aten.native_group_norm.default),
        *(aten.native_dropout.default, aten._softmax.default, aten._log_softmax.default),
        *(aten.convolution.default, aten.masked_fill.Scalar),
    }
)

# Python's bindings turn a number into a tensor before the operator begins, where no dispatch mode
# sees it: such a call goes to the operator itself.
WITH_NUMBERS = frozenset(
    {
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor),
    }
)

# How sizes are computed from sizes.
INFIX: dict[Any, str] = {
    **{operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/"},
    **{operator.floordiv: "//", operator.mod: "%", operator.pow: "**"},
}

# Spelled ``x.name(other arguments)``.
METHODS = frozenset(
    {
        *(aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default),
        *(aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.select.int),
        *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor),
        *(aten.neg_.default, aten.rsqrt_.default, aten.sqrt_.default, aten.pow_.Scalar),
        *(aten.exp_.default, aten.log_.default, aten.abs_.default, aten.tanh_.default),
        *(aten.sigmoid_.default, aten.relu_.default, aten.masked_fill_.Scalar),
        aten.copy_.default,
    }
)


def spelled(node: fx.Node, source_of: Callable[[Any], str]) -> str | None:
    """The call of `node` as an expression, or None if it is best called as the operator itself.

    Args:
        node: a call of an operator.
        source_of: an argument as source text.
    """
    if node.target is aten.slice.Tensor:
        return _narrowed(node, source_of)
    if node.target in INFIX:
        return f" {INFIX[node.target]} ".join(map(source_of, node.args))
    if node.target is aten.sym_size.int:
        return f"{source_of(node.args[0])}.size({node.args[1]})"
    if node.target in WITH_NUMBERS and not isinstance(node.args[1], fx.Node):
        return None
    arguments = [source_of(argument) for argument in node.args]
    arguments += [f"{key}={source_of(value)}" for key, value in node.kwargs.items()]
    if node.target in FUNCTIONS:
        return f"torch.{_name(node)}({', '.join(arguments)})"
    if node.target in METHODS:
        first, *rest = arguments
        return f"{first}.{_name(node)}({', '.join(rest)})"
    return None


def _name(node: fx.Node) -> str:
    """``transpose`` of ``aten.transpose.int``."""
    return str(node.target).split(".")[1]


def _narrowed(node: fx.Node, source_of: Callable[[Any], str]) -> str | None:
    """A slice of known length and step 1 as a `torch.narrow`."""
    if domain.LAYOUT in node.meta or domain.LAYOUT in node.args[0].meta:  # type: ignore[union-attr]
        return None
    if node.kwargs or (len(node.args) > 4 and node.args[4] != 1):
        return None
    if isinstance(node.args[2] if len(node.args) > 2 else 0, fx.Node):  # a value of a tensor
        return None
    source: Any = node.args[0]
    dim, start = (int(value or 0) for value in (*node.args[1:3], 0, 0)[:2])  # type: ignore[arg-type]
    rows = source.meta["val"].shape[dim]
    begin = max(start + rows, 0) if start < 0 else min(start, rows)
    length = node.meta["val"].shape[dim]  # the operator has clamped the end
    return f"{source_of(source)}.narrow({dim}, {begin}, {length})"
