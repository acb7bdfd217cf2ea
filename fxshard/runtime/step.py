"""How programs run: the arguments of phases, and the autograd node of a call."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import starmap
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from fxshard._torch import autograd, transforms
from fxshard.capture import rng, shapes
from fxshard.capture.swapped import users_class
from fxshard.codegen.emit import Executor
from fxshard.errors import StepError
from fxshard.ir import tags, transfers
from fxshard.ir.program import Program
from fxshard.runtime.between import Between
from fxshard.runtime.other_outputs import Begin, call_of, require_repeatable, run_again
from fxshard.runtime.read_tensors import ReadTensor
from fxshard.runtime.sharding import Sharding, as_gradient
from fxshard.runtime.stage import Stage
from fxshard.runtime.store.reads import refuse_captured_backward, require_all_wanted
from fxshard.runtime.store.unsharded import UnshardableStore
from fxshard.runtime.store.versions import state_of
from fxshard.runtime.unused import Reach
from fxshard.runtime.variants import Variant
from fxshard.runtime.world.in_process import InProcessWorld

# Roles of arguments of backward that forward has not saved.
_GIVEN = (*tags.HELD, "accumulated", "partial", "tangent")
_Part = tuple[str, str]  # role and FQN
_Noted = tuple[weakref.ref[Tensor], int] | None  # a tensor, and how often it had been written


class Phases(UnshardableStore):
    """A store on which programs run: arguments of phases, and what an exception leaves undone.

    Attributes:
        refusals: why calls are refused: by what an exception left half-written, the reason, and
            each part (role and FQN) as it was then.
        just_stepped: parameters that the last backward has stepped.
        between: what calls leave unsharded for their backwards, which have not run.
        stage: of a pipeline, if the model is one.
    """

    def __init__(self, sharding: Sharding) -> None:
        super().__init__(sharding)
        self.refusals: dict[str, tuple[str, dict[_Part, _Noted]]] = {}
        self.just_stepped: list[str] = []
        self.between: list[weakref.ref[Between]] = []
        self.stage: Stage | None = Stage() if self.config.pipeline_stage else None

    def drop_kept(self, units: Collection[int] | None = None) -> None:
        super().drop_kept(units)
        if self.stage is not None:
            self.stage.free(self, units)

    def take(self, fqns: list[str]) -> list[list[Tensor]]:
        """Those of a stage are shared by its calls."""
        if self.stage is not None:
            return [[self.stage.rows[fqn] for fqn in fqns]]
        return super().take(fqns)

    def keep(self, fqns: list[str], ranks: list[list[Tensor]]) -> None:
        if self.stage is None:
            super().keep(fqns, ranks)

    def drop_sums(self) -> None:
        """Drop gradients that are accumulated and not reduced."""
        self.accumulated.clear()
        self.partial.clear()
        self.refusals.pop("accumulated", None)

    def free_unsharded(self, units: Collection[int] | None = None) -> None:
        """Free what backwards have kept, and what forwards have left for theirs.

        Args:
            units: of these; None: of all.

        Raises:
            RankMismatchError: some ranks free what others need in a backward.
        """
        self.drop_kept(units)
        calls = [each for each in (known() for known in self.between) if each is not None]
        freed = [fqn for each in calls for fqn in each.free(units)]
        if freed:
            self.world.together("reshard between a forward and its backward", sorted(freed))

    def arguments(self, variant: Variant, batch: Sequence[Tensor]) -> list[list[Tensor]]:
        """Per rank that this process runs, the values of forward's placeholders, or a step's.

        Raises:
            StepError: a phase failed, and has left gradients, parameters or buffers half-written.
        """
        self._require_complete()
        ranks = self.world.ranks if isinstance(self.world, InProcessWorld) else 1
        program, executor = variant.program, variant.executor
        nodes = executor.step_inputs if program.whole else executor.forward_inputs
        rows = [[self.value(node, program, batch, rank) for node in nodes] for rank in range(ranks)]
        for row in rows[1:]:  # each rank writes one of its own; the first one's is kept
            for i, tag in enumerate(map(tags.get, nodes)):
                if (tag.role, tag.fqn) in variant.written:
                    row[i] = row[i].clone()
        return rows

    def value(self, node: fx.Node, program: Program, batch: Sequence[Tensor], rank: int) -> Tensor:
        """The value of a placeholder of `program`, on one of the ranks of this process."""
        tag = tags.get(node)
        name = tag.fqn or ""
        if tag.role == "shard":
            slot = self.slots[name]
            return slot.sent(rank % len(slot.shards))  # replicas inside one process share theirs
        if tag.role == "ignored":
            return self.ignored_param(name)
        if tag.role == "accumulated":
            if name not in self.accumulated:  # dropped since forward, by zero_grad
                val = node.meta["val"]
                zeros = torch.zeros(val.shape, dtype=val.dtype, device=self.device)
                if self.stage is None:
                    return zeros
                self.accumulated[name] = [zeros]  # the first backward of a schedule
            return self.accumulated[name][rank]
        if tag.role == "partial":
            if name not in self.partial:
                val = node.meta["val"]
                return torch.zeros(val.shape, dtype=val.dtype, device=self.device)
            return self.partial[name][rank]
        if tag.role == "input":
            return batch[program.signature.tensor_inputs.index(int(name))]
        if name in program.constants:
            return program.constants[name]
        return self._buffer(name)

    def _buffer(self, name: str) -> Tensor:
        module, key = self.structure.buffers[name]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def executor_of(self, program: Program) -> Executor:
        """What runs `program` on these ranks."""
        raise NotImplementedError

    def runs(self, variant: Variant) -> None:
        """Let the other ranks see what this call runs."""
        raise NotImplementedError

    @contextlib.contextmanager
    def as_traced(self, variant: Variant | None = None) -> Iterator[None]:
        """The context that a program runs in: its casts are in the graph, so autocast is off.

        The frames of an exception refer to unsharded parameters, activations and gradients. They
        are cleared here, so that these do not live as long as the exception. Forward writes its
        buffers last, one after the other: calls are refused if an exception came in between.

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
        self.refusals[what] = why, {part: self._noted(part) for part in parts}

    def _noted(self, part: _Part) -> _Noted:
        role, fqn = part
        tensor = self._buffer(fqn) if role == "buffer" else self.slots[fqn].tensor
        return weakref.ref(tensor), autograd.version(tensor)

    def _require_complete(self) -> None:
        for what, (why, parts) in list(self.refusals.items()):
            if not parts or any(starmap(self._is_unwritten, parts.items())):
                raise StepError(why)
            del self.refusals[what]

    def _is_unwritten(self, part: _Part, noted: _Noted) -> bool:
        now = self._noted(part)
        if noted is None or now is None:
            return True
        return noted[0]() is now[0]() and noted[1] == now[1]

    def fresh(self) -> dict[str, Any]:
        """A copy is refused as its original is; `note_parts` notes the parts of the copy."""
        items = self.refusals.items()
        refusals = {what: (why, dict.fromkeys(parts)) for what, (why, parts) in items}
        stage = Stage() if self.config.pipeline_stage else None
        return super().fresh() | {"refusals": refusals, "between": [], "stage": stage}

    def restored(self) -> None:
        super().restored()
        self.note_parts()

    def note_parts(self) -> None:
        """Note the parts of a copy that is now complete: it is refused until they are written."""
        for what, (why, parts) in self.refusals.items():
            self.refuse_until_written(what, why, list(parts))


