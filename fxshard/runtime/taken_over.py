"""`fxshard.fully_shard` of a module takes over the submodules that earlier calls have sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.capture.swapped import users_class
from fxshard.errors import ConfigError, UnitError
from fxshard.runtime import replaced
from fxshard.runtime.module import FxshardModule, released
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.sharding import Slot
from fxshard.runtime.unit_calls import UnitCall
from fxshard.runtime.unit_methods import place_of
from fxshard.runtime.unit_modules import take_methods
from fxshard.runtime.world.c10d import C10dWorld


@dataclasses.dataclass
class Inner:
    """The submodules of a module that earlier calls have sharded.

    Attributes:
        calls: by FQN of the submodule; that of the new one, for each of its modules, too.
        chosen: by FQN of the submodule, the settings that its methods have changed since.
        slots: the parameters that were sharded.
        mesh: that of the new call; None: it has none, nor have the earlier ones.
    """

    calls: dict[str, UnitCall]
    chosen: dict[str, dict[str, Any]]
    slots: list[Slot]
    mesh: DeviceMesh | None


def taken_over(module: nn.Module, call: UnitCall, own: Sequence[str]) -> Inner:
    """Give sharded submodules of `module` their own classes back, and collect their parameters.

    Args:
        module: changed; the caller restores it if an error is raised.
        call: the new one.
        own: FQNs of the modules that it is for: "", or those of all children.

    Raises:
        ConfigError: `module` is sharded already; a submodule was not sharded by `fully_shard`, has
            run; or fxshard does not support what `call` asks for.
        UnitError: `module` shares a parameter with a sharded submodule, or a parameter cannot be
            sharded as `shard_placement_fn` says.
    """
    kind = users_class(module).__name__
    require_unsharded(module)
    inner = Inner({}, {}, [], call.mesh)
    runtimes: dict[Runtime, str] = {}  # and the FQN of a module of theirs
    for fqn, each in list(module.named_modules()):
        place = place_of(each)
        if place is None:
            continue
        runtime, path = place
        if runtime not in runtimes:
            _check_fresh(kind, fqn, runtime, module)
            inner.mesh = inner.mesh or _default_mesh(runtime)
            inner.slots += runtime.slots.values()
            runtimes[runtime] = fqn
        inner.calls[fqn] = runtime.unit_calls[path].on(_mesh_of(runtime))
        if path in runtime.chosen:
            inner.chosen[fqn] = runtime.chosen[path]
        if isinstance(each, FxshardModule):
            released(each)
        else:
            take_methods(each)
    taken = {id(slot.tensor) for slot in inner.slots}
    for fqn, param in module.named_parameters(remove_duplicate=False):
        if id(param) not in taken and hasattr(param, replaced.PLACE):
            raise _top_down(kind, f"parameter {fqn!r}")
        if (was := replaced.was(param)) is not None:
            raise UnitError(
                f"fully_shard: parameter {fqn!r} of this {kind} was tied to {was!r}, which an "
                f"earlier call has sharded. Call fully_shard on no module that holds one of the "
                f"two without the other, or give it a list of both."
            )
    new = {fqn: call.with_placements(module.get_submodule(fqn), taken) for fqn in own}
    inner.calls = new | inner.calls
    return inner


def require_unsharded(module: nn.Module) -> None:
    """Raise ConfigError if `module` was given to `fully_shard` or `fxshard.compile` before."""
    if place_of(module) is not None:
        raise ConfigError(
            f"fully_shard: this {users_class(module).__name__} is sharded already, by fully_shard "
            f"or fxshard.compile. Call fully_shard once on each module."
        )


def _top_down(kind: str, what: str) -> ConfigError:
    return ConfigError(
        f"fully_shard: {what} of this {kind} is sharded already, with a module around it. Call "
        f"fully_shard on blocks first, and on the model last."
    )


def _check_fresh(kind: str, fqn: str, runtime: Runtime, module: nn.Module) -> None:
    """Check that `module` may take over what `runtime`, of its submodule `fqn`, has sharded."""
    if not runtime.unit_calls:
        raise ConfigError(
            f"fully_shard: {fqn!r} of this {kind} was given to fxshard.compile before, and is a "
            f"root of its own. Call fully_shard on it instead, or leave it to this call."
        )
    if runtime.variants or runtime.accumulated:
        raise ConfigError(
            f"fully_shard: {fqn!r} of this {kind} has run already, as a root of its own. Call "
            f"fully_shard on all blocks and on the model before any of them runs."
        )
    if runtime.comm_hook:
        raise ConfigError(
            f"fully_shard: {fqn!r} of this {kind} has a hook for its reductions. Set hooks after "
            f"the last call of fully_shard."
        )
    here = set(module.modules())
    given = runtime.model.children() if "" not in runtime.unit_calls else [runtime.model]
    missing = next((each for each in given if each not in here), None)
    if missing is not None and "" in runtime.unit_calls:
        raise _top_down(kind, f"module {fqn!r}")
    if missing is not None:
        raise ConfigError(
            f"fully_shard: {fqn!r} of this {kind} was given in a list with a "
            f"{users_class(missing).__name__}, which is not in this {kind}. Call fully_shard on a "
            f"module that holds both, or on each of them by itself."
        )


def _mesh_of(runtime: Runtime) -> DeviceMesh:
    assert isinstance(runtime.world, C10dWorld)
    return runtime.world.mesh


def _default_mesh(runtime: Runtime) -> DeviceMesh | None:
    """The mesh of `runtime` if that is one of all ranks, as a call without a mesh has it."""
    mesh = _mesh_of(runtime)
    return mesh if mesh.ndim == 1 and mesh.size() == dist.get_world_size() else None
