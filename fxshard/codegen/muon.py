"""torch.optim.Muon over rows of matrices: torch's operators, on this rank's rows and on the owner.

Momentum, weight decay and the update act element by element, on rows. The Newton-Schulz steps need
all of a matrix: its owner computes them (`fxshard.codegen.full_matrices`). They begin with a cast
to bf16, so that what is sent is bf16 too, and numbers are those of one process bit by bit.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from fxshard._torch import optimizers
from fxshard.codegen import full_matrices
from fxshard.codegen.full_matrices import Exchange, Matrix, Update
from fxshard.errors import StepError
from fxshard.ir.layout import ParamLayout

Held = tuple[Tensor, dict[str, Any]]  # a parameter with a gradient, and its group


@dataclasses.dataclass(frozen=True)
class Stepped:
    """One matrix as a step sees it.

    Attributes:
        fqn, layout: of the parameter.
        param, grad, momentum: this rank's rows.
        group: its options.
    """

    fqn: str
    layout: ParamLayout
    param: Tensor
    grad: Tensor
    momentum: Tensor
    group: dict[str, Any]

    @property
    def matrix(self) -> Matrix:
        """What is sent of it."""
        steps = self.group["ns_steps"]
        flops = newton_schulz_flops(*self.layout.shape, steps=steps)
        # A step makes two Gram matrices and the next matrix, while it holds the one before.
        alive = {"copies": min(steps, 2), "grams": 2 * min(steps, 1)}
        return Matrix(self.fqn, self.layout, torch.bfloat16, flops, **alive)

    def rows(self) -> Tensor:
        """Step the momentum; returns this rank's rows of what is orthogonalised."""
        momentum = self.group["momentum"]
        self.momentum.lerp_(self.grad, 1 - momentum)
        return self.grad.lerp(self.momentum, momentum) if self.group["nesterov"] else self.momentum

    def orthogonalized(self, full: Tensor) -> Tensor:
        """The update of all of it, in bf16."""
        return optimizers.orthogonalized(full, self.group)

    def apply(self, update: Tensor) -> None:
        """Step this rank's rows of the parameter."""
        lr = self.group["lr"]
        lr = lr.item() if isinstance(lr, Tensor) else lr
        shape = torch.Size(self.layout.shape)
        own = optimizers.muon_learning_rate(lr, self.group["adjust_lr_fn"], shape)
        self.param.mul_(1 - lr * self.group["weight_decay"])
        self.param.add_(update, alpha=-own)


def newton_schulz_flops(rows: int, columns: int, *, steps: int) -> int:
    """Of the matrix products: two with the matrix and one of Gram matrices in each step."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def step(every: Sequence[Stepped], exchange: Exchange) -> None:
    """Step these matrices: collective over the ranks that share them.

    Raises:
        StepError: torch's step would spoil the momentum.
    """
    for each in every:
        if each.momentum.dtype is torch.bfloat16 and not each.group["nesterov"]:
            raise StepError(
                f"torch.optim.Muon(nesterov=False) over {each.fqn!r}, whose gradient is bfloat16: "
                f"torch's step normalises the momentum itself there, in place (its cast to "
                f"bfloat16 is no copy), so that it forgets its size. Give nesterov=True, or keep "
                f"parameters in float32 (mixed_precision)."
            )
    update = Update(
        rows=lambda i: every[i].rows(),
        full=lambda i, full: every[i].orthogonalized(full),
        apply=lambda i, rows: every[i].apply(rows),
    )
    full_matrices.step([each.matrix for each in every], update, exchange)


class InPlaceOf:
    """What torch's own ``Muon.step`` runs on in the place of an optimizer.

    It calls its closure, and asks for groups then. By that time the parameters that `is_taken`
    says are stepped by `step`; the groups have the others.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        is_taken: Callable[[Tensor], bool],
        step: Callable[[Optimizer, list[Held]], None],
    ) -> None:
        self._optimizer, self._is_taken, self._step = optimizer, is_taken, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Step what is taken; the groups without it."""
        groups, is_taken = self._optimizer.param_groups, self._is_taken
        every = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        self._step(self._optimizer, [held for held in every if is_taken(held[0])])
        return [{**g, "params": [p for p in g["params"] if not is_taken(p)]} for g in groups]


def run(stand_in: InPlaceOf) -> None:
    """Run torch's step, without hooks, on what stands in for a Muon."""
    with torch.no_grad():
        inspect.unwrap(Muon.step)(stand_in)


def momentum_of(optimizer: Optimizer, param: Tensor, zeros: Callable[[], Any]) -> Any:
    """The momentum of a parameter, as it is kept; `zeros` makes the first."""
    state = optimizer.state[param]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = zeros()
    return state["momentum_buffer"]
