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
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import fx

from fxshard.host import collector
from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Program
from fxshard.ir.schedule import last_reads, points
from fxshard.memory import symbolic
from fxshard.memory.category import Category
from fxshard.memory.gradients import (
    accumulated_bytes,
    gradient_categories,
    partial_bytes,
    unreached,
    unsharded_bytes,
)
from fxshard.memory.ledger import BEFORE, LOSS, OPTIMIZER, Ledger, LiveRange, Moment, owner_of
from fxshard.memory.loss import LossStep
from fxshard.memory.optimizer_step import OptimizerStep, Parts
from fxshard.memory.recording import OperatorEvent
from fxshard.memory.regions import Regions
from fxshard.memory.report import AskedPlan, MemoryReport
from fxshard.memory.storages import moment_of

LOSS_PARTS = ("loss", "loss backward")  # names of phases


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
        offloaded=any(program.uses_host for program in programs),
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


class Walk(Regions):
    """One pass over a step, row by row of the schedule of each phase.

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
        super().__init__(held)
        self._formulas = formulas
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
        self.now: int = BEFORE
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
        self.schedule = program.schedule
        self._params = program.params
        self._sizes = symbolic.expressions(program) if self._formulas else {}
        self._dead_in = {}
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

    def optimizer(self, step: OptimizerStep, events: Sequence[OperatorEvent], host: bool) -> None:
        """The events of an optimizer's step."""
        self.ledger.begin("optimizer", -1)
        made_by = functools.partial(step.range_of, host=host)
        self._replay(events, OPTIMIZER, self._optimizers, made_by)

    def _replay(
        self,
        events: Sequence[OperatorEvent],
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


def _is_received(node: fx.Node) -> bool:
    """True for what a collective of the model's brings."""
    return node.target is operator.getitem and ops.of(tags.source(node)).of_model
