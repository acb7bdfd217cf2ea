"""ShardedModule: the user's module tree with sharded parameters, run by compiled programs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxshard import compat, meta, ops, pipeline, state
from fxshard.certificate import agreement, digest
from fxshard.config import Config, notice
from fxshard.errors import FxshardError, StepError
from fxshard.executor import Executor
from fxshard.fsdp import FsdpMethods
from fxshard.memory.optimizer import make_optimizer
from fxshard.memory.report import MemoryReport
from fxshard.optimizer import OnShards, on_shards
from fxshard.plans import Plan, Workload, without_data
from fxshard.program import Program
from fxshard.shapes import Symbols
from fxshard.sharding import shard_parameters
from fxshard.step import Call, Step, differentiated
from fxshard.units import Param, Unit, buffer_dtypes
from fxshard.unused import Reach
from fxshard.variants import Kind, Variant, reason_for, symbols_for
from fxshard.world.c10d import C10dWorld
from fxshard.world.in_process import InProcessWorld

log = logging.getLogger("fxshard")

# The same dicts in the user's model and in the ShardedModule around it, not copies: what the user
# adds to or loads into either is seen in the other.
_SHARED = (
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
MakeExecutor = Callable[[Program, Any], Executor]


class ShardedModule(FsdpMethods):
    """The module that `fxshard.compile` returns.

    It shares the module tree of the user's model: same FQNs, same submodules, same buffers. Under
    a process group each parameter is a DTensor with placement ``Shard(0)``; without one, each is
    whole and all ranks run inside this process.
    """

    def __init__(
        self,
        model: nn.Module,
        units: tuple[Unit, ...],
        world: C10dWorld | InProcessWorld,
        config: Config,
        make_executor: MakeExecutor = Executor,
    ) -> None:
        super().__init__()
        for name in _SHARED:
            object.__setattr__(self, name, getattr(model, name))
        object.__setattr__(self, "original", model)
        self.training = model.training
        self.units, self.world, self.config = units, world, config
        self._make_executor = make_executor
        self.slots = shard_parameters(model, units, world, config)
        owners = [module for slot in self.slots.values() for module, _ in slot.owners]
        state.take_whole_values(dict.fromkeys(owners))
        self.variants: dict[Kind, Variant] = {}
        self.wholes = {p.fqn: p for unit in units for p in unit.ignored}
        self.accumulated: dict[str, list[Tensor]] = {}  # per rank that this process runs
        self.reach = Reach()
        self._sync = True
        self._comm_hook = False
        self._optimizer: OnShards | None = None
        self._cast_buffers()
        self._warned: set[int] = set()
        self._summoned = False
        self._unshards: contextlib.ExitStack | None = None
        self._agreed: dict[str, list[str]] = {}  # what all ranks have alike, by its digest
        self._device = self.compute_device()
        self._tree = list(model.modules())
        self._buffer_slots = {
            name: (module, key)
            for path, module in model.named_modules()
            for key in module._buffers
            for name in [f"{path}.{key}" if path else key]
        }
        if config.optimizer_in_backward:
            self._made_optimizer()  # refuses what cannot step shards before anything is traced

    @property
    def optimizer(self) -> Any:
        """The optimizer of the option ``optimizer``, over the parameters of this module.

        Of its class, with torch's ``param_groups``, ``state_dict`` and ``load_state_dict``, for
        learning rate schedulers and torch.distributed.checkpoint; its step runs on local shards
        without DTensor (`fxshard.optimizer`). With ``optimizer_in_backward`` backward has stepped
        already, with the learning rates of the moment: ``.grad`` stays None, and ``step()`` and
        ``zero_grad()`` find nothing left to do. Copies of the module make one of their own.

        Raises:
            ConfigError: the class of the optimizer needs whole parameters.
            AttributeError: there is no option ``optimizer``, nor such an attribute of the model.
        """
        if self.config.optimizer is None:
            return getattr(self.original, "optimizer")  # noqa: B009, the user's own attribute
        return self._made_optimizer()

    def _made_optimizer(self) -> OnShards:
        if self._optimizer is None:
            named = dict(self.named_parameters())
            made = make_optimizer(self.config.optimizer, list(named.values()), list(named))
            in_backward = self.config.optimizer_in_backward
            self._optimizer = on_shards(made, in_backward=in_backward)
        return self._optimizer

    def step_parameters(self, fqns: list[str], grads: list[list[Tensor]]) -> OnShards:
        """What ``fxshard.step`` does: step parameters with their sharded gradients.

        Args:
            fqns: of the parameters.
            grads: per rank of this process and parameter, the reduced gradient of a padded shard.
        """
        optimizer, world = self._made_optimizer(), self.world
        unused = self.reach.unused()
        slots, mine = [], []
        for fqn, *shards in zip(fqns, *grads, strict=True):
            if fqn in unused:
                continue
            slots.append(slot := self.slots[fqn])
            rows = slot.local.shape[0]
            grad = shards[0]
            if isinstance(world, InProcessWorld):
                grad = torch.cat(shards[: world.size])
            mine.append(grad if grad.shape[0] == rows else grad[:rows])
        optimizer.step_parameters([slot.tensor for slot in slots], mine)
        return optimizer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = object.__getattribute__(self, "original")
            if name == "module" and not hasattr(original, name):
                return original  # FSDP1's name for it
            return getattr(original, name)

    def __getitem__(self, key: Any) -> Any:
        """Of the user's model, as FSDP1 forwards it: an `nn.Sequential` stays indexable."""
        return self.original[key]  # type: ignore[index]

    def train(self, mode: bool = True) -> ShardedModule:
        """As `nn.Module.train`, for the shared tree."""
        super().train(mode)
        self.original.training = mode
        return self

    @torch.compiler.disable(reason="fxshard runs a program of its own")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward; the result is what the user's model returns.

        Inside ``torch.compile`` it runs as it is, in a graph break.
        """
        self.reshard()  # of an `unshard` that nobody ended
        self.require_sharded("forward")
        for slot in self.slots.values():
            slot.settle()
        variant = self.variant(args, kwargs)
        signature = variant.program.signature
        flat, _ = compat.tree_flatten((args, kwargs))
        batch = [flat[i] for i in signature.tensor_inputs]
        if signature.training:
            params = [self._param(fqn) for fqn in differentiated(variant.program)]
            self._require_no_hooks(variant.program)
            outputs = list(Step.apply(Call(self, variant, len(params)), *params, *batch))
        else:
            with torch.no_grad(), self.as_traced():
                outputs, _ = variant.executor.forward(self.arguments(variant, batch))
        rest = iter(outputs)
        leaves = [next(rest) if constant is None else constant[0] for constant in signature.outputs]
        return compat.tree_unflatten(leaves, signature.out_spec)

    def variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """The program for this kind of call; captured and rewritten if it is new.

        Ranks compare what they made before the first collective of it, if it is not what they
        agreed on before: a rank may meet a new batch size alone.
        """
        kind = self.kind(args, kwargs)
        if isinstance(self.world, C10dWorld):
            self.world.begin_call()
        found = self.variants.get(kind)
        if found is None:
            found = next((v for v in self.variants.values() if v.serves(kind)), None)
        if found is None:
            try:
                program = self._traced(args, kwargs, kind)
            except FxshardError as error:
                self.refuse_alike(error)
                raise
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
            symbols = symbols_for(kind, others, self.config.dynamic, self.original, call)
        start = time.perf_counter()
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
            [program], Workload(self.original, without_data((args, kwargs)), ranks, self.config)
        )
        executor = self._make_executor(program, self.world)
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

    @property
    def memory(self) -> MemoryReport:
        """The memory report of `plan`."""
        return self.plan.memory

    def rewritten(self, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols) -> Program:
        """Capture the call `model(*args, **kwargs)` and run the passes."""
        units = tuple(
            dataclasses.replace(
                unit,
                params=tuple(map(self._as_it_is, unit.params)),
                ignored=tuple(map(self._as_it_is, unit.ignored)),
            )
            for unit in self.units
        )
        return pipeline.make_program(
            self.original,
            args,
            kwargs,
            units=units,
            world=self.world.size,
            replicas=self.world.replicas,
            config=self.config,
            sync=self._sync,
            accumulated=self._waiting(),
            comm_hook=self._comm_hook,
            device=torch.device(self._device) if isinstance(self.world, C10dWorld) else None,
            symbols=symbols,
        )

    def _waiting(self) -> tuple[str, ...]:
        """Parameters with an accumulated gradient that a backward will add to or reduce."""
        return tuple(fqn for fqn in self.accumulated if self.slots[fqn].tensor.requires_grad)

    def _cast_buffers(self) -> None:
        """Give buffers the dtype that the policy of their unit asks for, for good (as FSDP1).

        With offload they also go where the program computes: they are not loaded per unit.
        """
        buffers = dict(self.original.named_buffers(remove_duplicate=False))
        dtypes = buffer_dtypes(self.units, buffers)
        cast: dict[int, Tensor] = {}
        for name, buffer in buffers.items():
            dtype = dtypes.get(name, buffer.dtype)
            home = self.compute_device() if self.config.offload is not None else buffer.device.type
            if dtype is not buffer.dtype or home != buffer.device.type:
                module, key = self._owner(name)
                module._buffers[key] = cast.setdefault(id(buffer), buffer.to(home, dtype))

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self.original.get_submodule(path), key

    def whole_parameters(self) -> list[nn.Parameter]:
        """The ignored parameters."""
        return [self._whole(fqn) for fqn in self.wholes]

    def _param(self, fqn: str) -> nn.Parameter:
        """The parameter that the user sees."""
        return self.slots[fqn].tensor if fqn in self.slots else self._whole(fqn)

    def _whole(self, fqn: str) -> nn.Parameter:
        """An ignored parameter."""
        return self.original.get_parameter(fqn)

    def _as_it_is(self, param: Param) -> Param:
        """`param` with the dtype and the flag that its tensor has now."""
        tensor = self._param(param.fqn)
        same = param.compute_dtype is param.dtype
        return dataclasses.replace(
            param,
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            compute_dtype=tensor.dtype if same else param.compute_dtype,
        )

    def kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """What of this call its program depends on."""
        grad = torch.is_grad_enabled()
        autocast = torch.is_autocast_enabled(self._device)
        mode = {
            "train or eval": tuple(module.training for module in self._tree),
            "requires_grad of a parameter": (
                *(slot.tensor.requires_grad for slot in self.slots.values()),
                *(self._whole(fqn).requires_grad for fqn in self.wholes),
            ),
            "a buffer": tuple(
                (buffer.shape, buffer.dtype, buffer.device)
                for module, key in self._buffer_slots.values()
                if (buffer := module._buffers[key]) is not None
            ),
            "gradient accumulation": (self._sync, self._waiting()) if grad else (True, ()),
            "a hook of a module": compat.hook_numbers(self._tree),
            "grad mode": grad,
            "autocast": autocast and torch.get_autocast_dtype(self._device),
        }
        return Kind.of(args, kwargs, mode)

    def as_traced(self) -> torch.autocast:
        """The context that a program runs in: its casts are in it, autocast must add none."""
        return torch.autocast(self._device, enabled=False)

    def arguments(self, variant: Variant, batch: Sequence[Tensor]) -> list[list[Tensor]]:
        """Per rank that this process runs, the values of forward's placeholders."""
        rows = [
            [
                self.value(node, variant.program, batch, rank)
                for node in variant.executor.forward_inputs
            ]
            for rank in range(self.local_ranks)
        ]
        for i, node in enumerate(variant.executor.forward_inputs):
            if (meta.get(node).role, meta.get(node).fqn) in variant.written:
                for row in rows[1:]:  # each rank writes one of its own; the first one's is kept
                    row[i] = row[i].clone()
        return rows

    @property
    def local_ranks(self) -> int:
        """How many ranks this process runs: one, or the whole in-process world."""
        return self.world.ranks if isinstance(self.world, InProcessWorld) else 1

    def value(self, node: fx.Node, program: Program, batch: Sequence[Tensor], rank: int) -> Tensor:
        tag = meta.get(node)
        name = tag.fqn or ""
        if tag.role == "shard":
            shards = self.slots[name].shards
            return shards[rank % len(shards)]  # replicas inside one process share theirs
        if tag.role == "whole":
            return self._whole(name)
        if tag.role == "accumulated":
            if name not in self.accumulated:  # dropped since forward, by zero_grad
                val = node.meta["val"]
                return torch.zeros(val.shape, dtype=val.dtype, device=self._device)
            return self.accumulated[name][rank]
        if tag.role == "input":
            return batch[program.signature.tensor_inputs.index(int(name))]
        if name in program.constants:
            return program.constants[name]
        module, key = self._buffer_slots[name]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def require_accumulated(self, program: Program) -> None:
        """Raise StepError if there are gradients that a backward should reduce and does not."""
        if program.sync and set(self._waiting()) - program.accumulated:
            raise StepError(
                "gradients were accumulated under no_sync between a forward outside of it and its "
                "backward, which would not reduce them. Call backward behind each forward, "
                "micro-batch by micro-batch."
            )

    def _require_no_hooks(self, program: Program) -> None:
        """Raise StepError if a hook waits for a gradient that is stepped and never arrives."""
        for fqn in ops.stepped(program):
            if compat.has_gradient_hooks(self.slots[fqn].tensor):
                raise StepError(
                    f"parameter {fqn!r} has a hook on its gradient, which optimizer_in_backward "
                    f"steps without it. Remove the hook, or leave optimizer_in_backward out."
                )

    def _warn_of_hooks(self) -> None:
        """Say once of each hook on the module tree that it runs while tracing only."""
        for number, what in state.traced_hooks(self.original).items():
            if number not in self._warned:
                self._warned.add(number)
                log.warning(
                    "fxshard: %s ran while tracing and does not run again: its tensor operations "
                    "are part of the program, its side effects are lost. Hooks on the module that "
                    "fxshard.compile returns run on every call.",
                    what,
                )

    # -- FSDP1's and FSDP2's setters and optimizer states (see docs/coming-from-fsdp.md) -----------


def _listed(variants: dict[Kind, Variant]) -> str:
    """A line per program: the sizes that it was traced for, and how it differs from the first."""
    first = next(iter(variants))
    return "\n".join(
        f"  {n}: {'the first call' if kind is first else kind.differs_in(first)}"
        for n, kind in enumerate(variants, 1)
    )
