"""torch's own optimizers on this rank's rows: the same class, step and state, without DTensor.

An operator on a DTensor costs tens of microseconds in Python before anything is computed, and a
step of AdamW has a dozen per parameter. Here the class's own ``step`` runs on the DTensors' local
tensors: the views of a unit's flat storage, without their padding. It is the same code on the
same values, so the result is that of the DTensors bit by bit. (One step over the flat storage as
a whole would not be: kernels round the ends of a tensor otherwise, in bf16 and in fused steps.)
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from fxshard._torch import dtensors
from fxshard._torch.dtensors import held_part, local_part, sharded_like
from fxshard.codegen.several import Several, name_of
from fxshard.errors import ConfigError, StepError

# Each element is stepped on its own: torch/optim/<name>.py reads no other element of a parameter.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, RMSprop, ASGD, Rprop),
)


@dataclasses.dataclass
class _LocalParameter:
    """What the class's own step sees of one parameter.

    Attributes:
        source: the local tensor that the DTensor had.
        leaf: the same memory; the step finds the gradient in its ``.grad``.
        pairs: per entry of the state, as the user has it and as the step has it.
    """

    source: Tensor
    leaf: Tensor
    pairs: dict[str, tuple[Any, Any]]


class OnShards(Optimizer):
    """What `on_shards` adds to an optimizer: a step on local shards.

    ``state`` and ``param_groups`` are torch's, over DTensors: schedulers, ``state_dict`` and
    torch.distributed.checkpoint see what they always see.

    Attributes:
        in_backward: parameters are stepped by the program of the model, inside of backward.
            `step` is harmless then: it finds gradients of `Config.ignored` parameters alone.
    """

    in_backward: bool
    _rows: dict[Tensor, _LocalParameter]
    _positions: dict[Tensor, int]
    _members: list[list[int]]
    _runner: Optimizer
    _own_step: Callable[[Optimizer], Any]  # without hooks and switches of autograd around it

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.step_parameters(params, [local_part(p.grad) for p in params])
        return loss

    @torch.no_grad()
    def step_parameters(self, params: Sequence[Tensor], grads: Iterable[Tensor]) -> None:
        """Step some parameters, in place.

        Args:
            params: of `param_groups`.
            grads: per parameter the gradient of this rank's rows, of their shape.

        Raises:
            StepError: a parameter is in no group.
        """
        runner = self._runner
        runner.__dict__.update(_settings(self))
        self._find_groups()
        groups = [self._group(param) for param in params]
        rows = [self._rows_of(param) for param in params]
        members: dict[int, list[Tensor]] = {}
        for param, group, row, grad in zip(params, groups, rows, grads, strict=True):
            self._hand_down(param, row)
            row.leaf.grad = grad
            members.setdefault(group, []).append(row.leaf)
        runner.param_groups = [
            {**group, "params": members[i]}
            for i, group in enumerate(self.param_groups)
            if i in members
        ]
        try:
            self._own_step(runner)
        finally:
            for row in rows:
                row.leaf.grad = None
            runner.param_groups = []
        for param, row in zip(params, rows, strict=True):
            self._hand_up(param, row)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; of a full tensor each rank takes its own rows, without communication."""
        super().load_state_dict(state_dict)
        for param, entries in self.state.items():
            entries.update(rows_of_state(entries, param))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied or pickled on its own it is torch's optimizer."""
        return _empty, (type(self._runner),), self.__getstate__()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `torch.amp.GradScaler.step` asks for first (torch/amp/grad_scaler.py)."""
        if self.in_backward:
            raise StepError(
                "a GradScaler with optimizer_in_backward=True or fxshard.compile_step: parameters "
                "were stepped with gradients that are still scaled, before the scaler could look "
                "for infinite ones. Train in bf16 without a scaler, or step after backward."
            )
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def _find_groups(self) -> None:
        """See which group each parameter is in: the user may have changed that since."""
        members = [list(map(id, group["params"])) for group in self.param_groups]
        if members != self._members:  # ids of tensors that `_positions` keeps alive
            self._members = members
            self._positions = {
                p: i for i, group in enumerate(self.param_groups) for p in group["params"]
            }

    def _group(self, param: Tensor) -> int:
        """Which group a parameter is in."""
        if param not in self._positions:
            raise StepError(
                f"a parameter of shape {list(param.shape)} has a gradient and is in no group of "
                f"the {type(self).__name__} that steps it. Freeze it (requires_grad_(False)) or "
                f"give it to the optimizer; after load_state_dict(assign=True), compile again."
            )
        return self._positions[param]

    def _rows_of(self, param: Tensor) -> _LocalParameter:
        source = held_part(param)  # operators of a subclass are its own here too
        found = self._rows.get(param)
        if found is None or found.source is not source:
            if found is not None:
                self._runner.state.pop(found.leaf, None)
            leaf = source.detach().requires_grad_()
            leaf.grad_dtype = None  # as parameters that keep gradients in a low precision
            found = self._rows[param] = _LocalParameter(source, leaf, {})
        return found

    def _hand_down(self, param: Tensor, row: _LocalParameter) -> None:
        """Let the runner's state of a parameter be what the user's is now."""
        given, own = self.state.get(param), self._runner.state
        if not given:
            own.pop(row.leaf, None)
            row.pairs.clear()
            return
        mine = own[row.leaf]
        for key, value in given.items():
            if key not in row.pairs or row.pairs[key][0] is not value:
                local = held_part(value) if isinstance(value, Tensor) else value
                row.pairs[key] = value, local
                mine[key] = local
        for key in mine.keys() - given.keys():
            del mine[key], row.pairs[key]

    def _hand_up(self, param: Tensor, row: _LocalParameter) -> None:
        """Show the user what the step has made."""
        mine = self._runner.state.get(row.leaf)
        for key, value in (mine or {}).items():
            if key not in row.pairs or row.pairs[key][1] is not value:
                shown = value
                if isinstance(param, DTensor) and isinstance(value, Tensor) and value.dim():
                    shown = dtensors.dtensor_like(value, param)
                row.pairs[key] = shown, value
                self.state[param][key] = shown


def rows_of_state(entries: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """The state of a parameter, with this rank's rows of what is there in full."""
    found = dict(entries)
    for key, value in entries.items():
        full = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if isinstance(param, DTensor) and full and value.shape == param.shape:
            local = local_part(sharded_like(value, param)).clone()
            found[key] = dtensors.dtensor_like(local, param)
    return found


