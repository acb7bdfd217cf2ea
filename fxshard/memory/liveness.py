"""Static liveness: bytes alive at every point of a step, read off the program alone.

The walk follows the schedule as the executor does: a value lives from the operator that makes it
until its last reader; storages are counted once however many views they have; `free` ends a
storage at once. What the caller holds lives throughout: batch, shards, buffers; the model's outputs
and the gradients that arrive at them, until backward has returned.

Assumes one loop body: forward, backward, drop the outputs, ``optimizer.step()``,
``optimizer.zero_grad(set_to_none=True)``, and the gradients of inputs, if they need any, dropped.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn

from fxshard import meta, ops
from fxshard.compat import tree_flatten
from fxshard.memory.category import CATEGORIES, COLUMN, Category, Curve, Matrix, is_reduce_copy
from fxshard.memory.gradients import accumulated_bytes, gradient_categories
from fxshard.memory.optimizer import Event, OptimizerStep
from fxshard.program import Program, nbytes
from fxshard.schedule import Schedule, last_reads, points
from fxshard.units import buffer_dtypes

Vector = list[int]  # bytes per category, in the order of CATEGORIES; inside, host behind device
WIDTH = 2 * len(CATEGORIES)


@dataclasses.dataclass(frozen=True)
class Thing:
    """A storage that lives: what it is, for explanations.

    Attributes:
        name: node that made it, or what the caller holds.
        module: FQN of its module.
        category: see `Category`.
        bytes: its size.
        host: it lies on the CPU while the program computes elsewhere (offload).
    """

    name: str
    module: str
    category: Category
    bytes: int
    host: bool = False


@dataclasses.dataclass
class PhaseBytes:
    """Bytes of one phase.

    Attributes:
        phase: "forward", "backward", "optimizer" or "zero_grad".
        labels: per point ``(node name, module FQN)`` of what ran last.
        after: int64 ``[points, categories]``, alive behind each point.
        during: int64 ``[points, categories]``, alive while the operator before the point ran:
            its inputs and its outputs. Never below `after`.
        start: alive when the phase begins.
        host: the same for CPU memory, with offload; zeros without.
    """

    phase: str
    labels: list[tuple[str, str]]
    after: Matrix
    during: Matrix
    start: Vector
    host: Curve

    @classmethod
    def of(
        cls, phase: str, labels: list[tuple[str, str]], after: Matrix, during: Matrix, start: Vector
    ) -> PhaseBytes:
        """From rows that hold the categories twice: of the device, then of the host."""
        half = len(CATEGORIES)
        host = Curve(start[half:], after[:, half:], during[:, half:])
        return cls(phase, labels, after[:, :half], during[:, :half], start[:half], host)

    def shifted(self, extra: Vector) -> PhaseBytes:
        """With as many more bytes everywhere; `extra` as rows of `of`."""
        more = np.array(extra, dtype=np.int64)
        wide = [
            np.concatenate([a, b], axis=-1) + more
            for a, b in (
                (self.after, self.host.after),
                (self.during, self.host.during),
                (np.array(self.start), np.array(self.host.start)),
            )
        ]
        return PhaseBytes.of(self.phase, self.labels, wide[0], wide[1], wide[2].tolist())

    @property
    def end(self) -> Vector:
        """What is alive at the end, as a row of `of`."""
        if not len(self.after):
            return [*self.start, *self.host.start]
        return [int(v) for v in (*self.after[-1], *self.host.after[-1])]


@dataclasses.dataclass
class StepBytes:
    """Bytes of a whole step, for the first step and for the steady state.

    Attributes:
        program: what was analysed.
        first, steady: the phases in order.
        optimizer: class name of the analysed optimizer, or None.
        held: what the caller holds throughout.
    """

    program: Program
    first: list[PhaseBytes]
    steady: list[PhaseBytes]
    optimizer: str | None
    held: list[Thing]


def held_bytes(model: nn.Module, inputs: Any, program: Program) -> list[Thing]:
    """What the caller holds through the whole step: shards, buffers, batch.

    Shards count as they are stored: padded, all units, trainable or not. Ignored parameters count
    as *Sharded Param* too: what the rank holds between steps.
    """
    world = program.world_size
    things = [
        Thing(
            f"shards of {unit.name}",
            unit.fqn,
            Category.SHARDED_PARAM,
            sum(nbytes(param.chunk(world), param.dtype) for param in unit.params),
            host=program.offloaded,
        )
        for unit in program.units
    ]
    things += [
        Thing(fqn, "", Category.SHARDED_PARAM, nbytes(param.shape, param.dtype))
        for fqn, param in program.wholes.items()
    ]
    dtypes = buffer_dtypes(program.units, dict(model.named_buffers()))
    seen: set[int] = set()
    leaves, _ = tree_flatten(inputs)
    groups: list[tuple[Category, Iterable[tuple[str, Any]]]] = [
        (Category.BUFFER, [*model.named_buffers(), *program.constants.items()]),
        (Category.INPUTS, zip(program.signature.input_names, leaves, strict=True)),
    ]
    keep = []
    for category, named in groups:
        for name, value in named:
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            keep.append(storage)
            if id(storage) not in seen:
                seen.add(id(storage))
                size = storage.nbytes()
                if category is Category.BUFFER and name in dtypes:
                    size = nbytes(tuple(value.shape), dtypes[name])
                things.append(Thing(name, "", category, size))
    return things


def analyse(
    program: Program,
    held: list[Thing],
    step: OptimizerStep | None,
    *,
    holds_gradients: bool = False,
    last: bool = True,
) -> StepBytes:
    """Bytes at every point of the first and of the steady step.

    Args:
        program: with a schedule.
        held: from `held_bytes`.
        step: from `fxshard.memory.optimizer.trace_step`, or None.
        holds_gradients: an earlier micro-batch has left gradients, to which this one's are added.
        last: False for a micro-batch that is followed by another, not by the optimizer.
    """
    base = [0] * WIDTH
    for thing in held:
        base[_column(thing)] += thing.bytes
    gradients = gradient_bytes(program, held=True)
    if holds_gradients:
        base = [a + b for a, b in zip(base, gradients, strict=True)]
    compute = Walk(program, base).run()
    if holds_gradients and program.signature.training:
        _added_in_place(compute[-1], gradients)
    results: list[list[PhaseBytes]] = []
    state_bytes = sum(step.state.values()) if step else 0
    state_column = COLUMN[Category.OPT_STATE] + (len(CATEGORIES) if program.offloaded else 0)
    for is_first in (True, False):
        extra = [0] * WIDTH
        extra[state_column] = 0 if is_first else state_bytes
        phases = [phase.shifted(extra) for phase in compute]
        if program.signature.training and last:
            if step is not None:
                events = step.first if is_first else step.second
                host = program.offloaded
                phases.append(_optimizer_phase(events, step.state, phases[-1].end, host))
            cleared = list(base)  # all that is left: what is held, and the optimizer's state
            if holds_gradients:
                cleared = [a - b for a, b in zip(base, gradients, strict=True)]
            cleared[state_column] = state_bytes
            row = np.array([cleared], dtype=np.int64)
            start = phases[-1].end
            phases.append(PhaseBytes.of("zero_grad", [("zero_grad", "")], row, row, start))
        results.append(phases)
    return StepBytes(program, results[0], results[1], step.name if step else None, held)


def gradient_bytes(program: Program, *, held: bool = False) -> Vector:
    """Bytes of all ``.grad`` that a backward leaves, as a row of `PhaseBytes.of`.

    `held`: of those that earlier micro-batches have left: not those that are accumulated instead.
    """
    found = [0] * WIDTH
    categories = gradient_categories(program)
    seen: set[int] = set()
    for value, result in zip(program.values, program.results, strict=True):
        if result.kind != "grad" or (
            held and program.accumulated and result.name in program.params
        ):
            continue
        for storage in meta.storages(value):
            if id(storage) not in seen:
                seen.add(id(storage))
                sharded = result.name in program.params
                category = categories.get(id(storage), Category.TEMP)
                category = Category.SHARDED_GRAD if sharded else category
                thing = Thing("", "", category, storage.nbytes(), sharded and program.offloaded)
                found[_column(thing)] += thing.bytes
    return found


def _added_in_place(backward: PhaseBytes, gradients: Vector) -> None:
    """When backward returns, its gradients have been added to those before, and are gone."""
    half = len(CATEGORIES)
    for curve, gone in ((backward, gradients[:half]), (backward.host, gradients[half:])):
        curve.after[-1] -= np.array(gone, dtype=np.int64)


def _column(thing: Thing) -> int:
    return COLUMN[thing.category] + (len(CATEGORIES) if thing.host else 0)


def _optimizer_phase(
    events: list[Event], state: dict[int, int], start: Vector, host: bool
) -> PhaseBytes:
    live = list(start)
    after, during, labels = [], [], []
    sizes: dict[int, tuple[int, int]] = {}
    shift = len(CATEGORIES) if host else 0
    for event in events:
        for number, size in event.allocated:
            column = COLUMN[Category.OPT_STATE if number in state else Category.TEMP] + shift
            sizes[number] = (column, size)
            live[column] += size
        during.append(list(live))
        for number in event.freed:
            if number in sizes:
                column, size = sizes.pop(number)
                live[column] -= size
        after.append(list(live))
        labels.append((event.op, ""))
    return PhaseBytes.of("optimizer", labels, _matrix(after), _matrix(during), start)


class Walk:
    """One pass over forward and backward with a reference count per storage."""

    def __init__(self, program: Program, base: Vector) -> None:
        assert program.schedule is not None
        self.program = program
        self.schedule: Schedule = program.schedule
        self.live = list(base)
        self.things: dict[int, Thing] = {}  # storage token -> what it is
        self.refs: dict[int, int] = {}  # storage token -> values that refer to it
        self._tokens = 0
        self._categories = gradient_categories(program)
        self._accumulated = {
            fqn: self._new(Thing(fqn, "", Category.UNSHARDED_GRAD, accumulated_bytes(program, fqn)))
            for fqn in program.accumulated
        }

    def run(self, until: tuple[str, int] | None = None) -> list[PhaseBytes]:
        """Walk both phases.

        Args:
            until: stop while the operator before this ``(phase, point)`` runs: `things` then
                holds what is alive at that moment.
        """
        found: list[PhaseBytes] = []
        caller: list[int] = []  # outputs and tangents: the caller holds them until backward ends
        saved: list[list[int]] = []
        for phase, graph in self.schedule.phases():
            start = list(self.live)
            env: dict[fx.Node, list[int]] = {}
            for node in graph.find_nodes(op="placeholder"):
                env[node] = self._enter(node, saved, caller)
            if phase == "backward":
                start = list(self.live)
            stop = until[1] if until and until[0] == phase else None
            record = self._phase(phase, graph, env, start, stop)
            found.append(record)
            if stop is not None:
                return found
            output = graph.find_nodes(op="output")[0]
            if phase == "forward":
                outputs, kept = cast("tuple[tuple[fx.Node, ...], ...]", output.args[0])
                caller += [t for node in outputs for t in env.get(node, [])]
                saved += [env[node] for node in kept]
                self._hold(caller)
                self._hold([t for tokens in saved for t in tokens])
                self._release([t for node in _returned(output) for t in env.get(node, [])])
            else:
                self._release(caller)
                record.labels.append(("backward returned", ""))
                half = len(CATEGORIES)
                for curve, live in ((record, self.live[:half]), (record.host, self.live[half:])):
                    row = np.array([live], dtype=np.int64)
                    curve.after = np.concatenate([curve.after, row])
                    curve.during = np.concatenate([curve.during, row])
        return found

    def _enter(self, node: fx.Node, saved: list[list[int]], caller: list[int]) -> list[int]:
        """Tokens of a placeholder. What the caller holds throughout has none: it never dies."""
        role = meta.get(node).role
        if role == "accumulated":  # dies when it is reduced; else the caller holds it on
            return [self._accumulated[meta.get(node).fqn or ""]] if self.program.sync else []
        if role == "tangent":
            caller += self._allocate(node, Category.TEMP)
            return []
        if role in meta.HELD:
            return []
        return saved.pop(0)

    def _phase(
        self,
        phase: meta.Phase,
        graph: fx.Graph,
        env: dict[fx.Node, list[int]],
        start: Vector,
        stop: int | None,
    ) -> PhaseBytes:
        places = points(self.schedule, graph)
        after: list[Vector] = []
        during: list[Vector] = []
        dead = last_reads(graph)
        for row in graph.nodes:
            if row.op not in ("call_function", "call_module") or row.target is operator.getitem:
                continue
            picks = [user for user in row.users if user.target is operator.getitem]
            drops = [n for reader in (row, *picks) for n in dead[reader] if n is not row]
            if row.op == "call_module":
                tokens = [env.get(n, []) for n in row.all_input_nodes]
                owned = {n for n in drops if n in env}
                made = self._region(row, picks, tokens, owned, after, during, stop)
                if made is None:
                    break
                for node in owned:
                    del env[node]
                env.update(zip(picks, made, strict=True))
                drops = [n for n in drops if n not in owned]
                during.append(list(self.live))
            else:
                self._row(row, picks, env)
                during.append(list(self.live))
            if stop is not None and len(during) == stop + 1:
                break
            for node in drops:
                self._release(env.pop(node, []))
            after.append(list(self.live))
        labels = [((p.node or p.row).name, p.module) for p in places]
        return PhaseBytes.of(phase, labels, _matrix(after), _matrix(during), start)

    def _row(self, row: fx.Node, picks: list[fx.Node], env: dict[fx.Node, list[int]]) -> None:
        if row.target is ops.wait:
            for source in meta.operands(row):
                if meta.get(source).role == "unshard":
                    self._relabel(env[source], Category.UNSHARDED_PARAM)
        elif row.target is ops.free:
            for source in meta.operands(row):
                self._end(env[source])
        elif ops.is_in_place(row):
            for pick, source in zip(picks, meta.operands(row), strict=True):
                env[pick] = env[source]
                self._hold(env[pick])
                self._relabel(env[pick], Category.SHARDED_GRAD)
        elif row.target in MADE_BY:
            for pick in picks:
                env[pick] = self._allocate(pick, MADE_BY[row.target], row.target is ops.store)
        else:  # a view of a buffer that cuts its padding
            env[row] = [t for n in row.all_input_nodes for t in env[n]]
            self._hold(env[row])

    def _region(
        self,
        row: fx.Node,
        picks: list[fx.Node],
        inputs: list[list[int]],
        owned: set[fx.Node],
        after: list[Vector],
        during: list[Vector],
        stop: int | None,
    ) -> list[list[int]] | None:
        """Walk the region that `row` calls; returns the tokens of its results.

        `owned` are arguments that the caller has dropped: they die inside, at their last reader.
        """
        region = self.schedule.regions[str(row.target)]
        base = meta.get(row).module
        phase = meta.get(row).phase
        env: dict[fx.Node, list[int]] = {}
        tokens_of: dict[int, int] = {}  # storage of the stored body -> token of this call
        for place, argument, tokens in zip(
            region.graph.find_nodes(op="placeholder"), row.all_input_nodes, inputs, strict=True
        ):
            env[place] = tokens
            for storage, token in zip(meta.storages(place), tokens, strict=False):
                tokens_of[id(storage)] = token
            if not tokens:
                for storage_id in meta.storage_ids(place):
                    tokens_of.setdefault(storage_id, -1)
            if argument not in owned:
                self._hold(tokens)
        outputs = meta.operands(region.graph.find_nodes(op="output")[0])
        labels = self._region_categories(region.body, outputs, picks)
        dead = last_reads(region.graph)
        for node in region.body:
            tokens = []
            for storage in meta.storages(node):
                if id(storage) not in tokens_of:
                    default = Category.ACTIVATION if phase == "forward" else Category.TEMP
                    category = labels.get(id(storage), default)
                    module = meta.get(node).module
                    fqn = f"{base}{module}".strip(".") if module.startswith(".") else module
                    thing = Thing(node.name, fqn, category, storage.nbytes())
                    tokens_of[id(storage)] = self._new(thing)
                    tokens.append(tokens_of[id(storage)])
                elif tokens_of[id(storage)] >= 0:
                    tokens.append(tokens_of[id(storage)])
                    self._hold([tokens_of[id(storage)]])
            env[node] = tokens
            during.append(list(self.live))
            if stop is not None and len(during) == stop + 1:
                return None
            for source in dead[node]:
                self._release(env.pop(source, []))
            after.append(list(self.live))
        for place in region.graph.find_nodes(op="placeholder"):
            if not place.users:
                self._release(env.pop(place, []))
        made = [env[node] for node in outputs]
        return made

    def _region_categories(
        self, body: list[fx.Node], outputs: list[fx.Node], picks: list[fx.Node]
    ) -> dict[int, Category]:
        """Categories of storages of a body that are gradients, seen from this call of it."""
        found: dict[int, Category] = {}
        for node, pick in zip(outputs, picks, strict=True):
            for inner, outer in zip(meta.storages(node), meta.storages(pick), strict=True):
                if id(outer) in self._categories:
                    found[id(inner)] = self._categories[id(outer)]
        makers: dict[int, fx.Node] = {}
        for node in body:
            for storage in meta.storage_ids(node):
                makers.setdefault(storage, node)
        for node in reversed(body):
            sent = any(found.get(s) is Category.REDUCE_SCATTER for s in meta.storage_ids(node))
            if not sent or not is_reduce_copy(node.target, dict(node.kwargs)):
                continue
            sources = [storage for n in node.all_input_nodes for storage in meta.storage_ids(n)]
            for storage in sources:
                maker = makers.get(storage)
                again = maker is not None and is_reduce_copy(maker.target, dict(maker.kwargs))
                category = Category.REDUCE_SCATTER if again else Category.UNSHARDED_GRAD
                found.setdefault(storage, category)
        return found

    # -- storages --------------------------------------------------------------------------------

    def _allocate(self, node: fx.Node, category: Category, host: bool = False) -> list[int]:
        tag = meta.get(node)
        return [
            self._new(Thing(tag.fqn or node.name, tag.module, category, storage.nbytes(), host))
            for storage in meta.storages(node)
        ]

    def _new(self, thing: Thing) -> int:
        token = self._tokens
        self._tokens += 1
        self.things[token] = thing
        self.refs[token] = 1
        self.live[_column(thing)] += thing.bytes
        return token

    def _hold(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self.refs:
                self.refs[token] += 1

    def _release(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self.refs:
                self.refs[token] -= 1
                if not self.refs[token]:
                    self._end([token])

    def _end(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            thing = self.things.pop(token, None)
            self.refs.pop(token, None)
            if thing is not None:
                self.live[_column(thing)] -= thing.bytes

    def _relabel(self, tokens: Sequence[int], category: Category) -> None:
        for token in tokens:
            thing = self.things[token]
            self.live[_column(thing)] -= thing.bytes
            self.things[token] = dataclasses.replace(thing, category=category)
            self.live[_column(self.things[token])] += thing.bytes


MADE_BY = {
    ops.all_gather: Category.ALL_GATHER,
    ops.cast: Category.ALL_GATHER,
    ops.load: Category.ALL_GATHER,
    ops.reshard: Category.SHARDED_PARAM,
    ops.reduce_scatter: Category.SHARDED_GRAD,
    ops.comm_hook: Category.SHARDED_GRAD,
    ops.store: Category.SHARDED_GRAD,
}


def _returned(output: fx.Node) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(output.args[0], lambda n: nodes.append(n))
    return list(dict.fromkeys(nodes))


def _matrix(rows: list[Vector]) -> Matrix:
    return np.array(rows, dtype=np.int64).reshape(len(rows), WIDTH)


def alive_at(program: Program, held: list[Thing], phase: str, point: int) -> list[Thing]:
    """Everything alive while the operator before ``(phase, point)`` runs, largest first."""
    walk = Walk(program, [0] * WIDTH)
    walk.run(until=(phase, point))
    return sorted([*held, *walk.things.values()], key=lambda t: t.bytes, reverse=True)
