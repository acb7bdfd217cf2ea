"""The third phase: what a real ``optimizer.step`` allocates and frees, recorded on meta shards."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxshard.compat import FakeTensorMode, tree_flatten_with_path
from fxshard.errors import ConfigError
from fxshard.memory.recording import Event, Recorder
from fxshard.program import Program


class State(NamedTuple):
    bytes: int
    name: str
    owner: str  # FQN of the module of its parameter
    shape: tuple[int, ...]


@dataclasses.dataclass
class OptimizerStep:
    """A recording of the first and the second step.

    Attributes:
        name: class of the optimizer.
        first, second: events in order; the second step is the steady state.
        state: storages that are optimizer state after the first or the second step, with their
            bytes.
        held: those that are state between the two.
        names: per state ``(its name, FQN of the module whose parameter it belongs to)``.
        gradients: with the optimizer in backward, storages that are gradients -> parameter FQN.
        shapes: per state, of this rank's tensor.
        has_state: the optimizer's ``state`` is not empty behind the first step.
    """

    name: str
    first: list[Event]
    second: list[Event]
    state: dict[int, int]
    held: list[int]
    names: dict[int, tuple[str, str]]
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    has_state: bool = True
    gradients: dict[int, str] = dataclasses.field(default_factory=dict)


def trace_step(
    program: Program, optimizer: Any, *, for_cuda: bool = False, unused: bool = False
) -> OptimizerStep | None:
    """Run the real ``step`` of an optimizer twice on meta tensors of rank 0's shard shapes.

    Args:
        program: says which parameters have gradients.
        optimizer: a callable ``params -> torch.optim.Optimizer``, or an instance whose class and
            default options are taken; None for no optimizer phase.
        for_cuda: record the implementation that is the default on CUDA.
        unused: parameters that no gradient arrives at have one too, if they require it.

    Raises:
        ConfigError: it is neither, or its step reads values and so cannot run without data.
    """
    if optimizer is None:
        return None
    try:
        # Scalars such as Adam's step stay real beside meta shards: a step may read them.
        return _record(program, optimizer, "meta", contextlib.nullcontext(), for_cuda, unused)
    except RuntimeError as on_meta:
        try:
            # fused kernels refuse meta tensors; fake CPU ones pass, if no scalar is read.
            return _record(program, optimizer, "cpu", FakeTensorMode(), for_cuda, unused)
        except Exception as error:
            raise ConfigError(
                f"optimizer {optimizer!r}: its step cannot be analysed without data "
                f"(on meta tensors: {on_meta}; on fake tensors: {error})."
            ) from error


def _record(
    program: Program,
    optimizer: Any,
    device: str,
    mode: contextlib.AbstractContextManager[Any],
    for_cuda: bool,
    unused: bool,
) -> OptimizerStep:
    trained = {result.name for result in program.results if result.kind == "grad"}
    world = program.world_size
    params: list[nn.Parameter] = []
    fqns: list[str] = []
    recorder = Recorder()
    steps: list[list[Event]] = []
    with mode:
        everything = [*program.params.items(), *program.wholes.items()]
        for fqn, param in sorted(everything, key=lambda item: item[1].position):
            shape = (len(param.rows(0, world)), *param.shape[1:])
            if fqn in program.wholes:
                shape = param.shape
            shard = nn.Parameter(torch.empty(shape, dtype=param.dtype, device=device))
            shard.requires_grad_(param.requires_grad)
            recorder.know(shard.untyped_storage())
            if fqn in trained or (unused and param.requires_grad):
                shard.grad = torch.empty_like(shard)
                recorder.know(shard.grad.untyped_storage())
            params.append(shard)
            fqns.append(fqn)
        made = make_optimizer(optimizer, params)
        if for_cuda:
            choose_foreach(made)
        theirs = set(recorder.numbers.values())  # parameters and gradients
        states: list[dict[int, State]] = []
        has_state = False
        for _ in range(2):
            recorder.events = [Event("start", [], [])]
            with recorder:
                made.step()
            steps.append(recorder.events)
            has_state = has_state or bool(made.state)
            recorder.events = [Event("end", [], [])]  # what dies with the recording is no step's
            found = state_of(
                made, recorder, {id(p): fqn for p, fqn in zip(params, fqns, strict=True)}
            )
            states.append({n: entry for n, entry in found.items() if n not in theirs})
    return step_of(made, steps, states, has_state)


def step_of(
    optimizer: torch.optim.Optimizer,
    steps: list[list[Event]],
    states: list[dict[int, State]],
    has_state: bool,
) -> OptimizerStep:
    """From the events of two steps, and what was state behind each."""
    both = states[0] | states[1]
    return OptimizerStep(
        type(optimizer).__name__,
        steps[0],
        steps[1],
        state={number: found.bytes for number, found in both.items()},
        held=list(states[0]),
        names={number: (found.name, found.owner) for number, found in both.items()},
        shapes={number: found.shape for number, found in both.items()},
        has_state=has_state,
    )


def state_of(
    optimizer: torch.optim.Optimizer, recorder: Recorder, fqns: dict[int, str]
) -> dict[int, State]:
    """What the state holds, by storage."""
    found: dict[int, State] = {}
    for param, state in optimizer.state.items():
        fqn = fqns.get(id(param), "")
        leaves, _ = tree_flatten_with_path(state)
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) in recorder.numbers:
                storage = leaf.untyped_storage()
                key = "".join(str(part).strip("[]'") for part in path[:1])
                found[recorder.numbers[id(storage)]] = State(
                    storage.nbytes(), f"{key} of {fqn}", fqn.rpartition(".")[0], tuple(leaf.shape)
                )
    return found


def choose_foreach(optimizer: torch.optim.Optimizer) -> None:
    """What is the default for parameters on CUDA, wherever the user chose nothing.

    Source: torch/optim/optimizer.py, ``_default_to_fused_or_foreach``: foreach where parameters are
    on CUDA (DTensors too), never fused, not for a differentiable step; adam.py: not for a learning
    rate that is a tensor, unless the step is capturable.
    """
    for group in optimizer.param_groups:
        chosen = group.get("fused") or group.get("differentiable")
        chosen = chosen or (isinstance(group.get("lr"), Tensor) and not group.get("capturable"))
        if "foreach" in group and group["foreach"] is None and not chosen:
            group["foreach"] = True


def make_optimizer(optimizer: Any, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer over `params` from the ``optimizer`` option (a callable, or an instance)."""
    if isinstance(optimizer, torch.optim.Optimizer):
        # Defaults may hold more than the constructor takes (AdamW adds decoupled_weight_decay).
        accepted = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        return type(optimizer)(params, **options)
    made = optimizer(params) if callable(optimizer) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r}: expected a callable params -> torch.optim.Optimizer, such "
            f"as lambda params: torch.optim.AdamW(params, lr=1e-3)."
        )
    return made
