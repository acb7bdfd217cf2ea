"""ShardedModule: the user's module tree with sharded parameters, run by compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxshard import compat, dump, meta, pipeline
from fxshard.config import Config
from fxshard.errors import StepError
from fxshard.executor import Executor
from fxshard.memory.report import MemoryReport
from fxshard.plans import Plan
from fxshard.program import Program
from fxshard.sharding import as_gradient, shard_parameters
from fxshard.trace import PLAIN
from fxshard.units import Param, Unit
from fxshard.world.c10d import C10dWorld
from fxshard.world.in_process import InProcessWorld

log = logging.getLogger("fxshard")
aten = torch.ops.aten

MakeExecutor = Callable[[Program, Any], Executor]


@dataclasses.dataclass
class Variant:
    """One program of the module, for one kind of call."""

    plan: Plan
    executor: Executor

    @property
    def program(self) -> Program:
        """What the executor runs."""
        return self.plan.program

    @functools.cached_property
    def written(self) -> frozenset[tuple[str, str | None]]:
        """Role and name of the buffers and inputs that forward writes into."""
        return frozenset(
            (meta.get(node).role, meta.get(node).fqn)
            for node in self.program.graph.find_nodes(op="placeholder")
            if any(user.target is aten.copy_.default for user in node.users)
        )

    @functools.cached_property
    def read_again(self) -> list[fx.Node]:
        """Placeholders of backward that are the caller's tensors: they must stay as they are."""
        roles = ("shard", "buffer", "input")
        return [node for node in self.executor.backward_inputs if meta.get(node).role in roles]


class ShardedModule(nn.Module):
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
        # The same dicts, not copies: what the user adds to or loads into the model is seen here.
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(model, name))
        object.__setattr__(self, "original", model)
        self.training = model.training
        self.units, self.world, self.config = units, world, config
        self._make_executor = make_executor
        self.slots = shard_parameters(model, units, world)
        self.variants: dict[Any, Variant] = {}
        self._agreed: set[tuple[str, ...]] = set()
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self._tree = list(model.modules())
        self._buffer_slots = {
            name: (module, key)
            for path, module in model.named_modules()
            for key in module._buffers
            for name in [f"{path}.{key}" if path else key]
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "original"), name)

    def train(self, mode: bool = True) -> ShardedModule:
        """As `nn.Module.train`, for the shared tree."""
        super().train(mode)
        self.original.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward; the result is what the user's model returns."""
        for slot in self.slots.values():
            slot.settle()
        variant = self.variant(args, kwargs)
        signature = variant.program.signature
        flat, _ = compat.tree_flatten((args, kwargs))
        batch = [flat[i] for i in signature.tensor_inputs]
        if signature.training:
            params = [self.slots[fqn].tensor for fqn in _differentiated(variant.program)]
            outputs = list(_Step.apply(_Call(self, variant, len(params)), *params, *batch))
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
        key = self.key(args, kwargs)
        if key not in self.variants:
            if self.variants:
                log.info("fxshard: new kind of call (%d so far), tracing again", len(self.variants))
            program = self.rewritten(args, kwargs)
            lines = dump.agreement(program)
            if isinstance(self.world, C10dWorld) and tuple(lines) not in self._agreed:
                self.world.agree(lines, "the model or the batch structure")
            self.add(args, kwargs, program)
        return self.variants[key]

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program) -> None:
        """Run this kind of call by `program`, which all ranks agree on."""
        plan = Plan(program, self.config, self.original, (args, kwargs))
        executor = self._make_executor(program, self.world)
        self.variants[self.key(args, kwargs)] = Variant(plan, executor)
        self._agreed.add(tuple(dump.agreement(program)))

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

    def rewritten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Capture the call `model(*args, **kwargs)` and run the passes."""
        units = tuple(
            dataclasses.replace(unit, params=tuple(map(self._as_it_is, unit.params)))
            for unit in self.units
        )
        return pipeline.make_program(
            self.original, args, kwargs, units=units, world=self.world.size, config=self.config
        )

    def _as_it_is(self, param: Param) -> Param:
        """`param` with the flag that its tensor has now."""
        return dataclasses.replace(param, requires_grad=self.slots[param.fqn].tensor.requires_grad)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a program was traced for: calls with equal keys run the same one."""
        flat, spec = compat.tree_flatten((args, kwargs))
        return (
            spec,
            tuple(map(_leaf_key, flat)),
            tuple(module.training for module in self._tree),
            tuple(slot.tensor.requires_grad for slot in self.slots.values()),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(self._device) and torch.get_autocast_dtype(self._device),
        )

    def as_traced(self) -> torch.autocast:
        """The context that a program runs in: its casts are in it, autocast must add none."""
        return torch.autocast(self._device, enabled=False)

    def arguments(self, variant: Variant, batch: Sequence[Tensor]) -> list[list[Tensor]]:
        """Per rank that this process runs, the values of forward's placeholders."""
        rows = [
            [
                self._value(node, variant.program, batch, rank)
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
        return self.world.size if isinstance(self.world, InProcessWorld) else 1

    def _value(self, node: fx.Node, program: Program, batch: Sequence[Tensor], rank: int) -> Tensor:
        tag = meta.get(node)
        name = tag.fqn or ""
        if tag.role == "shard":
            return self.slots[name].shards[rank]
        if tag.role == "input":
            return batch[program.signature.tensor_inputs.index(int(name))]
        if name in program.constants:
            return program.constants[name]
        module, key = self._buffer_slots[name]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer


def _leaf_key(value: Any) -> Any:
    """Equal for leaves that one program serves; ``1``, ``1.0`` and ``True`` are not equal."""
    if isinstance(value, Tensor):
        kind = (value.dtype, value.device, value.requires_grad)
        return (tuple(value.shape), value.stride(), *kind)
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))  # NaN equals itself, -0.0 is not 0.0
    return (type(value), value if isinstance(value, PLAIN) else id(value))


