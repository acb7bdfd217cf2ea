"""Static liveness: the live ranges of a step, read off the program alone.

The walk follows the schedule as the executor does: a value lives from the operator that makes it
until its last reader; storages are counted once however many views they have; `free` ends a
storage at once. What the caller holds lives throughout: batch, shards, buffers; the model's outputs
until backward has returned. Gradients that arrive at outputs are backward's own, to be freed, where
the loss is known and keeps none; else the caller holds them too.

Assumes one loop body: per micro-batch forward, (loss,) backward, drop the outputs, at the latest;
then ``optimizer.step()``, ``optimizer.zero_grad(set_to_none=True)``, and the gradients of inputs,
if they need any, dropped.
"""

from __future__ import annotations

import collections
import copy
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import sympy
import torch
from torch import fx, nn

from fxshard._torch.trees import tree_flatten
from fxshard.host import collector
from fxshard.ir import ops, tags, transfers
from fxshard.ir.compiled import Compiled
from fxshard.ir.program import Program, nbytes
from fxshard.ir.schedule import Point, Region, Schedule, last_reads, points
from fxshard.ir.units import buffer_dtypes
from fxshard.memory import symbolic
from fxshard.memory.category import Category
from fxshard.memory.gradients import (
    accumulated_bytes,
    gradient_categories,
    is_reduce_copy,
    partial_bytes,
    unreached,
    unsharded_bytes,
)
from fxshard.memory.ledger import BEFORE, LOSS, OPTIMIZER, Ledger, LiveRange, Moment, owner_of
from fxshard.memory.loss import LossStep
from fxshard.memory.optimizer import OptimizerStep, Parts
from fxshard.memory.recording import Event
from fxshard.memory.report import AskedPlan, MemoryReport

LOSS_PARTS = ("loss", "loss backward")  # names of phases


def held_ranges(
    model: nn.Module,
    inputs: Any,
    program: Program,
    loss: LossStep | None = None,
    *,
    formulas: bool = False,
) -> list[LiveRange]:
    """What the caller holds throughout the step: shards, buffers, batch.

    Shards count as they are stored: padded, trainable or not. Ignored parameters count as *Sharded
    Param* too: what the rank holds between steps. With `formulas`, the ranges have theirs.
    """
    found: list[LiveRange] = []

    def hold(
        name: str,
        module: str,
        category: Category,
        size: int,
        host: bool = False,
        formula: sympy.Expr | None = None,
    ) -> None:
        made = LiveRange(len(found), name, "", module, category, size, host)
        made.formula = formula if formulas else None
        found.append(made)

    flats: dict[Any, int] = {}  # the shards of a unit lie in one storage per dtype
    for fqn, param in program.params.items():
        layout = program.layouts[fqn]
        size = layout.shard_bytes
        formula = layout.shard_numel_over(symbolic.WORLD) * param.dtype.itemsize
        hold(fqn, owner_of(fqn), Category.SHARDED_PARAM, size, program.offloaded, formula)
        number = found[-1].storage
        found[-1].storage = flats.setdefault(layout.storage, number)
    for fqn, param in program.ignored.items():
        hold(fqn, owner_of(fqn), Category.SHARDED_PARAM, nbytes(param.shape, param.dtype))
    dtypes = buffer_dtypes(program.units, dict(model.named_buffers()))
    seen: set[int] = set()
    leaves, _ = tree_flatten(inputs)
    groups: list[tuple[Category, Iterable[tuple[str, Any]]]] = [
        (Category.BUFFER, [*model.named_buffers(), *program.constants.items()]),
        (Category.INPUTS, zip(program.signature.input_names, leaves, strict=True)),
    ]
    keep = []
    for category, named in groups:
        for leaf, (name, value) in enumerate(named):
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            keep.append(storage)
            if id(storage) not in seen:
                seen.add(id(storage))
                size = storage.nbytes()
                if category is Category.BUFFER and name in dtypes:
                    size = nbytes(tuple(value.shape), dtypes[name])
                formula, owner = None, owner_of(name)
                if category is Category.INPUTS:
                    formula, owner = symbolic.input_bytes(program, leaf, value), ""
                hold(name, owner, category, size, formula=formula)
    for storage in loss.held if loss else ():
        if id(storage) not in seen:
            seen.add(id(storage))
            hold("held by the loss", LOSS, Category.INPUTS, storage.nbytes())
    return found


