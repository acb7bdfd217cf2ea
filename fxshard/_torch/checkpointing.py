"""Activation checkpoints: their regions in a graph, and the operator that Dynamo makes of them."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as _checkpoint
from torch import fx
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils import _pytree

from fxshard._torch.graphs import with_current_meta

__all__ = ["checkpoint_wrapper"]

_CHECKPOINT = "fxshard_checkpoint"  # key in the "custom" metadata of nodes


@contextlib.contextmanager
def checkpoints_inline() -> Iterator[None]:
    """Let torch.utils.checkpoint call the function it is given, inside a marked region.

    The nodes of the region are marked (`checkpoint_of`, `is_saved_by_policy`), and so are their
    backward nodes. The names that ``checkpoint`` looks up when it is called are patched, as models
    hold the function itself (transformers keeps a partial of it).
    (torch/utils/checkpoint.py, ``checkpoint``)
    """
    numbers = itertools.count()

    def without_reentrant(
        function: Any,
        preserve_rng_state: bool = True,
        context_fn: Any = _checkpoint.noop_context_fn,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        forward, _ = context_fn()
        if not isinstance(forward, (contextlib.nullcontext, _checkpoint._CachingTorchDispatchMode)):
            raise TypeError(
                f"torch.utils.checkpoint with a context_fn that gives a {type(forward).__name__}: "
                f"fxshard knows create_selective_checkpoint_contexts only"
            )
        with _checkpoint_region(numbers), forward:
            yield

    def from_2_14(
        function: Any,
        args: Any,
        kwargs: Any,
        *,
        context_fn: Any = _checkpoint.noop_context_fn,
        **_: Any,
    ) -> Iterator[None]:
        return without_reentrant(function, True, context_fn)

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            """In eager nothing inside has a gradient unless a tensor among `args` needs one."""
            _checkpoint.check_backward_validity(args)
            wanted = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            if wanted or not torch.is_grad_enabled():
                with _checkpoint_region(numbers):
                    return function(*args)
            with torch.no_grad():
                outputs = function(*args)
            return _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    values = {
        "_checkpoint_without_reentrant_generator": without_reentrant,
        "_checkpoint_without_reentrant_generator_impl": from_2_14,
        "CheckpointFunction": Reentrant,
    }
    composable = sys.modules.get("torch.distributed._composable.checkpoint_activation")
    modules = [_checkpoint, *[composable] * (composable is not None)]  # that one by hooks
    patches = [(m, name, v) for m in modules for name, v in values.items() if hasattr(m, name)]
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for module, name, value in patches:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextlib.contextmanager
def _checkpoint_region(numbers: Iterator[int]) -> Iterator[None]:
    """Mark new nodes with the next number, unless they are marked already."""
    custom = torch.fx.traceback.current_meta.get("custom") or {}
    restore = with_current_meta("custom", {_CHECKPOINT: next(numbers), **custom})
    try:
        yield
    finally:
        restore()


def checkpoint_of(node: fx.Node) -> int | None:
    """Number of the outermost checkpoint that `node` of a trace ran in, or its forward.

    (``copy_fwd_metadata_to_bw_nodes`` in torch/_functorch/_aot_autograd/utils.py)
    """
    return checkpoint_number(node.meta)


def checkpoint_number(metadata: dict[str, Any]) -> int | None:
    """The same of a node's metadata, or of `current_meta`."""
    number: int | None = (metadata.get("custom") or {}).get(_CHECKPOINT)
    return number


def in_checkpoint(metadata: dict[str, Any], number: int) -> None:
    """Note checkpoint `number` in a node's metadata, in place of the one that it was in."""
    metadata["custom"] = {**metadata["custom"], _CHECKPOINT: number}


def is_saved_by_policy(node: fx.Node) -> bool:
    """True if the policy of a selective checkpoint wants the value of `node` saved.

    A policy that offloads counts as one that saves.
    (``_CachingTorchDispatchMode`` in torch/utils/checkpoint.py writes it)
    """
    policy = _checkpoint.CheckpointPolicy
    recomputed = (None, policy.MUST_RECOMPUTE, policy.PREFER_RECOMPUTE)
    return node.meta.get("recompute") not in recomputed


def checkpoint_operator() -> Any:
    """What Dynamo makes of a call of ``torch.utils.checkpoint.checkpoint``.

    Its first argument is the graph of the function; a policy of what to save is in that graph's
    ``meta`` (torch/_dynamo/variables/higher_order_ops.py, ``CheckpointHigherOrderVariable``).
    """
    return torch.ops.higher_order.tag_activation_checkpoint


def checkpoint_context(graph_module: fx.GraphModule) -> Callable[[], Any]:
    """The ``context_fn`` of the checkpoint that Dynamo made `graph_module` of."""
    return graph_module.meta.get("_checkpoint_context_fn", _checkpoint.noop_context_fn)
