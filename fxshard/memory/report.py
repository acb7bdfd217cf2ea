"""MemoryReport: the bytes of a step as data, and what is asked of them."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fxshard.arguments import check_count, check_flag
from fxshard.bytesize import excess_text, parse_budget, size_text
from fxshard.capture.provenance import line_text
from fxshard.errors import ConfigError, DoesNotFitError
from fxshard.host import collector, files
from fxshard.ir.calls import Call
from fxshard.ir.program import Program
from fxshard.ir.units import Unit
from fxshard.memory import formula, queries, states
from fxshard.memory.category import CATEGORIES, Category, Matrix, State
from fxshard.memory.cuda.kernels import kernel_temporaries_cuda
from fxshard.memory.cuda.reserved import HOPPER, DeviceMemory, device_memory
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.explain import Explanation, WhatIf, alive_things
from fxshard.memory.formula import Formula, StepFormulas
from fxshard.memory.kernels import KernelTemporary, kernel_temporaries
from fxshard.memory.ledger import HALF, Ledger, LiveRange, PhaseBytes
from fxshard.memory.lifecycle.script import LifecyclePhase
from fxshard.memory.owners import owned_rows
from fxshard.memory.queries import Kept, Unsharded
from fxshard.memory.states import Called, Rows, Span, Where

if TYPE_CHECKING:
    from fxshard.memory.views.diff import Diff
    from fxshard.memory.views.plots import Curve, Dot

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


class AskedPlan(Protocol):
    """What a report asks of its plan: all that needs the program."""

    @property
    def programs(self) -> tuple[Program, ...]:
        """One per micro-batch."""

    def what_ifs(self) -> list[WhatIf]:
        """What could be changed, and what each would save."""

    def lifecycle(self) -> list[LifecyclePhase]:
        """Making the sharded model, loading and saving."""

    def formulas(self) -> StepFormulas:
        """The live ranges as formulas."""

    def of_world(self, world: int) -> MemoryReport:
        """The report of a plan whose formulas hold for a number of ranks."""

    def planned(self, sizes: Mapping[str, int]) -> MemoryReport:
        """The report of a plan of those sizes."""


@dataclasses.dataclass(frozen=True, repr=False)
class Beside:
    """What is known beside the live ranges, where there is no program to ask.

    Attributes:
        kernel_temporaries: see `MemoryReport.kernel_temporaries`.
        lifecycle: see `MemoryReport.lifecycle`.
        device_memory: on CUDA with default settings; None: it is not known, or there is none.
        replayed: gives it for other settings and a capacity in bytes; not pickled.
    """

    kernel_temporaries: tuple[KernelTemporary, ...]
    lifecycle: tuple[LifecyclePhase, ...] = ()
    device_memory: DeviceMemory | None = None
    replayed: Callable[[AllocatorSettings | None, int | None], DeviceMemory] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All but what asks the run."""
        return vars(self) | {"replayed": None}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MemoryReport:
    """Bytes of tensors alive on one rank at each point of a step. All figures are bytes.

    A report is data: it can be pickled, and has no program inside. A report that was loaded has
    every figure and every view; what needs the program (formulas, other sizes, other settings of
    the allocator, why an activation is kept) is asked of the plan, which it has no longer.

    With offload, what lies on the CPU while the program computes elsewhere is in no figure but
    those named host: `host_peak_bytes`, `host_cells`, and columns of their own in `table`.

    Temporaries inside a kernel are not tensors that a program can see: they are in
    `kernel_temporaries` and in no other figure.

    Attributes:
        first, steady: every live range of the first and of each later step (see `ledger`).
        calls: per micro-batch, every call of a module in forward.
        units: the units; index 0 is the root.
        world_size: ranks that parameters are sharded over.
        training: the program has a backward.
        offloaded: shards and sharded gradients live on the CPU.
        optimizer: class name of the analysed optimizer, or None.
        device: type of the device that is planned for.
        plan: what is asked where the program is needed; None for a report that was loaded.
        sizes: of a report by `at`: its sizes; what is no live range is planned for them.
        beside: of a report without a plan: what is known beside the live ranges.
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
    plan: AskedPlan | None = None
    sizes: Mapping[str, int] | None = None
    beside: Beside | None = None
    first_calls: tuple[tuple[Call, ...], ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All figures, without the plan."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.plan is not None:
            device = self._device_memory if self._on_cuda else None
            beside = Beside(tuple(self.kernel_temporaries), tuple(self.lifecycle), device)
            state |= {"plan": None, "beside": beside}
        return state

    @property
    def _asked(self) -> AskedPlan:
        """The plan.

        Raises:
            ConfigError: there is none.
        """
        if self.plan is None:
            raise ConfigError(
                "this report has no plan to ask (pickle leaves it out): take that of a plan, "
                "plan.memory."
            )
        return self.plan

    @functools.cached_property
    def _planned(self) -> AskedPlan:
        """The plan, of `sizes` if there are any."""
        return self._asked if self.sizes is None else self._asked.planned(self.sizes)._asked

    def ledger(self, *, first_step: bool = False) -> Ledger:
        """Every live range of the step; all other figures are read from it.

        Args:
            first_step: of the first step, not of the steady state.

        Returns:
            The live ranges, with their bytes and their first and last tick.
        """
        return self.first if first_step else self.steady

    # -- the peak --------------------------------------------------------------------------------

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

    @property
    def peak_with_kernels_bytes(self) -> int | None:
        """Largest sum of live bytes and of what the running kernel takes for itself.

        None if the program has kernels of which that is not known. gloo's own buffers, taken by
        its threads at times of their choice, are not in it.
        """
        rows = [k for k in self.kernel_temporaries if k.backend != "gloo"]
        inside = {(k.phase, k.point): k.bytes for k in rows}
        if None in inside.values():
            return None
        return max(
            int(total) + (inside.get((phase.phase, i)) or 0)
            for phase in self.phases()
            for i, total in enumerate((sum(phase.start), *phase.during.sum(1)), start=-1)
        )

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
        wanted = _category(category)
        found: dict[str, int] = defaultdict(int)
        for each in self.alive_at_peak():
            if wanted in (None, each.category):
                names = each.module.split(".")
                found[".".join(names if depth is None else names[:depth])] += each.bytes
        return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))

    def explain_peak(self, top: int = 20, *, what_ifs: bool = True) -> Explanation:
        """Everything alive at the peak of the steady step, and what changes of the plan would save.

        Args:
            top: how many things the text shows one by one; `Explanation.alive` has all.
            what_ifs: try each such change by planning the step with it, which takes so much longer.

        Returns:
            What is alive, each with its bytes and source line; ``str()`` tells it.

        Raises:
            ConfigError: `top` is no number, or `what_ifs` no flag.
        """
        check_count("top", top)
        check_flag("what_ifs", what_ifs)
        at, ledger = self.peak_at, self.steady
        where = str(at)
        if self.micro_batches > 1 and at.micro_batch >= 0:
            where = f"micro-batch {at.micro_batch + 1}, {where}"
        if at.line:
            where += f" ({line_text(at.line)})"
        can_plan = self.plan is not None and self.sizes is None
        tried = tuple(self._asked.what_ifs()) if what_ifs and can_plan else ()
        alive = alive_things(self.alive_at_peak(), ledger)
        return Explanation(where, self.peak_bytes, alive, tried, top)

    # -- the step --------------------------------------------------------------------------------

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

    def kept_for_backward(self, micro_batch: int = -1) -> list[Kept]:
        """Every activation that is alive between forward and backward, and why, largest first.

        Args:
            micro_batch: of which, from 0; negative: from the last.

        Returns:
            One entry per activation, with its bytes, its operator and who reads it.

        Raises:
            ConfigError: no such micro-batch.
        """
        number = self._micro_batch(micro_batch)
        return queries.kept_for_backward(self.steady, self._asked.programs[number], number)

    def recomputed(self, micro_batch: int = -1) -> dict[str, int]:
        """Operator -> how often backward runs it to recompute what checkpoints have dropped.

        Args:
            micro_batch: of which, from 0; negative: from the last.

        Returns:
            Name of the operator -> count.

        Raises:
            ConfigError: no such micro-batch.
        """
        return queries.recomputed(self._asked.programs[self._micro_batch(micro_batch)])

    def _micro_batch(self, number: int) -> int:
        count = self.micro_batches
        if not -count <= number < count:
            raise ConfigError(f"micro_batch={number}: the step has {count}, numbered from 0.")
        return number % count

    # -- rows of the table: a module in a state --------------------------------------------------

    @functools.cached_property
    def _spans(self) -> list[dict[Called, dict[str, Span]]]:
        return states.spans(self.steady, self.calls)

    @functools.cached_property
    def _first_rows(self) -> Rows:
        if self.first_calls is None:
            return Rows(self.first, self._spans)
        return Rows(self.first, states.spans(self.first, self.first_calls))

    @functools.cached_property
    def _steady_rows(self) -> Rows:
        return Rows(self.steady, self._spans)

    def _rows(self, first_step: bool) -> Rows:
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

    # -- other sizes -----------------------------------------------------------------------------

    @functools.cached_property
    def formulas(self) -> StepFormulas:
        """Every live range as a vector over monomials of the open sizes and of ``world``.

        Raises:
            ConfigError: the plan is of a kind whose order depends on sizes; says which.
        """
        return self._asked.formulas()

    def formula(
        self,
        *,
        category: Category | str | None = None,
        module: str | None = None,
        state: State | str | None = None,
        first_step: bool = False,
        host: bool = False,
        rounded: bool = False,
        call: int = 0,
        micro_batch: int = -1,
    ) -> Formula:
        """Bytes as a sympy expression of the open sizes (``dynamic=``) and of ``world``.

        Args:
            category: only what is of it.
            module: with `state`, whose row of the table; alone, only what that module owns itself.
            state: a `State`, or its name: bytes then; without, at the peak of the step.
            first_step: of the first step, not of the steady state.
            host: on the CPU, with offload, not on the device.
            rounded: each storage counts as many blocks of 512 bytes as it needs, as in
                ``torch.cuda.memory_allocated``.
            call, micro_batch: as for `snapshot`.

        Returns:
            The formula, in bytes.

        Raises:
            ConfigError: no such category, module or state; or the plan has no formulas.
        """
        step, ledger = self.formulas, self.ledger(first_step=first_step)
        owners = {each.module for each in ledger.ranges}
        ticks: range | None = range(2 * len(ledger.moments))
        wanted = _category(category)
        if state is not None:
            where = self._where(module or "", state, call, micro_batch)
            ticks = self._rows(first_step).stretches.get(where)
        elif module is not None and module not in owners:
            raise ConfigError(
                f"nothing is owned by module {module!r}; owners are for example "
                f"{', '.join(map(repr, sorted(owners)[:4]))}."
            )
        if ticks is None:
            raise ConfigError(f"module {module!r} computes nothing in a state {state!r}.")
        part = formula.Part(first_step, host, rounded, wanted, module if state is None else None)

        def elsewhere(world: int) -> Formula:
            other = self._asked.of_world(world).formula
            of = functools.partial(other, category=category, module=module, state=state)
            where = functools.partial(of, first_step=first_step, call=call, micro_batch=micro_batch)
            return where(host=host, rounded=rounded)

        return formula.largest(step, ticks, part, elsewhere)

    def at(self, **sizes: int) -> MemoryReport:
        """This report for other sizes of ``dynamic=`` and of ``world``, from its formulas.

        What is not a live range (kernel temporaries, CUDA's allocator, making and saving the model)
        is planned anew when it is asked for.

        Args:
            **sizes: by name; the others are the plan's.

        Returns:
            A report, in bytes as any other.

        Raises:
            OutOfRangeError: the formulas do not hold there; says why, and what to do.
            ConfigError: there is no such size.
        """
        valid = self.formulas.range
        point = {name: int(size) for name, size in valid.complete(sizes).items()}
        base = self._asked.of_world(point["world"])
        base.formulas.range.check(point)
        first, steady = (base.formulas.sized(point, first_step=first) for first in (True, False))
        return dataclasses.replace(base, first=first, steady=steady, sizes=point)

    def curves(self, **sizes: Sequence[int]) -> list[Curve]:
        """The peak along each size, the others as in the plan: for `plot`, and for `to_html`.

        Args:
            **sizes: by name, the values to be drawn; without any, each open size up to four times
                what it is and the number of ranks by powers of 2, as far as the formula holds.

        Returns:
            One per size: its values, and the peak at each in bytes.

        Raises:
            OutOfRangeError, ConfigError: as `formula` and `Formula.at`.
        """
        from fxshard.memory.views import plots

        peak = self.formula()
        valid = peak.range
        valid.complete(dict(sizes))
        chosen = {name: sorted(values) for name, values in sizes.items()} or valid.around()
        return plots.curves(peak.lambdify(), chosen, valid.example)

    # -- beside the live ranges ------------------------------------------------------------------

    @property
    def _on_cuda(self) -> bool:
        return self.device == "cuda"

    @functools.cached_property
    def kernel_temporaries(self) -> list[KernelTemporary]:
        """Memory that kernels are known to take and give back inside one operator, per operator.

        Of the last micro-batch. Not in any other figure; see `fxshard.memory.kernels` and
        `fxshard.memory.cuda.kernels` for each formula and its source.
        """
        if self.beside is not None:
            return list(self.beside.kernel_temporaries)
        program = self._planned.programs[-1]
        return kernel_temporaries_cuda(program) if self._on_cuda else kernel_temporaries(program)

    @functools.cached_property
    def lifecycle(self) -> list[LifecyclePhase]:
        """Bytes outside of the step: making the sharded model, loading and saving."""
        if self.beside is not None:
            return list(self.beside.lifecycle)
        return [] if self.plan is None else self._planned.lifecycle()

    def device_memory(
        self,
        *,
        capability: tuple[int, int] = HOPPER,
        settings: AllocatorSettings | None = None,
        capacity: int | None = None,
    ) -> DeviceMemory:
        """Allocated and reserved bytes of CUDA's caching allocator, of a plan for CUDA.

        Args:
            capability: of the GPU, as ``torch.cuda.get_device_capability``; that of a dry run is
                its own.
            settings: ``PYTORCH_CUDA_ALLOC_CONF``, see `AllocatorSettings.from_text`.
            capacity: bytes of the device without CUDA's context and NCCL's buffers.

        Returns:
            Bytes allocated and reserved, at each point.

        Raises:
            ConfigError: the plan is for the CPU, which has no such allocator.
        """
        if not self._on_cuda:
            raise ConfigError(
                f"device_memory: this plan is for {self.device!r}, where nothing is cached. "
                f"Plan with device='cuda', or a model on CUDA."
            )
        if (capability, settings, capacity) == (HOPPER, None, None):
            return self._device_memory
        return self._replayed(capability, settings, capacity)

    @functools.cached_property
    def _device_memory(self) -> DeviceMemory:
        if self.beside is not None and self.beside.device_memory is not None:
            return self.beside.device_memory
        return self._replayed(HOPPER, None, None)

    def _replayed(
        self,
        capability: tuple[int, int],
        settings: AllocatorSettings | None,
        capacity: int | None,
    ) -> DeviceMemory:
        if self.beside is not None and self.beside.replayed is not None:
            return self.beside.replayed(settings, capacity)
        programs = self._planned.programs
        return device_memory(
            *(self.first, self.steady, programs),
            capability=capability,
            settings=settings,
            capacity=capacity,
        )

    def assert_fits(self, budget: int | str) -> None:
        """Raise DoesNotFitError if `budget` is too little to make the sharded model or for a step.

        Of a plan for CUDA, what the caching allocator makes of the step must fit into `budget` less
        what is outside of it (`DeviceMemory.outside`).

        Args:
            budget: bytes, or text such as "80GiB".

        Raises:
            DoesNotFitError: says how much is too much, and what is alive at the peak.
            ConfigError: `budget` is no size.
        """
        limit = parse_budget(budget)
        worst = max(self.peak_bytes, self.first_step_peak_bytes)
        if worst > limit:
            raise DoesNotFitError(
                f"{excess_text(worst, limit)}.\n{self.explain_peak(5, what_ifs=False)}"
            )
        for phase in self.lifecycle:
            if phase.name.startswith("init") and phase.peak_bytes > limit:
                raise DoesNotFitError(
                    f"{size_text(phase.peak_bytes)} needed to make the sharded model (at "
                    f"{phase.peak_node}), {size_text(limit)} given. Build it under "
                    f"torch.device('meta'): it is then filled module by module."
                )
        if self._on_cuda:
            self._assert_allocator_fits(limit)

    def _assert_allocator_fits(self, limit: int) -> None:
        unlimited = self.device_memory()
        outside = unlimited.outside
        if outside >= limit:
            raise DoesNotFitError(
                f"CUDA's context and NCCL take {size_text(outside)} of {size_text(limit)}: nothing "
                f"is left to the allocator, which would reserve {size_text(unlimited.reserved)}."
            )
        memory = self.device_memory(capacity=limit - outside)
        if memory.out_of_memory is not None:
            step, phase, node = memory.out_of_memory
            expandable = AllocatorSettings(expandable_segments=True)
            other = self.device_memory(settings=expandable, capacity=limit - outside)
            helps = "does not help" if other.out_of_memory else "makes it fit"
            raise DoesNotFitError(
                f"CUDA's caching allocator finds no room in step {step}, {phase}, at {node}: "
                f"{size_text(limit)} given, of which {size_text(outside)} are left to CUDA's "
                f"context and NCCL. Without a limit it would reserve "
                f"{size_text(unlimited.reserved)}; "
                f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {helps}.\n"
                f"{self.explain_peak(5, what_ifs=False)}"
            )

    # -- views -----------------------------------------------------------------------------------

    @collector.paused()
    def table(
        self,
        depth: int | None = None,
        units: str = "MiB",
        *,
        fold: bool = True,
        micro_batch: int = -1,
        width: int = 100,
    ) -> str:
        """Phases, then modules by state and category, as text.

        Args:
            depth: show modules with at most this many names in their FQN (None: all).
            units: "B", "KiB", "MiB" or "GiB".
            fold: of modules that differ in a layer number only, show one if all their rows are
                equal, else the first, the last, and the range of the others.
            micro_batch: whose modules, from 0; negative: from the last.
            width: no line is longer; categories are added up where there is no room for each.

        Returns:
            Text, in the given unit.

        Raises:
            ConfigError: no such depth, units or micro-batch, or no such width.
        """
        if depth is not None:
            check_count("depth", depth)
        check_count("width", width)
        check_flag("fold", fold)
        from fxshard.memory.views import tables

        number = self._micro_batch(micro_batch)
        return tables.text(self, depth, units, fold=fold, micro_batch=number, width=width)

    @collector.paused()
    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values, in bytes; docs/report-json.md describes the schema."""
        from fxshard.memory.views import serialize

        return serialize.to_dict(self)

    @collector.paused()
    def to_csv(self) -> str:
        """Every phase and every row, of the first and of the steady step, as CSV, in bytes."""
        from fxshard.memory.views import tables

        return tables.csv_text(self)

    def to_html(
        self,
        path: str | Path,
        *,
        first_step: bool = False,
        front: Sequence[Dot] = (),
        curves: Sequence[Curve] = (),
        budget: int | None = None,
    ) -> None:
        """Write one page that needs no network: timeline, schedule, what is alive, all rows.

        Args:
            path: of the file.
            first_step: of the first step, not of the steady state.
            front: configurations, as `fxshard.tune` gives them in `Tuning.dots()`: adds a chart of
                memory against time.
            curves: peaks, as `curves` gives them: adds a chart of each.
            budget: bytes, a line in both.

        Raises:
            ConfigError: plotly is not installed, or a front has no budget.
        """
        from fxshard.memory.views import html

        extra = html.tuning(front, curves, budget)
        files.write(path, html.page(self, extra, first_step=first_step))

    def trace_events(self, clock: Callable[[Iterable[Any]], list[float]]) -> list[dict[str, Any]]:
        """Bytes by category over estimated times (`fxshard.cost.timeline.Estimate.to_perfetto`).

        Args:
            clock: of phases, the microsecond of each tick of their ledger, and of the end.

        Returns:
            Events in Perfetto's JSON format.
        """
        from fxshard.memory.views import perfetto

        times = clock(self.steady.phases)
        return perfetto.memory_events(self.steady, times, offloaded=self.offloaded)

    def to_perfetto(self, path: str | Path, *, first_step: bool = False) -> None:
        """Write a trace for ui.perfetto.dev: counters per category, a track per stream.

        Args:
            path: of the file.
            first_step: of the first step, not of the steady state.
        """
        from fxshard.memory.views import perfetto

        files.write(path, perfetto.text(self, first_step=first_step))

    def to_memory_viz(self, path: str | Path, *, first_step: bool = False) -> None:
        """Write a snapshot for pytorch.org/memory_viz.

        Args:
            path: of the file.
            first_step: of the first step, not of the steady state.
        """
        from fxshard.memory.views import memory_viz

        files.write(path, memory_viz.pickled(self, first_step=first_step))

    def diff(self, other: MemoryReport) -> Diff:
        """This report (before) and another (after) side by side, see `views.diff`.

        Args:
            other: of any plan.

        Returns:
            The differences, in bytes; ``table()`` shows them.
        """
        from fxshard.memory.views import diff

        return diff.diff(self.to_dict(), other.to_dict())

    def plot(
        self, path: str | Path, *, budget: int | str | None = None, **sizes: Sequence[int]
    ) -> None:
        """Write the `curves` as a PNG, with the budget as a line.

        Args:
            path: of the file.
            budget: bytes, or text such as "80GiB"; None: no line.
            **sizes: as for `curves`.

        Raises:
            ConfigError: matplotlib is not installed; or as `curves`.
        """
        from fxshard.memory.views import plots

        limit = None if budget is None else parse_budget(budget)
        plots.plot_curves(path, self.curves(**sizes), limit)


def _nothing() -> Snapshot:
    return dict.fromkeys(CATEGORIES, 0)


def _snapshot(row: Any) -> Snapshot:
    return {category: int(row[i]) for i, category in enumerate(CATEGORIES)}


def _category(category: Category | str | None) -> Category | None:
    """A category by its name.

    Raises:
        ConfigError: there is none.
    """
    legal = {each.value: each for each in CATEGORIES}
    if isinstance(category, str) and category not in legal:
        raise ConfigError(f"no category {category!r}; legal: {', '.join(legal)}.")
    return legal[category] if isinstance(category, str) else category
