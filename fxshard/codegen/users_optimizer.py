"""An optimizer of the user's that a program is to step with, before it is changed and after."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxshard.codegen.given_optimizer import make_optimizer
from fxshard.codegen.optimizer import OnShards, on_shards, require_by_element, rows_of_state
from fxshard.errors import ConfigError
from fxshard.ir.whole import ASKED


@dataclasses.dataclass(frozen=True)
class UsersOptimizer:
    """An optimizer that may step in a program; nothing of it has been changed.

    Attributes:
        given: the user's object, or what makes one of named parameters.
        groups: of an object, the FQNs of the parameters in each group.
    """

    given: Any
    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def checked(cls, optimizer: Any, named: Mapping[str, nn.Parameter]) -> UsersOptimizer:
        """Check that `optimizer` may step the parameters `named`.

        Args:
            optimizer: a `torch.optim.Optimizer` over these parameters, or a callable as for the
                option ``optimizer``.
            named: all parameters of the model, by FQN, sharded or not.

        Raises:
            ConfigError: it has other parameters, lacks some, runs hooks before its step, or its
                class needs full parameters.
        """
        made = optimizer
        if not isinstance(optimizer, Optimizer):
            like = [
                nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
                for p in named.values()
            ]
            made = make_optimizer(optimizer, like, list(named))
            named = dict(zip(named, like, strict=True))
        require_by_element(made, ASKED)
        refuse_pre_hooks(made)
        names = {id(param): fqn for fqn, param in named.items()}
        for group in made.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    raise ConfigError(
                        f"{ASKED}: the {type(made).__name__} holds a parameter of shape "
                        f"{list(param.shape)} that is none of the model's. Make it of "
                        f"model.parameters(), and step what is beside the model by another one."
                    )
        groups = tuple(tuple(names[id(p)] for p in g["params"]) for g in made.param_groups)
        held = {fqn for fqns in groups for fqn in fqns}
        left = [fqn for fqn, param in named.items() if param.requires_grad and fqn not in held]
        if left:
            raise ConfigError(
                f"{ASKED}: parameter {left[0]!r} requires a gradient, and is in no group of the "
                f"{type(made).__name__}. Freeze it (requires_grad_(False)), or give it to the "
                f"optimizer."
            )
        return cls(optimizer, groups)

    def factory(self) -> Callable[..., Any]:
        """What makes an optimizer alike over other tensors, without its state: for plans."""
        if not isinstance(self.given, Optimizer):
            made: Callable[..., Any] = self.given
            return made
        given: Any = self.given
        kind: Any = type(given._runner) if isinstance(given, OnShards) else type(given)
        names = self.groups
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.given.param_groups
        ]
        accepted = inspect.signature(kind).parameters
        options = {n: value for n, value in self.given.defaults.items() if n in accepted}

        def alike(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
            params = dict(named_parameters)
            every = zip(groups, names, strict=True)
            made: Optimizer = kind(
                [{**group, "params": [params[fqn] for fqn in fqns]} for group, fqns in every],
                **options,
            )
            return made

        return alike

    def over(self, named: Mapping[str, nn.Parameter]) -> OnShards:
        """The optimizer, over the sharded parameters from now on; its state is their rows.

        Args:
            named: the parameters of the sharded model, by FQN.
        """
        if not isinstance(self.given, Optimizer):
            made = make_optimizer(self.given, list(named.values()), list(named))
            return on_shards(made, in_backward=True)
        optimizer = self.given
        for group, fqns in zip(optimizer.param_groups, self.groups, strict=True):
            for at, fqn in enumerate(fqns):
                before, now = group["params"][at], named[fqn]
                if before is not now:
                    group["params"][at] = now
                    if before in optimizer.state:
                        entries: dict[str, Tensor] = optimizer.state.pop(before)
                        optimizer.state[now] = rows_of_state(entries, now)
        return on_shards(optimizer, in_backward=True)


def refuse_pre_hooks(optimizer: Optimizer) -> None:
    """Raise ConfigError if hooks run before a step: a program steps unit by unit.

    Those after a step run when all units are stepped.
    """
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_step_pre") and hooks:
            raise ConfigError(
                f"{ASKED}: the {type(optimizer).__name__} has hooks before its step "
                f"({name.strip('_')}), and a program steps units as their gradients are reduced. "
                f"Remove them, or train by a loop; a hook after the step is fine."
            )
