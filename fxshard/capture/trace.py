"""Model -> joint graph: one ATen graph of forward and backward, every node tagged.

The capture is AOTAutograd's joint export of the `nn.Module` itself, under fake tensors, with no
export or Dynamo before it: hooks and custom autograd functions run as in eager. Activation
checkpoints run inline; their nodes are marked, and `passes/checkpoint.py` does the rest.

`capture` tries one way after the other. The first is quick for deep models: a trace of few blocks,
of which the others follow (`_of_blocks`), else one of all of the model (`_of_all`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxshard._torch import (
    autograd,
    checkpointing,
    context_parallel,
    dtensors,
    export,
    fully_sharded,
    graphs,
    modes,
    traced_collectives,
)
from fxshard.capture import (
    aliasing,
    bytecode,
    hf,
    modules,
    precision,
    provenance,
    refusals,
    rng,
    shapes,
)
from fxshard.capture.alike import Alike
from fxshard.capture.call import FlatCall, Request, refuse_opaque
from fxshard.capture.cuda import operators as cuda_operators
from fxshard.capture.data_sizes import Told
from fxshard.capture.held import ModelSnapshot
from fxshard.capture.normalize import fake_like, normalize
from fxshard.capture.repeat import find, ghosts, prove, rehearse, write
from fxshard.capture.repeat.places import Formless, Runs, Unproven, Wider
from fxshard.capture.strides import KernelFakeMode
from fxshard.capture.swapped import as_users_own
from fxshard.config.environment import environment
from fxshard.errors import CaptureError
from fxshard.host import collector
from fxshard.ir import calls
from fxshard.ir.domain import Domain, Symbols
from fxshard.ir.extensions import Extension
from fxshard.ir.program import Program, Signature
from fxshard.ir.units import Unit
from fxshard.ir.whole import Whole

log: logging.Logger = logging.getLogger("fxshard")

DIRECT, OPEN, DYNAMO = WAYS = (
    "as it is",
    "with sizes and numbers from data left open",
    "as torch.compile's Dynamo reads it",
)


def as_module(model: Any) -> nn.Module:
    """The `nn.Module` in what the user may hand us.

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
    tangents: tuple[int, ...] | None = None,
    data_sizes: Told = None,
    whole: Whole | None = None,
) -> Program:
    """Trace one call of `model` into a Program that no pass has touched yet.

    Parameters may be real, meta, fake or sharded (DTensor); the trace sees full fake ones.
    Outputs that backward starts from ("tangents"): the scalar outputs that need a gradient (a
    loss) if there are any, else every output that needs one.

    Args:
        model: the module; left exactly as it was, also when the capture fails.
        args, kwargs: an example call; only shapes, dtypes and non-tensor values matter.
        units: the units of `model`, for the Program.
        world_size: number of shards, for the Program.
        training: trace backward too.
        device: where unsharded parameters are; None: where they are now.
        for_cuda: trace what PyTorch runs on CUDA, also where parameters are on the CPU.
        symbols: sizes of inputs that may be others in other calls; at least 2 in this one.
        every_tangent: backward starts from every output that needs a gradient, of whatever shape;
            for graphs of Dynamo, whose backend sees itself to inputs that share memory.
        tangents: backward starts from these outputs (flat indices) and no others.
        data_sizes: how large the sizes are that the model finds in its data.
        whole: what is traced is a whole step: its loss is the only output.

    Raises:
        ConfigError: `data_sizes` tells of what the model does not find, or what it cannot be.
        CaptureError: Python control flow depends on data, a trainable parameter lost its
            gradient, or torch refused the graph; names the line of the user's code.
    """
    refusals.check_captured()
    request = Request(
        *(model, args, kwargs, units, world_size, training, device),
        *(where_it_computes(model, device), for_cuda, symbols or {}, every_tangent),
        *(tangents, data_sizes, whole),
    )
    failures: dict[str, CaptureError] = {}
    try:
        with (
            as_users_own(model),
            hf.while_tracing(model),
            modes.unobserved(model),
            context_parallel.on_cpus(),
            refusals.torch_silent(),
        ):
            shapes.require_plain(request.leaves, request.names.__getitem__)
            refuse_opaque(request.names, request.leaves, "argument")
            before = ModelSnapshot(model)
            makes_dtensors = bool(request.placed) or context_parallel.state() is not None
            if makes_dtensors and request.symbols:
                raise CaptureError(
                    "sizes left open (dynamic=...) go together neither with tensor parallelism nor "
                    "with context_parallel: their DTensors are traced with the sizes of one call. "
                    "Leave dynamic out; each size gets a program of its own."
                )
            for way in WAYS[:2] if makes_dtensors else WAYS:
                if _is_worth(way, failures, request.symbols):
                    try:
                        with autograd.noting_saved_tensors_hooks() as entered:
                            found = _captured(request, before, way)
                    except CaptureError as error:
                        if not failures and not refusals.is_tracers(error):
                            raise
                        failures[way] = error
                    else:
                        refusals.refuse_saved_tensors_hooks(entered)
                        return found
        raise refusals.no_way(failures)
    finally:  # an error refers to this frame, and by it to what its callers hold: their outputs
        failures.clear()


