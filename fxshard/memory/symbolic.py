"""How many bytes each storage of a program has, as an expression of open sizes and of the ranks.

The trace knows the sizes of what it has seen (`fxshard.ir.domain.OpenTensor`). What passes
have made is of parameters, whose layout knows the rows (`fxshard.ir.layout`): the operators between
shards, unsharded parameters and reduced gradients move, join, pad and cut them. Whatever is neither
has one size in all calls.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy
import torch
from sympy.logic.boolalg import BooleanAtom
from torch import fx

from fxshard._torch import sizes as torch_sizes
from fxshard.capture import fakes, shapes
from fxshard.ir import domain, ops, tags, transfers
from fxshard.ir.domain import OPEN
from fxshard.ir.layout import numel_over, padding
from fxshard.ir.program import Program
from fxshard.ir.units import Unit

aten: Any = torch.ops.aten

Expressions = Mapping[str, tuple[sympy.Expr, ...]]  # node -> bytes of each of its storages
Numels = tuple[sympy.Expr, ...]  # elements of each tensor of a value

SAME_SIZE = (
    *(aten.view.default, aten.permute.default, aten._to_copy.default, aten.clone.default),
    *(aten.div_.Scalar, aten.add_.Tensor, aten.add.Tensor),
)


def symbol(name: str) -> sympy.Symbol:
    """The symbol of a size: a positive integer."""
    return sympy.Symbol(name, integer=True, positive=True)


WORLD = symbol("world")  # ranks that parameters are sharded over

WorldKind = tuple[bool, frozenset[int], frozenset[int]]


def kind_of_world(units: tuple[Unit, ...], world: int) -> WorldKind:
    """Equal for numbers of ranks over which a program runs the same operators in the same order.

    Those are: alone or not; which numbers of rows are padded; which units have parameters in a
    smaller group between forward and backward.
    """
    rows = {param.shape[param.shard_dim] for unit in units for param in unit.params}
    groups = {int(unit.reshard) for unit in units if not isinstance(unit.reshard, bool)}
    padded = frozenset(n for n in rows if padding(n, world))
    return world == 1, padded, frozenset(n for n in groups if n < world)


def expressions(program: Program) -> Expressions:
    """Per node whose value has a size that is not fixed: bytes of each of its storages."""
    read = _Reading(program)
    found: dict[str, tuple[sympy.Expr, ...]] = {}
    for node in program.graph.nodes:
        if node.meta.get(OPEN) is not None:
            nbytes = read.traced(node)
        else:
            made = read.made(node)
            if made is None:
                continue
            read.numels[node] = made
            nbytes = read.dense(node)
        if node.op == "call_function" and node.target in fakes.RULES:
            nbytes = read.of_kernel(node, nbytes, found)
        found[node.name] = nbytes
    return found


class _Reading:
    """The numbers of elements of a program's values, read in order.

    Attributes:
        numels: of the nodes so far whose sizes are not fixed.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.numels: dict[fx.Node, Numels] = {}
        symbols = program.domain.symbols if program.domain else {}
        self._names = {found: symbol(name) for name, found in symbols.items()}
        self._named: dict[sympy.Expr, sympy.Expr] = {}
        self._products: dict[tuple[sympy.Expr, ...], sympy.Expr] = {}

    def traced(self, node: fx.Node) -> tuple[sympy.Expr, ...]:
        """Note the elements of what the trace has seen; returns bytes of its distinct storages."""
        numels: list[sympy.Expr] = []
        nbytes: dict[int, sympy.Expr] = {}
        for tensor, opened in shapes.open_tensors(node):
            storage = tensor.untyped_storage()
            if opened is None:
                numels.append(sympy.Integer(tensor.numel()))
                nbytes.setdefault(id(storage), sympy.Integer(storage.nbytes()))
            else:
                numels.append(self.product(opened.size))
                nbytes.setdefault(id(storage), self.named(opened.nbytes))
        self.numels[node] = tuple(numels)
        return tuple(nbytes.values())

    def named(self, traced: sympy.Expr) -> sympy.Expr:
        """A size of the trace in the names of the sizes, by sympy's own functions."""
        if traced not in self._named:
            self._named[traced] = torch_sizes.in_sympy(traced.xreplace(self._names))
        return self._named[traced]

    def product(self, shape: tuple[sympy.Expr, ...]) -> sympy.Expr:
        """Elements of a tensor of a shape of the trace."""
        if shape not in self._products:
            self._products[shape] = sympy.Mul(*map(self.named, shape))
        return self._products[shape]

    def broadcast(self, node: fx.Node, other: fx.Node) -> sympy.Expr:
        """Elements of a tensor that two of the trace are broadcast to."""
        shapes_of = [
            tensor.shape if opened is None else opened.size
            for each in (node, other)
            for tensor, opened in shapes.open_tensors(each)
        ]
        longest = max(map(len, shapes_of))
        filled = [(1,) * (longest - len(shape)) + tuple(shape) for shape in shapes_of]
        both = zip(*filled, strict=True)
        return self.product(tuple(sympy.sympify(a if b == 1 else b) for a, b in both))

    def numel(self, node: fx.Node) -> sympy.Expr:
        """Elements of the one tensor that `node` is."""
        if node in self.numels:
            return self.numels[node][0]
        return sympy.Integer(node.meta["val"].numel())

    def dense(self, node: fx.Node) -> tuple[sympy.Expr, ...]:
        """Bytes of storages that hold no more than a tensor each."""
        tensors = tags.tensors(node.meta["val"])
        both = zip(self.numels[node], tensors, strict=True)
        return tuple(numel * tensor.element_size() for numel, tensor in both)

    def made(self, node: fx.Node) -> Numels | None:
        """Elements of what a pass has made; None: they are the same in all calls."""
        tag = tags.get(node) if node.op != "output" else None
        if tag is None:
            return None
        if node.op == "placeholder":
            if tag.role != "shard":
                return None
            return (self.program.layouts[tag.fqn or ""].shard_numel_over(WORLD),)
        if node.target is operator.getitem:
            source, index = node.args
            known = self.numels.get(source)  # type: ignore[arg-type]
            return None if known is None else (known[int(index)],)  # type: ignore[arg-type]
        if node.target in ops.OPERATORS:
            return self.results(node)
        if node.target in UNREDUCED and node.all_input_nodes[0] in self.numels:
            return tuple(sympy.Integer(t.numel()) for t in tags.tensors(node.meta["val"]))
        layout = self.program.layouts.get(tag.fqn or "")
        if node.target is aten.constant_pad_nd.default and tag.role == "pad" and layout is not None:
            return (layout.padded_numel_over(WORLD),)
        if node.target is aten.cat.default and tag.role == "pad":
            return (sympy.Add(*map(self.numel, tags.operands(node))),)
        first = self.numels.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if first is None:
            return None
        if node.target is aten.slice.Tensor and tag.role == "post_reduction" and layout is not None:
            return (layout.shard_numel_over(WORLD),)
        if tag.role == "compute" and first[0].free_symbols <= {WORLD}:
            return None  # the model's own operator: the trace has seen that its size is fixed
        return first[:1] if node.target in SAME_SIZE else None

    def results(self, node: fx.Node) -> Numels | None:
        """Elements of each result of a ``fxshard::`` operator."""
        if node.meta.get("val") is None:
            return None
        if node.target is ops.unpack:
            items = sorted(node.users, key=lambda item: int(item.args[1]))  # type: ignore[arg-type]
            found = [self.program.layouts[tags.get(item).fqn or ""] for item in items]
            return tuple(layout.unsharded_numel_over(WORLD) for layout in found)
        given = tuple(map(self.numel, tags.operands(node)))
        if node.target is ops.pack:
            return (sympy.Add(*given),)
        grows = 0 if transfers.is_in_place(node) else ops.of(node).grows
        if not grows:
            return given
        if ops.argument(node, "dims"):  # what is cut has no padding, what is kept of it has
            layouts = [self.program.layouts[tags.get(n).fqn or ""] for n in tags.operands(node)]
            given = tuple(layout.padded_numel_over(WORLD) for layout in layouts)
        size = sympy.Integer(int(node.args[1]))  # type: ignore[arg-type]
        if ops.group(node) == "shard" and self.program.world_size > 1:
            size = WORLD
        return tuple(numel_over(numel, size, grows) for numel in given)

    def of_kernel(
        self, node: fx.Node, nbytes: tuple[sympy.Expr, ...], found: Expressions
    ) -> tuple[sympy.Expr, ...]:
        """The bytes that `fakes.correct` gave the results: what its rules say, as expressions."""
        rule, vals = fakes.RULES[node.target], list(tags.tensors(node.meta["val"]))
        size = vals[0].element_size()
        if rule is fakes.window:
            return ((self.numel(node) + fakes.is_periodic(node.args)) * size,)
        base = node.all_input_nodes[0]
        if rule in fakes.OF_THE_CPU:
            return self.dense(node)
        if rule is fakes.unreduced and vals[0].dim() == 0:
            return (self.broadcast(*node.args[:2]) * size,)  # type: ignore[arg-type]
        if rule is fakes.grown:
            return (sympy.Max(self.numel(base), self.numel(node)) * size,)
        storages = tags.storages(node), tags.storages(base)
        if rule is fakes.whole_storage and storages[0][0].nbytes() == storages[1][0].nbytes():
            return found.get(base.name, nbytes)
        return nbytes


