"""Model -> joint graph: one ATen graph of forward and backward, every node tagged.

The capture is AOTAutograd's joint export of the `nn.Module` itself, under fake tensors, with no
export or Dynamo before it: hooks and custom autograd functions run as in eager. Activation
checkpoints run inline; their nodes are marked, and `passes/checkpoint.py` does the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxshard._torch import checkpointing, export, fake_tensors, graphs, modes, trees
from fxshard._torch import sizes as torch_sizes
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.capture import (
    aliasing,
    attributes,
    bytecode,
    counters,
    hf,
    precision,
    provenance,
    refusals,
    repeat,
    rng,
    shapes,
)
from fxshard.capture.cuda import operators as cuda_operators
from fxshard.capture.held import Snapshot
from fxshard.capture.normalize import fake_like, normalize
from fxshard.capture.strides import KernelFakeMode
from fxshard.capture.swapped import as_users_own
from fxshard.config import environment
from fxshard.errors import CaptureError
from fxshard.ir import calls
from fxshard.ir.domain import Domain, Symbols
from fxshard.ir.program import Program, Signature, input_name, path_name
from fxshard.ir.units import Unit

log = logging.getLogger("fxshard")
aten = torch.ops.aten

# What may stand in a call or a result beside tensors: a constant of the program.
PLAIN = (
    *(bool, int, float, complex, str, bytes, types.NoneType, enum.Enum, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType),
)


def as_module(model: Any) -> nn.Module:
    """The `nn.Module` behind what the user may hand us.

    Raises:
        CaptureError: `model` is neither an nn.Module, a GraphModule nor an ExportedProgram.
    """
    if isinstance(model, torch.export.ExportedProgram):
        return model.module(check_guards=False)
    if isinstance(model, nn.Module):
        return model
    raise CaptureError(
        f"expected an nn.Module, a torch.fx.GraphModule or a torch.export.ExportedProgram, "
        f"got {type(model).__name__}."
    )


def where_it_computes(model: nn.Module, device: torch.device | None = None) -> torch.device:
    """`device`, or that of the first parameter that is somewhere, or the CPU."""
    held = (p.device for p in model.parameters() if not p.is_meta)
    return device or next(held, torch.device("cpu"))


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    units: tuple[Unit, ...],
    world_size: int,
    training: bool,
    device: torch.device | None = None,
    for_cuda: bool = False,
    symbols: Symbols | None = None,
    every_tangent: bool = False,
) -> Program:
    """Trace one call of `model` into a Program that no pass has touched yet.

    Parameters may be real, meta, fake or sharded (DTensor); the trace sees whole fake ones.
    Outputs that backward starts from ("tangents"): the scalar outputs that need a gradient (a
    loss) if there are any, else every output that needs one.

    Args:
        model: the module; left exactly as it was, also when the capture fails.
        args, kwargs: an example call; only shapes, dtypes and non-tensor values matter.
        units: the units of `model`, for the Program.
        world_size: number of shards, for the Program.
        training: trace backward too.
        device: where parameters are when they are whole; None: where they are now.
        for_cuda: trace what PyTorch runs on CUDA, also where parameters are on the CPU.
        symbols: sizes of inputs that may be others in other calls; at least 2 in this one.
        every_tangent: backward starts from every output that needs a gradient, of whatever shape;
            for graphs of Dynamo, whose backend sees itself to inputs that share memory.

    Raises:
        CaptureError: Python control flow depends on data, a trainable parameter lost its
            gradient, or torch refused the graph; names the line of the user's code.
    """
    given = (model, args, kwargs, units, world_size, training, device, for_cuda, symbols)
    failures: dict[str, CaptureError] = {}
    try:
        for way in WAYS:
            if not _is_worth(way, failures, symbols):
                continue
            try:
                # Around all of its traces: what the model and torch log, they log once.
                with (
                    as_users_own(model),
                    hf.while_tracing(model),
                    modes.unobserved(),
                    _torch_silent(),
                ):
                    return _captured(*given, every_tangent, way)
            except CaptureError as error:
                if not failures and not isinstance(error, _TracerError):
                    raise
                failures[way] = error
        raise _no_way(failures)
    finally:  # an error refers to this frame, and by it to what its callers hold: their outputs
        failures.clear()


DIRECT, OPEN, DYNAMO = WAYS = (
    "as it is",
    "with sizes and numbers from data left open",
    "as torch.compile's Dynamo reads it",
)


class _TracerError(CaptureError):
    """The tracer refuses what the model does: another way may go further.

    Attributes:
        from_data: Python asked for the values of a tensor.
    """

    def __init__(self, text: str, from_data: bool) -> None:
        super().__init__(text)
        self.from_data = from_data


def _is_worth(way: str, failures: dict[str, CaptureError], symbols: Symbols | None) -> bool:
    """Whether a way may go where those before did not."""
    if way == DIRECT:
        return True
    first = failures[DIRECT]
    if way == OPEN:  # with symbols the first way was this one
        return isinstance(first, _TracerError) and first.from_data and not symbols
    return not symbols


def _no_way(failures: dict[str, CaptureError]) -> CaptureError:
    """What to say when no way was left: the first reason in full, a line for each other."""
    first, *others = failures.items()
    text = str(first[1])
    for way, error in others:
        reason = error.__cause__ or error
        said = str(reason).strip().splitlines() or [""]
        text += f"\nTried {way} too: {type(reason).__name__}: {said[0]}"
    refused = CaptureError(text)
    refused.__cause__ = first[1].__cause__
    return refused


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    units: tuple[Unit, ...],
    world_size: int,
    training: bool,
    device: torch.device | None,
    for_cuda: bool,
    symbols: Symbols | None,
    every_tangent: bool,
    way: str,
) -> Program:
    """`capture`, one way. Raises _TracerError where another one may go further."""
    computes_on = where_it_computes(model, device)
    stands_for_cuda = for_cuda and computes_on.type != "cuda"
    mode_class = cuda_operators.CudaFakeMode if stands_for_cuda else KernelFakeMode
    fake_mode = mode_class(allow_non_fake_inputs=True)
    leaves, in_spec = trees.tree_flatten_with_path((args, kwargs))
    flat = [leaf for _, leaf in leaves]
    names = tuple(input_name(path) for path, _ in leaves)
    shapes.require_plain(flat, names.__getitem__)
    _refuse_opaque(names, flat, "argument")
    positions = tuple(i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor))
    is_open = symbols or way != DIRECT

    def prepare(mode: KernelFakeMode | None = None) -> _Prepared:
        """The call in a trace of its own."""
        sizes, tracing_mode = None, mode or mode_class(allow_non_fake_inputs=True)
        if is_open:
            ints = any(dim is None for places in (symbols or {}).values() for _, dim in places)
            sizes = shapes.Trace(symbols or {}, shapes.of_call(flat, ints=ints))
            tracing_mode = mode_class(allow_non_fake_inputs=True, shape_env=sizes.env)
        given = flat if sizes is None else [sizes.number(i, leaf) for i, leaf in enumerate(flat)]
        fakes = tuple(_fake_input(i, flat[i], tracing_mode, sizes) for i in positions)
        call = _Call(
            model, given, in_spec, positions, training, units, computes_on, stands_for_cuda
        )
        call.every_tangent = every_tangent
        return _Prepared(call, fakes, tracing_mode, sizes, device)

    found = _stamped(model, prepare, fake_mode) if way == DIRECT else None
    if found is None:
        found = _flat(prepare(fake_mode), fake_mode, way)
    call, traced = found.call, found.traced
    signature = Signature(
        in_spec=in_spec,
        out_spec=call.out_spec,
        inputs=tuple(None if i in positions else leaf for i, leaf in enumerate(flat)),
        tensor_inputs=positions,
        outputs=call.out_constants,
        input_names=names,
        output_names=call.out_names,
        tangents=call.tangents,
        training=training and bool(call.tangents),
        differentiable=call.differentiable,
        repeats=call.repeats,
    )
    program = Program(
        graph=traced.graph,
        results=[],
        signature=signature,
        constants={},
        units=units,
        world_size=world_size,
        device=computes_on,
        fake_mode=fake_mode,
        calls=call.graph.calls if call.graph is not None else tuple(found.calls),
        domain=found.domain,
    )
    normalize(program, found.owner, traced.sources, traced.targets, call.replaced)
    if not every_tangent:
        given = {str(i): flat[i] for i in positions}
        aliasing.refuse_written(program, model, given, tuple(call.replaced))
    hf.refuse_packed(program.graph)
    return program


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A call that is about to be traced, with the fake tensors and symbols of that trace."""

    call: _Call
    fakes: tuple[torch.Tensor, ...]
    mode: KernelFakeMode
    sizes: shapes.Trace | None
    device: torch.device | None
    ghosts: bool = False  # stand for the tensors of the model

    def like(
        self, tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device | None
    ) -> torch.Tensor:
        """What stands for a tensor of the model."""
        if self.ghosts:
            return repeat.ghost_like(tensor, dtype, device)
        return fake_like(tensor, self.mode, dtype, device)

    @contextlib.contextmanager
    def ready(
        self, way: str = DIRECT, runs: repeat.Runs = (), *, told: bool = True
    ) -> Iterator[list[calls.Call]]:
        """The model in the state in which it is traced; yields its calls as they are made.

        Args:
            runs: blocks that are left out; calls have the names of the whole model.
            told: warn of attributes that forward assigns, name modules that draw numbers.
        """
        call, model = self.call, self.call.model
        dtypes = precision.traced_dtypes(model, call.units)
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        by_id = {id(tensor): dtypes.get(name) for name, tensor in reversed(named)}  # first name
        state = functools.partial(_fake_state, model, self.like, by_id, self.device, told)
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            if call.stands_for_cuda:
                enter(cuda_operators.substituted())
            if way == DYNAMO:
                enter(state())
                enter(_read_by_dynamo(call, self.fakes, self.mode))
            enter(counters.put_back(model))
            calls = enter(provenance.calls_noted(model))
            enter(rng.only_torch_s(model, told=told))
            enter(precision.casting(model, call.units))
            enter(precision.recurrent_autocast())
            if way != DYNAMO:
                enter(repeat.shortened(model, runs))
                enter(state())
            yield calls

    def settled(self, graph: fx.Graph, mode: FakeTensorMode) -> Domain | None:
        """Make every value of `graph` a fake one of `mode`, of the example call."""
        return None if self.sizes is None else shapes.settle(graph, self.sizes, mode)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A call that has been traced.

    Attributes:
        call: it.
        traced: its graph; every value is a fake one of the example call.
        owner: holds the constants of the graph.
        calls: of modules, in the order of forward.
        domain: the sizes that it serves.
    """

    call: _Call
    traced: repeat.Traced
    owner: fx.GraphModule
    calls: Sequence[calls.Call]
    domain: Domain | None


def _flat(prepared: _Prepared, mode: FakeTensorMode, way: str) -> _Found:
    """All of the model, traced."""
    call, runs = prepared.call, repeat.Alike()
    call.told = runs.one
    with prepared.ready(way) as calls:
        owner, *ends = _export(call, prepared.fakes)
        _refuse_otherwise(call, runs if prepared.sizes is None else None)
    domain = prepared.settled(owner.graph, mode)
    return _Found(call, repeat.Traced(owner.graph, *ends), owner, calls, domain)


def _refuse_otherwise(call: _Call, runs: repeat.Alike | None) -> None:
    """Refuse a forward that each run changes: a program does the same in all of its runs.

    Args:
        runs: of forward; None where sizes are open, of which a later run knows more.

    Raises:
        CaptureError: it counts, or its runs are not alike.
    """
    model = type(call.model).__name__
    counting = counters.counting(call.model, call.counts)
    if counting:
        raise CaptureError(
            f"{model} cannot be traced: forward counts in {', '.join(counting)}, and a traced "
            f"program neither counts nor reads it. Make it a buffer (register_buffer) that forward "
            f"adds to, pass it in, or count in a forward hook on the compiled model, which runs on "
            f"every call."
        )
    line = runs.differs() if runs is not None else None
    if line is not None:
        raise CaptureError(
            f"{model} cannot be traced: forward does otherwise when it is run again"
            f"{line and ', at ' + provenance.line_text(line)}. What it changes in Python decides "
            f"what it computes, and a traced program does the same in every run. Make that a "
            f"buffer, or pass it in."
        )


def _stamped(
    model: nn.Module, prepare: Callable[..., _Prepared], mode: KernelFakeMode
) -> _Found | None:
    """The same from a trace of fewer blocks, where that is proven; else None, and a line says why.

    An error of the model is left to `_flat`, which tells it.
    """
    is_graph = isinstance(model, fx.GraphModule)
    if is_graph or environment().flat_capture:
        return None
    lists, why = repeat.candidates(model)
    if not (lists or why):
        return None
    try:
        with _uncollected(), modes.rng_kept():
            if not lists:
                raise repeat.Unproven(why)
            if counters.has_iterators(model):
                raise repeat.Unproven("its code holds an iterator, which no rehearsal can put back")
            full = _rehearsed(prepare, ())
            for right in repeat.RIGHT:
                try:
                    repeats = repeat.proven(
                        model, full, lambda runs: _rehearsed(prepare, runs), right
                    )
                    return _of_blocks(prepare(mode), mode, repeats)
                except repeat.Wider:
                    if right == repeat.RIGHT[-1]:
                        raise
    except Exception as reason:
        said = str(reason).splitlines() or [type(reason).__name__]
        log.info("fxshard: %s is captured block by block: %s", type(model).__name__, said[0])
    return None


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is looked for: it would walk all the nodes that are made, many times over."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _of_blocks(prepared: _Prepared, mode: KernelFakeMode, repeats: repeat.Repeats) -> _Found:
    """What is left of the model, traced; the blocks left out, stamped."""
    call, runs = prepared.call, repeat.Alike()
    call.told = runs.one
    with prepared.ready(runs=repeats.runs) as calls, graphs.nodes_made() as made:
        owner, *ends = _export(call, prepared.fakes)
        _refuse_otherwise(call, runs)
    noted = repeat.note(owner.graph, made, calls, repeats)
    domain = prepared.settled(owner.graph, mode)
    traced = repeat.Traced(owner.graph, *ends)
    traced = repeat.written(traced, noted, repeats, mode, call.grad)
    return _Found(call, traced, owner, repeats.full.calls, domain)


def _rehearsed(prepare: Callable[[], _Prepared], runs: repeat.Runs) -> repeat.Rehearsal:
    """Forward without the blocks that `runs` leave out: on ghosts where they do, else on fakes."""
    prepared = prepare()
    if prepared.sizes is None:
        try:
            return _rehearsal(dataclasses.replace(prepared, ghosts=True), runs)
        except repeat.Formless:
            prepared = prepare()
    return _rehearsal(prepared, runs)


def _rehearsal(prepared: _Prepared, runs: repeat.Runs) -> repeat.Rehearsal:
    call, ghosts = prepared.call, prepared.ghosts
    with prepared.ready(runs=runs, told=False) as calls:
        leaves = repeat.leaves_of(call.model, runs)
        recorder = repeat.Recorder(leaves, repeat.Table(prepared.mode) if ghosts else None)
        fakes = prepared.fakes
        if ghosts:
            fakes = tuple(map(repeat.ghost_like, fakes))
        recorder.given(fakes)
        hooks = repeat.NoTensorHooks(recorder)
        with _while_traced(call), hooks, contextlib.ExitStack() as stack:
            if not ghosts:
                stack.enter_context(prepared.mode)
            stack.enter_context(recorder)
            outputs = call.forward(*fakes)
        recorder.finish(outputs)
    facts = [call.out_spec, call.out_names, call.out_constants, call.differentiable]
    facts += [call.tangents, call.repeats, call.replaced]
    if prepared.sizes is not None:
        facts.append(prepared.sizes.asked)
    return repeat.Rehearsal(recorder.lines, list(calls), facts, leaves)


@contextlib.contextmanager
def _read_by_dynamo(
    call: _Call, fakes: tuple[torch.Tensor, ...], mode: FakeTensorMode
) -> Iterator[None]:
    """Let `call` run Dynamo's graph in place of the model."""
    args, kwargs = precision.root_inputs(call.units, call.inputs(fakes))
    with _failures_told(call), precision.casting(call.model, call.units), call.mode():
        call.graph = bytecode.read(call.model, args, kwargs, mode)
    yield


