"""A stage of a pipeline: what outlives its micro-batches, and what ends a schedule.

Schedules of torch.distributed.pipelining run forwards ahead of their backwards. Each call is a
program that reduces nothing: its backward adds to unsharded gradients. After the last micro-batch
the schedule asks for their reduction (`ScheduleEnd`). What units leave unsharded between forward
and backward is gathered once for all calls, which share it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard._torch import autograd, fully_sharded
from fxshard.bytesize import parse_bytes
from fxshard.capture.swapped import STATE
from fxshard.errors import StepError
from fxshard.ir import layout
from fxshard.pipeline import for_schedule
from fxshard.runtime import eager
from fxshard.runtime.sharding import Slot
from fxshard.runtime.store.parameters import ParameterStore
from fxshard.runtime.store.versions import State, is_unchanged, state_of


@dataclasses.dataclass
class Stage:
    """What a stage keeps from call to call, besides accumulated gradients.

    Attributes:
        anchor: a leaf of autograd in the place of all parameters, whose gradients it never gets.
        rows: unsharded parameters, padded, by FQN; without memory while they are resharded.
        states: of their shards when they were gathered.
        calls: forwards whose backward has not run.
        backwards: how many have run since the last reduction.
    """

    anchor: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, requires_grad=True))
    rows: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    states: dict[str, State] = dataclasses.field(default_factory=dict)
    calls: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)
    backwards: int = 0

    def begin_forward(self, call: Any) -> None:
        """A forward begins that may have a backward."""
        call.shared = dict(self.rows)
        self.calls = [*self._waiting(), weakref.ref(call)]

    def begin_backward(
        self, store: ParameterStore, call: Any, anchor: Any, kept: bool
    ) -> tuple[bool, bool]:
        """Its backward begins. Collective, where parameters were resharded since.

        Zero-bubble schedules ask autograd for the gradients of a stage's inputs first, and for
        those of its parameters later; here the first of the two makes both.

        Args:
            store: of the stage.
            call: as given to `begin_forward`.
            anchor: the node of `anchor` in the graph of autograd.
            kept: the graph is retained.

        Returns:
            Whether gradients of parameters count, which they do not where autograd is asked for
            those of inputs alone, as to learn their shapes; and whether the graph stays retained.

        Raises:
            StepError: a parameter was changed since its forward.
        """
        self.gather(store)
        for fqn, rows in call.shared.items():
            if self.rows.get(fqn) is not rows:
                raise StepError(
                    f"parameter {fqn!r} was changed between a forward of a pipeline's stage and "
                    f"its backward. Step the optimizer when the schedule is over."
                )
        self.calls = [known for known in self._waiting() if known() is not call]
        wanted = autograd.will_accumulate(anchor)
        counts = wanted or kept
        self.backwards += counts
        if not (kept and wanted):
            call.shared = {}
        return counts, kept and wanted

    def _waiting(self) -> list[weakref.ref[Any]]:
        return [known for known in self.calls if known() is not None]

    def gather(self, store: ParameterStore) -> None:
        """Gather what forward would leave unsharded, unless it is there and new. Collective."""
        slots = [slot for slot in store.slots.values() if _is_shared(store, slot)]
        for slot in slots:
            fqn = slot.param.fqn
            if fqn in self.rows and not is_unchanged(slot, self.states[fqn]):
                del self.rows[fqn]
        missing = [slot for slot in slots if not self._is_there(slot)]
        if not missing:
            return
        names = [slot.param.fqn for slot in missing]
        store.together("the unshard of a pipeline's stage", names)
        for unit in dict.fromkeys(slot.param.unit for slot in missing):
            mine = [slot for slot in missing if slot.param.unit == unit]
            for part, dtype in store.by_dtype(mine):
                self._take(store, part, dtype)

    def _is_there(self, slot: Slot) -> bool:
        rows = self.rows.get(slot.param.fqn)
        return rows is not None and (rows.untyped_storage().nbytes() > 0 or not rows.numel())

    def _take(self, store: ParameterStore, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        """Gather parameters of one unit and dtype: into the memory that calls refer to, if any."""
        world: Any = store.world
        shards = [slot.shards[0].to(torch.device(store.device), dtype) for slot in slots]
        sent = eager.gathered(shards, world, parse_bytes(store.config.pack_bytes))
        for slot, rows in zip(slots, sent, strict=True):
            fqn, shape = slot.param.fqn, slot.layout.unsharded_shape
            full = layout.joined(rows, slot.layout) if slot.layout.dim else rows.view(shape)
            if fqn in self.rows:
                self.rows[fqn].untyped_storage().resize_(full.untyped_storage().nbytes())
                self.rows[fqn].copy_(full)
            else:
                self.rows[fqn] = full
            self.states[fqn] = state_of(slot)

    def free(self, store: ParameterStore, units: Collection[int] | None = None) -> None:
        """Reshard units, or all; calls whose backward has not run gather again."""
        mine = [fqn for fqn in self.rows if units is None or store.slots[fqn].param.unit in units]
        world: Any = store.world  # of one rank
        world.free([self.rows[fqn] for fqn in mine])
        if not self._waiting():
            for fqn in mine:
                del self.rows[fqn]


def _is_shared(store: ParameterStore, slot: Slot) -> bool:
    return for_schedule(store.units[slot.param.unit], store.world.size).stays


# -- the end of a schedule -----------------------------------------------------------------------


class ScheduleEnd:
    """What a schedule asks of a stage after its last micro-batch, under the names of FSDP2's state.

    (torch/distributed/pipelining/stage.py, ``perform_reduce_grad``)
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def _state_ctx(self) -> ScheduleEnd:
        return self

    @property
    def all_states(self) -> list[ScheduleEnd]:
        return [self]

    @property
    def _fsdp_param_groups(self) -> list[ScheduleEnd]:
        return [self]

    @property
    def _fsdp_param_group(self) -> ScheduleEnd:  # torch 2.11
        return self

    def post_backward(self) -> None:
        """Reduce the gradients of all micro-batches."""
        reduce_gradients(self._module.__dict__[STATE])

    def _root_post_backward_final_callback(self) -> None:
        """Nothing is in flight."""


