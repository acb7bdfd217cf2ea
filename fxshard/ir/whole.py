"""What a whole step has besides a call of the model: its loss, and the norm it clips to."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxshard.errors import CaptureError

ASKED = "fxshard.compile_step"
SEVERAL_MESHES = (
    "max_norm beside parameters on several meshes (tensor parallelism, experts, units with a mesh "
    "of their own): their norms are summed over different ranks, and the program sums over one "
    "group. Leave max_norm out of fxshard.compile_step, or train by a loop, with "
    "model.clip_grad_norm_."
)


@dataclasses.dataclass(frozen=True)
class Whole:
    """What `fxshard.compile_step` adds to the call ``model(*args, **kwargs)``.

    Attributes:
        loss: called with what the model returns and the last positional argument of the step, the
            target; in a step without positional arguments, with what the model returns alone. None:
            the model returns the loss, and gets all arguments.
        max_norm: gradients are scaled so that the norm of all of them is at most this; None: they
            are not.
    """

    loss: Callable[..., torch.Tensor] | None
    max_norm: float | None

    def split(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The positional arguments of the model, and of the loss after the model's output."""
        if self.loss is None:
            return tuple(args), ()
        if not args and not _takes_one(self.loss):
            raise CaptureError(
                "a step with a loss was called without a target: its last positional argument goes "
                "to the loss, step(batch, target). Give loss=None if the model returns the loss, "
                "or a loss of the output alone, such as lambda output: output.loss."
            )
        return tuple(args[:-1]), tuple(args[-1:])

    def require_scalar(self, value: Any) -> None:
        """Raise CaptureError if `value` is nothing that ``backward()`` can be called on."""
        what = "the loss" if self.loss is not None else "the model"
        if not isinstance(value, torch.Tensor):
            is_what = f"is a {type(value).__name__}"
        elif value.dim():
            is_what = f"is a tensor of shape {list(value.shape)}"
        elif not value.requires_grad:
            is_what = "is a tensor that needs no gradient"
        else:
            return
        raise CaptureError(
            f"{ASKED}: what {what} returns {is_what}, and a step calls backward() of it. Return a "
            f"scalar tensor that is computed of the parameters, such as loss.mean(); of several "
            f"values, the loss alone."
        )


def _takes_one(function: Callable[..., Any]) -> bool:
    """False if `function` cannot be called with one positional argument; True if nobody knows."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin
        pass
    return True
