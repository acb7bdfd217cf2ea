"""Contracts of what `fxshard._torch.transforms` uses of torch."""

import torch
from torch import Tensor

from fxshard._torch.transforms import without_transforms


def test_the_tensor_below_all_transforms() -> None:
    x = torch.ones(3, 2)
    assert without_transforms(x) is x
    seen: list[Tensor] = []

    def function(row: Tensor) -> Tensor:
        seen.append(without_transforms(row))
        return row.sin().sum()

    torch.vmap(torch.func.grad(function))(x)
    assert seen[0].shape == (3, 2) and seen[0].data_ptr() == x.data_ptr()
