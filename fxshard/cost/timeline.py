"""Timeline: when each row of a step runs on each stream, estimated from the program alone.

A discrete-event walk over the schedule as it is. Each stream runs its rows in program order; a row
starts when its stream is free and the events that it waits for are recorded; a wait row ends when
its launch is done. The collectives of one group run one after the other, whatever their streams:
ProcessGroupNCCL has one stream per communicator (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
The CPU is taken to be ahead of the GPU at all times.

Identical layers share a region: each of its operators is costed once.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from tabulate import tabulate
from torch import fx

from fxshard.cost import operators
from fxshard.cost.trace_events import DrawsMemory
from fxshard.hardware import Hardware
from fxshard.host import files
from fxshard.ir import dump, ops, tags
from fxshard.ir.program import Program
from fxshard.ir.schedule import Region
from fxshard.verify.orders import ENTRY

OPTIMIZER = "(optimizer)"
EXCHANGE = "all-to-all"  # of the rows of matrices, to their owners and back


@dataclasses.dataclass(frozen=True, slots=True)
class TimelineRow:
    """One row of the schedule in time.

    Attributes:
        micro_batch: which of the step's, from 0; -1 for the optimizer.
        phase: "forward", "backward" or "optimizer".
        operation: as in `fxshard.ir.dump.Row`.
        unit: its unit's name.
        name: of the row in the schedule.
        stream: where it runs.
        start, end: seconds from the beginning of the step.
        exposed: seconds that the compute stream stands still before it.
        link_bytes, network_bytes: of a collective, what the rank sends within its node and to
            others (`operators.wire_bytes`).
    """

    micro_batch: int
    phase: str
    operation: str
    unit: str
    name: str
    stream: str
    start: float
    end: float
    exposed: float = 0.0
    link_bytes: float = 0.0
    network_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it runs."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """What an optimizer that runs after the programs reads and writes beside its parameters.

    Attributes:
        name: class of the optimizer.
        bytes: of its state between two steps, by FQN of the parameter.
        exchanges: bytes of what a rank sends or receives in each all-to-all of its step.
        flops: of updates of full matrices that one rank makes, at most, in bf16.
    """

    name: str
    bytes: Mapping[str, int]
    exchanges: tuple[int, ...] = ()
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class TimelinePhase:
    """The operators of one phase on the clock of the compute stream.

    Attributes:
        name, micro_batch: see `TimelineRow`.
        start: when it begins.
        operators: per point (`fxshard.ir.schedule.points`), the operator, if a region runs it; else
            "".
        ends: per point, when the compute stream is past it.
    """

    name: str
    micro_batch: int
    start: float
    operators: tuple[str, ...]
    ends: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class UnitSeconds:
    """What one unit takes, in seconds: on the compute stream, on the others, and exposed."""

    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step: how many, and the bytes that one rank sends in them.

    Attributes:
        collectives: launches; what is coalesced is one.
        link_bytes, network_bytes: within the node, and to other nodes.
        seconds: that they take, hidden or not.
    """

    collectives: int = 0
    link_bytes: float = 0.0
    network_bytes: float = 0.0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step takes on one rank.

    Attributes:
        hardware: where.
        rows: every row of every micro-batch in program order; the optimizer's last.
        phases: forward and backward of each micro-batch, operator by operator.
        model_flops: of forward and backward without anything recomputed (PaLM, appendix B).
        ideal_seconds: what those take at the hardware's peak.
        tail: seconds after the last row of the compute stream, until all streams are done.
        units: their names, in order; the root is the first.
    """

    hardware: Hardware
    rows: tuple[TimelineRow, ...]
    phases: tuple[TimelinePhase, ...]
    model_flops: int
    ideal_seconds: float
    tail: float
    units: tuple[str, ...] = ()

    @functools.cached_property
    def step_seconds(self) -> float:
        """From the first row until all streams are done."""
        return max((row.end for row in self.rows), default=0.0)

    @functools.cached_property
    def compute_seconds(self) -> float:
        """Of the step, what the compute stream works."""
        return sum(row.seconds for row in self.rows if row.stream == "compute")

    @functools.cached_property
    def communication_seconds(self) -> float:
        """What the other streams work, hidden or not; two of them at once count twice."""
        return sum(row.seconds for row in self.rows if row.stream != "compute")

    @functools.cached_property
    def exposed_communication_seconds(self) -> float:
        """Of the step, what the compute stream stands still, for collectives and copies."""
        return sum(row.exposed for row in self.rows) + self.tail

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: what the model's FLOPs take at peak, over what the step takes.

        Source: Chowdhery et al., PaLM (2022), appendix B. With several dtypes, each at its own
        peak.
        """
        return self.ideal_seconds / self.step_seconds if self.step_seconds else 0.0

    def by_unit(self) -> dict[str, UnitSeconds]:
        """Seconds of a step by unit; the optimizer after backward as a unit of its own."""
        used = {row.unit for row in self.rows}
        found = {unit: UnitSeconds() for unit in (*self.units, OPTIMIZER) if unit in used}
        for row in self.rows:
            now = found[row.unit]
            own = row.stream == "compute"
            found[row.unit] = UnitSeconds(
                now.compute + row.seconds * own,
                now.communication + row.seconds * (not own),
                now.exposed + row.exposed,
            )
        return found

    def traffic(self) -> dict[str, Traffic]:
        """What a rank sends in a step, by operation: "unshard", "reduce", "all-reduce", ..."""
        found: dict[str, Traffic] = {}
        collectives = {spec.operation for spec in ops.OPERATORS.values() if spec.collective}
        collectives.add(EXCHANGE)
        for row in self.rows:
            if row.operation in collectives:
                now = found.get(row.operation, Traffic())
                found[row.operation] = Traffic(
                    now.collectives + 1,
                    now.link_bytes + row.link_bytes,
                    now.network_bytes + row.network_bytes,
                    now.seconds + row.seconds,
                )
        return found

    def exposed(self, micro_batch: int) -> dict[tuple[str, str], float]:
        """Seconds exposed before each row of a micro-batch, by phase and name of the row."""
        return {
            (row.phase, row.name): row.exposed
            for row in self.rows
            if row.micro_batch == micro_batch
        }

    def to_perfetto(self, path: str | Path, memory: DrawsMemory | None = None) -> None:
        """Write a trace for ui.perfetto.dev: a track per stream, times as estimated.

        Args:
            path: of the file.
            memory: of the same plan: its bytes by category, on the same axis of time.
        """
        from fxshard.cost.perfetto import text

        files.write(path, text(self, memory))

    def summary(self) -> str:
        """Two lines: the step's time and what it is made of."""
        step, exposed = self.step_seconds, self.exposed_communication_seconds
        share = exposed / step if step else 0.0
        return (
            f"{1e3 * step:,.3f} ms a step on {self.hardware.name}, "
            f"{self.hardware.ranks_per_node} ranks per node; {self.mfu:.1%} of peak (MFU).\n"
            f"{1e3 * self.compute_seconds:,.3f} ms of it computing, {1e3 * exposed:,.3f} ms "
            f"({share:.1%}) waiting for communication, of {1e3 * self.communication_seconds:,.3f} "
            f"ms in all. An estimate: docs/cost.md says from what."
        )

    def table(self) -> str:
        """Milliseconds by unit; neighbours with equal figures are one row."""
        rows: list[tuple[list[str], tuple[str, ...]]] = []
        for unit, took in self.by_unit().items():
            figures = tuple(f"{1e3 * each:,.3f}" for each in dataclasses.astuple(took))
            if rows and rows[-1][1] == figures:
                rows[-1][0].append(unit)
            else:
                rows.append(([unit], figures))
        total = (self.compute_seconds, self.communication_seconds)
        figures = tuple(
            f"{1e3 * each:,.3f}" for each in (*total, self.exposed_communication_seconds)
        )
        table = [
            (f"x {len(units)}" if len(units) > 1 else "", dump.span(units), *figures)
            for units, figures in rows
        ]
        table.append(("", "step", *figures))
        headers = ("", "unit", "compute ms", "communication ms", "exposed ms")
        aligned = ("left", "left", "right", "right", "right")
        return tabulate(table, headers, tablefmt="simple", colalign=aligned, disable_numparse=True)