def stepped(optimizer: Optimizer) -> Optimizer:
    """Let what can step local shards do so, from now on; the same object.

    Muon sends matrices to their owners by itself (`fxshard.runtime.full_matrices`).

    Raises:
        ConfigError: see `on_shards`.
    """
    for each in optimizer.members if isinstance(optimizer, Several) else [optimizer]:
        if type(each) is not Muon:
            on_shards(each)
    return optimizer


def on_shards(optimizer: Optimizer, *, in_backward: bool = False) -> OnShards:
    """Let the step of `optimizer` run on local shards, from now on.

    Args:
        optimizer: one of `ELEMENTWISE`, over DTensors that are sharded by rows, or plain tensors.
        in_backward: a program steps its parameters.

    Returns:
        The same object; its class is a subclass of the one that it had.

    Raises:
        ConfigError: its class needs full parameters, or is not known; or it is differentiable.
    """
    if isinstance(optimizer, OnShards):
        optimizer.in_backward = in_backward
        return optimizer
    kind = type(optimizer)
    require_by_element(optimizer, "optimizer_in_backward" if in_backward else "")
    runner = _empty(kind)
    runner.__dict__.update(_settings(optimizer))
    runner.state = collections.defaultdict(dict)
    runner.param_groups = []
    optimizer.__class__ = _class_on_shards(cast("Any", kind))
    made = cast("OnShards", optimizer)
    made.in_backward, made._runner = in_backward, runner
    made._rows, made._positions, made._members = {}, {}, []
    made._own_step = inspect.unwrap(kind.step)
    return made


def require_by_element(optimizer: Optimizer, what: str = "") -> None:
    """Check that the step of `optimizer` can run on the rows of a rank.

    Args:
        optimizer: of the user's.
        what: the option or verb by which a program steps; "": none does.

    Raises:
        ConfigError: see `on_shards`.
    """
    kind = type(optimizer)
    if isinstance(optimizer, OnShards):
        return
    asked = f"{what}=True" if what == "optimizer_in_backward" else what
    without = f"Leave {what} out" if what == "optimizer_in_backward" else "Train by a loop"
    if what and (kind is Muon or isinstance(optimizer, Several)):
        raise ConfigError(
            f"{asked} with {name_of(optimizer)}: a program steps the rows of a "
            f"unit as soon as their gradients are reduced, by one optimizer that steps each "
            f"element on its own, and Muon's update needs all rows of a matrix. {without}."
        )
    if kind not in ELEMENTWISE:
        raise ConfigError(
            f"optimizer {kind.__name__} cannot step this rank's rows alone: known to step each "
            f"element on its own are {', '.join(each.__name__ for each in ELEMENTWISE)}. Make it "
            f"over model.parameters() yourself, without {what or 'optimizer_in_backward'}: DTensor "
            f"communicates where it must."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer {kind.__name__}(differentiable=True) lets autograd record the step, which "
            f"cannot be done on the parameters themselves. Leave it False."
        )


def _empty(kind: type[Optimizer]) -> Optimizer:
    """What unpickling fills."""
    return kind.__new__(kind)


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Its attributes besides groups, state, and what is `OnShards`' own."""
    return {name: value for name, value in optimizer.__dict__.items() if name not in NOT_SETTINGS}


NOT_SETTINGS = {"state", "param_groups", *OnShards.__annotations__}


@functools.cache
def _class_on_shards(kind: Any) -> type[Optimizer]:
    """A subclass of the same name. Its step runs hooks and the profiler's mark, as torch's do."""
    step: Any = Optimizer.profile_hook_step(OnShards.step)
    step.hooked = True  # torch/optim/optimizer.py, _patch_step_function: do not wrap it again
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "step": step}
    made: type[Optimizer] = type(kind.__name__, (OnShards, kind), same)
    return made
