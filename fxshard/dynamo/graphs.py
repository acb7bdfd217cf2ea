"""The backend of ``torch.compile`` for models that `fxshard.shard` sharded.

Dynamo gives graphs of torch functions, one per stretch of Python that it can trace. Each is run by
programs of the kind that `fxshard.compile` makes: captured, rewritten, verified and analysed by the
same code. But a graph is not a model: it reads some of the parameters. The handles among its inputs
(see `fxshard.runtime.reading`) show which ones, call by call. So one graph of Dynamo may have
several programs: one for each layer that it serves, for each set of sizes if Dynamo made its sizes
dynamic, and for each mode.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from fxshard import pipeline
from fxshard._torch import context_parallel, dynamo, export, trees
from fxshard.config.checked import Config
from fxshard.config.environment import notice
from fxshard.dynamo.replay import Bound, GraphRun, ReplayInterpreter, relocated, stand_ins, unwraps
from fxshard.errors import CaptureError, ConfigError
from fxshard.host.progress import task
from fxshard.ir import tags
from fxshard.ir.domain import Symbols
from fxshard.ir.program import Program
from fxshard.ir.shardable import check_constants
from fxshard.ir.unit_options import reshard_by_unit
from fxshard.ir.units import Unit
from fxshard.memory.graphs import GraphReports
from fxshard.runtime import reading
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.sharding import other_meshes
from fxshard.runtime.step import AutogradCall, Step, differentiated
from fxshard.runtime.variants import Kind, Variant, reason_for, symbols_for
from fxshard.runtime.world.c10d import C10dWorld

log: logging.Logger = logging.getLogger("fxshard")
aten: Any = torch.ops.aten

# Options of `fxshard.shard` that change programs and not the layout of parameters; a graph may have
# other values than its model.
PER_GRAPH = (
    *("backend", "reshard_after_forward", "forward_prefetch", "backward_prefetch", "max_inflight"),
    *("max_bucket_bytes", "min_bucket_bytes", "pack_bytes", "checkpoint", "reduce_op"),
    *("gradient_divide_factor", "gradient_predivide_factor", "passes", "max_variants", "hardware"),
)

# What needs one graph of the full model.
_REFUSED = {
    "optimizer_in_backward": "a parameter that two graphs read would be stepped twice",
    "memory_budget": "no example call is planned before Dynamo captures one",
    "ranks_may_differ": "a graph is a piece of a call, and ranks may have other pieces",
    "pipeline_stage": "a stage runs one program per micro-batch, and a graph is a piece of it",
    "full_precision_in_eval": "Dynamo decides dtypes when it traces",
}


def check_options(config: Config) -> None:
    """Refuse options that `fxshard.compile` has and `fxshard.shard` has not.

    Raises:
        ConfigError: such an option is given.
    """
    for name, why in _REFUSED.items():
        if getattr(config, name):
            raise ConfigError(
                f"{name}={getattr(config, name)!r} with fxshard.shard: {why}. Leave it out, or use "
                f"fxshard.compile."
            )
    if config.dynamic:
        raise ConfigError(
            f"dynamic={config.dynamic!r} with fxshard.shard: Dynamo decides which sizes are open. "
            f"Leave it out, and use torch._dynamo.mark_dynamic(tensor, dim) or "
            f"torch.compile(dynamic=True)."
        )
    if config.reduce_op in ("max", "min"):
        raise ConfigError(
            f"reduce_op={config.reduce_op!r} with fxshard.shard: the gradients of a parameter that "
            f"two graphs read are added, and reductions by {config.reduce_op} cannot be added. Use "
            f"fxshard.compile."
        )


def attach(owner: Runtime, classes: dict[nn.Module, type]) -> None:
    """Prepare the user's model, which was just sharded, for eager use and for Dynamo."""
    reading.attach(owner, classes)
    dynamo.register_backend("fxshard", backend)


