"""Gradients of sharded parameters, where code asks autograd for them, sets them, or hooks them.

A gradient gathers itself where code computes with it, as its parameter does. What a hook returns,
or what is assigned to ``.grad``, is computed of full tensors or lies on the mesh as DTensor left
it; the parameter gets this rank's rows of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from fxshard._torch import autograd, trees
from fxshard._torch.dtensors import sharded_like
from fxshard.runtime.replaced import gather_as

ASKED = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})


def asked(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of `ASKED` with sharded parameters among its arguments.

    Autograd is given the edges of its graph that end in them. Given the parameters it would call
    us again, unless no function of a subclass is called meanwhile, and hooks of the user's need
    those.
    """
    where: dict[str, Any] = {**dict(zip(("outputs", "inputs"), args, strict=False)), **kwargs}
    if func is not torch.autograd.grad:
        where["outputs"] = args[0]
    inputs, rest = where.pop("inputs", None), trees.tree_flatten(where)[0]
    every = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    if any(isinstance(t, DTensor) for t in rest) or not all(map(_has_edge, every)):
        with autograd.plain_torch_functions():
            return func(*args, **kwargs)
    outputs, fill = where.pop("outputs"), where.pop("materialize_grads", False)
    edges = [get_gradient_edge(t) if isinstance(t, DTensor) else t for t in every]
    if func is not torch.autograd.grad:
        return func(outputs, inputs=edges, **where)
    found = func(outputs, edges, **where)
    return tuple(
        torch.zeros_like(given) if fill and grad is None else as_of(grad, given)
        for grad, given in zip(found, every, strict=True)
    )


def _has_edge(given: Any) -> bool:
    return not isinstance(given, DTensor) or given.requires_grad


def hooked(param: DTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """``param.register_hook(hook)``."""

    @functools.wraps(hook)
    def on_shard(grad: Tensor) -> Tensor | None:
        found = hook(grad)
        return None if found is None else as_of(found, grad)

    with autograd.plain_torch_functions():
        return param.register_hook(on_shard)


def as_of(grad: Any, like: Any) -> Any:
    """A gradient with the placements of `like`, its parameter; collective where DTensor has left
    others. Of another shape it is what it was: torch refuses it.
    """
    with torch.no_grad(), autograd.plain_torch_functions():
        if not isinstance(grad, Tensor) or not isinstance(like, DTensor):
            return grad
        if grad.shape != like.shape:
            return grad
        if not isinstance(grad, DTensor):
            grad = sharded_like(grad, like)
        elif grad.device_mesh == like.device_mesh and grad.placements != like.placements:
            grad = grad.redistribute(placements=like.placements)
        return gather_as(grad, like)
