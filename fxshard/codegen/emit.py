"""Schedule -> readable Python source -> two functions that run it; one, if it is a whole step.

The emitted code follows the schedule literally: arguments come in a list that is cleared, every
value is dropped by ``x = None`` after its last reader, collectives are calls on the World.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import linecache
import logging
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from fxshard._torch import modes
from fxshard._torch.export import OpOverload
from fxshard.capture import rng
from fxshard.codegen import spelling
from fxshard.codegen.regions import load as load_regions
from fxshard.codegen.world import AllRanks, World
from fxshard.errors import ConfigError
from fxshard.ir import ops, tags
from fxshard.ir.program import Program
from fxshard.ir.schedule import Region, Schedule, last_reads
from fxshard.verify.orders import ENTRY

# Operators that worlds do not have: the caller binds a function of the same name.
BOUND = ("step", "grad_norms", "keep", "kept")


class StepParameters(Protocol):
    """Steps parameters, by FQN."""

    def __call__(
        self, params: list[str], grads: list[list[Tensor]], scales: Sequence[Tensor] = (), /
    ) -> Optimizer:
        """Args:
        params: FQNs.
        grads: per rank of this process and parameter, its sharded gradient.
        scales: per rank, what gradients are multiplied by before, in place; empty: nothing.
        """


# ``(FQNs, gradients per rank, squared, dtype)`` -> per rank, the norms in one tensor.
GradNorms = Callable[[list[str], list[list[Tensor]], bool, torch.dtype], list[list[Tensor]]]

log: logging.Logger = logging.getLogger("fxshard")


class Executor:
    """Runs the schedule of a program on a world.

    Attributes:
        code: the emitted Python source.
        communicates: the phases that have collectives.
        draws: the phases that draw random numbers.
    """

    def __init__(self, program: Program, world: World | AllRanks) -> None:
        require_schedule(program)
        assert program.schedule is not None
        self.program = program
        self.schedule: Schedule = program.schedule
        self.world = world
        self.code: str = emit(program)
        self._functions = load(self.code, program)
        self._functions.update(compiled_functions(program))
        self._in_ranges: dict[str, Any] | None = None
        self._random = {
            region.name
            for region in self.schedule.regions.values()
            if any(tags.is_random(node) for node in region.body)
        }
        rows = {name: list(graph.nodes) for name, graph in self.schedule.phases()}
        self.draws: set[str] = {
            n for n, run in rows.items() if self._random & {row.target for row in run}
        }
        phases = {name: program.phase(name) for name, _ in self.schedule.phases()}
        self.communicates: set[str] = {
            n for n, run in phases.items() if any(map(ops.communicates, run))
        }

    def forward(self, args: list[list[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Run forward.

        Args:
            args: per rank that this process runs, values in the order of `forward_inputs`;
                the inner lists are cleared.

        Returns:
            the model's output tensors (of the first rank), and per rank the saved values.
        """
        results = self._run("forward", self.schedule.forward, args)
        return list(results[0][0]), [list(saved) for _, saved in results]

    def backward(self, args: list[list[Tensor | None]]) -> list[list[Tensor]]:
        """Run backward. Returns gradients per rank.

        Args:
            args: as for `forward`, in the order of `backward_inputs`; None for what is not read.
        """
        assert self.schedule.backward is not None
        return [list(grads) for grads in self._run("backward", self.schedule.backward, args)]

    def step(self, args: list[list[Tensor]]) -> list[list[Tensor]]:
        """Run all of a whole step. Returns per rank the loss, and the norm if it clips.

        Args:
            args: as for `forward`, in the order of `step_inputs`.
        """
        forward, backward = self.schedule.forward, self.schedule.backward
        assert self.program.whole and backward is not None
        if not isinstance(self.world, AllRanks):
            return [list(self._run("step", forward, args)[0])]
        rows = [dict(zip([n.name for n in self.step_inputs], row, strict=True)) for row in args]
        first = [[row[node.name] for node in self.forward_inputs] for row in rows]
        results = self._run("forward", forward, first)
        for row, (_, values) in zip(rows, results, strict=True):
            row.update(zip(saved_names(self.schedule), values, strict=True))
        second = [[row[node.name] for node in self.backward_inputs] for row in rows]
        norms = self._run("backward", backward, second)
        return [[*outputs, *rest] for (outputs, _), rest in zip(results, norms, strict=True)]

    @functools.cached_property
    def step_inputs(self) -> list[fx.Node]:
        """Placeholders of a whole step: those of both phases that forward does not make."""
        made = saved_names(self.schedule)
        every = {n.name: n for n in (*self.forward_inputs, *self.backward_inputs)}
        return [node for name, node in every.items() if name not in made]

    def bind_step(self, step: StepParameters) -> None:
        """Let ``fxshard.runtime.step`` call `step`."""
        self._functions["step"] = step

    def bind_norms(self, norms: GradNorms) -> None:
        """Let the operator ``grad_norms`` call `norms`."""
        self._functions["grad_norms"] = norms

    def bind_kept(self, keep: Callable[..., None], kept: Callable[..., Any]) -> None:
        """Let the operators of these names call them: ``keep(fqns, per rank)``, ``kept(fqns)``."""
        self._functions |= {"keep": keep, "kept": kept}

    @functools.cached_property
    def forward_inputs(self) -> list[fx.Node]:
        """Placeholders of forward."""
        return list(self.schedule.forward.find_nodes(op="placeholder"))

    @functools.cached_property
    def backward_inputs(self) -> list[fx.Node]:
        """Placeholders of backward."""
        assert self.schedule.backward is not None
        return list(self.schedule.backward.find_nodes(op="placeholder"))

    def _run(self, phase: str, graph: fx.Graph, args: Sequence[list[Any]]) -> list[Any]:
        parts = {"forward", "backward"} if phase == "step" else {phase}
        random = not parts.isdisjoint(self.draws)
        draws = rng.kept(self.program.device) if random else contextlib.nullcontext()
        with self.world.phase(phase, not parts.isdisjoint(self.communicates)), draws:
            if isinstance(self.world, AllRanks):
                names = [*self.schedule.regions, *BOUND]
                regions = {n: self._functions[n] for n in names if n in self._functions}
                return self.world.run(graph, regions, self._random, args)
            name = "whole_step" if phase == "step" else phase  # "step" is what its rows call
            return [self._function(name)(self.world, args[0])]

    def _function(self, phase: str) -> Callable[..., Any]:
        """The emitted function; while a profiler runs, one whose rows are ranges."""
        if not modes.profiled():
            return self._functions[phase]
        if self._in_ranges is None:
            made = load(emit(self.program, ranges=True), self.program)
            regions = {name: self._functions[name] for name in self.schedule.regions}
            bound = {name: self._functions[name] for name in BOUND if name in self._functions}
            made.update(regions | bound)
            self._in_ranges = made
        return self._in_ranges[phase]


