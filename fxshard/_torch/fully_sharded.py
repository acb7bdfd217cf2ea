"""What torch's own FSDP2 (``torch.distributed.fsdp.fully_shard``) does, made visible."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param_group,
    _fsdp_state,
)

from fxshard._torch import modes

_HANDLED = (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state)


class Listener(Protocol):
    """What is told of the units that run."""

    def gathering(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Around the launch of a unit's all-gather."""

    def copying_out(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Around the copies from what was gathered into unsharded parameters."""

    def reducing(
        self, module: nn.Module, grads: list[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Around the reduction of a unit's unsharded gradients."""

    def unsharded(self, module: nn.Module) -> None:
        """A unit has been unsharded."""

    def resharded(self, module: nn.Module) -> None:
        """A unit has been resharded."""


@contextlib.contextmanager
def watched(listener: Listener) -> Iterator[None]:
    """Tell `listener` what FSDP2 does while the block runs.

    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)
    """
    group = _fsdp_param_group.FSDPParamGroup
    gather, copy_out = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_all_gather_copy_out
    reduce, wait, reshard = _fsdp_param_group.foreach_reduce, group.wait_for_unshard, group._to_sharded

    def module_of(params: Any) -> nn.Module:
        module: nn.Module = params[0]._module_info.module
        return module

    @functools.wraps(gather)
    def gather_here(params: Any, *args: Any, **kwargs: Any) -> Any:
        with listener.gathering(module_of(params)):
            return gather(params, *args, **kwargs)

    @functools.wraps(copy_out)
    def copy_out_here(result: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        with listener.copying_out(module_of(params)):
            return copy_out(result, params, *args, **kwargs)

    @functools.wraps(reduce)
    def reduce_here(params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        with listener.reducing(module_of(params), grads):
            return reduce(params, grads, *args, **kwargs)

    @functools.wraps(wait)
    def wait_here(self: Any) -> Any:
        pending = self._all_gather_result
        done = wait(self)
        if pending:
            del pending
            listener.unsharded(self.modules[0])
        return done

    @functools.wraps(reshard)
    def reshard_here(self: Any) -> Any:
        was = self.is_unsharded
        done = reshard(self)
        if was:
            listener.resharded(self.modules[0])
        return done

    changed: list[tuple[Any, str, Any, Any]] = [
        (_fsdp_param_group, "foreach_all_gather", gather, gather_here),
        (_fsdp_param_group, "foreach_all_gather_copy_out", copy_out, copy_out_here),
        (_fsdp_param_group, "foreach_reduce", reduce, reduce_here),
        (group, "wait_for_unshard", wait, wait_here),
        (group, "_to_sharded", reshard, reshard_here),
    ]
    with replaced([(owner, name, now) for owner, name, _, now in changed]):
        yield


@contextlib.contextmanager
def replaced(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of modules and classes have other values while the block runs."""
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in changes]
    for owner, name, now in changes:
        setattr(owner, name, now)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_ABSENT = object()


@contextlib.contextmanager
def device_handle(handle: Any) -> Iterator[None]:
    """FSDP2 takes streams and events from `handle`, in place of ``torch.cpu``."""
    def handed(*_: Any, **__: Any) -> Any:
        return handle

    with replaced([(module, "_get_device_handle", handed) for module in _HANDLED]):
        yield


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a DTensor keeps on this rank, without an operator; another tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def sharded_units(model: nn.Module) -> list[str]:
    """FQNs of the modules that `fully_shard` was called on."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def meshes_are_real() -> Iterator[None]:
    """Methods of DeviceMesh compute with tensors of ranks: outside of any mode, on real ones."""

    def outside(method: Any) -> Any:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with modes.outside_modes():
                return method(*args, **kwargs)

        return run

    methods = [
        (DeviceMesh, name, outside(method))
        for name, method in vars(DeviceMesh).items()
        if isinstance(method, types.FunctionType)
    ]
    with replaced(methods):
        yield
