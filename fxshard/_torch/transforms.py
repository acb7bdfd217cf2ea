"""Tensors around tensors: transforms of torch.func, and subclasses such as DTensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch._C import _functorch
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from fxshard._torch.modes import is_wrapper
from fxshard._torch.trees import TreeSpec, tree_flatten


def without_transforms(tensor: Tensor) -> Tensor:
    """The tensor that lies in memory, below all transforms that run; most are that already."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def in_memory(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors whose storages a tensor has: itself, or those below transforms and subclasses."""
    tensor = without_transforms(tensor)
    if not is_wrapper(type(tensor)):
        yield tensor
        return
    # Not by ``__tensor_flatten__``: torchao's reads a value there.
    inside = (tensor._local_tensor,) if isinstance(tensor, DTensor) else vars(tensor).values()
    for inner in inside:
        if isinstance(inner, Tensor):
            yield from in_memory(inner)


def is_transformed(tensor: Tensor) -> bool:
    """True for a tensor of a transform, such as a batch of ``vmap``.

    ``torch.autograd.grad(is_grads_batched=True)`` passes batches of an older kind.
    """
    return bool(
        _functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)
    )


def transforming() -> bool:
    """True inside of a transform of ``torch.func`` (grad, jvp, vmap, ...), in this thread."""
    return _functorch.peek_interpreter_stack() is not None


def forward_mode() -> bool:
    """True inside of ``torch.autograd.forward_ad.dual_level()``."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: Tensor) -> bool:
    """True for a dual of forward-mode AD."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def outside() -> contextlib.AbstractContextManager[Any]:
    """The block runs outside of all transforms of ``torch.func``, if any runs.

    (torch/_functorch/pyfunctorch.py)
    """
    guard: contextlib.AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return guard if transforming() else contextlib.nullcontext()


# Classes whose tensors transforms do not take apart, and what to call where one would.
_constants: dict[type[Tensor], Callable[[Tensor, str], None]] = {}


def keep_out(cls: type[Tensor], refuse: Callable[[Tensor, str], None]) -> None:
    """From now on arguments of a class are constants for transforms, as what `func` closes over.

    A transform wraps its arguments in tensors of torch's own, so that no ``__torch_function__`` of
    the class is called with them any more. ``jvp`` makes duals of them before that, by
    ``_make_dual``, with which it is called.

    (torch/_functorch/eager_transforms.py and vmap.py: what ``grad``, ``vjp``, ``jvp``, ``jacrev``,
    ``jacfwd``, ``hessian``, ``functionalize`` and ``vmap`` call by these names)

    Args:
        cls: a subclass of Tensor.
        refuse: called with a tensor and a verb, where a transform would differentiate it, batch it,
            or follow what is written into it; it raises.
    """
    if not _constants:
        _patch()
    _constants[cls] = refuse


def _patch() -> None:
    wrap = eager_transforms._wrap_tensor_for_grad
    differentiate = eager_transforms._create_differentiable
    follow = eager_transforms._maybe_wrap_functional_tensor
    batch = vmap._create_batched_inputs

    def wrapped(maybe_tensor: Any, level: int) -> Any:
        return maybe_tensor if type(maybe_tensor) in _constants else wrap(maybe_tensor, level)

    def differentiable(inps: Any, level: int | None = None) -> Any:
        _check([inps], "differentiates")  # called with one tensor, or with a tree of them
        return differentiate(inps, level)

    def functional(maybe_tensor: Any, level: int, **options: Any) -> Any:
        _check([maybe_tensor], "follows")
        return follow(maybe_tensor, level, **options)

    def batched(
        flat_in_dims: list[int | None],
        flat_args: list[Any],
        vmap_level: int,
        args_spec: TreeSpec,
    ) -> tuple[Any, ...]:
        both = zip(flat_in_dims, flat_args, strict=True)
        _check([arg for dim, arg in both if dim is not None], "batches")
        return batch(flat_in_dims, flat_args, vmap_level, args_spec)

    eager_transforms._wrap_tensor_for_grad = wrapped
    eager_transforms._create_differentiable = differentiable
    eager_transforms._maybe_wrap_functional_tensor = functional
    vmap._create_batched_inputs = batched


def _check(tree: Any, verb: str) -> None:
    for leaf in tree_flatten(tree)[0]:
        if type(leaf) in _constants:
            _constants[type(leaf)](leaf, verb)
