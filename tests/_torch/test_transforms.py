"""Contracts of what `fxshard._torch.transforms` uses of torch."""

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from fxshard._torch.transforms import (
    in_memory,
    is_transformed,
    running,
    set_aside,
    without_transforms,
)


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


def test_transforms_are_set_aside() -> None:
    seen, plain = [], torch.ones(2)

    def function(x: Tensor) -> Tensor:
        assert is_transformed(torch.ones(2))  # what is made inside is a wrapper, too
        assert running() and is_transformed(x) and not is_transformed(plain)
        with set_aside():
            assert not running()
            seen.append(plain.requires_grad_().sin())
        assert running()
        return x * seen[-1].detach()

    torch.func.jvp(function, (torch.ones(2),), (torch.ones(2),))
    assert not running() and not is_transformed(seen[0])