class Probe(Protocol):
    """What a `TracedExecutor` reports to (fxshard.validation.tracker.Tracker is one)."""

    def begin(self, phase: str) -> None:
        """A phase begins."""

    def at(self) -> None:
        """One operator or row is done, and values that it was the last to read are dropped."""

    def stepping(self, grads: list[list[Tensor]], step: Callable[[], Optimizer]) -> Optimizer:
        """Call `step`, which steps an optimizer with `grads` and returns it."""


class TracedExecutor(Executor):
    """An Executor whose code calls ``at()`` after every operator and row. Nothing else differs."""

    def __init__(self, program: Program, world: World | AllRanks, probe: Probe) -> None:
        super().__init__(program, world)
        self.code: str = emit(program, points=True)
        self._functions = load(self.code, program, probe.at)
        self._functions["begin"] = probe.begin
        self._functions.update(compiled_functions(program, probe.at))
        self._probe = probe

    def bind_step(self, step: StepParameters) -> None:
        def watched(
            params: list[str], grads: list[list[Tensor]], scales: Sequence[Tensor] = ()
        ) -> Optimizer:
            return self._probe.stepping(grads, lambda: step(params, grads, scales))

        super().bind_step(watched)

    def _run(self, phase: str, graph: fx.Graph, args: Sequence[list[Any]]) -> list[Any]:
        self._probe.begin("forward" if phase == "step" else phase)
        return super()._run(phase, graph, args)

    def _function(self, phase: str) -> Callable[..., Any]:
        return self._functions[phase]


