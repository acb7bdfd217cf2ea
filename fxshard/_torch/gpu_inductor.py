"""Inductor as it compiles for a GPU, where there is none: the same passes, fusions and buffers.

Dynamo and AOTAutograd run on fake CPU tensors; what they make is spelled for CUDA and handed to
Inductor, which sees a GPU as far as its Python looks. No kernel is built.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from fxshard._torch import triton_stub
from fxshard._torch.inductor import Generated, nothing_loaded
from fxshard._torch.modes import below_autograd, outside_modes

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What Inductor asks of a GPU.

    Attributes:
        capability: its compute capability.
        multiprocessors: how many it has; reductions are split by it.
        memory_bytes: its size.
    """

    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int = 80 * 2**30

    def properties(self) -> Any:
        """As ``torch.cuda.get_device_properties`` gives them."""
        major, minor = self.capability
        shared = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448}
        return types.SimpleNamespace(
            name="GPU",
            major=major,
            minor=minor,
            multi_processor_count=self.multiprocessors,
            total_memory=self.memory_bytes,
            warp_size=32,
            regs_per_multiprocessor=65536,
            max_threads_per_block=1024,
            max_threads_per_multi_processor=2048 if self.capability in shared else 1536,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=shared.get(self.capability, 101376),
            shared_memory_per_multiprocessor=shared.get(self.capability, 101376) + 1024,
            L2_cache_size=50 * 2**20,
            clock_rate=1_980_000,
            memory_clock_rate=2_619_000,
            memory_bus_width=5120,
            gcnArchName="",
        )


# -- a GPU, as far as Inductor's Python looks ------------------------------------------------------

# What imports triton at its top, or asks at its top for a GPU: imported before there seems to be
# one, so that nothing of the stand-ins remains in it.
_BEFORE = (
    "compile_fx graph lowering ir scheduler choices select_algorithm kernel.mm comm_analysis "
    "codegen.triton codegen.simd codegen.wrapper codegen.cpp_wrapper_gpu codegen.wrapper_fxir "
    "codegen.triton_combo_kernel codegen.triton_split_scan codegen.cuda_combined_scheduling "
    "runtime.triton_heuristics runtime.triton_helpers runtime.hints fx_passes.reinplace "
    "fx_passes.post_grad fx_passes.joint_graph triton_bundler"
)

# Answers about the machine that torch keeps.
_KEPT_BY = (
    "torch.utils._triton",
    "torch._inductor.utils",
    "torch._inductor.runtime.hints",
    "torch._dynamo.debug_utils",
)


def _forget_machine() -> None:
    from torch._inductor.codegen import triton

    found: list[Any] = [triton.gen_attr_descriptor_import]
    for name in _KEPT_BY:
        for value in vars(sys.modules[name]).values():
            held = vars(value).values() if isinstance(value, type) else (value,)
            found += [getattr(each, "__func__", each) for each in held]
    for function in found:
        if isinstance(function, functools._lru_cache_wrapper):
            function.cache_clear()


def _interface(properties: Any) -> type:
    """What torch asks about the devices of a type (torch/_dynamo/device_interface.py)."""
    from torch._dynamo.device_interface import DeviceInterface

    def answer(value: Any) -> Any:
        return staticmethod(lambda *args, **kwargs: value)

    answers = {
        "set_device": None,
        "synchronize": None,
        "raise_if_triton_unavailable": None,
        "current_device": 0,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "get_raw_stream": 0,
        "memory_allocated": 0,
        "device_count": 1,
        "is_available": True,
        "is_bf16_supported": True,
        "is_dtype_supported": True,
        "is_triton_capable": True,
        "get_device_properties": properties,
        "get_compute_capability": properties.major * 10 + properties.minor,
    }
    body = {name: answer(value) for name, value in answers.items()}
    body["device"] = contextlib.nullcontext
    body["Worker"] = type("Worker", (), {name: each for name, each in body.items()})
    return type("GpuInterface", (DeviceInterface,), body)


