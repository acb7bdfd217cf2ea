"""Values in one line of text: numbers, names of torch, nodes, expressions of sizes, containers.

A grammar of its own, so that reading a text runs nothing that the text names: words before
parentheses come from a table, and classes from modules that this process has imported already.

    value   = "None" | "True" | "False" | INT | FLOAT | "inf" | "nan" | STRING
            | "[" values "]" | "(" values [","] ")" | "{" [ value ":" value { "," ... } ] "}"
            | "%" NAME | "$" SYMBOL | "torch." NAME | tensor | word "(" values ")"
    tensor  = DTYPE "[" sizes "]" [ "{" option { " " option } "}" ] [ "@" storage ] [ ":" BYTES ]
    option  = strides | "offset=" INT | "device=" DEVICE | "grad"
    storage = "new" | "%" NAME [ "." INT ] | STRING           (whose: a node's, or a constant's)
    word    = "device" | "slice" | "range" | "complex" | "size" | "set" | "class" | "tree"
            | "function" | "Precision" | "OpenTensor" | "FoundSize" | "Needs" | "Grid"
            | "CollectiveRanks" | "Placed" | "Mesh" | "Shard" | "Replicate" | "Partial"
            | a function of sympy, or of torch's sizes

In a tree ``_`` is a leaf, and tuples, lists and dicts are written as such.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import math
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from fxshard._torch import fake_tensors, sizes, trees
from fxshard._torch.dtensors import mesh_fields, mesh_of
from fxshard._torch.fake_tensors import FakeTensor, FakeTensorMode
from fxshard._torch.traced_collectives import CollectiveRanks
from fxshard.config.precision import Precision
from fxshard.ir import dump
from fxshard.ir.domain import FoundSize, OpenTensor
from fxshard.ir.layout import Grid
from fxshard.ir.needs import Needs
from fxshard.ir.tensor_parallel import Placed

# The storage that a tensor of a value lies in by default, by its place among them; None: its own.
Expected = Callable[[int], torch.UntypedStorage | None]


def _fresh(place: int) -> None:
    return None


class NoText(Exception):
    """A value that has no text; says why."""


class Unreadable(Exception):
    """A text that is no value; says why."""


_TORCH = {
    str(found): found
    for found in vars(torch).values()
    if isinstance(found, (torch.dtype, torch.layout, torch.memory_format))
}
_SHORT = {
    dtype: dump.DTYPES.get(dtype, name.removeprefix("torch."))
    for name, dtype in _TORCH.items()
    if isinstance(dtype, torch.dtype)
}
_LONG = {name: dtype for dtype, name in _SHORT.items()}
_SYMPY: dict[str, Any] = {
    name: getattr(sympy, name)
    for name in (
        *("Add", "Mul", "Pow", "Mod", "Max", "Min", "floor", "ceiling", "Abs", "Rational"),
        *("Eq", "Ne", "Ge", "Gt", "Le", "Lt", "And", "Or", "Not"),
    )
}
_FUNCTIONS = _SYMPY | {f"torch.{name}": made for name, made in sizes.FUNCTIONS.items()}
_WORD_OF = {function: word for word, function in _FUNCTIONS.items()}
_DEEPEST = 50  # nesting of a value


class Writer:
    """What the values of one text have in common while it is written.

    Attributes:
        storages: identity of each storage -> what it is called: after the first that lies in it.
        symbols: names of symbols -> they.
        device: of tensors that do not say theirs.
        of_constants: tensors with data have a text, which is that of their metadata.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_constants = False
        self.symbols: dict[str, sympy.Symbol] = {}
        self.storages: dict[int, str] = {}
        self._owner: str | None = None
        self._expected: Expected = _fresh
        self._tensors = 0  # of the owner
        self._keep: list[Any] = []  # whose identity counts

    def value_of(self, owner: str, value: Any, expected: Expected | None = None) -> str:
        """The text of the value of a node, or of a constant: its storages are called after it.

        Args:
            owner: ``%name``, or the name of a constant in quotes.
            value: it.
            expected: the storage that a tensor of it lies in if the text does not say; by its
                place among them. None: one of its own.
        """
        self._owner, self._expected, self._tensors = owner, expected or _fresh, 0
        try:
            return self.value(value)
        finally:
            self._owner, self._expected = None, _fresh

    def value(self, value: Any) -> str:
        """The text of a value.

        Raises:
            NoText: it has none.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return repr(value)
        if kind is float:
            return repr(value)
        if isinstance(value, fx.Node):
            return f"%{value.name}"
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind in (torch.dtype, torch.layout, torch.memory_format):
            return str(value)
        if isinstance(value, sympy.Basic):
            return self._expression(value)
        if kind is torch.Size:
            return f"size({', '.join(map(self.value, value))})"
        if kind is tuple:
            return f"({', '.join(map(self.value, value))}{',' if len(value) == 1 else ''})"
        if kind in (list, fx.immutable_collections.immutable_list):
            return f"[{', '.join(map(self.value, value))}]"
        if kind in (dict, fx.immutable_collections.immutable_dict):
            items = (f"{self.value(k)}: {self.value(v)}" for k, v in value.items())
            return f"{{{', '.join(items)}}}"
        return self._word(value)

    def _word(self, value: Any) -> str:
        """Of what is written as a word with values in parentheses."""
        kind = type(value)
        if kind is torch.device:
            return f"device({str(value)!r})"
        if kind in (slice, range):
            parts = (value.start, value.stop, value.step)
            return f"{kind.__name__}({', '.join(map(self.value, parts))})"
        if kind is complex:
            return f"complex({value.real!r}, {value.imag!r})"
        if kind is frozenset:
            return f"set({', '.join(sorted(map(self.value, value)))})"
        if isinstance(value, trees.TreeSpec):
            tree = self.tree(value)
            return tree if tree == "_" or tree.startswith("tree(") else f"tree({tree})"
        if kind in (Precision, OpenTensor, FoundSize, Needs, Grid, CollectiveRanks, Placed):
            return f"{kind.__name__}({self.fields(value, ', ')})"
        if isinstance(value, DeviceMesh):
            fields = mesh_fields(value).items()
            return f"Mesh({', '.join(f'{key}={self.value(held)}' for key, held in fields)})"
        if kind in (Shard, Replicate, Partial):
            argument = value.dim if kind is Shard else value.reduce_op if kind is Partial else None
            return f"{kind.__name__}({'' if argument is None else repr(argument)})"
        if kind is types.FunctionType:
            name = f"{value.__module__}:{value.__qualname__}"
            if _found(name) is value:
                return f"function({name!r})"
            raise NoText(f"{value!r}, a function that is not found again as {name}")
        if isinstance(value, type) or value is collections.namedtuple:
            name = f"{value.__module__}:{value.__qualname__}"
            try:
                known = _class(name) is value
            except Unreadable:
                known = False
            if known:
                return f"class({name!r})"
            raise NoText(f"{value!r}, which is not found again as {name}")
        raise NoText(f"a {kind.__module__}.{kind.__qualname__}: {str(value)[:60]!r}")

    def type(self, dtype: torch.dtype, shape: Any) -> str:
        """``f32[2,4]``."""
        return f"{_SHORT[dtype]}{_ints(shape)}"

    def tree(self, spec: trees.TreeSpec) -> str:
        """A tree of containers: ``((_, _), {'scale': _})``."""
        if spec.is_leaf():
            return "_"
        children = [self.tree(child) for child in spec.children()]
        if spec.type is tuple and spec.context is None:
            return f"({', '.join(children)}{',' if len(children) == 1 else ''})"
        if spec.type is list and spec.context is None:
            return f"[{', '.join(children)}]"
        if spec.type is dict and isinstance(spec.context, list):
            items = zip(map(self.value, spec.context), children, strict=True)
            return f"{{{', '.join(f'{key}: {child}' for key, child in items)}}}"
        parts = (self.value(spec.type), self.value(spec.context), f"[{', '.join(children)}]")
        return f"tree({', '.join(parts)})"

    def fields(self, of: Any, between: str = " ", without: tuple[str, ...] = ()) -> str:
        """``name=value`` of the fields of a dataclass that are not at their default."""
        return between.join(
            f"{field.name}={self.value(getattr(of, field.name))}"
            for field in dataclasses.fields(of)
            if field.init
            and field.name not in without
            and not _is_default(field, getattr(of, field.name))
        )

    def _tensor(self, value: Tensor) -> str:
        if not isinstance(value, FakeTensor) and not self.of_constants:
            raise NoText(f"a tensor with data, {value.dtype} {list(value.shape)}")
        if value.layout is not torch.strided or value.is_quantized or value.is_conj():
            raise NoText(f"a fake tensor that is {value.layout}, quantized or conjugated")
        if value.is_neg():
            raise NoText("a fake tensor that is negated")
        shape, stride, offset = value.shape, value.stride(), value.storage_offset()
        storage = value.untyped_storage()
        nbytes = storage.nbytes()
        if any(type(n) is not int for n in (*shape, *stride, offset, nbytes)):
            raise NoText(f"a tensor of symbolic sizes {list(shape)}")
        options = []
        if stride != _contiguous(shape):
            options.append(",".join(map(str, stride)))
        if offset:
            options.append(f"offset={offset}")
        if value.device != self.device:
            options.append(f"device={value.device}")
        if value.requires_grad:
            options.append("grad")
        more = f"{{{' '.join(options)}}}" if options else ""
        known = self.storages.get(id(storage))
        expected = self._expected(self._tensors)
        where = ""
        if known is None:
            where = "" if expected is None else "@new"
            if nbytes != math.prod(shape) * value.element_size():
                where += f":{nbytes}"
            self._keep.append(storage)
            self.storages[id(storage)] = _called_after(self._owner, self._tensors)
        elif expected is not storage:
            if not known:
                raise NoText("a fake tensor that aliases one of no node")
            where = f"@{known}"
        self._tensors += 1
        return f"{_SHORT[value.dtype]}{_ints(shape)}{more}{where}"

    def _expression(self, value: sympy.Basic) -> str:
        if isinstance(value, sympy.Symbol):
            if self.symbols.setdefault(value.name, value) != value:
                raise NoText(f"two symbols of the name {value.name}")
            if not re.fullmatch(r"\w+", value.name):
                raise NoText(f"a symbol of the name {value.name!r}")
            return f"${value.name}"
        if isinstance(value, sympy.Integer):
            return str(int(value))
        word, args = _WORD_OF.get(value.func), value.args
        if isinstance(value, sympy.Rational):
            word, args = "Rational", (value.p, value.q)
        if word is None:
            raise NoText(f"an expression of {value.func.__name__}: {value}")
        if word.rpartition(".")[2] in ("And", "Or", "Max", "Min"):  # of a set, in no order
            args = tuple(sorted(args, key=str))
        text = f"{word}({', '.join(self.value(a) for a in args)})"
        if _called(word, list(args)) != value:
            raise NoText(f"an expression that sympy makes another of when it reads it: {value}")
        return text


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return type(default) is type(value) and bool(default == value)


def _called_after(owner: str | None, place: int) -> str:
    """What the storage of a tensor is called that no other lies in yet: ``%split.1``."""
    if owner is None:
        return ""
    return f"{owner}.{place}" if place else owner


def _contiguous(shape: Any) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _ints(numbers: Any) -> str:
    return f"[{','.join(map(str, numbers))}]"


def _class(name: str) -> Any:
    """``module:Class``, of a module that is imported already; no attribute is asked of it."""
    found = _found(name)
    if not isinstance(found, type) and found is not collections.namedtuple:
        raise Unreadable(f"{name} is no class")
    return found


def _function(name: str) -> Any:
    """``module:function`` of Python's, of a module that is imported already; nothing calls it.

    It is what the user's checkpoint policy was: passes ask which modules have one.
    """
    found = _found(name)
    if not isinstance(found, types.FunctionType):
        raise Unreadable(f"{name} is no function")
    return found


def _found(name: str) -> Any:
    """What a module that is imported has by a name, or None; no attribute is asked of it."""
    module, _, path = str(name).partition(":")
    found: Any = sys.modules.get(module)
    if found is None:
        raise Unreadable(
            f"{name}: this process has not imported {module}, and a text is no reason to. "
            f"Import it yourself (fxshard opt --import {module})"
        )
    for word in path.split("."):
        found = vars(found).get(word) if hasattr(found, "__dict__") else None
    return found


def _called(word: str, args: list[Any]) -> Any:
    """An expression, made of its parts."""
    parts = [sympy.sympify(int(a) if type(a) is int else a, strict=True) for a in args]
    if word == "Pow" and not (len(parts) == 2 and abs(parts[1]) <= 64):
        raise Unreadable("a power that is no small number")
    relation = word in ("Eq", "Ne", "Ge", "Gt", "Le", "Lt")
    made = _FUNCTIONS[word](*parts, **({"evaluate": False} if relation else {}))
    return made


_TOKEN = re.compile(
    r"""\s*(?:
    (?P<tensor> [a-z]\w*\[[\d,]*\](?:\{[^}]*\})?(?:@(?:new|%\w+|'[^'\n]*'|"[^"\n]*")(?:\.\d+)?)?
        (?::\d+)? )
    | (?P<node> %\w+ )
    | (?P<number> -?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf\b|nan\b) )
    | (?P<string> '(?:[^'\\\n]|\\.)*' | "(?:[^"\\\n]|\\.)*" )
    | (?P<symbol> \$\w+ )
    | (?P<name> [A-Za-z_][\w.]* )
    | (?P<mark> -> | [\[\](){},:=|] )
    )""",
    re.VERBOSE,
)
_TENSOR = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?(?:@(.+?))?(?::(\d+))?")
_CONSTANTS = {"None": None, "True": True, "False": False, "_": trees.LEAF}
_BARE = re.compile(r"(?!(?:inf|nan)\b|none$)[A-Za-z_][\w.]*")


def bare(name: str) -> str:
    """A name, in quotes where it is no word: as `Reader.name` reads it."""
    return name if _BARE.fullmatch(name) else repr(name)


class Names:
    """What the lines of one text may refer to while it is read."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.device: torch.device = torch.device("cpu")
        self.nodes: dict[str, fx.Node] = {}
        self.symbols: dict[str, sympy.Symbol] = {}
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.owner: str | None = None
        self.expected: Expected = _fresh
        self._tensors = 0

    def begin(self, owner: str, expected: Expected | None = None) -> None:
        """The tensors that come next are those of a value, as in `Writer.value_of`."""
        self.owner, self.expected, self._tensors = owner, expected or _fresh, 0

    def tensor(self, text: str) -> Tensor:
        """The fake tensor of a token."""
        found = _TENSOR.fullmatch(text)
        assert found is not None
        name, size_text, option_text, where, nbytes_text = found.groups()
        if name not in _LONG:
            raise Unreadable(f"{name} is no dtype")
        dtype, shape = _LONG[name], _numbers(size_text)
        options = _options(option_text or "")
        stride = _numbers(options["stride"]) if "stride" in options else _contiguous(shape)
        offset = int(options.get("offset", 0))
        if len(stride) != len(shape):
            raise Unreadable(f"{text} has {len(shape)} sizes and {len(stride)} strides")
        storage = self.expected(self._tensors) if where is None else self.storages.get(where)
        if storage is None:
            if where not in (None, "new"):
                raise Unreadable(f"{text} lies in no storage of a value before it")
            tight = math.prod(shape) * dtype.itemsize
            nbytes = tight if nbytes_text is None else int(nbytes_text)
            storage = fake_tensors.fake_storage(nbytes)
            if self.owner is not None:
                self.storages[_called_after(self.owner, self._tensors)] = storage
        elif nbytes_text is not None:
            raise Unreadable(f"{text} lies in a storage that has a size already")
        self._tensors += 1
        span = sum(s * (n - 1) for n, s in zip(shape, stride, strict=True)) + 1
        if math.prod(shape) and (offset + span) * dtype.itemsize > storage.nbytes():
            raise Unreadable(f"{text} does not lie in its storage of {storage.nbytes()} bytes")
        device = torch.device(options["device"]) if "device" in options else self.device
        made = fake_tensors.fake_of(self.mode, storage, shape, stride, offset, dtype, device)
        return made.requires_grad_() if "grad" in options else made


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _options(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in text.split():
        key, equals, value = each.partition("=")
        found |= {key: value} if equals or key == "grad" else {"stride": key}
    if not found.keys() <= {"stride", "offset", "device", "grad"}:
        raise Unreadable(f"{{{text}}} is nothing that a tensor has")
    return found


class Reader:
    """Reads the values of one line, left to right."""

    def __init__(self, text: str, names: Names) -> None:
        self._names = names
        self._tokens: list[tuple[str, str]] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise Unreadable(f"{text[at : at + 20]!r} is no part of a program")
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        self._at = 0

    @property
    def left(self) -> str:
        """What is left of the line: equal for lines that end alike."""
        return " ".join(text for _, text in self._tokens[self._at :])

    def skip(self) -> None:
        """Pass all that is left of the line."""
        self._at = len(self._tokens)

    @property
    def rest(self) -> bool:
        """True if there is more in the line."""
        return self._at < len(self._tokens)

    def peek(self, ahead: int = 0) -> str:
        """The next token; "" at the end."""
        at = self._at + ahead
        return self._tokens[at][1] if at < len(self._tokens) else ""

    def next(self, kind: str | None = None) -> str:
        """The next token, which must be of a kind."""
        if not self.rest:
            raise Unreadable("the line ends too early")
        found, text = self._tokens[self._at]
        if kind is not None and found != kind:
            raise Unreadable(f"{text!r} is no {kind}")
        self._at += 1
        return text

    def name(self) -> str:
        """A name, in quotes or not (see `bare`)."""
        kind, text = self._tokens[self._at] if self.rest else ("", "")
        name = self.next("name") if kind == "name" else self.value()
        if not isinstance(name, str):
            raise Unreadable(f"{text!r} is no name")
        return name

    def type(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """``f32[2,4]``."""
        text = self.next("tensor")
        found = _TENSOR.fullmatch(text)
        assert found is not None
        name, sizes_, *more = found.groups()
        if name not in _LONG or any(part is not None for part in more):
            raise Unreadable(f"{text} is no type of a parameter")
        return _LONG[name], _numbers(sizes_)

    def at_name(self) -> bool:
        """True if a name comes next, and no ``name=value``."""
        kind = self._tokens[self._at][0] if self.rest else ""
        return kind in ("name", "string") and self.peek(1) != "="

    def take(self, mark: str) -> bool:
        """True, and it is passed, if the next token is `mark`."""
        if self.peek() != mark:
            return False
        self._at += 1
        return True

    def expect(self, mark: str) -> None:
        """Pass `mark`, which must be next."""
        if not self.take(mark):
            raise Unreadable(f"{self.peek()!r} where {mark!r} should be")

    def values(self, end: str, depth: int = 0) -> tuple[list[Any], dict[str, Any]]:
        """Values and ``name=value`` up to the mark `end`, which is passed."""
        found: list[Any] = []
        named: dict[str, Any] = {}
        while not self.take(end):
            if self.peek(1) == "=":
                self._named(named, depth)
            else:
                found.append(self.value(depth))
            if not self.take(","):
                self.expect(end)
                break
        return found, named

    def fields(self) -> dict[str, Any]:
        """``name=value`` one after the other, up to the end of the line or a bar."""
        named: dict[str, Any] = {}
        while self.rest and self.peek(1) == "=":
            self._named(named, 0)
        return named

    def _named(self, named: dict[str, Any], depth: int) -> None:
        name = self.next("name")
        self.expect("=")
        if name in named:
            raise Unreadable(f"{name} stands there twice")
        named[name] = self.value(depth)

    def value(self, depth: int = 0) -> Any:
        """The next value."""
        if depth > _DEEPEST:
            raise Unreadable(f"values nested deeper than {_DEEPEST}")
        if not self.rest:
            raise Unreadable("the line ends too early")
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "node":
            return _known(text, self._names.nodes, "node before this line")
        if kind == "number":
            return int(text) if text.lstrip("-").isdigit() else float(text)
        if kind == "tensor":
            return self._names.tensor(text)
        if kind == "string":
            return text[1:-1] if "\\" not in text else ast.literal_eval(text)
        if kind == "symbol":
            return _known(text, self._names.symbols, "symbol")
        if kind == "mark":
            return self._container(text, depth + 1)
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if self.take("("):
            return self._word(text, depth + 1)
        if text in _TORCH:
            return _TORCH[text]
        raise Unreadable(f"{text!r} is no value")

    def _container(self, mark: str, depth: int) -> Any:
        if mark == "[":
            return self._unnamed("]", depth)
        if mark == "(":
            return tuple(self._unnamed(")", depth))
        if mark != "{":
            raise Unreadable(f"{mark!r} where a value should be")
        made: dict[Any, Any] = {}
        while not self.take("}"):
            key = self.value(depth)
            self.expect(":")
            made[key] = self.value(depth)
            if not self.take(","):
                self.expect("}")
                break
        return made

    def _unnamed(self, end: str, depth: int) -> list[Any]:
        found, named = self.values(end, depth)
        if named:
            raise Unreadable(f"{next(iter(named))}= has no place here")
        return found

    def _word(self, word: str, depth: int) -> Any:
        args, named = self.values(")", depth)
        if word in _FUNCTIONS and not named:
            return _called(word, args)
        if word not in _WORDS:
            raise Unreadable(f"{word!r} is no word of programs")
        return _WORDS[word](*args, **named)


def _known(name: str, found: Mapping[str, Any], what: str) -> Any:
    if name[1:] not in found:
        raise Unreadable(f"{name} is no {what}")
    return found[name[1:]]


def as_sizes(value: Any) -> Any:
    """Numbers in lists and tuples as sympy has them."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(as_sizes, value))
    return sympy.Integer(value) if type(value) is int else value


def _open_tensor(**fields: Any) -> OpenTensor:
    return OpenTensor(**{name: as_sizes(value) for name, value in fields.items()})


def _device(name: str) -> torch.device:
    return torch.device(str(name))


def as_tree(value: Any) -> trees.TreeSpec:
    """A tree, of containers and leaves as `Writer.tree` writes them."""
    if isinstance(value, trees.TreeSpec):
        return value
    if type(value) in (tuple, list):
        return trees.spec_of(type(value), None, list(map(as_tree, value)))
    if type(value) is dict:
        return trees.spec_of(dict, list(value), list(map(as_tree, value.values())))
    raise Unreadable(f"{value!r} is no tree")


def _tree(*parts: Any) -> trees.TreeSpec:
    if len(parts) == 1:
        return as_tree(parts[0])
    type_, context, children = parts
    return trees.spec_of(type_, context, list(map(as_tree, children)))


_WORDS: dict[str, Callable[..., Any]] = {
    "device": _device,
    "slice": slice,
    "range": range,
    "complex": complex,
    "size": lambda *args: torch.Size(args),
    "set": lambda *args: frozenset(args),
    "class": _class,
    "tree": _tree,
    "Precision": Precision,
    "FoundSize": FoundSize,
    "Needs": Needs,
    "Grid": Grid,
    "CollectiveRanks": CollectiveRanks,
    "Placed": Placed,
    "Mesh": mesh_of,
    "Shard": Shard,
    "Replicate": Replicate,
    "Partial": Partial,
    "function": _function,
    "OpenTensor": _open_tensor,
}
