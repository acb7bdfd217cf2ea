"""Writes a program as text, line by line (`fxshard.ir.text` has the lines, and reads them)."""

from __future__ import annotations

import builtins
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch import export, graphs
from fxshard._torch.export import OpOverload
from fxshard.errors import TextError
from fxshard.ir import outline
from fxshard.ir.domain import LAYOUT, OPEN
from fxshard.ir.literals import NoText, Writer
from fxshard.ir.program import Fact, Program
from fxshard.ir.schedule import Schedule

VERSION = 1

# Fields of Program that the first line has; the others have lines of their own.
FLAGS = (
    *("replicas", "meshes", "sync", "accumulated", "partial", "kept", "comm_hook", "offloaded"),
    "gradients",
    *("given", "forward_prefetch", "backward_prefetch", "max_inflight", "optimizer_in_backward"),
    *("reload_ahead", "whole", "max_norm"),
    *("compiled", "checkpoints", "closed", "reached", "needs", "common"),
)
# Functions of Python and of torch that compute sizes, by their names in the text.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{n}": found for n, found in vars(operator).items() if callable(found)},
    **{f"math.{n}": found for n, found in vars(math).items() if callable(found)},
    **{f"builtins.{n}": getattr(builtins, n) for n in ("max", "min", "round", "abs", "pow")},
    **{
        f"torch.{n}": found
        for n, found in vars(torch).items()
        if n.startswith(("sym_", "_sym_")) and callable(found)
    },
}
FUNCTIONS = {
    name: found
    for name, found in FUNCTIONS.items()
    if not isinstance(found, type) and name.rpartition(".")[2] not in ("attrgetter", "methodcaller")
}
_WORD_OF = {found: name for name, found in reversed(FUNCTIONS.items())}


def write(program: Program) -> str:
    """All of `program` as text, which `parse` makes an equal program of.

    Raises:
        TextError: it holds what has no text: a function of the user's, an operator of higher order,
            code of Inductor's, a schedule that is not the one of its graph. Names what holds it.
    """
    writer = Writer(program.device)
    constants = [
        f"constant {name!r} {_constant(writer, name, value)}"
        for name, value in program.constants.items()
    ]
    nodes = _nodes(program, writer)
    outlined = program.schedule is not None
    if outlined:
        _check_schedule(program)
    lines = [
        " ".join(filter(None, [f"program v{VERSION}", _flags(program, writer, outlined)])),
        f"signature {_fields(writer, 'its signature', program.signature)}",
        *_units(program, writer),
        *_buckets(program),
        *(f"call {c.module!r} {c.number} {c.parent}" for c in program.calls),
    ]
    domain = _domain(program, writer)  # it may know symbols that no node has
    lines += [f"symbol {_symbol(symbol)}" for symbol in writer.symbols.values()]
    after = [*_users(program), *_names(program), "end", ""]
    return "\n".join([*lines, *domain, *constants, "graph:", *nodes, *after])


def _value(writer: Writer, what: str, value: Any) -> str:
    try:
        return writer.value(value)
    except NoText as error:
        raise _no_text(what, error) from None


def _fields(writer: Writer, what: str, of: Any, without: tuple[str, ...] = ()) -> str:
    try:
        return writer.fields(of, without=without)
    except NoText as error:
        raise _no_text(what, error) from None


def _no_text(what: str, error: NoText) -> TextError:
    return TextError(f"the program cannot be written as text: {what} holds {error}.")


def _flags(program: Program, writer: Writer, outlined: bool) -> str:
    own = {field.name: field for field in dataclasses.fields(Program)}
    mode = type(program.fake_mode)
    found = {"world_size": program.world_size, "device": program.device, "mode": mode}
    for name in FLAGS:
        value, field = getattr(program, name), own[name]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default:
            found[name] = value
    facts = tuple(fact.name for fact in Fact if fact in program.facts)
    found |= {"facts": facts} if facts else {}
    found |= {"outlined": True} if outlined else {}
    return " ".join(f"{name}={_value(writer, name, value)}" for name, value in found.items())


def _units(program: Program, writer: Writer) -> Iterator[str]:
    for unit in program.units:
        name = f"unit {unit.name}"
        more = _fields(writer, name, unit, ("index", "fqn", "params", "ignored"))
        yield f"unit {unit.index} {unit.fqn!r} {more}"
        for kind, params in (("param", unit.params), ("ignored", unit.ignored)):
            for param in params:
                if param.extension is not None:
                    raise TextError(
                        f"the program cannot be written as text: parameter {param.fqn!r} is of a "
                        f"tensor subclass, whose functions have none."
                    )
                if param.placed is not None:
                    raise TextError(
                        f"the program cannot be written as text: parameter {param.fqn!r} is a "
                        f"DTensor of tensor parallelism, whose mesh has none. Dump it "
                        f"(program.dump()), which is for people."
                    )
                same: tuple[str, ...] = ("aliases",) if param.aliases == (param.fqn,) else ()
                same += ("compute_dtype",) if param.compute_dtype == param.dtype else ()
                more = _fields(writer, name, param, ("fqn", "unit", *same))
                yield f"  {kind} {param.fqn!r} {more}"


