"""Plan: what one training step of a model will do on one rank, known before it runs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Unpack

import sympy
import torch

from fxshard._torch import trees
from fxshard.arguments import check_flag
from fxshard.bytesize import counts, is_size
from fxshard.capture import other_sizes, shapes
from fxshard.codegen.emit import emit, require_schedule
from fxshard.config.checked import Config
from fxshard.config.world_size import grid
from fxshard.cost import timeline
from fxshard.cost.timeline import Estimate
from fxshard.errors import ConfigError, UnknownSizeError
from fxshard.hardware import Hardware, hardware_of
from fxshard.host import collector, progress
from fxshard.ir import domain, dump, meshes, tags, transfers
from fxshard.ir.program import Program
from fxshard.ir.splitting import configured_units
from fxshard.ir.units import Unit
from fxshard.memory import liveness, schedule, symbolic
from fxshard.memory.explain import WhatIf
from fxshard.memory.formula import Range, StepFormulas
from fxshard.memory.gradients import unreached
from fxshard.memory.held import held_ranges
from fxshard.memory.in_backward import trace_in_backward
from fxshard.memory.lifecycle.phases import lifecycle
from fxshard.memory.lifecycle.script import LifecyclePhase
from fxshard.memory.loss import LossStep, trace_loss
from fxshard.memory.loss import with_formulas as loss_with_formulas
from fxshard.memory.optimizer import trace_step
from fxshard.memory.optimizer_formulas import with_formulas
from fxshard.memory.optimizer_step import OptimizerStep
from fxshard.memory.report import MemoryReport
from fxshard.memory.views.live import live_after
from fxshard.pipeline import Observer, make_program, open_captures
from fxshard.plans.answers import Chosen, Limit, Solution
from fxshard.plans.workload import Changes, Workload, is_own
from fxshard.verify import certificate

# Recordings of optimizers, by what they depend on, each with its optimizer, whose id is in the key.
Steps = dict[Any, tuple[Any, OptimizerStep | None]]


def make_plan(
    workload: Workload,
    *,
    observe: Observer | None = None,
    captures: dict[Any, Program] | None = None,
    steps: Steps | None = None,
    stems: dict[Any, Program] | None = None,
) -> Plan:
    """Capture the call and run the passes, once per kind of micro-batch.

    Args:
        workload: the model, the call and the options.
        observe: called with the dump before and after each pass.
        captures: earlier ones of the same model; new ones are added.
        steps: earlier recordings of optimizers; new ones are added.
        stems: see `make_program`.
    """
    with workload.around():
        return _made(workload, observe, captures, steps, stems)


def _made(
    workload: Workload,
    observe: Observer | None,
    captures: dict[Any, Program] | None,
    steps: Steps | None,
    stems: dict[Any, Program] | None,
) -> Plan:
    replicas, shards = grid(workload.world_size, workload.config)
    units = configured_units(workload.module, workload.config)
    others = meshes.grids(workload.config, meshes.of_units(units), replicas, shards)
    captures = {} if captures is None else captures
    made: dict[tuple[bool, frozenset[str]], Program] = {}
    programs: list[Program] = []
    accumulated: frozenset[str] = frozenset()
    for number in range(workload.micro_batches):
        sync = not workload.no_sync or number == workload.micro_batches - 1
        if (sync, accumulated) not in made:
            made[sync, accumulated] = make_program(
                workload.module,
                *workload.call,
                units=units,
                world=shards,
                replicas=replicas,
                meshes=others,
                config=workload.config,
                sync=sync,
                accumulated=sorted(accumulated),
                observe=observe,
                captures=captures,
                stems=stems,
                tangents=workload.tangents,
                whole=workload.whole,
                symbols=shapes.named(
                    workload.config.dynamic or {}, workload.module, *workload.call
                ),
            )
        program = made[sync, accumulated]
        programs.append(program)
        accumulated |= {r.name for r in program.results if r.kind == "accumulated"}
    plan = Plan(programs, workload, captures, steps)
    starts = plan.other_starts()
    if starts is None:
        return plan
    workload = dataclasses.replace(workload, tangents=starts)
    return _made(workload, observe, captures, steps, stems)


class _PlanSearch(Protocol):
    """`fxshard.planner.verbs`: what searches over plans."""

    def fitting(self, plan: Plan) -> Plan: ...

    def largest(
        self, plan: Plan, budget: int | str, what: str, dim: int, multiple_of: int
    ) -> Limit[Plan]: ...

    def solve(
        self, plan: Plan, what: str, budget: int | str, multiple_of: int, fixed: dict[str, int]
    ) -> Solution[Plan]: ...

    def what_ifs(self, plan: Plan) -> list[WhatIf]: ...


@functools.cache
def _planner() -> _PlanSearch:
    """The planner, which itself makes plans: the one import upward (docs/layout.md)."""
    found: Any = importlib.import_module("fxshard.planner.verbs")
    planner: _PlanSearch = found
    return planner


class Plan:
    """What one training step of a model will do on one rank, known before it runs.

    Attributes:
        programs: the rewritten programs, one per micro-batch of a step.
        workload: what it was made for.
        chosen: what ``memory_budget`` has chosen; None without it.
    """

    chosen: Chosen | None = None

    def __init__(
        self,
        programs: Sequence[Program],
        workload: Workload,
        captures: dict[Any, Program] | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.programs: tuple[Program, ...] = tuple(programs)
        self.workload: Workload = workload
        self._kinds: dict[int, symbolic.WorldKind] = {}
        self._captures = {} if captures is None else captures
        self._steps = {} if steps is None else steps

    @property
    def config(self) -> Config:
        """The options it was made with."""
        return self.workload.config

    @property
    def program(self) -> Program:
        """The program of the last micro-batch: the one that reduces all gradients."""
        return self.programs[-1]

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units; index 0 is the root."""
        return self.program.units

    @functools.cached_property
    def optimizer_step(self) -> OptimizerStep | None:
        """What the optimizer allocates and frees; None without one."""
        if self.config.optimizer_in_backward:
            return self._recorded(self.program, self.config.optimizer)
        return self.step_after_backward()

    @functools.cached_property
    def _loss(self) -> LossStep | None:
        work = self.workload
        if work.loss is None:
            return None
        kept = work.keep_outputs or self.config.pipeline_stage  # schedules hold them until backward
        with work.around():
            return trace_loss(self.program, work.loss, keep_outputs=kept)

    def other_starts(self) -> tuple[int, ...] | None:
        """The outputs that the loss is made of, if the program does not start from all of them."""
        signature = self.program.signature
        if self.workload.tangents is not None or signature.starts_everywhere or self._loss is None:
            return None
        arrived = self._loss.arrived
        return None if arrived <= {*signature.tangents} else tuple(sorted(arrived))

    @property
    def device(self) -> str:
        """Type of the device that it is a plan for, or that a compiled model computes on."""
        return torch.device(self.config.device or self.program.device).type

    def step_after_backward(self) -> OptimizerStep | None:
        """The optimizer's step after backward, recorded once for replanned plans.

        It sees this rank's rows of the parameters, and which of them have gradients.
        """
        program, for_cuda = self.program, self.device == "cuda"
        params = *program.params.values(), *program.ignored.values()
        rows = tuple((p.fqn, p.shape, p.dtype, p.requires_grad, p.position) for p in params)
        trained = frozenset(r.name for r in program.results if r.kind == "grad")
        trained |= program.accumulated  # of a pipeline's stage: its schedule reduces them
        without = unreached(program, self._loss)
        optimizer = self.config.optimizer
        stepped = frozenset(transfers.stepped(program))
        key = (
            id(optimizer),
            program.world_size,
            rows,
            len(program.ignored),
            trained,
            stepped,
            without,
            for_cuda,
        )
        if key not in self._steps:
            made = trace_step(program, optimizer, for_cuda=for_cuda, without=without)
            self._steps[key] = optimizer, made
        return self._steps[key][1]

    @functools.cached_property
    def memory(self) -> MemoryReport:
        """Bytes at every point of the step, per category and module (computed once, on demand).

        Raises:
            UnknownSizeError: a size depends on the data.
            ConfigError: the option ``passes`` leaves the program without a schedule.
        """
        self._require_schedule()
        self._require_known_sizes()
        with self.workload.around():
            return self._memory()

    def _memory(self) -> MemoryReport:
        step = self.optimizer_step
        loss, work = self._loss, self.workload
        held = held_ranges(work.module, work.call, self.program, loss)
        scheduled = None
        if self.config.pipeline_stage and self.program.signature.training:
            count = work.micro_batches
            held = schedule.held_by_schedule(held, self.program, count, loss)
            ahead, kept = work.in_flight or count, work.keep_outputs
            scheduled = schedule.walked(self.program, held, count, ahead, loss, keep_outputs=kept)
        return liveness.analyse(
            self.programs, held, step, loss, self.device, plan=_Asked(self), scheduled=scheduled
        )

    def at(self, *, traced: bool = False, **sizes: int) -> Plan:
        """The plan of the same step for other sizes of ``dynamic=`` and of ``world``.

        As with `replan`, the model is traced again only if the capture does not serve those sizes.

        Args:
            traced: trace the call on its own, with no size left open.
            **sizes: by name; the others stay.

        Returns:
            This plan if nothing changes; else a new one.

        Raises:
            ConfigError: there is no such size.
        """
        sizes = counts(sizes)
        named, world = self._named_sizes(), sizes.pop("world", None)
        for name in sizes.keys() - named.keys():
            raise ConfigError(
                f"no size {name!r}: this plan has {', '.join(map(repr, (*named, 'world')))}."
            )
        changes: dict[str, Any] = {}
        if world is not None and (own := meshes.named(self.config)):
            raise ConfigError(
                f"world={world}: some parameters have meshes of their own ({', '.join(own)}), "
                f"whose ranks are those of this world. Plan with meshes of the other one."
            )
        if world is not None and self.config.hybrid:
            changes["world_size"] = grid(self.workload.world_size, self.config)[0], world
        elif world is not None:
            changes["world_size"] = world
        if any(size != named[name] for name, size in sizes.items()):
            call = other_sizes.with_sizes(self.workload.call, self._places(), sizes)
            changes["args"], changes["kwargs"] = call
        if traced:
            fresh = self.workload.changed({**changes, "dynamic": None})
            return make_plan(fresh)
        return self.replan(**changes) if changes else self

    def inputs_with(self, name: str, sizes: dict[str, int]) -> list[torch.Tensor]:
        """The tensors of the call that have a size of ``dynamic=``, on meta, with other sizes.

        Args:
            name: of the size.
            sizes: new sizes, by name.

        Returns:
            One tensor per input that has the size, of its dtype, on the meta device.
        """
        places = self._places()
        given = {other: size for other, size in sizes.items() if other in places}
        leaves, _ = trees.tree_flatten(other_sizes.with_sizes(self.workload.call, places, given))
        return [leaves[leaf] for leaf, _ in places[name]]

    def _places(self) -> domain.Symbols:
        work = self.workload
        return shapes.named(self.config.dynamic or {}, work.module, *work.call, least=1)

    def _named_sizes(self) -> dict[str, int]:
        """The sizes of the call by their names."""
        leaves, _ = trees.tree_flatten(self.workload.call)
        sizes = shapes.of_call(leaves)
        return {name: domain.size_at(sizes, at[0]) for name, at in self._places().items()}

    @property
    def _world(self) -> int:
        """The number of ranks that formulas call ``world``."""
        replicas, shards = grid(self.workload.world_size, self.config)
        return replicas if self.config.strategy == "no_shard" else shards

    def _kind_of_world(self, world: int) -> symbolic.WorldKind:
        if world not in self._kinds:
            kind: symbolic.WorldKind = world == 1, frozenset(), frozenset()
            if self.config.strategy != "no_shard":
                kind = symbolic.kind_of_world(self.units, world)
            self._kinds[world] = kind
        return self._kinds[world]

    @functools.cached_property
    def _formulas(self) -> StepFormulas:
        """The live ranges of the step for all sizes that the capture leaves open."""
        self._require_known_sizes()
        if self.program.meshes:
            names = ", ".join(grid.name for grid in self.program.meshes)
            raise ConfigError(
                f"there are no formulas of a model whose parameters are on several meshes (besides "
                f"its own: {names}): they are of one number of ranks. Plan each size, "
                f"with plan.at(...)."
            )
        if self.config.backend == "inductor":
            raise ConfigError(
                "formulas with backend='inductor': what compiled regions allocate is read from the "
                "code that is generated for the sizes of one call. Plan with backend='eager'."
            )
        if self.config.pipeline_stage:
            raise ConfigError(
                "formulas with pipeline_stage=True: plan once for each size, number of ranks and "
                "of micro-batches in flight."
            )
        extended = [p for p in self.program.params.values() if p.extension is not None]
        if extended:
            raise ConfigError(
                f"formulas with parameter {extended[0].fqn!r}, of a tensor subclass: what it sends "
                f"is known for the {self._world} ranks that it was traced for. Plan once for each "
                f"number of ranks, and for each size."
            )
        placed = [p for p in self.program.params.values() if p.placed is not None]
        if placed:
            raise ConfigError(
                f"formulas with parameter {placed[0].fqn!r}, a DTensor of tensor parallelism: its "
                f"DTensors are traced with the sizes of one call. Plan once for each size, and for "
                f"each number of ranks."
            )
        if is_size(self.config.checkpoint):
            raise ConfigError(
                f"formulas with checkpoint={self.config.checkpoint!r}: what is kept within a "
                f"number of bytes differs from size to size. Plan with checkpoint='full', "
                f"'selective', None or a policy."
            )
        step, loss, work = self.optimizer_step, self._loss, self.workload
        if step is not None:
            record = functools.partial(self._recorded, optimizer=self.config.optimizer)
            step = with_formulas(self.program, step, record)
        if loss is not None and work.loss is not None:
            kept = work.keep_outputs
            loss = loss_with_formulas(self.program, work.loss, loss, keep_outputs=kept)
        held = held_ranges(work.module, work.call, self.program, loss, formulas=True)
        found = liveness.analyse(
            self.programs, held, step, loss, self.program.device.type, formulas=True
        )
        return StepFormulas((found.first, found.steady), self._range(loss))

    def _range(self, loss: LossStep | None) -> Range:
        """The sizes for which the formulas hold."""
        named = self._named_sizes()
        held: dict[Any, str] = {}
        for program in self.programs:
            domain = program.domain
            known = {} if domain is None else domain.symbols
            for name in named.keys() - known.keys():
                why = program.closed or "sizes of 1 are broadcast, so that they stay as they are"
                held[sympy.Eq(symbolic.symbol(name), named[name])] = why
            if domain is not None:
                held |= dict(symbolic.conditions(domain))
        held |= dict(loss.conditions if loss is not None else ())
        leaves, _ = trees.tree_flatten(self.workload.call)
        for name, places in self._places().items():
            parts = [leaves[leaf] for leaf, _ in places if not is_own(leaves[leaf])]
            if parts:
                held[sympy.Eq(symbolic.symbol(name), named[name])] = (
                    "an input is a part of a larger tensor, which stays alive: pass a clone of it"
                )
        for name, (least, most) in self.config.bounds.items():
            if name in named:
                size = symbolic.symbol(name)
                held[sympy.And(size >= least, size <= most)] = "the bounds of its Dim"
        held = {condition: why for condition, why in held.items() if condition != sympy.true}
        fixed = {str(side) for c in held if isinstance(c, sympy.Eq) for side in c.args}
        return Range(
            {**named, "world": self._world},
            tuple(name for name in named if name not in fixed),
            tuple(held.items()),
            self._kind_of_world(self._world),
            self._kind_of_world,
        )

    def _recorded(self, program: Program, optimizer: Any) -> OptimizerStep | None:
        for_cuda = self.device == "cuda"
        without = unreached(self.program, self._loss)
        if self.config.optimizer_in_backward:
            return trace_in_backward(program, optimizer, for_cuda=for_cuda, without=without)
        return trace_step(program, optimizer, for_cuda=for_cuda, without=without)

    def _require_schedule(self) -> None:
        for program in self.programs:
            require_schedule(program)

    def _require_known_sizes(self) -> None:
        sizes = self.program.domain
        if sizes is None or not sizes.unknown:
            return
        for node in self.program.graph.nodes:
            if domain.depends_on(node, sizes.unknown):
                tag = tags.get(node)
                finds = next(each for each in sizes.found if each.size is None).module
                raise UnknownSizeError(
                    f"the size of {node.name}, by {dump.operation(node)} of "
                    f"{tag.module or 'the root module'} ({tag.line}), depends on the data, so that "
                    f"bytes and times are not known before it runs. Say how large it is at most, "
                    f"data_sizes={{{finds!r}: 64}}, or give it a fixed size (such as torch.where, "
                    f"or nonzero_static) to have them."
                )

    @collector.paused()
    def _lifecycle(self) -> list[LifecyclePhase]:
        if self.program.parallel:
            return []  # what torch gathers of DTensors on two dimensions is not known here
        work, config = self.workload, self.config
        step = self.step_after_backward()
        held = held_ranges(work.module, work.call, self.program)
        return lifecycle(self.program, config, work.module, held, step)

    def replan(self, **changes: Unpack[Changes]) -> Plan:
        """The plan of the same step with something changed.

        The model is traced again only if the trace itself would differ (other inputs, dtypes,
        ignored parameters or device). It is not traced again for other ranks, units, strategy,
        resharding, prefetch, checkpointing, offload, reduction, micro-batches or optimizer, nor for
        other sizes that ``dynamic`` leaves open, as far as the trace holds for them.

        Args:
            **changes: options, and ``world_size``, ``args``, ``kwargs``, ``micro_batches``,
                ``no_sync``, ``loss``, ``keep_outputs``, as for `fxshard.plan`.

        Returns:
            A new plan; this one is not changed.

        Raises:
            ConfigError, UnitError, CaptureError, VerifyError, DoesNotFitError: as `fxshard.plan`.
        """
        same_call = "args" not in changes and "kwargs" not in changes
        captures = self._captures if same_call else open_captures(self._captures)
        if changes.get("memory_budget") is None:
            workload = self.workload.changed(changes)
            return make_plan(workload, captures=captures, steps=self._steps)
        asked = self.workload if self.chosen is None else self.chosen.asked
        plan = make_plan(asked.changed(changes), captures=captures, steps=self._steps)
        return _planner().fitting(plan)

    def largest_batch(self, budget: int | str, *, multiple_of: int = 1) -> Limit[Plan]:
        """The largest batch per rank with which the first and every later step fit.

        Exact: the answer was planned and fits, the next batch was planned and does not.

        Args:
            budget: bytes, or text such as "80GiB".
            multiple_of: only such batches.

        Returns:
            The batch, and the plan that proves that it fits.

        Raises:
            DoesNotFitError, ConfigError, CaptureError: see `fxshard.planner.limits.largest`.
        """
        with progress.task("looking for the largest batch"):
            return _planner().largest(self, budget, "batch", 0, multiple_of)

    def longest_sequence(
        self, budget: int | str, dim: int = 1, *, multiple_of: int = 1
    ) -> Limit[Plan]:
        """The longest sequence, of the same batch, with which the first and every later step fit.

        As `largest_batch`.

        Args:
            budget: bytes, or text such as "80GiB".
            dim: the dimension of the inputs that is the sequence.
            multiple_of: only such lengths.

        Returns:
            The length, and the plan that proves that it fits.

        Raises:
            DoesNotFitError, ConfigError, CaptureError: see `fxshard.planner.limits.largest`.
        """
        with progress.task("looking for the longest sequence"):
            return _planner().largest(self, budget, "sequence", dim, multiple_of)

    def solve(
        self, what: str, budget: int | str, *, multiple_of: int = 1, **fixed: int
    ) -> Solution[Plan]:
        """The largest size, or the smallest number of ranks, with which the step fits.

        Exact: the formulas give a size, and plans of calls that are traced on their own prove it:
        the answer fits, the next size does not. Where a larger size needs less (another program,
        such as other kernels from some batch on; other padded rows with other numbers of ranks),
        there are several such edges, and the answer is one of them.

        Args:
            what: ``"max_<name>"`` of a size of ``dynamic=`` ("max_batch", "max_seq"), or
                "min_world".
            budget: bytes, or text such as "80GiB", as for `MemoryReport.assert_fits`.
            multiple_of: try only multiples of this: 8 for full nodes.
            **fixed: the other sizes; by default those of the plan.

        Returns:
            The size or number of ranks, and the plans that prove it.

        Raises:
            DoesNotFitError: nothing fits; the text shows what is alive at the peak of the smallest.
            ConfigError: no such size, an illegal size or `budget`, or the plan has no formulas.
            CaptureError: the model refuses a size of `multiple_of`.
        """
        with progress.task(f"looking for {what}"):
            return _planner().solve(self, what, budget, multiple_of, fixed)

    @property
    def code(self) -> str:
        """The Python source that the executor runs."""
        self._require_schedule()
        return emit(self.program)

    @property
    def certificate(self) -> str:
        """SHA-256 of the collective sequence; equal on all ranks."""
        return certificate.certificate(self.program)

    @collector.paused()
    def estimate(
        self, hardware: str | Hardware | None = None, *, ranks_per_node: int | None = None
    ) -> Estimate:
        """The time of a step: a timeline of every stream, estimated without running anything.

        Args:
            hardware: "a100", "h100", "h200", "b200", or figures of your own; None: the option
                `hardware`. With another one, times are of what was chosen for the option's.
            ranks_per_node: other than the hardware's.

        Returns:
            Seconds of the step and of each of its rows.

        Raises:
            ConfigError: there is no such preset.
            UnknownSizeError: a size depends on the data.
        """
        self._require_schedule()
        self._require_known_sizes()
        asked = self.config.hardware if hardware is None else hardware
        chosen = hardware_of(asked, ranks_per_node)
        step = self.optimizer_step
        return timeline.estimate(self.programs, chosen, step.between_steps() if step else None)

    @collector.paused()
    def dump(
        self, phase: str | None = None, fold: bool = True, hardware: str | Hardware | None = None
    ) -> str:
        """The outer schedule as text, with what is alive after each row; in MiB.

        An optimizer whose updates need full matrices (Muon) is a phase of its own: which rank owns
        which of them, and in which round they are sent.

        Args:
            phase: "forward", "backward" or "optimizer"; None for all.
            fold: True: identical layers are one block, "x N", and waits and frees are beside their
                launches and buffers; False: every row on its own.
            hardware: adds for how many milliseconds the compute stream is idle, as in `estimate`.

        Returns:
            A table; bytes are in MiB.

        Raises:
            ConfigError: there is no such phase or hardware.
        """
        step = self.optimizer_step
        owners = [] if step is None else step.sent.schedules
        phases = ("forward", "backward", *(["optimizer"] if owners else []))
        if phase not in (None, *phases):
            known = ", ".join(map(repr, phases))
            raise ConfigError(f"phase={phase!r}: expected {known}, or None for all.")
        check_flag("fold", fold)
        if phase == "optimizer":
            return "\n\n".join(owners)
        exposed = None
        if hardware is not None:
            exposed = self.estimate(hardware).exposed(len(self.programs) - 1)
        live = live_after(self.memory)
        text = dump.schedule(self.program, folded=fold, phase=phase, live=live, exposed=exposed)
        return "\n\n".join([text, *(owners if phase is None else [])])


class _Asked:
    """The plan as its memory report sees it: all that needs the program."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._kinds = {plan._kind_of_world(plan._world): plan}

    @property
    def programs(self) -> tuple[Program, ...]:
        return self._plan.programs

    def what_ifs(self) -> list[WhatIf]:
        return _planner().what_ifs(self._plan)

    def lifecycle(self) -> list[LifecyclePhase]:
        return self._plan._lifecycle()

    def formulas(self) -> StepFormulas:
        return self._plan._formulas

    def of_world(self, world: int) -> MemoryReport:
        kind = self._plan._kind_of_world(world)
        if kind not in self._kinds:
            self._kinds[kind] = self._plan.at(world=world)
        return self._kinds[kind].memory

    def planned(self, sizes: Mapping[str, int]) -> MemoryReport:
        return self._plan.at(traced=False, **sizes).memory
