"""The ``fxshard::`` operators of the rewritten graph, with fake implementations.

They are the words of the intermediate representation. The executor binds each to a method of the
same name on a World (`fxshard.world`); they have no kernel of their own.

================  =============================================================================
all_gather        launch: one padded shard ``[chunk, ...]`` per parameter in, one fresh buffer
                  ``[world_size * chunk, ...]`` per parameter out, in one coalesced collective.
                  The buffer *is* the unsharded parameter (rank r wrote rows r*chunk onward), so
                  nothing is copied out; padding rows are cut off by a view.
reduce_scatter    launch: one contiguous ``[world_size * chunk, ...]`` gradient per parameter in,
                  one fresh ``[chunk, ...]`` out, averaged, in one coalesced collective.
wait              the compute stream waits for the launch that these tensors belong to.
free              give the storage of these tensors back now, whoever still refers to them.
================  =============================================================================
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxshard import meta

if TYPE_CHECKING:
    from fxshard.program import Program

_LIBRARY = torch.library.Library("fxshard", "DEF")
_LIBRARY.define("all_gather(Tensor[] shards, int world_size) -> Tensor[]")
_LIBRARY.define("reduce_scatter(Tensor[] grads, int world_size) -> Tensor[]")
_LIBRARY.define("wait(Tensor[] tensors) -> ()")
_LIBRARY.define("free(Tensor[] tensors) -> ()")


@torch.library.register_fake("fxshard::all_gather", lib=_LIBRARY)
def _(shards: list[Tensor], world_size: int) -> list[Tensor]:
    return [s.new_empty((s.shape[0] * world_size, *s.shape[1:])) for s in shards]


@torch.library.register_fake("fxshard::reduce_scatter", lib=_LIBRARY)
def _(grads: list[Tensor], world_size: int) -> list[Tensor]:
    return [g.new_empty((g.shape[0] // world_size, *g.shape[1:])) for g in grads]


@torch.library.register_fake("fxshard::wait", lib=_LIBRARY)
def _(tensors: list[Tensor]) -> None:
    return None


@torch.library.register_fake("fxshard::free", lib=_LIBRARY)
def _(tensors: list[Tensor]) -> None:
    return None


all_gather = torch.ops.fxshard.all_gather.default
reduce_scatter = torch.ops.fxshard.reduce_scatter.default
wait = torch.ops.fxshard.wait.default
free = torch.ops.fxshard.free.default

LAUNCHES = (all_gather, reduce_scatter)
ALL = (all_gather, reduce_scatter, wait, free)


def node(graph: fx.Graph, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
    """Append an operator under a name of its own choice ("unshard_3") at the insertion point."""
    return graph.create_node("call_function", target, args, name=name)


def insert_launch(
    program: Program, target: Any, sources: list[fx.Node], fqns: list[str], tag: meta.Meta
) -> list[fx.Node]:
    """Append a launch, a pick of each of its results, and their wait; returns the picks.

    Args:
        program: whose graph has its insertion point set.
        target: `all_gather` or `reduce_scatter`.
        sources: what is sent, one tensor per parameter.
        fqns: of the parameters; each pick is tagged with its own.
        tag: of the launch; role "unshard" or "reduce", and a fresh pair.
    """
    args = (sources, program.world_size)
    launch = node(program.graph, target, args, f"{tag.role}_{tag.pair}")
    values = program.refake(launch)
    meta.put(launch, tag, values)
    picks = [program.graph.call_function(operator.getitem, (launch, i)) for i in range(len(fqns))]
    for pick, fqn, value in zip(picks, fqns, values, strict=True):
        meta.put(pick, dataclasses.replace(tag, fqn=fqn), value)
    wait_node = node(program.graph, wait, (picks,), f"wait_{tag.pair}")
    meta.put(wait_node, dataclasses.replace(tag, role="wait"))
    return picks
