"""Open sizes: torch's symbols, and expressions of sympy for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.utils._sympy.functions as _functions
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
)
from torch.utils._sympy.functions import FloorDiv, Max, Mod

__all__ = [
    "FUNCTIONS",
    "SYMBOLIC",
    "FloorDiv",
    "Max",
    "Mod",
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
