"""Whole parameters -> flat local storage, padded shards, and what the user sees of them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard import compat
from fxshard.errors import StepError, UnitError
from fxshard.units import Param, Unit, check_shardable
from fxshard.world.c10d import C10dWorld
from fxshard.world.in_process import InProcessWorld


@dataclasses.dataclass
class Slot:
    """Where one parameter lives: its tensor on the module tree, and the shards behind it.

    Attributes:
        param: what it is.
        shards: per rank that this process runs, the padded shard ``[chunk, ...]`` that is sent.
        local: what the parameter has of them: this rank's rows, or all (in-process).
        owners: every (module, name) that holds it; several if it is tied.
    """

    param: Param
    shards: list[Tensor]
    local: Tensor
    owners: list[tuple[nn.Module, str]]

    @property
    def tensor(self) -> nn.Parameter:
        """The parameter as the module tree holds it now."""
        module, name = self.owners[0]
        param = module._parameters[name]
        assert param is not None
        return param

    def settle(self) -> None:
        """Bring the parameter back onto its shards, if something gave it other storage.

        ``load_state_dict(assign=True)``, ``param.data = ...`` and ``module.to(...)`` do.

        Raises:
            StepError: its kind changed, or it is not tied any more.
        """
        tensor = self.tensor
        now, own = local_part(tensor), self.local
        if now.data_ptr() == own.data_ptr() and now.dtype is own.dtype and len(self.owners) == 1:
            return
        if any(module._parameters[name] is not tensor for module, name in self.owners):
            raise StepError(
                f"parameter {self.param.fqn!r} is not tied to {self.param.aliases[1:]} any more. "
                f"Tie them again (load_state_dict without assign=True keeps them tied)."
            )
        if (now.shape, now.dtype, now.device) != (own.shape, own.dtype, own.device):
            raise StepError(
                f"the local part of parameter {self.param.fqn!r} is {list(now.shape)} {now.dtype} "
                f"on {now.device}; when it was sharded it was {list(own.shape)} {own.dtype} on "
                f"{own.device}. Convert and move the model before fxshard.compile."
            )
        if now.data_ptr() != own.data_ptr():
            own.copy_(now.detach())
            if isinstance(tensor, DTensor):
                compat.set_local_tensor(tensor, own)
            else:
                tensor.data = own


def shard_parameters(
    model: nn.Module, units: tuple[Unit, ...], world: C10dWorld | InProcessWorld
) -> dict[str, Slot]:
    """Replace each parameter of `model` by its sharded form. All or nothing.

    The padded shards of a unit are views of one flat storage per dtype.

    Raises:
        UnitError: a parameter has no data (meta) or lives on another device than the world's.
    """
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    modules = dict(model.named_modules())
    for unit in units:
        for param in unit.params:
            owners[param.fqn] = [
                (modules[path], name)
                for alias in param.aliases
                for path, _, name in [alias.rpartition(".")]
            ]
            module, name = owners[param.fqn][0]
            _check_shardable_now(param.fqn, module.get_parameter(name), world)
    made: dict[str, tuple[list[Tensor], Tensor, nn.Parameter]] = {}
    for unit in units:
        for dtype in dict.fromkeys(param.dtype for param in unit.params):
            params = [param for param in unit.params if param.dtype == dtype]
            for param, shards in zip(params, _flat_shards(params, owners, world), strict=True):
                local = _local(param, shards, world)
                made[param.fqn] = (shards, local, _exposed(param, local, world))
    slots: dict[str, Slot] = {}
    for fqn, (shards, local, tensor) in made.items():
        param = next(p for unit in units for p in unit.params if p.fqn == fqn)
        for module, name in owners[fqn]:
            module._parameters[name] = tensor
        slots[fqn] = Slot(param, shards, local, owners[fqn])
    return slots


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a parameter."""
    return compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _check_shardable_now(fqn: str, tensor: nn.Parameter, world: C10dWorld | InProcessWorld) -> None:
    check_shardable(fqn, tensor)
    if isinstance(tensor, DTensor):
        raise UnitError(
            f"parameter {fqn!r} is a DTensor already. Give fxshard the plain model, before "
            f"fully_shard or another fxshard.compile."
        )
    if compat.has_gradient_hooks(tensor):
        raise UnitError(
            f"parameter {fqn!r} has a hook on its gradient, which sharding would drop. Register it "
            f"on the parameter of the model that fxshard.compile returns."
        )
    if tensor.device.type == "meta":
        raise UnitError(
            f"parameter {fqn!r} is on the meta device: it has shape but no data to train. Build "
            f"the model on a real device (fxshard.plan takes meta models)."
        )
    if isinstance(world, C10dWorld) and tensor.device.type != world.mesh.device_type:
        raise UnitError(
            f"parameter {fqn!r} is on {tensor.device}, but the mesh is of device type "
            f"{world.mesh.device_type!r}. Move the model there first, with model.to(...)."
        )