UNREDUCED = tuple(target for target, rule in fakes.RULES.items() if rule is fakes.unreduced)


def input_bytes(program: Program, leaf: int, value: torch.Tensor) -> sympy.Expr | None:
    """Bytes of the storage of a tensor of the call, if a size of it is open."""
    domain = program.domain
    if domain is None:
        return None
    names = {place: name for name, places in domain.places.items() for place in places}
    if not any((leaf, dim) in names for dim in range(value.dim())):
        return None
    if value.untyped_storage().nbytes() != value.numel() * value.element_size():
        return None  # a part of something larger, which is held whatever the call takes of it
    sizes = [
        symbol(names[leaf, dim]) if (leaf, dim) in names else sympy.Integer(size)
        for dim, size in enumerate(value.shape)
    ]
    return sympy.Mul(*sizes) * value.element_size()


def conditions(domain: domain.Domain) -> list[tuple[sympy.Basic, str]]:
    """The conditions that a trace assumed, in the names of the sizes, and where."""
    names = {found: symbol(name) for name, found in domain.symbols.items()}
    return [(torch_sizes.in_sympy(c.xreplace(names)), where) for c, where in domain.conditions]


def evaluate(expression: sympy.Basic, sizes: Mapping[str, Any]) -> Any:
    """The value of an expression of integers, exactly.

    Args:
        expression: a size or a condition, by sympy's functions, of what `symbol` makes.
        sizes: by name: ints, int64 arrays, or torch.SymInts.
    """
    if isinstance(expression, sympy.Symbol):
        return sizes[expression.name]
    if isinstance(expression, (sympy.Integer, BooleanAtom)):
        return expression == sympy.true if isinstance(expression, BooleanAtom) else int(expression)
    if isinstance(expression, sympy.Float):
        return float(expression)
    if isinstance(expression, (sympy.floor, sympy.ceiling)):
        above, below = _fraction(expression.args[0], sizes)
        if isinstance(expression, sympy.ceiling):
            return -((-above) // below)
        return above // below
    if isinstance(expression, (sympy.Mul, sympy.Rational)):
        above, below = _fraction(expression, sizes)
        return above if isinstance(below, int) and below == 1 else above // below
    known = next((made for kind, made in FUNCTIONS.items() if isinstance(expression, kind)), None)
    if known is None:
        return _one_by_one(expression, sizes)
    return functools.reduce(known, (evaluate(argument, sizes) for argument in expression.args))


def _fraction(expression: sympy.Basic, sizes: Mapping[str, Any]) -> tuple[Any, Any]:
    above, below = sympy.fraction(sympy.together(expression))
    factors = [evaluate(factor, sizes) for factor in sympy.Mul.make_args(above)]
    return functools.reduce(operator.mul, factors), evaluate(below, sizes)


def _one_by_one(expression: sympy.Basic, sizes: Mapping[str, Any]) -> Any:
    """The value of something that numpy has no function for, point by point."""
    names = sorted(symbol.name for symbol in expression.free_symbols)
    points = np.broadcast_arrays(*(sizes[name] for name in names))
    found = [
        expression.xreplace(dict(zip(map(symbol, names), map(sympy.Integer, point), strict=True)))
        for point in zip(*(array.ravel().tolist() for array in points), strict=True)
    ]
    is_condition = isinstance(expression, sympy.logic.boolalg.Boolean)
    values = [value == sympy.true if is_condition else int(value) for value in found]
    return np.array(values).reshape(points[0].shape)


FUNCTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    sympy.Add: operator.add,
    sympy.Pow: operator.pow,
    sympy.Mod: operator.mod,
    sympy.Max: np.maximum,
    sympy.Min: np.minimum,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Ge: operator.ge,
    sympy.Gt: operator.gt,
    sympy.Le: operator.le,
    sympy.Lt: operator.lt,
    sympy.And: np.logical_and,
    sympy.Or: np.logical_or,
}