@contextlib.contextmanager
def present(gpu: Gpu) -> Iterator[None]:
    """While the block runs, Inductor takes this machine for one with `gpu`, and with Triton.

    Nothing of CUDA's own library is called.
    """
    from torch._dynamo import device_interface
    from torch._inductor import codecache

    for name in _BEFORE.split():
        with contextlib.suppress(ModuleNotFoundError):  # not in every version
            importlib.import_module(f"torch._inductor.{name}")
    device_interface.init_device_reg()
    properties = gpu.properties()
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": gpu.capability,
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "is_tf32_supported": gpu.capability >= (8, 0),
        "synchronize": None,
        "set_device": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    system = {"device": {"name": properties.name}, "version": {}, "hash": "GPU"}
    interface = _interface(properties)
    with contextlib.ExitStack() as stack:

        def put(where: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, value))

        _forget_machine()
        stack.callback(_forget_machine)
        stack.enter_context(triton_stub.importable())
        known = {"cuda": interface, "cuda:0": interface}
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, known))
        for name, value in answers.items():
            put(torch.cuda, name, lambda *args, value=value, **kwargs: value)
        put(codecache.CacheBase, "get_system", staticmethod(lambda: system))
        put(sys.modules["torch.utils._triton"], "triton_hash_with_backend", lambda: "GPU")
        if hasattr(fake_tensor, "init_gpu_context"):
            put(fake_tensor, "init_gpu_context", lambda *args: None)
        for name, method in _METHODS.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, method, create=True))
        yield


# Torch's own methods of these names switch to the device of the tensor, or ask for it, before they
# are dispatched (torch/csrc/autograd/python_variable_indexing.cpp, VariableTypeManual.cpp,
# tools/autograd/templates/python_variable_methods.cpp).


def _item(tensor: Tensor, index: Any) -> Tensor:
    """``tensor[index]``, of numbers and slices."""
    if tensor.device.type != "cuda":
        return Tensor.__getitem__(tensor, index)
    with outside_modes():
        plain = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")[index]
    offset = tensor.storage_offset() + plain.storage_offset()
    return tensor.as_strided(plain.shape, plain.stride(), offset)