def _fake_input(
    leaf: int, tensor: torch.Tensor, mode: FakeTensorMode, sizes: shapes.Trace | None
) -> torch.Tensor:
    symbolic = sizes.fake(leaf, tensor, mode) if sizes is not None else None
    if symbolic is not None:
        return symbolic
    return fake_like(tensor, mode).requires_grad_(tensor.requires_grad)  # of an nn.Parameter too


class _Call(nn.Module):
    """Calls the user's model on flat tensors; returns flat tensors, then new values of buffers.

    A buffer that forward replaces by another tensor (``self.seen = self.seen + 1``) is an output
    too, so that it can be written back as one that is changed in place is.

    Each output passes an ``_unsafe_view`` of its own shape, so that AOTAutograd treats an output
    that is a view as an output and not as a base to rebuild; canonicalize removes it again.
    """

    def __init__(
        self,
        model: nn.Module,
        flat: list[Any],
        in_spec: Any,
        positions: tuple[int, ...],
        grad: bool,
        units: tuple[Unit, ...],
        device: torch.device,
        stands_for_cuda: bool,
    ) -> None:
        super().__init__()
        self.model, self.units = model, units
        self._slots = _slots(model)
        self.flat, self.in_spec, self.positions, self.grad = list(flat), in_spec, positions, grad
        self.stands_for_cuda, self.every_tangent = stands_for_cuda, False
        self.autocast = _autocast(device.type, stands_for_cuda)
        self.told: Callable[..., Callable[..., None]] | None = None  # who is, of each run
        self.graph: bytecode.Graph | None = None
        self.out_spec: Any = None
        self.out_names: tuple[str, ...] = ()
        self.out_constants: tuple[tuple[Any] | None, ...] = ()
        self.differentiable: tuple[int, ...] = ()
        self.tangents: tuple[int, ...] = ()
        self.repeats: tuple[tuple[int, int], ...] = ()
        self.replaced: dict[str, bool] = {}  # buffers, and if their new values need a gradient
        self.counts: list[dict[tuple[int, str, Any], float]] = []  # before, and after each run

    def inputs(self, tensors: Sequence[torch.Tensor]) -> Any:
        """``(args, kwargs)`` with these tensors."""
        flat = list(self.flat)
        for i, tensor in zip(self.positions, tensors, strict=True):
            flat[i] = tensor
        return trees.tree_unflatten(flat, self.in_spec)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once: autograd sums up all that its uses say, in its own order."""
        return super().named_parameters(remove_duplicate=True)

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Each buffer once: forward writes one tensor, whatever it calls it."""
        return super().named_buffers(remove_duplicate=True)

    def _tie(self) -> None:
        """Let every other name of a parameter or buffer hold what its first one holds now: the
        trace puts its tensors there alone.
        """
        for (first, key), *others in self._slots:
            for slots, name in others:
                slots[name] = first[key]

    def _leaves(self, inputs: Sequence[torch.Tensor]) -> dict[int, str]:
        """Identity -> name of each parameter, buffer and input of this run."""
        named = (*self.named_parameters(), *self.named_buffers())
        found = {id(tensor): name for name, tensor in named}
        return found | {id(tensor): str(i) for i, tensor in enumerate(inputs)}

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """What is true of torch while the model runs."""
        with torch.set_grad_enabled(self.grad), self.autocast, hf.while_tracing(self.model):
            yield

    @provenance.enters
    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self.inputs(tensors)
        self._tie()
        self.counts = self.counts or [counters.of_modules(self.model)]
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        held = [
            *(("parameter", n, p, p.untyped_storage()) for n, p in self.model.named_parameters()),
            *(("buffer", n, b, b.untyped_storage()) for n, b in buffers.items()),
        ]
        with self.autocast, provenance.LinesNoted(self.told and self.told(self._leaves(tensors))):
            args, kwargs = precision.root_inputs(self.units, (args, kwargs))
            if self.graph is not None:
                attributes.note_all(self.model)
                out = self.graph.call(self.model, args, kwargs)
            elif isinstance(self.model, fx.GraphModule):
                out = _interpret(self.model, args, kwargs)
            else:
                with (
                    rng.unseeded(provenance.user_line),
                    arguments_kept(args, kwargs),
                    attributes.watching(),
                ):
                    out = self.model(*args, **kwargs)
            out = precision.root_output(self.units, out)
        _refuse_new_data(held)
        self.counts.append(counters.of_modules(self.model))
        paths, self.out_spec = trees.tree_flatten_with_path(out)
        values = [value for _, value in paths]
        self.out_names = tuple(path_name(path) or "output" for path, _ in paths)
        _refuse_opaque(self.out_names, values, "output")
        computed = [isinstance(value, (torch.Tensor, *torch_sizes.SYMBOLIC)) for value in values]
        is_tensor = [isinstance(value, torch.Tensor) for value in values]
        wants = [i for i, v in enumerate(values) if is_tensor[i] and v.requires_grad and self.grad]
        scalars = [i for i in wants if values[i].dim() == 0]
        self.differentiable = tuple(wants)
        first = {id(v): i for i, v in reversed([*enumerate(values)]) if isinstance(v, torch.Tensor)}
        self.repeats = tuple(
            (i, first[id(v)]) for i, v in enumerate(values) if first.get(id(v), i) != i
        )
        begins = wants if self.every_tangent else scalars or wants
        self.tangents = tuple({id(values[i]): i for i in begins}.values())  # the last of the same
        self.out_constants = tuple(
            None if computed[i] else (value,) for i, value in enumerate(values)
        )
        replaced = _replaced(buffers, dict(self.model.named_buffers(remove_duplicate=False)))
        self.replaced = {name: self.grad and v.requires_grad for name, v in replaced.items()}
        outputs = [
            v if i in self.tangents or not is_tensor[i] else v.detach()
            for i, v in enumerate(values)
            if computed[i]
        ]
        outputs += [value.detach() for value in replaced.values()]
        return [
            aten._unsafe_view(output, output.shape) if isinstance(output, torch.Tensor) else output
            for output in outputs
        ]