@collector.paused()
def analyse(
    programs: Sequence[Program],
    held: list[LiveRange],
    step: OptimizerStep | None,
    loss: LossStep | None = None,
    device: str = "cpu",
    *,
    formulas: bool = False,
    plan: AskedPlan | None = None,
    scheduled: Walk | None = None,
) -> MemoryReport:
    """The live ranges of the first and of the steady step.

    Args:
        programs: one per micro-batch of a step, each with a schedule.
        held: from `held_ranges`.
        step: from `fxshard.memory.optimizer.trace_step`, or None.
        loss: from `fxshard.memory.loss.trace_loss`, or None.
        device: type of the device that it is planned for.
        formulas: the ranges get `LiveRange.formula`; then `held`, `step` and `loss` have theirs.
        plan: what the report asks where the program is needed.
        scheduled: the walk of a pipeline's schedule up to the optimizer; None: of a loop.
    """
    last = programs[-1]
    if step is not None and step.parts is not None:
        first = _walk_with_steps(programs, held, step, step.initial, step.parts[0], loss, formulas)
        steady = _walk_with_steps(programs, held, step, step.held, step.parts[1], loss, formulas)
    else:
        steady = scheduled or _walk(programs, held, loss, formulas)
        first, steady = _stepped(steady, last, step)
    return MemoryReport(
        first=first.ledger,
        steady=steady.ledger,
        calls=tuple(program.calls for program in programs),
        units=last.units,
        world_size=last.world_size,
        training=last.signature.training,
        offloaded=last.offloaded,
        optimizer=step.name if step else None,
        device=device,
        plan=plan,
    )


def _walk(
    programs: Sequence[Program], held: list[LiveRange], loss: LossStep | None, formulas: bool
) -> Walk:
    walk = Walk(held, formulas=formulas)
    for number, program in enumerate(programs):
        walk.run(program, number, loss)
    return walk


def _stepped(steady: Walk, last: Program, step: OptimizerStep | None) -> tuple[Walk, Walk]:
    """The first step and the steady one, which differ in what the optimizer holds and makes."""
    first = steady
    if step is not None and last.signature.training:
        first = steady.forked()
        first.hold_state(step, step.initial, last.offloaded)
        steady.hold_state(step, step.held, last.offloaded)
        first.optimizer(step, step.first, last.offloaded)
        steady.optimizer(step, step.second, last.offloaded)
    for walk in dict.fromkeys((first, steady)):
        if last.signature.training:
            walk.zero_grad()
    return first, steady


def _walk_with_steps(
    programs: Sequence[Program],
    held: list[LiveRange],
    step: OptimizerStep,
    state: Sequence[int],
    events: Parts,
    loss: LossStep | None,
    formulas: bool,
) -> Walk:
    """Of programs that step: what the optimizer makes differs within backward."""
    walk = Walk(held, step, events, formulas=formulas)
    walk.hold_state(step, state, programs[-1].offloaded)
    for number, program in enumerate(programs):
        walk.run(program, number, loss)
    walk.zero_grad()
    return walk


def _read(graph: fx.Graph, loss: LossStep) -> set[int]:
    """Of the gradients that a loss sends to outputs, those that backward reads."""
    nodes = [n for n in graph.find_nodes(op="placeholder") if n.users]
    fqns = [tags.get(node).fqn or "" for node in nodes if tags.get(node).role == "tangent"]
    return {loss.tangents[fqn] for fqn in fqns if fqn in loss.tangents}


