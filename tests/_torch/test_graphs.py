"""Contracts of what `fxshard._torch.graphs` uses of torch."""

import itertools
import operator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import Tensor, fx, nn

from fxshard._torch import dynamo, export, fake_tensors, modules
from fxshard._torch import graphs as torch_graphs
from tests._torch.shared import Small, aten


def test_with_current_meta_puts_back_what_was_there() -> None:
    current = torch.fx.traceback.current_meta
    assert "fxshard_test" not in current
    outer = torch_graphs.with_current_meta("fxshard_test", 1)
    inner = torch_graphs.with_current_meta("fxshard_test", 2)
    assert current["fxshard_test"] == 2, "fx.traceback.current_meta is a copy"
    inner()
    assert current["fxshard_test"] == 1
    outer()
    assert "fxshard_test" not in current


def test_current_meta_is_what_new_nodes_inherit() -> None:
    restore = torch_graphs.with_current_meta("fxshard_test", 1)
    assert torch_graphs.current_meta()["fxshard_test"] == 1
    restore()
    assert "fxshard_test" not in torch_graphs.current_meta()


def test_takes_flat_inputs() -> None:
    module = nn.Linear(3, 2)
    exported = torch.export.export(module, (torch.ones(1, 3),)).module()
    assert torch_graphs.takes_flat_inputs(exported.graph), (
        "torch.export's modules look like others now"
    )
    assert not torch_graphs.takes_flat_inputs(fx.symbolic_trace(module).graph)


def _graph_by_hand() -> fx.Graph:
    """Arguments in lists, slices and keywords, a name of Python's, a dead name, metadata."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b", type_expr=Tensor)
    dead = graph.call_function(aten.add.Tensor, (a, b))
    total = graph.call_function(aten.sum.dim_IntList, (a, [0, 1]), {"keepdim": True})
    picked = graph.call_function(operator.getitem, (b, (slice(None, None, 2), None)))
    again = graph.call_function(aten.cat.default, ([a, picked, a],), {})
    again.meta["custom"] = {"mine": [1]}
    graph.call_function(aten.add.Tensor, (again, total), {"alpha": 2}, type_expr=Tensor)
    graph.erase_node(dead)
    graph.output((again, [total, None], {"last": again}))
    return graph


def _all_of(graph: fx.Graph) -> Any:
    names = graph._graph_namespace
    nodes = list(graph.nodes)
    table = graph._find_nodes_lookup_table.table
    return (
        [(n.op, n.name, n.target, n.type, str(n.args), str(n.kwargs)) for n in nodes],
        [(type(n.args), type(n.kwargs), [type(x) for x in n.args]) for n in nodes],
        [([u.name for u in n.users], [i.name for i in n.all_input_nodes]) for n in nodes],
        [list(n.meta.items()) for n in nodes],
        [(key, [n.name for n in found]) for key, found in table.items() if found],
        {n.name: name for n, name in names._obj_to_name.items() if n in set(nodes)},
        (names._used_names, names._base_count, len(nodes), len(graph.nodes)),
        [a < b for a, b in itertools.pairwise(nodes)],
        graph.create_node("call_function", aten.add.Tensor, (nodes[0], nodes[1])).name,
    )


def test_a_graph_copied_at_once_is_that_of_node_copy() -> None:
    graph = _graph_by_hand()
    by_node = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        made[node] = by_node.node_copy(node, made.__getitem__)
    at_once = torch_graphs.copy_graph(graph)
    at_once.lint()
    for one, other in zip(at_once.nodes, graph.nodes, strict=True):
        assert one.graph is at_once and one.meta == other.meta and one.meta is not other.meta
    before = _all_of(graph)
    assert _all_of(at_once) == _all_of(by_node)
    at_once.erase_node(list(at_once.nodes)[-1])
    assert _all_of(_graph_by_hand()) == before


def test_a_node_appended_is_that_of_create_node() -> None:
    one, other = fx.Graph(), fx.Graph()
    for graph, make in ((one, partial(torch_graphs.append_node, one)), (other, other.create_node)):
        a = graph.placeholder("a")
        for _ in range(2):  # the second time the name is taken
            make("call_function", aten.cat.default, ([a, a], 1), {}, "cat_3")
        make("call_function", aten.add.Tensor, (a, 1), {"alpha": 2}, "sum")
    assert _all_of(one) == _all_of(other)
    owned = fx.GraphModule({}, one).graph
    with pytest.raises(AssertionError, match="hooks"):
        torch_graphs.append_node(owned, "placeholder", "b", (), {}, "b")


def test_what_autograd_itself_does_to_gradients_is_told_from_what_the_model_does() -> None:
    class Scaled(nn.Module):
        """Reads one bf16 parameter twice beside fp32, and one that it casts itself."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.offset = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [((x * self.gain + self.offset.float()) * self.gain).sum()]

    with fake_tensors.FakeTensorMode():
        model, x = Scaled(), torch.ones(2, 3)
    with torch.fx.traceback.preserve_node_meta():
        graph_module, _, targets = export.export_joint(model, (x,))
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    sources = [export.output_source(desc) for desc in targets]
    by_source = dict(zip(sources, output.args[0], strict=True))
    gain, offset = (by_source["grad", ("param", name)] for name in ("gain", "offset"))
    assert torch_graphs.sums_gradients(gain)
    marked = {"autograd_backward" in node.meta for node in graph.nodes} != {False}
    assert marked or not modules.REDUCES_AS_STORED  # torch 2.11 has no such mark, and nobody asks
    assert [torch_graphs.casts_gradient(part) for part in gain.args] == [marked, marked]
    assert offset.target is aten._to_copy.default and not torch_graphs.casts_gradient(offset)
    ours = [node for node in graph.nodes if torch_graphs.casts_gradient(node)]
    assert (
        len(ours) == 2 * marked
        and sum(torch_graphs.sums_gradients(node) for node in graph.nodes) == 1
    )


