"""insert-reduce: average each unit's gradients over the ranks, and keep this rank's rows."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from fxshard import meta, ops
from fxshard.program import Fact, Program
from fxshard.units import Param

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class InsertReduce:
    """One reduce-scatter per unit (and dtype), behind the last of its gradients.

    A gradient is sent as it lies if it is contiguous, divides evenly and nobody else sees its
    storage; otherwise a copy (padded with zero rows) is sent.

    Before::

        %g = aten.mm(%t, %x)                     # f32[6,4]
        return (%g)                              # grad of w

    After (world size 2)::

        %g = aten.mm(%t, %x)
        %reduce_1 = fxshard.reduce_scatter([%g], 2)
        %getitem = getitem(%reduce_1, 0)         # f32[3,4]
        %wait_1 = fxshard.wait([%getitem])
        return (%getitem)                        # sharded grad of w
    """

    name: ClassVar[str] = "insert-reduce"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.REDUCED_ONCE, Fact.EQUAL_CHUNKS})

    def apply(self, program: Program) -> None:
        values = program.values
        slots = {
            result.name: i for i, result in enumerate(program.results) if result.kind == "grad"
        }
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        pair = 1 + max((meta.get(n).pair or 0 for n in program.graph.nodes), default=-1)
        groups: list[tuple[fx.Node, list[Param]]] = []
        for unit in program.units:
            by_dtype: dict[torch.dtype, list[Param]] = {}
            for param in unit.params:
                if param.fqn in slots:
                    dtype = values[slots[param.fqn]].meta["val"].dtype
                    by_dtype.setdefault(dtype, []).append(param)
            for params in by_dtype.values():
                last = max((values[slots[p.fqn]] for p in params), key=order.__getitem__)
                groups.append((last, params))
        for last, params in sorted(groups, key=lambda group: order[group[0]]):
            grads = [values[slots[param.fqn]] for param in params]
            alone = [owns_storage(program, grad, last, order) for grad in grads]
            reduced = reduce(program, params, grads, alone, last, pair)
            for param, node in zip(params, reduced, strict=True):
                values[slots[param.fqn]] = node
            pair += 1
        program.values = values


def reduce(
    program: Program,
    params: list[Param],
    grads: list[fx.Node],
    alone: list[bool],
    last: fx.Node,
    pair: int,
) -> list[fx.Node]:
    """Insert launch and wait behind `last`; returns the sharded gradients.

    `alone[i]`: nobody else sees the storage of `grads[i]`, so that it can be sent and freed.
    """
    unit = program.units[params[0].unit]
    tag = meta.Meta("backward", "reduce", module=unit.fqn, unit=unit.index, pair=pair)
    following = last.next
    if last.op == "placeholder":  # the gradient is a tangent as it came
        following = next(iter(program.phase("backward")), program.output)
    with program.graph.inserting_before(following):
        sent = [
            as_sendable(program, param, grad, own, tag)
            for param, grad, own in zip(params, grads, alone, strict=True)
        ]
        return ops.insert_launch(program, ops.reduce_scatter, sent, [p.fqn for p in params], tag)


def as_sendable(
    program: Program, param: Param, grad: fx.Node, alone: bool, tag: meta.Meta
) -> fx.Node:
    """`grad` itself, or a contiguous copy padded to ``world_size * chunk`` rows.

    What is sent is tagged with the FQN of the parameter whose gradient it is.
    """
    tag = dataclasses.replace(tag, fqn=param.fqn)
    val, world = grad.meta["val"], program.world_size
    rows = world * param.chunk(world)[0]
    pad = rows - param.shape[0]
    if not pad and val.is_contiguous() and alone:
        meta.update(grad, fqn=param.fqn)
        return grad
    if pad:
        padding = [0, 0] * (val.dim() - 1) + [0, pad]
        source = grad if val.is_contiguous() else contiguous(program, grad, tag)
        node = program.graph.call_function(aten.constant_pad_nd.default, (source, padding))
        fake = program.fake((rows, *param.shape[1:]), val.dtype, val.device)
        return meta.put(node, dataclasses.replace(tag, role="pad"), fake)
    return contiguous(program, grad, tag)


def contiguous(program: Program, grad: fx.Node, tag: meta.Meta) -> fx.Node:
    """A contiguous copy of `grad`."""
    val = grad.meta["val"]
    kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
    node = program.graph.call_function(aten.clone.default, (grad,), kwargs)
    fake = program.fake(tuple(val.shape), val.dtype, val.device)
    return meta.put(node, dataclasses.replace(tag, role="pad"), fake)


def owns_storage(program: Program, grad: fx.Node, last: fx.Node, order: dict[fx.Node, int]) -> bool:
    """True if `grad` fills its storage, is returned once, and nothing behind `last` sees it."""
    val = grad.meta["val"]
    if val.untyped_storage().nbytes() != val.numel() * val.element_size():
        return False
    (storage,) = meta.storage_ids(grad)
    if sum(storage in meta.storage_ids(value) for value in program.values) > 1:
        return False
    maker: fx.Node | None = grad
    aliases: list[fx.Node] = []
    while maker is not None:
        aliases.append(maker)
        maker = next((n for n in maker.all_input_nodes if storage in meta.storage_ids(n)), None)
    if aliases[-1].op == "placeholder":
        return False
    todo = aliases[-1:]
    while todo:
        for user in todo.pop().users:
            if storage in meta.storage_ids(user):
                todo.append(user)
            elif user.op != "output" and order.get(user, -1) > order[last]:
                return False
    return True