def _is_worth(way: str, failures: dict[str, CaptureError], symbols: Symbols) -> bool:
    """Whether a way may go where those before did not."""
    if way == DIRECT:
        return True
    # With symbols the first way was the open one.
    return not symbols and (way != OPEN or refusals.asks_for_values(failures[DIRECT]))


def _captured(request: Request, before: ModelSnapshot, way: str) -> Program:
    """`capture`, one way."""
    mode = _mode(request)
    found = _of_blocks(request, before, mode) if way == DIRECT else None
    if found is None:
        found = _of_all(_setup(request, before, way, mode), mode)
    returned = found.call.returned
    positions = request.positions
    signature = Signature(
        in_spec=request.in_spec,
        out_spec=returned.spec,
        inputs=tuple(None if i in positions else v for i, v in enumerate(request.leaves)),
        tensor_inputs=positions,
        outputs=returned.constants,
        input_names=request.names,
        output_names=returned.names,
        tangents=returned.tangents,
        training=request.training and bool(returned.tangents),
        differentiable=returned.differentiable,
        repeats=returned.repeats,
        placed=returned.placed,
    )
    program = Program(
        graph=found.traced.graph,
        results=[],
        signature=signature,
        constants={},
        units=request.units,
        world_size=request.world_size,
        device=request.computes_on,
        fake_mode=mode,
        calls=tuple(found.calls),
        domain=found.domain,
    )
    traced = found.traced
    normalize(program, found.owner, traced.sources, traced.targets, returned.replaced)
    if not request.every_tangent:
        given = {str(i): request.leaves[i] for i in positions}
        aliasing.refuse_written(program, request.model, given, tuple(returned.replaced))
    hf.refuse_packed(program.graph)
    return program


@dataclasses.dataclass(frozen=True)
class _TracedCall:
    """A call that has been traced.

    Attributes:
        call: it.
        traced: its graph; every value is a fake one of the example call.
        owner: holds the constants of the graph.
        calls: of modules, in the order of forward.
        domain: the sizes that it serves.
    """

    call: FlatCall
    traced: write.JointGraph
    owner: fx.GraphModule
    calls: Sequence[calls.Call]
    domain: Domain | None


def _of_all(setup: _Setup, mode: KernelFakeMode) -> _TracedCall:
    """All of the model, traced. The values of the graph become those of `mode`."""
    traced, owner, calls = _traced(setup)
    domain = setup.concretize(owner.graph, mode)
    graph = setup.call.graph
    return _TracedCall(setup.call, traced, owner, calls if graph is None else graph.calls, domain)


def _of_blocks(request: Request, before: ModelSnapshot, mode: KernelFakeMode) -> _TracedCall | None:
    """The same from a trace of fewer blocks, where that is proven; else None, and a line says why.

    An error of the model is left to `_of_all`, which explains it.
    """
    model = request.model
    if isinstance(model, fx.GraphModule) or environment().flat_capture:
        return None
    if request.extended or context_parallel.state() is not None:
        return None
    lists, why = find.lists(model)
    if not (lists or why):
        return None
    try:
        with collector.off(), modes.rng_kept():
            if not lists:
                raise Unproven(why)
            if before.has_iterators:
                raise Unproven("its code holds an iterator, which no rehearsal can put back")
            # One set of symbols: what any block asks of them is in the domain of the program.
            sizes = (
                shapes.Trace.of(request.leaves, request.symbols, request.data_sizes)
                if request.symbols
                else None
            )
            setup = functools.partial(_setup, request, before, DIRECT, sizes=sizes)
            table = ghosts.Table(setup().mode)
            full = _rehearsed(setup, table, ())
            for right in find.RIGHT:
                try:
                    repeats = prove.proven(
                        model, full, functools.partial(_rehearsed, setup, table), right
                    )
                    return _stamped(setup(mode), mode, repeats)
                except Wider:
                    if right == find.RIGHT[-1]:
                        raise
    except Exception as reason:
        lines = str(reason).splitlines() or [type(reason).__name__]
        log.info("fxshard: %s is captured block by block: %s", type(model).__name__, lines[0])
    return None


