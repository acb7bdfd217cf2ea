"""Modules: hooks, policies that choose units, and FSDP2's own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp.wrap import _Policy
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm

BATCH_NORM = _BatchNorm  # whose forward those of any number of dimensions share

# Attributes by which torch knows parameters of tensor subclasses, and buffers; no user's.
# (torch/nn/parameter.py, ``_ParameterMeta``, ``_BufferMeta``)
TENSOR_MARKS = frozenset({"_is_param", "_is_buffer", "persistent"})


def is_wrap_policy(spec: object) -> bool:
    """True for ``ModuleWrapPolicy`` and its kin of torch.distributed.fsdp.wrap."""
    return isinstance(spec, _Policy)


def run_wrap_policy(policy: Any, model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Modules that FSDP1 would wrap under `policy`, each with the options that it gives them."""
    found: dict[nn.Module, dict[str, Any]] = policy._run_policy(
        model, ignored_modules=set(), root_kwargs={}
    )
    return found


# Whether FSDP2, where ``MixedPrecisionPolicy.reduce_dtype`` is None, reduces gradients in the dtype
# of the sharded parameter, as 2.15 does, and not in ``param_dtype``
# (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``unsharded_grad_dtype``).
REDUCES_AS_STORED = hasattr(FSDPParam, "unsharded_grad_dtype")


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


def global_hooks() -> list[tuple[str, int, Any]]:
    """The same of those on all modules, without torch's own and ours; asked on every call.

    (torch/nn/modules/module.py, ``register_module_forward_hook``)
    """
    return [
        (f"global {kind}", number, hook)
        for name, kind in HOOKS.items()
        if (hooks := getattr(torch_module, f"_global{name}"))
        for number, hook in hooks.items()
        if str(getattr(hook, "__module__", "")).partition(".")[0] not in ("torch", "fxshard")
    ]


def forget_weights(module: nn.RNNBase) -> None:
    """Drop the weak references to its weights, as ``RNNBase._apply`` does before it exchanges them.

    (torch/nn/modules/rnn.py)
    """
    module._flat_weight_refs = []


def weight_names(module: nn.RNNBase) -> list[str]:
    """Names of its weights, in the order in which its kernels take them."""
    return module._flat_weights_names


def how_called(module: nn.Module | None, number: int) -> tuple[bool | None, ...]:
    """What else was said as the hook of this number was registered on the module; None: on all.

    (torch/nn/modules/module.py, ``register_forward_hook``, ``register_full_backward_hook``)
    """
    if module is None:
        always = number in torch_module._global_forward_hooks_always_called
        with_kwargs = number in torch_module._global_forward_hooks_with_kwargs
        return with_kwargs, always, torch_module._global_is_full_backward_hook
    kinds = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")
    said = (number in module.__dict__[name] for name in (*kinds, "_forward_pre_hooks_with_kwargs"))
    return *said, module._is_full_backward_hook


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
