"""Contracts of what `fxshard._torch.transforms` uses of torch."""

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from fxshard._torch import transforms
from fxshard._torch.transforms import in_memory, without_transforms


def test_the_tensor_below_all_transforms() -> None:
    x = torch.ones(3, 2)
    assert without_transforms(x) is x
    seen: list[Tensor] = []

    def function(row: Tensor) -> Tensor:
        seen.append(without_transforms(row))
        return row.sin().sum()

    torch.vmap(torch.func.grad(function))(x)
    assert seen[0].shape == (3, 2) and seen[0].data_ptr() == x.data_ptr()


def test_the_tensors_inside_of_a_subclass() -> None:
    a, b, c = (torch.ones(n) for n in (2, 2, 2))
    within = TwoTensor(TwoTensor(a, b), c)
    assert [id(each) for each in in_memory(within)] == [id(a), id(b), id(c)]
    assert [id(each) for each in in_memory(a)] == [id(a)]


def test_transforms_and_duals_are_seen_and_left() -> None:
    seen: list[Any] = []

    def function(x: Tensor) -> Tensor:
        seen.append((transforms.transforming(), transforms.is_transformed(x)))
        with transforms.outside():
            seen.append(transforms.transforming())
        return x.sum()

    x = torch.ones(2)
    torch.func.grad(function)(x)
    assert seen == [(True, True), False] and not transforms.transforming()
    assert not transforms.forward_mode()
    with forward_ad.dual_level():
        assert transforms.forward_mode() and not transforms.has_tangent(x)
        assert transforms.has_tangent(forward_ad.make_dual(x, x))


def test_batches_of_gradients_are_seen() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(transforms.is_transformed(grad)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert seen == [True]