@dataclasses.dataclass
class AutogradCall:
    """One call on its way through autograd.

    Attributes:
        runtime: of the model.
        variant: what runs.
        params: FQNs of the parameters that may get a gradient.
        shared: unsharded parameters that other calls of a pipeline's stage read too, by FQN.
        starting: finds the program that starts backward at other outputs, of a call ``(args,
            kwargs)``; None if any output that needs a gradient is one that `variant` starts at.
    """

    runtime: Phases
    variant: Variant
    params: list[str]
    starting: Callable[[AutogradCall, Any, tuple[int, ...]], Variant] | None = None
    shared: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class Step(autograd.UncapturedFunction):
    """The node of the model in the user's autograd graph.

    Saved values are a plain list on the context; backward takes it over and drops it, unless it is
    to retain the graph. The gradients that arrive are a list too (``boxed_grads_call``).
    """

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, call: AutogradCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        batch = tensors[len(call.params) :]
        executor = call.variant.executor
        draws = call.starting is not None and "forward" in executor.draws
        ctx.begin = Begin(rng.noted(call.variant.program.device) if draws else None)
        with call.runtime.as_traced(call.variant):
            outputs, saved = executor.forward(call.runtime.arguments(call.variant, batch))
        signature = call.variant.program.signature
        ctx.set_materialize_grads(False)
        where = signature.computed_outputs
        are_tensors = [k for k, output in enumerate(outputs) if isinstance(output, Tensor)]
        plain = [k for k in are_tensors if where[k] not in signature.differentiable]
        for k in plain:
            outputs[k] = outputs[k].detach()  # the same tensor may be a differentiable output too
        ctx.places = {position: k for k, position in enumerate(where)}
        _keep_identities(outputs, [(ctx.places[i], ctx.places[j]) for i, j in signature.repeats])
        ctx.mark_non_differentiable(*(outputs[k] for k in plain))
        returned = {id(outputs[k]) for k in are_tensors}
        # An output that is saved too must not keep its own autograd node alive.
        ctx.saved = [[t.detach() if id(t) in returned else t for t in rank] for rank in saved]
        ctx.exposed = _exposed(outputs, ctx.saved)
        stay = [param for unit in call.runtime.units if unit.stays for param in unit.params]
        ctx.states = {param.fqn: state_of(call.runtime.slots[param.fqn]) for param in stay}
        ctx.between = None
        if call.runtime.stage is not None:
            call.runtime.stage.begin_forward(call)
        elif call.variant.left_unsharded and len(ctx.saved) == 1:  # not all ranks in one process
            places = call.variant.left_unsharded.items()
            rows = {fqn: ctx.saved[0][place] for fqn, place in places}
            ctx.between = Between(call.runtime, rows)
            alive = [known for known in call.runtime.between if known() is not None]
            call.runtime.between = [*alive, weakref.ref(ctx.between)]
        ctx.call, ctx.batch = call, batch
        ctx.read = _read(call, batch, call.variant.read_again)
        if call.starting is not None:
            ctx.begin.read = _read(call, batch, executor.forward_inputs)
        ctx.shapes = {k: outputs[k].shape for k in are_tensors}
        return tuple(outputs)

    @staticmethod
    def refuse_capture(ctx: Any) -> NoReturn:
        refuse_captured_backward(users_class(ctx.call.runtime.model).__name__)

    @staticmethod
    @torch.compiler.disable(reason="fxshard runs a program of its own")  # in a compiled step
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # in a backward, with create_graph=True only
            name = users_class(ctx.call.runtime.model).__name__
            raise StepError(
                f"backward with create_graph=True through {name}: gradients of a program have no "
                f"graph of their own, and whatever is computed of them would get no gradient. "
                f"Compute the gradient and what is made of it (a gradient penalty, say) inside of "
                f"forward, by torch.autograd.grad(..., create_graph=True), and return it as a part "
                f"of the loss: that is traced, its second derivatives too."
            )
        grads = autograd.boxed(given)
        if any(grad is not None and transforms.is_transformed(grad) for grad in grads):
            raise StepError(
                f"backward through {users_class(ctx.call.runtime.model).__name__} inside of a "
                f"transform (is_grads_batched=True, vmap): a program takes one gradient of each "
                f"output. Call torch.autograd.grad(..., retain_graph=True) once for each."
            )
        runtime: Phases = ctx.call.runtime
        runtime.reshard()  # of an `unshard` that nobody ended
        runtime.require_sharded("backward")
        if ctx.saved is None:
            raise StepError(
                "backward was called twice on one forward, or has failed before: its saved "
                "activations are gone. Give retain_graph=True to all but the last backward, run "
                "forward again, or sum the losses and call backward once."
            )
        if ctx.between is not None:
            ctx.between.restore()
        arrived = tuple(position for position, k in ctx.places.items() if grads[k] is not None)
        kept, batch = autograd.keeps_graph(), ctx.batch
        stage, counts = runtime.stage, True
        if stage is not None:
            counts, kept = stage.begin_backward(runtime, ctx.call, ctx.next_functions[0][0], kept)
        call, saved = _unchanged(ctx, arrived, kept)
        _require_parameters(ctx, call)
        if not kept:
            # They die after their last readers.
            ctx.saved = ctx.batch = ctx.exposed = ctx.between = ctx.begin = None
        program = call.variant.program
        missing = frozenset(program.signature.tangents) - {*arrived}
        executor = call.variant.backward_without(missing, runtime.executor_of)
        tangents: dict[str | None, Tensor | None] = {}
        for node in executor.backward_inputs:
            if tags.get(node).role == "tangent":
                k = ctx.places[int(tags.get(node).fqn or 0)]
                if not node.users:
                    grads[k] = tangents[tags.get(node).fqn] = None
                    continue
                tangents[tags.get(node).fqn] = _laid_out(grads[k], node, ctx.shapes[k])
                if tangents[tags.get(node).fqn] is grads[k]:
                    grads[k] = None  # dies after its last reader; a copied one stays to the end
        runtime.require_accumulated(program)
        with contextlib.nullcontext() if counts else _without_sums(runtime):
            args = _backward_arguments(call, executor, batch, saved, tangents, ctx.read, kept)
            del saved
            if not kept:
                ctx.read = None
            tangents.clear()
            reach, world = runtime.reach, runtime.world
            waiting = [*runtime.accumulated, *runtime.partial]
            unused = reach.begin(program, arrived, world, waiting)
            world.begin_backward(ctx.call)
            runtime.gathered_in = ctx.states
            try:
                with runtime.as_traced(), undone_or_refused(call):
                    results = executor.backward(args)
            finally:
                runtime.gathered_in = {}
        if stage is not None and counts:
            _add_ignored(call, results)
        return (None, *_gradients(call, results, len(batch), unused | reach.unused()))


