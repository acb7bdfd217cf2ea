"""Contracts of what `fxshard._torch.sizes` uses of torch."""

import contextlib

import sympy
import torch
import torch._dynamo
import torch.utils.checkpoint

from fxshard._torch import fake_tensors
from fxshard._torch import sizes as torch_sizes


def test_symbolic_sizes_collect_what_is_asked_of_them() -> None:
    env = torch_sizes.ShapeEnv(duck_shape=False)
    rows, columns = (torch_sizes.symbolic_size(env, name, 8) for name in ("rows", "columns"))
    with fake_tensors.FakeTensorMode(shape_env=env):
        x = torch.empty(rows, columns)
        assert x.view(-1).shape[0] == 64 and not env.replacements
    symbol = torch_sizes.expression(rows)
    assert symbol != torch_sizes.expression(columns), "equal sizes became one symbol"
    assert torch_sizes.expression(rows * 2) == 2 * symbol and isinstance(rows, torch_sizes.SYMBOLIC)
    assert env.var_to_range[symbol].lower == 2
    assert rows < 10
    assert [str(guard.expr) for guard in env.guards][-1] == str(symbol < 10)
    assert rows == columns and env.simplify(symbol) == env.simplify(torch_sizes.expression(columns))


def test_what_is_asked_of_symbols_again_is_remembered() -> None:
    found = []
    for remembers in (False, True):
        env = torch_sizes.ShapeEnv(duck_shape=False)
        made = torch_sizes.symbolic_size(env, "rows", 8)
        memory = torch_sizes.Remembered(env)
        with memory.asked() if remembers else contextlib.nullcontext():
            products = [made * 3 + 1 for _ in range(2)]
            assert (products[0].node is products[1].node) == remembers
            with env.suppress_guards():
                assert made * 3 < 30, "an answer that leaves no guard"
            for _ in range(2):
                assert made * 3 < 30
            halves = made * 1.0, made / 2, made // 2, made % 2 == 0, -made
        found.append(([str(guard.expr) for guard in env.guards], str(halves), str(products)))
    assert found[0] == found[1]
    assert any("< 30" in guard or "< 10" in guard for guard in found[0][0])


def test_sizes_are_in_functions_of_sympy() -> None:
    import torch.utils._sympy.functions as torchs

    a, b = sympy.symbols("a b", integer=True, positive=True)
    made = {
        torchs.FloorDiv(a, b): sympy.floor(a / b),
        torchs.CeilToInt(torchs.IntTrueDiv(a, b)): sympy.ceiling(a / b),
        torchs.Mod(a, b) * 2: 2 * sympy.Mod(a, b),
        torchs.Max(a, b) + torchs.Min(a, 3): sympy.Max(a, b) + sympy.Min(a, 3),
        torchs.ModularIndexing(a, 2, b): sympy.Mod(sympy.floor(a / 2), b),
        torchs.PowByNatural(a, b): a**b,
    }
    for theirs, ours in made.items():
        assert torch_sizes.in_sympy(theirs) == ours
        for values in ({a: 7, b: 3}, {a: 12, b: 4}):
            assert int(theirs.xreplace({s: sympy.Integer(n) for s, n in values.items()})) == int(
                ours.subs(values)
            )


def test_divisions_of_a_trace_are_torchs() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv(duck_shape=False)
    size = torch_sizes.symbolic_size(env, "seq", 6)
    assert size % 2 == 0
    (division,) = torch_sizes.expression(12 * (size // 2)).atoms(torch_sizes.FloorDiv)
    assert sympy.Eq(torch_sizes.Mod(*division.args), 0) in [guard.expr for guard in env.guards]
    (largest,) = torch_sizes.expression(torch.sym_max(size - 4, 1)).atoms(torch_sizes.Max)
    assert set(largest.args) == {1, torch_sizes.expression(size) - 4}


def test_functions_of_sizes_by_name() -> None:
    for name in ("FloorDiv", "ModularIndexing", "Mod", "Max", "Min", "CeilDiv", "PowByNatural"):
        assert torch_sizes.FUNCTIONS[name].__name__ == name
    s = sympy.Symbol("s", positive=True, integer=True)
    made = torch_sizes.FUNCTIONS["FloorDiv"](s, 2)
    assert made.func(*made.args) == made