def test_dynamo_gives_one_graph_and_keeps_nothing() -> None:
    linear, x = nn.Linear(3, 3), torch.ones(2, 3)
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return lambda *given: graph(*given)

    for _ in range(12):  # more often than one code object may be compiled
        assert torch.equal(dynamo.dynamo(linear, (x,), {}, backend), linear(x))
    assert len(graphs) == 12
    (node,) = (node for node in graphs[0].graph.nodes if node.op == "call_function")
    assert [path for path, _ in node.meta["nn_module_stack"].values()] == ["L['model']"]


def test_nodes_made_has_the_dead_ones(joint: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    dead, live = graph.call_function(torch.relu, (x,)), graph.call_function(torch.relu, (x,))
    graph.output(live)
    with torch_graphs.nodes_made() as made:
        graph.eliminate_dead_code()
        graph.eliminate_dead_code()
    assert dead not in graph.nodes
    assert [node.name for node in made[graph]] == ["x", "relu", "relu_1", "output"]
    assert torch_graphs.has_names_of(graph, made[graph])
    assert not torch_graphs.has_names_of(graph, list(graph.nodes))
    with torch_graphs.nodes_made() as found, fake_tensors.FakeTensorMode():
        module = Small()
        traced, _, _ = export.export_joint(
            module, (torch.ones(4, 3), torch.ones(4, 2, dtype=torch.bool))
        )
    assert torch_graphs.has_names_of(traced.graph, found[traced.graph])


def test_names_that_a_graph_has_given() -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    first, second = (graph.call_function(aten.neg.default, (a,)) for _ in range(2))
    graph.erase_node(second)
    used, count = torch_graphs.given_names(graph)
    assert first.name in used and second.name in used
    other = fx.Graph()
    torch_graphs.append_node(other, "placeholder", "a", (), {}, "a")
    own_used, own_count = torch_graphs.given_names(other)
    own_used.update(used)
    own_count.update(count)
    (again,) = other.nodes
    third = graph.call_function(aten.neg.default, (a,)).name
    assert other.call_function(aten.neg.default, (again,)).name == third != second.name


def test_a_name_that_is_taken_is_not_given_again() -> None:
    graph = fx.Graph()
    assert torch_graphs.take_name(graph, "x") == "x"
    assert graph.placeholder("x").name == "x_1" == torch_graphs.take_name(fx.Graph(), "x_1")


def test_an_erased_node_says_so() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert not torch_graphs.is_erased(node)
    graph.erase_node(node)
    assert torch_graphs.is_erased(node)
