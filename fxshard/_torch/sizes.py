"""Open sizes: torch's symbols, and expressions of sympy for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
import torch.utils._sympy.functions as _functions
from torch.fx.experimental import sym_node as _sym_node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Mod

__all__ = [
    "FUNCTIONS",
    "SYMBOLIC",
    "FloorDiv",
    "Max",
    "Mod",
    "Remembered",
    "ShapeEnv",
    "expression",
    "in_sympy",
    "symbolic_size",
]


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


# Torch's own functions of sizes, by name (torch/utils/_sympy/functions.py).
FUNCTIONS: dict[str, Any] = {
    name: found
    for name, found in vars(_functions).items()
    if isinstance(found, type)
    and issubclass(found, sympy.Basic)
    and found.__module__ == _functions.__name__
}


def symbolic_size(env: ShapeEnv, name: str, example: int) -> torch.SymInt:
    """A new symbol of `env` for a size that is `example` now."""
    from torch._dynamo.source import ConstantSource  # 2 s, so only for those who need it

    source = ConstantSource(name)
    symbol = env.create_symbol(example, source, DimDynamic.DYNAMIC, constraint_dim=None)
    size = env.create_symintnode(symbol, hint=example, source=source)
    assert isinstance(size, torch.SymInt), f"{name} is {example}, which torch makes a constant"
    return size


def expression(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The sympy expression of a symbolic number."""
    return value.node.expr


class Remembered:
    """What was worked out of the symbols of `env`: each operation once.

    A trace asks the same of the same sizes tens of thousands of times, mostly in C++, which looks
    at sizes and strides whenever it makes a tensor. Torch makes a new node each time, and a trace a
    proxy for it. Nodes do not change. Which proxy a node has is decided where it is seen first: one
    that the trace has computed is no node of a tensor's size, and none of an earlier run.
    (torch/fx/experimental/sym_node.py, ``_make_node_magic``; proxy_tensor.py, ``set_proxy_slot``)
    """

    def __init__(self, env: ShapeEnv) -> None:
        self._env = env
        self._nodes: dict[Any, SymNode] = {}
        self._in_trace = False  # inside of an operation that is traced

    def forget(self) -> None:
        """Begin a run: sizes of gradients that the trace is given are nodes of the run before."""
        self._nodes.clear()

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Answer from memory while this is open."""
        before = {name: getattr(SymNode, name) for name in _OPERATIONS}
        for name, plain in before.items():
            setattr(SymNode, name, self._operation(name, plain))
        try:
            yield
        finally:
            for name, plain in before.items():
                setattr(SymNode, name, plain)

    def _operation(self, name: str, plain: Callable[..., SymNode]) -> Callable[..., SymNode]:
        env, nodes = self._env, self._nodes

        def operation(node: SymNode, *others: Any) -> SymNode:
            if node.shape_env is not env or self._in_trace:
                return plain(node, *others)
            mode = get_proxy_mode()
            key = (name, mode, _replaced(env), *_terms(node))
            for other in others:
                key += _terms(other)
            found = nodes.get(key)
            if found is None:
                self._in_trace = mode is not None
                try:
                    found = nodes[key] = plain(node, *others)
                finally:
                    self._in_trace = False
            return found

        return operation


def _replaced(env: Any) -> int:
    """Another number after each change of what symbols stand for."""
    counter = "_replacements_version_counter"  # not in torch 2.11; the other one counts more
    return int(getattr(env, counter, env._version_counter))


def _terms(value: Any) -> tuple[Any, ...]:
    """What tells operands apart: ``1``, ``1.0`` and ``True`` are equal."""
    return (value._expr, value.pytype) if isinstance(value, SymNode) else (value, type(value))


# Methods of a node that make another one of it and one more, and `wrap_int`.
_OPERATIONS = (
    "wrap_int",
    *(
        f"{name}_" if name in _sym_node.magic_methods_on_operator_with_trailing_underscore else name
        for name in _sym_node.magic_methods
        if name not in ("sym_ite", "round")
    ),
)


def in_sympy(expression: sympy.Basic) -> sympy.Basic:
    """`expression` with sympy's own functions in place of those of torch/utils/_sympy/functions.py.

    For sizes only, which are not negative: there truncation is a floor.
    """
    if not expression.args:
        return expression
    args = tuple(map(in_sympy, expression.args))
    made = _OF_SYMPY.get(type(expression).__name__)
    if made is not None and type(expression).__module__.startswith("torch."):
        return made(*args)
    return expression if args == expression.args else expression.func(*args)


_OF_SYMPY: dict[str, Callable[..., sympy.Basic]] = {
    "FloorDiv": lambda a, b: sympy.floor(a / b),
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
    "CleanDiv": lambda a, b: a / b,
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "CeilToInt": sympy.ceiling,
    "FloorToInt": sympy.floor,
    "TruncToInt": sympy.floor,
    "ToFloat": lambda a: a,
    "Identity": lambda a: a,
    "Mod": sympy.Mod,
    "PythonMod": sympy.Mod,
    "ModularIndexing": lambda base, divisor, modulus: sympy.Mod(
        sympy.floor(base / divisor), modulus
    ),
    "Max": sympy.Max,
    "Min": sympy.Min,
    "PowByNatural": lambda a, b: a**b,
}
