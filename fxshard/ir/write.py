"""Writes a program as text, line by line (`fxshard.ir.text` has the lines, and reads them)."""

from __future__ import annotations

import builtins
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch import export, graphs, traced_collectives
from fxshard._torch.export import OpOverload
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard._torch.trees import TreeSpec
from fxshard.errors import TextError
from fxshard.ir import outline, tags
from fxshard.ir.domain import LAYOUT, OPEN
from fxshard.ir.literals import NoText, Writer, bare
from fxshard.ir.program import Fact, Program, Signature
from fxshard.ir.schedule import Schedule
from fxshard.ir.usual import (
    PLACEHOLDERS,
    begun,
    storages,
    usual_param,
    usual_placeholder,
    usual_signature,
    usual_tag,
)

VERSION = 2

# Fields of Program that the first line has; the others have lines of their own.
FLAGS = (
    *("replicas", "meshes", "sync", "accumulated", "partial", "kept", "comm_hook", "offloaded"),
    *("forward_prefetch", "backward_prefetch", "max_inflight", "optimizer_in_backward"),
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
    nodes = _Nodes(program, writer).lines()
    outlined = program.schedule is not None
    if outlined:
        _check_schedule(program)
    lines = [
        " ".join(filter(None, [f"program v{VERSION}", _flags(program, writer, outlined)])),
        *_facts(program),
        *_begun(program, writer),
        _signature(program.signature, writer),
        *_units(program, writer),
        *_buckets(program),
        *(f"call {bare(c.module)} {c.number} {c.parent}" for c in program.calls),
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
    found: dict[str, Any] = {"world_size": program.world_size}
    found |= {} if program.device == own["device"].default else {"device": program.device}
    found |= {} if mode is FakeTensorMode else {"mode": mode}
    for name in FLAGS:
        value, field = getattr(program, name), own[name]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default:
            found[name] = value
    found |= {"outlined": True} if outlined else {}
    return " ".join(f"{name}={_value(writer, name, value)}" for name, value in found.items())


def _facts(program: Program) -> list[str]:
    facts = [fact.name for fact in Fact if fact in program.facts]
    return [" ".join(["facts", *facts])] if facts else []


def _begun(program: Program, writer: Writer) -> list[str]:
    """What the pipeline has noted of the captured graph, where this graph does not say it."""
    if program.gradients is None or program.given is None:
        noted = {"gradients": program.gradients, "given": program.given}
        noted = {name: value for name, value in noted.items() if value is not None}
    else:
        gradients, given = begun(program.graph, program.results)
        noted = {} if program.gradients == gradients else {"gradients": program.gradients}
        noted |= {} if program.given == given else {"given": program.given}
        return [" ".join(["begun", *_texts(writer, noted)])]
    return [" ".join(["noted", *_texts(writer, noted)])] if noted else []


def _texts(writer: Writer, values: dict[str, Any]) -> list[str]:
    return [f"{name}={_value(writer, name, value)}" for name, value in values.items()]


def _signature(signature: Signature, writer: Writer) -> str:
    """Its trees, and what they do not say: that tensors go in and come out, under numbers."""
    usual = usual_signature(
        signature.in_spec,
        signature.out_spec,
        signature.inputs,
        signature.outputs,
        signature.training,
    )
    parts = ["signature", _tree(writer, signature.in_spec), "->"]
    parts.append(_tree(writer, signature.out_spec))
    return " ".join([*parts, *_changed(writer, "its signature", signature, usual)])


def _tree(writer: Writer, spec: TreeSpec) -> str:
    try:
        return writer.tree(spec)
    except NoText as error:
        raise _no_text("its signature", error) from None


def _changed(writer: Writer, what: str, of: Any, usual: Mapping[str, Any]) -> list[str]:
    """``name=value`` of the fields of a dataclass that are not as usual, or by default."""
    kind = type(of)
    known = {field.name: getattr(of, field.name) for field in dataclasses.fields(kind)}
    same = tuple(n for n, v in usual.items() if type(known[n]) is type(v) and known[n] == v)
    names = [n for n in usual if n not in same and _is_default(kind, n, known[n])]
    found = [f"{name}={_value(writer, what, known[name])}" for name in names]
    more = _fields(writer, what, of, (*same, *names))
    return [*found, *filter(None, [more])]


def _is_default(kind: Any, name: str, value: Any) -> bool:
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    return type(field.default) is type(value) and bool(field.default == value)


def _units(program: Program, writer: Writer) -> Iterator[str]:
    position = -1
    for unit in program.units:
        name = f"unit {unit.name}"
        more = _fields(writer, name, unit, ("index", "fqn", "kind", "params", "ignored"))
        yield f"unit {unit.index} {bare(unit.fqn)} {bare(unit.kind)} {more}".rstrip()
        for kind, params in (("param", unit.params), ("ignored", unit.ignored)):
            for param in params:
                if param.extension is not None:
                    raise TextError(
                        f"the program cannot be written as text: parameter {param.fqn!r} is of a "
                        f"tensor subclass, whose functions have none."
                    )
                usual = usual_param(param.fqn, param.unit, position, param.dtype)
                position = param.position
                usual |= {"dtype": param.dtype, "shape": param.shape}  # stands there as its type
                words = [kind, bare(param.fqn), writer.type(param.dtype, param.shape)]
                yield "  " + " ".join([*words, *_changed(writer, name, param, usual)])


def _buckets(program: Program) -> Iterator[str]:
    for bucket in program.buckets:
        packed = f" packed={sorted(bucket.packed)}" if bucket.packed else ""
        yield " ".join(["bucket", *map(bare, bucket.fqns)]) + packed


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
        return writer.value_of(repr(name), value)
    except NoText as error:
        raise _no_text(f"constant {name}", error) from None
    finally:
        writer.of_constants = False


class _Nodes:
    """Writes the graph. A tag says what `usual_tag` does not."""

    def __init__(self, program: Program, writer: Writer) -> None:
        self._program, self._writer = program, writer
        self._phase: tags.Phase = "forward"
        self._by_tag: dict[Any, str] = {}

    def lines(self) -> list[str]:
        lines: list[str] = []
        begun = ""
        for node in self._program.graph.nodes:
            tag = node.meta.get("fxshard")
            if node.op == "call_function" and tag is not None and tag.phase != begun:
                self._phase = begun = tag.phase
                lines.append(f"{begun}:")
            what = f"%{node.name} ({node.op} {node.target})"
            try:
                lines.append("  " + self._node(node))
            except NoText as error:
                raise _no_text(what, error) from None
        named = zip(self._program.values, self._program.results, strict=True)
        lines += [f"  return {r.kind} {bare(r.name)} %{value.name}" for value, r in named]
        return lines

    def _node(self, node: fx.Node) -> str:
        held, writer = node.meta, self._writer
        tag: tags.Meta | None = held.get("fxshard")
        usual = usual_tag(node, self._phase)
        if node.op == "output":
            line = "output"
        elif node.op == "placeholder":
            if node.args or node.kwargs:
                raise NoText("a default value")
            line = f"placeholder({node.target!r})"
            known = tag is not None and tag.role in PLACEHOLDERS and node.target == node.name
            if known and tag is not None and tag.fqn:
                line = f"{tag.role} {bare(tag.fqn)}"
                usual = usual_placeholder(tag.role, tag.fqn)
            line = f"%{node.name} = {line}"
        elif node.op == "call_function":
            parts = [writer.value(a) for a in node.args]
            parts += [f"{key}={writer.value(value)}" for key, value in node.kwargs.items()]
            line = f"%{node.name} = {_operator(node)}({', '.join(parts)})"
        else:
            raise NoText(f"a node of the kind {node.op}")
        if "val" in held:
            line += f" : {writer.value_of(f'%{node.name}', held['val'], storages(node))}"
        if LAYOUT in held or OPEN in held:
            layout, opened = held.get(LAYOUT), held.get(OPEN)
            line += f" open {writer.value(layout)} {writer.value(opened)} {OPEN in held}"
        notes = traced_collectives.notes(node)
        if notes:
            line += f" noted {writer.value(notes)}"
        said = self._tag(tag, usual)
        return f"{line} | {said}" if said else line

    def _tag(self, tag: tags.Meta | None, usual: tags.Meta) -> str:
        if tag is None:
            return "none"
        key = id(tag), usual.phase, usual.role, usual.fqn
        if key not in self._by_tag:  # nodes alike share one
            module = [bare(tag.module)] if tag.module else []
            given: dict[str, Any] = {"phase": usual.phase, "role": usual.role}
            given |= {"fqn": usual.fqn, "module": tag.module}
            self._by_tag[key] = " ".join(module + _changed(self._writer, "a tag", tag, given))
        return self._by_tag[key]


def _operator(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, OpOverload):
        name = str(target)
        if export.operator_named(name) is target:
            return name.removesuffix(".default")
    elif target is operator.getitem:
        return "getitem"
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