def load(source: str, program: Program, at: Callable[[], None] | None = None) -> dict[str, Any]:
    """Execute emitted source; returns its functions by name."""
    namespace: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "record_function": torch.profiler.record_function,
        "inf": math.inf,
        "nan": math.nan,
        "at": at,
    }
    assert program.schedule is not None
    for graph in (*(r.graph for r in program.schedule.regions.values()), program.graph):
        for node in graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                namespace[function_name(node.target)] = node.target
    filename = f"<fxshard program {id(program):#x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def compiled_functions(
    program: Program, at: Callable[[], None] | None = None
) -> dict[str, Callable[[list[Any]], Any]]:
    """The functions of compiled regions, which replace the emitted ones, by name."""
    assert program.schedule is not None
    found = program.schedule.regions
    compiled = {r.name: r.compiled for r in found.values() if r.compiled is not None}
    functions, failed = load_regions(compiled, at) if compiled else ({}, {})
    for name, error in failed.items():
        found[name] = dataclasses.replace(found[name], compiled=None)
        log.warning("fxshard: %s stays eager, its kernels cannot be built: %s", name, error)
    return functions


def function_name(target: Any) -> str:
    """``aten_mm``, ``aten_mul_Tensor``: the name by which emitted code calls an operator.

    Sizes are computed by functions of Python's and torch's, whose names are those of nodes too:
    ``_operator_neg``, ``torch_sym_max``.
    """
    if not isinstance(target, OpOverload):
        return f"{target.__module__}_{target.__name__}".replace(".", "_")
    return str(target).removesuffix(".default").replace(".", "_")


def emit(program: Program, *, points: bool = False, ranges: bool = False) -> str:
    """Python source: a function per region, then ``forward`` and ``backward``, or ``whole_step``.

    Args:
        program: with a schedule.
        points: call ``at()`` after every operator and row.
        ranges: run each row in a range of the profiler (`range_of`).
    """
    assert program.schedule is not None
    schedule = program.schedule
    parts = [_region(program, region, points) for region in schedule.regions.values()]
    if program.whole and schedule.backward is not None:
        parts.append(_whole(program, schedule, points, ranges))
    else:
        found = schedule.phases()
        parts += [_phase(program, name, graph, points, ranges) for name, graph in found]
    return "\n\n\n".join(parts) + "\n"


def _region(program: Program, region: Region, points: bool) -> str:
    lines = [f"def {region.name}(args):"]
    lines += _unpack(region.graph)
    dead = last_reads(region.graph)
    for node in region.body:
        comment = _comment(tags.get(node).module) if tags.get(node).module.strip(".") else ""
        lines.append(f"    {node.name} = {_call(node)}{comment}")
        lines += _drop(dead[node])
        if points and tags.BETWEEN_POINTS not in node.meta:
            lines.append("    at()")
    lines.append(f"    return {_tuple(_output(region.graph))}")
    return "\n".join(lines)