def _flat_shards(
    params: list[Param],
    owners: dict[str, list[tuple[nn.Module, str]]],
    world: C10dWorld | InProcessWorld,
) -> list[list[Tensor]]:
    """Padded shards of `params`, views of one new flat storage per process; padding is zero.

    In-process, the flat storage holds every rank's rows of a parameter one behind the other, so
    that a whole parameter is a view too.
    """
    wholes = []
    for param in params:
        module, name = owners[param.fqn][0]
        wholes.append(module.get_parameter(name).detach())
    ranks = range(world.size) if isinstance(world, InProcessWorld) else range(1)
    numels = [len(ranks) * torch.Size(param.chunk(world.size)).numel() for param in params]
    flat = wholes[0].new_zeros(sum(numels))
    found: list[list[Tensor]] = []
    for param, whole, piece in zip(params, wholes, flat.split(numels), strict=True):
        shards = list(piece.view(len(ranks), *param.chunk(world.size)).unbind())
        for k, shard in enumerate(shards):
            rank = k if isinstance(world, InProcessWorld) else world.rank
            rows = param.rows(rank, world.size)
            shard[: len(rows)].copy_(whole[rows.start : rows.stop])
        found.append(shards)
    return found


def _local(param: Param, shards: list[Tensor], world: C10dWorld | InProcessWorld) -> Tensor:
    """The rows behind the parameter that the user sees: without padding."""
    if isinstance(world, InProcessWorld):
        # unbind() made views of one block; its rows follow each other in the flat storage.
        return shards[0].as_strided(param.shape, torch.empty(param.shape, device="meta").stride())
    return shards[0][: len(param.rows(world.rank, world.size))]


def _exposed(param: Param, local: Tensor, world: C10dWorld | InProcessWorld) -> nn.Parameter:
    """The parameter that the user sees: a DTensor over this rank's rows, or all of them."""
    if isinstance(world, InProcessWorld):
        return nn.Parameter(local, param.requires_grad)
    return nn.Parameter(as_dtensor(param, local, world), param.requires_grad)


def as_dtensor(param: Param, local: Tensor, world: C10dWorld) -> DTensor:
    """This rank's rows as a DTensor of the parameter's global shape."""
    stride = torch.empty(param.shape, device="meta").stride()
    return DTensor.from_local(
        local,
        world.mesh,
        world.placements,
        run_check=False,
        shape=torch.Size(param.shape),
        stride=stride,
    )


def as_gradient(slot: Slot, shards: list[Tensor], world: C10dWorld | InProcessWorld) -> Tensor:
    """The averaged shards of a gradient in the form of the parameter."""
    if isinstance(world, InProcessWorld):
        return torch.cat(shards)[: slot.param.shape[0]]
    local = shards[0][: len(slot.param.rows(world.rank, world.size))]
    return as_dtensor(slot.param, local, world)
