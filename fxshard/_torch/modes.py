"""Dispatch modes and autocast."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher as python_kernels
from torch._dynamo.utils import preserve_rng_state as rng_kept
from torch._ops import HigherOrderOperator, _get_dispatch_mode_pre_dispatch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)

__all__ = [
    "TorchDispatchMode",
    "below_autograd",
    "eager_kernel",
    "function_modes",
    "inside_autocast",
    "is_composite",
    "is_higher_order",
    "is_wrapper",
    "outside_autocast",
    "outside_function_modes",
    "outside_modes",
    "profiled",
    "python_kernels",
    "rng_kept",
    "settings",
    "tracer",
    "unobserved",
    "without_autocast",
]


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """Run the block on real tensors, outside of any trace."""
    guard: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return guard


def outside_function_modes() -> contextlib.AbstractContextManager[Any]:
    """No ``__torch_function__`` is called in the block, of modes and of subclasses."""
    guard: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return guard


def function_modes() -> list[TorchFunctionMode]:
    """Those that this thread is in, the outermost first: ``torch.device("meta")`` makes one.

    (torch/overrides.py)
    """
    return _get_current_function_mode_stack()


def settings() -> tuple[Any, ...]:
    """Settings of torch that code may ask for, and that operators read while they are traced."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        *((type(mode), getattr(mode, "device", None)) for mode in function_modes()),
    )


def tracer() -> str:
    """What of torch records operators in this thread, on tensors of its own; "" if nothing does.

    (torch/_C/__init__.pyi: modes that torch itself brings, of which there is one of a kind;
    torch/_ops.py: those before dispatch, of ``torch.export``)
    """
    if torch._C._get_tracing_state():
        return "torch.jit.trace"
    kinds = torch._C._TorchDispatchModeKey
    if torch._C._get_dispatch_mode(kinds.PROXY) or _get_dispatch_mode_pre_dispatch(kinds.PROXY):
        return "make_fx or torch.export"
    return "FakeTensorMode" if torch._C._get_dispatch_mode(kinds.FAKE) else ""


@contextlib.contextmanager
def unobserved(root: torch.nn.Module | None = None) -> Iterator[None]:
    """Hide the block from the user's dispatch modes and from global hooks of torch's own tools.

    ``CommDebugMode``, ``FlopCounterMode`` and the like then see what runs, but no traces. Global
    hooks of the user's are called for modules inside of `root`, if it is given: those of `root`
    run around each call of it, and what a tracer wraps it in is nobody's.

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
            home = str(getattr(hook, "__module__", "")).partition(".")[0]
            if home == "torch":
                del each[number]
            elif root is not None and home != "fxshard":
                each[number] = _only_inside(root, hook)
    try:
        with outside_modes():
            yield
    finally:
        for each, all_of_them in zip(hooks, before, strict=True):
            now = all_of_them | {n: hook for n, hook in each.items() if n not in all_of_them}
            each.clear()
            each.update(now)


def _only_inside(root: torch.nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    wrappers = ("fxshard.", "torch._", "torch.export.", "torch.fx.")

    def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is root or type(module).__module__.startswith(wrappers):
            return None
        return hook(module, *args, **kwargs)

    return called


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Dispatch the operators of the block past autograd."""
    guard: contextlib.AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Run the operators of the block without the autocast of "cpu" or "cuda"."""
    key = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
    guard: contextlib.AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(key[device])
    )
    return guard


def inside_autocast() -> bool:
    """True inside any ``torch.autocast`` block, also one that is off."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Run the block without the user's autocast: its casts are in the graph already."""
    with (
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else _NOTHING,
    ):
        yield


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def is_wrapper(kind: type) -> bool:
    """True for a tensor subclass that keeps its memory in tensors inside of it, as DTensor does."""
    return is_traceable_wrapper_subclass_type(kind)


def is_higher_order(operator: Any) -> bool:
    """True for an operator that takes functions, such as ``flex_attention`` or ``cond``.

    A `TorchDispatchMode` gets them if its ``supports_higher_order_operators`` says so.
    """
    return isinstance(operator, HigherOrderOperator)


def eager_kernel(operator: HigherOrderOperator) -> Callable[..., Any] | None:
    """What runs for a higher-order operator below autograd where nothing is compiled."""
    found: Callable[..., Any] | None
    found = operator.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    return found


@functools.cache
def is_composite(operator: Any) -> bool:
    """True for an operator that C++ takes apart: ``operator.decompose`` does it below autograd.

    Some have kernels of their own besides, such as ``aten.silu_backward``: these are run.
    (torch/_ops.py, ``OpOverload.decompose``)
    """
    key = torch._C.DispatchKey
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = operator.name()
    apart = has_kernel(name, key.CompositeImplicitAutograd)
    return bool(apart and not has_kernel(name, key.CPU))


def profiled() -> bool:
    """True while a profiler of torch runs in this thread.

    (torch/autograd/__init__.py, ``_profiler_enabled``; torch/_dynamo asks it too)
    """
    return bool(torch._C._autograd._profiler_enabled())
