"""Symbolic sizes: one program for calls whose inputs differ in some dimensions.

The trace sees symbols in place of the sizes that may differ. Afterwards every size that an operator
takes is a node in front of the graph, computed from the inputs' sizes, and every fake value is one
of the example call: passes and analyses see concrete bytes, and the program runs on other sizes as
it is. What the trace took for granted of the symbols is its `Domain`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from fxshard._torch import sizes as torch_sizes
from fxshard._torch import trees
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.capture import data_sizes
from fxshard.capture.other_sizes import Fakes
from fxshard.errors import CaptureError, ConfigError
from fxshard.ir import tags
from fxshard.ir.domain import (
    LAYOUT,
    OPEN,
    Domain,
    FoundSize,
    Layout,
    OpenTensor,
    Place,
    Sizes,
    Symbols,
    size_at,
)
from fxshard.ir.program import input_name
from fxshard.ir.shardable import no_plain_tensor

aten: Any = torch.ops.aten


OF_A_TENSOR = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default)
ASSERTS = (
    *(aten._assert_scalar.default, aten.sym_constrain_range.default),
    aten.sym_constrain_range_for_size.default,
)
_TAKEN_ALONG = ("val", "desc", "custom")  # metadata of the trace that a moved node keeps


def require_plain(leaves: Sequence[Any], name: Callable[[int], str]) -> None:
    """See that the tensors of a call are dense ones without operators of their own.

    Args:
        leaves: flat, of the call.
        name: place among them -> where that is in the call.

    Raises:
        CaptureError: one is not.
    """
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            kind = "a DTensor" if isinstance(leaf, DTensor) else no_plain_tensor(leaf)
            if kind:
                raise CaptureError(
                    f"argument {name(i)} is {kind}. Programs run on plain dense tensors: pass its "
                    f"values, indices or offsets as such, and put them together outside."
                )


def of_call(leaves: Sequence[Any], *, ints: bool = False) -> Sizes:
    """The sizes of the contiguous tensors of a call; None for its other leaves.

    Args:
        leaves: flat, of the call.
        ints: those among them are sizes too.
    """

    def of(leaf: Any) -> tuple[int, ...] | int | None:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape) if leaf.is_contiguous() else None
        return leaf if ints and isinstance(leaf, int) and not isinstance(leaf, bool) else None

    return tuple(map(of, leaves))


def named(
    dynamic: Mapping[str, Sequence[tuple[str, int]]],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    least: int = 2,
) -> dict[str, tuple[Place, ...]]:
    """Where the call ``model(*args, **kwargs)`` has the sizes that the option ``dynamic`` names.

    Sizes below `least` are left out: those of 0 and 1 broadcast, and are numbers in a program.

    Raises:
        CaptureError: see `require_plain`.
        ConfigError: a name is no argument of ``forward``, or an argument no contiguous tensor with
            such a dimension; or dimensions of one name have different sizes.
    """
    leaves, _ = trees.tree_flatten_with_path((args, kwargs))
    given = [leaf for _, leaf in leaves]
    require_plain(given, lambda i: input_name(leaves[i][0]))
    shapes: Any = of_call(given)
    where = {input_name(path): number for number, (path, _) in enumerate(leaves)}
    parameters = list(inspect.signature(model.forward).parameters)
    for number, (path, _) in enumerate(leaves):
        if len(path) == 2 and path[0].idx == 1:
            where[path[1].key] = number
        elif len(path) == 2 and path[1].idx < len(parameters):
            where[parameters[path[1].idx]] = number
    found: dict[str, tuple[Place, ...]] = {}
    for name, wanted in dynamic.items():
        places: list[Place] = []
        for argument, dim in wanted:
            if argument not in where and argument not in parameters:
                raise ConfigError(
                    f"dynamic[{name!r}] names {argument!r}, but the call has "
                    f"{', '.join(where)} and forward takes {', '.join(parameters)}."
                )
            leaf = where.get(argument)
            if leaf is None:
                continue  # not given in this call
            shape = shapes[leaf]
            if shape is None or not 0 <= dim < len(shape):
                raise ConfigError(
                    f"dynamic[{name!r}] names dimension {dim} of {argument!r}, which is no "
                    f"contiguous tensor with such a dimension in this call."
                )
            places.append((leaf, dim))
        sizes = {shapes[leaf][dim]: argument for leaf, dim in places}
        if len(sizes) > 1:
            raise ConfigError(
                f"dynamic[{name!r}] names dimensions of different sizes: {sorted(sizes)}. Give "
                f"each a name of its own."
            )
        if sizes and min(sizes) >= least:
            found[name] = tuple(places)
    return found


class Trace:
    """The symbols of one trace.

    Attributes:
        told: how large the sizes are that the model finds in its data.
        env: torch's ShapeEnv, which collects what the trace asks of them.
    """

    def __init__(self, places: Symbols, sizes: Sizes, told: data_sizes.Told = None) -> None:
        self.told = told
        self.places: dict[str, tuple[Place, ...]] = dict(places)
        self.sizes: Sizes = sizes
        self.env: torch_sizes.ShapeEnv = torch_sizes.ShapeEnv(duck_shape=False)
        self._remembered = torch_sizes.Remembered(self.env)
        self._examples = {name: size_at(sizes, at[0]) for name, at in self.places.items()}
        self._sizes = {
            name: torch_sizes.symbolic_size(self.env, name, size)
            for name, size in self._examples.items()
        }
        self._at = {place: self._sizes[name] for name, at in self.places.items() for place in at}
        self._symbols = {name: torch_sizes.expression(size) for name, size in self._sizes.items()}

    @classmethod
    def of(cls, leaves: Sequence[Any], places: Symbols, told: data_sizes.Told = None) -> Trace:
        """New symbols for the sizes at `places` of a call with these leaves."""
        ints = any(dim is None for at in places.values() for _, dim in at)
        return cls(places, of_call(leaves, ints=ints), told)

    def fake(
        self, leaf: int, like: Tensor, mode: FakeTensorMode, device: torch.device
    ) -> Tensor | None:
        """A contiguous fake input with symbols for sizes, or None where it has none of them."""
        if not any((leaf, dim) in self._at for dim in range(like.dim())):
            return None
        shape = [self._at.get((leaf, dim), size) for dim, size in enumerate(like.shape)]
        with mode:
            fake: Tensor = torch.empty(shape, dtype=like.dtype, device=device)
        return fake.requires_grad_(like.requires_grad)

    def number(self, leaf: int, value: Any) -> Any:
        """The symbol of a leaf of the call that is an open size, or its value."""
        return self._at.get((leaf, None), value)

    def size(self, name: str) -> torch.SymInt:
        """The symbol of a name."""
        return self._sizes[name]

    def asked_once(self) -> contextlib.AbstractContextManager[None]:
        """While it is open, what is asked of the symbols again has the answer of before."""
        return self._remembered.asked()

    def begin(self) -> None:
        """Begin a run of forward."""
        self._remembered.forget()

    @property
    def example(self) -> dict[sympy.Symbol, int]:
        """The sizes of the example call."""
        return {self._symbols[name]: size for name, size in self._examples.items()}

    def domain(self) -> Domain:
        """What the trace has asked of the symbols."""
        given = set(self._symbols.values())
        found: dict[sympy.Basic, str] = {}
        asked = {guard.expr: f"asked at {guard.sloc}" for guard in self.env.guards}
        for symbol in self._symbols.values():
            known = self.env.replacements.get(symbol)
            if known is not None and known.free_symbols <= given:
                fixed = sympy.Eq(symbol, known)
                where = asked.get(fixed, "the model made it so")
                found.setdefault(fixed, f"{where}: Python, or an operator, takes it as a number")
            else:
                least = self.env.var_to_range[symbol].lower
                found.setdefault(sympy.Ge(symbol, least), "smaller ones go another way")
        for condition, where in asked.items():
            if condition.free_symbols <= given:
                found.setdefault(condition, where)
        conditions = tuple((c, where) for c, where in found.items() if c != sympy.true)
        return Domain(self.sizes, self.places, self._symbols, conditions)


def concretize(graph: fx.Graph, trace: Trace, mode: FakeTensorMode) -> Domain:
    """Put sizes in front and make every fake value one of the example call, in place.

    Args:
        graph: as it was traced; nodes have symbolic fake values.
        trace: its symbols.
        mode: owner of the concrete fake values.
    """
    example = _Example(trace, mode)
    found = data_sizes.found(graph, example.from_data, trace.told, example.bounds)
    example.take(found)
    _sizes_first(graph, example)
    for node in graph.nodes:
        if "val" in node.meta:
            val = node.meta["val"]
            layout = tuple(map(example.layout, tags.tensors(val)))
            if any(size.free_symbols for each in layout for side in each for size in side):
                node.meta[LAYOUT] = layout
            node.meta[OPEN] = example.open(val)
            node.meta["val"] = example.of(val)
    return dataclasses.replace(trace.domain(), found=found)


def take_along(node: fx.Node, copy: fx.Node) -> None:
    """Give a copy of `node` that runs on the same sizes what is known of them."""
    copy.meta |= {key: node.meta[key] for key in (LAYOUT, OPEN) if key in node.meta}


def open_tensors(node: fx.Node) -> list[tuple[Tensor, OpenTensor | None]]:
    """The tensors of `node`, each with where it lies; None for what is the same in all calls."""

    def pairs(value: Any, opened: Any) -> list[tuple[Tensor, OpenTensor | None]]:
        if isinstance(value, (list, tuple)):
            each = opened or [None] * len(value)
            return [pair for both in zip(value, each, strict=True) for pair in pairs(*both)]
        return [(value, opened)] if isinstance(value, Tensor) else []

    return pairs(node.meta.get("val"), node.meta.get(OPEN))


def same_layout(node: fx.Node, other: fx.Node) -> bool:
    """True if both are one tensor of equal sizes and strides, whatever the inputs' sizes are."""
    mine, theirs = node.meta.get(LAYOUT), other.meta.get(LAYOUT)
    if mine or theirs:
        return bool(mine == theirs)
    a, b = node.meta["val"], other.meta["val"]
    return bool(a.shape == b.shape and a.stride() == b.stride())


