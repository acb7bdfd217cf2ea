"""Clipping: every step is scaled by the norm of all gradients that are stepped."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Fact, Program
from fxshard.verify import walk
from fxshard.verify.failure import fail

aten: Any = torch.ops.aten
FACT = Fact.CLIPPED


def clipped(program: Program) -> None:
    """Each step takes one scale, of a norm that each stepped gradient is in once, over its ranks.

    The scale is computed of the norm, so that no step can come before the last gradient is reduced.
    """
    steps = program.graph.find_nodes(op="call_function", target=ops.step)
    scales = [node.args[3] if len(node.args) > 3 else None for node in steps]
    if program.max_norm is None:
        for node, scale in zip(steps, scales, strict=True):
            if scale is not None:
                fail(program, FACT, node, f"%{node.name} scales, though nothing is to be clipped.")
        return
    for node, scale in zip(steps, scales, strict=True):
        if scale is None or scale is not scales[0]:
            what = f"%{node.name} is not scaled by the norm that the other steps are scaled by."
            fail(program, FACT, node, what)
    if not steps:
        return
    scale = cast("fx.Node", scales[0])
    norm = _is_the_scale(program, scale)
    returned = [v for v, r in zip(program.values, program.results, strict=True) if r.kind == "norm"]
    if returned != [norm]:
        fail(program, FACT, norm, f"%{norm.name} scales the steps, and is not returned.")
    _is_of_all(program, norm)


def _is_the_scale(program: Program, scale: fx.Node) -> fx.Node:
    """``min(max_norm / (norm + 1e-6), 1)``; returns the norm."""
    node = scale
    for targets, args in (
        ((aten.clamp.default, aten.clamp_.default), (None, 1.0)),
        ((aten.mul.Tensor, aten.mul_.Tensor), (program.max_norm,)),
        ((aten.reciprocal.default, aten.reciprocal_.default), ()),
        ((aten.add.Tensor, aten.add_.Tensor), (1e-6,)),
    ):
        if node.target not in targets or tuple(node.args[1:]) != args or node.kwargs:
            what = f"%{scale.name} is not max_norm={program.max_norm} over a norm: %{node.name}."
            fail(program, FACT, node, what)
        node = tags.source(node)
    return node


def _is_of_all(program: Program, norm: fx.Node) -> None:
    """`norm` is that of the norms of all gradients, each summed up over its ranks."""
    node = norm
    if node.target is aten._to_copy.default:
        node = tags.source(node)
    if node.target is not aten.linalg_vector_norm.default or node.args[1:] != (2.0,):
        fail(program, FACT, node, f"%{node.name} is no 2-norm of norms.")
    node = tags.source(node)
    grid = program.grids[""]
    if grid.shards > 1:
        roots = aten.pow.Tensor_Scalar, aten.pow_.Scalar
        if node.target not in roots or node.args[1] != 0.5:
            fail(program, FACT, node, f"%{node.name} is no root of the sums of the ranks.")
        item = tags.source(node)
        launch = walk.maker(item)
        given = launch.args[1:] if launch.target is ops.reduce_norms else ()
        if given != (grid.shards, grid.group("shard"), "sum"):
            what = f"%{item.name} is not summed up over the ranks that share parameters."
            fail(program, FACT, item, what)
        node = tags.operands(launch)[walk.item_index(item)]
    if node.target is not aten.cat.default:
        fail(program, FACT, node, f"%{node.name} is not made of the norms of gradients.")
    found: list[str] = []
    stepped = transfers.stepped(program)
    for part in cast("list[fx.Node]", node.args[0]):
        found += _counted(program, part, stepped, squared=grid.shards > 1)
    want = sorted(stepped, key=lambda fqn: program.params[fqn].position)
    if found != want:
        odd = next((f for f in [*want, *found] if found.count(f) != 1 or f not in stepped), want[0])
        what = f"the gradient of {odd!r} is {found.count(odd)} times in the norm, or not in order."
        fail(program, FACT, node, what)


def _counted(
    program: Program, part: fx.Node, stepped: dict[str, fx.Node], *, squared: bool
) -> list[str]:
    """FQNs of the gradients whose norms are in `part`."""
    cut = slice(None)
    if part.target is aten.slice.Tensor:
        cut, part = slice(*cast("tuple[int, int]", part.args[2:4])), tags.source(part)
    row = walk.maker(part)
    if row.target is not ops.grad_norms or row.args[2] is not squared:
        fail(program, FACT, part, f"%{part.name} is no norm of gradients.")
    fqns = cast("list[str]", row.args[1])
    for fqn, grad in zip(fqns, tags.operands(row), strict=True):
        if stepped.get(fqn) is not grad:
            what = f"%{row.name} counts %{grad.name} as the gradient of {fqn!r}, which it is not."
            fail(program, FACT, row, what)
    return fqns[cut]
