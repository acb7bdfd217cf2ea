"""The engine of autograd, versions of tensors, subclasses that stand in for tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch._library.autograd as _library_autograd
from torch.autograd import graph

# True if autograd passes a Function its gradients in a list that it may clear
# (torch/autograd/function.py); otherwise the caller holds them until backward is over.
BOXED_GRADS = hasattr(torch.autograd.Function, "boxed_grads_call")


class UncapturedFunction(torch.autograd.Function):
    """A Function whose backward is never part of what compiled autograd makes of a backward.

    Compiled autograd asks each node that it would run for a key, before it captures or runs any.
    (torch/csrc/autograd/python_function.cpp, ``PyNode::compiled_args``; ``_compiled_autograd_key``
    in torch/autograd/function.py)
    """

    @staticmethod
    def refuse_capture(ctx: Any) -> NoReturn:
        """Raise an error that says what is refused, and what to do."""
        raise NotImplementedError

    @classmethod
    def _compiled_autograd_key(cls, ctx: Any) -> NoReturn:
        cls.refuse_capture(ctx)


# ``__torch_function__`` of a subclass whose operators do not return the subclass.
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


def boxed(given: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """The gradients that a Function's backward was given, with ``boxed_grads_call`` or without."""
    return given[0] if BOXED_GRADS else list(given)


def will_accumulate(node: Any) -> bool:
    """Inside of a backward: True if it will run `node`, which accumulates a leaf's gradient.

    False if ``torch.autograd.grad`` or ``backward(inputs=...)`` asks for other gradients only, or
    returns this one. (torch/csrc/autograd/init.cpp, ``_will_engine_execute_node``)
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad asks for this leaf's gradient itself
        return False


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """True if ``register_hook`` or ``register_post_accumulate_grad_hook`` was called on it."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def is_custom_function(node: Any) -> bool:
    """True if an autograd node is of an ``autograd.Function`` that is not an operator's formula.

    The formula of a custom operator becomes such a function too.
    (torch/_library/autograd.py, ``make_autograd_impl``)
    """
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    return bool(type(node)._forward_cls.__module__ != _library_autograd.__name__)  # type: ignore[attr-defined]


def plain_torch_functions() -> contextlib.AbstractContextManager[None]:
    """For the time of the block no subclass's ``__torch_function__`` is called.

    (torch/_C/__init__.pyi; what ``Tensor.__torch_function__`` itself uses, torch/_tensor.py)
    """
    return torch._C.DisableTorchFunctionSubclass()


def version(tensor: torch.Tensor) -> int:
    """How often autograd saw `tensor` changed in place; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def saved_tensors_hooks_on_top() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The pair of ``torch.autograd.graph.saved_tensors_hooks`` that autograd would call now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def saved_tensors_hooks_allowed() -> bool:
    """False inside of ``torch.func.grad`` and ``disable_saved_tensors_hooks``: entering raises."""
    is_enabled: Any = vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]
    return bool(is_enabled())


def saved_tensors_hooks_around() -> list[str]:
    """What is on top now, as `noting_saved_tensors_hooks` notes it; empty if that is nothing."""
    pair = saved_tensors_hooks_on_top()
    name = None if pair is None else _name_of_pack(pair[0])
    return [] if name is None else [name]


def _name_of_pack(pack: Any) -> str | None:
    """See `noting_saved_tensors_hooks`; None for torch's own."""
    module = str(getattr(pack, "__module__", ""))
    name = getattr(pack, "__qualname__", type(pack).__qualname__)
    if module.partition(".")[0] != "torch":
        return f"{module}.{name}"
    return "" if name.startswith(graph.save_on_cpu.__qualname__) else None


@contextlib.contextmanager
def noting_saved_tensors_hooks() -> Iterator[list[str]]:
    """Note which hooks for saved tensors are entered in the block: graphs that are traced in it
    have none of them.

    Yields the list: "" for ``save_on_cpu``, which only moves what is saved, else the name of the
    function that packs. Those of torch itself, of checkpoints, are left out.
    """
    entered: list[str] = []
    enter, thread = graph.saved_tensors_hooks.__enter__, threading.get_ident()

    def noted(self: Any) -> None:
        name = _name_of_pack(self.pack_hook)
        if threading.get_ident() == thread and name is not None:
            entered.append(name)
        enter(self)

    graph.saved_tensors_hooks.__enter__ = noted  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        graph.saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


def in_backward() -> bool:
    """True while the autograd engine runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(do: Callable[[], None]) -> None:
    """Inside of a backward: call `do` when it is over, unless it fails.

    (torch/autograd/variable.py; what FSDP2 ends its backward by)
    """
    torch.autograd.Variable._execution_engine.queue_callback(do)


def keeps_graph() -> bool:
    """Inside of a backward: True if it was asked to ``retain_graph``.

    (torch/csrc/autograd/init.cpp; torch/_functorch/_aot_autograd/runtime_wrappers.py asks it too)
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def running_node_number() -> int | None:
    """Number of the node that the engine runs now, or None outside of nodes.

    Forward numbers the nodes that it makes; accumulations into leaves have no number.
    (torch/fx/proxy.py takes ``seq_nr`` from here.)
    """
    node = torch._C._current_autograd_node()
    number = None if node is None else node._sequence_nr()
    return None if number is None or number > _LARGEST else number


_LARGEST = (1 << 63) - 1  # accumulations have the largest number there is, to run first


def next_node_number() -> int:
    """The number of the node that forward will make next, in this thread."""
    return int(vars(torch.autograd)["_get_sequence_nr"]())