def reports(model: nn.Module) -> GraphReports:
    """One memory report per captured graph of a model that `fxshard.shard` sharded, in order.

    Args:
        model: what `fxshard.shard` or ``torch.compile`` returned.

    Returns:
        A sequence of `MemoryReport`, in bytes; ``str()`` is a table.

    Raises:
        ConfigError: `model` is not such a model, or nothing of it is captured yet.
    """
    runtime = reading.runtime_of(getattr(model, "_orig_mod", model))
    if runtime is None:
        raise ConfigError(
            f"fxshard.reports: the {type(model).__name__} was not sharded by fxshard.shard. Of a "
            f"model that fxshard.compile returned, the report is .memory."
        )
    if not runtime.captured:
        raise ConfigError(
            'fxshard.reports: nothing is captured yet. Call torch.compile(model, backend="fxshard")'
            " once."
        )
    return GraphReports(tuple(plan.memory for plan in runtime.captured))


def backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What ``torch.compile(backend="fxshard")`` calls, once per graph of Dynamo.

    Args:
        graph_module: torch functions on fake tensors; not yet differentiated.
        example_inputs: fake, and not used: programs are captured at calls, from real inputs.
        options: options of `fxshard.shard` that these graphs have otherwise (`PER_GRAPH`).
        mode: torch.compile's; only None and "default" are legal.
    """
    graph = DynamoGraph(graph_module, dict(options or {}), mode)

    def run(*args: Any) -> Any:
        return graph(*args)

    return run


class DynamoGraph:
    """One graph of Dynamo, and the programs that run it."""

    def __init__(
        self, graph_module: fx.GraphModule, options: dict[str, Any], mode: str | None
    ) -> None:
        self.graph_module: fx.GraphModule = graph_module
        self.options: dict[str, Any] = options
        self.mode: str | None = mode
        # By model: Dynamo runs one graph for two models that have equal guards.
        self.configs: weakref.WeakKeyDictionary[Runtime, Config] = weakref.WeakKeyDictionary()
        self.variants: weakref.WeakKeyDictionary[Runtime, dict[Kind, _GraphVariant]]
        self.variants = weakref.WeakKeyDictionary()
        self.modules: dict[str, str] | None = None  # id, as text, of a module at Dynamo's trace
        self.first: Bound | None = None
        self.numbers: frozenset[int] = _numbers(graph_module.graph)

    def __call__(self, *args: Any) -> Any:
        owner = self._owner(args)
        self._require_reduced(args)
        if owner is None:  # it reads no sharded model
            return self.graph_module(*args)
        if owner not in self.configs:
            self.configs[owner] = self._configured(owner)
        bound = bind(owner, args)
        _restore(owner, bound)
        owner.world.require_joined()
        if self.first is None:
            self.first = bound
            names = owner.model.named_modules()
            self.modules = {str(id(module)): name for name, module in names}
        taken = {i for i, _, _ in bound.names}
        rest = [
            arg.item() if i in self.numbers and isinstance(arg, Tensor) else arg
            for i, arg in enumerate(args)
            if i not in taken
        ]
        kind = self._kind(owner, bound, rest)
        variants = self.variants.setdefault(owner, {})
        found = variants.get(kind)
        if found is None:
            found = next((v for v in variants.values() if v.variant.serves(kind)), None)
        if found is None:
            try:
                found = variants[kind] = self._captured(owner, bound, rest, kind)
            except CaptureError as error:
                owner.refuse_alike(error)
                raise
        owner.runs(found.variant)
        if found.writes_shared(owner, bound, rest):
            return self._as_it_is(owner, args, bound)
        return found.run(owner, rest)

    def _as_it_is(self, owner: Runtime, args: Sequence[Any], bound: Bound) -> Any:
        """Run the graph operator by operator, on unsharded parameters."""
        inputs = list(args)
        for position, kind, fqn in bound.names:
            if kind == "param":
                inputs[position] = owner.computed(owner.slots[fqn])
        owner.forwards.enter()
        try:
            return ReplayInterpreter(None, self.graph_module, (), inputs).result()
        finally:
            owner.forwards.leave()

    def _owner(self, args: Sequence[Any]) -> Runtime | None:
        found = {id(o): o for o in (_handle_of(arg)[0] for arg in args) if o is not None}
        if len(found) > 1:
            models = [type(owner.model).__name__ for owner in found.values()]
            raise CaptureError(
                f"one graph of torch.compile reads parameters of {len(found)} models that "
                f"fxshard.shard sharded: {', '.join(models)}. Compile each model by itself: "
                f'model.compile(backend="fxshard").'
            )
        return next(iter(found.values()), None)

    def _require_reduced(self, args: Sequence[Any]) -> None:
        """Refuse parameters whose gradients no rank would reduce.

        Raises:
            ConfigError: on several ranks, a trained parameter belongs to no sharded model.
        """
        if not torch.is_grad_enabled() or _ranks() == 1:
            return
        ignored = {id(p) for owner in reading.SHARDED for p in owner.ignored_params()}
        places = self.graph_module.graph.find_nodes(op="placeholder")
        for node, arg in zip(places, args, strict=True):
            plain = isinstance(arg, nn.Parameter) and not isinstance(arg, DTensor)
            if (
                plain
                and arg.requires_grad
                and _handle_of(arg)[0] is None
                and id(arg) not in ignored
            ):
                raise ConfigError(
                    f'torch.compile(backend="fxshard"): parameter {node.name!r} '
                    f"{list(arg.shape)} is of no model that fxshard.shard sharded, and nothing "
                    f"would reduce its gradient over the {_ranks()} ranks. Call "
                    f"fxshard.shard(model) before torch.compile, or freeze it."
                )

    def _configured(self, owner: Runtime) -> Config:
        """The options of the model with those of ``torch.compile(options=...)``."""
        if self.mode not in (None, "default"):
            raise ConfigError(
                f'torch.compile(backend="fxshard", mode={self.mode!r}): fxshard has no modes. Give '
                f"options={{...}} instead: {', '.join(PER_GRAPH)}."
            )
        for name in self.options:
            if name not in PER_GRAPH:
                what = "unknown option"
                if name in Config.names():
                    what = "how a model is sharded cannot be changed when it is compiled: option"
                raise ConfigError(
                    f'torch.compile(backend="fxshard", options=...): {what} {name!r}. Options are: '
                    f"{', '.join(PER_GRAPH)}. All others are given to fxshard.shard."
                )
        config = owner.config.changed(self.options)
        check_options(config)
        if "reshard_after_forward" in self.options:
            now = reshard_by_unit(owner.model, config, owner.units)
            if not all(isinstance(value, bool) for value in now.values()):
                raise ConfigError(
                    "reshard_after_forward with a number of ranks makes process groups: give it to "
                    "fxshard.shard."
                )
        return config

    def _kind(self, owner: Runtime, bound: Bound, rest: Sequence[Any]) -> Kind:
        """What the program of this call depends on."""
        params = [owner.param(fqn) for fqn in bound.fqns("param", "ignored")]
        device = owner.compute_device()
        autocast = torch.is_autocast_enabled(device)
        mode = {
            "the parameters of the graph": bound,
            "requires_grad or dtype of a parameter": tuple(
                (param.requires_grad, param.dtype) for param in params
            ),
            "inference mode": tuple(v.is_inference() for v in rest if isinstance(v, Tensor)),
            "grad mode": torch.is_grad_enabled(),
            "autocast": autocast and torch.get_autocast_dtype(device),
        }
        return Kind.of(tuple(rest), {}, mode, ints_are_sizes=True)

    def _captured(
        self, owner: Runtime, bound: Bound, rest: Sequence[Any], kind: Kind
    ) -> _GraphVariant:
        """Capture a program for this kind of call; all ranks agree on it.

        Raises:
            CaptureError: it cannot be captured, sizes are not bounded, or attention goes round
                ranks (``context_parallel``).
        """
        config = self.configs[owner]
        if context_parallel.state() is not None:
            raise CaptureError(
                "torch's context_parallel around a model of torch.compile(backend='fxshard'): "
                "Dynamo reads attention before it goes round the ranks. Use fxshard.compile or "
                "fxshard.fully_shard."
            )
        of_this_layer = ("the parameters of the graph", bound)
        served = [
            found.variant
            for other, found in self.variants[owner].items()
            if of_this_layer in other.mode
        ]
        others = [variant.kind for variant in served]
        reason = reason_for(kind, served)
        if len(others) >= config.max_variants:
            raise CaptureError(
                f"a graph of {type(owner.model).__name__} needs one more program: {reason}. It "
                f"has {len(others)} already, as many as max_variants={config.max_variants} allows. "
                f"Pad inputs to a few lengths."
            )
        symbols: Symbols = {}
        if config.opens_sizes:
            symbols = symbols_for(kind, others, None, owner.model, ((), {}))
        given = {str(i): v.detach() for i, v in enumerate(rest) if isinstance(v, Tensor)}
        check_constants(owner.model, owner.units, given)
        shown = f"capturing a graph of {type(owner.model).__name__}"
        start = time.perf_counter()
        copied: frozenset[int] = frozenset()
        while True:
            model = self._model(owner, bound, copied)
            raw: dict[Any, Program] = {}
            try:
                with task(shown, shown=owner.progress):
                    program = self._program(owner, model, rest, bound, config, raw, symbols)
                break
            except CaptureError:
                written = model.__dict__["run_graph"].written
                if not written:
                    raise
                copied |= written
        owner.agree(program)
        for fqn in _handed_out(next(iter(raw.values()))):
            log.warning(
                "fxshard: a graph returns the unsharded parameter %r (or a view or cast of it), to "
                "code after a graph break or to the caller: it stays in memory until nothing "
                "refers to it, and operators that read it there save it unsharded for backward. "
                "Read the parameter where it is used.",
                fqn,
            )
        for value in rest:
            name = owner.forwards.name_of(value) if isinstance(value, Tensor) else None
            if name is not None:
                log.warning(
                    "fxshard: parameter %r was read before a graph break and is used after it: it "
                    "stays unsharded in memory until backward. Read it where it is used.",
                    name,
                )
        variant = owner.made(kind, program, model, (tuple(rest), {}), config)
        owner.captured.append(variant.plan)
        took = f"{time.perf_counter() - start:.1f} s, {len(program.graph.nodes)} nodes"
        domain = f"; {program.domain.text}" if program.domain is not None else ""
        notice(f"program {len(others) + 1} of a graph ({reason}): {took}{domain}")
        return _GraphVariant(variant, tuple(sorted(copied)))

    def _program(
        self,
        owner: Runtime,
        model: nn.Module,
        rest: Sequence[Any],
        bound: Bound,
        config: Config,
        raw: dict[Any, Program],
        symbols: Symbols,
    ) -> Program:
        device = None
        if isinstance(owner.world, C10dWorld):
            device = torch.device(owner.world.mesh.device_type)
        return pipeline.make_program(
            model,
            tuple(rest),
            {},
            units=_units_of(owner, bound, config, self.options),
            world=owner.world.size,
            replicas=owner.world.replicas,
            meshes=other_meshes(owner.world),
            config=config,
            device=device,
            captures=raw,
            every_tangent=True,
            symbols=symbols,
        )

    def _model(self, owner: Runtime, bound: Bound, copied: frozenset[int]) -> nn.Module:
        """The module that is captured in place of the user's model: it runs this graph."""
        assert self.modules is not None and self.first is not None
        names = relocated(self.modules, self.first, bound)
        tree = stand_ins(owner.model, bound)
        tree[""].__dict__["run_graph"] = GraphRun(self.graph_module, names, tree, bound, copied)
        return tree[""]