def _buckets(program: Program) -> Iterator[str]:
    for bucket in program.buckets:
        packed = f" packed={sorted(bucket.packed)}" if bucket.packed else ""
        yield " ".join(["bucket", *map(repr, bucket.fqns)]) + packed


def _domain(program: Program, writer: Writer) -> list[str]:
    domain = program.domain
    if domain is None:
        return []
    places, symbols = dict(domain.places), dict(domain.symbols)
    held = dataclasses.replace(domain, places=places, symbols=symbols)
    return [f"domain {_fields(writer, 'its domain', held)}"]


def _symbol(symbol: sympy.Symbol) -> str:
    """Its name and what is assumed of it."""
    given = {name: value for name, value in symbol.assumptions0.items() if value is not None}
    if sympy.Symbol(symbol.name, **given) != symbol:
        raise TextError(f"the program cannot be written as text: {symbol!r} is no plain symbol.")
    return " ".join([symbol.name, *(f"{name}={given[name]}" for name in sorted(given))])


def _constant(writer: Writer, name: str, value: torch.Tensor) -> str:
    """The metadata of a tensor with data: what a fake of it would have."""
    writer.of_constants = True
    try:
        return _value(writer, f"constant {name}", value)
    finally:
        writer.of_constants = False


def _nodes(program: Program, writer: Writer) -> list[str]:
    by_tag: dict[int, str] = {}
    lines: list[str] = []
    for node in program.graph.nodes:
        what = f"%{node.name} ({node.op} {node.target})"
        try:
            lines.append("  " + _node(node, writer, by_tag))
        except NoText as error:
            raise _no_text(what, error) from None
    named = zip(program.values, program.results, strict=True)
    lines += [f"  return {r.kind} {r.name!r} %{value.name}" for value, r in named]
    return lines


def _node(node: fx.Node, writer: Writer, by_tag: dict[int, str]) -> str:
    held = node.meta
    if node.op == "output":
        line = "output"
    elif node.op == "placeholder":
        line = f"%{node.name} = placeholder({node.target!r})"
        if node.args or node.kwargs:
            raise NoText("a default value")
    elif node.op == "call_function":
        parts = [writer.value(a) for a in node.args]
        parts += [f"{key}={writer.value(value)}" for key, value in node.kwargs.items()]
        line = f"%{node.name} = {_operator(node)}({', '.join(parts)})"
    else:
        raise NoText(f"a node of the kind {node.op}")
    if "val" in held:
        line += f" : {writer.value(held['val'])}"
    if LAYOUT in held or OPEN in held:
        layout, opened = held.get(LAYOUT), held.get(OPEN)
        line += f" open {writer.value(layout)} {writer.value(opened)} {OPEN in held}"
    tag = held.get("fxshard")
    if tag is None:
        return line
    if id(tag) not in by_tag:  # nodes alike share one
        words = [tag.phase, tag.role, repr(tag.module)]
        words += filter(None, [writer.fields(tag, without=("phase", "role", "module"))])
        by_tag[id(tag)] = " ".join(words)
    return f"{line} | {by_tag[id(tag)]}"


def _operator(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, OpOverload):
        name = str(target)
        if export.operator_named(name) is target:
            return name
    elif callable(target) and target in _WORD_OF:
        return _WORD_OF[target]
    raise NoText(f"an operator that is no operator of torch's registry: {target}")


def _users(program: Program) -> Iterator[str]:
    """Readers of a value where they do not stand in the order of the graph: passes go by it."""
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    for node in program.graph.nodes:
        users = list(node.users)
        if users != sorted(users, key=place.__getitem__):
            named = ("'output'" if u.op == "output" else f"%{u.name}" for u in users)
            yield f"  users %{node.name} [{', '.join(named)}]"


def _names(program: Program) -> list[str]:
    """What FX knows of names besides those of the nodes, as a graph that is read would."""
    used, count = graphs.given_names(program.graph)
    read = fx.Graph()
    for node in program.graph.nodes:
        if node.op != "output":
            graphs.take_name(read, node.name)
    own_used, own_count = graphs.given_names(read)
    names = sorted(used - own_used - {"output"})
    numbers = {word: n for word, n in sorted(count.items()) if own_count.get(word) != n}
    numbers.pop("output", None)
    return [f"names used={names} count={numbers}"] if names or numbers else []


def _check_schedule(program: Program) -> None:
    """Raise TextError if the schedule is not the one that the graph gives."""
    schedule = program.schedule
    assert schedule is not None
    for region in schedule.regions.values():
        if region.compiled is not None:
            raise TextError(
                f"the program cannot be written as text: {region.name} holds code that Inductor "
                f"has generated. Write the program before compile-regions."
            )
    if _rows(schedule) != _rows(outline.build(program, schedule.regions.values())):
        raise TextError(
            "the program cannot be written as text: its schedule is not the one of its graph. "
            "Write the program before outline-regions."
        )


def _rows(schedule: Schedule) -> Any:
    """What two schedules of one graph have in common if they are equal."""
    outer = [
        (phase, [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes])
        for phase, graph in schedule.phases()
    ]
    runs = [n.meta.get("run") for _, graph in schedule.phases() for n in graph.nodes]
    return outer, runs, {region.name: region.digest for region in schedule.regions.values()}