def range_of(program: Program, row: fx.Node) -> str:
    """The name of a row in a profile: FSDP2's, where that has one for it, and the unit's FQN."""
    tag, spec = tags.get(row), ops.of(row)
    reduces = tag.role == "reduce" or (tag.role == "wait" and tag.phase == "backward")
    if row.op == "call_module":
        what = f"fxshard::{row.target}"
    elif spec.collective and tag.role == "unshard":
        what = "FSDP::all_gather"
    elif row.target is ops.unpack:
        what = "FSDP::all_gather_copy_out"
    elif row.target is ops.free:
        what = f"FSDP::post_{tag.phase}{'_reshard' if tag.phase == 'backward' else ''}"
    elif spec.collective and reduces:
        what = "FSDP::post_backward_reduce"
    else:
        what = f"fxshard::{spec.name or row.name}"
    fqn = program.units[tag.unit or 0].fqn
    return f"{what} ({fqn})" if fqn else what


def _phase(program: Program, name: str, graph: fx.Graph, points: bool, ranges: bool) -> str:
    lines = [f"def {name}(world, args):", *_unpack(graph), *_entry(graph)]
    lines += _rows(program, graph, points, ranges)
    if any(row.target is ops.store for row in graph.nodes):  # the caller reads them on the CPU
        lines.append("    world.synchronize('store')")
    lines.append(f"    return {_value(_output(graph))}")
    return "\n".join(lines)


def saved_names(schedule: Schedule) -> list[str]:
    """What forward saves for backward, by name."""
    _, saved = _output(schedule.forward)
    return [node.name for node in saved]


def _whole(program: Program, schedule: Schedule, points: bool, ranges: bool) -> str:
    """Both phases as one function: what forward saves stays in its variable."""
    assert schedule.backward is not None
    graphs = schedule.forward, schedule.backward
    (outputs, _), norms = map(_output, graphs)
    made = saved_names(schedule)
    given: dict[str, bool] = {}  # and whether anything reads it
    for node in (n for graph in graphs for n in graph.find_nodes(op="placeholder")):
        if node.name not in made:
            given[node.name] = given.get(node.name, False) or bool(node.users)
    unused = [name for name, is_read in given.items() if not is_read]
    lines = ["def whole_step(world, args):", f"    {_tuple([*given])} = args", "    args.clear()"]
    lines += [f"    {' = '.join(unused)} = None"] if unused else []
    lines += dict.fromkeys(line for graph in graphs for line in _entry(graph))
    again = {node.name for node in schedule.backward.find_nodes(op="placeholder")}
    lines += _rows(program, schedule.forward, points, ranges, again)
    lines += ['    begin("backward")'] if points else []
    lines += _rows(program, schedule.backward, points, ranges, {node.name for node in outputs})
    lines.append(f"    return {_tuple([node.name for node in (*outputs, *norms)])}")
    return "\n".join(lines)


def _rows(
    program: Program,
    graph: fx.Graph,
    points: bool,
    ranges: bool,
    kept: Collection[str] = (),
) -> list[str]:
    """The rows of a phase. The variables of `kept` are not dropped: what follows reads them."""
    lines: list[str] = []
    dead = last_reads(graph)
    stores = any(row.target is ops.store for row in graph.nodes)
    for row in graph.nodes:
        if row.op not in ("call_function", "call_module") or row.target is operator.getitem:
            continue
        unit = _comment(program.units[tags.get(row).unit or 0].name)
        items = [user for user in row.users if user.target is operator.getitem]
        targets = f"{_tuple([item.name for item in items])} = " if items else ""
        drops = [n for reader in (row, *items) for n in dead[reader] if n is not row]
        drops = [node for node in drops if node.name not in kept]
        tag = tags.get(row)
        lines += [f"    world.wait_event({tag.stream!r}, {event!r})" for event in tag.waits]
        inside = "    "
        if ranges:
            lines.append(f"    with record_function({range_of(program, row)!r}):")
            inside += inside
        if row.op == "call_module":
            lines.append(f"{inside}args = [{', '.join(n.name for n in row.all_input_nodes)}]")
            lines += _drop(drops, inside)
            lines.append(f"{inside}{targets}{row.target}(args){unit}")
            drops = []
        elif row.target in ops.OPERATORS:
            if row.target is ops.step and stores:  # of the CPU: it reads what was stored
                lines.append(f"{inside}world.synchronize('store')")
            lines.append(f"{inside}{targets}{_asked(row)}{unit}")
        else:
            lines.append(f"{inside}{row.name} = {_call(row)}{unit}")
        ran = [tags.get(node) for node in row.meta.get("run", (row,))]
        lines += [f"    world.record_event({t.stream!r}, {t.records!r})" for t in ran if t.records]
        lines += _drop(drops)
        if points:
            lines.append("    at()")
    return lines