@dataclasses.dataclass
class _Call:
    """One call on its way through autograd."""

    module: ShardedModule
    variant: Variant
    params: int


class _Step(torch.autograd.Function):
    """One node in the user's autograd graph: the whole model.

    Saved values are a plain list on the context, handed over (and so dropped) by backward.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        batch = tensors[call.params :]
        with call.module.as_traced():
            outputs, saved = call.variant.executor.forward(
                call.module.arguments(call.variant, batch)
            )
        signature = call.variant.program.signature
        ctx.set_materialize_grads(False)
        where = signature.tensor_outputs
        plain = [k for k, i in enumerate(where) if i not in signature.differentiable]
        for k in plain:
            outputs[k] = outputs[k].detach()  # the same tensor may be a differentiable output too
        ctx.mark_non_differentiable(*(outputs[k] for k in plain))
        returned = {id(output) for output in outputs}
        # An output that is saved too must not keep its own autograd node alive.
        ctx.saved = [[t.detach() if id(t) in returned else t for t in rank] for rank in saved]
        ctx.call, ctx.batch = call, batch
        ctx.places = {position: k for k, position in enumerate(where)}
        ctx.versions = _versions(call, batch)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: _Call = ctx.call
        program = call.variant.program
        if ctx.saved is None:
            raise StepError(
                "backward was called twice on one forward: its saved activations are gone. Run "
                "forward again, or sum the losses and call backward once."
            )
        signature = program.signature
        for position, k in ctx.places.items():
            if grads[k] is not None and position not in signature.tangents:
                names = [signature.output_names[i] for i in signature.tangents]
                raise StepError(
                    f"a gradient arrived at output {signature.output_names[position]}, but the "
                    f"program was traced for a loss at {', '.join(names)} (the model's scalar "
                    f"outputs). Do not pass labels, so that the model returns no loss of its own, "
                    f"or call backward on its loss."
                )
        for (what, before), (_, now) in zip(ctx.versions, _versions(call, ctx.batch), strict=True):
            if before != now:
                raise StepError(
                    f"{what!r} was changed in place between a forward and its backward, which "
                    f"reads it. Call backward first (before optimizer.step()), or change a copy."
                )
        tangents = {
            meta.get(node).fqn: _laid_out(grads[ctx.places[int(meta.get(node).fqn or 0)]], node)
            for node in call.variant.executor.backward_inputs
            if meta.get(node).role == "tangent"
        }
        saved, ctx.saved = ctx.saved, None
        batch, ctx.batch = ctx.batch, None
        args = _backward_arguments(call, batch, saved, tangents)
        with call.module.as_traced():
            results = call.variant.executor.backward(args)
        return (None, *_gradients(call, results, len(batch)))


def _versions(call: _Call, batch: Sequence[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    """How often each tensor of the caller's that backward reads has been changed in place."""
    program, found = call.variant.program, []
    for node in call.variant.read_again:
        role, name = meta.get(node).role, meta.get(node).fqn or ""
        tensors = [call.module._value(node, program, batch, 0)]
        if role == "shard":  # operators on a DTensor count on it, not on what it is made of
            tensors.append(call.module.slots[name].tensor)
        what = program.signature.input_names[int(name)] if role == "input" else name
        found.append((what, tuple(map(compat.version, tensors))))
    return found


def _laid_out(grad: Tensor | None, node: fx.Node) -> Tensor:
    """The gradient of an output in the strides that backward was traced for; None is zeros."""
    like = node.meta["val"]
    if grad is not None and grad.stride() == like.stride():
        return grad
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.zero_() if grad is None else made.copy_(grad)


def _backward_arguments(
    call: _Call,
    batch: Sequence[Tensor],
    saved: list[list[Tensor]],
    tangents: dict[str | None, Tensor],
) -> list[list[Tensor]]:
    args: list[list[Tensor]] = []
    for rank, values in enumerate(saved):
        rest = iter(values)
        row: list[Tensor] = []
        for node in call.variant.executor.backward_inputs:
            tag = meta.get(node)
            if tag.role == "tangent":
                row.append(tangents[tag.fqn])
            elif tag.role in ("shard", "buffer", "input"):
                row.append(call.module._value(node, call.variant.program, batch, rank))
            else:
                row.append(next(rest))
        values.clear()
        args.append(row)
    return args


def _gradients(call: _Call, results: list[list[Tensor]], inputs: int) -> list[Tensor | None]:
    """Gradients in the order of `_Step.forward`'s tensors."""
    program = call.variant.program
    names = [result.name for result in program.results if result.kind == "grad"]
    per_rank = [dict(zip(names, grads, strict=True)) for grads in results]
    results.clear()
    out: list[Tensor | None] = []
    for fqn in _differentiated(program):
        shards = [grads.pop(fqn) for grads in per_rank]
        out.append(as_gradient(call.module.slots[fqn], shards, call.module.world))
    for k in range(inputs):
        position = program.signature.tensor_inputs[k]
        out.append(per_rank[0].pop(f"input[{position}]", None))
    return out


def _differentiated(program: Program) -> list[str]:
    """FQNs of the parameters that the program makes gradients of."""
    return [r.name for r in program.results if r.kind == "grad" and r.name in program.params]
