"""What a sharded model holds: its shards and units, and what of both changes as it is used.

The work on tensors is done in `fxshard.runtime.sharding` and `fxshard.runtime.state`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard._torch import autograd, optimizers, transforms
from fxshard._torch.dtensors import local_part
from fxshard._torch.storages import storage_id
from fxshard.config.checked import Config
from fxshard.config.precision import Precision
from fxshard.errors import ConfigError, FxshardError, RankMismatchError, StepError
from fxshard.ir import meshes
from fxshard.ir.names import is_under
from fxshard.ir.program import Program
from fxshard.ir.units import Param, Reductions, Unit, buffer_dtypes, index_of
from fxshard.runtime import eager, loading, replaced, state
from fxshard.runtime.initialise import NanWhereEmpty, holds_nan
from fxshard.runtime.sharding import Sharding, Slot, home_of_shards, shard_parameters
from fxshard.runtime.store.structure import Structure, names_now
from fxshard.runtime.store.versions import KeptParameter, State, is_unchanged, state_of
from fxshard.runtime.unused import Reach
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld
from fxshard.runtime.world.mesh import world_over


class ParameterStore:
    """The shards of a model, and its other parameters, buffers and accumulated gradients.

    Under a process group each parameter is a DTensor, with placement ``Shard(0)`` if the option
    ``shard_placement_fn`` does not say otherwise; without one, each is unsharded and all ranks run
    inside this process.

    Attributes:
        model: the user's object.
        config, units, world: how it is sharded.
        slots: every sharded parameter by FQN.
        ignored: every ignored parameter by FQN.
        structure: the modules and buffers of the model in its last call.
        accumulated: per parameter and rank of this process, the gradient accumulated by `no_sync`.
        partial: the same for partial sums of sharded gradients, that are not all-reduced yet.
        kept: parameters that the last backward has left unsharded, for the next forward, by FQN.
        gathered_in: while a backward runs, the state of shards in its forward, which gathered them.
        reach: which gradients a loss has reached.
        sync: False inside of `no_sync`.
        comm_hook: the user's function reduces gradients.
        after_reductions: those of ``set_all_reduce_hook``, by FQN of the unit.
        forwards: the eager forwards that are running.
        stored_dtypes: by name of a buffer that is cast now, the dtype that it had.
        device: type of the device that programs run on; shards may be offloaded from it.
        summoned: parameters are unsharded now, and no program may run.
        unfilled: names of parameters and buffers that were on the meta device, until a call has
            seen that all have got values.
        chosen: settings of units that were made by setters, by FQN of the first module.
    """

    def __init__(self, sharding: Sharding) -> None:
        self.model: nn.Module = sharding.model
        self.units: tuple[Unit, ...] = sharding.units
        self.world: C10dWorld | InProcessWorld = sharding.world
        self.config: Config = sharding.config
        both = *self.model.named_parameters(), *self.model.named_buffers()
        self.unfilled: list[str] = [name for name, tensor in both if tensor.is_meta]
        before = {module for slot in sharding.kept for module, _ in slot.owners}
        self.slots: dict[str, Slot] = shard_parameters(sharding)
        owners = [module for slot in self.slots.values() for module, _ in slot.owners]
        loading.take_full_values(module for module in dict.fromkeys(owners) if module not in before)
        self.ignored: dict[str, Param] = {p.fqn: p for unit in self.units for p in unit.ignored}
        for param in (param for unit in self.units for param in unit.params):
            if param.extension is not None and isinstance(self.world, C10dWorld):
                param.extension.shared_over(self.world.meshes[param.mesh].mesh)
        self.accumulated: dict[str, list[Tensor]] = {}
        self.partial: dict[str, list[Tensor]] = {}
        self.kept: dict[str, KeptParameter] = {}
        self.gathered_in: dict[str, State] = {}
        self.reach: Reach = Reach()
        self.sync: bool = True
        self.comm_hook: bool = False
        self.after_reductions: dict[str, Callable[[Tensor], Any]] = {}
        self.wrapped: dict[str, str] = {}  # name of a parameter -> as it is called now
        self.forwards: eager.Forwards = eager.Forwards()
        self.stored_dtypes: dict[str, torch.dtype] = {}
        self._as_stored: bool = self._in_full_precision()  # what is true of the buffers now
        self._cast_buffers()
        self.summoned: bool = False
        self.chosen: dict[str, dict[str, Any]] = {}
        self.device: str = self.compute_device()
        self.structure: Structure = Structure(self.model)
        self._seen = {fqn: slot.tensor for fqn, slot in self.slots.items()}

    def _in_full_precision(self) -> bool:
        """True if calls compute as if no unit had a policy."""
        return self.config.full_precision_in_eval and not self.model.training

    def follow_mode(self) -> None:
        """Cast buffers if calls compute in other dtypes than before (FSDP1 rounds them too)."""
        if self._in_full_precision() != self._as_stored:
            self._as_stored = not self._as_stored
            self._cast_buffers()

    def _cast_buffers(self) -> None:
        """Give buffers the dtype of their unit's policy, or the one that they had before that.

        With offload they also move to the device of the program: they are not loaded per unit.
        They are other tensors then: a backward that is still to come reads those of its forward.
        """
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        if self._as_stored:
            dtypes, self.stored_dtypes = self.stored_dtypes, {}
        else:
            dtypes = buffer_dtypes(self.units, buffers)
        cast: dict[int, Tensor] = {}
        for name, buffer in buffers.items():
            dtype = dtypes.get(name, buffer.dtype)
            home = self.compute_device() if self.config.offload is not None else buffer.device.type
            if dtype is not buffer.dtype and not self._as_stored:
                self.stored_dtypes[name] = buffer.dtype
            if dtype is not buffer.dtype or home != buffer.device.type:
                module, key = self._owner(name)
                home = "meta" if buffer.is_meta else home
                module._buffers[key] = cast.setdefault(id(buffer), buffer.to(home, dtype))

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self.model.get_submodule(path), key

    def ignored_params(self) -> list[nn.Parameter]:
        """The ignored parameters."""
        return [self.ignored_param(fqn) for fqn in self.ignored]

    def param(self, fqn: str) -> nn.Parameter:
        """The parameter that the user sees."""
        return self.slots[fqn].tensor if fqn in self.slots else self.ignored_param(fqn)

    def ignored_param(self, fqn: str) -> nn.Parameter:
        """An ignored parameter."""
        return self.model.get_parameter(fqn)

    def as_it_is(self, param: Param) -> Param:
        """`param` with the dtype and the flag that its tensor has now."""
        tensor = self.param(param.fqn)
        if param.extension is not None and tensor.dtype is param.dtype:  # else it is refused
            return dataclasses.replace(param, requires_grad=tensor.requires_grad)
        cast = self.units[param.unit].precision if param.fqn in self.slots else Precision()
        names = (param.fqn, *(self.wrapped.get(alias, alias) for alias in param.aliases))
        return dataclasses.replace(
            param,
            aliases=tuple(dict.fromkeys(names)),
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            compute_dtype=cast.computes_in(tensor.dtype),
        )

    # -- units ------------------------------------------------------------------------------------

    def units_at(self, fqn: str, recurse: bool) -> list[int]:
        """Indices of the unit of module `fqn`, and of those inside of it."""
        index = index_of(self.units)
        inside = {i for name, i in index.items() if recurse and is_under(name, fqn)}
        return sorted({index[fqn]} | inside)

    def meshes_of(self, chosen: Iterable[int]) -> set[str]:
        """The names of the meshes that parameters of units are on."""
        return meshes.of_units(self.units[i] for i in chosen)

    def set_units(self, chosen: Sequence[int], **settings: Any) -> None:
        """Change fields of units; the next call runs another program."""
        units = list(self.units)
        for i in chosen:
            units[i] = dataclasses.replace(units[i], **settings)
            self.chosen.setdefault(units[i].fqn, {}).update(settings)
        self.units = tuple(units)
        if "reshard" in settings:
            now = {unit.fqn: unit.reshard for unit in units}
            self.config = self.config.changed({"reshard_after_forward": now})

    def reduces(self, slot: Slot) -> Reductions:
        """Which reductions the gradient of a parameter goes through now."""
        if self.config.pipeline_stage:
            return "none"
        how = self.units[slot.param.unit].reduce if self.sync else "none"
        partly = how == "shards" and self.world.grids[slot.param.mesh].replicas > 1
        return how if partly or how != "shards" else "all"

    def waiting(self) -> tuple[str, ...]:
        """FQNs of parameters with an accumulated gradient that a backward adds to or reduces."""
        return self._trained(self.accumulated)

    def partly_reduced(self) -> tuple[str, ...]:
        """FQNs of parameters with a partial sum that a backward adds to or all-reduces."""
        return self._trained(self.partial)

    def keep(self, fqns: list[str], ranks: list[list[Tensor]]) -> None:
        """Keep unsharded parameters, with padding, per rank of this process (``fxshard::keep``)."""
        for fqn, *rows in zip(fqns, *ranks, strict=True):
            self.kept[fqn] = KeptParameter(
                rows, self.gathered_in.get(fqn) or state_of(self.slots[fqn])
            )

    def take(self, fqns: list[str]) -> list[list[Tensor]]:
        """What `keep` was given, once, per rank of this process (``fxshard::kept``)."""
        return list(map(list, zip(*(self.kept.pop(fqn).rows for fqn in fqns), strict=True)))

    def unsharded_now(self) -> tuple[str, ...]:
        """FQNs of the parameters that are kept; those whose shards have changed are dropped."""
        for fqn, each in list(self.kept.items()):
            if not self.is_new(each, self.slots[fqn]):
                del self.kept[fqn]
        if self._in_full_precision():
            return ()  # which computes in another dtype
        return tuple(self.kept)

    def drop_kept(self, units: Collection[int] | None = None) -> None:
        """Free what is kept, of some units or of all."""
        for fqn in list(self.kept):
            if units is None or self.slots[fqn].param.unit in units:
                del self.kept[fqn]

    def _trained(self, sums: Iterable[str]) -> tuple[str, ...]:
        return tuple(fqn for fqn in sums if self.slots[fqn].tensor.requires_grad)

    def require_accumulated(self, program: Program) -> None:
        """Raise StepError if this backward would leave accumulated gradients unreduced."""
        missing = set(self.waiting()) - program.accumulated
        missing |= set(self.partly_reduced()) - program.partial
        if any(program.reduces(fqn) == "all" for fqn in missing):
            raise StepError(
                "gradients were accumulated under no_sync between a forward outside of it and its "
                "backward, which would not reduce them. Call backward after each forward, "
                "micro-batch by micro-batch."
            )
        if self.settings_of(self.units) != self.settings_of(program.units):
            raise StepError(
                "set_requires_gradient_sync or set_requires_all_reduce was called between a "
                "forward and its backward: they act from the next forward on. Call them before "
                "forward. (Schedules of torch.distributed.pipelining call them there: shard their "
                "stages with pipeline_stage=True.)"
            )

    @staticmethod
    def settings_of(units: Sequence[Unit]) -> list[Reductions]:
        """How gradients are reduced."""
        return [unit.reduce for unit in units]

    # -- the meta device ---------------------------------------------------------------------------

    def require_filled(self, *, memory: bool = False) -> None:
        """Check that what was on the meta device has got values since; nothing later, once it has.

        Args:
            memory: memory is enough, for code that may be about to write the values.

        Raises:
            StepError: it is there still, or is NaN since ``to_empty`` gave it memory.
        """
        now = {name: self._held(name) for name in self.unfilled}
        left = [
            name
            for name, tensor in now.items()
            if tensor is not None and (tensor.is_meta or (not memory and holds_nan(tensor)))
        ]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise StepError(
                f"{', '.join(map(repr, left[:3]))}{more}: on the meta device when the model was "
                f"sharded, and without values since. Load them: model.load_state_dict(state), "
                f"set_model_state_dict of torch.distributed.checkpoint.state_dict (with "
                f"broadcast_from_rank0=True no other rank needs the state), or "
                f"fxshard.load_checkpoint. Or initialise them: model.to_empty(device=...), then "
                f"what fills each of them."
            )
        if not memory:
            self.unfilled = []

    def _held(self, name: str) -> Tensor | None:
        """What this process has of a parameter or buffer; None if that was taken out."""
        if name in self.slots:
            return local_part(self.slots[name].tensor)
        module, key = self._owner(name)
        return module._buffers.get(key, module._parameters.get(key))

    def allocate(self, slot: Slot) -> None:
        """Give the flat storage in which the shard of `slot` lies memory, if it has none."""
        if slot.local.is_meta and isinstance(self.world, C10dWorld):
            storage = storage_id(slot.shards[0])
            groups = state.by_storage(self.slots.values())
            members = next(g for g in groups if storage_id(g[0].shards[0]) == storage)
            device, pin = torch.device(self.world.mesh.device_type), self.config.offload_policy
            state.allocate(members, *home_of_shards(device, pin))

    def to_fill(self) -> dict[str, DTensor]:
        """What is on the meta device, by all its names: where ``load_state_dict`` would put it."""
        found: dict[str, DTensor] = {}
        for slot in self.slots.values():
            if local_part(slot.tensor).is_meta:
                self.allocate(slot)
                found |= dict.fromkeys(slot.param.aliases, state.over_shard(slot))
        return found

    # -- the model as it is now --------------------------------------------------------------------

    def is_own(self, slot: Slot) -> bool:
        """True if the model holds the parameter that it held in its last call."""
        return slot.tensor is self._seen.get(slot.param.fqn)

    def follow_changes(self) -> bool:
        """Take over changes of the model since the last call; True if its structure changed.

        Raises:
            StepError: parameters were added or removed, or have another shape, dtype or device, or
                no values.
        """
        if self.unfilled:
            self.require_filled()
        changed = self.structure.changed()
        if changed:
            self.wrapped = names_now(self.model, self.slots, self.ignored.values())
            self.structure = Structure(self.model)
        self.restore(self.slots.values())
        for slot in self.slots.values():
            optimizers.step_in_backward(slot.tensor)
        return changed

    def restore(self, slots: Iterable[Slot]) -> None:
        """Put parameters back on the storage of their shards, where they were exchanged.

        Raises:
            StepError: see `Slot.is_elsewhere` and `Slot.require_dtensor`.
        """
        with transforms.outside():
            for slot in slots:
                stays = self.is_own(slot)
                if not stays:
                    self._require_own(slot)
                    if isinstance(self.world, C10dWorld):
                        slot.require_dtensor(self.world)
                if slot.local.is_meta and not local_part(slot.tensor).is_meta:
                    self.allocate(slot)  # a parameter was put in the place of one on meta
                state.restore_storage(slot)
                if not stays:
                    self._take_over(slot)

    def _require_own(self, slot: Slot) -> None:
        """Raise StepError if the parameter is that of another name too."""
        for fqn, other in self.slots.items():
            if other is not slot and other.is_there and other.tensor is slot.tensor:
                raise StepError(
                    f"parameters {slot.param.fqn!r} and {fqn!r} are one since fxshard.compile or "
                    f"fully_shard: they were tied. Each has a shard of its own; tie them in the "
                    f"plain model, and compile that."
                )

    def _take_over(self, slot: Slot) -> None:
        """Treat the parameter that is there now as the one that was there before."""
        fqn, tensor = slot.param.fqn, slot.tensor
        kind: Any = type(tensor)
        before = self._seen.get(fqn)
        if before is not None:
            replaced.mark({fqn: before})
            if kind is DTensor:
                replaced.gather_as(tensor, before)
        self._seen[fqn] = tensor

    def together(
        self, what: str, having: Sequence[str] = (), check: Callable[[], object] | None = None
    ) -> None:
        """Check that all ranks do `what` outside of a call, and that none refuses it.

        Args:
            what: for messages.
            having: what else must be equal on all ranks.
            check: raises an error if this rank refuses it; the other ranks raise one too, so that
                nobody waits in a collective for this one.

        Raises:
            RankMismatchError: another rank does something else, or refuses.
        """
        refusal: FxshardError | None = None
        try:
            if check is not None:
                check()
        except FxshardError as error:
            refusal = error
        refused = [] if refusal is None else [f"refuses: {type(refusal).__name__}: {refusal}"]
        try:
            self.world.together(what, [*refused, *having])
        except RankMismatchError as mismatch:
            if refusal is None:
                raise
            raise refusal from mismatch
        if refusal is not None:
            raise refusal

    def tie_assigned(self) -> None:
        """Where a tied parameter was exchanged under some of its names, do so under all of them."""
        for fqn, slot in self.slots.items():
            held = [module._parameters[name] for module, name in slot.owners]
            before = self._seen.get(fqn, held[0])
            new = next((param for param in held if param is not before), before)
            if any(param is not new for param in held):
                slot.place(new)

    def compute_device(self) -> str:
        """Type of the device that programs run on, from where parameters are now."""
        if isinstance(self.world, C10dWorld):
            return self.world.mesh.device_type
        return next((p.device.type for p in self.model.parameters()), "cpu")

    def require_plain(self, slots: Sequence[Slot], what: str) -> None:
        """Raises StepError if eager code cannot have a parameter unsharded, as a plain tensor."""
        for slot in slots:
            extension, placed = slot.param.extension, slot.param.placed
            if placed is not None:
                raise StepError(
                    f"parameter {slot.param.fqn!r}, a DTensor of tensor parallelism over "
                    f"{placed.group!r}, {what}: outside of programs fxshard gathers plain tensors. "
                    f"Call the model, or take its values with param.full_tensor()."
                )
            if extension is not None:
                raise StepError(
                    f"parameter {slot.param.fqn!r}, a {extension.kind.__name__}, {what}: outside "
                    f"of programs fxshard gathers plain tensors. Call the model, or take "
                    f"model.state_dict()."
                )

    def is_new(self, kept: KeptParameter, slot: Slot) -> bool:
        """True if nothing was written since, and the unit computes in the same dtype."""
        computes_in = self.as_it_is(slot.param).compute_dtype
        return is_unchanged(slot, kept.state) and kept.rows[0].dtype is computes_in

    def by_dtype(self, slots: Sequence[Slot]) -> list[tuple[list[Slot], torch.dtype]]:
        """`slots` by the dtype that they compute in, and by mesh: a launch moves one."""
        found: dict[tuple[torch.dtype, str], list[Slot]] = {}
        for slot in slots:
            dtype = self.as_it_is(slot.param).compute_dtype
            found.setdefault((dtype, slot.param.mesh), []).append(slot)
        return [(part, dtype) for (dtype, _), part in found.items()]

    def require_sharded(self, what: str) -> None:
        """Raise StepError inside of `summon_full_params`, where parameters are unsharded."""
        if self.summoned:
            raise StepError(
                f"{what} inside of summon_full_params: parameters are unsharded there, and "
                f"programs run on shards. Leave the block first."
            )

    def require_one_hook(self) -> None:
        """Raise ConfigError if gradients of some units go to a hook, and those of others do not."""
        hooks = self.after_reductions
        for unit in self.units if hooks else ():
            first = next(iter(hooks))
            trained = any(self.param(param.fqn).requires_grad for param in unit.params)
            if trained and hooks.get(unit.fqn) != hooks[first]:
                raise ConfigError(
                    f"set_all_reduce_hook: {first or '(root)'!r} has a hook, and {unit.name!r} has "
                    f"{'another one' if unit.fqn in hooks else 'none'}. All units are reduced by "
                    f"one function: set the same hook on each module that fully_shard was given."
                )

    def require_one_of_each(self, what: str) -> None:
        """Raise StepError where some ranks hold other parameters under a name than others do.

        So it is with a mesh that does not have all ranks: those of each such mesh train their own.
        Unless the parameter is a DTensor over the others, as that of experts is.
        """
        ranks = self.world.grids[""].ranks
        for fqn, slot in self.slots.items():
            grid, placed = self.world.grids[slot.param.mesh], slot.param.placed
            if grid.ranks * (1 if placed is None else placed.mesh.size()) < ranks:
                raise StepError(
                    f"{what}: parameter {fqn!r} is on mesh {grid.name!r} of {grid.ranks} of the "
                    f"{ranks} ranks, and the others hold one of their own under this name: there "
                    f"is no one value of it. Use what knows of such parameters: "
                    f"torch.nn.utils.get_total_norm and model.state_dict() give each mesh its own."
                )

    # -- other dtypes and devices, copies ----------------------------------------------------------

    def convert(self, fn: Callable[[Tensor], Tensor], rest: Callable[[], Any]) -> bool:
        """What ``.to()``, ``.half()`` and their kin do, on shards; True if a tensor changed.

        Args:
            fn: as of ``nn.Module._apply``.
            rest: does the same to buffers and to parameters that are not sharded.

        Raises:
            StepError: it moves shards to a device that the mesh is not made of, or to meta.
        """
        self.require_sharded("a conversion (.to(), .half(), ...)")
        slots, offloaded = list(self.slots.values()), self.config.offload is not None
        before = self._kinds()
        # What `to_empty` makes of the meta device is NaN, for `require_filled` to find.
        with NanWhereEmpty() if self.unfilled else contextlib.nullcontext():
            with autograd.plain_torch_functions():
                state.converted(slots, fn, self.world, offloaded=offloaded)
            with state.set_aside(slots):
                rest()
        for sums in (self.accumulated, self.partial):
            for fqn, grads in sums.items():
                sums[fqn] = [fn(grad) for grad in grads]
        self.drop_kept()
        if self._kinds() == before:
            return False
        self.device = self.compute_device()
        return True

    def _kinds(self) -> list[tuple[torch.dtype, torch.device]]:
        tensors = (*self.model.parameters(), *self.model.buffers())
        return [(tensor.dtype, tensor.device) for tensor in tensors]

    def fresh(self) -> dict[str, Any]:
        """Attributes that a copy starts with; gradients are not copied, as in torch."""
        empty = ("accumulated", "partial", "kept", "gathered_in", "_seen")
        return {name: {} for name in empty}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy in the same world, of the model in `memo`; nothing is communicated or traced."""
        self.require_sharded("copy.deepcopy")
        made = object.__new__(type(self))
        memo[id(self)] = made
        for kept in (self.world, self.config, self.units):
            memo[id(kept)] = kept
        slots = state.copied(self.slots, memo)
        fresh = self.fresh()
        rest = {k: v for k, v in self.__dict__.items() if k not in ("slots", *fresh)}
        made.__dict__.update(copy.deepcopy(rest, memo), slots=slots, **fresh)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: without programs, which are traced again, and without the process group.

        Raises:
            StepError: an option cannot be pickled, or parameters are unsharded now.
        """
        self.require_sharded("pickling")
        for name in self.config.names():
            state.check_picklable(name, getattr(self.config, name))
        slots = {fqn: state.without_data(slot) for fqn, slot in self.slots.items()}
        world = self.world.mesh if isinstance(self.world, C10dWorld) else self.world
        return self.__dict__ | {"slots": slots, "world": world, **self.fresh()}

    def __setstate__(self, found: dict[str, Any]) -> None:
        """Raises StepError if a process group was there when it was pickled, and none is now."""
        self.__dict__.update(found)
        if isinstance(found["world"], DeviceMesh):
            if not dist.is_initialized():
                raise StepError(
                    "this model was compiled in a process group and none is initialised: call "
                    "torch.distributed.init_process_group first, with as many ranks. To load into "
                    "another number of ranks, save model.state_dict() with "
                    "torch.distributed.checkpoint."
                )
            self.world = world_over(found["world"], self.config, self.units)

    def restored(self) -> None:
        """Call it after the model is unpickled too: move its parameters to flat storage."""
        state.lay_out(list(self.slots.values()))
