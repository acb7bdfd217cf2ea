"""The optimizer in backward: one optimizer per parameter, each stepping when its gradient arrives.

As in torch's tutorial on fusing the optimizer step into backward, through
``Tensor.register_post_accumulate_grad_hook``. autograd decides the order of the steps, so it is
asked: the recording runs under the real engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from fxshard.memory.optimizer import OptimizerStep, State, make_optimizer, state_of, step_of
from fxshard.memory.recording import Event, Recorder
from fxshard.program import Program


class _Model(torch.autograd.Function):
    """Stands for the model: its backward returns a gradient for each parameter at once."""

    @staticmethod
    def forward(ctx: Any, noted: Any, *params: torch.Tensor) -> torch.Tensor:
        ctx.noted = noted
        return params[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (None, *ctx.noted())


def trace_in_backward(program: Program, optimizer: Any) -> OptimizerStep | None:
    """Record the steps that run inside of backward, twice, on meta tensors of rank 0's shards.

    Args:
        program: says which parameters have gradients, and in which order they are returned.
        optimizer: as for `fxshard.memory.optimizer.trace_step`.

    Raises:
        ConfigError: it is no optimizer.
    """
    if optimizer is None:
        return None
    world = program.world_size
    everything = program.params | program.wholes
    names = [r.name for r in program.results if r.kind == "grad" and r.name in everything]
    fqns = list(dict.fromkeys(names))
    params: list[nn.Parameter] = []
    recorder = Recorder()
    for fqn in fqns:
        whole = everything[fqn]
        shape = (len(whole.rows(0, world)), *whole.shape[1:])
        if fqn in program.wholes:
            shape = whole.shape
        shard = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"))
        recorder.know(shard.untyped_storage())
        params.append(shard)
    optimizers = [make_optimizer(optimizer, [param]) for param in params]
    grads: dict[int, str] = {}  # storage number -> FQN

    def gradients() -> list[torch.Tensor]:
        made = [torch.empty_like(param) for param in params]
        for fqn, grad in zip(fqns, made, strict=True):
            grads[recorder.numbers[id(grad.untyped_storage())]] = fqn
        recorder.events = [Event("start", [], [])]
        return made

    for param, own in zip(params, optimizers, strict=True):
        param.register_post_accumulate_grad_hook(_stepping(own))
    steps: list[list[Event]] = []
    states: list[dict[int, State]] = []
    theirs = set(recorder.numbers.values())
    for _ in range(2):
        root = _Model.apply(gradients, *params)
        with recorder:
            root.backward(torch.empty_like(root))
        del root
        steps.append(recorder.events)
        recorder.events = [Event("end", [], [])]
        found: dict[int, State] = {}
        for fqn, param, own in zip(fqns, params, optimizers, strict=True):
            found |= state_of(own, recorder, {id(param): fqn})
        states.append({n: entry for n, entry in found.items() if n not in theirs})
    step = step_of(optimizers[0], steps, states, any(bool(own.state) for own in optimizers))
    return dataclasses.replace(step, gradients=grads)


def _stepping(optimizer: torch.optim.Optimizer) -> Any:
    def step(param: torch.Tensor) -> None:
        optimizer.step()
        param.grad = None

    return step
