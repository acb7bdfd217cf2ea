"""The only importer of torch's private modules.

Each name below is one use of something torch does not promise. `tests/test_compat.py` holds a
contract test for each, so that a torch upgrade says which one changed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
import torch._decomp.decompositions as _decompositions
import torch._functorch._aot_autograd.collect_metadata_analysis as _analysis
import torch._functorch._aot_autograd.descriptors as _desc
import torch._library.autograd as _library_autograd
import torch.distributed as dist
import torch.utils.checkpoint as _checkpoint
from torch import fx, nn
from torch._dynamo.utils import preserve_rng_state as rng_kept
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConfig,
    FakeTensorMode,
    is_fake,
)
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp.wrap import _Policy
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.fx.graph import _PyTreeCodeGen
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec
from torch.utils._sympy.functions import FloorDiv, Max, Mod

from fxshard import files

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "FloorDiv",
    "Max",
    "Mod",
    "OpOverload",
    "ShapeEnv",
    "TorchDispatchMode",
    "TreeSpec",
    "checkpoints_inline",
    "compiling",
    "export_joint",
    "fake_process_group",
    "input_source",
    "is_fake",
    "output_source",
    "rng_kept",
    "suggest_memory_format",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_unflatten",
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


class _Record:
    """A dataclass instance on its way into a tree: pytree knows dataclasses only by registration,
    and registering a user's class would change how all of torch treats it.
    """

    def __init__(self, value: Any) -> None:
        self.type = type(value)
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        self.fields = {name: _opened(getattr(value, name)) for name in names}


def _record_leaves(record: _Record) -> tuple[list[Any], Any]:
    return list(record.fields.values()), (record.type, tuple(record.fields))


def _record_leaves_with_path(record: _Record) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, context = _record_leaves(record)
    keys = [_pytree.GetAttrKey(name) for name in context[1]]
    return list(zip(keys, leaves, strict=True)), context


def _record_rebuilt(values: Any, context: Any) -> Any:
    """The dataclass itself, without running its ``__init__`` again."""
    made = object.__new__(context[0])
    for name, value in zip(context[1], values, strict=True):
        object.__setattr__(made, name, value)
    return made


_pytree.register_pytree_node(
    _Record, _record_leaves, _record_rebuilt, flatten_with_keys_fn=_record_leaves_with_path
)


def _is_record(leaf: Any) -> bool:
    return hasattr(type(leaf), "__dataclass_fields__")


def _opened(tree: Any) -> Any:
    """`tree` with every dataclass instance that pytree takes for a leaf as a `_Record`."""
    leaves, spec = _pytree.tree_flatten(tree)
    return tree_unflatten([_Record(x) if _is_record(x) else x for x in leaves], spec)


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of nested containers; dataclass instances are containers too."""
    leaves, spec = _pytree.tree_flatten(tree)
    if any(map(_is_record, leaves)):
        return _pytree.tree_flatten(_opened(tree))
    return leaves, spec


def tree_unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """What `tree_flatten` took apart; torch's makes a plain tuple of a `torch.Size`."""
    if not _has_sizes(spec):
        return _pytree.tree_unflatten(leaves, spec)
    return _unflattened(iter(leaves), spec)


def _has_sizes(spec: TreeSpec) -> bool:
    return spec.type is torch.Size or any(map(_has_sizes, spec.children()))


def _unflattened(leaves: Iterator[Any], spec: TreeSpec) -> Any:
    if spec.is_leaf():
        return next(leaves)
    parts = [_unflattened(leaves, child) for child in spec.children()]
    if spec.type is torch.Size and all(isinstance(part, (int, torch.SymInt)) for part in parts):
        return torch.Size(parts)
    return _pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)


def exchanged(tree: Any, others: dict[int, Any]) -> Any:
    """`tree` with other leaves, by the ``id`` of those that it holds."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([others.get(id(leaf), leaf) for leaf in leaves], spec)


def tree_flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    """As `tree_flatten`, each leaf with its path of keys."""
    return _pytree.tree_flatten_with_path(_opened(tree))


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
            decompositions=None if for_cuda else _AS_ON_CPU,
        )
        graph_module = joint.graph_module
    placeholders = [n.meta["desc"] for n in graph_module.graph.find_nodes(op="placeholder")]
    (output,) = graph_module.graph.find_nodes(op="output")
    return graph_module, placeholders, list(output.meta["desc"])


@contextlib.contextmanager
def _tangents_alone() -> Iterator[None]:
    """Trace gradients of outputs as autograd hands them over: dense, in storages of their own.

    Torch traces them as what the outputs are: with gaps, and in the storage of all of it, where
    those are parts of something larger.
    (torch/_functorch/_aot_autograd/collect_metadata_analysis.py, ``traced_tangents``)
    """
    analysis: Any = _analysis
    coerced = analysis.coerce_tangent_and_suggest_memory_format

    def alone(tangent: torch.Tensor) -> Any:
        return coerced(torch.empty_like(tangent))

    analysis.coerce_tangent_and_suggest_memory_format = alone
    try:
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

    def always_decomposed(*_: Any) -> Any:
        return _decompositions.one_layer_lstm

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
    sizes. The decomposition of ``multilabel_margin_loss`` is wrong: it counts labels behind the
    end of a target too.
    (torch/_decomp/decompositions.py, ``py_impl`` of ``upsample_*`` and of the losses;
    torch/_refs/nn/functional; `OpOverload.py_kernels`; ATen/native/UpSample.cpp,
    ``compute_output_size``)
    """
    names = [n for n in dir(torch.ops.aten) if n.startswith(("upsample", "_upsample"))]
    packets = [getattr(torch.ops.aten, name) for name in (*names, *_DECOMPOSED_IN_FRONT)]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    before = [(overload, dict(overload.py_kernels)) for overload in overloads]
    try:
        for overload, _ in before:
            overload.py_kernels.clear()
            overload._dispatch_cache.clear()
        for packet in packets:
            if "vec" in packet.overloads():
                key = torch._C.DispatchKey.CompositeImplicitAutograd
                packet.vec.py_kernels[key] = functools.partial(_upsampled, packet)
        yield
    finally:
        for overload, kernels in before:
            overload.py_kernels.clear()
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


