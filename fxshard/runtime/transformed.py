"""Calls inside of ``torch.func`` transforms and of forward-mode AD: the model as the user wrote it.

A program is one autograd node over plain tensors: it has no rule for duals, for tensors of a
transform or for batches of them. So these calls run operator by operator on unsharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxshard._torch import transforms, trees
from fxshard.capture.swapped import as_users_own, users_class
from fxshard.config.precision import Precision
from fxshard.errors import StepError
from fxshard.runtime import state
from fxshard.runtime.store.reads import ReadableStore


def concerns(store: ReadableStore, args: Any, kwargs: Any) -> bool:
    """True if an argument or a parameter belongs to a transform, or an argument has a tangent."""
    duals = transforms.forward_mode()
    if not duals and not transforms.transforming():
        return False
    leaves, _ = trees.tree_flatten((args, kwargs))
    leaves += store.model.parameters()  # functional_call has put others in their places
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return any(
        transforms.is_transformed(each) or (duals and transforms.has_tangent(each))
        for each in tensors
    )


def run(store: ReadableStore, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model on unsharded parameters, gathered on all ranks outside of all transforms.

    Gradients of the parameters themselves would be reduced by nobody: they are refused if they
    arrive.

    Raises:
        StepError: the model computes in another dtype than it is stored in.
    """
    name = users_class(store.model).__name__
    if any(unit.precision != Precision() for unit in store.units):
        raise StepError(
            f"{name} is called inside of a torch.func transform or forward-mode AD, where it runs "
            f"operator by operator, without the dtypes of mixed_precision. Transform a model "
            f"without mixed_precision, or compute the derivative inside of forward."
        )
    slots = list(store.slots.values())

    def check() -> None:
        if store.unfilled:
            store.require_filled()
        if any(not store.is_own(slot) for slot in slots):
            raise StepError(
                f"{name} is called with other parameters than its own (torch.func.functional_call)"
                f", which are not sharded. Call the plain model that way."
            )

    with transforms.outside(), torch.no_grad():
        what = "a call inside of a transform of torch.func, or of forward-mode AD"
        store.together(what, check=check)
        unsharded = [store.gathered([slot], slot.param.dtype)[0] for slot in slots]
        for slot, tensor in zip(slots, unsharded, strict=True):
            tensor.requires_grad_(slot.tensor.requires_grad)
    for slot, tensor in zip(slots, unsharded, strict=True):
        if tensor.requires_grad:
            tensor.register_hook(_refusing(name, slot.param.fqn))
    with state.holding(slots, unsharded), as_users_own(store.model):
        return store.model(*args, **kwargs)


def _refusing(name: str, fqn: str) -> Callable[[Tensor], None]:
    def refuse(grad: Tensor) -> None:
        raise StepError(
            f"a gradient of parameter {fqn!r} comes out of a call of {name} inside of a torch.func "
            f"transform or of forward-mode AD, and would be reduced by nobody. Compute the "
            f"derivative inside of forward (torch.autograd.grad(..., create_graph=True)) and "
            f"return it, or take it under torch.no_grad() if no parameter is trained by it."
        )

    return refuse