def _copy(tensor: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
    if tensor.device.type != "cuda":
        return Tensor.copy_(tensor, other, non_blocking)
    with below_autograd():
        return aten.copy_.default(tensor, other, non_blocking)


def _contiguous(tensor: Tensor, *, memory_format: Any = torch.contiguous_format) -> Tensor:
    if tensor.device.type != "cuda":
        return Tensor.contiguous(tensor, memory_format=memory_format)
    with below_autograd():
        return aten.contiguous.default(tensor, memory_format=memory_format)


_METHODS = {"__getitem__": _item, "copy_": _copy, "contiguous": _contiguous}


# -- from AOTAutograd's graph to code --------------------------------------------------------------


def _on_gpu(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph whose devices are all `CUDA`."""
    copied = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    copied.meta.update(graph_module.meta)
    for name, child in graph_module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _on_gpu(child))

    def moved(value: Any) -> Any:
        return CUDA if isinstance(value, torch.device) and value.type == "cpu" else value

    for node, original in zip(copied.graph.nodes, graph_module.graph.nodes, strict=True):
        node.meta = dict(original.meta)
        if node.op == "call_function":
            node.args = tuple(moved(value) for value in node.args)
            node.kwargs = {name: moved(value) for name, value in node.kwargs.items()}
    for node in copied.graph.find_nodes(op="get_attr"):
        held = getattr(copied, node.target, None)
        # Numbers stay what they are. A tensor of the graph's own would be copied to the GPU.
        if isinstance(held, Tensor) and held.dim():
            with copied.graph.inserting_after(node):
                put = copied.graph.call_function(torch.ops.prims.device_put.default, (node, CUDA))
            node.replace_all_uses_with(put, lambda user, put=put: user is not put)
    copied.recompile()
    return copied


def gpu_code(
    graph_module: fx.GraphModule, inputs: Sequence[Any], gpu: Gpu, **how: Any
) -> Generated | None:
    """Inductor's code for one of AOTAutograd's graphs on fake CPU tensors, as of `gpu`.

    Args:
        how: what ``compile_fx`` hands to its ``inner_compile``.

    Returns:
        None: it computes nothing.
    """
    from torch._guards import TracingContext
    from torch._inductor import compile_fx, output_code
    from torch._inductor.graph import GraphLowering
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    context = TracingContext.get()
    assert context.fake_mode is not None
    mode = FakeTensorMode(shape_env=context.fake_mode.shape_env, allow_non_fake_inputs=True)

    def moved(value: Any, device: torch.device = CUDA) -> Any:
        if not isinstance(value, Tensor):
            return value
        with mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )

    plain = FakeTensorProp.call_function

    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        try:
            return plain(self, target, args, kwargs)
        except RuntimeError as error:
            if _NO_CUDA not in str(error):  # of an operator that C++ composes of others
                raise
        cpu = functools.partial(moved, device=torch.device("cpu"))
        args, kwargs = pytree.tree_map(cpu, (args, kwargs))
        return pytree.tree_map(moved, plain(self, target, args, kwargs))

    with (
        present(gpu),
        nothing_loaded(),
        mock.patch.object(FakeTensorProp, "call_function", call_function),
        # Constants are copied to the GPU when they are compiled; here they stay what they are.
        mock.patch.object(GraphLowering, "constant_name", lambda self, name, device: name),
        mock.patch.object(context, "fake_mode", mode),
        torch.no_grad(),
    ):
        graph_module = _on_gpu(graph_module)
        inputs = [moved(value) for value in inputs]
        FakeTensorProp(graph_module, mode).propagate(*inputs)
        for child in graph_module.modules():
            if isinstance(child, fx.GraphModule) and child is not graph_module:
                for node in child.graph.nodes:
                    node.meta["val"] = pytree.tree_map(moved, node.meta.get("val"))
        made = compile_fx.compile_fx_inner(graph_module, inputs, **how)
    if not isinstance(made, output_code.CompiledFxGraph):
        return None
    return Generated(made.source_code, dict(made.constants or {}), tuple(made.inputs_to_check))


_NO_CUDA = "not linked with support for cuda"  # c10/core/impl/DeviceGuardImplInterface.h

# What differs from a real compilation: nothing is kept on disk or taken from it, backward is
# compiled with forward.
_INDUCTOR = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1}
_FUNCTORCH = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}

Run = Callable[[list[Any]], Any]


def compiled(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    gpu: Gpu,
    options: dict[str, Any],
    run: Callable[[Generated, bool], Run],
) -> Callable[..., Any]:
    """AOTAutograd's callable for Dynamo's graph, around what `run` makes of Inductor's code.

    Args:
        inputs: the fake tensors (and open sizes) of Dynamo for the placeholders.
        options: of Inductor, as ``torch.compile(options=...)`` takes them.
        run: called with the code of forward and of backward, and whether it is of backward.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as config
    from torch._functorch import partitioners
    from torch._inductor import compile_fx, decomposition

    def inner(graph_module: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        code = gpu_code(graph_module, inputs, gpu, **how)

        def nothing(args: list[Any]) -> Any:
            return graph_module(*args)

        function = run(code, bool(how.get("is_backward"))) if code is not None else nothing
        function._boxed_call = True  # type: ignore[attr-defined]
        return function

    known = {name: value for name, value in _FUNCTORCH.items() if hasattr(functorch_config, name)}
    with (
        functorch_config.patch(known),
        config.patch({**options, **_INDUCTOR}),
        mock.patch.object(partitioners, "functionalize_rng_ops", _without_states),
    ):
        table = {**decomposition.select_decomp_table(), **_decompositions()}
        made: Any = compile_fx.compile_fx(
            graph_module, list(inputs), inner_compile=inner, decompositions=table
        )
    return made


def _without_states(joint: Any, forward: Any, backward: Any, *args: Any) -> tuple[Any, Any]:
    """In place of ``functionalize_rng_ops``: recomputed random operators stay as they are.

    On CUDA the states of random numbers that it hands from forward to backward are objects, or
    lie in the host's memory, and the CPU's would be tensors that are saved.
    (torch/_functorch/partitioners.py; torch/_prims/rng_prims.py)
    """
    return forward, backward


_STATISTICS = (
    aten.native_layer_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Of norms whose statistics have the input's dtype on the CPU, and fp32 elsewhere.

    (torch/_refs/__init__.py, ``native_layer_norm``; torch/_decomp/decompositions.py,
    ``native_batch_norm_helper``)
    """
    from torch._inductor import decomposition

    table = decomposition.select_decomp_table()

    def in_fp32(decomposed: Callable[..., Any]) -> Callable[..., Any]:
        def norm(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            if input.dtype not in (torch.float16, torch.bfloat16):
                return decomposed(input, *args, **kwargs)
            output, *others = decomposed(input.float(), *args, **kwargs)
            return (output.to(input.dtype), *others)

        return norm

    return {op: in_fp32(table[op]) for op in _STATISTICS if op in table}


# -- torch.compile ---------------------------------------------------------------------------------

Compiler = Callable[[fx.GraphModule, list[Any], dict[str, Any]], Callable[..., Any]]


@contextlib.contextmanager
def inductor_replaced(compiler: Compiler) -> Iterator[None]:
    """While the block runs, `compiler` is what ``torch.compile`` calls instead of Inductor.

    Also for what was given to ``torch.compile`` before. It gets Dynamo's graph, fake tensors of
    Dynamo's mode, and the options of the call. What Dynamo has compiled before the block is not
    used in it, and what it has compiled in the block not after it: both are compiled again.

    (``_TorchCompileInductorWrapper`` in torch/__init__.py; torch/_dynamo/output_graph.py)
    """
    wrapper = torch._TorchCompileInductorWrapper
    init = wrapper.__init__

    def compile_it(
        self: Any, graph_module: fx.GraphModule, inputs: Any, *, config_patches: Any = None
    ) -> Any:
        return compiler(graph_module, inputs, {**self.config, **(config_patches or {})})

    with contextlib.ExitStack() as stack:
        enter = functools.cache(lambda: stack.enter_context(_with_own_fakes()))

        def init_here(self: Any, *args: Any, **kwargs: Any) -> None:
            enter()
            init(self, *args, **kwargs)

        if "torch._dynamo" in sys.modules:  # importing it takes 2 s: not where it is not used
            enter()
        stack.enter_context(mock.patch.object(wrapper, "__init__", init_here))
        stack.enter_context(mock.patch.object(wrapper, "__call__", compile_it))
        yield


@contextlib.contextmanager
def _with_own_fakes() -> Iterator[None]:
    """Backends get fakes of Dynamo's mode, also where it is called with fakes of another.

    And its graphs name no GPU, as its fakes would have to be there: all that `_on_gpu` has is.
    """
    import torch._dynamo
    from torch._dynamo import utils
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables.tensor import TensorVariable
    from torch.nn.attention import flex_attention

    run_node = utils.run_node

    def run_on_cpu(tracer: Any, node: fx.Node, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        method = node.target if node.op == "call_method" else None
        if method == "cuda":
            node.target, node.args, args = "cpu", node.args[:1], args[:1]
        (node.args, node.kwargs), names_host = _renamed((node.args, node.kwargs))
        if names_host or method == "cpu":
            node.meta[_ON_HOST] = True
        (args, kwargs), _ = _renamed((args, kwargs))
        return run_node(tracer, node, args, kwargs, nnmodule)

    plain: Any = TensorVariable.specialize

    def specialize(value: Tensor) -> dict[str, Any]:
        """What a tensor answers in the code that is compiled: it is on the GPU."""
        known: dict[str, Any] = plain(value)
        return known | ({"device": CUDA} if value.device.type == "cpu" else {})

    call = OutputGraph.call_user_compiler

    def call_with_fakes(self: Any, graph_module: fx.GraphModule, inputs: Any) -> Any:
        places = graph_module.graph.find_nodes(op="placeholder")
        known = [node.meta.get("example_value") for node in places]
        inputs = [k if isinstance(k, FakeTensor) else i for k, i in zip(known, inputs, strict=True)]
        return call(self, graph_module, inputs)

    torch._dynamo.reset()
    try:
        with (
            mock.patch.object(OutputGraph, "call_user_compiler", call_with_fakes),
            mock.patch.object(utils, "run_node", run_on_cpu),
            mock.patch.object(TensorVariable, "specialize", staticmethod(specialize)),
            mock.patch.object(flex_attention, "_validate_device", lambda *args: None),
        ):
            yield
    finally:
        torch._dynamo.reset()


def _renamed(arguments: Any) -> tuple[Any, bool]:
    """The arguments of a node with the CPU wherever they name a GPU; whether they named the CPU."""
    named = []

    def on_cpu(value: Any) -> Any:
        kind = value.partition(":")[0] if isinstance(value, str) else getattr(value, "type", None)
        if isinstance(value, str | torch.device) and kind in ("cpu", "cuda"):
            named.append(kind)
            return type(value)("cpu")
        return value

    return pytree.tree_map(on_cpu, arguments), "cpu" in named


_ON_HOST = "fxshard_on_host"  # of nodes of Dynamo's graph: they ask for the host's memory


def on_host(graph_module: fx.GraphModule) -> fx.Node | None:
    """The first node of a graph of Dynamo's whose code asks for the host's memory."""
    return next((node for node in graph_module.graph.nodes if _ON_HOST in node.meta), None)


def option(name: str) -> Any:
    """An option of Inductor as it is set now: ``triton.cudagraphs``."""
    import torch._inductor.config as config

    return config.get_config_copy()[name]


def is_for_dynamo(error: Exception) -> bool:
    """True for what a backend raises to tell Dynamo that it should trace once more."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    return isinstance(error, TensorifyScalarRestartAnalysis)
