"""A Shampoo-like optimizer as a user writes it: docs/muon.md shows it."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

import fxshard


class Preconditioned(Optimizer):
    """Gradients between the inverse fourth roots of their second moments (Shampoo).

    The moments are kept on the rank that owns the parameter.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            updates = fxshard.full_matrix_updates(params, grads, self.update)
            for param, update in zip(params, updates, strict=True):
                param.add_(update, alpha=-group["lr"])

    def update(self, param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        if not state:
            for side, length in zip(("left", "right"), grad.shape, strict=True):
                state[side] = torch.eye(length, device=grad.device)
        state["left"].addmm_(grad, grad.T)
        state["right"].addmm_(grad.T, grad)
        return inverse_root(state["left"]) @ grad @ inverse_root(state["right"])


def inverse_root(moment: Tensor) -> Tensor:
    """``moment ** (-1/4)``, by its series around the identity."""
    norm = moment.norm() + 1
    rest = moment / norm - torch.eye(len(moment), device=moment.device)
    return (torch.eye(len(moment), device=moment.device) - 0.25 * rest) * norm ** (-0.25)