def _numbers(graph: fx.Graph) -> frozenset[int]:
    """Positions of the inputs that are floats of the user, which Dynamo wraps into tensors.

    Dynamo does so with ``dynamic=True`` (torch/_dynamo/variables/builder.py, ``wrap_symfloat``).
    They are constants of a program, as in `fxshard.compile`.
    """
    return frozenset(
        i
        for i, node in enumerate(graph.find_nodes(op="placeholder"))
        if node.users and all(unwraps(user) for user in node.users)
    )


@dataclasses.dataclass
class _GraphVariant:
    """One program of a graph.

    Attributes:
        variant: the program.
        copied: positions of inputs that the graph writes into and autograd follows: the program
            runs on copies, and the results are copied back under autograd.
    """

    variant: Variant
    copied: tuple[int, ...]

    def writes_shared(self, owner: Runtime, bound: Bound, rest: Sequence[Any]) -> bool:
        """True if the graph writes into memory that it shares with another of its inputs.

        A program assumes separate inputs: it would read old values of the other one.
        """
        written = {f"{role} {name}" for role, name in self.variant.written}
        written |= {f"input {position}" for position in self.copied}
        if not written:
            return False
        tensors = {f"input {i}": v for i, v in enumerate(rest) if isinstance(v, Tensor)}
        for name in bound.fqns("buffer"):
            module, key = owner.structure.buffers[name]
            tensors[f"buffer {name}"] = module.get_buffer(key)
        places = {n: t.untyped_storage().data_ptr() for n, t in tensors.items() if t.numel()}
        shared = collections.Counter(places.values())
        return any(name in places and shared[places[name]] > 1 for name in written)

    def run(self, owner: Runtime, rest: Sequence[Any]) -> tuple[Any, ...]:
        """Run one forward; returns what Dynamo's graph would return."""
        signature = self.variant.program.signature
        batch = [rest[i] for i in signature.tensor_inputs]
        if signature.training:
            names = differentiated(self.variant.program)
            call = AutogradCall(owner, self.variant, names)
            outputs = _as_views(list(Step.apply(call, *map(owner.param, names), *batch)))
        else:
            with torch.no_grad(), owner.as_traced(self.variant):
                outputs, _ = self.variant.executor.forward(owner.arguments(self.variant, batch))
        given = iter(outputs)
        leaves = [next(given) if c is None else c[0] for c in signature.outputs]
        found, new = trees.tree_unflatten(leaves, signature.out_spec)
        for position, value in zip(self.copied, new, strict=True):
            rest[position].copy_(value)
        return found


