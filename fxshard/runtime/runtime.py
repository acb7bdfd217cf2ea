"""What runs a compiled model: its shards, and its programs, one per kind of call."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxshard import pipeline
from fxshard._torch import autograd, modules, trees
from fxshard.capture import attributes
from fxshard.capture.attributes import Attributes
from fxshard.capture.swapped import Inside, as_users_own
from fxshard.codegen.emit import Executor
from fxshard.codegen.optimizer import OnShards, on_shards
from fxshard.config import Config, notice
from fxshard.errors import FxshardError, StepError
from fxshard.host.progress import task
from fxshard.ir import tags, transfers
from fxshard.ir.domain import Symbols
from fxshard.ir.program import Program
from fxshard.ir.units import Unit
from fxshard.memory.optimizer import make_optimizer
from fxshard.plans.plan import Plan
from fxshard.plans.workload import Workload, without_data
from fxshard.runtime import state
from fxshard.runtime.step import Call, Step, differentiated
from fxshard.runtime.store import ParameterStore
from fxshard.runtime.variants import Kind, Variant, reason_for, symbols_for
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld
from fxshard.verify.certificate import agreement, digest

log = logging.getLogger("fxshard")

MakeExecutor = Callable[[Program, Any], Executor]
_Part = tuple[str, str]  # role and FQN
_Noted = tuple[weakref.ref[Tensor], int] | None  # a tensor, and how often it had been written


class Runtime(ParameterStore):
    """Everything of ours that a sharded model has, behind one attribute of it.

    Attributes:
        variants: the programs made so far; clear it when what they were made for has changed.
        captured: plans of what Dynamo has captured of it, in order (see `fxshard.dynamo.graphs`).
        attributes: what modules say that programs depend on.
        torn: why calls are refused: what a phase has begun that an exception ended, and each part
            (role and FQN) as it was then.
        just_stepped: parameters that the last backward has stepped.
        inside: what of the model itself its programs stand for (see `fxshard.capture.swapped`).
        progress: whether captures are shown (see `fxshard.host.progress.task`).
    """

    def __init__(
        self,
        model: nn.Module,
        units: tuple[Unit, ...],
        world: C10dWorld | InProcessWorld,
        config: Config,
        make_executor: MakeExecutor = Executor,
    ) -> None:
        super().__init__(model, units, world, config)
        self.inside = Inside(None, {})
        self.make_executor = make_executor
        self.variants: dict[Kind, Variant] = {}
        self.captured: list[Plan] = []
        self.torn: dict[str, tuple[str, dict[_Part, _Noted]]] = {}
        self.just_stepped: list[str] = []
        self._optimizer: OnShards | None = None
        self.attributes = Attributes()
        self.progress: bool | None = None
        self._warned: set[int] = set()
        self._agreed: dict[str, list[str]] = {}  # what all ranks have alike, by its digest
        if config.optimizer_in_backward:
            self.optimizer()  # refuses what cannot step shards before anything is traced

    def optimizer(self) -> OnShards:
        """The one of the option ``optimizer``, made when it is first asked for."""
        if self._optimizer is None:
            named = dict(self.model.named_parameters())
            made = make_optimizer(self.config.optimizer, list(named.values()), list(named))
            in_backward = self.config.optimizer_in_backward
            self._optimizer = on_shards(made, in_backward=in_backward)
        return self._optimizer

    def step_parameters(self, fqns: list[str], grads: list[list[Tensor]]) -> OnShards:
        """What ``fxshard.runtime.step`` does: step parameters with their sharded gradients.

        Args:
            fqns: of the parameters.
            grads: per rank of this process and parameter, the reduced gradient of a padded shard.
        """
        optimizer, world = self.optimizer(), self.world
        unused = self.reach.unused()
        slots, mine = [], []
        for fqn, *shards in zip(fqns, *grads, strict=True):
            if fqn in unused:
                continue
            self.just_stepped.append(fqn)
            slots.append(slot := self.slots[fqn])
            rows = slot.local.shape[0]
            grad = shards[0]
            if isinstance(world, InProcessWorld):
                grad = torch.cat(shards[: world.size])
            mine.append(grad if grad.shape[0] == rows else grad[:rows])
        optimizer.step_parameters([slot.tensor for slot in slots], mine)
        return optimizer

    @torch.compiler.disable(reason="fxshard runs a program of its own")
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward; the result is what the user's model returns.

        Inside of `summon_full_params` there is no program: it runs as the user wrote it.
        Inside ``torch.compile`` it runs as it is, in a graph break.
        """
        self.reshard()  # of an `unshard` that nobody ended
        if self.summoned and not torch.is_grad_enabled():
            with as_users_own(self.model):
                return self.model(*args, **kwargs)
        variant = self.variant(args, kwargs)
        signature = variant.program.signature
        flat, _ = trees.tree_flatten((args, kwargs))
        batch = [flat[i] for i in signature.tensor_inputs]
        if signature.training:
            params = [self.param(fqn) for fqn in differentiated(variant.program)]
            call = Call(self, variant, len(params))
            if isinstance(self.world, C10dWorld) and "backward" in variant.executor.communicates:
                self.world.await_backward(call)
            outputs = list(Step.apply(call, *params, *batch))
        else:
            with torch.no_grad(), self.as_traced(variant):
                outputs, _ = variant.executor.forward(self.arguments(variant, batch))
        rest = iter(outputs)
        leaves = [next(rest) if constant is None else constant[0] for constant in signature.outputs]
        return trees.tree_unflatten(leaves, signature.out_spec)

    def variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """The program for this kind of call; captured and rewritten if it is new.

        Ranks compare what they made before the first collective of it, if it is not what they
        agreed on before: a rank may meet a new batch size alone. So they do where a call is
        refused: the others would wait.
        """
        self.require_sharded("forward")
        if isinstance(self.world, C10dWorld):
            self.world.require_joined()
        try:
            with autograd.plain_torch_functions():
                if self.settle():
                    self.variants.clear()
                    self.attributes = Attributes()
            kind = self.kind(args, kwargs)
            found = self.variants.get(kind)
            if found is None:
                found = next((v for v in self.variants.values() if v.serves(kind)), None)
            program = found.program if found else self._traced(args, kwargs, kind)
            if program.signature.training:
                self._require_stepped_here(program)
        except FxshardError as error:
            self.refuse_alike(error)
            raise
        if found is None:
            self.agree(program)
            self.add(args, kwargs, program)
            found = self.variants[kind]
        self.runs(found)
        return found

    def runs(self, variant: Variant) -> None:
        """Let the other ranks see what this call runs; see what they ran in the one before.

        Raises:
            RankMismatchError: another rank ran another program, though all know both.
        """
        if isinstance(self.world, C10dWorld) and variant.communicates:
            self.world.run_call(variant.digest, self._agreed)

    def begin_backward(self, call: Call) -> None:
        """The backward of `call` is next."""
        if isinstance(self.world, C10dWorld):
            self.world.begin_backward(call)

    def refuse_alike(self, error: FxshardError) -> None:
        """See that all ranks refuse this call as this one does: others would wait for it.

        Raises:
            RankMismatchError: on all ranks, if some do not.
        """
        if isinstance(self.world, C10dWorld):
            said = str(error).partition("\n")[0]
            said = re.sub(r"\d+", "N", said)  # ranks may refuse for sizes of their own
            lines = [f"refused: {type(error).__name__}: {said}"]
            what = "the model or the batch structure"
            self.world.agree(lines, what, list(self._agreed.values()))

    def agree(self, program: Program) -> None:
        """Let all ranks agree on `program`, if there was none like it.

        Raises:
            RankMismatchError: all ranks raise.
        """
        lines = agreement(program)
        if isinstance(self.world, C10dWorld) and digest(lines) not in self._agreed:
            what = "the model or the batch structure"
            self.world.agree(lines, what, list(self._agreed.values()))
        self._agreed[digest(lines)] = lines

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Kind) -> Program:
        """A program for a kind of call that no other serves; says why, and what it took."""
        reason = reason_for(kind, self.variants.values())
        if len(self.variants) >= self.config.max_variants:
            raise StepError(
                f"this call needs one more program: {reason}. There are {len(self.variants)} "
                f"already, as many as max_variants={self.config.max_variants} allows:\n"
                f"{_listed(self.variants)}\n"
                f"Pad inputs to a few sizes, name the sizes that vary (dynamic=...), pass numbers "
                f"that vary as tensors, or raise max_variants."
            )
        symbols: Symbols = {}
        if self.config.dynamic is not False and self.config.backend != "inductor":
            call = args, kwargs
            others = list(self.variants)
            symbols = symbols_for(kind, others, self.config.dynamic, self.model, call)
        start = time.perf_counter()
        shown = task(f"capturing {type(self.model).__name__}", shown=self.progress)
        with shown, attributes.noted(self.attributes.reads):
            program = self.rewritten(args, kwargs, symbols)
        took = f"{time.perf_counter() - start:.1f} s, {len(program.graph.nodes)} nodes"
        domain = f"; {program.domain.text}" if program.domain is not None else ""
        notice(f"program {len(self.variants) + 1} ({reason}): {took}{domain}")
        return program

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program) -> None:
        """Run this kind of call by `program`, which all ranks agree on."""
        self._warn_of_hooks()
        hybrid, world = self.config.hybrid, self.world
        ranks = (world.replicas, world.size) if hybrid else world.replicas * world.size
        plan = Plan(
            [program], Workload(self.model, without_data((args, kwargs)), ranks, self.config)
        )
        executor = self.make_executor(program, self.world)
        executor.bind_step(self.step_parameters)
        kind = self.kind(args, kwargs)
        self.variants[kind] = Variant(kind, plan, executor)
        lines = agreement(program)
        self._agreed[digest(lines)] = lines

    @property
    def plan(self) -> Plan:
        """The plan of the training step traced last (of any call, if none trains).

        Raises:
            StepError: nothing is traced yet.
        """
        plans = [variant.plan for variant in self.variants.values()]
        if not plans:
            raise StepError(
                "nothing is traced yet: call the model once, or give fxshard.compile an example "
                "call with args=(...)."
            )
        return next((p for p in reversed(plans) if p.program.signature.training), plans[-1])

    def rewritten(self, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols) -> Program:
        """Capture the call `model(*args, **kwargs)` and run the passes."""
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
            config=self.config,
            sync=self.sync,
            accumulated=self.waiting(),
            comm_hook=self.comm_hook,
            device=torch.device(self.device) if isinstance(self.world, C10dWorld) else None,
            symbols=symbols,
        )

    def kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """What of this call its program depends on."""
        grad = torch.is_grad_enabled()
        autocast = torch.is_autocast_enabled(self.device)
        with autograd.plain_torch_functions():
            held = [*self.model.buffers(), *self.whole_parameters()]
            return Kind.of(args, kwargs, self._mode(grad, autocast), held=held)

    def _mode(self, grad: bool, autocast: bool) -> dict[str, Any]:
        return {
            "train or eval": tuple(module.training for module in self.tree),
            "requires_grad of a parameter": (
                *(slot.tensor.requires_grad for slot in self.slots.values()),
                *(self.whole(fqn).requires_grad for fqn in self.wholes),
            ),
            "a buffer": tuple(
                (buffer.shape, buffer.dtype, buffer.device, buffer.requires_grad)
                for module, key in self.buffer_slots.values()
                if (buffer := module._buffers[key]) is not None
            ),
            "gradient accumulation": (self.sync, self.waiting()) if grad else (True, ()),
            "an attribute of a module that forward reads": self.attributes.number(self.tree),
            "a hook of a module": modules.hook_numbers(self.tree[1:]),
            "grad mode": grad,
            "autocast": autocast and torch.get_autocast_dtype(self.device),
        }

    def fresh(self) -> dict[str, Any]:
        """No program, and no optimizer: a copy makes its own."""
        fresh: dict[str, Any] = {"variants": {}, "captured": [], "_agreed": {}, "_optimizer": None}
        fresh["attributes"] = Attributes()
        torn = self.torn.items()  # `note_halves` notes what the copy has
        fresh["torn"] = {what: (why, dict.fromkeys(parts)) for what, (why, parts) in torn}
        return super().fresh() | fresh

    def restored(self) -> None:
        super().restored()
        self.note_halves()

    def note_halves(self) -> None:
        """A copy is complete: it is refused as its original is, until its halves are written."""
        for what, (why, parts) in self.torn.items():
            self.refuse_until_written(what, why, list(parts))

    @contextlib.contextmanager
    def as_traced(self, variant: Variant | None = None) -> Iterator[None]:
        """The context that a program runs in: its casts are in it, autocast must add none.

        An exception refers to the frames that it came through, and they to unsharded parameters,
        activations and gradients: these die here, and not with the exception. Forward writes its
        buffers last, one behind the other: calls are refused if an exception came in between.

        Args:
            variant: what runs, if it is forward.
        """
        names = [n for role, n in variant.written if role == "buffer"] if variant else []
        buffers = [self._buffer(name or "") for name in names]
        before = [autograd.version(buffer) for buffer in buffers]
        with torch.autocast(self.device, enabled=False):
            try:
                yield
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)
                changed = [autograd.version(b) != v for b, v in zip(buffers, before, strict=True)]
                if any(changed) and not all(changed):
                    self.refuse_until_written(
                        "buffers",
                        f"forward ended with an exception ({type(error).__name__}): it had "
                        f"written buffer {names[changed.index(True)]!r} and not "
                        f"{names[changed.index(False)]!r}. Load the last checkpoint.",
                        [("buffer", name or "") for name in names],
                    )
                raise

    def refuse_until_written(self, what: str, why: str, parts: Sequence[_Part]) -> None:
        """Refuse calls from now on, until all of `parts` have been written, as loading does."""
        self.torn[what] = why, {part: self._noted(part) for part in parts}

    def _noted(self, part: _Part) -> _Noted:
        role, fqn = part
        tensor = self._buffer(fqn) if role == "buffer" else self.slots[fqn].tensor
        return weakref.ref(tensor), autograd.version(tensor)

    def _require_whole(self) -> None:
        for what, (why, parts) in list(self.torn.items()):
            if not parts or any(starmap(self._is_unwritten, parts.items())):
                raise StepError(why)
            del self.torn[what]

    def _is_unwritten(self, part: _Part, noted: _Noted) -> bool:
        now = self._noted(part)
        if noted is None or now is None:
            return True
        return noted[0]() is now[0]() and noted[1] == now[1]

    def arguments(self, variant: Variant, batch: Sequence[Tensor]) -> list[list[Tensor]]:
        """Per rank that this process runs, the values of forward's placeholders.

        Raises:
            StepError: a phase failed, and has left gradients, parameters or buffers in parts.
        """
        self._require_whole()
        rows = [
            [
                self.value(node, variant.program, batch, rank)
                for node in variant.executor.forward_inputs
            ]
            for rank in range(self.local_ranks)
        ]
        for i, node in enumerate(variant.executor.forward_inputs):
            if (tags.get(node).role, tags.get(node).fqn) in variant.written:
                for row in rows[1:]:  # each rank writes one of its own; the first one's is kept
                    row[i] = row[i].clone()
        return rows

    @property
    def local_ranks(self) -> int:
        """How many ranks this process runs: one, or the whole in-process world."""
        return self.world.ranks if isinstance(self.world, InProcessWorld) else 1

    def value(self, node: fx.Node, program: Program, batch: Sequence[Tensor], rank: int) -> Tensor:
        tag = tags.get(node)
        name = tag.fqn or ""
        if tag.role == "shard":
            shards = self.slots[name].shards
            return shards[rank % len(shards)]  # replicas inside one process share theirs
        if tag.role == "whole":
            return self.whole(name)
        if tag.role == "accumulated":
            if name not in self.accumulated:  # dropped since forward, by zero_grad
                val = node.meta["val"]
                return torch.zeros(val.shape, dtype=val.dtype, device=self.device)
            return self.accumulated[name][rank]
        if tag.role == "input":
            return batch[program.signature.tensor_inputs.index(int(name))]
        if name in program.constants:
            return program.constants[name]
        return self._buffer(name)

    def _buffer(self, name: str) -> Tensor:
        module, key = self.buffer_slots[name]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def _require_stepped_here(self, program: Program) -> None:
        """Raise StepError for a gradient that no step takes, or a hook that waits for one."""
        for fqn in transfers.stepped(program):
            if autograd.has_gradient_hooks(self.slots[fqn].tensor):
                raise StepError(
                    f"parameter {fqn!r} has a hook on its gradient, which optimizer_in_backward "
                    f"steps without it. Remove the hook, or leave optimizer_in_backward out."
                )
            if self.slots[fqn].tensor.grad is not None:
                raise StepError(
                    f"parameter {fqn!r} has a gradient from outside of the model's forward, and "
                    f"optimizer_in_backward steps those of the program alone. Read it under "
                    f"torch.no_grad(), make the reading code part of forward, or leave "
                    f"optimizer_in_backward out; .grad = None drops it."
                )

    def _warn_of_hooks(self) -> None:
        """Say once of each hook on the module tree that it runs while tracing only."""
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