def _stamped(setup: _Setup, mode: KernelFakeMode, repeats: prove.Repeats) -> _TracedCall:
    """What is left of the model, traced; the blocks left out, stamped."""
    call = setup.call
    with graphs.nodes_made() as made:
        traced, owner, calls = _traced(setup, repeats.runs)
    noted = write.note(owner.graph, made, calls, repeats.runs)
    domain = setup.concretize(owner.graph, mode)
    traced = write.written(traced, noted, repeats, mode, call.grad)
    return _TracedCall(call, traced, owner, repeats.full.calls, domain)


def _rehearsed(setup: Callable[[], _Setup], table: ghosts.Table, runs: Runs) -> rehearse.Rehearsal:
    """Forward without the blocks that `runs` leave out: on ghosts where they do, else on fakes."""
    try:
        return _rehearsal(dataclasses.replace(setup(), ghosts=table), runs)
    except Formless:
        return _rehearsal(setup(), runs)


def _rehearsal(setup: _Setup, runs: Runs) -> rehearse.Rehearsal:
    call, fakes, table = setup.call, setup.fakes, setup.ghosts
    with setup.ready(runs, rehearses=True) as calls:
        leaves = rehearse.leaves_of(call.model, runs)
        if table is not None:
            fakes = tuple(map(ghosts.ghost_like, fakes))
        recorder = rehearse.RehearsalRecorder(leaves, table)
        recorder.given(fakes)
        mode = contextlib.nullcontext() if table is not None else setup.mode
        # As in a trace, with open sizes: C++ kernels would take some of them as numbers.
        kernels = modes.python_kernels() if setup.sizes else contextlib.nullcontext()
        with (
            _around(call),
            fully_sharded.propagation_unseen(),
            dtensors.applied(recorder.applied),
            rehearse.NoTensorHooks(recorder),
            kernels,
            mode,
            recorder,
        ):
            outputs = call.forward(*fakes)
        recorder.finish(outputs)
    return rehearse.Rehearsal(recorder.lines, list(calls), call.returned, leaves)


def _traced(
    setup: _Setup, runs: Runs = ()
) -> tuple[write.JointGraph, fx.GraphModule, list[calls.Call]]:
    """The model without the blocks that `runs` leave out, traced.

    Returns:
        its graph, the owner of the graph's constants, and the calls of modules.
    """
    call = setup.call
    call.alike = Alike(call.model)
    with setup.ready(runs) as calls:
        with refusals.explained(call), _around(call):
            owner, *ends = export.export_joint(call, setup.fakes, call.emulates_cuda)
        call.alike.require(open_sizes=setup.sizes is not None)
    return write.JointGraph(owner.graph, *ends), owner, calls


