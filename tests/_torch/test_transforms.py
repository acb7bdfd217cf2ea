"""Contracts of what `fxshard._torch.transforms` uses of torch."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
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


class Kept(Tensor):
    """Transforms take it for a constant."""


def refusing(tensor: Tensor, verb: str) -> NoReturn:
    raise LookupError(verb)


def product(kept: Tensor, x: Tensor) -> Tensor:
    assert type(kept) is Kept
    return (kept.as_subclass(Tensor) * x).sum()


def test_arguments_that_are_kept_out_are_constants() -> None:
    transforms.keep_out(Kept, refusing)
    kept, x = torch.full((2,), 3.0).as_subclass(Kept), torch.ones(2)
    for derivative in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(derivative(product, 1)(kept, x), torch.full((2,), 3.0))
    assert not torch.func.hessian(product, 1)(kept, x).any()
    assert torch.func.grad(lambda x, kept: product(kept, x))(x, kept=kept)[0] == 3
    assert torch.vmap(product, (None, 0))(kept, x).shape == (2,)
    compiled = torch.compile(
        torch.func.grad(lambda x: x.sin().sum()), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x), x.cos())
    calls: dict[str, list[Callable[[], Any]]] = {
        "differentiates": [
            lambda: torch.func.grad(product)(kept, x),
            lambda: torch.func.grad(product, (0, 1))(kept, x),
            lambda: torch.func.vjp(product, kept, x),
            lambda: torch.func.jacrev(product)(kept, x),
            lambda: torch.vmap(torch.func.grad(product), (None, 0))(kept, x),
        ],
        "batches": [lambda: torch.vmap(product)(kept, x)],
        "follows": [lambda: torch.func.functionalize(product)(kept, x)],
    }
    for verb, refused in calls.items():
        for call in refused:
            with pytest.raises(LookupError, match=verb):
                call()
    assert not transforms.transforming()


def test_jvp_makes_duals_of_its_arguments_themselves() -> None:
    seen = []

    class Noting(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append((func.__name__, transforms.transforming()))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2).as_subclass(Noting)
    torch.func.jvp(torch.sin, (x,), (torch.ones(2),))
    assert ("_make_dual", True) in seen
