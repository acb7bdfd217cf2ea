"""Optimizers: their hooks, their state while nothing steps, and the parts of Muon's step."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, _muon
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
def not_stepped(optimizer: Optimizer) -> Iterator[None]:
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
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
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


class _OfMesh(tuple[Any, ...]):
    """A key of torch's (device, dtype), unlike all others."""

    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__


def group_by_mesh() -> None:
    """Let optimizers step tensors many at once on each mesh, and plain ones.

    torch steps those of a device and a dtype together, and DTensor refuses plain tensors among its
    own. (torch/optim/optimizer.py, ``Optimizer._group_tensors_by_device_and_dtype``)
    """
    group = Optimizer._group_tensors_by_device_and_dtype
    if getattr(group, "by_mesh", False):
        return

    @functools.wraps(group)
    def by_mesh(lists: Any, with_indices: bool = False) -> Any:
        several = not torch.compiler.is_compiling() and len(set(_meshes(lists[0]))) > 1
        found = group(lists, with_indices or several)
        if not several:
            return found
        split = {}
        for key, (members, indices) in found.items():
            meshes = _meshes(members[0])
            for mesh in dict.fromkeys(meshes):
                here = [i for i, each in enumerate(meshes) if each == mesh]
                of_mesh = [[held[i] for i in here if held] for held in members]
                split[_OfMesh(key)] = of_mesh, [indices[i] for i in here]
        return split

    by_mesh.by_mesh = True  # type: ignore[attr-defined]
    Optimizer._group_tensors_by_device_and_dtype = staticmethod(by_mesh)  # type: ignore[assignment]


def _meshes(tensors: Sequence[object]) -> list[DeviceMesh | None]:
    return [t.device_mesh if isinstance(t, DTensor) else None for t in tensors]


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
