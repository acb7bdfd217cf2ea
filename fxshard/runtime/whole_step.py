"""A whole step as one program: forward, loss, backward, clipping and the optimizer."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard._torch import autograd, modules, trees
from fxshard.capture import attributes, refusals
from fxshard.capture.facts import VARIABLES
from fxshard.capture.variables import Variables
from fxshard.codegen.optimizer import OnShards
from fxshard.codegen.users_optimizer import UsersOptimizer, refuse_pre_hooks
from fxshard.config.checked import Config
from fxshard.config.environment import notice
from fxshard.errors import ConfigError, FxshardError, StepError
from fxshard.host.progress import task
from fxshard.ir.program import Program
from fxshard.ir.units import Unit
from fxshard.ir.whole import ASKED, SEVERAL_MESHES, Whole
from fxshard.memory.report import MemoryReport
from fxshard.plans.plan import Plan
from fxshard.runtime.module import FxshardModule
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.step import AutogradCall, undone_or_refused
from fxshard.runtime.variants import Kind, TracedProgram, Variant, reason_for

LOOP = "train by a loop: loss = loss_fn(model(batch), target); loss.backward(); optimizer.step()"


# A call of a step, its program, and the attributes of modules that it reads.
TracedBefore = tuple[tuple[tuple[Any, ...], dict[str, Any]], Program, attributes.Reads]


class CompiledStep:
    """What `fxshard.compile_step` returns: a call of it is one training step.

    Attributes:
        model: sharded. What it computes outside of steps, such as in evaluation, it computes as
            what `fxshard.compile` returns does.
        optimizer: over its parameters: of the user's class, with torch's ``param_groups``, state
            and ``state_dict``. Its options are read at each step; ``step()`` has nothing to do.
        grad_norm: the norm of all gradients of the last step, before they were clipped: a scalar
            tensor, the same on all ranks. None without ``max_norm``, and before the first step.
    """

    def __init__(
        self,
        model: FxshardModule,
        whole: Whole,
        optimizer: OnShards,
        config: Config,
        traced: TracedBefore | None = None,
    ) -> None:
        """Args:
        model: sharded.
        whole: the loss, and the norm to clip to.
        optimizer: over the parameters of `model`.
        config: the options, with an optimizer in backward, as plans know it.
        traced: a step that was traced before the model was sharded.
        """
        self.model = model
        self.optimizer = optimizer
        self.grad_norm: Tensor | None = None
        self._whole, self._config, self._variables = whole, config, Variables()
        self._variants: dict[Kind, Variant] = {}
        self._structure = self._runtime.structures
        self._last: Variant | None = None
        if traced is not None:
            call, program, reads = traced
            runtime = self._runtime
            runtime.facts.attributes.reads = reads
            self._last = self._add(self._kind(*call), *call, TracedProgram(program))
            runtime.note_agreed(program)

    @property
    def _runtime(self) -> Runtime:
        runtime: Runtime = self.model._fxshard
        return runtime

    @property
    def plan(self) -> Plan:
        """The plan of the step that ran or was traced last.

        Raises:
            StepError: none was.
        """
        if self._last is None:
            raise StepError(
                f"nothing is traced yet: call the step once, or give {ASKED} an example with "
                f"args=(batch, target)."
            )
        return self._last.plan

    @property
    def memory(self) -> MemoryReport:
        """The memory report of `plan`."""
        return self.plan.memory

    @torch.compiler.disable(reason="fxshard runs a program of its own")
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one training step; collective.

        Args:
            *args: of the model, then the target, which goes to the loss; without a loss function,
                all are the model's.
            **kwargs: of the model.

        Returns:
            The loss, a scalar tensor without a graph, of this rank's batch.

        Raises:
            StepError: the model is in a state in which a program cannot step it.
            ConfigError: the optimizer has got hooks before its step.
            CaptureError: the model cannot be traced, or its loss is no scalar tensor.
            RankMismatchError: ranks do different things.
        """
        refusals.check_runs(self.model)
        refusals.check_modes(self.model)
        around = autograd.saved_tensors_hooks_around()
        refusals.refuse_saved_tensors_hooks(around, "around a step")
        self.grad_norm = None
        runtime = self._runtime
        runtime.begin_call()
        variant = self._last = self._variant(args, kwargs)
        program = variant.program
        flat, _ = trees.tree_flatten((args, kwargs))
        rows = runtime.arguments(variant, [flat[i] for i in program.signature.tensor_inputs])
        del flat
        call = AutogradCall(runtime, variant, [])
        runtime.reach.begin(program, program.signature.tangents, runtime.world, [])
        with torch.no_grad(), runtime.as_traced(variant), undone_or_refused(call):
            results = variant.executor.step(rows)
        loss, *norms = results[0]
        self.grad_norm = norms[0] if norms else None
        self.optimizer.step()  # steps nothing: for schedulers, and for hooks after a step
        return loss

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace a step, and run nothing; collective.

        Args:
            args, kwargs: of a call of the step.
        """
        self._last = self._variant(args, kwargs)

    def _variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """The program of this kind of step; captured, and agreed on by all ranks, if it is new."""
        runtime = self._runtime
        runtime.require_sharded("a step")
        runtime.world.require_joined()
        try:
            runtime.follow()
            if self._structure != runtime.structures:
                self._variants.clear()
                self._structure = runtime.structures
            self._require_steppable(args, kwargs)
            kind = self._kind(args, kwargs)
            found = self._variants.get(kind)
            traced = found.traced if found else self._traced(args, kwargs, kind)
            runtime.require_stepped_here(traced.program, ASKED, LOOP)
        except FxshardError as error:
            runtime.refuse_alike(error)
            raise
        if found is None:
            runtime.agree(traced.program)
            found = self._add(kind, args, kwargs, traced)
        runtime.runs(found)
        return found

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """What the program of this step depends on: what a call does, and what the loss reads."""
        kind, loss = self._runtime.kind(args, kwargs), self._whole.loss
        if loss is None:
            return kind
        return kind.having(VARIABLES, (kind[VARIABLES], self._variables.number((), [loss])))

    def _require_steppable(self, args: Any, kwargs: Any) -> None:
        refuse_pre_hooks(self.optimizer)
        runtime, why = self._runtime, ""
        if not torch.is_grad_enabled():
            why = "gradients are off (torch.no_grad or inference_mode). Call the step outside"
        elif not runtime.sync:
            why = f"no_sync accumulates gradients over calls, and each step steps. Or {LOOP}"
        elif runtime.waiting() or runtime.partly_reduced():
            why = "gradients of earlier backwards are accumulated. Call model.zero_grad() first"
        elif runtime.comm_hook or runtime.after_reductions:
            why = f"a hook of the user's reduces gradients. Remove it, or {LOOP}"
        elif any(unit.stays for unit in runtime.units):
            why = (
                "a unit stays unsharded after backward, which steps its shards. Call "
                "set_reshard_after_backward(True)"
            )
        elif hooks := modules.module_hooks(self.model):
            why = (
                f"the model has a {hooks[0][0]} of its own, which runs around calls of the model. "
                f"Register it on a submodule, do what it does in forward, or {LOOP}"
            )
        else:
            leaves, _ = trees.tree_flatten((args, kwargs))
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
                why = "an input requires a gradient, which nothing would hold. Detach it"
        if why:
            raise StepError(f"a step of {ASKED}: {why}.")

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Kind) -> TracedProgram:
        runtime = self._runtime
        reason = reason_for(kind, self._variants.values())
        if len(self._variants) >= runtime.config.max_variants:
            raise StepError(
                f"this step needs one more program: {reason}. There are {len(self._variants)} "
                f"already, as many as max_variants={runtime.config.max_variants} allows. Pad "
                f"inputs to a few sizes, pass numbers that vary as tensors, or raise max_variants."
            )
        start = time.perf_counter()
        shown = task(f"capturing a step of {type(self.model).__name__}", shown=runtime.progress)
        with shown, runtime.facts.traced(), self._variables.traced():
            program = runtime.rewritten(
                args, kwargs, {}, None, {}, config=self._config, whole=self._whole
            )
        took = f"{time.perf_counter() - start:.1f} s, {len(program.graph.nodes)} nodes"
        notice(f"step {len(self._variants) + 1} ({reason}): {took}")
        return TracedProgram(program)

    def _add(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], traced: TracedProgram
    ) -> Variant:
        runtime = self._runtime
        executor = runtime.executor_of(traced.program)
        executor.bind_step(functools.partial(runtime.step_with, self.optimizer))
        given = kind, traced.program, self.model, (args, kwargs), self._config
        plan = runtime.plan_of(*given, whole=self._whole)
        found = self._variants[kind] = Variant(kind, plan, executor, traced)
        return found


def step_config(config: Config, make: Any) -> Config:
    """The options of a whole step's program.

    Args:
        config: those of the model.
        make: the optimizer, for plans.

    Raises:
        ConfigError: an option that one program cannot do; says what to do instead.
    """
    refused = {
        "optimizer": "the optimizer is an argument. Leave the option out",
        "offload": "the host waits for gradients on the CPU before it steps. Train by a loop",
        "pipeline_stage": "the schedule of a pipeline calls forward and backward itself",
        "ranks_may_differ": "ranks would exchange what they need between forward and backward",
        "dynamic": "each size of a step gets a program of its own. Leave it out",
        "memory_budget": "it chooses by the memory of a loop. Give what fxshard.plan has chosen, "
        "such as checkpoint=...",
    }
    for name, why in refused.items():
        value = getattr(config, name)
        if value is not None and value is not False:
            raise ConfigError(f"{ASKED} with {name}=...: {why}.")
    return config.changed({"optimizer": make, "optimizer_in_backward": True})


def require_parameters(units: Sequence[Unit], meshes: int, whole: Whole) -> None:
    """Check that one program can step, and clip, the parameters of a model.

    Args:
        units: of the model.
        meshes: how many meshes its parameters are on.
        whole: what the step has besides.

    Raises:
        ConfigError: an ignored parameter is trained, whose gradient nobody reduces; or gradients
            are to be clipped that have their norms on several meshes.
    """
    placed = any(param.placed is not None for unit in units for param in unit.params)
    if whole.max_norm is not None and (placed or meshes > 1):
        raise ConfigError(SEVERAL_MESHES)
    for param in (param for unit in units for param in unit.ignored):
        if param.requires_grad:
            raise ConfigError(
                f"{ASKED}: parameter {param.fqn!r} is ignored and requires a gradient, which no "
                f"rank reduces; a loop may do so before it steps. Freeze it, or shard it."
            )


def whole_of(loss: Any, max_norm: Any) -> Whole:
    """What a step has besides a call of the model.

    Raises:
        ConfigError: `loss` cannot be called, or has parameters of its own; `max_norm` is no norm.
    """
    if loss is not None and not callable(loss):
        raise ConfigError(
            f"{ASKED}(model, {loss!r}, ...): expected the loss, a function of the model's output "
            f"and the target, such as nn.CrossEntropyLoss(); or None, if the model returns it."
        )
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ConfigError(
            f"{ASKED}: the loss, a {type(loss).__name__}, has parameters that require gradients, "
            f"and they would be in no shard and in no norm. Make it a submodule of the model, "
            f"whose forward returns the loss (loss=None)."
        )
    number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if max_norm is not None and not (number and max_norm > 0):
        raise ConfigError(f"max_norm={max_norm!r}: expected a number > 0, or None.")
    return Whole(loss, None if max_norm is None else float(max_norm))


def one_optimizer(given: Any, option: Any) -> Any:
    """The optimizer, which is given by position or by keyword.

    Raises:
        ConfigError: it is given by both, or by neither.
    """
    if (given is None) == (option is None):
        how = "was given twice" if given is not None else "is missing"
        raise ConfigError(
            f"{ASKED}: the optimizer {how}. Give one: {ASKED}(model, loss_fn, "
            f"torch.optim.AdamW(model.parameters()))."
        )
    return option if given is None else given


def step_of_sharded(
    model: FxshardModule, whole: Whole, optimizer: Any, call: Any, given: dict[str, Any]
) -> CompiledStep:
    """See `fxshard.compile_step`: of a model that is sharded already.

    Args:
        model: as `fxshard.compile` or `fxshard.fully_shard` has left it.
        whole: the loss, and the norm.
        optimizer: over its parameters, or a callable.
        call: ``(args, kwargs)`` of a step, to be traced now; None: none.
        given: arguments and options that say how to shard it.
    """
    more = [name for name, value in given.items() if value is not None]
    if more:
        raise ConfigError(
            f"{ASKED} with {more[0]}=...: the model is sharded already, as its own options say. "
            f"Give them to the first call, or give {ASKED} the plain model."
        )
    runtime: Runtime = model._fxshard
    step_config(runtime.config, optimizer)
    named = dict(model.named_parameters())
    checked = UsersOptimizer.checked(optimizer, named)
    config = step_config(runtime.config, checked.factory())
    require_parameters(runtime.units, len(runtime.world.grids), whole)
    step = CompiledStep(model, whole, checked.over(named), config)
    if call is not None:
        step.trace(*call)
    return step
