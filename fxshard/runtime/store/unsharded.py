"""Parameters that are unsharded outside of programs: of the model in a block, or of a unit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard._torch import autograd, transforms, trees
from fxshard.errors import ConfigError, StepError
from fxshard.ir.names import is_under
from fxshard.ir.units import index_of
from fxshard.runtime import state
from fxshard.runtime.sharding import Sharding, Slot
from fxshard.runtime.store.reads import WRITTEN_COPY, ReadableStore
from fxshard.runtime.store.versions import KeptParameter, state_of
from fxshard.runtime.world.c10d import C10dWorld


class UnshardableStore(ReadableStore):
    """A store whose parameters can be unsharded: for a block, or until they are resharded."""

    def __init__(self, sharding: Sharding) -> None:
        super().__init__(sharding)
        self._unshards: contextlib.ExitStack | None = None
        self._unsharded: dict[int, list[_Shown]] = {}  # by unit
        # By unit: of a call of it, for the next one.
        self._lying: dict[int, dict[str, KeptParameter]] = {}
        self._recomputing: dict[int, str] = {}  # by unit: the module, in backward of a call of it
        self._again: dict[int, dict[str, Tensor]] = {}  # of one of these units, gathered again

    def fresh(self) -> dict[str, Any]:
        made: dict[str, Any] = {"_unsharded": {}, "_lying": {}, "_recomputing": {}, "_again": {}}
        return super().fresh() | made

    def drop_kept(self, units: Collection[int] | None = None) -> None:
        super().drop_kept(units)
        for unit in list(self._lying):
            if units is None or unit in units:
                del self._lying[unit]

    @contextlib.contextmanager
    def summon_full_params(
        self, recurse: bool = True, fqns: Sequence[str] = (), **options: Any
    ) -> Iterator[None]:
        """See `FxshardModule.summon_full_params`."""
        slots: list[Slot] = []

        def check() -> None:
            self.require_sharded("summon_full_params")
            self.require_filled(memory=True)
            slots.extend(self._slots_of(fqns or [""], recurse))
            self.require_plain(slots, "would be unsharded (summon_full_params, unshard)")
            self.restore_sharded(slots)

        what = "summon_full_params (or unshard, apply, a submodule or method by itself)"
        self.together(what, sorted(fqns), check)
        with self._summoning(state.full_parameters(slots, self.all_rows, **options)):
            yield

    def restore_sharded(self, slots: Iterable[Slot]) -> None:
        """As `restore`, of those that are not unsharded now."""
        if not self.summoned:
            self.restore(slot for slot in slots if slot.param.unit not in self._unsharded)

    def restore_beside(self, slot: Slot) -> None:
        """As `restore`, of what was exchanged in the module that holds a parameter."""
        module, _ = slot.owners[0]
        inside = [self.slots[param.fqn] for param in self.units[slot.param.unit].params]
        beside = [other for other in inside if other.owners[0][0] is module and other.is_there]
        self.restore_sharded(other for other in beside if not self.is_own(other))

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

        def check() -> None:
            for slot in slots:
                self.require_readable(slot)

        what = "a method that runs on unsharded parameters"
        what = f"{what}, with gradients" if torch.is_grad_enabled() else what
        self.together(what, check=check)
        unsharded = [self.read(slot, slot.param.dtype) for slot in slots]
        with _unwritten(slots, unsharded), self._summoning(state.holding(slots, unsharded)):
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
        """The parameters of a unit that lie in module `fqn`, where they are sharded now.

        Those that were exchanged are among them, for `require_readable` to refuse.
        """
        return [
            slot
            for slot in self.slots.values()
            if slot.param.unit == unit
            and _is_in(slot, fqn)
            and (slot.is_sharded or self._was_exchanged(slot))
        ]

    def _was_exchanged(self, slot: Slot) -> bool:
        """True if the user has put another parameter there; what is unsharded is none.

        Those of ``functional_call`` may be DTensors that are no parameters.
        """
        there = slot.is_there and isinstance(slot.tensor, nn.Parameter | DTensor)
        return there and isinstance(self.world, C10dWorld) and not self.is_own(slot)

    def unshard_unit(self, unit: int) -> None:
        """Unshard a unit in the dtype that it computes in, until `reshard_unit`; collective."""
        if self._unshards is not None:
            return  # `unshard` of the model, of which it is a part
        self.require_sharded("unshard")
        if unit in self._unsharded:
            return

        def check() -> None:
            slots = [slot for slot in self.slots.values() if slot.param.unit == unit]
            self.require_plain(slots, "would be unsharded (unshard)")
            self.restore_sharded(slots)

        self.together(f"unshard of {self.units[unit].name}", check=check)
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
        others = [each for each in shown if not each.slot.holds(each.param)]
        for each in shown:
            each.slot.place(each.sharded)
        for each in others:
            raise StepError(
                f"parameter {each.slot.param.fqn!r} was exchanged for another one between "
                f"unshard() and reshard() of its module, and that is lost. Call reshard() first, "
                f"and load a state into the model, not into a part of it."
            )
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
        if not autograd.in_backward():
            self._recomputing.pop(unit, None)  # of a backward that failed
        held = self.reshard_unit(unit) or self._left_lying(unit, fqn)
        slots = self._held_by(unit, fqn)

        def check() -> None:
            for slot in slots:
                self.require_readable(slot)

        if held:
            check()
        else:  # a rank whose parameter was exchanged would gather others
            names = [slot.param.fqn for slot in slots]
            self.together(f"a call of {fqn} by itself", names, check)
        unsharded: dict[str, Tensor] = {}
        for part, dtype in self.by_dtype(slots):
            rows = [held[slot.param.fqn] for slot in part] if held else []
            read = self.read_together(part, dtype, rows)
            unsharded |= {slot.param.fqn: each for slot, each in zip(part, read, strict=True)}
        shared = any(self.world.grids[slot.param.mesh].shards > 1 for slot in slots)
        if self.units[unit].stays and isinstance(self.world, C10dWorld) and shared:
            self._lying[unit] = {
                slot.param.fqn: KeptParameter([unsharded[slot.param.fqn].detach()], state_of(slot))
                for slot in slots
            }
        shown = [unsharded[slot.param.fqn] for slot in slots]
        with _unwritten(slots, shown), state.holding(slots, shown):
            yield

    def note_backward(self, unit: int, fqn: str, outputs: Any) -> None:
        """Note when backward reaches what a call of module `fqn` by itself has returned.

        What `torch.utils.checkpoint` recomputes from then on reads parameters as the call did.
        """
        if not isinstance(self.world, C10dWorld) or transforms.transforming():
            return
        for tensor in trees.tree_flatten(outputs)[0]:
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(functools.partial(self._backward_begins, unit, fqn))

    def _backward_begins(self, unit: int, fqn: str, grad: Tensor) -> None:
        if unit not in self._recomputing:
            autograd.when_backward_ends(functools.partial(self._backward_ends, unit))
        self._recomputing[unit] = fqn
        self._again.clear()

    def _backward_ends(self, unit: int) -> None:
        self._recomputing.pop(unit, None)
        self._again.clear()

    def dtype_here(self, slot: Slot) -> torch.dtype:
        """The dtype that code of the user's sees a parameter in, outside of programs."""
        fqn = self._recomputing.get(slot.param.unit)
        if fqn is None or not autograd.in_backward() or not _is_in(slot, fqn):
            return slot.param.dtype
        return self.as_it_is(slot.param).compute_dtype

    def read_here(self, slot: Slot) -> Tensor:
        """As `read`, for code of the user's outside of programs; collective.

        Where backward recomputes a part of a unit that was called by itself, all of the unit is
        gathered, once, as the call did.
        """
        unit, fqn = slot.param.unit, self._recomputing.get(slot.param.unit)
        if fqn is None or not autograd.in_backward() or not _is_in(slot, fqn):
            return self.read(slot, slot.param.dtype)
        if unit not in self._again:
            self._again.clear()  # one unit is unsharded at a time
            slots = self._held_by(unit, fqn)
            for each in slots:
                self.require_readable(each)
            self._again[unit] = {
                each.param.fqn: rows
                for part, dtype in self.by_dtype(slots)
                for each, rows in zip(part, self.gathered(part, dtype), strict=True)
            }
        rows = self._again[unit][slot.param.fqn].detach()
        return self.read_together([slot], rows.dtype, [rows])[0]

    def _left_lying(self, unit: int, fqn: str) -> dict[str, Tensor]:
        """What the last call of module `fqn` by itself has gathered, if it stays and is not old."""
        left = self._lying.pop(unit, {})
        slots = {slot.param.fqn: slot for slot in self._held_by(unit, fqn)}
        if left.keys() != slots.keys() or not all(self.is_new(left[n], slots[n]) for n in left):
            return {}
        return {name: each.rows[0] for name, each in left.items()}


@contextlib.contextmanager
def _unwritten(slots: Sequence[Slot], unsharded: Sequence[Tensor]) -> Iterator[None]:
    """Raise StepError at the end of the block if it wrote into a parameter: that would be lost."""
    versions = [autograd.version(tensor) for tensor in unsharded]
    try:
        yield
    except RuntimeError as error:
        if WRITTEN_COPY not in str(error):
            raise
        fqns = ", ".join(repr(slot.param.fqn) for slot in slots)
        raise _lost(f"one of the parameters {fqns}") from error
    for slot, tensor, version in zip(slots, unsharded, versions, strict=True):
        if autograd.version(tensor) != version:
            raise _lost(f"parameter {slot.param.fqn!r}")


def _lost(param: str) -> StepError:
    return StepError(
        f"{param} was written into by a module or method that runs on a copy of it, as it is "
        f"sharded: that is lost. Write values outside of it, or inside of "
        f"model.summon_full_params()."
    )


def _is_in(slot: Slot, fqn: str) -> bool:
    """True if a parameter lies in module `fqn`."""
    return any(is_under(alias, fqn) for alias in slot.param.aliases)


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
