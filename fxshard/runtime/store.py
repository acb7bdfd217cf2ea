"""The parameters of a sharded model, outside of its programs.

The module, state dicts, checkpoints, optimizers and eager reads use this store. The work on tensors
is done in `fxshard.runtime.sharding` and `fxshard.runtime.state`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard._torch import autograd
from fxshard._torch.dtensors import local_part
from fxshard.bytesize import parse_bytes
from fxshard.capture.modules import join, without_wrappers
from fxshard.config import Config, Precision
from fxshard.errors import ConfigError, StepError
from fxshard.ir import layout, meshes
from fxshard.ir.program import Program
from fxshard.ir.units import Param, Reductions, Unit, buffer_dtypes, index_of, is_under
from fxshard.passes.insert_reduce import InsertReduce
from fxshard.pipeline import passes_of
from fxshard.runtime import eager, loading, replaced, state
from fxshard.runtime.initialise import NanWhereEmpty, holds_nan
from fxshard.runtime.sharding import (
    Sharding,
    Slot,
    as_gradient,
    home_of_shards,
    shard_parameters,
)
from fxshard.runtime.unused import Reach
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld
from fxshard.runtime.world.mesh import world_over

State = list[tuple[weakref.ref[Tensor], int]]  # see `state_of`


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
        buffer_slots: by FQN, the module that holds a buffer and its name there.
        accumulated: per parameter and rank of this process, the gradient accumulated by `no_sync`.
        partial: the same for partial sums of sharded gradients, that are not all-reduced yet.
        kept: parameters that the last backward has left unsharded, for the next forward, by FQN.
        gathered_in: while a backward runs, the state of shards in its forward, which gathered them.
        reach: which gradients a loss has reached.
        sync: False inside of `no_sync`.
        comm_hook: the user's function reduces gradients.
        forwards: the eager forwards that are running.
        stored_dtypes: by name of a buffer that was cast, the dtype that it had.
        device: type of the device that programs run on; shards may be offloaded from it.
        summoned: parameters are unsharded now, and no program may run.
        unfilled: names of parameters and buffers that were on the meta device, until a call has
            seen that all have got values.
        chosen: settings of units that were made by setters, by FQN of the first module.
    """

    def __init__(self, sharding: Sharding) -> None:
        self.model: nn.Module = sharding.model
        self.units: tuple[Unit, ...] = sharding.units
        self.world, self.config = sharding.world, sharding.config
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
        self.kept: dict[str, _Kept] = {}
        self.gathered_in: dict[str, State] = {}
        self.reach: Reach = Reach()
        self.sync: bool = True
        self.comm_hook: bool = False
        self.wrapped: dict[str, str] = {}  # name of a parameter -> as it is called now
        self.forwards: eager.Forwards = eager.Forwards()
        self.stored_dtypes: dict[str, torch.dtype] = {}
        self._reduction: tuple[Config, InsertReduce] | None = None
        self._cast_buffers()
        self.summoned: bool = False
        self._unshards: contextlib.ExitStack | None = None
        self._unsharded: dict[int, list[_Shown]] = {}  # by unit
        self._lying: dict[int, dict[str, _Kept]] = {}  # by unit: of a call of it, for the next one
        self.chosen: dict[str, dict[str, Any]] = {}
        self.device: str = self.compute_device()
        self.note_structure()
        self._seen = {fqn: slot.tensor for fqn, slot in self.slots.items()}

    def _cast_buffers(self) -> None:
        """Give buffers the dtype of their unit's policy, permanently (as FSDP1).

        With offload they also move to the device of the program: they are not loaded per unit.
        """
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        dtypes = buffer_dtypes(self.units, buffers)
        cast: dict[int, Tensor] = {}
        for name, buffer in buffers.items():
            dtype = dtypes.get(name, buffer.dtype)
            home = self.compute_device() if self.config.offload is not None else buffer.device.type
            if dtype is not buffer.dtype:
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
            self.kept[fqn] = _Kept(rows, self.gathered_in.get(fqn) or state_of(self.slots[fqn]))

    def take(self, fqns: list[str]) -> list[list[Tensor]]:
        """What `keep` was given, once, per rank of this process (``fxshard::kept``)."""
        return list(map(list, zip(*(self.kept.pop(fqn).rows for fqn in fqns), strict=True)))

    def unsharded_now(self) -> tuple[str, ...]:
        """FQNs of the parameters that are kept; those whose shards have changed are dropped."""
        for fqn, each in list(self.kept.items()):
            if not self._is_new(each, self.slots[fqn]):
                del self.kept[fqn]
        if self.config.full_precision_in_eval and not self.model.training:
            return ()  # which computes in another dtype
        return tuple(self.kept)

    def drop_kept(self, units: Collection[int] | None = None) -> None:
        """Free what is kept, of some units or of all."""
        for fqn in list(self.kept):
            if units is None or self.slots[fqn].param.unit in units:
                del self.kept[fqn]
        for unit in list(self._lying):
            if units is None or unit in units:
                del self._lying[unit]

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
            storage = slot.shards[0].untyped_storage()._cdata
            groups = state.by_storage(self.slots.values())
            members = next(g for g in groups if g[0].shards[0].untyped_storage()._cdata == storage)
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

    def note_structure(self) -> None:
        """Note which modules, parameters and buffers the model has."""
        self.tree: list[nn.Module] = list(self.model.modules())
        self.buffer_slots: dict[str, tuple[nn.Module, str]] = {
            name: (module, key)
            for path, module in self.model.named_modules()
            for key in module._buffers
            for name in [f"{path}.{key}" if path else key]
        }
        self._structure = [_names(module) for module in self.tree]

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
        changed = any(map(_differ, self.tree, self._structure))
        if changed:
            self._require_same_parameters()
            self.note_structure()
        for fqn, slot in self.slots.items():
            if slot.local.is_meta and not local_part(slot.tensor).is_meta:
                self.allocate(slot)  # a parameter was put in the place of one on the meta device
            slot.restore_storage()
            if (tensor := slot.tensor) is not (before := self._seen.setdefault(fqn, tensor)):
                replaced.mark({fqn: before})
                self._seen[fqn] = tensor
        return changed

    def tie_assigned(self) -> None:
        """Where a tied parameter was exchanged under some of its names, do so under all of them."""
        for fqn, slot in self.slots.items():
            held = [module._parameters[name] for module, name in slot.owners]
            before = self._seen.get(fqn, held[0])
            new = next((param for param in held if param is not before), before)
            if any(param is not new for param in held):
                slot.place(new)

    def _require_same_parameters(self) -> None:
        known = {
            join(path, name)
            for path, module in self.model.named_modules()
            for name, param in module._parameters.items()
            if param is not None
        }
        params = (*(slot.param for slot in self.slots.values()), *self.ignored.values())
        names = {alias: alias for param in params for alias in param.aliases}
        plain = {without_wrappers(name): name for name in known}
        for name in names.keys() - known:  # modules may be wrapped, for activation checkpoints
            names[name] = plain.get(without_wrappers(name), name)
        self.wrapped, expected = names, {*names.values()}
        held = {id(module) for module in self.model.modules()}
        new = known - expected
        for fqn, slot in self.slots.items():
            if any(id(module) not in held for module, _ in slot.owners):
                new |= {fqn} & known
        for name in sorted(new):
            param = self.model.get_parameter(name)
            before = [fqn for fqn, slot in self.slots.items() if slot.tensor is param]
            if before and before[0] not in known:
                raise StepError(
                    f"parameter {before[0]!r} is {name!r} since its module was wrapped, after "
                    f"fxshard.compile. Wrap modules before; for activation checkpointing there is "
                    f"the option checkpoint=..., which needs no wrappers."
                )
        if new:
            raise StepError(
                f"parameter {min(new)!r} was put into the model after fxshard.compile, and is not "
                f"sharded. Change values (load_state_dict, summon_full_params), or change the "
                f"plain model and compile that."
            )
        if gone := expected - known:
            raise StepError(
                f"parameter {min(gone)!r} was taken out of the model after fxshard.compile. Change "
                f"the plain model and compile that."
            )

    def compute_device(self) -> str:
        """Type of the device that programs run on, from where parameters are now."""
        if isinstance(self.world, C10dWorld):
            return self.world.mesh.device_type
        return next((p.device.type for p in self.model.parameters()), "cpu")

    # -- unsharded parameters in eager code --------------------------------------------------------

    def computed(self, slot: Slot) -> Tensor:
        """A parameter for an eager forward: as `read`, in the compute dtype of its unit."""
        return self.read(slot, self.as_it_is(slot.param).compute_dtype)

    def read(self, slot: Slot, dtype: torch.dtype) -> Tensor:
        """A parameter, unsharded; its gradient is reduced to the shard. Collective.

        Raises:
            StepError: see `require_readable`.
        """
        self.require_readable(slot)
        return self.read_together([slot], dtype)[0]

    def read_together(
        self, slots: Sequence[Slot], dtype: torch.dtype, rows: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Parameters as `read` gives them: one all-gather, and one reduction. Collective.

        Args:
            slots: of one unit.
            dtype: in which they are gathered.
            rows: the unsharded parameters, if they are gathered already.
        """
        self.require_plain(slots, "is read by eager code")
        if isinstance(self.world, InProcessWorld) and (
            not any(map(_is_trained, slots)) or self._division(slots[0], dtype)[1] == "avg"
        ):
            return [slot.tensor.to(dtype) for slot in slots]  # unsharded, and so is its gradient
        tensors = [slot.tensor for slot in slots]
        return list(_Gather.apply(self, slots, dtype, rows, *tensors))

    def require_readable(self, slot: Slot) -> None:
        """Check a parameter before eager code gathers it.

        Raises:
            StepError: its gradient would not be reduced as in a program; or see
                `Slot.restore_storage`.
        """
        if self.unfilled:
            self.require_filled(memory=True)
        self.require_plain([slot], "is read by eager code")
        if _is_trained(slot):
            op = self.reduction.op
            for option, clashes in {
                "optimizer_in_backward": self.config.optimizer_in_backward,
                "register_comm_hook": self.comm_hook,
                f"the reduction {op!r}": op in ("max", "min"),  # of each read, not of their sum
            }.items():
                if clashes:
                    raise _read_with_gradients(slot, option, eager=self.forwards.inside > 0)
        slot.restore_storage()

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

    @torch.compiler.disable
    def gathered(self, slots: Sequence[Slot], dtype: torch.dtype) -> list[Tensor]:
        """All rows of parameters, each in a storage of its own; collective."""
        self.require_plain(slots, "is read by eager code")
        if isinstance(self.world, InProcessWorld):
            return [slot.tensor.detach().to(dtype) for slot in slots]
        shards = [slot.shards[0].to(torch.device(self.device), dtype) for slot in slots]
        pack_bytes = parse_bytes(self.config.pack_bytes)
        found = []
        sent = eager.gathered(shards, self.world, pack_bytes, slots[0].param.mesh if slots else "")
        for slot, rows in zip(slots, sent, strict=True):
            full = layout.joined(rows, slot.layout)
            full = full.clone() if full.data_ptr() == slot.shards[0].data_ptr() else full
            again = functools.partial(self._gathered_again, slot, dtype)
            self.forwards.note(eager.Gathered(slot, again), full)
            found.append(full)
        return found

    def _gathered_again(self, slot: Slot, dtype: torch.dtype) -> Tensor:
        return self.gathered([slot], dtype)[0]

    @torch.compiler.disable
    def reduced(
        self, slots: Sequence[Slot], grads: Sequence[Tensor | None], *, fully: bool = True
    ) -> list[Tensor | None]:
        """The sharded gradients, from the unsharded ones of each rank; collective.

        What earlier backwards have accumulated is reduced with them.

        Args:
            slots: of one unit.
            grads: None: this rank's loss does not reach the parameter.
            fully: False: without the all-reduce; the results become partial sums.
        """
        wanted = [i for i, slot in enumerate(slots) if slot.tensor.requires_grad]
        sums = self.accumulated.keys() | self.partial.keys()
        used = [grads[i] is not None or slots[i].param.fqn in sums for i in wanted]
        flags = "".join("01"[flag] for flag in used)
        on_any_rank = self.world.any_rank(flags) if len(slots) > 1 else lambda: flags
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i in wanted:
            precision = self.units[slots[i].param.unit].precision
            like = next((g.dtype for g in grads if g is not None), slots[i].param.dtype)
            by_dtype.setdefault(precision.reduces_in(like), []).append(i)
        found: list[Tensor | None] = [None] * len(slots)
        for dtype, members in by_dtype.items():
            sent = [self._sent(slots[i], grads[i], dtype) for i in members]
            division = self._division(slots[members[0]], dtype)
            partial = [self.partial.pop(slots[i].param.fqn, []) for i in members]
            mesh = slots[0].param.mesh
            made = eager.reduced(sent, self.world, division, partial, fully=fully, mesh=mesh)
            for i, shard in zip(members, made, strict=True):
                found[i] = self._kept(slots[i], shard) if fully else shard
        for i, flag in zip(wanted, on_any_rank(), strict=True):
            fqn, made_of = slots[i].param.fqn, found[i]
            self.accumulated.pop(fqn, None)
            found[i] = made_of if flag == "1" and fully else None
            if flag == "1" and made_of is not None and not fully:
                self.partial[fqn] = [made_of]
                self.reach.accumulated(fqn)
        return found

    @torch.compiler.disable
    def reduced_sums(self, slots: Sequence[Slot], dtype: torch.dtype) -> list[Tensor]:
        """The sharded gradients of what was accumulated, which ends; one launch. Collective.

        Args:
            slots: of one unit.
            dtype: of their sums.
        """
        sent = []
        for slot in slots:
            total = self.accumulated[slot.param.fqn][0]
            padded = slot.layout.padding > 0
            sent.append(
                self._sent(slot, None, dtype) if padded else layout.as_sent(total, slot.layout)
            )
            del self.accumulated[slot.param.fqn], total
        world: Any = self.world
        made = eager.reduced(sent, world, self._division(slots[0], dtype))
        if world.size > 1:
            world.free(sent)  # the process group may hold on to the tensors
        return [self._kept(slot, shard) for slot, shard in zip(slots, made, strict=True)]

    def _sent(self, slot: Slot, grad: Tensor | None, dtype: torch.dtype) -> Tensor:
        """A gradient as it is sent, padded, with what was accumulated of it."""
        device = torch.device(self.device) if grad is None else grad.device
        padded = torch.zeros(slot.layout.padded_shape, dtype=dtype, device=device)
        rows = padded.narrow(slot.layout.dim, 0, slot.param.shape[slot.layout.dim])
        if grad is not None:
            rows.copy_(grad)
        for total in self.accumulated.get(slot.param.fqn, ()):
            rows.add_(total)
        # In one process all ranks have the same gradient, and all of it.
        return layout.as_sent(padded, slot.layout) if isinstance(self.world, C10dWorld) else padded

    def _kept(self, slot: Slot, shard: Tensor) -> Tensor:
        """A reduced gradient as the caller gets it."""
        if not self.units[slot.param.unit].precision.keep_low_precision_grads:
            shard = shard.to(slot.param.dtype)
        return as_gradient(slot, [shard.to(slot.local.device)], self.world)

    @torch.compiler.disable
    def accumulate(self, slot: Slot, grad: Tensor) -> None:
        """Add an unsharded gradient to the accumulated one, which is reduced after `no_sync`."""
        fqn, dtype = slot.param.fqn, grad.dtype
        if dtype.is_floating_point:
            precision = self.units[slot.param.unit].precision
            dtype = precision.reduces_in(self.as_it_is(slot.param).compute_dtype)
        if fqn in self.accumulated:
            self.accumulated[fqn][0].add_(grad)
        else:
            made = torch.empty(grad.shape, dtype=dtype, device=grad.device)
            self.accumulated[fqn] = [made.copy_(grad)]
        self.reach.accumulated(fqn)

    def _division(self, slot: Slot, dtype: torch.dtype) -> eager.Division:
        factor = self.units[slot.param.unit].divide_factor
        return self.reduction.division(dtype, self.world.grids[slot.param.mesh].ranks, factor)

    @property
    def reduction(self) -> InsertReduce:
        """The pass that reduces gradients, in the pipeline of the model's current options."""
        config = self.config  # set_gradient_divide_factor replaces it
        if self._reduction is None or self._reduction[0] is not config:
            found = next((p for p in passes_of(config) if isinstance(p, InsertReduce)), None)
            if found is None:
                raise StepError(
                    "the pipeline of option passes has no insert-reduce, so that the gradient of a "
                    "parameter which eager code reads cannot be reduced alike. Leave passes out of "
                    'fxshard.shard, and give it to torch.compile(model, backend="fxshard", '
                    "options=...)."
                )
            self._reduction = config, found
        return self._reduction[1]

    # -- unsharded parameters in a block -----------------------------------------------------------

    def all_rows(self, tensor: Tensor) -> Tensor:
        """All rows of a parameter, gradient or optimizer state; collective if it is sharded."""
        if not isinstance(tensor, DTensor) or isinstance(self.world, InProcessWorld):
            return tensor
        return eager.all_rows(tensor, self.world)

    @contextlib.contextmanager
    def summon_full_params(
        self, recurse: bool = True, fqns: Sequence[str] = (), **options: Any
    ) -> Iterator[None]:
        """See `FxshardModule.summon_full_params`."""
        self.require_sharded("summon_full_params")
        self.require_filled(memory=True)
        what = "summon_full_params (or unshard, apply, a submodule or method by itself)"
        slots = self._slots_of(fqns or [""], recurse)
        self.world.together(what, sorted(fqns))
        self.require_plain(slots, "would be unsharded (summon_full_params, unshard)")
        with self._summoning(state.full_parameters(slots, self.all_rows, **options)):
            yield

    def _slots_of(self, fqns: Sequence[str], recurse: bool) -> list[Slot]:
        """The parameters in some submodules; if not `recurse`, of the units that begin there.

        Raises:
            ConfigError: there is no such submodule, or no unit begins there.
        """
        modules, index = dict(self.model.named_modules()), index_of(self.units)
        for fqn in fqns:
            if fqn not in (modules if recurse else index):
                units = ", ".join(unit.name for unit in self.units[:8])
                what = "submodule" if recurse else f"unit, as recurse=False asks for ({units})"
                raise ConfigError(f"summon_full_params: fqns={list(fqns)}: {fqn!r} is no {what}.")
        return [
            slot
            for slot in self.slots.values()
            if any(
                any(is_under(alias, fqn) for alias in slot.param.aliases)
                and (recurse or slot.param.unit == index[fqn])
                for fqn in fqns
            )
        ]

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """For the time of the block the model holds unsharded parameters, as `read` gives them.

        Raises:
            StepError: see `require_readable`.
            RankMismatchError: some ranks do something else.
        """
        slots = list(self.slots.values())
        for slot in slots:
            self.require_readable(slot)
        what = "a method that runs on unsharded parameters"
        self.world.together(f"{what}, with gradients" if torch.is_grad_enabled() else what)
        unsharded = [self.read(slot, slot.param.dtype) for slot in slots]
        with self._summoning(state.holding(slots, unsharded)):
            yield

    @contextlib.contextmanager
    def _summoning(self, unsharded: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        with unsharded:
            self.summoned = True
            try:
                yield
            finally:
                self.summoned = False

    def unshard(self, **options: Any) -> None:
        """As `summon_full_params`, until `reshard`.

        Raises:
            StepError: a part is asked for, and something is unsharded already.
        """
        self.reshard_units()
        if self._unshards is not None and options.get("fqns"):
            raise StepError(
                f"unshard(fqns={options['fqns']!r}) while parameters are unsharded already. Name "
                f"all submodules in one call, or call reshard() first."
            )
        if self._unshards is None:
            unshards = contextlib.ExitStack()
            unshards.enter_context(self.summon_full_params(**options))
            self._unshards = unshards

    def reshard(self) -> None:
        """End `unshard`: changes are written back, and parameters are sharded again; collective."""
        self.reshard_units()
        if self._unshards is not None:
            unshards, self._unshards = self._unshards, None
            unshards.close()

    # -- one unit outside of a program -------------------------------------------------------------

    def _held_by(self, unit: int, fqn: str) -> list[Slot]:
        """The parameters of a unit that lie in module `fqn`, where they are sharded now."""
        return [
            slot
            for slot in self.slots.values()
            if slot.param.unit == unit
            and any(is_under(alias, fqn) for alias in slot.param.aliases)
            and slot.is_sharded
        ]

    def unshard_unit(self, unit: int) -> None:
        """Unshard a unit in the dtype that it computes in, until `reshard_unit`; collective."""
        if self._unshards is not None:
            return  # `unshard` of the model, of which it is a part
        self.require_sharded("unshard")
        if unit in self._unsharded:
            return
        self.require_plain(self._held_by(unit, ""), "would be unsharded (unshard)")
        self.world.together(f"unshard of {self.units[unit].name}")
        self._unsharded[unit] = shown = []
        for slots, dtype in self.by_dtype(self._held_by(unit, "")):
            for slot, rows in zip(slots, self.gathered(slots, dtype), strict=True):
                param = nn.Parameter(rows, slot.tensor.requires_grad)
                versions = autograd.version(param), autograd.version(slot.tensor)
                shown.append(_Shown(slot, slot.tensor, param, *versions))
        for each in shown:
            each.slot.place(each.param)

    def reshard_unit(self, unit: int) -> dict[str, Tensor]:
        """End `unshard_unit`; returns what was unsharded, by FQN, unless shards have changed since.

        Raises:
            StepError: a parameter was written into, or has a gradient, which would be lost.
        """
        shown = self._unsharded.pop(unit, [])
        for each in shown:
            each.slot.place(each.sharded)
        for each in shown:
            if autograd.version(each.param) != each.version or each.param.grad is not None:
                raise StepError(
                    f"parameter {each.slot.param.fqn!r} was written into, or has got a gradient, "
                    f"between unshard() and reshard() of its module, and that is lost. Write "
                    f"values inside of summon_full_params() of the model; call modules, not their "
                    f"parts, for gradients."
                )
        if any(autograd.version(each.sharded) != each.sharded_version for each in shown):
            return {}  # an optimizer has stepped since
        return {each.slot.param.fqn: each.param.detach() for each in shown}

    def reshard_units(self) -> None:
        """End `unshard_unit` of all units."""
        for unit in list(self._unsharded):
            self.reshard_unit(unit)

    def stands_alone(self) -> bool:
        """True if a module that is called now gathers what it reads.

        Else its parameters are unsharded, in a block. An `unshard` of the model ends here.
        """
        if self._unshards is not None:
            self.reshard()
        return not self.summoned

    @contextlib.contextmanager
    def unit_readable(self, unit: int, fqn: str) -> Iterator[None]:
        """For the time of the block a unit's parameters in module `fqn` are unsharded.

        They are gathered once, and their gradients are reduced together. Collective.

        Raises:
            StepError: see `require_readable`.
            RankMismatchError: some ranks do something else.
        """
        held = self.reshard_unit(unit) or self._left_lying(unit, fqn)
        slots = self._held_by(unit, fqn)
        for slot in slots:
            self.require_readable(slot)
        if not held:
            self.world.together(f"a call of {fqn} by itself")
        unsharded: dict[str, Tensor] = {}
        for part, dtype in self.by_dtype(slots):
            rows = [held[slot.param.fqn] for slot in part] if held else []
            read = self.read_together(part, dtype, rows)
            unsharded |= {slot.param.fqn: each for slot, each in zip(part, read, strict=True)}
        shared = any(self.world.grids[slot.param.mesh].shards > 1 for slot in slots)
        if self.units[unit].stays and isinstance(self.world, C10dWorld) and shared:
            self._lying[unit] = {
                slot.param.fqn: _Kept([unsharded[slot.param.fqn].detach()], state_of(slot))
                for slot in slots
            }
        with state.holding(slots, [unsharded[slot.param.fqn] for slot in slots]):
            yield

    def _left_lying(self, unit: int, fqn: str) -> dict[str, Tensor]:
        """What the last call of module `fqn` by itself has gathered, if it stays and is not old."""
        left = self._lying.pop(unit, {})
        slots = {slot.param.fqn: slot for slot in self._held_by(unit, fqn)}
        if left.keys() != slots.keys() or not all(self._is_new(left[n], slots[n]) for n in left):
            return {}
        return {name: each.rows[0] for name, each in left.items()}

    def _is_new(self, kept: _Kept, slot: Slot) -> bool:
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

    def require_one_of_each(self, what: str) -> None:
        """Raise StepError where some ranks hold other parameters under a name than others do.

        So it is with a mesh that does not have all ranks: those of each such mesh train their own.
        """
        ranks = self.world.grids[""].ranks
        for fqn, slot in self.slots.items():
            grid = self.world.grids[slot.param.mesh]
            if grid.ranks < ranks:
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
            StepError: it moves shards to a device that the mesh is not made of.
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
        sums: dict[str, Any] = {"accumulated": {}, "partial": {}, "kept": {}, "gathered_in": {}}
        return sums | {"_seen": {}, "_reduction": None, "_unsharded": {}, "_lying": {}}

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


@dataclasses.dataclass(frozen=True)
class _Shown:
    """A parameter of a unit that `unshard` has unsharded.

    Attributes:
        slot, sharded: the parameter.
        param: what the module tree holds in its place.
        version, sharded_version: of `param` and of `sharded`, when it was put there.
    """

    slot: Slot
    sharded: nn.Parameter
    param: nn.Parameter
    version: int
    sharded_version: int


@dataclasses.dataclass(frozen=True)
class _Kept:
    """An unsharded parameter that a backward has left.

    Attributes:
        rows: with padding, per rank of this process.
        state: of its shards at that time (`state_of`).
    """

    rows: list[Tensor]
    state: State


def state_of(slot: Slot) -> State:
    """Of a parameter and its shards, which tensors they are and how often they were written."""
    tensors = (slot.tensor, *slot.shards)
    return [(weakref.ref(tensor), autograd.version(tensor)) for tensor in tensors]


def is_unchanged(slot: Slot, before: State) -> bool:
    """True if nothing was written into a parameter since, or put in its place."""
    now = (slot.tensor, *slot.shards)
    return len(now) == len(before) and all(
        known() is tensor and autograd.version(tensor) == version
        for tensor, (known, version) in zip(now, before, strict=True)
    )


class _Gather(torch.autograd.Function):
    """Sharded parameters -> unsharded ones; their gradients are reduced, or accumulated."""

    @staticmethod
    def forward(
        ctx: Any,
        store: ParameterStore,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        rows: Sequence[Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.store, ctx.slots, ctx.reduces = store, slots, store.reduces(slots[0])
        ctx.set_materialize_grads(False)
        return tuple(rows or store.gathered(slots, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        store, slots = ctx.store, ctx.slots
        if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
            raise StepError(
                f"the gradient of parameter {slots[0].param.fqn!r} is asked for with "
                f"create_graph=True by eager code: it is reduced over the ranks, and has no graph "
                f"of its own. Compute what is made of it inside of forward, and use "
                f"fxshard.compile."
            )
        accumulates = ctx.reduces == "none"
        if accumulates or any(slot.param.fqn in store.accumulated for slot in slots):
            leaves = [node for node, _ in ctx.next_functions if node is not None]
            require_all_wanted(leaves, "no_sync accumulates")
        found: list[Tensor | None] = [None] * len(slots)
        if not accumulates:
            found = store.reduced(slots, grads, fully=ctx.reduces == "all")
        for slot, grad in zip(slots, grads, strict=True):
            if accumulates and grad is not None:
                store.accumulate(slot, grad)
        return (None, None, None, None, *found)


def _is_trained(slot: Slot) -> bool:
    """True if autograd follows what is computed from the parameter now."""
    return torch.is_grad_enabled() and slot.tensor.requires_grad


def _read_with_gradients(slot: Slot, option: str, *, eager: bool) -> StepError:
    where = "by eager code" if eager else "outside of the model's forward"
    return StepError(
        f"parameter {slot.param.fqn!r} is read with gradients {where}, and with {option} its "
        f"gradient would not go the same way as those of the program. Read it under "
        f"torch.no_grad(), or make the reading code part of forward."
    )


def require_all_wanted(leaves: Sequence[Any], what: str) -> None:
    """Raise StepError if this backward drops gradients of parameters, autograd's `leaves`.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` ask for the gradients of some tensors only,
    but a program accumulates or steps all of them.
    """
    if not all(map(autograd.will_accumulate, leaves)):
        raise StepError(
            f"torch.autograd.grad, or backward(inputs=...), leaves the gradients of parameters "
            f"alone, but {what} them in every backward of the model. Call loss.backward(), or do "
            f"this outside of no_sync and without optimizer_in_backward."
        )


def _names(module: nn.Module) -> tuple[Any, ...]:
    """The children and names of a module; compared by `_differ` on every call."""
    return tuple(module._modules.values()), tuple(module._parameters), tuple(module._buffers)


def _differ(module: nn.Module, before: tuple[Any, ...]) -> bool:
    children, params, buffers = before
    return (
        tuple(module._modules.values()) != children
        or tuple(module._parameters) != params
        or tuple(module._buffers) != buffers
    )
