"""Contracts of `fxshard._torch.gradient_sums`: what autograd does where no mode watches it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fxshard._torch.gradient_sums import IN_PLACE, GradientSums
from fxshard._torch.modes import TorchDispatchMode

KEPT: list[Tensor] = []


class Keep(torch.autograd.Function):
    """Its backward keeps the gradient that it gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        KEPT.append(grad * 3)
        return KEPT[-1]


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "residual": lambda h: h * 2 + (h @ torch.ones(4, 4)).tanh(),
    "three": lambda h: h.sin() + h.cos() + h.exp(),
    "twice": lambda h: h * h,
    "twice and once": lambda h: h * h + h.sin(),
    "held": lambda h: h.sin() + Keep.apply(h),
    "not contiguous": lambda h: h.t().sin().t() + h.t().cos().t(),
    "expanded": lambda h: h.sum() + h.sum(0).sum(),
    "slices": lambda h: h[:2].sin().sum() + h[1:].cos().sum() + h.sin().sum(),
    "views": lambda h: h.view(12).sin().sum() + h.t().cos().sum(),
    "formula": lambda h: torch.logcumsumexp(h, 0) + h.std() + h.norm(),
    "product": lambda h: torch.cumprod(h, 0) + h.sin(),
    "indexed": lambda h: h[torch.tensor([0, 2, 2])] + h[[1]],
    "gathered": lambda h: h.gather(0, torch.tensor([[0, 1, 2, 2]])) + h.sin(),
    "largest": lambda h: h.max(1)[0] + h.topk(2)[0].sum() + h.sort(0)[0].sum(),
    "normalised": lambda h: h / h.sum(-1, keepdim=True),
    "normalised, chosen": lambda h: (lambda t: t / t.sum(-1, keepdim=True))(h.topk(2)[0]),
    "several outputs": lambda h: torch.cat([part.sin() for part in h.split(1)]) + h,
}

# Whose gradient autograd computes by other operators where there is a mode.
OTHER_FORMULA = ("product",) if torch.__version__.startswith("2.11.") else ()


class Watch(TorchDispatchMode):
    """Does what the engine does without it."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.seen = GradientSums(), list[bool]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in IN_PLACE:
            func = self.sums.without_mode(func, args)
            self.seen.append(func not in IN_PLACE)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.sums.made(result)
        return result


@pytest.mark.parametrize("name", CASES)
def test_the_engine_adds_in_place_where_nobody_else_holds_the_gradient(name: str) -> None:
    x = torch.rand(3, 4, requires_grad=True)
    loss = CASES[name](x * 1).sum()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        loss.backward()
    grad, x.grad = x.grad, None
    events = sorted(found.events(), key=lambda event: event.time_range.start)
    outer = [event for event in events if event.name in NAMES and _is_outermost(event)]
    real = [event.name in WRITING for event in outer]
    loss = CASES[name](x * 1).sum()
    with Watch() as watch:
        loss.backward()
    assert real and watch.seen == real
    assert torch.equal(x.grad, grad) == (name not in OTHER_FORMULA)
    torch.testing.assert_close(x.grad, grad)


def _is_outermost(event: Any) -> bool:
    parent = event.cpu_parent
    return parent is None or parent.name not in NAMES


WRITING = ("aten::add_", "aten::_index_put_impl_", "aten::scatter_", "aten::scatter_add_")
NAMES = ("aten::add", "aten::index_put", "aten::scatter", "aten::scatter_add", *WRITING)
