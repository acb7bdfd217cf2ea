"""The only importer of torch's private modules.

Each name below is one use of something torch does not promise. `tests/test_compat.py` holds a
contract test for each, so that a torch upgrade says which one changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch._aot_autograd.descriptors as _desc
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    is_fake,
)
from torch.distributed.fsdp.wrap import _Policy
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_unflatten

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "compiling",
    "export_joint",
    "fake_process_group",
    "input_source",
    "is_fake",
    "output_source",
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


def tree_flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    """As `tree_flatten`, each leaf with its path of keys."""
    return _pytree.tree_flatten_with_path(_opened(tree))


def export_joint(
    module: nn.Module, args: tuple[Any, ...]
) -> tuple[fx.GraphModule, list[Any], list[Any]]:
    """Trace forward and backward of `module` into one ATen graph, without decompositions.

    Returns:
        The graph module; the descriptor of each placeholder; the descriptor of each output.
        (torch/_functorch/aot_autograd.py, ``aot_export_joint_with_descriptors``)
    """
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, module, args, decompositions={})
        graph_module = joint.graph_module
    placeholders = [n.meta["desc"] for n in graph_module.graph.find_nodes(op="placeholder")]
    (output,) = graph_module.graph.find_nodes(op="output")
    return graph_module, placeholders, list(output.meta["desc"])


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


def takes_flat_inputs(graph: fx.Graph) -> bool:
    """True if the graph's placeholders are the flattened arguments (torch.export's modules)."""
    return isinstance(graph._codegen, _PyTreeCodeGen)


def is_wrap_policy(spec: object) -> bool:
    """True for ``ModuleWrapPolicy`` and its kin of torch.distributed.fsdp.wrap."""
    return isinstance(spec, _Policy)


def run_wrap_policy(policy: Any, model: nn.Module) -> set[nn.Module]:
    """Modules that FSDP1 would wrap under `policy`."""
    return set(policy._run_policy(model, ignored_modules=set(), root_kwargs={}))


def group_store(group: Any) -> Any:
    """The key-value store of the group; keys of different groups do not meet."""
    return group.get_group_store()


def group_timeout(group: Any) -> Any:
    """The timeout of the group's collectives, a `datetime.timedelta`."""
    return group._get_backend(group._device_types[0]).options._timeout


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, itself and not a view made for autograd (``to_local``)."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor stand on other storage of the same shape and dtype."""
    tensor._local_tensor = local


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """True if ``register_hook`` or ``register_post_accumulate_grad_hook`` was called on it."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def version(tensor: torch.Tensor) -> int:
    """How often autograd saw `tensor` changed in place; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
