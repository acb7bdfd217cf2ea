"""The optimizer that the option ``optimizer`` gives, over the parameters of a rank."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard.codegen import several
from fxshard.errors import ConfigError


def make_optimizer(
    optimizer: Any, params: list[nn.Parameter], names: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """An optimizer over `params` from the ``optimizer`` option (a callable, or an instance).

    `names`: of the parameters; a callable of ``named_parameters`` gets both. Several optimizers
    become one.

    Raises:
        ConfigError: it is neither; or the instance has more than its class and options say.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return _like(optimizer, params)
    try:
        given: Any = list(zip(names, params, strict=True)) if _takes_names(optimizer) else params
        made = optimizer(given) if callable(optimizer) else None
        if isinstance(made, (list, tuple)) and made:
            made = several.Several(made) if len(made) > 1 else made[0]
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"optimizer={optimizer!r}: it could not be made over the parameters of the model: "
            f"{error}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r}: expected a callable params -> torch.optim.Optimizer, such "
            f"as lambda params: torch.optim.AdamW(params, lr=1e-3), or one that makes a list of "
            f"optimizers, such as lambda named_parameters: [Muon(...), AdamW(...)]."
        )
    return made


def _like(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One of the class and the default options of `optimizer`, over `params`.

    Raises:
        ConfigError: that would leave out something of `optimizer`.
    """
    kind = type(optimizer)
    # Defaults may hold more than the constructor takes (AdamW adds decoupled_weight_decay).
    accepted = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    lost = _besides_defaults(optimizer, params)
    if not lost:
        made = kind(params, **options)
        if not (lost := _differing(made.defaults, optimizer.defaults)):
            return made
    raise ConfigError(
        f"optimizer=<{kind.__name__}>: of an instance over other tensors than this rank's shards, "
        f"the class and the default options are taken, but this one has {lost}, which would be "
        f"lost. Give a callable that makes it, of named parameters: optimizer=lambda "
        f"named_parameters: {kind.__name__}(...), or of the parameters alone: optimizer=lambda "
        f"params: {kind.__name__}(params, ...)."
    )


def _besides_defaults(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> str:
    """What an instance has besides its class and default options, in words."""
    groups = optimizer.param_groups
    if len(groups) != 1:
        return f"{len(groups)} parameter groups"
    options = {k: v for k, v in groups[0].items() if k not in ("params", "param_names")}
    if changed := _differing(options, optimizer.defaults):
        return changed
    counts = len(params), sum(param.requires_grad for param in params)
    if len(groups[0]["params"]) not in counts:
        return f"{len(groups[0]['params'])} parameters where the model has {counts[0]}"
    if any(_begun(state) for state in optimizer.state.values()):
        return "state of steps that it has made"
    hooks = [k for k, v in vars(optimizer).items() if k.endswith("_hooks") and v]
    return f"hooks ({hooks[0].strip('_')})" if hooks else ""


def _differing(options: dict[str, Any], defaults: dict[str, Any]) -> str:
    """The first option that is not the default, in words."""
    for name in (*options, *defaults):
        one, other = options.get(name, _NONE), defaults.get(name, _NONE)
        same = one is other
        if not same and isinstance(one, Tensor) and isinstance(other, Tensor):
            same = torch.equal(one, other)
        elif not same and not isinstance(one, Tensor) and not isinstance(other, Tensor):
            same = bool(one == other)
        if not same:
            values = f"{one!r} in place of {other!r}" if one is not _NONE else f"not {other!r}"
            values = f"{one!r}, which is no default" if other is _NONE else values
            return f"a changed option ({name}: {values})"
    return ""


_NONE = object()


def _begun(state: dict[str, Any]) -> bool:
    """True for what a step leaves; Adagrad has state before the first one, of step 0."""
    step = state.get("step")
    return bool(state) and not (
        step is not None and (getattr(step, "is_meta", False) or not bool(step))
    )


def _takes_names(optimizer: Any) -> bool:
    """True for a callable of ``named_parameters``."""
    try:
        first = next(iter(inspect.signature(optimizer).parameters), "")
    except (TypeError, ValueError):  # no callable, or one written in C
        return False
    return first == "named_parameters"
