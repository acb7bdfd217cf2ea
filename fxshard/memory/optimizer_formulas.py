"""The bytes of an optimizer's step for other numbers of ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import sympy

from fxshard.errors import ConfigError
from fxshard.ir.layout import gathered
from fxshard.ir.program import Program
from fxshard.memory import symbolic
from fxshard.memory.optimizer_step import OptimizerStep


def with_formulas(
    program: Program, step: OptimizerStep, record: Callable[[Program], OptimizerStep | None]
) -> OptimizerStep:
    """`step`, with the bytes of its storages for other numbers of ranks.

    The step is recorded twice more, with as many rows per parameter as tell parameters apart: what
    it makes for one has a multiple of that one's elements, in all three recordings.

    Args:
        program: what was recorded.
        step: the recording.
        record: makes another, of a program with other parameters.

    Raises:
        ConfigError: a storage has no such size.
    """
    if step.sent.flops:
        raise ConfigError(
            f"optimizer {step.name}: which matrices rank 0 owns differs from one number of ranks "
            f"to the next, so that there is no formula for it. Plan once for each: "
            f"plan.at(world=...)."
        )
    params = sorted(program.params.values(), key=lambda param: param.position)
    many = 3 * (len(params) + 1)
    rows = [{p.fqn: len(params) + 1 + i for i, p in enumerate(params, 1)}]
    rows += [{p.fqn: many - i for i, p in enumerate(params, 1)}]
    found = [step, *(record(_with_rows(program, each)) for each in rows)]
    made = [_made(each) for each in found if each is not None]
    if len({tuple(each) for each in made}) > 1:
        raise ConfigError(
            f"optimizer {step.name}: its step runs other operators for other sizes of parameters, "
            f"so that there is no formula for it."
        )
    ratios = {
        Fraction(rows[0][p.fqn], rows[1][p.fqn]): (p, rows[0][p.fqn] * math.prod(p.shape[1:]))
        for p in params
    }
    formulas: dict[int, sympy.Expr] = {}
    for number, size in made[0].items():
        one, other = made[1][number], made[2][number]
        if one == other == size:
            continue
        param, elements = ratios.get(Fraction(one, other), (None, 1))
        each = Fraction(one, elements)
        layout = None if param is None else program.layouts[param.fqn]
        if layout is None or each * layout.shard_numel != size:
            raise ConfigError(
                f"optimizer {step.name}: its step makes something of {size} bytes that belongs to "
                f"no single parameter, so that there is no formula for it."
            )
        formulas[number] = sympy.Rational(each) * layout.shard_numel_over(symbolic.WORLD)
    return dataclasses.replace(step, formulas=formulas)


def _with_rows(program: Program, rows: dict[str, int]) -> Program:
    """The program as if its shards had so many rows."""
    world = program.world_size
    units = tuple(
        dataclasses.replace(
            unit,
            params=tuple(
                dataclasses.replace(
                    p, shape=gathered((rows[p.fqn], *p.shape[1:]), world), shard_dim=0
                )
                for p in unit.params
            ),
        )
        for unit in program.units
    )
    return dataclasses.replace(program, units=units)


def _made(step: OptimizerStep) -> dict[int, int]:
    """Bytes of each storage that a recording makes or holds, in order."""
    parts = [events for each in step.parts or () for events in each.values()]
    events = [event for part in (step.first, step.second, *parts) for event in part]
    made = dict(pair for event in events for pair in event.allocated)
    return made | {number: state.bytes for number, state in step.state.items()}