@contextlib.contextmanager
def _without_sums(runtime: Phases) -> Iterator[None]:
    """A backward in the block adds to no accumulated gradients."""
    sums, reach = runtime.accumulated, runtime.reach
    runtime.accumulated, runtime.reach = {}, Reach()
    try:
        yield
    finally:
        runtime.accumulated, runtime.reach = sums, reach


def _add_ignored(call: AutogradCall, results: list[list[Tensor]]) -> None:
    """Add the gradients of ignored parameters of a stage to their ``.grad``, as autograd would."""
    for result, grad in zip(
        (r for r in call.variant.program.results if r.kind != "output"), results[0], strict=True
    ):
        if result.name in call.runtime.ignored:
            param = call.runtime.ignored_param(result.name)
            param.grad = grad if param.grad is None else param.grad.add_(grad)


def _unchanged(
    ctx: Any, arrived: tuple[int, ...], kept: bool
) -> tuple[AutogradCall, list[list[Tensor]]]:
    """The call to run backward of, and its saved values, per rank of this process.

    It is the one that ran forward, if its program starts backward where gradients have arrived; if
    not, one that runs forward again.

    Args:
        ctx: of the autograd node.
        arrived: outputs whose gradients have arrived.
        kept: the saved values will be used again: those that backward ends are copied.

    Raises:
        StepError: what forward has read was changed, or it cannot run again.
    """
    call: AutogradCall = ctx.call
    signature = call.variant.program.signature
    others = [position for position in arrived if position not in signature.tangents]
    elsewhere = bool(others)
    for each in ctx.begin.read if elsewhere else ctx.read:
        if each.has_changed():
            text = (
                f"{each.what!r} was changed in place between a forward and its backward, which "
                f"reads it. Call backward first (before optimizer.step()), or change a copy."
            )
            if each.slot is not None:
                text += (
                    " It may have been another parameter: shards lie in one storage, and torch "
                    "counts what is written per storage."
                )
            raise StepError(text)
    if elsewhere:
        assert call.starting is not None
        now = _read(call, ctx.batch, call.variant.executor.forward_inputs)
        for was, is_now in zip(ctx.begin.read, now, strict=True):
            if was.slot is None and was.tensor is not is_now.tensor:
                raise StepError(
                    f"{was.what!r} was exchanged for another tensor between a forward and its "
                    f"backward, which runs forward again, as it starts at other outputs than any "
                    f"before. Call backward first, or write the values in place after it."
                )
        variant = call.starting(call, call_of(signature, ctx.batch), arrived)
        require_repeatable(variant.program, call.variant.written)
        call.runtime.world.begin_backward(call)
        call.runtime.runs(variant)
        saved = run_again(call.runtime, variant, ctx.batch, ctx.begin)
        return dataclasses.replace(call, variant=variant), saved
    changed = [list(t.shape) for t, before in ctx.exposed if autograd.version(t) != before]
    if changed:
        name = users_class(call.runtime.model).__name__
        raise StepError(
            f"an output of {name}, of shape {changed[0]}, was changed in place between a "
            f"forward and its backward, which reads it. Change a copy: y = y.clone()."
        )
    if not kept:
        return call, ctx.saved
    nodes = [n for n in call.variant.executor.backward_inputs if tags.get(n).role not in _GIVEN]
    ends = [node.name in call.variant.consumed for node in nodes]
    copies = [
        [t.clone() if end else t for t, end in zip(rank, ends, strict=True)] for rank in ctx.saved
    ]
    return call, copies


