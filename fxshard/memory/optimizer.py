"""The third phase: what a real ``optimizer.step`` allocates and frees, recorded on meta shards."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from typing import Any

import torch
from torch import nn

from fxshard import meta
from fxshard.compat import FakeTensorMode, TorchDispatchMode, tree_flatten_with_path
from fxshard.errors import ConfigError
from fxshard.program import Program


@dataclasses.dataclass
class Event:
    """One operator of the step: what was allocated by it, and what died before the next one.

    Attributes:
        op: name of the operator.
        allocated: ``(storage number, bytes)``.
        freed: storage numbers.
    """

    op: str
    allocated: list[tuple[int, int]]
    freed: list[int]


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
    """

    name: str
    first: list[Event]
    second: list[Event]
    state: dict[int, int]
    held: list[int]
    names: dict[int, tuple[str, str]]


class _Recorder(TorchDispatchMode):
    """Notes when storages appear in the results of operators, and when they die."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = [Event("start", [], [])]
        self.numbers: dict[int, int] = {}
        self._references: list[Any] = []
        self._count = 0

    def know(self, storage: torch.UntypedStorage) -> int | None:
        """Number a storage; None if it is known already."""
        if id(storage) in self.numbers:
            return None
        number = self._count
        self._count += 1
        key = id(storage)
        self.numbers[key] = number

        def died(_: Any) -> None:
            self.numbers.pop(key, None)
            self.events[-1].freed.append(number)

        self._references.append(weakref.ref(storage, died))
        return number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        event = Event(str(func), [], [])
        self.events.append(event)
        for tensor in meta.tensors(result):
            storage = tensor.untyped_storage()
            number = self.know(storage)
            if number is not None:
                event.allocated.append((number, storage.nbytes()))
        return result


def trace_step(program: Program, optimizer: Any) -> OptimizerStep | None:
    """Run the real ``step`` of an optimizer twice on meta tensors of rank 0's shard shapes.

    Args:
        program: says which parameters have gradients.
        optimizer: a callable ``params -> torch.optim.Optimizer``, or an instance whose class and
            default options are taken; None for no optimizer phase.

    Raises:
        ConfigError: it is neither, or its step reads values and so cannot run without data.
    """
    if optimizer is None:
        return None
    try:
        # Scalars such as Adam's step stay real beside meta shards: a step may read them.
        return _record(program, optimizer, "meta", contextlib.nullcontext())
    except RuntimeError as on_meta:
        try:
            # fused kernels refuse meta tensors; fake CPU ones pass, if no scalar is read.
            return _record(program, optimizer, "cpu", FakeTensorMode())
        except Exception as error:
            raise ConfigError(
                f"optimizer {optimizer!r}: its step cannot be analysed without data "
                f"(on meta tensors: {on_meta}; on fake tensors: {error})."
            ) from error


def _record(
    program: Program, optimizer: Any, device: str, mode: contextlib.AbstractContextManager[Any]
) -> OptimizerStep:
    trained = {result.name for result in program.results if result.kind == "grad"}
    world = program.world_size
    params: list[nn.Parameter] = []
    fqns: list[str] = []
    recorder = _Recorder()
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
            if fqn in trained:
                shard.grad = torch.empty_like(shard)
                recorder.know(shard.grad.untyped_storage())
            params.append(shard)
            fqns.append(fqn)
        made = make_optimizer(optimizer, params)
        theirs = set(recorder.numbers.values())  # parameters and gradients
        states: list[dict[int, tuple[int, str, str]]] = []
        for _ in range(2):
            recorder.events = [Event("start", [], [])]
            with recorder:
                made.step()
            steps.append(recorder.events)
            recorder.events = [Event("end", [], [])]  # what dies with the recording is no step's
            found = _state(
                made, recorder, {id(p): fqn for p, fqn in zip(params, fqns, strict=True)}
            )
            states.append({n: entry for n, entry in found.items() if n not in theirs})
    both = states[0] | states[1]
    return OptimizerStep(
        type(made).__name__,
        steps[0],
        steps[1],
        state={number: size for number, (size, _, _) in both.items()},
        held=list(states[0]),
        names={number: (name, owner) for number, (_, name, owner) in both.items()},
    )


def _state(
    optimizer: torch.optim.Optimizer, recorder: _Recorder, fqns: dict[int, str]
) -> dict[int, tuple[int, str, str]]:
    """Per storage of the state: bytes, name, and FQN of the module of its parameter."""
    found: dict[int, tuple[int, str, str]] = {}
    for param, state in optimizer.state.items():
        fqn = fqns.get(id(param), "")
        leaves, _ = tree_flatten_with_path(state)
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) in recorder.numbers:
                storage = leaf.untyped_storage()
                key = "".join(str(part).strip("[]'") for part in path[:1])
                entry = (storage.nbytes(), f"{key} of {fqn}", fqn.rpartition(".")[0])
                found[recorder.numbers[id(storage)]] = entry
    return found


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
