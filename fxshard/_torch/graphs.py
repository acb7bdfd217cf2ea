"""Graphs of torch.fx: their nodes, and what the trace notes on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _PyTreeCodeGen


def current_meta() -> dict[str, Any]:
    """The metadata that new FX nodes inherit now (torch/fx/traceback.py, ``current_meta``)."""
    current: dict[str, Any] = torch.fx.traceback.current_meta
    return current


def with_current_meta(key: str, value: Any) -> Callable[[], None]:
    """Set `key` of the metadata that new FX nodes inherit; the returned call puts it back.

    (torch/fx/traceback.py, ``current_meta``; copied to nodes under ``preserve_node_meta``)
    """
    current = torch.fx.traceback.current_meta
    absent = object()
    before = current.get(key, absent)
    current[key] = value

    def restore() -> None:
        if before is absent:
            current.pop(key, None)
        else:
            current[key] = before

    return restore


def takes_flat_inputs(graph: fx.Graph) -> bool:
    """True if the graph's placeholders are the flattened arguments (torch.export's modules)."""
    return isinstance(graph._codegen, _PyTreeCodeGen)


def sums_gradients(node: fx.Node) -> bool:
    """True if `node` of a trace is autograd's sum of two gradients of one tensor.

    (``_is_gradient_acc`` of a frame, which torch/fx/proxy.py notes)
    """
    return bool(node.meta.get("is_gradient_acc"))


def casts_gradient(node: fx.Node) -> bool:
    """True if `node` of a trace is autograd's cast of a gradient to the dtype of its tensor.

    Its dtype is all that it names; the backward of a cast names layout and device too.
    (torch/csrc/autograd/engine.cpp, ``validate_outputs``; derivatives.yaml, ``_to_copy``)
    """
    is_cast = node.target is torch.ops.aten._to_copy.default
    return is_cast and bool(node.meta.get("autograd_backward")) and set(node.kwargs) == {"dtype"}


@contextlib.contextmanager
def nodes_made() -> Iterator[dict[fx.Graph, list[fx.Node]]]:
    """Per graph that dead code is eliminated from in the block: the nodes that were there before.

    A trace ends with that, and the names of dead nodes are not given again.
    (torch/_functorch/_aot_autograd/graph_capture.py, ``aot_dispatch_autograd_graph``)
    """
    found: dict[fx.Graph, list[fx.Node]] = {}
    eliminate = fx.Graph.eliminate_dead_code

    def noted(self: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        found.setdefault(self, list(self.nodes))
        return eliminate(self, *args, **kwargs)

    fx.Graph.eliminate_dead_code = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        fx.Graph.eliminate_dead_code = eliminate  # type: ignore[method-assign]


def append_node(
    graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str, type_: Any = None
) -> fx.Node:
    """``graph.create_node``, of a graph that no GraphModule owns, without its look at all constants
    in `args` and `kwargs`: that is for a warning of symbolic ones, and takes half of its time.

    (torch/fx/graph.py, ``Graph.create_node``)
    """
    assert graph.owning_module is None, "hooks of a GraphModule want to see each node"
    names = graph._graph_namespace
    name = names.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, kwargs, type_)
    names._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph with a copy of each node; metadata is copied one level deep.

    (torch/fx/graph.py, ``Graph.node_copy``)
    """
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    of = made.__getitem__
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), of)
        made[node] = append_node(copy, node.op, node.target, args, kwargs, node.name, node.type)
        made[node].meta.update(node.meta)
    return copy


def has_names_of(graph: fx.Graph, nodes: Sequence[fx.Node]) -> bool:
    """True if the names that `graph` has ever given are those of `nodes`."""
    return graph._graph_namespace._used_names == {node.name for node in nodes}


def take_name(graph: fx.Graph, name: str) -> str:
    """Take a name, as a new node would that asks for it; returns the one that is given."""
    return graph._graph_namespace.create_name(name, None)


def is_erased(node: fx.Node) -> bool:
    """True if `node` has been erased from its graph."""
    return node._erased


def given_names(graph: fx.Graph) -> tuple[set[str], dict[str, int]]:
    """The names that `graph` does not give again, and per base name the number that it gave last.

    Names of erased nodes are among them. (torch/fx/graph.py, ``_Namespace``)
    """
    names = graph._graph_namespace
    return names._used_names, names._base_count
