"""Full parameters -> flat local storage, padded shards, and the parameters that the user sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Placement

from fxshard._torch import autograd, dtensors
from fxshard._torch.dtensors import joined, local_part
from fxshard._torch.storages import storage_id
from fxshard.capture.held import give_attributes, own_attributes
from fxshard.config.checked import Config
from fxshard.errors import StepError, UnitError
from fxshard.ir.extensions import Extension, drop_computed_scale
from fxshard.ir.layout import Grid, ParamLayout, chunk_of, flat_numels, without_padding
from fxshard.ir.layout import layouts as layouts_of
from fxshard.ir.shardable import check_gradient_dtype, check_shardable, note_replaced
from fxshard.ir.units import Param, Unit
from fxshard.runtime.initialise import (
    check_fillable,
    full_tensors,
    has_the_data,
    leave_empty,
    owners_of,
)
from fxshard.runtime.replaced import gather_as
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld


@dataclasses.dataclass
class Slot:
    """One parameter: its tensor on the module tree, and its shards.

    Attributes:
        param: its description.
        layout: where its rows are.
        shards: per rank that this process runs, the memory of the padded shard that is sent.
        local: the view of them that the parameter holds: this rank's rows, or all (in-process). On
            the meta device until its unit gets memory; the parameter until it gets values.
        owners: every (module, name) that holds it; several if it is tied.
        moves: how often it was given other memory, whose version counters begin again.
    """

    param: Param
    layout: ParamLayout
    shards: list[Tensor]
    local: Tensor
    owners: list[tuple[nn.Module, str]]
    moves: int = 0

    @property
    def tensor(self) -> nn.Parameter:
        """The parameter as the module tree holds it now."""
        module, name = self.owners[0]
        param = module._parameters.get(name)
        if param is None:
            raise StepError(
                f"parameter {self.param.fqn!r} was taken out of the model after it was sharded. "
                f"Change the plain model, and compile that."
            )
        return param

    @property
    def is_there(self) -> bool:
        """False if the parameter was taken out of the module tree."""
        module, name = self.owners[0]
        return module._parameters.get(name) is not None

    def sent(self, rank: int) -> Tensor:
        """The padded shard of a rank that this process runs, as programs take it."""
        if len(self.shards) > 1 and self.layout.dim:  # the storage holds the parameter itself
            layout = self.layout
            return chunk_of(self.local, layout.dim, layout.shard_shape[layout.dim], rank)
        return self.shards[rank]

    def holds(self, tensor: Any) -> bool:
        """True if `place` of this tensor was the last that happened to the module tree."""
        return all(module._parameters.get(name) is tensor for module, name in self.owners)

    def place(self, tensor: Any) -> None:
        """Let the module tree hold `tensor` in the place of the parameter."""
        for module, name in self.owners:
            before = module._parameters.get(name)
            if isinstance(before, Tensor) and isinstance(tensor, Tensor):
                give_attributes(tensor, own_attributes(before))
            module._parameters[name] = tensor

    @property
    def is_sharded(self) -> bool:
        """True if the module tree holds the sharded parameter itself now."""
        tensor = self.owners[0][0]._parameters.get(self.owners[0][1])
        if not isinstance(tensor, DTensor) or self.param.extension is not None:
            return isinstance(tensor, DTensor)
        return storage_id(local_part(tensor)) == storage_id(self.local)

    def as_held(self, local: Tensor) -> Tensor:
        """A tensor like `local` as the parameter holds it: in its subclass, if it is of one."""
        extension = self.param.extension
        return local if extension is None else extension.around(local)

    def without_padding(self, shards: list[Tensor]) -> Tensor:
        """The rows of `local`, of the shards of a gradient."""
        return without_padding(shards, self.layout, self.local.shape[self.layout.dim])

    def require_kind(self, tensor: Tensor) -> None:
        """Raises StepError if a parameter of a subclass is not what its program was traced with."""
        extension = self.param.extension
        held: Any = dtensors.held_part(tensor)
        if extension is None:
            if hasattr(held, dtensors.PRE):
                raise StepError(
                    f"parameter {self.param.fqn!r} has {dtensors.PRE} now, and had none when it "
                    f"was sharded: programs would not call it. Give the class of the parameter "
                    f"both functions before it is sharded."
                )
            return
        drop_computed_scale(held)
        now, names, context = type(held), [], None
        if now is extension.kind:
            names, context = held.__tensor_flatten__()
        if now is extension.kind and context == extension.context:
            if list(names) == [extension.inner]:
                return
            what = f"holds {' and '.join(names)} now, and held {extension.inner}"
        elif now is extension.kind:
            what = f"has the context {context!r} now, and had {extension.context!r}"
        else:
            what = f"is a {now.__name__} now"
        raise StepError(
            f"parameter {self.param.fqn!r}, a {extension.kind.__name__}, {what}: the operators of "
            f"its all-gather were traced when it was sharded. Leave it as it was, and write values "
            f"into it; or compile the plain model again."
        )

    def require_dtensor(self, world: C10dWorld) -> None:
        """Raises StepError if the parameter is no DTensor, or one whose rows are other ranks'."""
        tensor = self.tensor
        mesh, places = placed_on(self.param, world)
        if not isinstance(tensor, DTensor):
            raise self.of_another_kind(
                f"it is a plain tensor of shape {list(tensor.shape)}, which no other rank has a "
                f"part of; when it was sharded it was a DTensor of shape {list(self.param.shape)}"
            )
        there = tensor.device_mesh
        ranks, own = there.mesh.tolist(), mesh.mesh.tolist()
        if ranks != own or list(tensor.placements) != list(places):
            raise self.of_another_kind(
                f"it is {list(tensor.placements)} over ranks {ranks}; when it was sharded it was "
                f"{list(places)} over ranks {own}"
            )

    def of_another_kind(self, how: str) -> StepError:
        return StepError(
            f"parameter {self.param.fqn!r} is another kind of tensor than compile made it: {how}. "
            f"Write values into a parameter in place of exchanging it (with "
            f"model.summon_full_params(): ..., or load_state_dict); convert and move the whole "
            f"model (model.to(...)), or do it before fxshard.compile."
        )

    def is_elsewhere(self) -> bool:
        """True if something gave the parameter other memory than its shards.

        ``load_state_dict(assign=True)`` and ``module.to(...)`` do; in one process also
        ``param.data = ...``, of which `fxshard.runtime.gathering` takes this rank's rows otherwise.

        Raises:
            StepError: it has another shape, dtype or device, or is not tied any more.
        """
        tensor = self.tensor
        self.require_kind(tensor)
        now, own = local_part(tensor), self.local
        stays = now.data_ptr() == own.data_ptr() and now.dtype is own.dtype
        stays = stays and now.shape == own.shape and now.stride() == own.stride()
        if stays and len(self.owners) == 1:
            return False
        if any(module._parameters[name] is not tensor for module, name in self.owners):
            raise StepError(
                f"parameter {self.param.fqn!r} is not tied to {self.param.aliases[1:]} any more. "
                f"Tie them again (load_state_dict without assign=True keeps them tied)."
            )
        if now.is_meta and not own.is_meta and now.shape == own.shape:
            return False  # its unit has memory already; `ParameterStore.require_filled` complains
        placed = self.param.placed
        shape = self.param.shape if placed is None else placed.shape
        others = isinstance(tensor, DTensor) and tuple(tensor.shape) != tuple(shape)
        if others or (now.shape, now.dtype, now.device) != (own.shape, own.dtype, own.device):
            raise self.of_another_kind(
                f"its local part is {list(now.shape)} {now.dtype} on {now.device}; when it was "
                f"sharded it was {list(own.shape)} {own.dtype} on {own.device}"
            )
        if not stays and self.param.extension is not None and not isinstance(tensor, DTensor):
            raise StepError(
                f"parameter {self.param.fqn!r}, a {self.param.extension.kind.__name__}, was "
                f"given other memory. Write values into it (copy_) in place of exchanging it."
            )
        return not stays


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A model, and how it is to be sharded.

    Attributes:
        kept: parameters of `model` that are sharded already, in the same world: they stay.
    """

    model: nn.Module
    units: tuple[Unit, ...]
    world: C10dWorld | InProcessWorld
    config: Config
    kept: Sequence[Slot] = ()


def shard_parameters(sharding: Sharding) -> dict[str, Slot]:
    """Replace each parameter of the model by its sharded form, and meta buffers by real ones.

    Nothing is changed if an error is raised. The padded shards of a unit are views of one flat
    storage per dtype. Meta tensors are filled on the world's device (in-process: that of the
    model), or rank 0's data is broadcast; see `fxshard.runtime.initialise`. With `leave_empty` they
    stay on the meta device, sharded.

    Raises:
        UnitError: a parameter lives on another device than the world's, has a gradient hook or is
            sharded already; or something on the meta device was not filled.
        RankMismatchError: rank 0's data is to be broadcast, and the ranks hold different buffers,
            or one of them refuses its model.
    """
    model, world, config = sharding.model, sharding.world, sharding.config
    named = dict(model.named_parameters())
    before = {id(slot.tensor): slot for slot in sharding.kept}
    all_params = [param for unit in sharding.units for param in unit.params]
    units = tuple(
        dataclasses.replace(
            unit, params=tuple(p for p in unit.params if id(named[p.fqn]) not in before)
        )
        for unit in sharding.units
    )
    originals = {param.fqn: named[param.fqn] for unit in units for param in unit.params}
    chosen = set(map(id, originals.values()))
    ignored = [param for param in model.parameters() if id(param) not in chosen]
    sync = world if config.sync_module_states and isinstance(world, C10dWorld) else None
    refusal = _refusal(model, units, originals, ignored, world, config)
    if sync:
        _agree_to_sync(model, refusal, sync)
    if refusal:
        raise refusal
    device, others = _home(model, world), other_meshes(world)
    every = layouts_of(units, world.size, world.replicas, others)
    layouts = {fqn: every[fqn] for fqn in originals}
    filled = config.param_init_fn is not leave_empty
    made = _flat_shards(layouts, originals, device, world, config.offload_policy, filled=filled)
    params = {id(originals[param.fqn]): param for unit in units for param in unit.params}
    buffers: list[tuple[Tensor, Tensor]] = []
    on = {param.fqn: param.mesh for param in all_params}
    locals_ = {f: _local(layouts[f], shards, rank_on(world, on[f])) for f, shards in made.items()}
    for tensor, full in full_tensors(model, device, config.param_init_fn, sync, ignored):
        if id(tensor) in params:
            fqn = params[id(tensor)].fqn
            rank = rank_on(world, on[fqn])
            _take_rows(layouts[fqn], locals_[fqn], local_part(full).detach(), rank)
        elif full is not tensor:
            buffers.append((tensor, full.detach()))
        del full  # before the next one is made
    owners = owners_of(model)
    slots: dict[str, Slot] = {}
    for key, param in params.items():
        layout, shards, local = layouts[param.fqn], made[param.fqn], locals_[param.fqn]
        slots[param.fqn] = Slot(param, layout, shards, local, owners[key])
    exposed = {
        fqn: _exposed(
            slot,
            slot.local if filled or not originals[fqn].is_meta else slot.local.to("meta"),
            world,
        )
        for fqn, slot in slots.items()
    }
    for unit in units:
        if unit.precision.keep_low_precision_grads:
            for param in unit.params:
                dtype = unit.precision.reduce_dtype or param.compute_dtype
                kept = param.dtype.is_floating_point and not config.full_precision_in_eval
                exposed[param.fqn].grad_dtype = dtype if kept else None  # None: what comes
    for buffer, full in buffers:
        _give_buffer(buffer, full, owners[id(buffer)])
    for fqn, slot in slots.items():
        note_replaced(fqn, originals[fqn])
        give_attributes(exposed[fqn], own_attributes(originals[fqn]))
        for module, name in slot.owners:
            module._parameters[name] = exposed[fqn]
    for param in all_params:
        key = id(named[param.fqn])
        if key in before:
            slots[param.fqn] = dataclasses.replace(before[key], param=param, owners=owners[key])
    return {param.fqn: slots[param.fqn] for param in all_params}


def _refusal(
    model: nn.Module,
    units: Sequence[Unit],
    originals: dict[str, nn.Parameter],
    ignored: list[nn.Parameter],
    world: C10dWorld | InProcessWorld,
    config: Config,
) -> UnitError | None:
    """Why `model` cannot be sharded as it is now; None if it can."""
    sync = world if config.sync_module_states and isinstance(world, C10dWorld) else None
    try:
        on = {param.fqn: param.mesh for unit in units for param in unit.params}
        for fqn, tensor in originals.items():
            _check_shardable_now(fqn, tensor, world, on[fqn], config.offload is not None)
        for param in (param for unit in units for param in unit.params):
            if param.placed is not None:
                _check_filled(param.fqn, originals[param.fqn], config, bool(sync))
            if param.extension is not None:
                _check_extension(param, param.extension, world, config)
        left_out, stays = set(map(id, ignored)), config.param_init_fn is leave_empty
        for fqn, tensor in model.named_parameters():
            if tensor.is_meta and id(tensor) in left_out and not stays:
                raise UnitError(
                    f"parameter {fqn!r} is ignored, and on the meta device: nothing fills it. "
                    f"Build what is ignored on a real device."
                )
        if not sync or has_the_data(sync):
            check_fillable(model, config.param_init_fn, ignored)
    except UnitError as error:
        return error
    return None


def _check_filled(fqn: str, tensor: nn.Parameter, config: Config, sync: bool) -> None:
    """Raise UnitError if a parameter of tensor parallelism would have to be given values here."""
    if sync or (tensor.is_meta and config.param_init_fn is not leave_empty):
        raise UnitError(
            f"parameter {fqn!r} is a DTensor of tensor parallelism "
            + ("on the meta device" if tensor.is_meta else "(sync_module_states)")
            + ": fxshard does not fill those. Give them values before, from the same seed or "
            "checkpoint on all ranks; or use fxshard.fully_shard, which leaves the meta device to "
            "model.to_empty(device=...) and what fills the model then."
        )


def _check_extension(
    param: Param,
    extension: Extension,
    world: C10dWorld | InProcessWorld,
    config: Config,
) -> None:
    """Raise UnitError if what a tensor subclass asks for cannot be had as the model is sharded."""
    extension.require_rows(param.shard_dim)
    if isinstance(world, C10dWorld):
        extension.shared_over(world.meshes[param.mesh].mesh)
    extension.traced(world.grids[param.mesh].shards)
    if config.optimizer_in_backward:
        raise extension.in_backward


def _agree_to_sync(model: nn.Module, refusal: UnitError | None, world: C10dWorld) -> None:
    """All ranks go on to the broadcasts, or none."""
    lines = [
        f"buffer {name} {list(buffer.shape)} {buffer.dtype}"
        for name, buffer in model.named_buffers()
    ]
    world.agree([str(refusal or "can be sharded"), *lines], "the model that rank 0 is to give them")


def _check_shardable_now(
    fqn: str, tensor: nn.Parameter, world: C10dWorld | InProcessWorld, mesh: str, offloaded: bool
) -> None:
    """`mesh`: the name of that of the parameter."""
    check_shardable(fqn, local_part(tensor))
    check_gradient_dtype(fqn, tensor)
    if isinstance(tensor, DTensor):
        own = world.meshes[mesh].mesh if isinstance(world, C10dWorld) else None
        _check_placed(fqn, tensor, own)
    if autograd.has_gradient_hooks(tensor):
        raise UnitError(
            f"parameter {fqn!r} has a hook on its gradient, which sharding would drop. Register it "
            f"on the parameter of the model that fxshard.compile returns."
        )
    if tensor.is_meta:
        return
    if offloaded and tensor.device.type == "cpu":
        return
    if isinstance(world, C10dWorld) and tensor.device.type != world.mesh.device_type:
        raise UnitError(
            f"parameter {fqn!r} is on {tensor.device}, but the mesh is of device type "
            f"{world.mesh.device_type!r}. Move the model there first, with model.to(...)."
        )


def _check_placed(fqn: str, tensor: DTensor, mesh: DeviceMesh | None) -> None:
    """Raise UnitError if a DTensor is none of tensor parallelism beside `mesh`, its own."""
    what = f"parameter {fqn!r} is a DTensor already, on {tensor.device_mesh}"
    if mesh is None:
        raise UnitError(
            f"{what}. In one process there is no such mesh: start with torchrun, and give "
            f"mesh=init_device_mesh(..., mesh_dim_names=('dp', 'tp'))."
        )
    if {*mesh.mesh.flatten().tolist()} & {*tensor.device_mesh.mesh.flatten().tolist()} != {
        dist.get_rank()
    }:
        raise UnitError(
            f"{what}, whose ranks fxshard shards over too ({mesh}). Give fxshard the plain model, "
            f"before fully_shard or another fxshard.compile; beside tensor parallelism, give it "
            f"the mesh that parallelize_module got a dimension of, such as mesh=mesh (fully_shard: "
            f"mesh=mesh['dp'])."
        )
    try:
        joined(mesh, tensor.device_mesh)
    except RuntimeError as error:
        raise UnitError(
            f"{what}, which is no dimension of the mesh that fxshard shards over ({mesh}): "
            f"{error}. Make one mesh, init_device_mesh(device, (data parallel, tensor parallel), "
            f"mesh_dim_names=('dp', 'tp')), and give mesh['tp'] to parallelize_module."
        ) from error


def _home(model: nn.Module, world: C10dWorld | InProcessWorld) -> torch.device:
    """Where meta tensors get their data."""
    if isinstance(world, C10dWorld):
        return torch.device(world.mesh.device_type)
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def _flat_shards(
    layouts: dict[str, ParamLayout],
    originals: dict[str, nn.Parameter],
    device: torch.device,
    world: C10dWorld | InProcessWorld,
    offload: CPUOffloadPolicy | None,
    *,
    filled: bool,
) -> dict[str, list[Tensor]]:
    """Padded shards, zero: views of one new flat storage per unit, dtype, mesh and process.

    Offloaded ones are on the CPU, in pinned memory if there is an accelerator to copy to. A storage
    of which no parameter has data stays on the meta device, unless all are `filled` now.

    In-process, the flat storage holds the rows of all ranks of a parameter one after the other, so
    that the full parameter is a view too.
    """
    found: dict[str, list[Tensor]] = {}
    for storage, numel in flat_numels(layouts.values()).items():
        _, dtype, (_, shards) = storage
        count = shards if isinstance(world, InProcessWorld) else 1
        members = {fqn: each for fqn, each in layouts.items() if each.storage == storage}
        real = [originals[fqn].device for fqn in members if not originals[fqn].is_meta]
        home, pin = home_of_shards((real or [device])[0], offload)
        if not real and not filled:
            home, pin = torch.device("meta"), False
        flat = torch.zeros(count * numel, dtype=dtype, device=home, pin_memory=pin)
        found |= {fqn: each.shards_in(flat, count) for fqn, each in members.items()}
    return found


def home_of_shards(
    device: torch.device, offload: CPUOffloadPolicy | None
) -> tuple[torch.device, bool]:
    """Where shards are, of parameters that would be on `device`; and whether in pinned memory."""
    if offload is None:
        return device, False
    return torch.device("cpu"), offload.pin_memory and torch.accelerator.is_available()


def other_meshes(world: C10dWorld | InProcessWorld) -> tuple[Grid, ...]:
    """The ranks of the meshes besides that of the model."""
    return tuple(grid for grid in world.grids.values() if grid.name)


def rank_on(world: C10dWorld | InProcessWorld, mesh: str) -> int | None:
    """The number of this rank among those of a mesh that share a parameter; None: it is all."""
    return world.meshes[mesh].rank if isinstance(world, C10dWorld) else None


def _take_rows(layout: ParamLayout, local: Tensor, full: Tensor, rank: int | None) -> None:
    """Copy the rows of `full` that this process holds."""
    local.copy_(full if rank is None else layout.rows_of(full, rank))


def _give_buffer(buffer: Tensor, full: Tensor, owners: list[tuple[nn.Module, str]]) -> None:
    """Put new data into a buffer; in place if it has data, as other objects may refer to it."""
    if not buffer.is_meta and buffer.is_contiguous():
        buffer.detach().copy_(full)
        return
    for module, name in owners:
        module._buffers[name] = full if buffer.is_meta else full.to(buffer.device)


def _local(layout: ParamLayout, shards: list[Tensor], rank: int | None) -> Tensor:
    """The rows of the parameter that the user sees: without padding, contiguous.

    In-process, these are all: they follow each other in the memory of the ranks' shards.
    """
    shape = layout.shape if rank is None else layout.local_shape(rank)
    return shards[0].as_strided(shape, torch.empty(shape, device="meta").stride())


def _exposed(slot: Slot, local: Tensor, world: C10dWorld | InProcessWorld) -> nn.Parameter:
    """The parameter that the user sees: a DTensor over this rank's rows, or all of them."""
    param = slot.param
    if isinstance(world, InProcessWorld):
        return nn.Parameter(slot.as_held(local), param.requires_grad)
    made = as_dtensor(param, dtensors.stand_in(local), world)
    exposed = nn.Parameter(made, param.requires_grad)
    dtensors.set_local_tensor(exposed, slot.as_held(local))
    return exposed


