"""The joint graph of forward and backward, and what decides which operators are in it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._decomp.decompositions as _decompositions
import torch._functorch._aot_autograd.collect_metadata_analysis as _analysis
import torch._functorch._aot_autograd.descriptors as _desc
import torch._functorch.config as functorch_config
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "KEPT_BY_FORWARD",
    "OpOverload",
    "aten_kernels",
    "aten_names",
    "aten_operator",
    "attention_order",
    "compiling",
    "export_joint",
    "exporting",
    "higher_order_operator",
    "input_source",
    "of_name",
    "operator_named",
    "output_source",
]


# What fake tensors raise when Python control flow reads a tensor's value.
DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


# How texts begin that torch raises where a trace meets a tensor that another trace has made.
KEPT_BY_FORWARD = (
    "Unexpected fake buffer",
    "Attempting to use FunctionalTensor on its own",
    "Mixing fake modes NYI",
    "cannot find FakeTensor",  # torch 2.11
)


def export_joint(
    module: nn.Module, args: tuple[Any, ...], for_cuda: bool = False
) -> tuple[fx.GraphModule, list[Any], list[Any]]:
    """Trace forward and backward of `module` into one ATen graph, decomposed only where that is
    what eager runs.

    Args:
        module, args: the call.
        for_cuda: the tensors are on the CPU, but what eager runs on CUDA is wanted.

    Returns:
        The graph module; the descriptor of each placeholder; the descriptor of each output.
        (torch/_functorch/aot_autograd.py, ``aot_export_joint_with_descriptors``)
    """
    with (
        contextlib.ExitStack() as stack,
        _recurrent_as_in_eager(),
        _kernels_of_eager(),
        _linalg_checks_as_operators(),
        _tangents_alone(),
    ):
        joint = aot_export_joint_with_descriptors(
            stack,
            module,
            args,
            decompositions=_DECOMPOSED if for_cuda else _DECOMPOSED | _AS_ON_CPU,
        )
        graph_module = joint.graph_module
    placeholders = [n.meta["desc"] for n in graph_module.graph.find_nodes(op="placeholder")]
    (output,) = graph_module.graph.find_nodes(op="output")
    return graph_module, placeholders, list(output.meta["desc"])


@contextlib.contextmanager
def _tangents_alone() -> Iterator[None]:
    """Trace gradients of outputs as autograd passes them: dense, in storages of their own.

    Torch traces them with the strides and storage of the outputs, also where these are views of a
    larger tensor; or, in torch 2.11, with those of contiguous tensors.
    (torch/_functorch/_aot_autograd/collect_metadata_analysis.py, ``traced_tangents``)
    """
    analysis: Any = _analysis
    coerced = analysis.coerce_tangent_and_suggest_memory_format

    def alone(tangent: torch.Tensor) -> Any:
        return coerced(torch.empty_like(tangent))

    analysis.coerce_tangent_and_suggest_memory_format = alone
    try:
        with functorch_config.patch(guess_tangent_strides_as_outputs=True):
            yield
    finally:
        analysis.coerce_tangent_and_suggest_memory_format = coerced


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """As eager on the CPU, where dropout multiplies by ``mask * scale`` in the tensor's dtype.

    Tracing takes the fused operator for it (torch/_decomp/decompositions.py, ``dropout``), whose
    backward rounds otherwise below fp32.
    """
    if grad.device.type != "cpu" or grad.element_size() >= 4:
        return NotImplemented
    return grad * (mask.to(grad.dtype) * scale)


@contextlib.contextmanager
def _recurrent_as_in_eager() -> Iterator[None]:
    """Trace ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` so that they compute what eager computes.

    Torch's decompositions do not, in two places: dropout between layers is never applied
    (``_rnn_helper`` compares the number of layers with that of the layer the wrong way round), and
    an LSTM on the CPU whose input needs no gradient becomes oneDNN's inference kernel, whatever its
    parameters need: its backward fails, and its workspace counts as 0 bytes.
    (torch/_decomp/decompositions.py, ``_rnn_helper``, ``select_one_layer_lstm_function``)
    """
    one_layer, choose = _decompositions._rnn_helper, _decompositions.select_one_layer_lstm_function

    def layers(
        input: torch.Tensor,
        hidden: Sequence[Any],
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer_fn: Any,
    ) -> tuple[torch.Tensor, list[Any]]:
        directions = 2 if bidirectional else 1
        output, finals = input.transpose(0, 1) if batch_first else input, []
        for i in range(num_layers):
            if i and train and dropout:
                output = torch.dropout(output, dropout, train=True)
            own = slice(i * directions, (i + 1) * directions)
            how = (has_biases, 1, 0.0, train, bidirectional, False, layer_fn)
            output, final = one_layer(output, hidden[own], params[own], *how)
            finals += final
        return output.transpose(0, 1) if batch_first else output, finals

    def lstm(input: torch.Tensor, hidden: Any, *how: Any, **more: Any) -> Any:
        output, finals = _decompositions.one_layer_lstm(input, hidden, *how, **more)
        pairs = zip(finals, hidden, strict=True)  # torch 2.11 leaves them a dimension of 1
        return output, tuple(h if h.dim() == of.dim() else h.squeeze(0) for h, of in pairs)

    def always_decomposed(*_: Any) -> Any:
        return lstm

    _decompositions._rnn_helper = layers
    _decompositions.select_one_layer_lstm_function = always_decomposed
    try:
        yield
    finally:
        _decompositions._rnn_helper = one_layer
        _decompositions.select_one_layer_lstm_function = choose


@contextlib.contextmanager
def _kernels_of_eager() -> Iterator[None]:
    """Trace operators as the kernels that eager runs, where torch has decompositions in front.

    ``interpolate`` is traced as dozens of index operators and sums, which save more and round
    otherwise; in C++ the size of its result is computed from plain numbers, which would fix open
    sizes. The decomposition of ``multilabel_margin_loss`` is wrong: it counts labels after the end
    of a target too. That of ``dropout`` draws random numbers where it drops all, and eager none.
    (torch/_decomp/decompositions.py, ``py_impl`` of ``upsample_*`` and of the losses;
    torch/_refs/nn/functional; `OpOverload.py_kernels`; ATen/native/UpSample.cpp,
    ``compute_output_size``)
    """
    names = [n for n in dir(torch.ops.aten) if n.startswith(("upsample", "_upsample"))]
    packets = [getattr(torch.ops.aten, name) for name in (*names, *_DECOMPOSED_IN_FRONT)]
    dropout = torch.ops.aten.dropout.default
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    before = {overload: dict(overload.py_kernels) for overload in (*overloads, dropout)}
    try:
        for overload in before:
            overload.py_kernels.clear()
            overload._dispatch_cache.clear()
        for packet in packets:
            if "vec" in packet.overloads():
                key = torch._C.DispatchKey.CompositeImplicitAutograd
                packet.vec.py_kernels[key] = functools.partial(_upsampled, packet)
        for key, decomposed in before[dropout].items():
            dropout.py_kernels[key] = functools.partial(_dropped, decomposed)
        yield
    finally:
        for overload, kernels in before.items():
            overload.py_kernels.clear()
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


_DECOMPOSED_IN_FRONT = (
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "hardshrink",
    "softshrink",
)


def _dropped(decomposed: Any, input: torch.Tensor, p: float, train: bool) -> Any:
    """``dropout``, with p=1 as eager runs it (ATen/native/Dropout.cpp, ``_dropout_impl``)."""
    if train and p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    return decomposed(input, p, train)


def _upsampled(packet: Any, image: torch.Tensor, size: Any, *rest: Any) -> Any:
    """``upsample_*.vec`` by the operator that takes the size of the result.

    Args: `rest`: flags such as ``align_corners``, and the factors in place of `size`.
    """
    *flags, factors = rest
    size = _decompositions.upsample_compute_output_size(image.size(), size, factors)
    return packet.default(image, size, *flags, *(factors or [None] * len(size)))


_LINALG_CHECK = torch.ops.aten._linalg_check_errors.default
fx.node.has_side_effect(_LINALG_CHECK)  # it raises where a matrix is singular: never dead code


@contextlib.contextmanager
def _linalg_checks_as_operators() -> Iterator[None]:
    """Trace what ``torch.linalg.inv`` and its kin check as the operator that eager runs.

    Torch makes it an effect, with a token that orders effects: no operator of a program.
    (torch/_higher_order_ops/effects.py, ``_register_effectful_op``; not before torch 2.12)
    """
    holder = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    before = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(before)


def _drawn_between(like: torch.Tensor, first: int, end: int | None, **options: Any) -> Any:
    """``random_(first, end)``, by the operator that runs the same kernel: torch.fx writes code for
    this one that is none, as the name of the overload, ``from``, is a keyword of Python.
    """
    if end is None:
        return NotImplemented
    return torch.ops.aten.randint_like.low_dtype(like, first, end)


_DECOMPOSED = {getattr(torch.ops.aten.random, "from"): _drawn_between}
_AS_ON_CPU = {torch.ops.aten.native_dropout_backward.default: _dropout_backward}


def input_source(desc: Any) -> tuple[str, Any]:
    """What a placeholder of the joint graph stands for.

    Returns:
        ``("param" | "buffer", fqn)``, ``("inner param", (fqn, name))`` of a tensor inside of one of
        a subclass, ``("input", flat index)``, ``("tangent", source of the output)`` or ``("other",
        text)``.
    """
    if isinstance(desc, _desc.ParamAOTInput):
        return "param", desc.target
    if isinstance(desc, _desc.BufferAOTInput):
        return "buffer", desc.target
    if isinstance(desc, _desc.PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, _desc.SubclassGetAttrAOTInput):
        kind, source = input_source(desc.base)
        return f"inner {kind}", (source, desc.attr)
    if isinstance(desc, _desc.TangentAOTInput):
        return "tangent", output_source(desc.output)
    return "other", str(desc)


def output_source(desc: Any) -> tuple[str, Any]:
    """What an output of the joint graph stands for.

    Returns:
        ``("output", flat index)``, ``("grad", source of the input)``, ``("mutation", source of
        the input)``, ``("none", None)`` or ``("other", text)``.
    """
    if desc is None:
        return "none", None
    if isinstance(desc, _desc.PlainAOTOutput):
        return "output", desc.idx
    if isinstance(desc, _desc.GradAOTOutput):
        return "grad", input_source(desc.grad_of)
    if isinstance(desc, _desc.InputMutationAOTOutput):
        return "mutation", input_source(desc.mutated_input)
    return "other", str(desc)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true, and nothing else (``is_exporting`` stays off).

    Models ask it to leave out side effects that a trace cannot hold.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def exporting() -> bool:
    """True inside torch.export; where Dynamo traces this too.

    Of ``torch.compiler.is_exporting`` Dynamo of torch 2.11 makes True under torch.compile as well;
    that of 2.13 reads the flag (torch/_dynamo/variables/torch.py, ``tracing_state_functions``).
    """
    return torch.compiler._is_exporting_flag


def higher_order_operator(error: BaseException) -> str | None:
    """The name of the higher-order operator (``torch.cond``) that a trace has no rule for.

    (torch/_ops.py, ``HigherOrderOperator.dispatch``)
    """
    found = re.search(r"no rule registered for HigherOrderOperator (\w+)", str(error))
    return found and found[1]


def of_name(desc: Any, name: str) -> Any:
    """The descriptor `desc` of a parameter or buffer, of its gradient or of its change in forward,
    for the one that is called `name`.
    """
    if isinstance(desc, (_desc.ParamAOTInput, _desc.BufferAOTInput)):
        return dataclasses.replace(desc, target=name)
    if isinstance(desc, _desc.GradAOTOutput):
        return dataclasses.replace(desc, grad_of=of_name(desc.grad_of, name))
    if isinstance(desc, _desc.InputMutationAOTOutput):
        return dataclasses.replace(desc, mutated_input=of_name(desc.mutated_input, name))
    return desc


@contextlib.contextmanager
def aten_kernels(kernels: dict[tuple[str, str], Callable[..., Any] | None]) -> Iterator[None]:
    """Give ATen operators other kernels while the block runs, in the whole process.

    Args:
        kernels: ``(operator, dispatch key)``, such as ``("rms_norm", "AutogradCPU")``, to the
            kernel; None: the key does nothing for that operator.

    (torch/library.py, ``Library._destroy``; what the Python dispatcher has looked up before is
    kept in ``OpOverload._dispatch_cache``, torch/_ops.py)
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of overridden kernels, which is intended
            for (name, key), kernel in kernels.items():
                there = kernel or torch.library.fallthrough_kernel
                library.impl(name, there, key, allow_override=True)
                aten_operator(name)._dispatch_cache.clear()
        yield
    finally:
        library._destroy()
        for name, _ in kernels:
            aten_operator(name)._dispatch_cache.clear()


def aten_operator(name: str) -> OpOverload:
    """``aten::<name>``; a name without a dot is its default overload."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def operator_named(name: str) -> OpOverload | None:
    """The operator that prints as `name`, such as ``aten.mm.default``; None if there is none.

    Looks in torch's registry: imports nothing, and finds no functions.
    """
    parts = name.split(".")
    if len(parts) != 3 or not all(map(str.isidentifier, parts)):
        return None
    namespace, packet, overload = parts
    try:
        torch._C._get_schema(f"{namespace}::{packet}", "" if overload == "default" else overload)
    except RuntimeError:
        return None
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found if isinstance(found, OpOverload) else None


def aten_names(key: str) -> list[str]:
    """Names, as `aten_operator` takes them, of the operators that have a kernel for a key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    return [n.removeprefix("aten::") for n in names if n.startswith("aten::") and has(n, key)]


def attention_order() -> list[int]:
    """The values of ``torch.nn.attention.SDPBackend`` in the order in which they are tried.

    (``sdpa_kernel(..., set_priority=True)`` in torch/nn/attention/__init__.py sets it)
    """
    return [int(backend) for backend in torch._C._get_sdp_priority_order()]
