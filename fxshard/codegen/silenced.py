"""A backward in which some outputs got no gradient: what comes from those is zero, exactly.

A program starts backward at several outputs, and a loss may reach some of them. The others get
zeros. What is computed of zeros alone is zero, but where a derivative is infinite: the ``sqrt`` of
0 gives ``0 * inf``, NaN, where eager PyTorch computes nothing. So it is set to zero wherever it
meets anything else: in place, so that the schedule, its collectives and its bytes stay as they are.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from fxshard._torch import graphs
from fxshard.ir import outline, tags
from fxshard.ir.program import Program

aten: Any = torch.ops.aten


def silenced(program: Program, missing: frozenset[int]) -> Program:
    """`program` for a backward without the gradients of some outputs.

    Args:
        program: with a schedule.
        missing: flat indices of the outputs, all of which have a tangent.

    Returns:
        `program` if nothing has to be set to zero; else one of the same schedule, with operators
        in between that write zeros.
    """
    assert program.schedule is not None
    graph = graphs.copy_graph(program.graph)
    made = dataclasses.replace(program, graph=graph, schedule=None)
    reach = _reach(graph)
    nothing = {node for node, outputs in reach.items() if outputs <= missing}
    ends = [node for node in nothing if any(user not in nothing for user in node.users)]
    written = dict.fromkeys(maker for end in ends for maker in _makers(end, nothing))
    for node in written:
        with graph.inserting_after(node):
            zero = graph.call_function(aten.zero_.default, (node,))
        tag = tags.changed(tags.get(node), role="compute", records=None, waits=())
        tags.put(zero, tag, node.meta["val"])
        zero.meta[tags.BETWEEN_POINTS] = True
    if not written:
        return program
    made.schedule = outline.build(made, program.schedule.regions.values())
    return made


def _reach(graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """Of what is computed from gradients of outputs: from those of which ones (flat indices).

    What comes out of a collective is of other ranks too, and not among them. Gradients that earlier
    backwards have accumulated come from none of these outputs.
    """
    found: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        tag = tags.get(node)
        if tag.role == "tangent":
            found[node] = frozenset([int(tag.fqn or 0)])
        elif tag.role == "accumulated":
            found[node] = _EARLIER
        elif tag.phase == "backward" and tag.role in outline.COMPUTE:
            inputs = [found[n] for n in node.all_input_nodes if n in found]
            if inputs:
                found[node] = frozenset().union(*inputs)
    return found


_EARLIER = frozenset([-1])  # the number of no output


def _makers(node: fx.Node, nothing: set[fx.Node]) -> list[fx.Node]:
    """The compute operators that wrote what `node` holds; none, if that is the gradient itself."""
    found, todo = [], [node]
    while todo:
        node = todo.pop()
        if node.op == "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        view = tags.aliases_input(node) and not tags.writes(node)
        if view and node.target is not operator.getitem:  # its elements may share places
            mine = tags.storage_ids(node)
            todo += [n for n in node.all_input_nodes if n in nothing and tags.storage_ids(n) & mine]
        else:
            found.append(node)
    return found