def _slots(model: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Per parameter and buffer of `model`, the dicts and keys that hold it, in order of names."""
    found: dict[int, dict[tuple[int, str], tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in both:
            for key, tensor in slots.items():
                if tensor is not None:
                    found.setdefault(id(tensor), {})[id(slots), key] = slots, key
    return [list(slots.values()) for slots in found.values()]


@contextlib.contextmanager
def arguments_kept(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Refuse a forward that changes a list, a dict or a dataclass that it was given.

    Raises:
        CaptureError: the caller's would stay as it was.
    """
    before, spec = trees.tree_flatten_with_path((args, kwargs))
    yield
    after, now = trees.tree_flatten_with_path((args, kwargs))
    held, found = dict(before), dict(after)
    changed = [p for p in {**held, **found} if held.get(p, _NOTHING) is not found.get(p, _NOTHING)]
    if changed or spec != now:
        where = input_name(changed[0]) if changed else "its arguments"
        raise CaptureError(
            f"forward changes a container that it was given ({where}), and a traced program leaves "
            f"the caller's as it was. Let forward change a copy (list(x), dict(x), "
            f"dataclasses.replace(x)) and return what is new."
        )


_NOTHING = object()


def _interpret(model: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a GraphModule node by node, so that new nodes inherit each node's module stack."""
    interpreter = fx.Interpreter(model)
    if graphs.takes_flat_inputs(model.graph):
        flat, _ = trees.tree_flatten((args, kwargs))
        out = interpreter.run(*flat, enable_io_processing=False)
        return model.graph.process_outputs(out)
    names = [node.target for node in model.graph.find_nodes(op="placeholder")]
    rest = [kwargs[name] for name in names[len(args) :] if name in kwargs]
    return interpreter.run(*args, *rest)


def _autocast(device: str, stands_for_cuda: bool) -> torch.autocast:
    """The autocast that the call runs under. Its cache of casts is off: it would outlive fakes."""
    given = "cuda" if stands_for_cuda and torch.is_autocast_enabled("cuda") else device
    return torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(given),
        enabled=torch.is_autocast_enabled(given),
        cache_enabled=False,
    )


def _replaced(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Buffers that are another tensor after forward than before it, each under its first name.

    Raises:
        CaptureError: one is new, gone, or of another shape, dtype or device, or another tensor
            under one of its names only.
    """
    for name in sorted(before.keys() ^ after.keys()):
        raise CaptureError(
            f"buffer {name!r} {'appears' if name in after else 'disappears'} during forward, which "
            f"a traced program cannot repeat. Register it with its shape in __init__."
        )
    replaced: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for name, old in before.items():
        new, known = after[name], first.setdefault(id(old), name)
        if new is not after[known]:
            raise CaptureError(
                f"forward replaces one tensor under one of its names only: buffers {known!r} and "
                f"{name!r}, which a traced program cannot repeat. Replace it under both, or change "
                f"it in place (copy_)."
            )
        if new is old or known != name:
            continue
        if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            raise CaptureError(
                f"buffer {name!r} is replaced during forward by another kind of tensor: "
                f"{list(old.shape)} {old.dtype} becomes {list(new.shape)} {new.dtype}, which a "
                f"traced program cannot repeat. Give it its final shape in __init__."
            )
        replaced[name] = new
    return replaced


def _refuse_new_data(
    held: Sequence[tuple[str, str, torch.Tensor, torch.UntypedStorage]],
) -> None:
    """Raise CaptureError for a tensor that lies in another storage now: no operator says so."""
    for kind, name, tensor, storage in held:
        if tensor.untyped_storage()._cdata != storage._cdata:
            own = name.rpartition(".")[2]
            raise CaptureError(
                f"{kind} {name!r} is given other memory during forward (.data = ...), which "
                f"a traced program cannot repeat. "
                + (
                    f"Write self.{own}.copy_(...) or self.{own} = ..., which it can."
                    if kind == "buffer"
                    else "Change it between steps."
                )
            )


def _refuse_opaque(names: tuple[str, ...], values: list[Any], what: str) -> None:
    """Raise CaptureError for an object that may hold tensors out of our sight."""
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, (torch.Tensor, *torch_sizes.SYMBOLIC, *PLAIN)):
            raise CaptureError(
                f"{what} {name} is a {type(value).__name__}, which fxshard cannot look into for "
                f"tensors. Use tensors and plain values, and dicts, lists, tuples and dataclasses "
                f"of them.{hf.remedy(value)}"
            )
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                f"{what} {name} has the layout {value.layout}, of which fxshard counts no bytes. "
                f"Pass a dense tensor, or indices and values."
            )


def _export(
    call: _Call, fakes: tuple[torch.Tensor, ...]
) -> tuple[fx.GraphModule, list[Any], list[Any]]:
    with _failures_told(call), _while_traced(call):
        return export.export_joint(call, fakes, call.stands_for_cuda)


@contextlib.contextmanager
def _while_traced(call: _Call) -> Iterator[None]:
    """What is true of torch around a trace."""
    with (
        torch.set_grad_enabled(call.grad),
        torch.autocast(call.autocast.device, enabled=False),
        export.compiling(),
        checkpointing.checkpoints_inline(),
        _attention_as_written(),
        hf.while_tracing(call.model),
        torch.fx.traceback.preserve_node_meta(),
    ):
        yield


@contextlib.contextmanager
def _attention_as_written() -> Iterator[None]:
    """Without gradients torch's transformer layers take a fused way, but never while make_fx runs.

    All runs of a trace take the other one (torch/nn/modules/activation.py, ``why_not_fast_path``).
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _failures_told(call: _Call) -> Iterator[None]:
    """Turn what torch raises into a CaptureError that names the line of the user's code."""
    try:
        yield
    except export.DATA_DEPENDENT_ERRORS as error:
        raise _TracerError(
            f"{type(call.model).__name__} cannot be traced: Python control flow or a shape depends "
            f"on the values of a tensor{refusals.line_of(error)}\n{refusals.remedy(error)}"
            f"{hf.remedy_of_values(call.model)}",
            from_data=True,
        ) from error
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error, repeat.Formless) or str(error).startswith(export.KEPT_BY_FORWARD):
            raise CaptureError(
                f"{type(call.model).__name__} cannot be traced: forward reads a tensor that an "
                f"earlier run of forward has made and kept{_kept(call.model)}"
                f"{refusals.line_of(error)}\nWhile tracing forward runs more than once, on tensors "
                f"without data. Make that tensor in __init__ (register_buffer), or "
                f"empty the cache and call the model once before it is planned or compiled."
            ) from error
        operator = export.higher_order_operator(error)
        if operator is not None:
            raise CaptureError(
                f"{type(call.model).__name__} cannot be traced: it calls the higher-order operator "
                f"{operator}{refusals.line_of(error)}\nA program has no branches and no loops. Use "
                f"torch.where, masking, or a loop of Python that is as long in every call."
            ) from error
        misfit = _misfit(call)
        if isinstance(error, TypeError) and misfit:
            raise CaptureError(
                f"{type(call.model).__name__} cannot be called as {_called(call)}: {misfit}.\n"
                f"Give the call to trace: args=(x,) for model(x), kwargs={{'name': y}} for "
                f"model(name=y)."
            ) from error
        text = (
            f"{type(call.model).__name__} cannot be traced ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}){refusals.line_of(error)}"
        )
        if ".numpy()" in str(error):
            text += "\nCompute it with torch, or outside of the model and pass it in."
        if "modified by an inplace operation" in str(error):
            text += (
                "\nThe backward of every output is traced, of those too that no loss reads: write "
                "y = y + x for y += x, or return the output detached."
            )
        text += f"\nThe call was {_called(call)}; args=(x,) stands for model(x)."
        if isinstance(error, (RuntimeError, TypeError)):  # others are the model's own
            raise _TracerError(text, from_data=False) from error
        raise CaptureError(text) from error


def _misfit(call: _Call) -> str:
    """What of the call the signature of forward does not take; "" if it takes all of it."""
    args, kwargs = trees.tree_unflatten(call.flat, call.in_spec)
    try:
        inspect.signature(call.model.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _called(call: _Call) -> str:
    """``model(float32[3, 4], labels=int64[3])``."""
    args, kwargs = trees.tree_unflatten(call.flat, call.in_spec)
    every = [_said(arg) for arg in args] + [f"{name}={_said(arg)}" for name, arg in kwargs.items()]
    return f"model({', '.join(every)})"


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


@contextlib.contextmanager
def _torch_silent() -> Iterator[None]:
    """What torch raises while it traces is told once, by us: not in forty lines of its log too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def drop(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def _kept(model: nn.Module) -> str:
    """``, as self.<name> of <class>``; or where else it may be."""
    for module in model.modules():
        for name, value in vars(module).items():
            if fake_tensors.is_fake(value):
                return f", as self.{name} of {type(module).__name__}"
    return ", in a global, a closure or a collection"


@contextlib.contextmanager
def _fake_state(
    model: nn.Module,
    like: Callable[..., torch.Tensor],
    dtypes: dict[int, torch.dtype | None],
    device: torch.device | None,
    told: bool = True,
) -> Iterator[None]:
    """Replace every parameter and buffer by a whole fake one; put all modules back afterwards.

    `like`: tensor, dtype and device -> what replaces it.
    `dtypes`: by identity, of those that the trace sees in another dtype. `device`: where
    parameters are whole, wherever they or their shards lie now; None: where they are. `told`: warn
    of attributes that forward assigns.
    """
    before = Snapshot(model)
    made: dict[int, torch.Tensor] = {}
    try:
        for module in model.modules():
            both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for slots in both:
                for name, tensor in slots.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        dtype = dtypes.get(id(tensor))
                        home = device if isinstance(tensor, nn.Parameter) else None
                        fake = like(tensor, dtype, home)
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, tensor.requires_grad)
                        made[id(tensor)] = fake
                    slots[name] = made[id(tensor)]
        yield
        if told:
            _tell_of(before)
    finally:
        before.restore()


def _tell_of(before: Snapshot) -> None:
    """Warn of what forward has changed in its modules."""
    for module, name in before.assigned():
        log.warning(
            "fxshard: forward of %s assigns self.%s; the traced program repeats what it computes, "
            "not the assignment.",
            type(module).__name__,
            name,
        )
    for module, name in before.changed():
        log.warning(
            "fxshard: forward of %s changes what self.%s holds; the traced program repeats what it "
            "computes, not the change.",
            type(module).__name__,
            name,
        )