def as_dtensor(param: Param, local: Tensor, world: C10dWorld) -> DTensor:
    """This rank's rows as a DTensor of the parameter's global shape."""
    mesh, places = placed_on(param, world)
    if param.placed is None:
        shape, stride = param.shape, torch.empty(param.shape, device="meta").stride()
    else:
        shape, stride = param.placed.shape, param.placed.stride
    return DTensor.from_local(
        local, mesh, places, run_check=False, shape=torch.Size(shape), stride=stride
    )


def placed_on(param: Param, world: C10dWorld) -> tuple[DeviceMesh, Sequence[Placement]]:
    """The mesh of a parameter that is a DTensor, and its placement on each dimension of that."""
    members = world.meshes[param.mesh]
    mesh, places = members.mesh, members.placements(param.shard_dim)
    return (mesh, places) if param.placed is None else param.placed.over(mesh, places)


def as_gradient(slot: Slot, shards: list[Tensor], world: C10dWorld | InProcessWorld) -> Tensor:
    """The averaged shards of a gradient in the form of the parameter."""
    local, exposed = slot.without_padding(shards), slot.tensor
    if isinstance(world, InProcessWorld):
        return local
    if isinstance(exposed, DTensor) and local.dtype is exposed.dtype:
        return gather_as(dtensors.dtensor_like(local, exposed), exposed)
    return gather_as(as_dtensor(slot.param, local, world), exposed)