_DECOMPOSED_IN_FRONT = (
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "hardshrink",
    "softshrink",
)


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


_AS_ON_CPU = {torch.ops.aten.native_dropout_backward.default: _dropout_backward}


def input_source(desc: Any) -> tuple[str, Any]:
    """What a placeholder of the joint graph stands for.

    Returns:
        ``("param" | "buffer", fqn)``, ``("input", flat index)``, ``("tangent", source of the
        output)`` or ``("other", text)``.
    """
    if isinstance(desc, _desc.ParamAOTInput):
        return "param", desc.target
    if isinstance(desc, _desc.BufferAOTInput):
        return "buffer", desc.target
    if isinstance(desc, _desc.PlainAOTInput):
        return "input", desc.idx
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


def dynamo(model: nn.Module, args: Any, kwargs: Any, backend: Callable[..., Any]) -> Any:
    """``model(*args, **kwargs)`` by ``torch.compile`` as one graph, which `backend` gets.

    Sizes and numbers that depend on data may be in it. Nothing is kept: the code object that
    Dynamo's cache hangs on is new each time. (torch/_dynamo/config.py)
    """

    import torch._dynamo as _dynamo  # 2 s, so only for those who need it

    def call(model: nn.Module, args: Any, kwargs: Any) -> Any:
        return model(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name="call_of_the_model")
    options = {
        "capture_scalar_outputs": True,
        "capture_dynamic_output_shape_ops": True,
        "allow_rnn": True,
    }
    known = {name: value for name, value in options.items() if hasattr(_dynamo.config, name)}
    with _dynamo.config.patch(known):
        return torch.compile(call, backend=backend, fullgraph=True, dynamic=False)(
            model, args, kwargs
        )


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Initialise torch.distributed's default group as a fake one for the time of the block.

    A fake group runs one rank alone: an all-gather repeats this rank's input, a reduce-scatter
    keeps its chunk (torch/csrc/distributed/c10d/FakeProcessGroup.hpp).
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def current_meta() -> dict[str, Any]:
    """The metadata that new FX nodes inherit now (torch/fx/traceback.py, ``current_meta``)."""
    current: dict[str, Any] = torch.fx.traceback.current_meta
    return current


def with_current_meta(key: str, value: Any) -> Callable[[], None]:
    """Set `key` of the metadata that new FX nodes inherit; the returned call puts it back.

    (torch/fx/traceback.py, ``current_meta``; copied to nodes under ``preserve_node_meta``)
    """
    current = torch.fx.traceback.current_meta
    absent = object()
    before = current.get(key, absent)
    current[key] = value

    def restore() -> None:
        if before is absent:
            current.pop(key, None)
        else:
            current[key] = before

    return restore


_CHECKPOINT = "fxshard_checkpoint"  # key in the "custom" metadata of nodes


