"""What several of the tests beside it need (test_verify)."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxshard import verify
from fxshard.capture import trace
from fxshard.errors import VerifyError
from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from fxshard.ir.splitting import find_units
from tests.zoo import MODELS

# Not of every program: with an optimizer in it; where ranks differ; with offloaded activations.
ALWAYS = set(Fact) - {Fact.STEPPED_ONCE, Fact.CLIPPED, Fact.JOINED, Fact.OFFLOADED}


def find(program: Program, name: str) -> fx.Node:
    (node,) = (node for node in program.graph.nodes if node.name == name)
    return node


def of(program: Program, target: Any, unit: int, phase: str) -> fx.Node:
    """The wait or free that belongs to the all-gather of a unit in a phase."""
    return paired(program, target, launch(program, unit, phase))


def paired(program: Program, target: Any, launch: fx.Node) -> fx.Node:
    """The wait or free that belongs to a launch."""
    found = program.graph.find_nodes(op="call_function", target=target)
    (node,) = (node for node in found if tags.get(node).pair == tags.get(launch).pair)
    return node


def launch(program: Program, unit: int, phase: str, target: Any = ops.all_gather) -> fx.Node:
    (node,) = (
        node
        for node in program.graph.find_nodes(op="call_function", target=target)
        if (tags.get(node).unit, tags.get(node).phase) == (unit, phase)
    )
    return node


def item(node: fx.Node, index: int) -> fx.Node:
    return next(user for user in node.users if user.args[1] == index)


def insert(program: Program, at: fx.Node, target: Any, *args: Any, **tag: Any) -> fx.Node:
    """A new node with the tag of the one it stands after, but for `tag`."""
    with program.graph.inserting_after(at):
        node = program.graph.call_function(target, args)
    same = dataclasses.replace(tags.get(at), records=None, waits=(), stream="compute")
    return tags.put(node, dataclasses.replace(same, **tag), at.meta.get("val"))


@functools.cache
def captured(name: str, training: bool = True) -> Program:
    torch.manual_seed(0)
    model = MODELS[name].build()
    args, kwargs = MODELS[name].batch(0, 0)
    return capture(model, args, kwargs, training)


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    training: bool = True,
    units: Any = None,
) -> Program:
    found = find_units(model, units)
    return trace.capture(model, args, kwargs, units=found, world_size=1, training=training)


def fresh(program: Program, world_size: int) -> Program:
    """`program` once more, for passes to change."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {})).meta = dict(program.output.meta)
    results = list(program.results)
    return dataclasses.replace(
        program, graph=graph, results=results, facts=set(), world_size=world_size
    )


def assert_every_event_matters(program: Program) -> None:
    """Whatever is recorded is waited for, and nothing of it can be left out."""
    for node in program.graph.nodes:
        tag = tags.get(node)
        fewer = [tag.waits[:i] + tag.waits[i + 1 :] for i in range(len(tag.waits))]
        broken = [dataclasses.replace(tag, waits=waits) for waits in fewer]
        for without in broken + [dataclasses.replace(tag, records=None)] * bool(tag.records):
            tags.put(node, without)
            with pytest.raises(VerifyError) as caught:
                verify.verify(program)
            assert caught.value.fact == "streams_ordered"
            tags.put(node, tag)
    verify.verify(program)
