"""A rehearsal: steps of a sharded module under the tracker, and what is expected of each."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from fxshard import compat
from fxshard.memory.category import Category
from fxshard.memory.optimizer import make_optimizer
from fxshard.memory.tracker import Measured, Tracker
from fxshard.module import ShardedModule


def tracked_steps(
    model: ShardedModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Tracker,
    steps: int,
    micro_batches: int = 1,
    no_sync: bool = False,
) -> None:
    """Train `model` for some steps on one batch, marking phases for the tracker.

    The gradients that arrive at the outputs are ones.
    """
    optimizer = None
    if model.config.optimizer is not None:
        optimizer = make_optimizer(model.config.optimizer, list(model.parameters()))
    leaves, _ = compat.tree_flatten((args, kwargs))
    program = model.variant(args, kwargs).program
    shards = (s for slot in model.slots.values() for s in slot.shards)
    tracker.know(shards, Category.SHARDED_PARAM, host=program.offloaded)
    tracker.know(model.whole_parameters(), Category.SHARDED_PARAM)
    tracker.know([*model.buffers(), *program.constants.values()], Category.BUFFER)
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tracker.know(inputs, Category.INPUTS)
    del shards
    trained = [param for param in model.parameters() if param.requires_grad]
    hooks = [param.register_hook(tracker.gradient) for param in trained]
    with tracker:
        for _ in range(steps):
            for i in range(micro_batches):
                waits = no_sync and i < micro_batches - 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    outputs, _ = compat.tree_flatten(model(*args, **kwargs))
                    tracker.begin("loss")
                    roots = [outputs[i] for i in program.signature.tangents]
                    tangents = [torch.ones_like(root) for root in roots]
                    torch.autograd.backward(roots, tangents)
                    del outputs, roots, tangents
                tracker.at()
                tracker.gradients(model.parameters())
                sums = (t for each in model.accumulated.values() for t in each)
                tracker.mark(sums, Category.UNSHARDED_GRAD)
                del sums
            tracker.begin("optimizer")
            if optimizer is not None:
                optimizer.step()
                tracker.optimizer_state(optimizer)
            tracker.at()
            tracker.begin("zero_grad")
            for tensor in (*model.parameters(), *inputs):
                tensor.grad = None
            tracker.at()
    for hook in hooks:
        hook.remove()


def split_steps(
    phases: list[Measured], steps: int, micro_batches: int = 1
) -> list[list[list[Measured]]]:
    """The tracker's phases, step by step and micro-batch by micro-batch."""
    found: list[list[list[Measured]]] = []
    for phase in phases:
        if phase.phase == "forward":
            if not found or len(found[-1]) == micro_batches:
                found.append([])
            found[-1].append([])
        found[-1][-1].append(phase)
    assert len(found) == steps, f"{len(found)} steps were seen, not {steps}"
    return found
