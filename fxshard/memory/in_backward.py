"""What the steps inside of backward allocate and free, unit by unit, recorded on meta shards."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fxshard.codegen.given_optimizer import make_optimizer
from fxshard.codegen.optimizer import on_shards
from fxshard.host import collector
from fxshard.ir import ops
from fxshard.ir.program import Program
from fxshard.memory.optimizer import Runs, Tensors, record_steps, without_data
from fxshard.memory.optimizer_step import OptimizerStep


@collector.paused()
def trace_in_backward(
    program: Program,
    optimizer: Any,
    *,
    for_cuda: bool = False,
    without: frozenset[str] = frozenset(),
) -> OptimizerStep | None:
    """Run the steps of the program twice, by the code that runs them, on rank 0's shapes.

    Args:
        program: says what is stepped, and in which order.
        optimizer, for_cuda, without: as for `fxshard.memory.optimizer.trace_step`.

    Raises:
        ConfigError: it is no optimizer, or one whose steps need data or full parameters.
    """
    if optimizer is None:
        return None
    together: list[tuple[str, ...]] = [
        tuple(node.args[2]) for node in program.graph.nodes if node.target is ops.step
    ]

    def make(params: list[nn.Parameter], names: list[str]) -> Any:
        return on_shards(make_optimizer(optimizer, params, names), in_backward=True)

    def steps(made: Any, params: Tensors, grads: Tensors) -> Runs:
        found: Runs = {}
        for fqns in together:
            some = [fqn for fqn in fqns if fqn not in without]
            given = [params[fqn] for fqn in some], [grads[fqn] for fqn in some]
            found[fqns] = functools.partial(made.step_parameters, *given)
        return found

    def record(device: str, mode: AbstractContextManager[Any]) -> OptimizerStep:
        graded = {fqn for fqns in together for fqn in fqns}
        return record_steps(program, make, steps, graded, device, mode, for_cuda=for_cuda)

    return dataclasses.replace(without_data(optimizer, record), without=without)
