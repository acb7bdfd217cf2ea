"""Optimizers: their hooks, their state while nothing steps, and the parts of Muon's step."""

from __future__ import annotations

import collections
import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import _muon
from torch.optim.optimizer import _foreach_supported_types as _stepped_by_foreach
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._foreach_utils import _foreach_supported_types as _clipped_by_foreach
from torch.utils.weak import WeakTensorKeyDictionary

_IN_BACKWARD = "_in_backward_optimizers"
_stepping = WeakTensorKeyDictionary()  # parameters that have the hook of `step_in_backward`


class _NoState(collections.defaultdict[Any, Any]):
    """An empty state that is truthy."""

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
    """For the time of the block ``optimizer.step()`` does not run the user's hooks.

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


def allow_foreach(kind: type[torch.Tensor]) -> None:
    """Let optimizers and clipping take tensors of a subclass many at once by default, on GPUs.

    torch does so for plain tensors, parameters and DTensors, by exact type
    (torch/optim/optimizer.py, ``_default_to_fused_or_foreach``; torch/utils/_foreach_utils.py,
    ``_has_foreach_support``; torch/distributed/tensor/__init__.py adds DTensor).
    """
    for kinds in (_stepped_by_foreach, _clipped_by_foreach):
        if kind not in kinds:
            kinds.append(kind)


def foreach_copy(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy each of `tensors` into its place, casting, in one operator."""
    torch._foreach_copy_(into, tensors)


def orthogonalized(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Muon's Newton-Schulz steps, by the options of a group; of a bf16 matrix, which is written to.

    (torch/optim/_muon.py, ``_zeropower_via_newtonschulz``: it begins with ``matrix.bfloat16()``;
    which options it takes besides differs from version to version)
    """
    steps: Any = _muon._zeropower_via_newtonschulz
    _, *options = inspect.signature(steps).parameters
    found: torch.Tensor = steps(matrix, **{name: group[name] for name in options})
    return found


def muon_learning_rate(lr: float, adjust: str | None, shape: torch.Size) -> float:
    """The learning rate of a matrix of this shape. (torch/optim/_muon.py, ``_adjust_lr``)"""
    return _muon._adjust_lr(lr, adjust, shape)


def step_in_backward(param: torch.Tensor) -> None:
    """Let backward run the optimizers that torch was told to leave to whoever reduces gradients.

    ``_apply_optimizer_in_backward(..., register_hook=False)`` gives a parameter optimizers, which
    FSDP1 and DDP run on its reduced gradient. With ``register_hook=True`` torch's own hook does.
    (torch/distributed/optim/apply_optimizer_in_backward.py)
    """
    if _IN_BACKWARD not in vars(param):
        return
    # The package scripts functions by torch.jit; whoever gave `param` optimizers has imported it.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    if param not in param_to_optim_hook_handle_map and param not in _stepping:
        _stepping[param] = param.register_post_accumulate_grad_hook(_step)


def _step(param: torch.Tensor) -> None:
    for optimizer in vars(param)[_IN_BACKWARD]:
        optimizer.step()
    param.grad = None