def estimate(
    programs: Sequence[Program], hardware: Hardware, optimizer: OptimizerState | None = None
) -> Estimate:
    """Walk a step; nothing runs.

    Args:
        programs: one per micro-batch, each with a schedule.
        hardware: where it would run.
        optimizer: what steps after them; None: nothing, or it is part of the programs.
    """
    walk = _StreamClocks(hardware, optimizer)
    for number, program in enumerate(programs):
        walk.run(program, number)
    if optimizer is not None:
        walk.step(optimizer, programs[-1])
    done = max([0.0, *walk.clock.values()])
    return Estimate(
        hardware,
        tuple(walk.rows),
        tuple(walk.phases),
        walk.model_flops,
        walk.ideal_seconds,
        tail=done - walk.clock["compute"],
        units=tuple(unit.name for unit in programs[-1].units) if programs else (),
    )


@dataclasses.dataclass(frozen=True)
class _RegionCost:
    """Of a region: names and seconds of its operators; and of those that count for the model, the
    position, the FLOPs and what they take at peak.
    """

    operators: list[str]
    seconds: list[float]
    flops: list[tuple[int, int, float]]


Span = tuple[float, float, float]  # start, end, exposed


class _StreamClocks:
    """A clock per stream, carried from row to row and from program to program."""

    def __init__(self, hardware: Hardware, optimizer: OptimizerState | None) -> None:
        self.hardware = hardware
        self.clock: dict[str, float] = {"compute": 0.0}  # stream -> until when it is taken
        self.rows: list[TimelineRow] = []
        self.phases: list[TimelinePhase] = []
        self.model_flops = 0
        self.ideal_seconds = 0.0
        self._state = optimizer.bytes if optimizer else {}

    def run(self, program: Program, micro_batch: int) -> None:
        """Forward and backward of one micro-batch."""
        assert program.schedule is not None, "outline-regions has not run"
        self._program, self._apart = program, program.apart
        self._costs: dict[str, _RegionCost] = {}
        self._events: dict[str, float] = {}
        self._groups: dict[str, float] = {}  # group of ranks -> until when its communicator is busy
        self._done: dict[fx.Node, float] = {}  # launch -> its end
        for phase, graph in program.schedule.phases():
            start = self.clock["compute"]
            self._events[ENTRY[phase]] = start
            ends: list[float] = []
            names: list[str] = []
            for node in graph.nodes:
                if node.op == "call_module":
                    cost = self._cost(program.schedule.regions[str(node.target)])
                    span = self._region(node, cost, ends)
                    names += cost.operators
                elif node.op == "call_function" and node.target is not operator.getitem:
                    span = self._operator(node)
                else:
                    continue
                ends.append(self.clock["compute"])
                names.append("")
                if node.op == "call_module" or node.target in ops.OPERATORS:  # no cut of a buffer
                    tag = tags.get(node)
                    unit = program.units[tag.unit or 0].name
                    self.rows.append(
                        TimelineRow(
                            micro_batch,
                            phase,
                            ops.of(node).operation,
                            unit,
                            node.name,
                            tag.stream,
                            *span,
                            *self._sent(node),
                        )
                    )
            self.phases.append(TimelinePhase(phase, micro_batch, start, tuple(names), tuple(ends)))

    def _region(self, call: fx.Node, cost: _RegionCost, ends: list[float]) -> Span:
        run: tuple[fx.Node, ...] = call.meta["run"]
        start = now = self.clock["compute"]
        exposed = 0.0
        for node, seconds in zip(run, cost.seconds, strict=True):
            tag = tags.get(node)
            if tag.waits:
                stands = max(now, *map(self._event, tag.waits)) - now
                exposed += stands
                start += stands  # wherever it stands still, the row is as long as it works
                now += stands
            now += seconds
            if tag.records is not None:
                self._events[tag.records] = now
            ends.append(now)
        for at, flops, seconds in cost.flops:
            if not tags.get(run[at]).recomputed:
                self.model_flops += flops
                self.ideal_seconds += seconds
        self.clock["compute"] = now
        return start, now, exposed

    def _operator(self, node: fx.Node) -> Span:
        tag, spec = tags.get(node), ops.of(node)
        free = self.clock.get(tag.stream, 0.0)
        ready = [free, *map(self._event, tag.waits)]
        group = ops.group(node) or ""
        if spec.collective:
            ready.append(self._groups.get(group, 0.0))
        if node.target is ops.wait:
            ready.append(self._done.get(_launch(node), 0.0))
        start = max(ready)
        end = start + self._seconds(node)
        if spec.collective:
            self._groups[group] = end
        if spec.asynchronous:
            self._done[node] = end
        if tag.records is not None:
            self._events[tag.records] = end
        self.clock[tag.stream] = end
        return start, end, start - free if tag.stream == "compute" else 0.0

    def _seconds(self, node: fx.Node) -> float:
        if node.target is ops.step:
            fqns = cast("list[str]", node.args[2])
            return optimizer_seconds(fqns, self._state, self._program, self.hardware)
        return operators.node_seconds(node, self.hardware, *self._ranks(node))

    def _ranks(self, node: fx.Node) -> tuple[int, int]:
        """How many ranks share a parameter on the mesh of a collective, and how far apart."""
        _, _, mesh = (ops.group(node) or "").partition("@")
        return self._program.grids[mesh].shards, self._apart[mesh]

    def _sent(self, node: fx.Node) -> tuple[float, float]:
        if not ops.of(node).collective:
            return 0.0, 0.0
        sent = operators.collective(node, *self._ranks(node))
        return operators.wire_bytes(sent, self.hardware)

    def _event(self, event: str) -> float:
        return self._events.get(event, 0.0)

    def _cost(self, region: Region) -> _RegionCost:
        if region.name not in self._costs:
            body = region.body
            flops = [
                (at, counted, counted / self.hardware.rate(operators.operand_dtype(node)))
                for at, node in enumerate(body)
                if (counted := operators.model_flops(node))
            ]
            self._costs[region.name] = _RegionCost(
                [dump.operation(node) for node in body], list(map(self._seconds, body)), flops
            )
        return self._costs[region.name]

    def step(self, optimizer: OptimizerState, program: Program) -> None:
        """The optimizer after all programs, on the compute stream: what no program steps itself.

        It runs when backward has returned, and so when the reductions are there. What it sends for
        updates of full matrices, compute waits for.
        """
        fqns = [result.name for result in program.results if result.kind == "grad"]
        seconds = optimizer_seconds(fqns, self._state, program, self.hardware)
        rate = self.hardware.rate(torch.bfloat16) * self.hardware.achievable
        start = self.clock["compute"]
        now, ranks = start, program.world_size
        for held in optimizer.exchanges:
            begin, now = now, now + operators.all_to_all_seconds(held, ranks, self.hardware)
            sent = operators.all_to_all_bytes(held, ranks, self.hardware)
            row = (-1, "optimizer", EXCHANGE, OPTIMIZER, optimizer.name, "exchange")
            self.rows.append(TimelineRow(*row, begin, now, 0.0, *sent))
        end = now + seconds + optimizer.flops / rate
        self.clock["compute"] = end
        if end > start:
            row = (-1, "optimizer", "step", OPTIMIZER, optimizer.name, "compute")
            self.rows.append(TimelineRow(*row, now, end, now - start))


def optimizer_seconds(
    fqns: Iterable[str], state: Mapping[str, int], program: Program, hardware: Hardware
) -> float:
    """Seconds of an optimizer's step over this rank's shards of some parameters, in one kernel.

    Every parameter and every state is read and written once, every gradient read once: what a
    fused kernel does. With offload it runs on the CPU, which has no figures here: 0.

    Args:
        fqns: the parameters; what is none of `program` (the gradient of an input) counts nothing.
        state: bytes of each one's state, as in `OptimizerState`.
    """
    moved = 0
    for fqn in fqns:
        if fqn in program.layouts:
            moved += 3 * program.layouts[fqn].shard_bytes
        moved += 2 * state.get(fqn, 0)
    if program.offloaded or not moved:
        return 0.0
    return hardware.launch_overhead + moved / hardware.memory_bandwidth


def _launch(wait: fx.Node) -> fx.Node:
    """The operator that a wait row waits for, or what it was handed from another phase."""
    first = tags.operands(wait)[0]
    while first.op == "call_function" and not ops.of(first).asynchronous:
        first = tags.source(first)
    return first