class Walk:
    """One pass over a step with a reference count per storage; writes a `Ledger`.

    Between programs it carries what the caller holds: ``.grad``, and accumulated gradients.
    """

    def __init__(
        self,
        held: Sequence[LiveRange] = (),
        step: OptimizerStep | None = None,
        parts: Parts | None = None,
        *,
        formulas: bool = False,
    ) -> None:
        """Args: `step`, `parts`: what the steps of the program allocate and free, if it has any."""
        self._formulas = formulas
        self._sizes: symbolic.Expressions = {}
        self.ledger: Ledger = Ledger()
        self.ledger.ranges += [each.copied() for each in held]
        self.now = 0  # tick
        self._open: dict[int, LiveRange] = {}  # storage -> its range, if it is alive and not held
        self._refs: dict[int, int] = {}  # storage -> values that refer to it
        self._storages = len(held)
        self._step, self._parts = step, parts or {}
        self._grads: dict[str, list[int]] = {}  # what `.grad` holds
        self._sums: dict[str, list[int]] = {}  # accumulated gradients
        self._partial: dict[str, list[int]] = {}  # partial sums of sharded ones
        self._kept: dict[str, list[int]] = {}  # parameters that stay unsharded between calls
        self._past: list[int] = []  # what the caller holds on to until the next step
        self._optimizers: dict[int, int] = {}  # storage in the recording of a step -> storage

    def forked(self) -> Walk:
        """A copy that continues independently from here."""
        other = copy.copy(self)
        other.ledger = Ledger()
        other.ledger.moments = list(self.ledger.moments)
        other.ledger.phases = list(self.ledger.phases)
        copies = {id(each): each.copied() for each in self.ledger.ranges}
        other.ledger.ranges = list(copies.values())
        other._open = {token: copies[id(each)] for token, each in self._open.items()}
        other._refs, other._grads = dict(self._refs), dict(self._grads)
        other._optimizers, other._kept = dict(self._optimizers), dict(self._kept)
        return other

    def hold_state(self, step: OptimizerStep, numbers: Sequence[int], host: bool) -> None:
        """Storages of the optimizer's state that exist before the step."""
        self.now = BEFORE
        for number in numbers:
            made = step.range_of("", number, step.state[number].bytes, host=host)
            self._optimizers[number] = self._new(made)

    def run(self, program: Program, micro_batch: int, loss: LossStep | None = None) -> None:
        """Walk forward and backward of one micro-batch."""
        self._enter_program(program, loss)
        caller: list[int] = []  # outputs and tangents: the caller holds them until backward ends
        saved: list[list[int]] = []
        for phase, graph in self.schedule.phases():
            if phase == "forward":
                self._forward(graph, micro_batch, caller, saved)
            else:
                self._backward(graph, micro_batch, loss, caller, saved)

    def _enter_program(self, program: Program, loss: LossStep | None) -> None:
        assert program.schedule is not None
        self.program = program
        self.schedule: Schedule = program.schedule
        self._params = program.params
        self._sizes = symbolic.expressions(program) if self._formulas else {}
        self._dead_in: dict[int, dict[fx.Node, list[fx.Node]]] = {}  # by region
        self._categories = gradient_categories(program, unreached(program, loss))

    def _forward(
        self, graph: fx.Graph, micro_batch: int, caller: list[int], saved: list[list[int]]
    ) -> None:
        self.now = self.ledger.begin("forward", micro_batch)
        self._sums_are_there("forward")
        for fqn in self.program.partial:
            if fqn not in self._partial:
                size = partial_bytes(self.program, fqn)
                self._partial[fqn] = [self._summed(fqn, Category.SHARDED_GRAD, size)]
        for fqn in [fqn for fqn in self._kept if fqn not in self.program.kept]:
            self._release(self._kept.pop(fqn))  # of other values than the shards are now
        for fqn in self.program.kept:
            if fqn not in self._kept:
                size = unsharded_bytes(self.program, fqn)
                self._kept[fqn] = [self._summed(fqn, Category.UNSHARDED_PARAM, size)]
        env = {node: self._enter(node, saved) for node in graph.find_nodes(op="placeholder")}
        self.now += 1
        self._phase(graph, env)
        output = graph.find_nodes(op="output")[0]
        self.now += 1  # between the phases
        outputs, kept = cast("tuple[tuple[fx.Node, ...], ...]", output.args[0])
        self._outputs = [env.get(node, []) for node in outputs]
        caller += [token for tokens in self._outputs for token in tokens]
        saved += [env[node] for node in kept]
        self._hold(caller)
        self._hold([t for tokens in saved for t in tokens])
        self._release([t for node in output.all_input_nodes for t in env.get(node, [])])
        if not self.program.signature.training:
            self._release(caller)

    def _sums_are_there(self, phase: str) -> None:
        """A phase begins with the gradients that earlier steps have accumulated."""
        for fqn in self.program.accumulated if phase == "forward" else ():
            if fqn not in self._sums:
                size = accumulated_bytes(self.program, fqn)
                self._sums[fqn] = [self._summed(fqn, Category.UNSHARDED_GRAD, size)]

    def _backward(
        self,
        graph: fx.Graph,
        micro_batch: int,
        loss: LossStep | None,
        caller: list[int],
        saved: list[list[int]],
    ) -> None:
        taken: dict[int, int] = {}  # gradients of outputs that backward frees
        if loss is not None:
            made = self._made_by_loss(loss, micro_batch, graph, caller)
            taken = {number: made.pop(number) for number in loss.taken if number in made}
            caller += made.values()
        self.now = self.ledger.begin("backward", micro_batch)
        self._sums_are_there("backward")
        if loss is not None:  # the engine drops what backward does not read
            dropped = taken.keys() - _read(graph, loss)
            self._release([taken.pop(number) for number in dropped])
        env: dict[fx.Node, list[int]] = {}
        for node in graph.find_nodes(op="placeholder"):
            if tags.get(node).role != "tangent":
                env[node] = self._enter(node, saved)
            elif loss is None:
                env[node] = self._arriving(node)
                self._hold(env[node])
                caller += env[node]
            elif tags.get(node).fqn in loss.tangents:  # the loss's own backward made it
                number = loss.tangents[tags.get(node).fqn or ""]
                env[node] = [taken[number]] if number in taken else []
                self._hold(env[node])
            elif node.users:
                env[node] = self._allocate(node, Category.TEMP)
        self.now += 1
        self._release(list(taken.values()))
        unread = [n for n in env if not n.users]
        self._release([t for node in unread for t in env.pop(node)])
        self._phase(graph, env)
        self.now = 2 * self.ledger.add([Moment("backward returned")])
        values = cast("tuple[fx.Node, ...]", graph.find_nodes(op="output")[0].args[0])
        # Tangents that are returned as gradients are copied: the caller still holds them.
        own = [n for n in dict.fromkeys(values) if tags.get(n).role == "tangent"]
        given = [env[node] for node in own if loss is None]
        env |= {n: self._allocate(n, self._label(n)) for n in own if loss is None}
        self._release(caller)
        self.now += 1
        self._release([token for tokens in given for token in tokens])
        self._keep_gradients(values, env, unreached(self.program, loss))

    def _keep_gradients(
        self,
        values: tuple[fx.Node, ...],
        env: dict[fx.Node, list[int]],
        without: frozenset[str],
    ) -> None:
        """The caller holds what backward returned, or adds it in place to the gradient it holds.

        Except gradients in `without`: None is returned for those (`fxshard.runtime.unused`).
        """
        results = [result for result in self.program.results if result.kind != "output"]
        for node, result in zip(values, results, strict=True):
            tokens = env.get(node, [])
            if result.kind == "accumulated":
                self._sums.setdefault(result.name, tokens)
            elif result.kind == "partial":
                self._partial[result.name] = tokens
            elif result.name in self._grads or result.name in without:
                self._release(tokens)
            else:
                self._grads[result.name] = tokens
        for fqn in list(self._sums):
            if self.program.reduces(fqn) != "none":
                del self._sums[fqn]

    def optimizer(self, step: OptimizerStep, events: Sequence[Event], host: bool) -> None:
        """The events of an optimizer's step."""
        self.ledger.begin("optimizer", -1)
        made_by = functools.partial(step.range_of, host=host)
        self._replay(events, OPTIMIZER, self._optimizers, made_by)

    def _replay(
        self,
        events: Sequence[Event],
        owner: str,
        tokens: dict[int, int],
        made_by: Callable[[str, int, int], LiveRange],
    ) -> None:
        """Replay what recorded operators allocate and free.

        Args:
            events: in order.
            owner: `LOSS` or `OPTIMIZER`.
            tokens: of what is alive, by its number in the recording; kept up to date.
            made_by: from operator, number and bytes of a storage to its range.
        """
        first = self.ledger.add(Moment(event.op, event.op, owner) for event in events)
        for point, event in enumerate(events, start=first):
            self.now = 2 * point
            for number, size in event.allocated:
                tokens[number] = self._new(made_by(event.op, number, size))
            self.now += 1
            self._release([tokens.pop(number) for number in event.freed if number in tokens])

    def zero_grad(self) -> None:
        """Release all that the caller does not hold from step to step."""
        self.ledger.begin("zero_grad", -1)
        self.now = 2 * self.ledger.add([Moment("zero_grad")])
        state = {*self._optimizers.values(), *(t for kept in self._kept.values() for t in kept)}
        state |= {*self._past}
        self._end([token for token in self._open if token not in state])

    def _arriving(self, tangent: fx.Node) -> list[int]:
        """The gradient of an output, of a loop whose loss is not known."""
        return self._allocate(tangent, self._label(tangent))

    def _made_by_loss(
        self, loss: LossStep, micro_batch: int, graph: fx.Graph, caller: list[int]
    ) -> dict[int, int]:
        """What the loss and its own backward leave, by number in its recording."""
        made = self._dropped(loss, caller)
        for part in LOSS_PARTS:
            self._loss(part, loss, micro_batch, self._labels(graph, loss), made)
        return made

    def _labels(self, graph: fx.Graph, loss: LossStep) -> dict[int, Category]:
        """Of the gradients of outputs: those that are gradients of parameters as they come."""
        nodes = [n for n in graph.find_nodes(op="placeholder") if tags.get(n).role == "tangent"]
        found = {loss.tangents.get(tags.get(node).fqn or ""): self._label(node) for node in nodes}
        return {number: label for number, label in found.items() if number is not None}

    def _label(self, tangent: fx.Node) -> Category:
        """The column of the gradient of an output."""
        labels = [self._categories.get(storage) for storage in tags.storage_ids(tangent)]
        return next((label for label in labels if label is not None), Category.TEMP)

    def _dropped(self, loss: LossStep, caller: list[int]) -> dict[int, int]:
        """Outputs that the loop drops when it has the loss, by their number in its recording.

        Args:
            caller: tokens that the loop holds; it holds those no more.
        """
        found: dict[int, int] = {}
        for number, tokens in zip(loss.dropped, self._outputs, strict=bool(loss.dropped)):
            for token in tokens:
                caller.remove(token)
                if number is None or number in found:  # returned twice: one of them is enough
                    self._release([token])
                else:
                    found[number] = token
        return found

    def _loss(
        self,
        part: str,
        loss: LossStep,
        micro_batch: int,
        labels: dict[int, Category],
        made: dict[int, int],
    ) -> None:
        """The user's loss or its own backward; `made`: storages by number in the recording."""
        other = Category.ACTIVATION if part == "loss" else Category.TEMP

        def made_by(op: str, number: int, size: int) -> LiveRange:
            label = labels.get(number, other)
            return LiveRange(0, op, op, LOSS, label, size, formula=loss.formulas.get(number))

        self.ledger.begin(part, micro_batch)
        self._replay(loss.forward if part == "loss" else loss.backward, LOSS, made, made_by)

    def _summed(self, fqn: str, category: Category, size: int) -> int:
        """What an earlier step has left: a sum of gradients, or an unsharded parameter."""
        return self._new(LiveRange(0, fqn, "", owner_of(fqn), category, size))

    def _enter(self, node: fx.Node, saved: list[list[int]]) -> list[int]:
        """Tokens of a placeholder. What the caller holds throughout has none: it never dies."""
        role, fqn = tags.get(node).role, tags.get(node).fqn or ""
        if role == "accumulated":  # dies when it is reduced; else the caller holds it on
            return self._sums[fqn] if self.program.reduces(fqn) != "none" else []
        if role == "partial":
            return self._partial.pop(fqn)
        if role in tags.HELD:
            return []
        return saved.pop(0)

    def _phase(self, graph: fx.Graph, env: dict[fx.Node, list[int]]) -> None:
        places = points(self.schedule, graph)
        self.now = 2 * self.ledger.add(map(moment_of, places))
        origins = [place.origin for place in places]
        sizes = collections.Counter(place.row for place in places)
        at = 0
        dead = last_reads(graph)
        for row in graph.nodes:
            if row.op not in ("call_function", "call_module") or row.target is operator.getitem:
                continue
            items = [user for user in row.users if user.target is operator.getitem]
            drops = [n for reader in (row, *items) for n in dead[reader] if n is not row]
            if row.op == "call_module":
                tokens = [env.get(n, []) for n in row.all_input_nodes]
                owned = {n for n in drops if n in env}
                size = sizes[row] - 1
                made = self._region(row, items, tokens, owned, origins[at : at + size])
                at += size
                for node in owned:
                    del env[node]
                env.update(zip(items, made, strict=True))
                drops = [n for n in drops if n not in owned]
            else:
                self._row(row, items, env)
            at += 1
            self.now += 1
            for node in drops:
                self._release(env.pop(node, []))
            self.now += 1
        self.now -= 1  # after the last point

    def _row(self, row: fx.Node, items: list[fx.Node], env: dict[fx.Node, list[int]]) -> None:
        spec = ops.of(row)
        if row.target is ops.wait:
            for source in tags.operands(row):
                packed = any(user.target is ops.unpack for user in source.users)
                if tags.get(source).role == "unshard" and not packed:
                    self._relabel(env[source], Category.UNSHARDED_PARAM)
                elif _is_received(source):
                    self._relabel(env[source], self._received(source))
        elif row.target is ops.step:
            self._step_row(row)
        elif row.target is ops.free:
            for source in tags.operands(row):
                self._end(env[source])
        elif row.target is ops.keep:
            for fqn, source in zip(row.args[1], tags.operands(row), strict=True):  # type: ignore[arg-type]
                self._keep(fqn, env[source])
        elif row.target is ops.kept:
            env.update(zip(items, self._taken(row.args[1]), strict=True))  # type: ignore[arg-type]
        elif transfers.is_in_place(row):
            for item, source in zip(items, tags.operands(row), strict=True):
                env[item] = env[source]
                self._hold(env[item])
                self._relabel(env[item], Category[spec.category])
        elif row.target in ops.OPERATORS:
            for item in items:
                env[item] = self._allocate(item, Category[spec.category], spec.on_host)
        else:  # a view of a buffer that cuts its padding
            env[row] = [t for n in row.all_input_nodes for t in env[n]]
            self._hold(env[row])

    def _received(self, item: fx.Node) -> Category:
        """Of what a collective of the model's has brought."""
        default = Category.ACTIVATION if tags.get(item).phase == "forward" else Category.TEMP
        found = (self._categories.get(storage) for storage in tags.storage_ids(item))
        return next(filter(None, found), default)

    def _keep(self, fqn: str, tokens: list[int]) -> None:
        """The caller keeps an unsharded parameter for the next forward."""
        self._release(self._kept.pop(fqn, []))
        self._kept[fqn] = tokens
        self._hold(tokens)

    def _taken(self, fqns: Sequence[str]) -> list[list[int]]:
        """What it has kept."""
        return [self._kept.pop(fqn) for fqn in fqns]

    def _step_row(self, row: fx.Node) -> None:
        """A step of the optimizer: one point, with the most bytes alive within it."""
        if self._step is None:  # the report leaves the optimizer out
            return
        alive: dict[int, tuple[str, int]] = {}  # operator and bytes of each storage
        top, most = dict(alive), 0
        for event in self._parts[tuple(row.args[2])]:  # type: ignore[arg-type]
            alive |= {number: (event.op, size) for number, size in event.allocated}
            if alive and (total := sum(size for _, size in alive.values())) >= most:
                top, most = dict(alive), total
            for number in event.freed:
                alive.pop(number, None)
        self._hold_made(self._step, top)
        self.now += 1
        self._end([self._optimizers.pop(number) for number in top if number not in alive])
        self._hold_made(self._step, {n: made for n, made in alive.items() if n not in top})
        self.now -= 1

    def _hold_made(self, step: OptimizerStep, made: Mapping[int, tuple[str, int]]) -> None:
        for number, (op, size) in made.items():
            each = step.range_of(op, number, size, host=self.program.offloaded)
            self._optimizers[number] = self._new(each)

    def _region(
        self,
        row: fx.Node,
        items: list[fx.Node],
        inputs: list[list[int]],
        owned: set[fx.Node],
        origins: list[fx.Node],
    ) -> list[list[int]]:
        """Walk the region that `row` calls; returns the tokens of its results.

        `owned` are arguments that the caller has dropped: they die inside, at their last reader.
        """
        region = self.schedule.regions[str(row.target)]
        if region.compiled is not None:
            return self._compiled(row, region, region.compiled, items, inputs, owned)
        default = Category.ACTIVATION if tags.get(row).phase == "forward" else Category.TEMP
        env: dict[fx.Node, list[int]] = {}
        tokens_of: dict[int, int] = {}  # storage of the stored body -> token of this call
        for place, argument, tokens in zip(
            region.graph.find_nodes(op="placeholder"), row.all_input_nodes, inputs, strict=True
        ):
            env[place] = tokens
            for storage, token in zip(tags.storages(place), tokens, strict=False):
                tokens_of[id(storage)] = token
            if not tokens:
                for storage_id in tags.storage_ids(place):
                    tokens_of.setdefault(storage_id, -1)
            if argument not in owned:
                self._hold(tokens)
        outputs = tags.operands(region.graph.find_nodes(op="output")[0])
        labels = self._region_categories(region.body, outputs, items)
        dead = self._dead(region)
        for node, origin in zip(region.body, origins, strict=True):
            tokens = []
            for i, storage in enumerate(tags.storages(node)):
                if id(storage) not in tokens_of:
                    category = labels.get(id(storage), default)
                    tokens_of[id(storage)] = self._made(origin, category, storage.nbytes(), i)
                    tokens.append(tokens_of[id(storage)])
                elif tokens_of[id(storage)] >= 0:
                    tokens.append(tokens_of[id(storage)])
                    self._hold([tokens_of[id(storage)]])
                    if tags.get(node).role == "compute" and tags.writes(node):
                        self._rewrite(tokens_of[id(storage)], origin)
            env[node] = tokens
            self.now += 1
            for source in dead[node]:
                self._release(env.pop(source, []))
            self.now += 1
        for place in region.graph.find_nodes(op="placeholder"):
            if not place.users:
                self._release(env.pop(place, []))
        return [env[node] for node in outputs]

    def _compiled(
        self,
        row: fx.Node,
        region: Region,
        compiled: Compiled,
        items: list[fx.Node],
        inputs: list[list[int]],
        owned: set[fx.Node],
    ) -> list[list[int]]:
        """As `_region`, by the steps of the compiled code.

        No operator of it makes a copy that can be told from a gradient: what is sent is one.
        """
        default = Category.ACTIVATION if tags.get(row).phase == "forward" else Category.TEMP
        tokens_of: dict[int, list[int]] = {}  # number of a storage -> what the code holds of it
        numbers: dict[int, int] = {}
        for place, argument, tokens in zip(
            region.graph.find_nodes(op="placeholder"), row.all_input_nodes, inputs, strict=True
        ):
            if argument not in owned:
                self._hold(tokens)
            for storage in tags.storage_ids(place):
                tokens_of.setdefault(numbers.setdefault(storage, len(numbers)), []).extend(tokens)
        outputs = tags.operands(region.graph.find_nodes(op="output")[0])
        labels = self._region_categories(region.body, outputs, items)
        of_number: dict[int, Category] = {}
        origins: dict[int, fx.Node] = {}
        runs = dict(zip(region.body, row.meta["run"], strict=True))
        for node, number in zip(outputs, compiled.outputs, strict=True):
            origins.setdefault(number, runs.get(node, row))
            for storage in tags.storage_ids(node) & labels.keys():
                of_number[number] = labels[storage]
        for step in compiled.steps:
            for number, size in step.made:
                category = of_number.get(number, default)
                if category is Category.REDUCE_SCATTER:
                    category = Category.UNSHARDED_GRAD
                made = self._made(origins.get(number, row), category, size)
                tokens_of[number] = [made]
            if step is compiled.steps[-1]:
                break  # the return: a part of the row
            self.now += 1
            for number in step.dropped:
                self._release(tokens_of.pop(number, []))
            self.now += 1
        found = [tokens_of[number] for number in compiled.outputs]
        for tokens in found:
            self._hold(tokens)
        for tokens in tokens_of.values():
            self._release(tokens)
        return [list(tokens) for tokens in found]

    def _region_categories(
        self, body: list[fx.Node], outputs: list[fx.Node], items: list[fx.Node]
    ) -> dict[int, Category]:
        """Categories of storages of a body that are gradients, seen from this call of it."""
        found: dict[int, Category] = {}
        for node, item in zip(outputs, items, strict=True):
            for inner, outer in zip(tags.storages(node), tags.storages(item), strict=True):
                if id(outer) in self._categories:
                    found[id(inner)] = self._categories[id(outer)]
        makers: dict[int, fx.Node] = {}
        for node in body:
            for storage in tags.storage_ids(node):
                makers.setdefault(storage, node)
        for node in reversed(body):
            sent = any(found.get(s) is Category.REDUCE_SCATTER for s in tags.storage_ids(node))
            if not sent or not is_reduce_copy(node.target, dict(node.kwargs)):
                continue
            sources = [storage for n in node.all_input_nodes for storage in tags.storage_ids(n)]
            for storage in sources:
                maker = makers.get(storage)
                copied = maker is not None and is_reduce_copy(maker.target, dict(maker.kwargs))
                category = Category.REDUCE_SCATTER if copied else Category.UNSHARDED_GRAD
                found.setdefault(storage, category)
        return found

    def _dead(self, region: Region) -> dict[fx.Node, list[fx.Node]]:
        if id(region) not in self._dead_in:
            self._dead_in[id(region)] = last_reads(region.graph)
        return self._dead_in[id(region)]

    # -- storages --------------------------------------------------------------------------------

    def _allocate(self, node: fx.Node, category: Category, host: bool = False) -> list[int]:
        return [
            self._made(node, category, storage.nbytes(), i, host)
            for i, storage in enumerate(tags.storages(node))
        ]

    def _made(
        self, node: fx.Node, category: Category, size: int, place: int = 0, host: bool = False
    ) -> int:
        """The storage at `place` among those that `node` makes; a parameter's is its module's."""
        tag = tags.get(node)
        of_parameter = tag.fqn in self._params
        name = tag.fqn if tag.fqn and (of_parameter or node.op == "placeholder") else node.name
        module = owner_of(tag.fqn or "") if of_parameter else tag.module
        op = operation_of(node)
        made = LiveRange(0, name, op, module, category, size, host, line=tag.line)
        if self._sizes and node.name in self._sizes:
            made.formula = self._sizes[node.name][place]
        return self._new(made)

    def _new(self, made: LiveRange) -> int:
        token = self._storages
        self._storages += 1
        made.storage, made.born = token, self.now
        if self.now != BEFORE:
            made.stream = self.ledger.moments[self.now // 2].stream
        self.ledger.ranges.append(made)
        self._open[token] = made
        self._refs[token] = 1
        return token

    def _hold(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self._refs:
                self._refs[token] += 1

    def _release(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self._refs:
                self._refs[token] -= 1
                if not self._refs[token]:
                    self._end([token])

    def _end(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._refs.pop(token, None)
            ended = self._open.pop(token, None)
            if ended is not None:
                ended.died = self.now

    def _rewrite(self, token: int, node: fx.Node) -> None:
        """`node` writes its result over a storage: from now on the storage is that result's."""
        after, tag = self._changed(token), tags.get(node)
        after.name, after.op, after.line = node.name, operation_of(node), tag.line
        after.module = tag.module

    def _relabel(self, tokens: Sequence[int], category: Category) -> None:
        for token in tokens:
            self._changed(token).category = category

    def _changed(self, token: int) -> LiveRange:
        """A range of the same storage from now on."""
        before = self._open[token]
        before.died = self.now
        after = before.copied()
        after.born, after.died = self.now, None
        self._open[token] = after
        self.ledger.ranges.append(after)
        return after


def moment_of(place: Point) -> Moment:
    """A point of the schedule as data."""
    tag = tags.get(place.origin)
    op = "" if place.origin.op == "call_module" else operation_of(place.origin)
    kind: Literal["row", "size", "operator"] = "row"
    if place.node is not None:
        kind = "size" if isinstance(place.node.meta.get("val"), int) else "operator"
    inside = tag.checkpoint is not None
    where = place.origin.name, op, tag.module, tag.stream, tag.line, tag.call
    return Moment(*where, kind, inside, tag.recomputed)


def _is_received(node: fx.Node) -> bool:
    """True for what a collective of the model's brings."""
    return node.target is operator.getitem and ops.of(tags.source(node)).of_model


def operation_of(node: fx.Node) -> str:
    """``aten.mm`` of a node that calls ``aten.mm.default``; of a getitem, that of its source."""
    while node.op == "call_function" and node.target is operator.getitem:
        node = tags.source(node)
    return str(node.target).removesuffix(".default")
