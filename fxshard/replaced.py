"""Parameters that are in no model any more: an optimizer that holds one steps nothing.

`fxshard.compile` puts sharded parameters in the place of a model's. An optimizer made before that
would find no gradients, and say nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxshard.errors import StepError

_MARK = "_fxshard_replaced"
_count = 0
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def mark(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse from now on every step of an optimizer over one of them; by name."""
    global _count
    if parameters and not _count:
        register_optimizer_step_pre_hook(_refuse)
    for fqn, parameter in parameters.items():
        setattr(parameter, _MARK, fqn)
        _count += 1


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise StepError if the optimizer holds a marked parameter; looked for once."""
    if _checked.get(optimizer) == _count:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (fqn := getattr(parameter, _MARK, None)) is not None:
                raise StepError(
                    f"this {type(optimizer).__name__} holds parameter {fqn!r} as it was before it "
                    f"was sharded or replaced: stepping it trains nothing. Make optimizers after "
                    f"fxshard.compile (or fxshard.shard), of model.parameters()."
                )
    _checked[optimizer] = _count
