"""Figures of a step: the bytes that are read from its live ranges alone."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from fxshard.errors import ConfigError
from fxshard.ir.calls import Call
from fxshard.ir.units import Unit
from fxshard.memory import queries, states
from fxshard.memory.category import CATEGORIES, Category, Matrix, State
from fxshard.memory.ledger import HALF, Ledger, LiveRange, PhaseBytes
from fxshard.memory.owners import owned_rows
from fxshard.memory.queries import Unsharded
from fxshard.memory.states import Called, Span, StateRows, Where

Snapshot = dict[Category, int]


@dataclasses.dataclass(frozen=True)
class PeakAt:
    """Where the peak is.

    Attributes:
        phase: "forward", "loss", "loss backward", "backward", "optimizer" or "zero_grad".
        point: number of the point in the phase, from 0; -1 is the start of the phase.
        node: the operator that runs there.
        module: FQN of its module ("" is the root).
        line: the line of user code that it comes from, ``path:line in function``, or "".
        micro_batch: which of the step's, from 0; -1 after the last.
    """

    phase: str
    point: int
    node: str
    module: str
    line: str = ""
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.phase}, at {self.node}" + (f" of {self.module}" if self.module else "")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Figures:
    """Bytes alive on one rank at each point of a step, as its live ranges say it.

    Attributes:
        first, steady: every live range of the first and of each later step (see `ledger`).
        calls: per micro-batch, every call of a module in forward.
        units: the units; index 0 is the root.
        world_size: ranks that parameters are sharded over.
        training: the program has a backward.
        offloaded: shards and sharded gradients, or saved activations, live on the CPU.
        optimizer: class name of the analysed optimizer, or None.
        device: type of the device that is planned for.
        first_calls: the calls of the first step, where they are others.
    """

    first: Ledger
    steady: Ledger
    calls: tuple[tuple[Call, ...], ...]
    units: tuple[Unit, ...]
    world_size: int
    training: bool
    offloaded: bool
    optimizer: str | None
    device: str
    first_calls: tuple[tuple[Call, ...], ...] | None = None

    def ledger(self, *, first_step: bool = False) -> Ledger:
        """Every live range of the step; all other figures are read from it.

        Args:
            first_step: of the first step, not of the steady state.

        Returns:
            The live ranges, with their bytes and their first and last tick.
        """
        return self.first if first_step else self.steady

    # -- the peak ----------------------------------------------------------------------------------

    @functools.cached_property
    def peak_at(self) -> PeakAt:
        """Where in the steady step the peak is (its first occurrence)."""
        tick = self.steady.peak_tick
        phase, point = self.steady.at(tick)
        moment = self.steady.moments[tick // 2]
        return PeakAt(phase.name, point, moment.node, moment.module, moment.line, phase.micro_batch)

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes alive at once in the steady state (from the second step on)."""
        return int(self.steady.totals.max())

    @property
    def first_step_peak_bytes(self) -> int:
        """The same in the first step, in which the optimizer makes its state."""
        return int(self.first.totals.max())

    @property
    def peak_by_category(self) -> Snapshot:
        """What the peak is made of; sums to `peak_bytes`."""
        return _snapshot(self.steady.bytes[self.steady.peak_tick])

    @property
    def peak_by_stream(self) -> dict[str, int]:
        """What the peak is made of, by the stream of the operator that made it."""
        found: dict[str, int] = defaultdict(int)
        for each in self.steady.alive(self.steady.peak_tick):
            found[each.stream] += 0 if each.host else each.bytes
        return dict(found)

    @property
    def host_peak_bytes(self) -> int:
        """Largest number of bytes on the CPU in the steady state, with offload; else 0."""
        return int(self.steady.host_totals.max())

    def alive_at_peak(self) -> list[LiveRange]:
        """The storages alive on the device at the peak, largest first; they sum to it."""
        alive = self.steady.alive(self.steady.peak_tick)
        found = [each for each in alive if not each.host and each.bytes]
        return sorted(found, key=lambda each: each.bytes, reverse=True)

    def peak_by_module(
        self, category: Category | str | None = None, *, depth: int | None = None
    ) -> dict[str, int]:
        """What the peak is made of, by the module that owns it (see `LiveRange.module`).

        Args:
            category: only these bytes: a `Category`, or its name such as "Activation".
            depth: modules with more names in their FQN count for those around them.

        Returns:
            Bytes by FQN ("" is the root), largest first. They sum to `peak_bytes`, or to that
            category's part of it.

        Raises:
            ConfigError: no such category.
        """
        wanted = category_of(category)
        found: dict[str, int] = defaultdict(int)
        for each in self.alive_at_peak():
            if wanted in (None, each.category):
                names = each.module.split(".")
                found[".".join(names if depth is None else names[:depth])] += each.bytes
        return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))

    # -- the step ----------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes per step."""
        return len(self.calls)

    def phases(self, *, first_step: bool = False) -> list[PhaseBytes]:
        """The curves, phase by phase; those of each micro-batch in turn.

        Args:
            first_step: of the first step, not of the steady state.

        Returns:
            Per phase the bytes alive at each of its points.
        """
        return self.ledger(first_step=first_step).phase_bytes

    def timeline(self, *, first_step: bool = False) -> Iterator[tuple[str, str, str, int]]:
        """``(phase, node, module, bytes alive after it)`` for every point of a step.

        Args:
            first_step: of the first step, not of the steady state.

        Returns:
            One tuple per point, in the order in which the step passes them; bytes.
        """
        for phase in self.phases(first_step=first_step):
            for (node, module), total in zip(phase.labels, phase.after.sum(1), strict=True):
                yield phase.phase, node, module, int(total)

    def unsharded(self) -> list[Unsharded]:
        """When each unit holds unsharded parameters and gradients, and how many bytes."""
        return queries.unsharded(self.steady, self.units)

    def _micro_batch(self, number: int) -> int:
        count = self.micro_batches
        if not -count <= number < count:
            raise ConfigError(f"micro_batch={number}: the step has {count}, numbered from 0.")
        return number % count

    # -- rows of the table: a module in a state ----------------------------------------------------

    @functools.cached_property
    def _spans(self) -> list[dict[Called, dict[str, Span]]]:
        return states.spans(self.steady, self.calls)

    @functools.cached_property
    def _first_rows(self) -> StateRows:
        if self.first_calls is None:
            return StateRows(self.first, self._spans)
        return StateRows(self.first, states.spans(self.first, self.first_calls))

    @functools.cached_property
    def _steady_rows(self) -> StateRows:
        return StateRows(self.steady, self._spans)

    def _rows(self, first_step: bool) -> StateRows:
        return self._first_rows if first_step else self._steady_rows

    def spans(self, micro_batch: int) -> dict[Called, dict[str, Span]]:
        """Each call of each module of a micro-batch, with its span in each phase.

        Args:
            micro_batch: which of the step's, from 0.

        Returns:
            Per call, by phase, the ticks between which it runs.
        """
        return self._spans[micro_batch]

    def modules(self) -> list[str]:
        """FQNs of all modules that compute, in order of their first operator."""
        return list(dict.fromkeys(module for module, _ in self._spans[-1]))

    def ticks(self, *, first_step: bool = False) -> dict[Where, int]:
        """The tick of the ledger that each row of the table lies at.

        Args:
            first_step: of the first step, not of the steady state.

        Returns:
            Row of the table -> tick.
        """
        return self._rows(first_step).ticks

    def rows(self, *, first_step: bool = False) -> dict[Where, Snapshot]:
        """Every row of the table: each state of each call of each module in each micro-batch.

        Args:
            first_step: of the first step, not of the steady state.

        Returns:
            Bytes per category, by row.
        """
        found = self.ledger(first_step=first_step).bytes
        ticks = self.ticks(first_step=first_step)
        return {where: _snapshot(found[tick]) for where, tick in ticks.items()}

    def figures(self, *, first_step: bool = False) -> Iterator[tuple[Where, Matrix, Matrix]]:
        """Every row of the table with its bytes, and those of them that its module owns itself.

        Args:
            first_step: of the first step, not of the steady state.

        Returns:
            Both as rows of `Ledger.bytes`: int64 ``[WIDTH]``.
        """
        ledger, ticks = self.ledger(first_step=first_step), self.ticks(first_step=first_step)
        owned = owned_rows(ledger, ticks)
        return ((where, ledger.bytes[tick], owned[where]) for where, tick in ticks.items())

    def owned(self, *, first_step: bool = False) -> dict[Where, int]:
        """Per row of the table, the bytes on the device that its module owns itself.

        Args:
            first_step: of the first step, not of the steady state.

        Returns:
            Row of the table -> bytes.
        """
        figures = self.figures(first_step=first_step)
        return {where: int(owned[:HALF].sum()) for where, _, owned in figures}

    def cells(
        self, *, first_step: bool = False, call: int = 0, micro_batch: int = -1
    ) -> dict[tuple[str, State], Snapshot]:
        """Every (module, state) with its bytes per category, of one call and micro-batch.

        Args:
            first_step: of the first step, not of the steady state.
            call: which of the module's calls in a forward, from 0.
            micro_batch: which of the step's, from 0; negative: from the last.

        Returns:
            (module, state) -> category -> bytes.
        """
        return self._cells(first_step, call, micro_batch, 0)

    def host_cells(
        self, *, first_step: bool = False, call: int = 0, micro_batch: int = -1
    ) -> dict[tuple[str, State], Snapshot]:
        """As `cells`, of CPU memory, with offload.

        Args:
            first_step, call, micro_batch: as for `cells`.

        Returns:
            (module, state) -> category -> bytes of CPU memory.
        """
        return self._cells(first_step, call, micro_batch, HALF)

    def _cells(
        self, first_step: bool, call: int, micro_batch: int, column: int
    ) -> dict[tuple[str, State], Snapshot]:
        number = self._micro_batch(micro_batch)
        rows = self.ledger(first_step=first_step).bytes[:, column:]
        return {
            (where.module, where.state): _snapshot(rows[tick])
            for where, tick in self.ticks(first_step=first_step).items()
            if where.call == call and where.micro_batch == number
        }

    def snapshot(
        self,
        module: str,
        state: State | str,
        *,
        first_step: bool = False,
        call: int = 0,
        micro_batch: int = -1,
        owned: bool = False,
    ) -> Snapshot | None:
        """Bytes per category when `module` is in `state`.

        Args:
            module: FQN.
            state: a `State`, or its name.
            first_step: of the first step, not of the steady state.
            call: which of the module's calls in a forward, from 0.
            micro_batch: which of the step's, from 0; negative: from the last.
            owned: only what that module owns itself (see `LiveRange.module`), not what the whole
                rank holds. The owned bytes of all modules, `LOSS` and `OPTIMIZER` add up to it.

        Returns:
            None if the module has no such state (no operator in that phase).

        Raises:
            ConfigError: no such module, state or micro-batch.
        """
        where = self._where(module, state, call, micro_batch)
        tick = self.ticks(first_step=first_step).get(where)
        if tick is None:
            return None
        if owned:
            return self.owned_at(tick, first_step=first_step).get(module, _nothing())
        return _snapshot(self.ledger(first_step=first_step).bytes[tick])

    def _where(self, module: str, state: State | str, call: int, micro_batch: int) -> Where:
        wanted = State(state) if state in {s.value for s in State} else state
        if module not in self.modules() or not isinstance(wanted, State):
            raise ConfigError(
                f"no state {state!r} of module {module!r}; states are "
                f"{', '.join(s.value for s in State)}, modules for example "
                f"{', '.join(map(repr, self.modules()[:4]))}."
            )
        return Where(module, wanted, call, self._micro_batch(micro_batch))

    def owned_at(self, tick: int, *, first_step: bool = False) -> dict[str, Snapshot]:
        """Bytes on the device by owner, at one tick of the ledger.

        Args:
            tick: from 0.
            first_step: of the first step, not of the steady state.

        Returns:
            Owner -> category -> bytes.
        """
        found: dict[str, Snapshot] = defaultdict(_nothing)
        for each in self.ledger(first_step=first_step).alive(tick):
            if not each.host:
                found[each.module][each.category] += each.bytes
        return dict(found)


def _nothing() -> Snapshot:
    return dict.fromkeys(CATEGORIES, 0)


def _snapshot(row: Any) -> Snapshot:
    return {category: int(row[i]) for i, category in enumerate(CATEGORIES)}


def category_of(category: Category | str | None) -> Category | None:
    """A category by its name.

    Raises:
        ConfigError: there is none.
    """
    legal = {each.value: each for each in CATEGORIES}
    if isinstance(category, str) and category not in legal:
        raise ConfigError(f"no category {category!r}; legal: {', '.join(legal)}.")
    return legal[category] if isinstance(category, str) else category