def _as_views(outputs: list[Tensor]) -> list[Tensor]:
    """`outputs`; those that are part of another one's memory become views of it.

    Autograd does not know that results of one node share memory: a write into one after a graph
    break must also show in the gradient of the other.
    """
    at: dict[int, list[int]] = {}
    for i, output in enumerate(outputs):
        if isinstance(output, Tensor) and output.requires_grad and output.numel():
            at.setdefault(output.untyped_storage().data_ptr(), []).append(i)
    for members in at.values():
        base = max((outputs[i] for i in members), key=Tensor.numel)
        for i in members:
            if outputs[i] is not base and _lies_in(outputs[i], base):
                view = outputs[i]
                outputs[i] = base.as_strided(view.size(), view.stride(), view.storage_offset())
    return outputs


def _lies_in(view: Tensor, base: Tensor) -> bool:
    if not base.is_contiguous() or view.dtype is not base.dtype:
        return False
    first = view.storage_offset() - base.storage_offset()
    reach = sum(
        (size - 1) * stride for size, stride in zip(view.size(), view.stride(), strict=True)
    )
    return first >= 0 and first + reach < base.numel()


def _ranks() -> int:
    """The number of processes: of the process group, or as torchrun sets it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)


# -- inputs ----------------------------------------------------------------------------------------


def _handle_of(arg: Any) -> tuple[Runtime | None, str]:
    """The sharded model and FQN of the parameter of which an input of a graph is the handle."""
    found: tuple[Runtime | None, str] = (None, "")
    if isinstance(arg, Tensor):
        found = getattr(arg, "_fxshard", found)
    return found


def bind(owner: Runtime, args: Sequence[Any]) -> Bound:
    """Which inputs of a graph are parameters or buffers of the model."""
    known: dict[int, tuple[str, str]] = {}
    for name, (module, key) in owner.structure.buffers.items():
        known.setdefault(id(module._buffers[key]), ("buffer", name))
    for fqn in owner.ignored:
        known[id(owner.ignored_param(fqn))] = ("ignored", fqn)
    for fqn, slot in owner.slots.items():
        known[id(slot.tensor)] = ("param", fqn)  # not read by the property but by parameters()
    found = []
    for i, arg in enumerate(args):
        of, fqn = _handle_of(arg)
        if of is not None:
            found.append((i, "param", fqn))
        elif isinstance(arg, Tensor) and id(arg) in known:
            found.append((i, *known[id(arg)]))
    return Bound(tuple(found))


def _restore(owner: Runtime, bound: Bound) -> None:
    """Put parameters back on the storage of their shards, and update the flags of their handles.

    (`ParameterStore.restore`; the flag of a handle is in Dynamo's guards at the next call.)
    """
    for fqn in bound.fqns("param"):
        slot = owner.slots[fqn]
        owner.restore([slot])
        for module, name in slot.owners:
            handle = module.__dict__[reading.HANDLES][name]
            if handle.requires_grad is not slot.tensor.requires_grad:
                handle.requires_grad_(slot.tensor.requires_grad)


def _units_of(
    owner: Runtime, bound: Bound, config: Config, options: dict[str, Any]
) -> tuple[Unit, ...]:
    """The units of the model with the parameters that a graph reads, as they are now.

    Their modules cast no inputs: Dynamo has seen the casts (`fxshard.runtime.reading`).
    """
    read = set(bound.fqns("param", "ignored"))
    reshard = {unit.fqn: unit.reshard for unit in owner.units}
    if options.keys() & {"reshard_after_forward"}:
        reshard = reshard_by_unit(owner.model, config, owner.units)
    return tuple(
        dataclasses.replace(
            unit,
            params=tuple(owner.as_it_is(p) for p in unit.params if p.fqn in read),
            ignored=tuple(owner.as_it_is(p) for p in unit.ignored if p.fqn in read),
            reshard=reshard[unit.fqn],
            precision=dataclasses.replace(
                unit.precision, cast_inputs=False, cast_root_inputs=False, output_dtype=None
            ),
        )
        for unit in owner.units
    )


# -- what goes out ---------------------------------------------------------------------------------


def _handed_out(program: Program) -> list[str]:
    """FQNs of parameters that a graph returns, or views, casts or copies of them."""
    found = []
    for value, result in zip(program.values, program.results, strict=True):
        node: fx.Node | None = value if result.kind == "output" else None
        while node is not None and node.op == "call_function" and _is_same_values(node):
            node = node.all_input_nodes[0]
        if node is not None and node.op == "placeholder" and tags.get(node).role == "param":
            found.append(tags.get(node).fqn or "")
    return list(dict.fromkeys(found))


_CASTS = (aten._to_copy.default, aten.clone.default, aten._unsafe_view.default, aten.detach.default)


def _is_same_values(node: fx.Node) -> bool:
    """True for a view, cast or copy of one tensor."""
    target = node.target
    if len(node.all_input_nodes) != 1 or not isinstance(target, export.OpOverload):
        return False
    return target in _CASTS or target.is_view
