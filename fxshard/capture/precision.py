"""Mixed precision at capture: in which dtypes the trace sees parameters, buffers and inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx, nn

from fxshard._torch import graphs, trees
from fxshard.errors import CaptureError
from fxshard.ir import tags
from fxshard.ir.program import Program
from fxshard.ir.units import Unit, buffer_dtypes

aten: Any = torch.ops.aten


def traced_dtypes(model: nn.Module, units: tuple[Unit, ...]) -> dict[int, torch.dtype | None]:
    """Identity of each parameter and buffer -> its dtype if it is not traced as it is stored."""
    found = {
        alias: param.compute_dtype
        for unit in units
        for param in unit.params
        for alias in param.aliases
        if param.compute_dtype is not param.dtype
    }
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found |= buffer_dtypes(units, buffers)
    named = (*model.named_parameters(remove_duplicate=False), *buffers.items())
    return {id(tensor): found.get(name) for name, tensor in reversed(named)}  # by its first name


@contextlib.contextmanager
def casting(model: nn.Module, units: tuple[Unit, ...]) -> Iterator[None]:
    """While the block runs, the modules of each unit but the root cast their inputs and outputs.

    As FSDP2's pre- and post-forward hooks do
    (torch/distributed/fsdp/_fully_shard/_fsdp_state.py).
    """
    handles: list[Any] = []
    for unit in units[1:]:
        precision = unit.precision
        for module in map(model.get_submodule, unit.fqns):
            if precision.cast_inputs and precision.param_dtype is not None:
                hook = _cast_inputs(precision.param_dtype)
                handles.append(
                    module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                )
            if precision.output_dtype is not None:
                handles.append(module.register_forward_hook(_cast_output(precision.output_dtype)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def recurrent_autocast() -> Iterator[None]:
    """Inside, recurrent layers under autocast compute in its dtype, hidden states included.

    Eager's kernels do: autocast casts all operands of ``mkldnn_rnn_layer``, which runs LSTMs on the
    CPU, and of cuDNN's (aten/src/ATen/autocast_mode.cpp). A trace takes the layers apart first, and
    autocast then casts their linears alone.
    """

    def enter(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if not isinstance(module, nn.RNNBase) or not args or not isinstance(args[0], torch.Tensor):
            return None
        device = args[0].device.type
        fused = device == "cuda" or isinstance(module, nn.LSTM)
        if not fused or not torch.is_autocast_enabled(device) or args[0].dtype is torch.float64:
            return None
        return cast_floating(args, torch.get_autocast_dtype(device))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(enter)
    try:
        yield
    finally:
        handle.remove()


def keep_wide_gradients(program: Program) -> None:
    """Let no gradient be rounded to the dtype of its parameter where it is reduced in a wider one.

    An operator that mixes a low-precision parameter with fp32 makes an fp32 gradient, which
    autograd casts, and sums with others, in the parameter's dtype. FSDP2 does so too before torch
    2.15, and leaves both out since then (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py,
    ``_set_unsharded_grad_dtypes``).
    """
    values = program.values
    for i, result in enumerate(program.results):
        param = program.params.get(result.name) if result.kind == "grad" else None
        if param is not None:
            wide = program.units[param.unit].precision.reduce_dtype or param.dtype
            if wide.itemsize > param.compute_dtype.itemsize:
                values[i] = _uncast(program, values[i])
    before, program.values = program.values, values
    for grad in dict.fromkeys(before):
        _erase_unread(program.graph, grad)


def _uncast(program: Program, grad: fx.Node) -> fx.Node:
    """`grad` without the casts that autograd made of it, or of what it is the sum of."""
    if graphs.casts_gradient(grad):
        return tags.source(grad)
    if not graphs.sums_gradients(grad):
        return grad
    summed = cast("tuple[fx.Node, fx.Node]", grad.args)
    parts = tuple(_uncast(program, part) for part in summed)
    if parts == summed:
        return grad
    with program.graph.inserting_after(grad):
        total = program.graph.call_function(aten.add.Tensor, parts)
    first, second = (part.meta["val"] for part in parts)
    dtype = torch.promote_types(first.dtype, second.dtype)
    return tags.put(total, tags.get(grad), program.fake(tuple(first.shape), dtype, first.device))


def _erase_unread(graph: fx.Graph, grad: fx.Node) -> None:
    """Erase a cast or a sum that `_uncast` left without a reader, and what only that read."""
    if not grad.users and (graphs.casts_gradient(grad) or graphs.sums_gradients(grad)):
        parts = grad.all_input_nodes
        graph.erase_node(grad)
        for part in parts:
            _erase_unread(graph, part)


def root_inputs(units: tuple[Unit, ...], inputs: Any) -> Any:
    """``(args, kwargs)`` of the model as its root unit computes with them."""
    precision = units[0].precision
    if not precision.cast_root_inputs or precision.param_dtype is None:
        return inputs
    return cast_floating(inputs, precision.param_dtype)


def root_output(units: tuple[Unit, ...], output: Any) -> Any:
    """The result of the model in the dtype that its root unit's policy asks for."""
    dtype = units[0].precision.output_dtype
    return output if dtype is None else cast_floating(output, dtype)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with every floating tensor in it cast to `dtype`."""
    leaves, spec = trees.tree_flatten(tree)
    return trees.tree_unflatten(
        [
            leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
            for leaf in leaves
        ],
        spec,
    )


def _cast_inputs(dtype: torch.dtype) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating((args, kwargs), dtype)

    return hook


def _cast_output(dtype: torch.dtype) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floating(output, dtype)

    return hook


aten = torch.ops.aten
# Products of which torch's shape rules compare no dtypes, as its kernels do.
_PRODUCTS = {aten.mm.default, aten.mv.default, aten.dot.default, aten.bmm.default}


def refuse_mixed(func: Any, args: tuple[Any, ...], line: str) -> None:
    """Refuse a product of tensors of two dtypes, which would fail when the program runs.

    Raises:
        CaptureError: in eager's words, and with the place.
    """
    if func in _PRODUCTS and args[0].dtype is not args[1].dtype:
        one, other = (str(arg.dtype).removeprefix("torch.") for arg in args[:2])
        raise CaptureError(
            f"{func.overloadpacket}: both operands must have the same dtype, as in eager, and are "
            f"{one} and {other}{line and ', at ' + line}. Cast one of them (x.to(y.dtype)); of a "
            f"module with mixed_precision, let its policy cast what it is given."
        )