def _require_parameters(ctx: Any, call: AutogradCall) -> None:
    """Raise StepError if this backward drops gradients that it steps or accumulates."""
    runtime, program = call.runtime, call.variant.program
    stepped, sums = program.optimizer_in_backward, runtime.accumulated or runtime.partial
    if stepped or sums or any(program.reduces(fqn) != "all" for fqn in program.params):
        trained = {*differentiated(program)}
        params = zip(call.params, ctx.next_functions, strict=False)
        nodes = [node for fqn, (node, _) in params if fqn in trained and node is not None]
        what = "optimizer_in_backward steps" if stepped else "no_sync accumulates"
        require_all_wanted(nodes, what)


def _keep_identities(outputs: list[Any], repeats: Sequence[tuple[int, int]]) -> None:
    """Return one tensor twice where eager does, and nowhere else: graphs merge equal values.

    For one tensor that is returned twice, autograd gives the sum of the gradients to the last
    place. Two tensors that share memory have a gradient each.
    """
    again = dict(repeats)
    seen: set[int] = set()
    for k, output in enumerate(outputs):
        if k in again:
            outputs[k] = outputs[again[k]]
        elif isinstance(output, Tensor) and id(output) in seen:
            outputs[k] = output.detach()
        seen.add(id(outputs[k]))