def fills_storage(node: fx.Node) -> bool:
    """True if a tensor is all of its storage, whatever the inputs' sizes are."""
    ((val, opened),) = open_tensors(node)
    if opened is None:
        return val.untyped_storage().nbytes() == val.numel() * val.element_size()
    left = opened.nbytes - sympy.Mul(*opened.size) * val.element_size()
    return bool(sympy.expand(left) == 0)


def stride_like(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape`, its dimensions in the order in memory of `tensor`'s."""
    strides = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (tensor.stride(dim), -dim)):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def lies_as(tensor: Tensor, stride: Sequence[Any]) -> bool:
    """True if `tensor` has these strides, where it has more than one element."""
    sides = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in sides)


def _sides(relation: type[sympy.Basic], conditions: list[sympy.Basic]) -> set[sympy.Basic]:
    """What conditions compare with 0 by `relation`."""
    with_zero = [c for c in conditions if isinstance(c, relation) and 0 in c.args]
    return {side for condition in with_zero for side in condition.args if side != 0}


def _positive(conditions: list[sympy.Basic]) -> set[sympy.Basic]:
    """What conditions hold above a positive number."""
    above = (c for c in conditions if isinstance(c, (sympy.Ge, sympy.Gt)))
    return {condition.lhs for condition in above if condition.rhs.is_positive}


def _primitive(expression: sympy.Expr) -> sympy.Expr:
    """An expression without a common factor of its numbers."""
    return sympy.expand(expression).primitive()[1]


class _Example:
    """Values of the example call for values with symbols."""

    def __init__(self, trace: Trace, mode: FakeTensorMode) -> None:
        self.env, self._fakes = trace.env, Fakes(mode)
        self._given = trace.example
        self._made_up: dict[sympy.Symbol, sympy.Number] = {}
        self._tensors: dict[int, tuple[Any, Tensor]] = {}  # the first keeps its identity taken
        self._expressions: dict[sympy.Basic, sympy.Basic] = {}
        asked = [condition for condition, _ in trace.domain().conditions]
        self._divisible = _sides(sympy.Eq, asked)
        self._not_empty = {
            _primitive(factor)
            for side in (*_sides(sympy.Ne, asked), *_positive(asked))
            for factor in (side, *sympy.Mul.make_args(side))
        }

    def from_data(self, node: fx.Node) -> list[sympy.Symbol]:
        """The symbols in the value of a node that the inputs do not give."""
        val = node.meta.get("val")
        sizes: list[Any] = [val] if isinstance(val, torch_sizes.SYMBOLIC) else []
        for tensor in tags.tensors(val) if val is not None else ():
            sizes += tensor.shape
        every = {s for size in sizes for s in self._expression(size).free_symbols}
        return sorted(every - self._given.keys(), key=str)

    def bounds(self, symbol: sympy.Symbol) -> tuple[Any, Any]:
        """The least and the largest number that the trace lets a symbol be."""
        known = self.env.var_to_range[symbol]
        return known.lower, known.upper

    def take(self, found: Sequence[FoundSize]) -> None:
        """Let the sizes that the model finds in its data be as large as the user says."""
        told = {each.symbol: each.size for each in found if each.size is not None}
        self._made_up |= {symbol: sympy.Integer(size) for symbol, size in told.items()}

    def number(self, value: Any) -> Any:
        """A size as a number."""
        if not isinstance(value, torch_sizes.SYMBOLIC):
            return value
        found = self._in_inputs(value).xreplace(self._given)
        if isinstance(value, torch.SymBool):
            return bool(found)
        return float(found) if isinstance(value, torch.SymFloat) else int(found)

    def _in_inputs(self, value: Any) -> sympy.Basic:
        """A number as an expression of the inputs' sizes; what depends on the data is made up."""
        expression = self._expression(value)
        made_up = {s: self._known(s) for s in expression.free_symbols - self._given.keys()}
        return expression.xreplace(made_up) if made_up else expression

    def _expression(self, value: Any) -> sympy.Basic:
        """A number as an expression; those that the trace has shown to be equal are the same."""
        if not isinstance(value, torch_sizes.SYMBOLIC):
            return sympy.sympify(value)
        given = torch_sizes.expression(value)
        if given not in self._expressions:
            self._expressions[given] = self._simplified(given)
        return self._expressions[given]

    def _simplified(self, given: sympy.Basic) -> sympy.Basic:
        """What torch makes simpler, and what the trace has decided: no rest, no empty tensor.

        Strides have ``Max(1, size)``.
        """
        expression = self.env.simplify(given)
        while True:
            known = {
                division: division.args[0] / division.args[1]
                for division in expression.atoms(torch_sizes.FloorDiv)
                if torch_sizes.Mod(*division.args) in self._divisible
            }
            known |= {
                maximum: size
                for maximum in expression.atoms(torch_sizes.Max)
                for size in maximum.args
                if {1, size} == set(maximum.args) and _primitive(size) in self._not_empty
            }
            if not known:
                break
            expression = expression.xreplace(known)
        return sympy.expand(expression) if isinstance(expression, sympy.Expr) else expression

    def layout(self, tensor: Tensor) -> Layout:
        """Sizes and strides of a tensor, also where they depend on the data."""
        size, stride = (tuple(map(self._expression, at)) for at in (tensor.shape, tensor.stride()))
        return size, stride

    def open(self, value: Any) -> Any:
        """Of a value with symbols: a `OpenTensor` per tensor, an expression per number, as a tree.

        None for what has no symbols: such values are those of every call.
        """
        if isinstance(value, (list, tuple)):
            each = [self.open(item) for item in value]
            return None if all(item is None for item in each) else each
        if isinstance(value, torch_sizes.SYMBOLIC):
            number = self._in_inputs(value)
            return number if number.free_symbols else None
        if not isinstance(value, Tensor):
            return None
        size, stride = (tuple(map(self._in_inputs, at)) for at in (value.shape, value.stride()))
        offset, nbytes = value.storage_offset(), value.untyped_storage().nbytes()
        place = OpenTensor(size, stride, self._in_inputs(offset), self._in_inputs(nbytes))
        return None if place.is_fixed else place

    def _known(self, symbol: sympy.Symbol) -> sympy.Number:
        if symbol in self._given:
            return sympy.Integer(self._given[symbol])
        if symbol not in self._made_up:  # depends on the data: any number in its range will do
            least, most = self.bounds(symbol)
            number = sympy.Integer(5 + 2 * len(self._made_up))
            self._made_up[symbol] = min(max(number, least), most)
        return self._made_up[symbol]

    def of(self, value: Any) -> Any:
        """The same value without symbols; aliases stay aliases."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.of, value))
        if not isinstance(value, Tensor):
            return self.number(value)
        if id(value) not in self._tensors:
            self._tensors[id(value)] = value, self._tensor(value)
        return self._tensors[id(value)][1]

    def _tensor(self, value: Tensor) -> Tensor:
        size, stride = map(self.number, value.shape), map(self.number, value.stride())
        where = tuple(size), tuple(stride), self.number(value.storage_offset())
        return self._fakes.like(value, where, self.number(value.untyped_storage().nbytes()))


def alike(leaves: Sequence[Any], symbols: Symbols) -> tuple[Any, ...]:
    """Of the leaves of a call, all that its capture depends on but its open sizes; hashable.

    Args:
        leaves: flat, of the call.
        symbols: the sizes that the capture leaves open.
    """
    open_at = {place for places in symbols.values() for place in places}

    def of(number: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            is_open = (number, None) in open_at
            plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes))
            return (type(leaf), None if is_open else repr(leaf) if plain else id(leaf))
        sizes = [None if (number, dim) in open_at else n for dim, n in enumerate(leaf.shape)]
        layout = "contiguous" if leaf.is_contiguous() else leaf.stride()
        device = "cpu" if leaf.is_meta else str(leaf.device)
        return (*sizes, layout, leaf.dtype, device, leaf.requires_grad)

    return tuple(of(number, leaf) for number, leaf in enumerate(leaves))


def _sizes_first(graph: fx.Graph, example: _Example) -> None:
    """One node per size: in front where it follows from the inputs, else after what it is of.

    The trace asks a tensor for its size wherever an operator needs it; a late question would keep
    the tensor alive, until backward if it is asked there.
    """
    *_, front = graph.find_nodes(op="placeholder")  # sizes go after it
    ready: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.target in ASSERTS:
            graph.erase_node(node)
    known: dict[sympy.Basic, fx.Node] = {}
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if node.op == "placeholder" and isinstance(val, torch_sizes.SYMBOLIC):
            known.setdefault(torch_sizes.expression(val), node)
            ready.add(node)
        if node.op != "call_function" or not isinstance(val, torch_sizes.SYMBOLIC):
            continue
        expression = example.env.simplify(torch_sizes.expression(val))
        if expression in known:
            node.replace_all_uses_with(known[expression])
            graph.erase_node(node)
            continue
        known[expression] = node
        source: Any = node.args[0]
        of_tensor = node.target in OF_A_TENSOR
        if source.op == "placeholder" if of_tensor else ready.issuperset(node.all_input_nodes):
            front.append(node)
            front = node
            ready.add(node)
        elif factors := _factors(expression, {e: n for e, n in known.items() if n in ready}):
            node.target, node.args = operator.mul, factors
            front.append(node)
            front = node
            ready.add(node)
        elif of_tensor:
            source.append(node)
        else:
            continue  # read out of the data, or computed from what was
        node.meta = {key: node.meta[key] for key in _TAKEN_ALONG if key in node.meta}
    for node in reversed(list(graph.nodes)):
        unread = node.op == "call_function" and not node.users
        if unread and isinstance(node.meta.get("val"), torch_sizes.SYMBOLIC):
            graph.erase_node(node)


def _factors(
    expression: sympy.Basic, known: Mapping[sympy.Basic, fx.Node]
) -> tuple[fx.Node, fx.Node | int] | None:
    """Two of the sizes that are known, or one and a number, of which a size is the product.

    A flattened batch has ``batch * length`` rows, and is asked for them deep in the model.
    """
    for size, node in known.items():
        rest = expression / size if size.is_Symbol or size.is_Mul else sympy.nan
        if rest in known or rest.is_Integer:
            return node, known[rest] if rest in known else int(rest)
    return None
