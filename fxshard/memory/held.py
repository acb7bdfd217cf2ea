"""What the caller holds throughout a step: shards, buffers, batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import nn

from fxshard._torch.trees import tree_flatten
from fxshard.ir.program import Program, nbytes
from fxshard.ir.units import buffer_dtypes
from fxshard.memory import symbolic
from fxshard.memory.category import Category
from fxshard.memory.ledger import LOSS, LiveRange, owner_of
from fxshard.memory.loss import LossStep


def held_ranges(
    model: nn.Module,
    inputs: Any,
    program: Program,
    loss: LossStep | None = None,
    *,
    formulas: bool = False,
) -> list[LiveRange]:
    """What the caller holds throughout the step: shards, buffers, batch.

    Shards count as they are stored: padded, trainable or not. Ignored parameters count as *Sharded
    Param* too: what the rank holds between steps. With `formulas`, the ranges have theirs.
    """
    found: list[LiveRange] = []

    def hold(
        name: str,
        module: str,
        category: Category,
        size: int,
        host: bool = False,
        formula: sympy.Expr | None = None,
    ) -> None:
        made = LiveRange(len(found), name, "", module, category, size, host)
        made.formula = formula if formulas else None
        found.append(made)

    flats: dict[Any, int] = {}  # the shards of a unit lie in one storage per dtype
    for fqn, param in program.params.items():
        layout = program.layouts[fqn]
        size = layout.shard_bytes
        formula = layout.shard_numel_over(symbolic.WORLD) * param.dtype.itemsize
        hold(fqn, owner_of(fqn), Category.SHARDED_PARAM, size, program.offloaded, formula)
        number = found[-1].storage
        found[-1].storage = flats.setdefault(layout.storage, number)
    for fqn, param in program.ignored.items():
        hold(fqn, owner_of(fqn), Category.SHARDED_PARAM, nbytes(param.shape, param.dtype))
    dtypes = buffer_dtypes(program.units, dict(model.named_buffers()))
    seen: set[int] = set()
    leaves, _ = tree_flatten(inputs)
    groups: list[tuple[Category, Iterable[tuple[str, Any]]]] = [
        (Category.BUFFER, [*model.named_buffers(), *program.constants.items()]),
        (Category.INPUTS, zip(program.signature.input_names, leaves, strict=True)),
    ]
    keep = []
    for category, named in groups:
        for leaf, (name, value) in enumerate(named):
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            keep.append(storage)
            cast = category is Category.BUFFER and name in dtypes  # to memory of its own
            if id(value if cast else storage) not in seen:
                seen.add(id(value if cast else storage))
                size = storage.nbytes()
                if cast:
                    size = nbytes(tuple(value.shape), dtypes[name])
                formula, owner = None, owner_of(name)
                if category is Category.INPUTS:
                    formula, owner = symbolic.input_bytes(program, leaf, value), ""
                hold(name, owner, category, size, formula=formula)
    for storage in loss.held if loss else ():
        if id(storage) not in seen:
            seen.add(id(storage))
            hold("held by the loss", LOSS, Category.INPUTS, storage.nbytes())
    return found