@contextlib.contextmanager
def _around(call: FlatCall) -> Iterator[None]:
    """What is true of torch around a trace.

    Without gradients torch's transformer layers take a fused way, but never while make_fx runs:
    all runs of a trace take the other one (torch/nn/modules/activation.py, ``why_not_fast_path``).
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    with (
        torch.set_grad_enabled(call.grad),
        torch.autocast(call.autocast.device, enabled=False),
        export.compiling(),
        checkpointing.checkpoints_inline(),
        torch.fx.traceback.preserve_node_meta(),
        traced_collectives.traced(refusals.of_collective),
    ):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def _mode(request: Request, shape_env: Any = None) -> KernelFakeMode:
    cls = cuda_operators.CudaFakeMode if request.emulates_cuda else KernelFakeMode
    return cls(allow_non_fake_inputs=True, shape_env=shape_env)


def _setup(
    request: Request,
    before: ModelSnapshot,
    way: str,
    mode: KernelFakeMode | None = None,
    sizes: shapes.Trace | None = None,
) -> _Setup:
    """The call in a trace of its own; its fakes are of `mode` if no size is open.

    Args:
        sizes: the symbols of its open sizes; None: new ones.
    """
    tracing, leaves = mode or _mode(request), request.leaves
    if request.symbols or way != DIRECT:
        sizes = sizes or shapes.Trace.of(leaves, request.symbols, request.data_sizes)
        tracing = _mode(request, sizes.env)
        leaves = [sizes.number(i, leaf) for i, leaf in enumerate(leaves)]
    fakes: list[torch.Tensor] = []
    for i in request.positions:
        device = request.device_of(leaves[i])
        fake = None if sizes is None else sizes.fake(i, leaves[i], tracing, device)
        if fake is None:
            fake = fake_like(leaves[i], tracing, device=device)
            fake.requires_grad_(leaves[i].requires_grad)  # of an nn.Parameter too
        fakes.append(fake)
    return _Setup(FlatCall(request, leaves, sizes), tuple(fakes), tracing, sizes, before, way)


@dataclasses.dataclass(frozen=True)
class _Setup:
    """A call that is about to be traced.

    Attributes:
        call: it.
        fakes: the tensors that it is traced with.
        mode: owner of its fake tensors.
        sizes: symbols of its open sizes, if it has any.
        before: what the model held.
        way: one of `WAYS`.
        ghosts: makes what takes the place of the tensors of the model, in a rehearsal.
    """

    call: FlatCall
    fakes: tuple[torch.Tensor, ...]
    mode: KernelFakeMode
    sizes: shapes.Trace | None
    before: ModelSnapshot
    way: str
    ghosts: ghosts.Table | None = None

    @contextlib.contextmanager
    def ready(self, runs: Runs = (), *, rehearses: bool = False) -> Iterator[list[calls.Call]]:
        """The model in the state in which it is traced; yields its calls as they are made.

        Args:
            runs: blocks that are left out; calls have the names in the full model.
            rehearses: warn of nothing, the same is to be traced again.
        """
        call, model, units = self.call, self.call.model, self.call.request.units
        dtypes = precision.traced_dtypes(model, units)
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            stack.callback(self.before.restore)
            if self.sizes is not None:
                enter(self.sizes.asked_once())
            if call.emulates_cuda:
                enter(cuda_operators.substituted())
            if self.way == DYNAMO:
                self._put_fakes(dtypes)
                self._read_by_dynamo()
            calls = enter(provenance.calls_noted(model))
            enter(rng.only_torch_s(model, by_name=not rehearses))
            enter(precision.casting(model, units))
            enter(precision.recurrent_autocast())
            if self.way != DYNAMO:
                enter(find.shortened(model, runs))
                self._put_fakes(dtypes)
            yield calls
            if not rehearses:
                _warn_of_changes(self.before)

    def _put_fakes(self, dtypes: dict[int, torch.dtype | None]) -> None:
        """Replace every parameter and buffer by a full one without data.

        Args:
            dtypes: by identity, of those that the trace sees in another dtype.
        """
        made: dict[int, torch.Tensor] = {}
        extended, placed = self.call.request.extended, self.call.request.placed
        for tensors, key, tensor in modules.slots(self.call.model):
            if id(tensor) not in made:
                is_parameter = isinstance(tensor, nn.Parameter)
                home = self.call.request.device_of(tensor)
                if is_parameter:
                    home = self.call.request.device or home
                if id(tensor) in extended:
                    fake = self._around_fakes(extended[id(tensor)], home)
                elif id(tensor) in placed:
                    local = torch.empty(placed[id(tensor)].local_shape, device="meta")
                    dtype = dtypes.get(id(tensor)) or tensor.dtype
                    fake = self._like(local, dtype, home)
                else:
                    fake = self._like(tensor, dtypes.get(id(tensor)), home)
                if is_parameter:
                    fake = nn.Parameter(fake, tensor.requires_grad)
                made[id(tensor)] = fake
            tensors[key] = made[id(tensor)]

    def _like(self, tensor: torch.Tensor, *kind: Any) -> torch.Tensor:
        """One without data in its place, of another dtype or device if `kind` says so."""
        return (
            ghosts.ghost_like(tensor, *kind)
            if self.ghosts is not None
            else fake_like(tensor, self.mode, *kind)
        )

    def _around_fakes(self, extension: Extension, home: torch.device) -> torch.Tensor:
        """What `fsdp_post_all_gather` makes of a parameter, a subclass, without data."""
        traced = extension.traced(1)  # what is made does not depend on the ranks
        with self.mode:
            inner = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=home)
                for t in traced.results
            ]
        return traced.form.around(inner, extension.shape)

    def _read_by_dynamo(self) -> None:
        """Let the call run Dynamo's graph in place of the model."""
        call, units = self.call, self.call.request.units
        args, kwargs = precision.root_inputs(units, call.inputs(self.fakes))
        with (
            refusals.explained(call),
            precision.casting(call.model, units),
            torch.set_grad_enabled(call.grad),
            call.autocast,
        ):
            alike, found = Alike(call.model), []
            for _ in range(2):
                alike.begin({})
                found.append(bytecode.read(call.model, args, kwargs, self.mode))
                alike.end()
            alike.require(open_sizes=False)
            if not found[0].does_as(found[1]):
                raise alike.refusal()
        call.graph = found[0]

    def concretize(self, graph: fx.Graph, mode: KernelFakeMode) -> Domain | None:
        """Make every value of `graph` a fake one of `mode`, of the example call."""
        return None if self.sizes is None else shapes.concretize(graph, self.sizes, mode)


def _warn_of_changes(before: ModelSnapshot) -> None:
    """Warn of what forward has changed in its modules, and of tensors that their code keeps."""
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
    for where in dict.fromkeys(before.kept_by_code()):
        log.warning(
            "fxshard: forward keeps a tensor in %s that its code holds: a global, or one of a "
            "class or of a closure. The traced program repeats what it computes, not that: return "
            "it.",
            where,
        )