def _comment(name: str) -> str:
    """A name of the user's as a comment: whatever characters it has, it is not run as code."""
    return f"  # {name if name.isprintable() else ascii(name)}"


def _entry(graph: fx.Graph) -> list[str]:
    """Records the event of all that the caller ran before, if a launch waits for it."""
    waited = {event for row in graph.nodes for event in tags.get(row).waits}
    entries = [event for event in ENTRY.values() if event in waited]
    return [f"    world.record_event('compute', {event!r})" for event in entries]


def _asked(row: fx.Node) -> str:
    """An operator of ours: the call of a World's method, such as ``world.all_gather([a, b],
    pair=3)``, or of what is bound.
    """
    if row.target is ops.step:
        scale = "".join(f", [{_value(value)}]" for value in row.args[3:])
        return f"step({list(row.args[2])!r}, [{_names(row.args[0])}]{scale})"  # type: ignore[arg-type]
    if row.target is ops.grad_norms:
        how = f"{row.args[2]!r}, {row.args[3]!r}"
        return f"grad_norms({list(row.args[1])!r}, [{_names(row.args[0])}], {how})[0]"  # type: ignore[arg-type]
    if row.target is ops.keep:
        return f"keep({list(row.args[1])!r}, [{_names(row.args[0])}])"  # type: ignore[arg-type]
    if row.target is ops.kept:
        return f"kept({list(row.args[1])!r})[0]"  # type: ignore[arg-type]
    spec, options = ops.of(row), ops.given(row)
    for known in ("size", "stride", "rank"):  # the world knows its groups
        options.pop(known, None)
    if spec.asynchronous or row.target is ops.wait:
        options["pair"] = tags.get(row).pair
    more = "".join(f", {key}={_value(value)}" for key, value in options.items())
    return f"world.{spec.name}({_names(row.args[0])}{more})"


def _output(graph: fx.Graph) -> Any:
    (node,) = graph.find_nodes(op="output")
    return node.args[0]


def _unpack(graph: fx.Graph) -> list[str]:
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    unused = [node.name for node in graph.find_nodes(op="placeholder") if not node.users]
    if not names:
        return []
    lines = [f"    {_tuple(names)} = args", "    args.clear()"]
    return lines + ([f"    {' = '.join(unused)} = None"] if unused else [])


def _tuple(names: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, names)) + ("," if len(names) == 1 else "") + ")"


def _names(nodes: Any) -> str:
    return "[" + ", ".join(node.name for node in nodes) + "]"


def _drop(nodes: Sequence[fx.Node], indent: str = "    ") -> list[str]:
    names = list(dict.fromkeys(node.name for node in nodes))
    return [f"{indent}{' = '.join(names)} = None"] if names else []


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{node.args[0]}[{node.args[1]}]"
    expression = spelling.spelled(node, _value)
    if expression is not None:
        return expression
    args = [_value(a) for a in node.args]
    args += [f"{key}={_value(value)}" for key, value in node.kwargs.items()]
    return f"{function_name(node.target)}({', '.join(args)})"


def _value(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple):
        return _tuple([_value(item) for item in value])
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)


def require_schedule(program: Program) -> None:
    """Raise ConfigError if the passes have left nothing that could run."""
    if program.schedule is None:
        raise ConfigError(
            "the passes leave a program without a schedule, so that nothing would run. Put "
            "'outline-regions' at the end of them."
        )
