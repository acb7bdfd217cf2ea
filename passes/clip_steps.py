"""clip-steps: a whole step is clipped by the norm of all gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import fx

from fxshard.errors import ConfigError
from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Fact, Program, Result
from fxshard.ir.whole import SEVERAL_MESHES

aten: Any = torch.ops.aten

EPSILON = 1e-6  # torch/nn/utils/clip_grad.py, `clip_grads_with_norm_`
P = 2.0


@dataclasses.dataclass(frozen=True)
class ClipSteps:
    """Norms of gradients where they are reduced, one all-reduce after the last, then all steps.

    It computes what ``FxshardModule.clip_grad_norm_`` does, operator for operator: this rank's norm
    of each gradient, squared; their sums over the ranks, in the order of the parameters; the norm
    of their roots. Gradients are scaled in place as they are stepped. The all-reduce is a launch on
    a stream of its own. Where no rank shares a parameter with another, there is none.

    Before::

        %wait_5 = fxshard.wait([%dw_1])
        %step_0 = fxshard.step([%dw_1], [%shard_w_1], ["w.1"])
        ...
        %wait_6 = fxshard.wait([%dw_0])
        %step_1 = fxshard.step([%dw_0], [%shard_w_0], ["w.0"])

    After::

        %wait_5 = fxshard.wait([%dw_1])
        %norms_0 = fxshard.grad_norms([%dw_1], ["w.1"], True, torch.float32)
        ...
        %wait_6 = fxshard.wait([%dw_0])
        %norms_1 = fxshard.grad_norms([%dw_0], ["w.0"], True, torch.float32)
        %cat = aten.cat([%norms_1, %norms_0])
        %reduce_norms_7 = fxshard.reduce_norms([%cat], 2)
        %wait_7 = fxshard.wait([%getitem_7])
        %norm = aten.linalg_vector_norm(%roots)
        %scale = aten.clamp(max_norm / (%norm + 1e-06), None, 1.0)
        %step_0 = fxshard.step([%dw_1], [%shard_w_1], ["w.1"], %scale)
        %step_1 = fxshard.step([%dw_0], [%shard_w_0], ["w.0"], %scale)
        return %loss, %norm
    """

    name: ClassVar[str] = "clip-steps"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STEPPED_ONCE})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.CLIPPED})

    def apply(self, program: Program) -> None:
        steps = [node for node in program.graph.nodes if node.target is ops.step]
        if program.max_norm is None or not steps:
            return
        grid = _one_grid(program)
        grads = transfers.stepped(program)
        dtype = torch.float32
        for grad in grads.values():
            dtype = torch.promote_types(dtype, grad.meta["val"].dtype)
        places: dict[str, tuple[fx.Node, int]] = {}
        for number, step in enumerate(steps):
            fqns = cast("list[str]", step.args[2])
            with program.graph.inserting_before(step):
                given = (tags.operands(step), fqns, grid.shards > 1, dtype)
                tag = tags.changed(tags.get(step), role="norm")
                (item,) = transfers.insert_operator(
                    program, ops.grad_norms, given, [""], tag, f"norms_{number}"
                )
                tags.update(item, fqn=None)
            places |= {fqn: (item, i) for i, fqn in enumerate(fqns)}
        after = [steps[-1]]
        write = _ClipWriter(program, after)
        every = write.joined(_runs([places[fqn] for fqn in _in_order(program, places)]))
        if grid.shards > 1:
            every = write.reduced(every, grid.shards, grid.group("shard"))
            every = write.compute("roots", aten.pow.Tensor_Scalar, (every, 1 / P))
        norm = write.compute("grad_norm", aten.linalg_vector_norm.default, (every, P))
        kept = grads[next(iter(grads))].meta["val"].dtype
        for grad in grads.values():
            kept = torch.promote_types(kept, grad.meta["val"].dtype)
        if kept is not dtype:
            norm = write.compute("grad_norm_in", aten._to_copy.default, (norm,), dtype=kept)
        above = write.compute("above", aten.add.Tensor, (norm, EPSILON))
        parts = write.compute("parts", aten.reciprocal.default, (above,))
        ratio = write.compute("ratio", aten.mul.Tensor, (parts, program.max_norm))
        scale = write.compute("scale", aten.clamp.default, (ratio, None, 1.0))
        for step in steps:
            after[0].append(step)
            after[0] = step
            step.args = (*step.args, scale)
        program.results.append(Result("norm", ""))
        program.values = [*program.values, norm]


def _one_grid(program: Program) -> Any:
    if program.meshes or any(param.placed is not None for param in program.params.values()):
        raise ConfigError(SEVERAL_MESHES)
    return program.grids[""]


def _in_order(program: Program, fqns: dict[str, Any]) -> list[str]:
    """As ``model.parameters()`` has them: sums of floats depend on it."""
    return sorted(fqns, key=lambda fqn: program.params[fqn].position)


Run = tuple[fx.Node, int, int]  # a tensor of norms, and from where to where


def _runs(places: Sequence[tuple[fx.Node, int]]) -> list[Run]:
    """Neighbours in one tensor of norms that are neighbours in the order."""
    found: list[Run] = []
    for item, at in places:
        if found and found[-1][0] is item and found[-1][2] == at:
            found[-1] = item, found[-1][1], at + 1
        else:
            found.append((item, at, at + 1))
    return found


class _ClipWriter:
    """Appends operators of the root, after ``after[0]``, which it moves along."""

    def __init__(self, program: Program, after: list[fx.Node]) -> None:
        self.program, self.after = program, after
        self.tag = tags.Meta("backward", "compute", unit=0)

    def compute(self, name: str, target: Any, args: tuple[Any, ...], **options: Any) -> fx.Node:
        graph = self.program.graph
        with graph.inserting_before(self.after[0].next):
            node = graph.create_node("call_function", target, args, options, name=name)
        self.after[0] = tags.put(node, self.tag, self.program.refake(node))
        return node

    def joined(self, runs: Sequence[Run]) -> fx.Node:
        """One tensor of all norms, in order."""
        parts = []
        for item, start, end in runs:
            whole = (start, end) == (0, item.meta["val"].shape[0])
            cut = (item, 0, start, end)
            parts.append(item if whole else self.compute("slice", aten.slice.Tensor, cut))
        return self.compute("norms", aten.cat.default, (parts,))

    def reduced(self, norms: fx.Node, size: int, group: str) -> fx.Node:
        """Their sums over the ranks: a launch, and its wait."""
        graph = self.program.graph
        used = (tags.get(node).pair for node in graph.nodes)
        pair = 1 + max(itertools.chain([-1], (p for p in used if p is not None)))
        tag = tags.changed(self.tag, role="transfer", pair=pair)
        with graph.inserting_before(self.after[0].next):
            name = f"reduce_norms_{pair}"
            (item,) = transfers.insert_operator(
                self.program, ops.reduce_norms, ([norms], size, group, "sum"), [""], tag, name
            )
            tags.update(item, fqn=None)
        with graph.inserting_before(item.next):
            self.after[0] = transfers.insert_wait(self.program, [item], tag)
        return item
