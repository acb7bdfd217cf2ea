"""A program as text that is read back: `write` and `parse`, with ``parse(write(p))`` equal to `p`.

`fxshard.ir.dump.text` is for people, and leaves out what they need not see. This text is complete:
it has all that passes, checks, static analysis and the executor read. It holds no data: of tensors
that the model holds outside of parameters and buffers it has the metadata. Reading it runs nothing
that it names (`fxshard.ir.literals`). docs/ir.md shows one.

Line by line::

    program v2 FIELDS                        fields of Program that are not at their default
    facts FACT ...
    begun FIELDS                             the pipeline has: gradients and inputs are noted
    signature TREE -> TREE FIELDS
    unit INDEX FQN KIND FIELDS               followed by:
      param FQN TYPE FIELDS, ignored FQN TYPE FIELDS
    bucket FQN ... [packed=FQNS]
    call MODULE NUMBER PARENT
    symbol NAME ASSUMPTIONS                  of sympy
    domain FIELDS
    constant NAME TENSOR
    graph:
      %NAME = ROLE FQN [: VALUE] [| TAG]     a placeholder; any other: placeholder("TARGET")
    forward:                                 the phase of the nodes after it; or backward:
      %NAME = OPERATOR(ARGUMENTS) [: VALUE] [open LAYOUT OPEN] [noted NOTES] [| TAG]
      output [: VALUE] [| TAG]
      return KIND NAME %NODE                 one per result
      users %NODE [%NODE, ...]               its readers, if in another order than the graph's
    names used=NAMES count=NUMBERS           what FX will not name new nodes
    end

A TAG is the module, and the fields of `fxshard.ir.tags.Meta` that are not as usual
(`fxshard.ir.usual`); a node without any has the tag ``none``. A tensor lies in a storage of its
own, a view in that of its base; where that is not so, ``f32[4]@%x`` lies in that of ``%x``. The
schedule is not in the text: a program that has one says ``outlined=True``, and it is rebuilt from
the graph.

Lines before the first that begin with ``#`` are comments; so is all after ``end``, from a line that
begins with ``#``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch import export, graphs, traced_collectives
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.errors import TextError
from fxshard.ir import outline, tags
from fxshard.ir.calls import Call
from fxshard.ir.domain import LAYOUT, OPEN, Domain
from fxshard.ir.literals import Names, Reader, Unreadable, as_sizes, as_tree
from fxshard.ir.program import Fact, ParamBucket, Program, Result, Signature
from fxshard.ir.units import Param, Unit
from fxshard.ir.usual import (
    PLACEHOLDERS,
    begun,
    storages,
    usual_param,
    usual_placeholder,
    usual_signature,
    usual_tag,
)
from fxshard.ir.write import FLAGS, FUNCTIONS, VERSION, write

__all__ = ("VERSION", "parse", "write")


def parse(text: str, constants: Mapping[str, torch.Tensor] | None = None) -> Program:
    """The program that `write` has made `text` of, with new nodes and fake values.

    Args:
        constants: the tensors with data that ``program.constants`` is to have, by name; of the
            others it has fake ones, which are enough for all but running it.

    Raises:
        TextError: `text` is of another version, is cut off or is no program; with its line.
    """
    try:
        return _Parser(text, constants or {}).program()
    except RecursionError:
        raise TextError("values are nested too deep.") from None


class _Parser:
    """Reads a text line by line."""

    def __init__(self, text: str, constants: Mapping[str, torch.Tensor]) -> None:
        self._lines = text.split("\n")
        self._constants_given = constants
        self._at = 0
        self._flags: dict[str, Any] = {}
        self._signature: Signature | None = None
        self._units: list[Unit] = []
        self._buckets: list[ParamBucket] = []
        self._calls: list[Call] = []
        self._domain: Domain | None = None
        self._constants: dict[str, torch.Tensor] = {}
        self._results: list[Result] = []
        self._values: list[fx.Node] = []
        self._graph = fx.Graph()
        self._users: dict[fx.Node, list[Any]] = {}
        self._tags: dict[Any, tags.Meta] = {}
        self._phase: Any = "forward"
        self._position = -1  # of the last parameter
        self._begun = False
        self._output: tuple[Any, ...] | None = None

    def program(self) -> Program:
        """All of it."""
        self._guard(self._first)
        in_graph = False
        while (line := self._next()) != "end":
            if line == "graph:" and not in_graph:
                in_graph = True
            elif in_graph:
                self._guard(functools.partial(self._graph_line, line))
            else:
                self._guard(functools.partial(self._header_line, line))
        rest = next(filter(str.strip, self._lines[self._at :]), "#")
        if not rest.startswith("#"):
            self._at += 1
            raise TextError("there is more after the end.", self._at)
        return self._guarded(self._finish)

    def _next(self) -> str:
        if self._at == len(self._lines):
            raise TextError("the text is cut off: its last line is 'end'.", self._at)
        self._at += 1
        return self._lines[self._at - 1]

    def _guard(self, read: Callable[[], None]) -> None:
        self._guarded(read)

    def _guarded(self, read: Callable[[], Any]) -> Any:
        """What reading a line raises names the line."""
        try:
            return read()
        except TextError:
            raise
        except Unreadable as error:
            raise TextError(f"{error}.", self._at) from None
        except RecursionError:
            raise
        except Exception as error:  # of torch or sympy: what the line says cannot be made
            why = " ".join(str(error).split())[:200]
            raise TextError(f"no program has this: {why}", self._at) from error

    # -- the header --

    def _first(self) -> None:
        line = self._next()
        while line.startswith("#"):
            line = self._next()
        words = line.split(" ", 2)
        if words[0] != "program" or len(words) < 2:
            raise Unreadable(f"this is no program: its text begins with 'program v{VERSION}'")
        if words[1] != f"v{VERSION}":
            raise Unreadable(
                f"the text is of version {words[1]!r}, and this fxshard reads v{VERSION}. Write "
                f"it again with this one"
            )
        self._flags = found = self._reader(words[2] if len(words) > 2 else "").fields_only()
        hints = _hints(Program)
        mode = found.pop("mode", FakeTensorMode)
        if not isinstance(mode, type) or not issubclass(mode, FakeTensorMode):
            raise Unreadable(f"mode={mode!r} is no mode of fake tensors")
        outlined = found.pop("outlined", False)
        found.setdefault("device", torch.device("cpu"))
        if "world_size" not in found:
            raise Unreadable("world_size= is not there")
        for name, value in found.items():
            if name not in (*FLAGS, "world_size", "device"):
                raise Unreadable(f"{name}= is no field of a program")
            _check(name, value, hints[name])
        if found["world_size"] < 1 or found.get("replicas", 1) < 1:
            raise Unreadable("a program has at least one rank")
        found["fake_mode"] = mode(allow_non_fake_inputs=True)
        self._outlined = bool(outlined)
        self._names = Names(found["fake_mode"])
        self._names.device = found["device"]

    def _reader(self, text: str) -> _LineReader:
        names = getattr(self, "_names", None) or Names(FakeTensorMode())
        return _LineReader(text, names)

    def _header_line(self, text: str) -> None:
        line = self._reader(text)
        word = line.next("name")
        readers: dict[str, Callable[[_LineReader], None]] = {
            "facts": self._facts_line,
            "begun": functools.partial(self._begun_line, True),
            "noted": functools.partial(self._begun_line, False),
            "signature": self._signature_line,
            "unit": self._unit_line,
            "param": functools.partial(self._param_line, "params"),
            "ignored": functools.partial(self._param_line, "ignored"),
            "bucket": self._bucket_line,
            "call": self._call_line,
            "symbol": self._symbol_line,
            "domain": self._domain_line,
            "constant": self._constant_line,
        }
        if word not in readers:
            raise Unreadable(f"{word!r} is no line of a program")
        readers[word](line)
        line.finish()

    def _facts_line(self, line: _LineReader) -> None:
        names = []
        while line.rest:
            names.append(line.next("name"))
        if not {*names} <= Fact.__members__.keys():
            raise Unreadable(f"{', '.join({*names} - Fact.__members__.keys())} is no fact")
        self._flags["facts"] = {Fact[name] for name in names}

    def _begun_line(self, begun: bool, line: _LineReader) -> None:
        hints, found = _hints(Program), line.fields()
        for name, value in found.items():
            if name not in ("gradients", "given"):
                raise Unreadable(f"{name}= has no place here")
            _check(name, value, hints[name])
        self._begun = begun
        self._flags |= found

    def _signature_line(self, line: _LineReader) -> None:
        in_spec = as_tree(line.value())
        line.expect("->")
        out_spec, given = as_tree(line.value()), line.fields()
        of = given.get("inputs"), given.get("outputs"), given.get("training", True)
        found = _made(Signature, usual_signature(in_spec, out_spec, *of) | given)
        inputs, outputs = len(found.inputs), len(found.outputs)
        for name, most in (("tensor_inputs", inputs), ("tangents", outputs)):
            if any(not 0 <= i < most for i in getattr(found, name)):
                raise Unreadable(f"{name} names what the call has not")
        self._signature = found

    def _unit_line(self, line: _LineReader) -> None:
        index, fqn, kind = line.value(), line.name(), line.name()
        if index != len(self._units):
            raise Unreadable(f"unit {index!r} where unit {len(self._units)} should be")
        named = {"index": index, "fqn": fqn, "kind": kind}
        given = {**named, "params": (), "ignored": (), **line.fields()}
        self._units.append(_made(Unit, given))

    def _param_line(self, where: str, line: _LineReader) -> None:
        if not self._units:
            raise Unreadable("a parameter before the first unit")
        unit = self._units[-1]
        fqn, (dtype, shape) = line.name(), line.type()
        usual = usual_param(fqn, unit.index, self._position, dtype)
        param = _made(Param, {**usual, "dtype": dtype, "shape": shape, **line.fields()})
        self._position = param.position
        changed: dict[str, Any] = {where: (*getattr(unit, where), param)}
        self._units[-1] = dataclasses.replace(unit, **changed)

    def _bucket_line(self, line: _LineReader) -> None:
        fqns = []
        while line.rest and line.peek(1) != "=":
            fqns.append(line.name())
        packed = frozenset(line.fields().get("packed", ()))
        known = {param.fqn for unit in self._units for param in unit.params}
        if not known >= {*fqns, *packed}:
            raise Unreadable(f"{', '.join(map(repr, {*fqns, *packed} - known))} is no parameter")
        self._buckets.append(ParamBucket(tuple(fqns), packed))

    def _call_line(self, line: _LineReader) -> None:
        module, number, parent = line.name(), line.value(), line.value()
        call = _made(Call, {"module": module, "number": number, "parent": parent})
        if parent is not None and not 0 <= parent < len(self._calls):
            raise Unreadable(f"there is no call {parent} before this one")
        self._calls.append(call)

    def _symbol_line(self, line: _LineReader) -> None:
        name = line.next("name")
        given = line.fields()
        if any(type(value) is not bool for value in given.values()):
            raise Unreadable("what is assumed of a symbol is True or False")
        self._names.symbols[name] = sympy.Symbol(name, **given)

    def _domain_line(self, line: _LineReader) -> None:
        given = line.fields()
        given["conditions"] = tuple((c, where) for c, where in given.get("conditions", ()))
        domain = _made(Domain, given)
        if not domain.places.keys() <= domain.symbols.keys():
            raise Unreadable("a size has a place and no symbol")
        self._domain = domain

    def _constant_line(self, line: _LineReader) -> None:
        name = line.value()
        self._names.begin(repr(name))
        value = line.value()
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise Unreadable("a constant is a name and a tensor")
        given = self._constants_given.get(name)
        if given is not None and (given.shape, given.dtype) != (value.shape, value.dtype):
            raise Unreadable(f"the constant {name!r} that is given is another tensor")
        self._constants[name] = value if given is None else given

    # -- the graph --

    def _graph_line(self, text: str) -> None:
        line = self._reader(text)
        readers = {
            "return": self._return_line,
            "users": self._users_line,
            "names": self._names_line,
            "output": self._output_line,
        }
        if line.peek() in ("forward", "backward") and line.peek(1) == ":":
            self._phase = line.next("name")
            line.expect(":")
        elif line.peek() in readers:
            readers[line.next("name")](line)
        else:
            self._node_line(line)
        line.finish()

    def _node_line(self, line: _LineReader) -> None:
        if self._output is not None:
            raise Unreadable("a node after the output")
        name = line.next("node")[1:]
        line.expect("=")
        word = line.next("name")
        if name in self._names.nodes:
            raise Unreadable(f"%{name} is there twice")
        usual, op = None, "placeholder"
        target: Any = name
        args, kwargs = list[Any](), dict[str, Any]()
        if not line.take("("):
            if word not in PLACEHOLDERS:
                raise Unreadable(f"{word!r} is no role of a placeholder")
            usual = usual_placeholder(word, line.name())
        else:
            args, kwargs = line.values(")")
            if word != "placeholder":
                op, target = "call_function", _target(word)
        if word == "placeholder":
            if len(args) != 1 or kwargs or not isinstance(args[0], str):
                raise Unreadable("a placeholder has one name")
            op, target, args = "placeholder", args[0], []
        node = graphs.append_node(self._graph, op, target, tuple(args), kwargs, name)
        if node.name != name:
            raise Unreadable(f"%{name} is no name of a node")
        self._meta(node, line, usual or usual_tag(node, self._phase))
        self._names.nodes[name] = node

    def _meta(self, node: fx.Node, line: _LineReader, usual: tags.Meta) -> None:
        held = node.meta
        if line.take(":"):
            self._names.begin(f"%{node.name}", storages(node))
            held["val"] = line.value()
        if line.take("open"):
            layout, opened, known = line.value(), line.value(), line.value()
            if layout is not None:
                held[LAYOUT] = as_sizes(layout)
            if known is True:
                held[OPEN] = as_sizes(opened)
        if line.take("noted"):
            notes = line.value()
            _check("noted", notes, dict[str, Any])
            traced_collectives.note_all(node, notes)
        bar = line.take("|")
        if bar and line.left == "none":
            line.skip()
        else:
            held["fxshard"] = self._tag(line, usual)

    def _tag(self, line: _LineReader, usual: tags.Meta) -> tags.Meta:
        key = line.left, usual.phase, usual.role, usual.fqn
        if key in self._tags:  # nodes alike share one
            line.skip()
            return self._tags[key]
        words: dict[str, Any] = {"phase": usual.phase, "role": usual.role, "fqn": usual.fqn}
        if line.at_name():
            words["module"] = line.name()
        tag = _made(tags.Meta, words | line.fields())
        if tag.unit is not None and not 0 <= tag.unit < len(self._units):
            raise Unreadable(f"there is no unit {tag.unit}")
        if tag.call is not None and not 0 <= tag.call < len(self._calls):
            raise Unreadable(f"there is no call {tag.call}")
        self._tags[key] = tag
        return tag

    def _output_line(self, line: _LineReader) -> None:
        if self._output is not None:
            raise Unreadable("a second output")
        self._output = ()
        holder = fx.Graph().output(())
        self._meta(holder, line, usual_tag(holder, self._phase))
        self._output = (holder.meta,)

    def _return_line(self, line: _LineReader) -> None:
        kind, name, node = line.next("name"), line.name(), line.value()
        if not isinstance(node, fx.Node):
            raise Unreadable("what is returned is a node")
        self._results.append(_made(Result, {"kind": kind, "name": name}))
        self._values.append(node)

    def _users_line(self, line: _LineReader) -> None:
        node, users = line.value(), line.value()
        if not isinstance(node, fx.Node) or not isinstance(users, list):
            raise Unreadable("a node has a list of readers")
        self._users[node] = users

    def _order_users(self, node: fx.Node, users: list[Any]) -> None:
        read = {user if user.op != "output" else "output": user for user in node.users}
        if set(users) != read.keys() or len(users) != len(read):
            raise Unreadable(f"%{node.name} has other readers than those in 'users'")
        node.users = dict.fromkeys(read[user] for user in users)

    def _names_line(self, line: _LineReader) -> None:
        found = line.fields()
        used, count = graphs.given_names(self._graph)
        _check("used", found.get("used", []), list[str])
        _check("count", found.get("count", {}), dict[str, int])
        used.update(found.get("used", []))
        count.update(found.get("count", {}))

    def _finish(self) -> Program:
        if self._signature is None or not self._units:
            raise Unreadable("a program has a signature and units")
        if self._output is None:
            raise Unreadable("the graph has no output")
        output = self._graph.output(tuple(self._values))
        output.meta.update(self._output[0])
        for node, users in self._users.items():
            self._order_users(node, users)
        meshes = {"", *(grid.name for grid in self._flags.get("meshes", ()))}
        for param in (param for unit in self._units for param in unit.params):
            if param.mesh not in meshes:
                raise Unreadable(f"parameter {param.fqn!r} is on a mesh {param.mesh!r} of no line")
        if self._begun:
            gradients, given = begun(self._graph, self._results)
            self._flags = {"gradients": gradients, "given": given} | self._flags
        program = Program(
            graph=self._graph,
            results=self._results,
            signature=self._signature,
            constants=self._constants,
            units=tuple(self._units),
            buckets=tuple(self._buckets),
            calls=tuple(self._calls),
            domain=self._domain,
            **self._flags,
        )
        if self._outlined:
            program.schedule = outline.build(program)
        return program


class _LineReader(Reader):
    """A line of a program."""

    def fields_only(self) -> dict[str, Any]:
        """``name=value`` up to the end."""
        found = self.fields()
        self.finish()
        return found

    def finish(self) -> None:
        """Raise Unreadable if there is more."""
        if self.rest:
            raise Unreadable(f"{self.peek()!r} has no place at the end of this line")


def _target(word: str) -> Any:
    if word == "getitem":
        return operator.getitem
    name = f"{word}.default" if word.count(".") == 1 else word
    found = FUNCTIONS.get(word) or export.operator_named(name)
    if found is None:
        raise Unreadable(f"there is no operator {word!r} in this process")
    return found


def _made(kind: Any, given: dict[str, Any]) -> Any:
    """A dataclass, of values of the types that its fields have."""
    hints = _hints(kind)
    for name, value in given.items():
        if name not in hints:
            raise Unreadable(f"{name}= is no field of a {kind.__name__}")
        _check(name, value, hints[name])
    return kind(**given)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _check(name: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        raise Unreadable(f"{name}={repr(value)[:40]} is no {hint}")


def _fits(value: Any, hint: Any) -> bool:
    """True if `value` is of a type that annotations of programs use."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        return value in args
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_fits(item, args[0]) for item in value)
        return len(args) == len(value) and all(map(_fits, value, args))
    if origin in (list, frozenset, set):
        return isinstance(value, origin) and all(_fits(item, args[0]) for item in value)
    if origin is not None and args and issubclass(origin, Mapping):
        kind = dict if issubclass(origin, Mapping) else origin
        return isinstance(value, kind) and all(
            _fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items()
        )
    if hint is type or origin is type:
        return isinstance(value, type)
    if hint in (int, bool):
        return type(value) is hint
    return isinstance(value, type(None) if hint is None else hint)
