"""Which storages of a program are gradients, or are to be gathered: for the analysis' columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Program, nbytes
from fxshard.memory.category import Category
from fxshard.memory.loss import LossStep

aten: Any = torch.ops.aten


def gradient_categories(
    program: Program, without: frozenset[str] = frozenset()
) -> dict[int, Category]:
    """Storages of the joint graph that are gradients, or copies of them to be sent.

    Args:
        without: names of gradients that nothing keeps (see `unreached`).
    """
    found = _computed_to_be_sent(program)
    params, ignored = program.params, program.ignored
    todo: list[fx.Node] = []
    reduced: set[int] = set()
    for launch in program.graph.nodes:
        if transfers.is_first_reduction(program, launch):
            todo += tags.operands(launch)
        if transfers.is_reduction(launch):
            reduced |= set().union(*map(tags.storage_ids, launch.users))
    while todo:
        sent = todo.pop()
        maker = transfers.storage_maker(sent)
        if maker is not None and is_reduce_copy(maker.target, dict(maker.kwargs)):
            found |= dict.fromkeys(tags.storage_ids(maker), Category.REDUCE_SCATTER)
            todo += maker.all_input_nodes
        else:
            for storage in tags.storage_ids(sent):
                found.setdefault(storage, Category.UNSHARDED_GRAD)
    stored = [n for node in program.graph.nodes if node.target is ops.store for n in node.args[0]]
    for node in stored:
        for storage in tags.storage_ids(node):
            found.setdefault(storage, Category.SHARDED_GRAD)
    for value in transfers.stepped(program).values():
        for storage in tags.storage_ids(value):
            found.setdefault(storage, Category.SHARDED_GRAD)
    for value, result in zip(program.values, program.results, strict=True):
        if result.kind == "accumulated":
            category = Category.UNSHARDED_GRAD
        elif result.kind == "partial" or (
            result.kind == "grad"
            and (result.name in params or result.name in ignored)
            and (result.name not in without or _is_reduced(value, reduced))
        ):
            category = Category.SHARDED_GRAD
        else:
            continue
        for storage in tags.storage_ids(value):
            found.setdefault(storage, category)
    return found


def _is_reduced(value: fx.Node, reduced: set[int]) -> bool:
    """True if a storage is among those that reductions write, or a copy of one."""
    while not tags.storage_ids(value) & reduced:
        maker = transfers.storage_maker(value)
        if maker is None or not is_reduce_copy(maker.target, dict(maker.kwargs)):
            return False
        value = maker.all_input_nodes[0]
    return True


def _computed_to_be_sent(program: Program) -> dict[int, Category]:
    """What operators make of shards of tensor subclasses, to be gathered."""
    launches = program.graph.find_nodes(op="call_function", target=ops.all_gather)
    sent = [node for launch in launches for node in transfers.sent_copies(launch)]
    return {
        storage: Category.ALL_GATHER
        for node in sent
        if tags.get(node).role == "pre_gather"
        for storage in tags.storage_ids(node)
    }


def unreached(program: Program, loss: LossStep | None) -> frozenset[str]:
    """Names of the gradients that stay None in eager: `loss` is not computed from their outputs.

    Without a loss, each output has a part in it.
    """
    if loss is None:
        return frozenset()
    every = program.reached.items()
    return frozenset(name for name, reach in every if not reach & loss.arrived)


def accumulated_bytes(program: Program, fqn: str) -> int:
    """Bytes of the accumulated gradient of a parameter."""
    param = program.params[fqn]
    precision = program.units[param.unit].precision
    return nbytes(param.shape, precision.reduces_in(param.compute_dtype))


def partial_bytes(program: Program, fqn: str) -> int:
    """Bytes of the partial sum of the sharded gradients of a parameter."""
    param = program.params[fqn]
    precision = program.units[param.unit].precision
    shape = program.layouts[fqn].shard_shape
    return nbytes(shape, precision.reduces_in(param.compute_dtype))


def unsharded_bytes(program: Program, fqn: str) -> int:
    """Bytes of an unsharded parameter, with its padding."""
    return nbytes(program.layouts[fqn].unsharded_shape, program.params[fqn].compute_dtype)


def is_reduce_copy(target: object, kwargs: dict[str, Any]) -> bool:
    """True for the operators that copy a gradient into a form that can be sent.

    By definition such a copy, when it is sent, is *Reduce Scatter*, and what it was copied from
    is the *Unsharded Grad*.
    """
    if target in (aten._to_copy.default, aten.cat.default):
        return True
    contiguous = kwargs.get("memory_format") == torch.contiguous_format
    return target is aten.constant_pad_nd.default or (target is aten.clone.default and contiguous)
