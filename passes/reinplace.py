"""reinplace: write a result over an input that dies with it, where the operator may."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import torch
from torch import fx

from fxshard.capture import shapes
from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program

aten: Any = torch.ops.aten

# Functional operator -> the one that overwrites its first argument. Elementwise, so each element
# is read before it is written (ATen/native/TensorIterator: an output may be an input, as it is);
# or a matrix product that is added to it (BLAS: beta of gemm, ATen/native/LinearAlgebra.cpp).
OVER_FIRST: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.neg.default: aten.neg_.default,
    aten.rsqrt.default: aten.rsqrt_.default,
    aten.sqrt.default: aten.sqrt_.default,
    aten.exp.default: aten.exp_.default,
    aten.log.default: aten.log_.default,
    aten.abs.default: aten.abs_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.relu.default: aten.relu_.default,
    aten.silu.default: aten.silu_.default,
    aten.gelu.default: aten.gelu_.default,
    aten.addmm.default: aten.addmm_.default,
}
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)

# Functional operator -> its form with an output argument, and that argument's name; the incoming
# gradient, its first argument, may be it. Both softmaxes sum a row before they write it
# (aten/src/ATen/native/cpu/SoftMaxKernel.cpp, cuda/SoftMax.cu).
OVER_GRADIENT: dict[Any, tuple[Any, str]] = {
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
}
ROW_WISE = (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)


@dataclasses.dataclass(frozen=True)
class Reinplace:
    """An elementwise operator writes over the input that nothing reads after it.

    The step then holds one tensor less at such an operator (of four of the logits' size at the
    backward of a loss, one goes), and the allocator is asked less often; results are the same
    bits. Only storages that a compute operator of the same phase has made, and that compute
    operators alone read, are written over: parameters, gradients, the caller's tensors and what a
    collective sends or receives stay as they are. Those of the model's own collectives, and what
    was offloaded and is there again, may be written over after the wait.

    Before::

        %mm = aten.mm(%x, %t)
        %y = aten.add.Tensor(%h, %mm)

    After::

        %mm = aten.mm(%x, %t)
        %y = aten.add_.Tensor(%mm, %h)
    """

    name: ClassVar[str] = "reinplace"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TAGGED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        last: dict[int, int] = {}  # storage -> when it is read last
        makers: dict[int, fx.Node] = {}
        taken: set[int] = set()  # storages that others than compute operators read or write
        for node in program.graph.nodes:
            private = node.op == "call_function" and is_private(node)
            touched = tags.read_ids(node) | tags.storage_ids(node)
            last.update(dict.fromkeys(touched, order[node]))
            for storage in touched:
                makers.setdefault(storage, node)
            if not private:
                taken.update(touched)
        for node in program.phase("forward") + program.phase("backward"):
            over = overwritten(node)
            if tags.get(node).role != "compute" or len(tags.storage_ids(node)) != 1:
                continue
            (result,) = tags.storage_ids(node)
            if not over or makers[result] is not node or result in taken:
                continue
            for source in over:
                if not lies_alike(node, source):
                    continue
                (storage,) = tags.storage_ids(source)
                if storage in taken or last[storage] > order[node]:
                    continue
                if tags.get(makers[storage]).phase != tags.get(node).phase:
                    continue
                if any(storage in tags.storage_ids(n) for n in node.all_input_nodes if n != source):
                    continue
                write_over(program, node, source)
                last[storage] = last[result]
                break


def is_private(node: fx.Node) -> bool:
    """True if what `node` touches may be written over once it is done.

    That are operators of compute, and launches of activations: their waits come last.
    """
    if node.target is ops.wait:
        return any(ops.of(tags.source(item)).holds for item in tags.operands(node)[:1])
    made = tags.source(node) if node.target is operator.getitem else node
    return tags.get(node).role == "compute" or ops.of(made).holds


def overwritten(node: fx.Node) -> list[fx.Node]:
    """Arguments that `node` could write its result over, the first choice first."""
    if node.target in OVER_GRADIENT:
        if node.target in ROW_WISE and not _along_rows(node):
            return []
        return [tags.source(node)]
    if node.target not in OVER_FIRST:
        return []
    arguments = node.args[: 1 + (node.target in COMMUTATIVE and not node.kwargs)]
    return [argument for argument in arguments if isinstance(argument, fx.Node)]


def _along_rows(node: fx.Node) -> bool:
    """True if a softmax runs along the last dimension of a contiguous tensor, in its dtype."""
    grad, dim = node.meta["val"], int(node.args[2])  # type: ignore[arg-type]
    same = node.args[3] is tags.source(node).meta["val"].dtype
    return bool(same and grad.is_contiguous() and dim % grad.dim() == grad.dim() - 1)


def lies_alike(node: fx.Node, source: fx.Node) -> bool:
    """True if the result of `node` would lie in all of the storage of `source` as that does."""
    made, val = node.meta["val"], source.meta["val"]
    if not isinstance(val, torch.Tensor) or len(tags.storage_ids(source)) != 1:
        return False
    alike = shapes.same_layout(node, source)
    return bool(
        alike
        and shapes.fills_storage(source)
        and made.dtype is val.dtype
        and made.device == val.device
    )


def write_over(program: Program, node: fx.Node, source: fx.Node) -> None:
    """Let `node` write its result over `source`."""
    before = tags.storage_ids(node)
    if node.target in OVER_GRADIENT:
        target, name = OVER_GRADIENT[node.target]
        node.kwargs = {**node.kwargs, name: source}
    else:
        target = OVER_FIRST[node.target]
        if node.args[0] is not source:  # commutative
            node.args = (source, node.args[0])
    node.target = target
    node.meta["val"] = source.meta["val"]
    program.refresh_views(node, before)
