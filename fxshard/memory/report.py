"""MemoryReport: the bytes of a step as data, and what is asked of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fxshard.arguments import check_count, check_flag
from fxshard.bytesize import excess_text, parse_budget, size_text
from fxshard.capture.provenance import line_text
from fxshard.errors import ConfigError, DoesNotFitError
from fxshard.host import collector, files
from fxshard.ir.program import Program
from fxshard.memory import formula, queries
from fxshard.memory.category import Category, State
from fxshard.memory.cuda.kernels import kernel_temporaries_cuda
from fxshard.memory.cuda.reserved import HOPPER, DeviceMemory, device_memory
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.explain import Explanation, WhatIf, alive_things
from fxshard.memory.figures import Figures, category_of
from fxshard.memory.formula import Formula, StepFormulas
from fxshard.memory.kernels import KernelTemporary, kernel_temporaries
from fxshard.memory.lifecycle.script import LifecyclePhase
from fxshard.memory.queries import Kept

if TYPE_CHECKING:
    from fxshard.memory.views.diff import Diff
    from fxshard.memory.views.plots import Dot, PeakCurve


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
class MemoryReport(Figures):
    """Bytes of tensors alive on one rank at each point of a step. All figures are bytes.

    A report is data: it can be pickled, and has no program inside. A report that was loaded has
    every figure and every view; what needs the program (formulas, other sizes, other settings of
    the allocator, why an activation is kept) is asked of the plan, which it has no longer.

    With offload, what lies on the CPU while the program computes elsewhere is in no figure but
    those named host: `host_peak_bytes`, `host_cells`, and columns of their own in `table`.

    Temporaries inside a kernel are not tensors that a program can see: they are in
    `kernel_temporaries` and in no other figure.

    What is computed of the live ranges alone stands in `Figures`, with its attributes.

    Attributes:
        plan: what is asked where the program is needed; None for a report that was loaded.
        sizes: of a report by `at`: its sizes; what is no live range is planned for them.
        beside: of a report without a plan: what is known beside the live ranges.
    """

    plan: AskedPlan | None = None
    sizes: Mapping[str, int] | None = None
    beside: Beside | None = None

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

    # -- what asks the plan ------------------------------------------------------------------------

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

    # -- other sizes -------------------------------------------------------------------------------

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
        wanted = category_of(category)
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

    def curves(self, **sizes: Sequence[int]) -> list[PeakCurve]:
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

    # -- beside the live ranges --------------------------------------------------------------------

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

    # -- views -------------------------------------------------------------------------------------

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
        curves: Sequence[PeakCurve] = (),
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
