"""What torch's own FSDP2 (``torch.distributed.fsdp.fully_shard``) does, made visible."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.distributed.tensor import _op_schema, _sharding_prop

from fxshard._torch import modes

Change = tuple[Any, str, Any]  # a module or class, a name there, and what it is for a while

_ABSENT = object()


@contextlib.contextmanager
def replaced(changes: list[Change]) -> Iterator[None]:
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


class Listener(Protocol):
    """What is told of the units that run, each by its module."""

    def gathering(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Around the launch of a unit's all-gather."""

    def copying_out(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Around the copies from what was gathered into unsharded parameters."""

    def reducing(self, module: nn.Module, grads: list[torch.Tensor]) -> AbstractContextManager[Any]:
        """Around the reduction of a unit's unsharded gradients."""

    def unsharded(self, module: nn.Module) -> None:
        """A unit has been unsharded."""

    def resharded(self, module: nn.Module) -> None:
        """A unit has been resharded."""


@contextlib.contextmanager
def watched(listener: Listener) -> Iterator[None]:
    """Tell `listener` what FSDP2 does while the block runs.

    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``FSDPParamGroup``)
    """
    group = _fsdp_param_group.FSDPParamGroup
    running: list[nn.Module] = []  # of the groups whose methods run

    def of_group(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            running.append(self.modules[0])
            try:
                return method(self, *args, **kwargs)
            finally:
                running.pop()

        return run

    def inside(
        function: Callable[..., Any], around: Callable[..., AbstractContextManager[Any]]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with around(*args):
                return function(*args, **kwargs)

        return run

    plain_wait, plain_reshard = group.wait_for_unshard, group._to_sharded

    def wait(self: Any) -> None:
        pending = self._all_gather_result is not None
        plain_wait(self)
        if pending:
            listener.unsharded(self.modules[0])

    def reshard(self: Any) -> None:
        unsharded = self.is_unsharded
        plain_reshard(self)
        if unsharded:
            listener.resharded(self.modules[0])

    module: Any = _fsdp_param_group
    with replaced(
        [
            (group, "unshard", of_group(group.unshard)),
            (group, "wait_for_unshard", of_group(wait)),
            (group, "post_backward", of_group(group.post_backward)),
            (group, "_to_sharded", reshard),
            (
                module,
                "foreach_all_gather",
                inside(module.foreach_all_gather, lambda *_: listener.gathering(running[-1])),
            ),
            (
                module,
                "foreach_all_gather_copy_out",
                inside(
                    module.foreach_all_gather_copy_out,
                    lambda *_: listener.copying_out(running[-1]),
                ),
            ),
            (
                module,
                "foreach_reduce",
                inside(
                    module.foreach_reduce,
                    lambda params, grads, *_: listener.reducing(running[-1], grads),
                ),
            ),
        ]
    ):
        yield


@contextlib.contextmanager
def device_handle(handle: Any) -> Iterator[None]:
    """FSDP2 takes streams and events from `handle`, in place of those of ``torch.cuda``."""

    def handed(*_: Any, **__: Any) -> Any:
        return handle

    users = (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state)
    with replaced([(module, "_get_device_handle", handed) for module in users]):
        yield


@contextlib.contextmanager
def meshes_with_values() -> Iterator[None]:
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


@contextlib.contextmanager
def propagation_unseen() -> Iterator[None]:
    """DTensor works out shapes of unsharded results on fake tensors of its own, outside of modes.

    They are on the CPU, also for a mesh of GPUs that are not there, where C++ would ask for them.
    (torch/distributed/tensor/_sharding_prop.py, ``_propagate_tensor_meta``; _op_schema.py,
    ``_rebuild_tensor_from_dtensor_meta``)
    """

    def on_cpu(spec: Any) -> torch.Tensor:
        meta = spec.tensor_meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")

    propagator = _sharding_prop.ShardingPropagator
    plain = propagator._propagate_tensor_meta_non_cached

    @functools.wraps(plain)
    def propagate(self: Any, schema: Any) -> Any:
        with modes.outside_modes(), torch._C.DisableTorchFunction():
            return plain(self, schema)

    changes: list[Change] = [
        (propagator, "_propagate_tensor_meta_non_cached", propagate),
        (_op_schema, "_rebuild_tensor_from_dtensor_meta", on_cpu),
    ]
    with replaced(changes):
        yield


_OWNER: Any = fully_shard.__wrapped__  # type: ignore[attr-defined]  # whose state it is


def set_state(module: nn.Module, state: Any) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` give `state`.

    (torch/distributed/_composable/contract.py, ``contract``)
    """
    module.__dict__.setdefault(STATE_KEY, {})[_OWNER] = state


def state_of(module: nn.Module) -> Any:
    """What FSDP2 knows of a module that it has sharded; None of any other."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def without_state(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a module without what `set_state` put there; with those of other functions."""
    others = {of: state for of, state in attributes.get(STATE_KEY, {}).items() if of is not _OWNER}
    rest = {name: value for name, value in attributes.items() if name != STATE_KEY}
    return rest | ({STATE_KEY: others} if others else {})


def forget_state(module: nn.Module) -> None:
    """Undo `set_state`."""
    module.__dict__.get(STATE_KEY, {}).pop(_OWNER, None)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a DTensor keeps on this rank, without an operator; another tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def units_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Per call of `fully_shard` its first module, and whether it reshards after forward."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # torch 2.11 knows one group per call
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            found += [(group.modules[0], bool(group._reshard_after_forward)) for group in groups]
    return found