@contextlib.contextmanager
def undone_or_refused(call: AutogradCall) -> Iterator[None]:
    """After an exception in backward, restore the sums of gradients, or refuse further calls.

    Calls are refused if backward has already added to accumulated gradients or stepped parameters.
    Gradients are added in place, and freed once they are reduced: a copy to restore them from would
    take as much memory again.
    """
    runtime, program = call.runtime, call.variant.program
    taken = [(runtime.accumulated, program.accumulated), (runtime.partial, program.partial)]
    before = [
        (sums, fqn, [(weakref.ref(t), autograd.version(t)) for t in sums[fqn]])
        for sums, fqns in taken
        for fqn in sorted(fqns & sums.keys())
    ]
    for sums, fqn, _ in before:  # reduced by this backward, which frees them
        if program.reduces(fqn) != "none":
            del sums[fqn]
    runtime.just_stepped.clear()
    try:
        yield
    except BaseException as error:
        what = "a step" if program.whole else "backward"
        ended = f"{what} ended with an exception ({type(error).__name__})"
        found = [(sums, fqn, [(ref(), v) for ref, v in refs]) for sums, fqn, refs in before]
        left = [pair for *_, pairs in found for pair in pairs]
        if all(t is not None and autograd.version(t) == v for t, v in left):
            for sums, fqn, pairs in found:
                sums[fqn] = [t for t, _ in pairs if t is not None]
        else:
            for sums, fqn, _ in found:
                sums.pop(fqn, None)
            runtime.refusals["accumulated"] = (
                f"{ended} that had added to the gradients accumulated under no_sync, and they are "
                f"lost: call zero_grad() of the model, and begin with the first micro-batch.",
                {},
            )
        if runtime.just_stepped:
            runtime.refuse_until_written(
                "stepped",
                f"{ended} that had stepped {runtime.just_stepped[0]!r} and not all parameters "
                f"({'compile_step' if program.whole else 'optimizer_in_backward=True'}): load the "
                f"last checkpoint.",
                [("shard", fqn) for fqn in transfers.stepped(program)],
            )
        raise


def _read(
    call: AutogradCall, batch: Sequence[Tensor], nodes: Sequence[fx.Node]
) -> list[ReadTensor]:
    """The tensors of the caller among some placeholders."""
    program, slots = call.variant.program, call.runtime.slots
    found: list[ReadTensor] = []
    with autograd.plain_torch_functions():
        for node in nodes:
            tag = tags.get(node)
            role, name = tag.role, tag.fqn or ""
            if role not in tags.HELD:
                continue
            slot = slots[name] if role == "shard" else None
            tensor = slot.tensor if slot else call.runtime.value(node, program, batch, 0)
            what = program.signature.input_names[int(name)] if role == "input" else name
            found.append(ReadTensor.noted((role, name), what, tensor, slot))
    return found


