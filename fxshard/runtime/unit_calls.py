"""The arguments of each call of `fxshard.fully_shard`, and the options that they amount to."""

from __future__ import annotations

import dataclasses
import glob
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from fxshard.capture.modules import join, without_wrappers
from fxshard.config.options import Options
from fxshard.errors import ConfigError
from fxshard.ir.placements import OnMesh, said
from fxshard.runtime.initialise import leave_empty

log: logging.Logger = logging.getLogger("fxshard")


@dataclasses.dataclass(frozen=True)
class UnitCall:
    """The arguments of one call, as `torch.distributed.fsdp.fully_shard` names them.

    Attributes:
        mesh: as given.
        reshard_after_forward: None: False for the root, True for any other module. A group of 1
            rank is False.
        ignored_params: those that are parameters of its modules.
        shard_placement_fn: until `with_placements` has asked it.
        placements: see `with_placements`.
        together: the same object for all modules of the call.
    """

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: tuple[nn.Parameter, ...]
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    ranks_may_differ: bool = False
    pipeline_stage: bool = False
    placements: Mapping[str, Shard | OnMesh] = dataclasses.field(default_factory=dict)
    together: object = dataclasses.field(default_factory=object, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        modules: Sequence[Any],
        dp_mesh_dims: Any,
        ignored_params: Collection[Any] | None,
        **others: Any,
    ) -> UnitCall:
        """Raises ConfigError for what is no module, and for `dp_mesh_dims`."""
        for module in modules:
            if not isinstance(module, nn.Module):
                raise ConfigError(
                    f"fully_shard takes an nn.Module or a list of them, not {module!r}."
                )
        if dp_mesh_dims is not None:
            raise ConfigError(
                "dp_mesh_dims is not supported: it is for parameters that are DTensors on all of "
                "the mesh. Give the data-parallel part of the mesh alone, such as "
                "mesh=mesh['dp_shard'], after parallelize_module on the rest."
            )
        reshard = others.get("reshard_after_forward")
        if reshard == 1 and not isinstance(reshard, bool):
            log.warning(
                "fxshard: fully_shard(reshard_after_forward=1) keeps parameters unsharded after "
                "forward, as reshard_after_forward=False does: a group of one rank holds all of "
                "them. Give True to shard them."
            )
            others["reshard_after_forward"] = False
        chosen = {id(param) for param in ignored_params or ()}
        own = {id(param): param for module in modules for param in module.parameters()}
        ignored = tuple(param for key, param in own.items() if key in chosen)
        return cls(ignored_params=ignored, **others)

    def on(self, mesh: DeviceMesh) -> UnitCall:
        """The same, on the mesh that it was made on."""
        return self if self.mesh is not None else dataclasses.replace(self, mesh=mesh)

    def placed_beside(self, root: DeviceMesh | None) -> dict[str, Shard | OnMesh]:
        """`placements`, each with its mesh if that is not the one of the root."""
        found: dict[str, Shard | OnMesh] = {}
        for fqn, each in self.placements.items():
            mesh = each.mesh if isinstance(each, OnMesh) else self.mesh or root
            dim = each.placement if isinstance(each, OnMesh) else each
            found[fqn] = dim if mesh is None or mesh == root else OnMesh(dim, mesh)
        return found

    def with_placements(self, module: nn.Module, without: Collection[int]) -> UnitCall:
        """The same, with what `shard_placement_fn` says of each parameter.

        Args:
            module: the one that the call was for.
            without: ids of parameters of earlier calls.

        Raises:
            UnitError: a parameter cannot be sharded as the function says.
        """
        left_out = {*without, *map(id, self.ignored_params)}
        params: dict[tuple[str, ...], nn.Parameter] = {
            (fqn,): param for fqn, param in module.named_parameters() if id(param) not in left_out
        }
        placements = said(self.shard_placement_fn, params)
        # The function is not kept: it often knows parameters, which are full before they are
        # sharded, by a set of them.
        return dataclasses.replace(self, placements=placements, shard_placement_fn=None)


def outermost(modules: Sequence[Any]) -> list[Any]:
    """`modules`, each once, without those inside of another one.

    Raises:
        ConfigError: there is none.
    """
    if not modules:
        raise ConfigError("fully_shard got an empty list of modules.")
    given = [each for each in modules if isinstance(each, nn.Module)]
    inside = {id(sub) for each in given for sub in each.modules() if sub is not each}
    return [each for each in dict.fromkeys(modules) if id(each) not in inside]


def options_of(
    calls: Mapping[str, UnitCall], mesh: DeviceMesh | None, names: Iterable[str]
) -> Options:
    """The options of a model on which, and on some submodules of which, `fully_shard` was called.

    Args:
        calls: by FQN of the module; "" is the root. Those of one call are one unit.
        mesh: of the root: 1-D, or 2-D replicate x shard; None: 1-D.
        names: of all parameters. Calls may have other names for them: a wrapper of an activation
            checkpoint leaves itself out of the names that it gives, and its parents do not.

    Raises:
        ConfigError: a mesh has more dimensions, or calls differ in their `offload_policy`.
    """
    root = calls.get("") or calls["0"]  # of a list there is no root
    for each in (mesh, *(call.mesh for call in calls.values())):
        if each is not None and each.ndim > 2:
            raise ConfigError(
                f"fully_shard takes a 1-D mesh, or a 2-D one, replicate x shard; this {each} has "
                f"{each.ndim} dimensions. Give its data-parallel part, such as "
                f"mesh['replicate', 'shard'] by the names that it was made with (mesh_dim_names=)."
            )
    for fqn, call in calls.items():
        if call.offload_policy != root.offload_policy:
            raise ConfigError(
                f"fully_shard: offload_policy is {call.offload_policy!r} for {fqn!r}, and "
                f"{root.offload_policy!r} for the module around it. All units of a model are "
                f"offloaded, or none: give all calls the same offload_policy."
            )
    by_glob = {glob.escape(fqn): call for fqn, call in calls.items()}
    plain = {without_wrappers(name): name for name in names}
    units: dict[int, list[str]] = {}
    for fqn, call in by_glob.items():
        if fqn:
            units.setdefault(id(call.together), []).append(fqn)
    return {
        "strategy": "full_shard" if mesh is None or mesh.ndim == 1 else "hybrid_shard",
        "units": list(units.values()),
        "shard_placement_fn": {
            plain[without_wrappers(join(fqn, name))]: placement
            for fqn, call in calls.items()
            for name, placement in call.placed_beside(mesh).items()
            if placement != Shard(0)
        },
        "ignored": [param for call in calls.values() for param in call.ignored_params],
        "reshard_after_forward": {
            fqn: bool(fqn) if call.reshard_after_forward is None else call.reshard_after_forward
            for fqn, call in by_glob.items()
        },
        "mixed_precision": {fqn: call.mp_policy for fqn, call in by_glob.items()},
        "offload": root.offload_policy,
        "ranks_may_differ": any(call.ranks_may_differ for call in calls.values()),
        "pipeline_stage": any(call.pipeline_stage for call in calls.values()),
        "param_init_fn": leave_empty,
    }