@contextlib.contextmanager
def checkpoints_inline() -> Iterator[None]:
    """Let torch.utils.checkpoint call the function it is given, inside a marked region.

    The nodes of the region say so (`checkpoint_of`, `is_saved_by_policy`), and so do the backward
    nodes of these. What is patched are the names that ``checkpoint`` looks up when it is called:
    models hold the function itself (transformers keeps a partial of it).
    (torch/utils/checkpoint.py, ``checkpoint``)
    """
    numbers = itertools.count()

    def without_reentrant(
        function: Any,
        preserve_rng_state: bool = True,
        context_fn: Any = _checkpoint.noop_context_fn,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        forward, _ = context_fn()
        if not isinstance(forward, (contextlib.nullcontext, _checkpoint._CachingTorchDispatchMode)):
            raise TypeError(
                f"torch.utils.checkpoint with a context_fn that gives a {type(forward).__name__}: "
                f"fxshard knows create_selective_checkpoint_contexts only"
            )
        with _checkpoint_region(numbers), forward:
            yield

    def from_2_15(
        function: Any,
        args: Any,
        kwargs: Any,
        *,
        context_fn: Any = _checkpoint.noop_context_fn,
        **_: Any,
    ) -> Iterator[None]:
        return without_reentrant(function, True, context_fn)

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            """In eager nothing inside has a gradient unless a tensor among `args` needs one."""
            _checkpoint.check_backward_validity(args)
            wanted = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            if wanted or not torch.is_grad_enabled():
                with _checkpoint_region(numbers):
                    return function(*args)
            with torch.no_grad():
                outputs = function(*args)
            return _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    patches: list[tuple[Any, str, Any]] = [
        (_checkpoint, "_checkpoint_without_reentrant_generator", without_reentrant),
        (_checkpoint, "CheckpointFunction", Reentrant),
    ]
    if hasattr(_checkpoint, "_checkpoint_without_reentrant_generator_impl"):
        patches.append((_checkpoint, "_checkpoint_without_reentrant_generator_impl", from_2_15))
    composable = sys.modules.get("torch.distributed._composable.checkpoint_activation")
    if composable is not None:  # ``checkpoint(module)``, by hooks
        patches.append((composable, "_checkpoint_without_reentrant_generator", without_reentrant))
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for module, name, value in patches:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextlib.contextmanager
def _checkpoint_region(numbers: Iterator[int]) -> Iterator[None]:
    """Mark new nodes with the next number, unless they are marked already."""
    custom = torch.fx.traceback.current_meta.get("custom") or {}
    restore = with_current_meta("custom", {_CHECKPOINT: next(numbers), **custom})
    try:
        yield
    finally:
        restore()


def checkpoint_of(node: fx.Node) -> int | None:
    """Number of the outermost checkpoint that `node` of a trace ran in, or its forward.

    (``copy_fwd_metadata_to_bw_nodes`` in torch/_functorch/_aot_autograd/utils.py)
    """
    return checkpoint_number(node.meta)


def checkpoint_number(metadata: dict[str, Any]) -> int | None:
    """The same of a node's metadata, or of `current_meta`."""
    number: int | None = (metadata.get("custom") or {}).get(_CHECKPOINT)
    return number


def in_checkpoint(metadata: dict[str, Any], number: int) -> None:
    """Note checkpoint `number` in a node's metadata, in place of the one that it was in."""
    metadata["custom"] = {**metadata["custom"], _CHECKPOINT: number}


def is_saved_by_policy(node: fx.Node) -> bool:
    """True if the policy of a selective checkpoint wants the value of `node` saved.

    To offload is to save: where to is not torch's decision here.
    (``_CachingTorchDispatchMode`` in torch/utils/checkpoint.py writes it)
    """
    policy = _checkpoint.CheckpointPolicy
    recomputed = (None, policy.MUST_RECOMPUTE, policy.PREFER_RECOMPUTE)
    return node.meta.get("recompute") not in recomputed


def takes_flat_inputs(graph: fx.Graph) -> bool:
    """True if the graph's placeholders are the flattened arguments (torch.export's modules)."""
    return isinstance(graph._codegen, _PyTreeCodeGen)


def is_wrap_policy(spec: object) -> bool:
    """True for ``ModuleWrapPolicy`` and its kin of torch.distributed.fsdp.wrap."""
    return isinstance(spec, _Policy)


def run_wrap_policy(policy: Any, model: nn.Module) -> set[nn.Module]:
    """Modules that FSDP1 would wrap under `policy`."""
    return set(policy._run_policy(model, ignored_modules=set(), root_kwargs={}))


def _fake(mode: FakeTensorMode, plain: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``FakeTensor(mode, plain, device)``, of a plain meta tensor that needs no gradient.

    The constructor spends most of its time on its arguments and on attributes that are the same for
    all new fakes; where that is so, it is asked once, and its answer is taken over. A device
    without its index is normalised each time: which one is meant may change.
    (torch/_subclasses/fake_tensor.py, ``FakeTensor.__new__``)
    """
    indexed = device.type == "cpu" or (device.index is not None and device.type != "meta")
    if not indexed or FakeTensorConfig.debug:
        return FakeTensor(mode, plain, device)
    attributes = _attributes(device).copy()
    attributes["fake_mode"] = mode
    fake = torch.Tensor._make_subclass(
        FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__ = attributes
    return fake


@functools.cache
def _attributes(device: torch.device) -> dict[str, Any]:
    """The attributes of a new fake tensor on `device`, of no mode."""
    fake = FakeTensor(FakeTensorMode(), torch.empty((0,), device=_META), device)
    fake.__dict__["fake_mode"] = None
    return fake.__dict__


_META = torch.device("meta")


def fake_empty(
    mode: FakeTensorMode, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What ``torch.empty`` makes under `mode`, without its dispatch: that takes ten times as long.

    Call it outside of `mode`.
    """
    return _fake(mode, torch.empty(shape, dtype=dtype, device=_META), device)


def convolves_with_onednn(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Whether the CPU runs this convolution, of fake tensors, by oneDNN.

    Which kernel it takes depends on dtype, sizes, threads and processor
    (ATen/native/Convolution.cpp, ``use_mkldnn``): torch is asked, with tensors that nobody fills.
    """
    kinds: Any = getattr(torch._C, "_ConvBackend")  # noqa: B009, the stubs call it otherwise
    with _disable_current_modes():
        chosen = torch._C._select_conv_backend(
            *(
                torch.empty_strided(_examples(t.shape), _examples(t.stride()), dtype=t.dtype)
                for t in (input, weight)
            ),
            bias=None,
            bias_sizes=bias_sizes,
            stride=stride,
            padding=padding,
            dilation=dilation,
            transposed=transposed,
            output_padding=output_padding,
            groups=groups,
        )
    # between the two lies the transposed one, which has no name here
    return bool(kinds.Mkldnn.value <= chosen.value <= kinds.MkldnnEmpty.value)


def _examples(sizes: Sequence[Any]) -> list[int]:
    """What open sizes are in the example call; asking for their values would close them."""
    return [n.node.hint if isinstance(n, torch.SymInt) else n for n in sizes]


def fake_view(
    mode: FakeTensorMode, base: torch.Tensor, view: Callable[[torch.Tensor], Any]
) -> torch.Tensor:
    """``view(base)`` of a fake tensor under `mode`, without its dispatch, outside of `mode`."""
    plain = torch.empty((0,), dtype=base.dtype, device=_META)
    plain.set_(base.untyped_storage(), base.storage_offset(), base.size(), base.stride())
    return _fake(mode, view(plain), base.device)


def fake_over(
    mode: FakeTensorMode, like: torch.Tensor, storage: torch.UntypedStorage
) -> torch.Tensor:
    """A fake tensor that lies in `storage` as `like` does in its own, outside of `mode`."""
    plain = torch.empty((0,), dtype=like.dtype, device=_META)
    plain.set_(storage, like.storage_offset(), like.size(), like.stride())
    return _fake(mode, plain, like.device)


# Whether autograd hands a Function its gradients in a list to empty (torch/autograd/function.py);
# where it does not, its caller holds them until backward is over.
BOXED_GRADS = hasattr(torch.autograd.Function, "boxed_grads_call")


# Whether FSDP2, where ``MixedPrecisionPolicy.reduce_dtype`` is None, reduces gradients in the dtype
# of the sharded parameter, as 2.15 does, and not in ``param_dtype``
# (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``unsharded_grad_dtype``).
REDUCES_AS_STORED = hasattr(FSDPParam, "unsharded_grad_dtype")


def sums_gradients(node: fx.Node) -> bool:
    """True if `node` of a trace is autograd's sum of two gradients of one tensor.

    (``_is_gradient_acc`` of a frame, which torch/fx/proxy.py notes)
    """
    return bool(node.meta.get("is_gradient_acc"))


def casts_gradient(node: fx.Node) -> bool:
    """True if `node` of a trace is autograd's cast of a gradient to the dtype of its tensor.

    Its dtype is all that it names; the backward of a cast names layout and device too.
    (torch/csrc/autograd/engine.cpp, ``validate_outputs``; derivatives.yaml, ``_to_copy``)
    """
    is_cast = node.target is torch.ops.aten._to_copy.default
    return is_cast and bool(node.meta.get("autograd_backward")) and set(node.kwargs) == {"dtype"}


def fake_storage(nbytes: int) -> torch.UntypedStorage:
    """A storage without memory, for `fake_of`."""
    return torch.UntypedStorage(nbytes, device=_META)


def fake_of(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A fake tensor in `storage`, which is one of `fake_storage`.

    Without the dispatch of `mode`; call it outside of it.
    """
    plain = torch.empty((0,), dtype=dtype, device=_META)
    plain.set_(storage, offset, shape, stride)
    return _fake(mode, plain, device)


# For a subclass whose operators are not to give the subclass by themselves.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl


def wrapper(
    cls: type[torch.Tensor],
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Any:
    """A tensor of a subclass that has no memory (``Tensor._make_wrapper_subclass``)."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        shape,
        strides=stride,
        storage_offset=offset,
        dtype=dtype,
        device=device,
        requires_grad=requires_grad,
    )


def values_as_text(tensor: torch.Tensor) -> str:
    """The values of a real tensor, also under a fake mode."""
    with outside_modes():
        return str(tensor.tolist())


def higher_order_operator(error: BaseException) -> str | None:
    """The name of the higher-order operator (``torch.cond``) that a trace has no rule for.

    (torch/_ops.py, ``HigherOrderOperator.dispatch``)
    """
    found = re.search(r"no rule registered for HigherOrderOperator (\w+)", str(error))
    return found and found[1]


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """What runs in the block runs on real tensors, whatever traces around it."""
    guard: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return guard


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Outside of the dispatch modes of the user, and of the hooks that torch's own tools have on
    all modules: ``CommDebugMode``, ``FlopCounterMode`` and their kin see what runs, and no trace.

    (torch/nn/modules/module.py, ``_global_forward_hooks``)
    """
    module = torch.nn.modules.module
    hooks: tuple[dict[int, Any], ...] = (
        module._global_forward_pre_hooks,
        module._global_forward_hooks,
        module._global_backward_pre_hooks,
        module._global_backward_hooks,
    )
    before = [dict(each) for each in hooks]
    for each in hooks:
        for number, hook in list(each.items()):
            if getattr(hook, "__module__", "").startswith("torch."):
                del each[number]
    try:
        with outside_modes():
            yield
    finally:
        for each, all_of_them in zip(hooks, before, strict=True):
            now = all_of_them | each
            each.clear()
            each.update(now)


@contextlib.contextmanager
def nodes_made() -> Iterator[dict[fx.Graph, list[fx.Node]]]:
    """Per graph that dead code is eliminated from in the block: the nodes that were there before.

    A trace ends with that, and the names of dead nodes are not given again.
    (torch/_functorch/_aot_autograd/graph_capture.py, ``aot_dispatch_autograd_graph``)
    """
    found: dict[fx.Graph, list[fx.Node]] = {}
    eliminate = fx.Graph.eliminate_dead_code

    def noted(self: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        found.setdefault(self, list(self.nodes))
        return eliminate(self, *args, **kwargs)

    fx.Graph.eliminate_dead_code = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        fx.Graph.eliminate_dead_code = eliminate  # type: ignore[method-assign]


def append_node(
    graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str, type_: Any = None
) -> fx.Node:
    """``graph.create_node``, of a graph that no GraphModule owns, without its look at all constants
    in `args` and `kwargs`: that is for a warning of symbolic ones, and takes half of its time.

    (torch/fx/graph.py, ``Graph.create_node``)
    """
    assert graph.owning_module is None, "hooks of a GraphModule want to see each node"
    names = graph._graph_namespace
    name = names.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, kwargs, type_)
    names._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph with a copy of each node; metadata is copied one level deep.

    (torch/fx/graph.py, ``Graph.node_copy``)
    """
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    of = made.__getitem__
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), of)
        made[node] = append_node(copy, node.op, node.target, args, kwargs, node.name, node.type)
        made[node].meta.update(node.meta)
    return copy


def has_names_of(graph: fx.Graph, nodes: Sequence[fx.Node]) -> bool:
    """True if the names that `graph` has ever given are those of `nodes`."""
    return graph._graph_namespace._used_names == {node.name for node in nodes}


def of_name(desc: Any, name: Any) -> Any:
    """The descriptor `desc` of a parameter or buffer, of its gradient or of its change in forward,
    for the one of another name.

    Args:
        name: called with the old name.
    """
    if isinstance(desc, (_desc.ParamAOTInput, _desc.BufferAOTInput)):
        return dataclasses.replace(desc, target=name(desc.target))
    if isinstance(desc, _desc.GradAOTOutput):
        return dataclasses.replace(desc, grad_of=of_name(desc.grad_of, name))
    if isinstance(desc, _desc.InputMutationAOTOutput):
        return dataclasses.replace(desc, mutated_input=of_name(desc.mutated_input, name))
    return desc


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def symbolic_size(env: ShapeEnv, name: str, example: int) -> torch.SymInt:
    """A new symbol of `env` for a size that is `example` now."""
    from torch._dynamo.source import ConstantSource  # 2 s, so only for those who need it

    source = ConstantSource(name)
    symbol = env.create_symbol(example, source, DimDynamic.DYNAMIC, constraint_dim=None)
    size = env.create_symintnode(symbol, hint=example, source=source)
    assert isinstance(size, torch.SymInt), f"{name} is {example}, which torch makes a constant"
    return size


def expression(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The sympy expression behind a symbolic number."""
    return value.node.expr


def in_sympy(expression: sympy.Basic) -> sympy.Basic:
    """`expression` with sympy's own functions in place of those of torch/utils/_sympy/functions.py.

    Of sizes, which are not negative: there truncation is a floor.
    """
    if not expression.args:
        return expression
    args = tuple(map(in_sympy, expression.args))
    made = _OF_SYMPY.get(type(expression).__name__)
    if made is not None and type(expression).__module__.startswith("torch."):
        return made(*args)
    return expression if args == expression.args else expression.func(*args)


_OF_SYMPY: dict[str, Callable[..., sympy.Basic]] = {
    "FloorDiv": lambda a, b: sympy.floor(a / b),
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
    "CleanDiv": lambda a, b: a / b,
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "CeilToInt": sympy.ceiling,
    "FloorToInt": sympy.floor,
    "TruncToInt": sympy.floor,
    "ToFloat": lambda a: a,
    "Identity": lambda a: a,
    "Mod": sympy.Mod,
    "PythonMod": sympy.Mod,
    "ModularIndexing": lambda base, divisor, modulus: sympy.Mod(
        sympy.floor(base / divisor), modulus
    ),
    "Max": sympy.Max,
    "Min": sympy.Min,
    "PowByNatural": lambda a, b: a**b,
}


def boxed(given: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """The gradients that a Function's backward was given, with ``boxed_grads_call`` or without."""
    return given[0] if BOXED_GRADS else list(given)


def forget_groups(mesh: DeviceMesh) -> None:
    """Let `mesh` refer to its process groups no more (torch/distributed/device_mesh.py)."""
    for each in (mesh, mesh._get_root_mesh()):
        getattr(each, "_pg_registry", {}).clear()


def group_store(group: Any) -> Any:
    """The key-value store of the group; keys of different groups do not meet."""
    return group.get_group_store()


def group_timeout(group: Any) -> Any:
    """The timeout of the group's collectives, a `datetime.timedelta`."""
    return group._get_backend(group._device_types[0]).options._timeout


class _NoState(collections.defaultdict[Any, Any]):
    """Empty, and true all the same."""

    def __bool__(self) -> bool:
        return True


@contextlib.contextmanager
def not_stepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch.distributed.checkpoint take the state of `optimizer` as it is.

    It steps an optimizer without state on gradients of zeros before it asks for its state dict.
    (torch/distributed/checkpoint/state_dict.py, ``_init_optim_state``)
    """
    before = optimizer.state
    if not before:
        optimizer.state = _NoState(dict)
    try:
        yield
    finally:
        optimizer.state = before


@contextlib.contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """For the time of the block the hooks of the user's are not run by ``optimizer.step()``.

    (torch/optim/optimizer.py, ``profile_hook_step``)
    """
    hooks: tuple[dict[int, Any], ...] = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, all_of_them in zip(hooks, before, strict=True):
            each.update(all_of_them)


# torch 2.13 renamed them, and warns of the old names at every call.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def new_group(ranks: list[int], parent: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group of some ranks of `parent`, which they alone make together.

    torch names a group made so by its ranks and by how many groups this process has
    (torch/distributed/distributed_c10d.py, ``_hash_ranks_to_str``). Once one of them has been
    destroyed the name comes again, with the old addresses in the store, and ranks that are in other
    numbers of groups never find each other: both hang. Here it is the n-th one of `parent`.
    """
    if dist.get_backend(parent) == "fake":
        return dist.new_group(ranks, use_local_synchronization=True)
    number = group_store(parent).add(f"fxshard/groups/{dist.get_rank()}", 1)
    name = f"fxshard.{parent.group_name}.{number}.{'_'.join(map(str, ranks))}"
    named = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        return dist.new_group(ranks, timeout=group_timeout(parent), use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = named


@functools.cache
def gather_one_by_one() -> torch.library.Library:
    """From now on coalesced all-gathers of CPU tensors are a call per tensor, in this process.

    gloo's coalesced one can corrupt the heap, much later (docs/upstream.md), and it is what all of
    torch's functional all-gathers run, of one tensor too: `DTensor.full_tensor`, `redistribute`,
    and with them state dicts and norms (torch/csrc/distributed/c10d/Functional.cpp).

    Returns:
        What holds the registration.
    """

    def gather(outputs: Any, inputs: Any, group: Any, async_op: bool = True) -> Any:
        members = dist.ProcessGroup.unbox(group)
        works: list[dist.Work] = []
        for whole, part in zip(outputs, inputs, strict=True):
            for work in works:
                work.wait()  # of two threads the second may end first, and who waits has one work
            works = [members._allgather_base(whole, part)]
        return works[0].boxed()

    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():  # of what is meant: "Overriding a previously registered kernel"
        warnings.simplefilter("ignore", UserWarning)
        library.impl("allgather_into_tensor_coalesced_", gather, "CPU")
    return library


def will_accumulate(node: Any) -> bool:
    """Inside of a backward: whether it comes to `node`, which accumulates a leaf's gradient.

    Not if ``torch.autograd.grad`` or ``backward(inputs=...)`` wants others alone, or takes it away
    itself. (torch/csrc/autograd/init.cpp, ``_will_engine_execute_node``)
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad asks for this leaf's gradient itself
        return False


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, itself and not a view made for autograd (``to_local``)."""
    return tensor._local_tensor


def foreach_copy(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy each of `tensors` into its place, casting, in one operator."""
    torch._foreach_copy_(into, tensors)


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """`local` as the local part of a DTensor with the mesh, placements and shape of `like`.

    What FSDP2 makes its gradients with: `DTensor.from_local` costs ten times as much.
    (torch/distributed/fsdp/_fully_shard/_fsdp_common.py, ``_from_local_no_grad``)
    """
    return DTensor(local, like._spec, requires_grad=False)


def set_local_tensor(tensor: DTensor | nn.Parameter, local: torch.Tensor) -> None:
    """Let a DTensor stand on other storage of the same shape and dtype."""
    assert isinstance(tensor, DTensor)
    tensor._local_tensor = local


def stand_in(local: torch.Tensor) -> torch.Tensor:
    """Of the shape, dtype and device of `local`, at the start of its storage; no values.

    A DTensor takes its storage offset over from the tensor that it is made of, and if that is not
    0, `torch.save` takes it for a tensor with data and fails. So parameters whose rows lie amid
    other storage are made of this, and get their rows by `set_local_tensor`.
    (torch/_tensor.py, ``_reduce_ex_internal``, asks for ``data_ptr() == 0``)
    """
    return local.new_empty(()).expand(local.shape)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """True if ``register_hook`` or ``register_post_accumulate_grad_hook`` was called on it."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}


def module_hooks(module: nn.Module) -> list[tuple[str, int, Any]]:
    """Kind, number (never given twice in a process) and function of each hook of the module.

    (torch/utils/hooks.py, ``RemovableHandle``)
    """
    found = module.__dict__
    return [(kind, n, hook) for name, kind in HOOKS.items() for n, hook in found[name].items()]


def hook_numbers(modules: list[nn.Module]) -> tuple[int, ...]:
    """The numbers of `module_hooks` of all modules; asked on every call."""
    return tuple(
        number
        for module in modules
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        )
        if hooks
        for number in hooks
    )


def is_custom_function(node: Any) -> bool:
    """True if an autograd node is of an ``autograd.Function`` that is not an operator's formula.

    The formula of a custom operator becomes such a function too.
    (torch/_library/autograd.py, ``make_autograd_impl``)
    """
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    return bool(type(node)._forward_cls.__module__ != _library_autograd.__name__)  # type: ignore[attr-defined]


def plain_torch_functions() -> contextlib.AbstractContextManager[None]:
    """For the time of the block no tensor subclass has a say in what a torch function does.

    (torch/_C/__init__.pyi; what ``Tensor.__torch_function__`` itself uses, torch/_tensor.py)
    """
    return torch._C.DisableTorchFunctionSubclass()


def dtensor_handlers() -> dict[Any, Any]:
    """Per operator what runs instead of DTensor's own dispatch, with it and its arguments.

    (torch/distributed/tensor/_dispatch.py, ``OpDispatcher``; read in each call)
    """
    return DTensor._op_dispatcher._custom_op_handlers


@contextlib.contextmanager
def without_dtensor_handler(func: Any) -> Iterator[None]:
    """For the time of the block DTensor dispatches an operator itself."""
    handlers = dtensor_handlers()
    handler = handlers.pop(func, None)
    try:
        yield
    finally:
        if handler is not None:
            handlers[func] = handler


def version(tensor: torch.Tensor) -> int:
    """How often autograd saw `tensor` changed in place; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


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
            warnings.simplefilter("ignore")  # that a kernel is overridden: so it is meant
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


def aten_names(key: str) -> list[str]:
    """Names, as `aten_operator` takes them, of the operators that have a kernel for a key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    return [n.removeprefix("aten::") for n in names if n.startswith("aten::") and has(n, key)]


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Operators inside the block pass the autocast of "cpu" or "cuda" by."""
    key = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
    guard: contextlib.AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(key[device])
    )
    return guard


def inside_autocast() -> bool:
    """True inside any ``torch.autocast`` block, also one that is off."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def attention_order() -> list[int]:
    """The values of ``torch.nn.attention.SDPBackend`` in the order in which they are tried.

    (``sdpa_kernel(..., set_priority=True)`` in torch/nn/attention/__init__.py sets it)
    """
    return [int(backend) for backend in torch._C._get_sdp_priority_order()]


@dataclasses.dataclass(frozen=True)
class Generated:
    """What Inductor makes of a graph.

    Attributes:
        source: a Python module; its ``call(args)`` takes (and clears) a list of tensors.
        constants: tensors that it refers to by name.
        aligned: positions of inputs whose address must be a multiple of 16 bytes.
    """

    source: str
    constants: dict[str, torch.Tensor]
    aligned: tuple[int, ...]


# Random operators keep eager's kernels; nothing is measured or run while code is generated; what is
# kept on disk is kept by the caller, who gets the strides that it has traced, or an assertion.
_GENERATE = {
    "fallback_random": True,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "cpp_wrapper": False,
    "size_asserts": True,
    "triton.cudagraphs": False,
}


def inductor_source(graph: fx.Graph, values: list[torch.Tensor], mode: FakeTensorMode) -> Generated:
    """Let Inductor generate code for `graph`; no kernel is built and nothing runs.

    Args:
        graph: functional ATen operators; returns a tuple.
        values: fake tensors of `mode` for its placeholders.

    Raises:
        Exception: whatever Inductor raises for what it cannot do.

    (torch/_inductor/compile_fx.py, ``compile_fx_inner``, and graph.py, ``_compile_to_module``,
    which writes the module and then loads it: the load is left out)
    """
    from unittest import mock

    import torch._inductor.config as config
    from torch._inductor import codecache, compile_fx, decomposition, output_code
    from torch.fx.experimental.proxy_tensor import make_fx

    class Unloaded:
        """Where the loaded module would be."""

        runner = None

        def __init__(self, path: str) -> None:
            self.__file__ = path

        # 2.11 looks at it: it puts the copies that align inputs around the call, 2.13 in the source
        # (torch/_inductor/output_code.py, ``maybe_realign_inputs``). Here `aligned` says which.
        @staticmethod
        def call(args: list[Any]) -> Any:
            raise AssertionError("this module was never loaded")

    def load(key: str, path: str, *args: Any, **kwargs: Any) -> Unloaded:
        return Unloaded(path)

    interpreter = fx.Interpreter(fx.GraphModule({}, graph))
    with config.patch(_GENERATE), torch.no_grad(), outside_autocast():
        table = decomposition.select_decomp_table()
        with mode:
            traced = make_fx(interpreter.run, decomposition_table=table)(*values)
        (output,) = traced.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        with mock.patch.object(codecache.PyCodeCache, "load_by_key_path", load):
            made = compile_fx.compile_fx_inner(traced, values)
    if not isinstance(made, output_code.CompiledFxGraph):
        raise NotImplementedError("no operator is left of it")
    if made.torchbind_constants or made.frozen_param_names:
        raise NotImplementedError("it refers to objects that cannot be kept on disk")
    constants, aligned = dict(made.constants or {}), tuple(made.inputs_to_check)
    return Generated(made.source_code, constants, aligned)


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Outside of the user's autocast: the casts that it asks for are in the graph already."""
    with (
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else _NOTHING,
    ):
        yield


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def inductor_key() -> str:
    """What Inductor's code depends on besides the graph: torch, its options, device, threads.

    (torch/_inductor/codecache.py, ``FxGraphHashDetails``)
    """
    import torch._inductor.config as config
    from torch._inductor import codecache

    parts = (
        torch.__version__,
        codecache.torch_key().hex(),
        config.get_hash().hex(),
        codecache.CacheBase.get_system()["hash"],
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
    return repr(parts)


def inductor_cache_dir() -> str:
    """Where Inductor keeps the kernels that it builds (TORCHINDUCTOR_CACHE_DIR).

    They are executed too. By default the folder lies in the directory of temporary files, which is
    everybody's: if it is not this user's alone, Inductor is given another (`files.private`).
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    variable = "TORCHINDUCTOR_CACHE_DIR"
    wanted = os.path.abspath(os.environ.get(variable) or default_cache_dir())
    os.environ[variable] = str(files.private(Path(wanted)))
    return cache_dir()


def extern_kernels() -> Any:
    """The kernels that Inductor calls by name, as generated code imports them."""
    from torch._inductor.select_algorithm import extern_kernels

    return extern_kernels


# -- torch.compile ---------------------------------------------------------------------------------


def mark_for_dynamo(module: nn.Module) -> None:
    """Mark a module as managed by FSDP, with original parameters in use, as torch's FSDP does.

    (torch/distributed/fsdp/_dynamo_utils.py, ``_annotate_modules_for_dynamo``; read by
    ``wrap_module`` in torch/_dynamo/variables/builder.py)
    """
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


def register_backend(name: str, compiler: Callable[..., Any]) -> None:
    """Let ``torch.compile(backend=name)`` find `compiler`, unless something has that name already.

    For a checkout that is not installed: of what is, Dynamo reads the entry points
    (torch/_dynamo/backends/registry.py).
    """
    from torch._dynamo.backends import registry

    if name not in registry.list_backends(exclude_tags=()):
        registry.register_backend(compiler, name)


def only_inlined(function: Callable[..., Any]) -> None:
    """Let Dynamo trace `function` where it is called from what it traces, and never by itself.

    (``skip_code``, which torch/_dynamo/decorators.py uses for ``torch._dynamo.skip``)
    """
    from torch._dynamo.decorators import skip_code  # type: ignore[attr-defined]

    skip_code(function.__code__)


def saved_tensors_hooks_on_top() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The pair of ``torch.autograd.graph.saved_tensors_hooks`` that autograd would call now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_backward() -> bool:
    """True while the autograd engine runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def tree_map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` with ``fn`` of every tensor in it; Dynamo can trace it."""
    return _pytree.tree_map_only(torch.Tensor, fn, tree)


def checkpoint_operator() -> Any:
    """What Dynamo makes of a call of ``torch.utils.checkpoint.checkpoint``.

    Its first argument is the graph of the function; a policy of what to save is in that graph's
    ``meta`` (torch/_dynamo/variables/higher_order_ops.py, ``CheckpointHigherOrderVariable``).
    """
    return torch.ops.higher_order.tag_activation_checkpoint


def checkpoint_context(graph_module: fx.GraphModule) -> Callable[[], Any]:
    """The ``context_fn`` of the checkpoint that Dynamo made `graph_module` of."""
    return graph_module.meta.get("_checkpoint_context_fn", _checkpoint.noop_context_fn)


def dynamo_modules(node: fx.Node) -> list[tuple[str, int]]:
    """The calls of modules that `node` of Dynamo's graph ran in, the outermost first.

    Each is the ``id`` of the module that was called when the graph was made, as text, and a number
    that differs between calls of it. (``record_nn_module_stack`` in
    torch/_dynamo/variables/nn_module.py)
    """
    found = []
    for key in node.meta.get("nn_module_stack") or {}:
        module, _, number = str(key).partition("@")
        found.append((module, int(number or 0)))
    return found


def stack_line(node: fx.Node) -> str:
    """``path:line in function`` of the innermost frame that `node` of Dynamo's graph came from.

    (``stack_trace`` in its metadata is text, as `traceback.format_list` makes it)
    """
    found = ""
    for path, line, function in _FRAME.findall(node.meta.get("stack_trace") or ""):
        if not Path(path).is_relative_to(_TORCH):
            found = f"{path}:{line} in {function}"
    return found


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_TORCH = Path(torch.__file__).parent


def dynamo_paths(node: fx.Node) -> list[tuple[str, str]]:
    """As `dynamo_modules`: the module's ``id``, and its path from the ``self`` of the frame.

    "" if it is not in ``self``.
    """
    found = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        _, _, inside = str(path).partition("L['self'].")
        found.append((str(key).partition("@")[0], inside))
    return found