def _exposed(outputs: Sequence[Tensor], saved: list[list[Tensor]]) -> list[tuple[Tensor, int]]:
    """The saved values that share memory with outputs, each with its version now."""
    returned = {o.untyped_storage().data_ptr() for o in tags.tensors(outputs) if o.numel()}
    return [
        (tensor, autograd.version(tensor))
        for tensor in tags.tensors(saved[0])
        if tensor.untyped_storage().data_ptr() in returned
    ]


def _laid_out(grad: Tensor | None, node: fx.Node, shape: torch.Size) -> Tensor:
    """The gradient of an output in the strides that backward was traced for; None is zeros.

    (Gradients that are zeros for that reason become None: `fxshard.runtime.unused`.)
    """
    like = node.meta["val"]
    stride = like.stride() if like.shape == shape else shapes.stride_like(like, shape)
    if grad is not None and shapes.lies_as(grad, stride):
        return grad
    made = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
    return made.zero_() if grad is None else made.copy_(grad)


def _backward_arguments(
    call: AutogradCall,
    executor: Executor,
    batch: Sequence[Tensor],
    saved: list[list[Tensor]],
    tangents: dict[str | None, Tensor | None],
    read: Sequence[ReadTensor],
    kept: bool,
) -> list[list[Tensor | None]]:
    args: list[list[Tensor | None]] = []
    program = call.variant.program
    held = {each.key: each.tensor for each in read if each.key[0] in ("buffer", "ignored")}
    for rank, values in enumerate(saved):
        rest = iter(values)
        row: list[Tensor | None] = []
        for node in executor.backward_inputs:
            tag = tags.get(node)
            if tag.role == "tangent":
                row.append(tangents[tag.fqn])
            elif (tag.role, tag.fqn or "") in held:
                row.append(held[tag.role, tag.fqn or ""])  # as forward has read it
            elif tag.role in _GIVEN:
                row.append(call.runtime.value(node, program, batch, rank))
            else:
                row.append(next(rest))
        if not kept:
            values.clear()
        args.append(row)
    return args


def _gradients(
    call: AutogradCall, results: list[list[Tensor]], inputs: int, unused: frozenset[str]
) -> list[Tensor | None]:
    """Gradients in the order of `Step.forward`'s tensors; None for those that are `unused`."""
    program = call.variant.program
    names = [result.name for result in program.results if result.kind != "output"]
    per_rank = [dict(zip(names, grads, strict=True)) for grads in results]
    results.clear()
    for result in program.results:
        if result.kind in ("accumulated", "partial"):
            fresh = [grads.pop(result.name) for grads in per_rank]
            partial = result.kind == "partial"
            known = call.runtime.partial if partial else call.runtime.accumulated
            sums = known.setdefault(result.name, fresh)
            if sums is not fresh:  # another forward ran before this backward
                for total, grad in zip(sums, fresh, strict=True):
                    total.add_(grad)
    out: list[Tensor | None] = []
    with autograd.plain_torch_functions():  # dtypes of parameters are read
        for fqn in call.params:
            shards = [grads.pop(fqn) for grads in per_rank if fqn in grads]
            if not shards or fqn in unused:
                out.append(None)  # accumulated, not reduced; or stepped already
            elif fqn in call.runtime.ignored:
                out.append(shards[0])
            else:
                slot = call.runtime.slots[fqn]
                out.append(as_gradient(slot, shards[: len(slot.shards)], call.runtime.world))
    for k in range(inputs):
        name = f"input[{program.signature.tensor_inputs[k]}]"
        out.append(None if name in unused else per_rank[0].get(name))
    return out


def differentiated(program: Program) -> list[str]:
    """FQNs of the parameters that the program makes gradients of, reduced or accumulated."""
    known = program.params.keys() | program.ignored.keys()
    names = [r.name for r in program.results if r.kind != "output" and r.name in known]
    names += transfers.stepped(program)
    return list(dict.fromkeys([*names, *sorted(program.accumulated)]))
