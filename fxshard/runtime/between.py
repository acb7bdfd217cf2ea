"""What a call leaves unsharded between its forward and its backward, and `reshard` frees."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from fxshard.errors import StepError
from fxshard.runtime.store.reads import ReadableStore
from fxshard.runtime.store.versions import is_unchanged, state_of


class Between:
    """The unsharded parameters of one call, whose units have ``reshard_after_forward=False``.

    Freed ones are gathered again, all at once, when backward begins. Saved values that are views
    of them see that, as they share their storages.
    """

    def __init__(self, store: ReadableStore, rows: dict[str, Tensor]) -> None:
        """Args: rows: values that lie in the buffers that were gathered, by FQN."""
        self._store, self._rows = store, rows
        self._before = {fqn: state_of(store.slots[fqn]) for fqn in rows}
        self._freed: list[str] = []

    def free(self, units: Collection[int] | None) -> list[str]:
        """Free what belongs to some units, or to all; returns the FQNs."""
        slots = self._store.slots
        mine = [
            fqn
            for fqn in self._rows
            if fqn not in self._freed and (units is None or slots[fqn].param.unit in units)
        ]
        for fqn in mine:
            self._rows[fqn].untyped_storage().resize_(0)
        self._freed += mine
        return mine

    def restore(self) -> None:
        """Gather again what was freed: one launch per unit and dtype. Collective.

        Raises:
            StepError: a parameter was changed since forward.
        """
        found: dict[tuple[int, torch.dtype], list[str]] = {}
        for fqn in self._freed:
            slot = self._store.slots[fqn]
            if not is_unchanged(slot, self._before[fqn]):
                raise StepError(
                    f"parameter {fqn!r} was changed in place between a forward and its backward, "
                    f"which gathers it again, as reshard() has freed what forward had gathered. "
                    f"Call backward first (before optimizer.step())."
                )
            found.setdefault((slot.param.unit, self._rows[fqn].dtype), []).append(fqn)
        self._freed = []
        for (_, dtype), fqns in found.items():
            slots = [self._store.slots[fqn] for fqn in fqns]
            for fqn, slot, full in zip(
                fqns, slots, self._store.gathered(slots, dtype), strict=True
            ):
                shape = slot.layout.unsharded_shape
                storage = self._rows[fqn].untyped_storage()
                storage.resize_(torch.Size(shape).numel() * dtype.itemsize)
                buffer = full.new_empty(0).set_(storage, 0, shape)
                buffer.narrow(slot.layout.dim, 0, full.shape[slot.layout.dim]).copy_(full)
