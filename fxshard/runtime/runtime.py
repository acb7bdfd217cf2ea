"""What runs a compiled model: its shards, and its programs, one per kind of call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard import pipeline
from fxshard._torch import autograd, context_parallel, modes, transforms, trees
from fxshard.capture import refusals
from fxshard.capture.facts import VARIABLES, Facts
from fxshard.capture.swapped import Inside, as_users_own
from fxshard.codegen.emit import Executor
from fxshard.codegen.given_optimizer import make_optimizer
from fxshard.codegen.optimizer import OnShards, on_shards, stepped
from fxshard.config.checked import Config
from fxshard.config.environment import notice
from fxshard.errors import FxshardError, StepError
from fxshard.host.progress import task
from fxshard.ir import transfers
from fxshard.ir.domain import Symbols
from fxshard.ir.needs import Needs
from fxshard.ir.program import Program, Signature
from fxshard.ir.whole import Whole
from fxshard.plans.plan import Plan
from fxshard.plans.workload import Workload, without_data
from fxshard.runtime import differing, state, transformed
from fxshard.runtime.other_outputs import in_a_thread, next_starts, trained
from fxshard.runtime.sharding import Sharding, other_meshes
from fxshard.runtime.step import AutogradCall, Phases, Step, differentiated
from fxshard.runtime.unit_calls import UnitCall
from fxshard.runtime.variants import (
    KEPT,
    RANKS,
    SETTINGS,
    STARTS,
    SUMS,
    Kind,
    TracedProgram,
    Variant,
    functions_traced,
    reason_for,
    symbols_for,
)
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld
from fxshard.verify.certificate import agreement, digest

log: logging.Logger = logging.getLogger("fxshard")

MakeExecutor = Callable[[Program, Any], Executor]
Given = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of a call


class Runtime(Phases):
    """What fxshard keeps of a sharded model, in one attribute of it.

    Attributes:
        variants: the programs made so far; clear it when what they were made for has changed.
        captured: plans of the graphs that Dynamo has captured, in order (`fxshard.dynamo.graphs`).
        attributes, hooks: those of modules that programs depend on.
        inside: what of the root module is part of the programs (see `fxshard.capture.swapped`).
        progress: whether captures are shown (see `fxshard.host.progress.task`).
        unit_calls: of `fully_shard`, by FQN of the module; empty if it did not make this.
    """

    def __init__(self, sharding: Sharding, make_executor: MakeExecutor = Executor) -> None:
        super().__init__(sharding)
        self.inside: Inside = Inside(None, {})
        self.make_executor = make_executor
        self.variants: dict[Kind, Variant] = {}
        self.captured: list[Plan] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self.facts: Facts = Facts()
        self.progress: bool | None = None
        self.unit_calls: Mapping[str, UnitCall] = {}
        self.structures: int = 0  # how often the structure of the model has changed
        self._warned: set[int] = set()
        self._starts: dict[Kind, list[tuple[int, ...]]] = {}  # see `starting`
        self._agreed: dict[str, list[str]] = {}  # what all ranks have agreed on, by its digest
        if self.config.ranks_may_differ:
            differing.require_plain(self.units)
        if self.config.optimizer_in_backward:
            self.optimizer()  # refuses what cannot step shards before anything is traced

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the option ``optimizer``, made at the first call."""
        if self._optimizer is None:
            named = dict(self.model.named_parameters())
            made = make_optimizer(self.config.optimizer, list(named.values()), list(named))
            in_backward = self.config.optimizer_in_backward
            self._optimizer = on_shards(made, in_backward=True) if in_backward else stepped(made)
        return self._optimizer

    def step_parameters(
        self, fqns: list[str], grads: list[list[Tensor]], scales: Sequence[Tensor] = ()
    ) -> OnShards:
        """Step parameters with their sharded gradients (operator ``fxshard::step``).

        Args:
            fqns: of the parameters.
            grads: per rank of this process and parameter, the reduced gradient of a padded shard.
            scales: see `step_with`.
        """
        optimizer = self.optimizer()
        assert isinstance(optimizer, OnShards)
        return self.step_with(optimizer, fqns, grads, scales)

    def step_with(
        self,
        optimizer: OnShards,
        fqns: list[str],
        grads: list[list[Tensor]],
        scales: Sequence[Tensor] = (),
    ) -> OnShards:
        """The same by `optimizer`.

        Args:
            optimizer: over the parameters of the model.
            fqns, grads: see `step_parameters`.
            scales: per rank of this process, what gradients are multiplied by first, in place.
        """
        for shards, scale in zip(grads, scales, strict=False):
            for grad in shards:
                grad.mul_(scale)
        unused = self.reach.unused()
        slots, mine = [], []
        for fqn, *shards in zip(fqns, *grads, strict=True):
            if fqn in unused:
                continue
            self.just_stepped.append(fqn)
            slots.append(slot := self.slots[fqn])
            mine.append(slot.without_padding(shards[: len(slot.shards)]))
        optimizer.step_parameters([slot.tensor for slot in slots], mine)
        return optimizer

    def grad_norms(
        self, fqns: list[str], grads: list[list[Tensor]], squared: bool, dtype: torch.dtype
    ) -> list[list[Tensor]]:
        """Per rank of this process, the norms of its gradients (operator ``fxshard::grad_norms``).

        Args:
            fqns: of the parameters.
            grads: see `step_parameters`.
            squared: to be summed up over ranks.
            dtype: of the norms.
        """
        if isinstance(self.world, InProcessWorld):
            return [[state.norms_of(shards, squared, dtype)] for shards in grads]
        slots = [self.slots[fqn] for fqn in fqns]
        mine = [s.without_padding([grad]) for s, grad in zip(slots, grads[0], strict=True)]
        alone = not squared and state.is_sharded(slots[0].tensor)
        return [[state.norms_of(mine, squared, dtype, alone=alone)]]

    @torch.compiler.disable(
        reason="fxshard runs a program of its own; torch.export takes the plain model"
    )
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward; the result is what the user's model returns.

        Inside of `summon_full_params` the model runs as the user wrote it, without a program.
        Inside ``torch.compile`` this is a graph break. A transform of torch.func (jvp, grad, vmap)
        around a call whose arguments were made outside of it sees a constant.
        """
        refusals.check_runs(self.model)
        by_transforms = transformed.concerns(self, args, kwargs)
        if transforms.transforming() and not by_transforms:
            with transforms.outside():
                return self.call(args, kwargs)
        self.begin_call()
        if self.summoned and not torch.is_grad_enabled():
            self.follow_mode()
            with as_users_own(self.model):
                return self.model(*args, **kwargs)
        if by_transforms:
            return transformed.run(self, args, kwargs)
        refusals.check_modes(self.model)
        variant = self.variant(args, kwargs)
        signature = variant.program.signature
        flat, _ = trees.tree_flatten((args, kwargs))
        batch = [flat[i] for i in signature.tensor_inputs]
        if signature.training:
            names, starting = differentiated(variant.program), None
            if not signature.starts_everywhere:
                names = list(dict.fromkeys([*names, *trained(variant.program)]))
                starting = self.starting
            if self.stage is not None:
                self.stage.gather(self)
                call = AutogradCall(self, variant, [""], starting)
                outputs = list(Step.apply(call, self.stage.anchor, *batch))
                return self._returned(signature, outputs)
            call = AutogradCall(self, variant, names, starting)
            if "backward" in variant.executor.communicates:
                self.world.await_backward(call)
            outputs = list(Step.apply(call, *map(self.param, names), *batch))
        else:
            with torch.no_grad(), self.as_traced(variant):
                outputs, _ = variant.executor.forward(self.arguments(variant, batch))
        return self._returned(signature, outputs)

    def begin_call(self) -> None:
        """Before a program runs, which gathers its own."""
        self.reshard()  # of an `unshard` that nobody ended
        self._lying.clear()

    def follow(self) -> None:
        """Take over changes of the model since the last call; programs of another are dropped."""
        with autograd.plain_torch_functions():
            if self.follow_changes():
                self.variants.clear()
                self.structures += 1
                self.facts = Facts()
            self.follow_mode()

    @staticmethod
    def _returned(signature: Signature, outputs: list[Any]) -> Any:
        """What the user's model returns, of a program's outputs."""
        rest = iter(outputs)
        leaves = [next(rest) if constant is None else constant[0] for constant in signature.outputs]
        for i, placed in signature.placed:
            leaves[i] = placed.around(leaves[i])
        return trees.tree_unflatten(leaves, signature.out_spec)

    def variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """The program for this kind of call; captured and rewritten if it is new.

        Before its first collective, ranks compare a new program, unless they agreed on an equal one
        before: a single rank may get a new batch size. They also compare refusals of a call, as the
        other ranks would wait.
        """
        self.require_sharded("forward")
        self.world.require_joined()
        try:
            self.follow()
            kind = self.kind(args, kwargs)
            found = self._serving(kind)
            traced = found.traced if found else self._traced(args, kwargs, kind)
            if traced.program.signature.training:
                self.require_stepped_here(traced.program)
                around = autograd.saved_tensors_hooks_around()
                refusals.refuse_saved_tensors_hooks(around, "around a call of the model")
            if self.config.ranks_may_differ:
                differing.require_noted(traced.program)
        except FxshardError as error:
            self.refuse_alike(error)
            raise
        if self.config.ranks_may_differ:
            found = self._joined(args, kwargs, found or self.add(args, kwargs, traced))
        elif found is None:
            self.agree(traced.program)
            found = self.add(args, kwargs, traced)
        self.runs(found)
        return found

    def _joined(self, args: tuple[Any, ...], kwargs: dict[str, Any], mine: Variant) -> Variant:
        """`mine`, or its program completed with what other ranks need in this call.

        Raises:
            RankMismatchError: on all ranks, if ranks differ in more than they may.
        """
        said = self.world.exchange(mine.stated, differing.WHAT)
        places = {param.fqn: param.position for unit in self.units for param in unit.params}
        common = differing.common(said, places)
        if common is None:
            self.note_agreed(mine.program)
            return mine
        kind = self.kind(args, kwargs).having(RANKS, common.digest)
        found = self._serving(kind)
        if found is None:
            program = self._completed(args, kwargs, kind, mine.traced, common)
            self.agree(program)
            found = self.add(args, kwargs, TracedProgram(program), ranks=common.digest)
        return found

    def _completed(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kind: Kind,
        traced: TracedProgram,
        common: Needs,
    ) -> Program:
        """What was traced, completed. Of the programs that were, the oldest is dropped where there
        are as many as ``max_variants``: it can be rebuilt, without a trace.
        """
        others = [each for each in self.variants if each[RANKS] is not None]
        if len(others) >= self.config.max_variants:
            del self.variants[others[0]]
        start = time.perf_counter()
        program = self.rewritten(
            args, kwargs, traced.symbols, kind[STARTS], traced.captures, common
        )
        took = f"{time.perf_counter() - start:.1f} s, {len(program.graph.nodes)} nodes"
        notice(f"program {len(self.variants) + 1} ({RANKS} is new): {took}")
        return program

    def starting(self, call: AutogradCall, given: Given, arrived: tuple[int, ...]) -> Variant:
        """The program of a call that has run, for a backward from other outputs.

        Calls of this kind start backward there from now on (`other_outputs.next_starts`).

        Args:
            call: that has run.
            given: its ``(args, kwargs)``.
            arrived: flat indices of the outputs that gradients have arrived at.

        Raises:
            StepError: the model was changed since.
            RankMismatchError: not all ranks need such a program.
        """
        with self._as_for(call.variant) as as_called:
            try:
                kind = self._starting(call, given, arrived)
                found = self._serving(kind)
                if self.config.ranks_may_differ:
                    raise differing.elsewhere(call.variant.program, arrived)
                trace = functools.partial(self._traced, *given, kind)
                traced = found.traced if found else in_a_thread(trace, as_called)
            except FxshardError as error:
                self.refuse_alike(error)
                raise
            lines = agreement(traced.program)
            self.world.agree(lines, "which outputs a loss is made of", [*self._agreed.values()])
            # After the trace, which may have noted more of what kinds depend on.
            self._starts.setdefault(self.kind(*given).bare(), []).append(kind[STARTS])
            return found or self.add(*given, traced)

    def start_at(self, given: Given, tangents: tuple[int, ...] | None) -> None:
        """Let calls of this kind start backward from these outputs, as their loss is known."""
        if tangents is not None:
            self._starts[self.kind(*given).bare()] = [tangents]

    def _starting(self, call: AutogradCall, given: Given, arrived: tuple[int, ...]) -> Kind:
        """The kind of call that the program of `starting` serves."""
        before, now = call.variant.kind, self.kind(*given)
        if now.bare() != before.bare():
            raise StepError(
                f"a gradient arrived at an output that the program starts no backward at. Forward "
                f"would run again for it, but the model was changed since then: "
                f"{now.differs_in(before)}. Call backward first."
            )
        known = self._starts.get(now.bare(), [])
        starts = call.variant.program.signature.tangents
        return now.having(STARTS, next_starts(known, arrived, starts))

    @contextlib.contextmanager
    def _as_for(self, variant: Variant) -> Iterator[Callable[[], Any]]:
        """Grad mode, autocast and `sync` are as they were for the forward of `variant`.

        Yields a function that makes a context with the former two, for another thread.
        """
        dtype, before = variant.kind["autocast"], self.sync
        self.sync = variant.program.sync

        @contextlib.contextmanager
        def as_called() -> Iterator[None]:
            cast = torch.autocast(self.device, dtype or None, enabled=bool(dtype))
            with torch.enable_grad(), cast:
                yield

        try:
            with as_called():
                yield as_called
        finally:
            self.sync: bool = before

    def _serving(self, kind: Kind) -> Variant | None:
        served = self.variants.get(kind)
        return served or next((v for v in self.variants.values() if v.serves(kind)), None)

    def runs(self, variant: Variant) -> None:
        """Let the other ranks see what this call runs; see what they ran in the one before.

        Raises:
            RankMismatchError: another rank ran another program, though all know both.
        """
        if variant.communicates:
            self.world.run_call(variant.digest, self._agreed)

    def refuse_alike(self, error: FxshardError) -> None:
        """Check that all ranks refuse this call: the others would wait for this one.

        Raises:
            RankMismatchError: on all ranks, if some do not.
        """
        if self.config.ranks_may_differ:
            differing.common(self.world.exchange(differing.refusing(error), differing.WHAT), {})
            return
        reason = str(error).partition("\n")[0]
        reason = re.sub(r"\d+", "N", reason)  # sizes may differ from rank to rank
        lines = [f"refused: {type(error).__name__}: {reason}"]
        what = "the model or the batch structure"
        self.world.agree(lines, what, list(self._agreed.values()))

    def agree(self, program: Program) -> None:
        """Let all ranks agree on `program`, unless they agreed on an equal one before.

        Raises:
            RankMismatchError: all ranks raise.
        """
        lines = agreement(program)
        if digest(lines) not in self._agreed:
            what = "the model or the batch structure"
            self.world.agree(lines, what, list(self._agreed.values()))
        self._agreed[digest(lines)] = lines

    def note_agreed(self, program: Program) -> None:
        """All ranks have agreed on `program`."""
        lines = agreement(program)
        self._agreed[digest(lines)] = lines

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Kind) -> TracedProgram:
        """Trace a program for a kind of call that no other serves; log why and the time taken."""
        reason = reason_for(kind, self.variants.values())
        if VARIABLES in reason and self.facts.variables.changed:
            reason = f"{reason} ({self.facts.variables.changed})"
        if self._ways() >= self.config.max_variants:
            self._forget_settings(kind)
        if self._ways() >= self.config.max_variants:
            raise StepError(
                f"this call needs one more program: {reason}. There are {self._ways()} "
                f"already, as many as max_variants={self.config.max_variants} allows:\n"
                f"{_listed(self.variants)}\n"
                f"Pad inputs to a few sizes, name the sizes that vary (dynamic=...), pass numbers "
                f"that vary as tensors, or raise max_variants."
            )
        symbols: Symbols = {}
        if self.config.dynamic is not False and self.config.opens_sizes:
            call = args, kwargs
            others = list(self.variants)
            symbols = symbols_for(kind, others, self.config.dynamic, self.model, call)
        start = time.perf_counter()
        shown = task(f"capturing {type(self.model).__name__}", shown=self.progress)
        with shown, self.facts.traced(), functions_traced(args, kwargs):
            captures: dict[Any, Program] = {}
            program = self.rewritten(args, kwargs, symbols, kind[STARTS], captures)
        took = f"{time.perf_counter() - start:.1f} s, {len(program.graph.nodes)} nodes"
        domain = f"; {program.domain.text}" if program.domain is not None else ""
        notice(f"program {len(self.variants) + 1} ({reason}): {took}{domain}")
        return TracedProgram(program, symbols, captures if self.config.ranks_may_differ else {})

    def _ways(self) -> int:
        """How many programs there are, without those that were completed for other ranks."""
        return sum(each[RANKS] is None for each in self.variants)

    def _forget_settings(self, kind: Kind) -> None:
        """Drop the programs of the settings that were traced first, but for those of now."""
        others = {known[SETTINGS]: None for known in self.variants}
        others.pop(kind[SETTINGS], None)
        if others:
            oldest = next(iter(others))
            for known in list(self.variants):
                if known[SETTINGS] == oldest:
                    del self.variants[known]

    def add(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        traced: TracedProgram,
        ranks: str | None = None,
    ) -> Variant:
        """Let a program serve this kind of call; all ranks agree on it, unless they may differ.

        Args:
            ranks: the digest of what they need, if it was completed for other ranks.
        """
        self._warn_of_hooks()
        kind = self.kind(args, kwargs).having(RANKS, ranks)
        found = self.made(kind, traced.program, self.model, (args, kwargs), self.config)
        found.traced = traced
        self.variants[kind] = found
        if not self.config.ranks_may_differ:
            self.note_agreed(traced.program)
        return found

    def executor_of(self, program: Program) -> Executor:
        made = self.make_executor(program, self.world)
        made.bind_step(self.step_parameters)
        made.bind_norms(self.grad_norms)
        made.bind_kept(self.keep, self.take)
        return made

    def made(
        self, kind: Kind, program: Program, model: nn.Module, call: Any, config: Config
    ) -> Variant:
        """A variant of `program`, for a call ``(args, kwargs)`` of `model` with these options."""
        return Variant(
            kind,
            self.plan_of(kind, program, model, call, config),
            self.executor_of(program),
            TracedProgram(program),
        )

    def plan_of(
        self,
        kind: Kind,
        program: Program,
        model: nn.Module,
        call: Any,
        config: Config,
        whole: Whole | None = None,
    ) -> Plan:
        """The plan of `program` on these ranks; `whole`: it is that of a whole step."""
        world = self.world
        ranks = (world.replicas, world.size) if config.hybrid else world.replicas * world.size
        given = without_data(call)
        work = Workload(model, given, ranks, config, tangents=kind[STARTS], whole=whole)
        return Plan([program], work)

    @property
    def plan(self) -> Plan:
        """The plan of the training step traced last (of any call, if none trains).

        Of those with the settings of now, if there are any.

        Raises:
            StepError: nothing is traced yet.
        """
        now = self.settings()
        plans = [v.plan for kind, v in self.variants.items() if kind[SETTINGS] == now]
        plans = plans or [variant.plan for variant in self.variants.values()]
        if not plans:
            raise StepError(
                "nothing is traced yet: call the model once, or give fxshard.compile an example "
                "call with args=(...)."
            )
        return next((p for p in reversed(plans) if p.program.signature.training), plans[-1])

    def rewritten(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        symbols: Symbols,
        starts: tuple[int, ...] | None,
        captures: dict[Any, Program],
        common: Needs | None = None,
        config: Config | None = None,
        whole: Whole | None = None,
    ) -> Program:
        """Capture the call `model(*args, **kwargs)` and run the passes.

        Args:
            starts: the outputs that backward starts from; None: as `trace.capture` chooses.
            captures, common, whole: see `pipeline.make_program`.
            config: the options; None: those of the model.
        """
        self.require_one_hook()
        units = tuple(
            dataclasses.replace(
                unit,
                params=tuple(map(self.as_it_is, unit.params)),
                ignored=tuple(map(self.as_it_is, unit.ignored)),
            )
            for unit in self.units
        )
        return pipeline.make_program(
            self.model,
            args,
            kwargs,
            units=units,
            world=self.world.size,
            replicas=self.world.replicas,
            meshes=other_meshes(self.world),
            config=config or self.config,
            whole=whole,
            sync=self.sync,
            accumulated=self.waiting(),
            partial=self.partly_reduced(),
            kept=self.unsharded_now(),
            comm_hook=self.comm_hook,
            device=torch.device(self.device) if isinstance(self.world, C10dWorld) else None,
            symbols=symbols,
            tangents=starts,
            captures=captures,
            common=common,
        )

    def kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """What the program of this call depends on."""
        grad = torch.is_grad_enabled()
        autocast = torch.is_autocast_enabled(self.device)
        with autograd.plain_torch_functions():
            held = [*self.model.buffers(), *self.ignored_params()]
            kind = Kind.of(args, kwargs, self._mode(grad, autocast), held=held)
        starts = self._starts.get(kind.bare()) if self._starts else None
        return kind.having(STARTS, starts[-1]) if starts else kind

    def _mode(self, grad: bool, autocast: bool) -> dict[str, Any]:
        tree = self.structure.modules
        return {
            "train or eval": tuple(module.training for module in tree),
            "requires_grad of a parameter": (
                *(slot.tensor.requires_grad for slot in self.slots.values()),
                *(self.ignored_param(fqn).requires_grad for fqn in self.ignored),
            ),
            "a buffer": tuple(
                (buffer.shape, buffer.dtype, buffer.device, buffer.requires_grad)
                for module, key in self.structure.buffers.values()
                if (buffer := module._buffers[key]) is not None
            ),
            STARTS: None,
            RANKS: None,
            SUMS: self._sums() if grad else (True, (), ()),
            KEPT: self.unsharded_now(),
            SETTINGS: self.settings(),
            **self.facts.mode(tree),
            "a setting of torch": modes.settings(),
            "grad mode": grad,
            "autocast": autocast and torch.get_autocast_dtype(self.device),
            "context parallelism": context_parallel.state(),
        }

    def _sums(self) -> Any:
        if self.stage is not None:
            return None  # one program serves all micro-batches
        return self.sync, self.waiting(), self.partly_reduced()

    def settings(self) -> tuple[Any, ...]:
        """What setters change: the programs of each are kept."""
        units = (
            (u.reshard, u.stays, u.reduce, u.divide_factor, *u.ahead.values()) for u in self.units
        )
        return (self.config.gradient_divide_factor, *units)

    def fresh(self) -> dict[str, Any]:
        """A copy starts without programs and optimizer."""
        fresh: dict[str, Any] = {"variants": {}, "captured": [], "_agreed": {}, "_optimizer": None}
        fresh["_starts"] = {}
        fresh["facts"] = Facts()
        return super().fresh() | fresh

    def require_stepped_here(
        self, program: Program, what: str = "optimizer_in_backward", without: str = ""
    ) -> None:
        """Raise StepError for a gradient or hook that `what`, which steps, would ignore.

        Args:
            program: that steps.
            what: an option, or a verb.
            without: what to do to step otherwise.
        """
        without = without or f"leave {what} out"
        for fqn in transfers.stepped(program):
            if autograd.has_gradient_hooks(self.slots[fqn].tensor):
                raise StepError(
                    f"parameter {fqn!r} has a hook on its gradient, which {what} "
                    f"steps without it. Remove the hook, or {without}."
                )
            if self.slots[fqn].tensor.grad is not None:
                raise StepError(
                    f"parameter {fqn!r} has a gradient from outside of the model's forward, and "
                    f"{what} steps those of the program alone. Read it under "
                    f"torch.no_grad(), make the reading code part of forward, or {without}; "
                    f".grad = None drops it."
                )

    def _warn_of_hooks(self) -> None:
        """Warn once of each hook on the module tree that runs while tracing only."""
        for number, what in state.traced_hooks(self.model).items():
            if number not in self._warned:
                self._warned.add(number)
                log.warning(
                    "fxshard: %s ran while tracing and does not run again: its tensor operations "
                    "are part of the program, its side effects are lost. Hooks on the model itself "
                    "run on every call.",
                    what,
                )


def _listed(variants: dict[Kind, Variant]) -> str:
    """A line per program: the sizes that it was traced for, and how it differs from the first."""
    first = next(iter(variants))
    return "\n".join(
        f"  {n}: {'the first call' if kind is first else kind.differs_in(first)}"
        for n, kind in enumerate(variants, 1)
    )
