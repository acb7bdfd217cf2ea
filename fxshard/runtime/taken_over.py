"""`fxshard.fully_shard` of a module takes over the submodules that earlier calls have sharded."""

from __future__ import annotations

import dataclasses

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
from fxshard.runtime.world.c10d import C10dWorld


@dataclasses.dataclass
class Inner:
    """The submodules of a module that earlier calls have sharded.

    Attributes:
        calls: by FQN of the submodule; "" is the new one.
        slots: the parameters that were sharded.
        mesh: that of all calls, the new one included; None: no call has one yet.
    """

    calls: dict[str, UnitCall]
    slots: list[Slot]
    mesh: DeviceMesh | None


def taken_over(module: nn.Module, call: UnitCall) -> Inner:
    """Give sharded submodules of `module` their own classes back, and collect their parameters.

    Args:
        module: changed; the caller restores it if an error is raised.
        call: the new one, for `module` itself.

    Raises:
        ConfigError: `module` is sharded already; a submodule was not sharded by `fully_shard`, has
            run, or is on another mesh; or fxshard does not support what `call` asks for.
        UnitError: `module` shares a parameter with a sharded submodule, or a parameter cannot be
            sharded as `shard_placement_fn` says.
    """
    kind = users_class(module).__name__
    if isinstance(module, FxshardModule):
        raise ConfigError(
            f"fully_shard: this {kind} is sharded already, by fully_shard or fxshard.compile. Call "
            f"fully_shard once on each module."
        )
    inner = Inner({"": call}, [], call.mesh)
    for fqn, each in list(module.named_modules()):
        if isinstance(each, FxshardModule):
            _check_fresh(kind, fqn, each._fxshard)
            runtime = released(each)
            inner.mesh = _common_mesh(fqn, inner.mesh, runtime)
            for path, made in runtime.unit_calls.items():
                inner.calls[f"{fqn}.{path}" if path else fqn] = made
            inner.slots += runtime.slots.values()
    taken = {id(slot.tensor) for slot in inner.slots}
    for fqn, param in module.named_parameters(remove_duplicate=False):
        if id(param) not in taken and hasattr(param, replaced.PLACE):
            raise ConfigError(
                f"fully_shard: parameter {fqn!r} of this {kind} is sharded already, with a module "
                f"around it. Call fully_shard on blocks first, and on the model last."
            )
        if (was := replaced.was(param)) is not None:
            raise UnitError(
                f"fully_shard: parameter {fqn!r} of this {kind} was tied to {was!r}, which an "
                f"earlier call has sharded. Call fully_shard on no module that holds one of the "
                f"two without the other."
            )
    inner.calls[""] = call.with_placements(module, taken)
    return inner


def _check_fresh(kind: str, fqn: str, runtime: Runtime) -> None:
    if not runtime.unit_calls:
        raise ConfigError(
            f"fully_shard: {fqn!r} of this {kind} was given to fxshard.compile before, and is a "
            f"root of its own. Call fully_shard on it instead, or leave it to this call."
        )
    if runtime.variants:
        raise ConfigError(
            f"fully_shard: {fqn!r} of this {kind} has run already, as a root of its own. Call "
            f"fully_shard on all blocks and on the model before any of them runs."
        )


def _common_mesh(fqn: str, mesh: DeviceMesh | None, runtime: Runtime) -> DeviceMesh:
    """The mesh of `runtime`.

    Raises:
        ConfigError: it is not that of the other calls.
    """
    assert isinstance(runtime.world, C10dWorld)
    own = runtime.world.mesh
    is_default = own.ndim == 1 and own.size() == dist.get_world_size()
    if own != mesh if mesh is not None else not is_default:
        other = mesh if mesh is not None else "None (all ranks)"
        raise ConfigError(
            f"fully_shard: {fqn!r} is on {own}, and the module around it was to be on {other}: "
            f"fxshard shards a model over one mesh. Give all calls the same mesh."
        )
    return own
