"""What the steps inside of backward allocate and free, unit by unit, recorded on meta shards."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import nn

from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.codegen.optimizer import on_shards
from fxshard.errors import ConfigError
from fxshard.host import collector
from fxshard.ir import ops
from fxshard.ir.program import Program
from fxshard.memory.optimizer import (
    OptimizerStep,
    RealScalars,
    State,
    choose_foreach,
    make_optimizer,
    refusal,
    state_of,
    step_of,
)
from fxshard.memory.recording import Event, Kernels, Recorder


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
        ConfigError: it is no optimizer, or one whose steps need data or whole parameters.
    """
    if optimizer is None:
        return None
    try:
        return _record(program, optimizer, "meta", contextlib.nullcontext(), for_cuda, without)
    except ConfigError:
        raise
    except Exception as on_meta:
        try:
            # fused kernels refuse meta tensors; fake CPU ones pass, if no scalar is read.
            return _record(program, optimizer, "cpu", FakeTensorMode(), for_cuda, without)
        except Exception as error:
            raise refusal(optimizer, on_meta) from error


def _record(
    program: Program,
    optimizer: Any,
    device: str,
    mode: contextlib.AbstractContextManager[Any],
    for_cuda: bool,
    without: frozenset[str],
) -> OptimizerStep:
    everything = [*program.params.items(), *program.wholes.items()]
    words: list[tuple[str, ...]] = [
        tuple(node.args[2]) for node in program.graph.nodes if node.target is ops.step
    ]
    recorder = Recorder(kernels=Kernels())
    with mode:
        params: dict[str, nn.Parameter] = {}
        for fqn, param in sorted(everything, key=lambda item: item[1].position):
            shape = program.layouts[fqn].local_shape()
            data = torch.empty(shape, dtype=param.dtype, device=device)
            shard = nn.Parameter(data, param.requires_grad)
            params[fqn] = shard
            recorder.know(shard.untyped_storage())
        grads = {fqn: torch.empty_like(params[fqn]) for fqns in words for fqn in fqns}
        for grad in grads.values():
            recorder.know(grad.untyped_storage())
        theirs = set(recorder.numbers.values())
        with RealScalars(), recorder:
            made = on_shards(make_optimizer(optimizer, list(params.values()), list(params)))
        if for_cuda:
            choose_foreach(made)
        names = {id(param): fqn for fqn, param in params.items()}

        def found() -> dict[int, State]:
            every = state_of(made, recorder, names)
            return {number: state for number, state in every.items() if number not in theirs}

        initial = list(found())
        steps: list[dict[tuple[str, ...], list[Event]]] = []
        states: list[dict[int, State]] = []
        for _ in range(2):
            steps.append({})
            for fqns in words:
                recorder.events = [Event("start", [], [])]
                with RealScalars(), recorder:
                    some = [fqn for fqn in fqns if fqn not in without]
                    made.step_parameters(
                        [params[fqn] for fqn in some], [grads[fqn] for fqn in some]
                    )
                steps[-1][fqns] = recorder.events
            recorder.events = [Event("end", [], [])]  # what dies with the recording is no step's
            states.append(found())
    flat = [[event for events in step.values() for event in events] for step in steps]
    whole = step_of(made, flat, states, bool(made.state))
    return dataclasses.replace(whole, initial=initial, words=(steps[0], steps[1]), without=without)