def as_stage(module: nn.Module) -> None:
    """Let a schedule find what ends it."""
    fully_sharded.set_state(module, ScheduleEnd(module))


def reduce_gradients(store: Any) -> None:
    """Reduce what micro-batches have accumulated, into ``.grad``, and reshard. Collective.

    Inside of `no_sync` the sums wait for the next schedule.

    Raises:
        StepError: no micro-batch had a backward.
        RankMismatchError: some ranks do something else.
    """
    stage: Stage = store.stage
    backwards, stage.backwards = stage.backwards, 0
    stage.free(store)
    trained = any(slot.tensor.requires_grad for slot in store.slots.values())
    if trained and not backwards:
        raise StepError(
            "the schedule reduces the gradients of a stage, none of whose micro-batches had a "
            "backward. A zero-bubble schedule runs none where no input of the stage needs a "
            "gradient: pass activations from stage to stage, or take Schedule1F1B."
        )
    if not store.sync:
        return
    sums = sorted(store.accumulated, key=lambda fqn: store.slots[fqn].param.position)
    store.world.together("the end of a pipeline's schedule", sums)
    used = "".join("01"[store.reach.has_accumulated(fqn)] for fqn in sums)
    on_any_rank = store.world.any_rank(used) if sums else lambda: ""
    found: dict[str, Tensor] = {}
    for unit in store.units:
        mine = [store.slots[fqn] for fqn in sums if store.slots[fqn].param.unit == unit.index]
        for dtype in dict.fromkeys(store.accumulated[s.param.fqn][0].dtype for s in mine):
            part = [s for s in mine if store.accumulated[s.param.fqn][0].dtype is dtype]
            grads = store.reduced_sums(part, dtype)
            found |= {slot.param.fqn: grad for slot, grad in zip(part, grads, strict=True)}
    reached = [fqn for fqn, flag in zip(sums, on_any_rank(), strict=True) if flag == "1"]
    for fqn in reached:
        _add_gradient(store.slots[fqn].tensor, found.pop(fqn))


def _add_gradient(param: nn.Parameter, grad: Tensor) -> None:
    """As autograd would; without a copy where nothing but ``.grad`` is to be set."""
    if param.grad is None and not autograd.has_gradient_hooks(param):
        param.grad = grad
    else:
        torch.autograd.backward([param], [grad])
