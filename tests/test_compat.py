"""One contract per use of a private name of torch: a failure here says what an upgrade changed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fxshard import compat


class Tied(nn.Module):
    """A parameter under two names, a buffer that forward changes, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.count += 1
        y = self.b(self.a(x).relu())
        return [y.sum(), y]


def joint() -> tuple[Any, list[Any], list[Any]]:
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    model = Tied()
    with mode:
        weight = nn.Parameter(torch.empty(3, 3))
        model.a.weight = model.b.weight = weight
        model.count = torch.empty(())
        x = torch.empty(2, 3)
    return compat.export_joint(model, (x,))


def test_joint_export_names_every_input_and_output() -> None:
    _, inputs, outputs = joint()
    sources = [compat.input_source(desc) for desc in inputs]
    assert ("buffer", "count") in sources and ("input", 0) in sources
    assert {name for kind, name in sources if kind == "param"} == {"a.weight", "b.weight"}
    tangents = [source for kind, source in sources if kind == "tangent"]
    assert ("output", 0) in tangents and ("output", 1) in tangents
    targets = [compat.output_source(desc) for desc in outputs]
    assert targets[0] == ("mutation", ("buffer", "count"))
    assert ("output", 0) in targets and ("output", 1) in targets
    assert ("grad", ("param", "a.weight")) in targets
    assert not any(kind == "other" for kind, _ in sources + targets)


def test_joint_export_tags_the_phases() -> None:
    graph_module, _, _ = joint()
    tags = [
        node.meta.get("partitioner_tag")
        for node in graph_module.graph.nodes
        if node.op == "call_function"
    ]
    assert set(tags) <= {"is_forward", "is_backward", "must_be_in_backward", "must_be_in_forward"}
    first = tags.index("is_backward")
    assert "is_forward" not in tags[first:], "backward nodes stand behind all forward nodes"
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, "every node has its fake value"


def test_views_share_the_storage_object_of_their_base() -> None:
    """Storages are told apart by the identity of their Python object."""
    mode = compat.FakeTensorMode()
    with mode:
        base = torch.empty(4, 4)
        view = base.t()[1:]
        other = torch.empty(4, 4)
    assert view.untyped_storage() is base.untyped_storage()
    assert other.untyped_storage() is not base.untyped_storage()
    real = torch.empty(3)
    assert real.untyped_storage() is real[1:].untyped_storage()


def test_is_fake_tells_what_holds_no_memory() -> None:
    with compat.FakeTensorMode():
        fake = torch.empty(2)
    assert compat.is_fake(fake) and not compat.is_fake(torch.empty(2))


def test_compiling_sets_one_flag_and_puts_it_back() -> None:
    assert not torch.compiler.is_compiling()
    with compat.compiling():
        assert torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling()
    with pytest.raises(KeyError), compat.compiling():
        raise KeyError
    assert not torch.compiler.is_compiling()


def test_current_meta_reaches_new_nodes() -> None:
    class Marked(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            restore = compat.with_current_meta("nn_module_stack", {"m": ("m", nn.Module)})
            y = x.sin()
            restore()
            return [y.cos()]

    mode = compat.FakeTensorMode()
    with mode:
        x = torch.empty(2)
    with torch.fx.traceback.preserve_node_meta(), torch.no_grad():
        graph_module, _, _ = compat.export_joint(Marked(), (x,))
    stacks = {
        str(node.target): node.meta.get("nn_module_stack")
        for node in graph_module.graph.nodes
        if node.op == "call_function"
    }
    assert stacks["aten.sin.default"] == {"m": ("m", nn.Module)}
    assert not stacks["aten.cos.default"]


def test_data_dependent_errors_are_those_that_fake_tensors_raise() -> None:
    with compat.FakeTensorMode():
        x = torch.ones(3)
        with pytest.raises(compat.DATA_DEPENDENT_ERRORS):
            x.sum().add(1).item()
        with pytest.raises(compat.DATA_DEPENDENT_ERRORS):
            x.nonzero()


def test_fake_group_copies_its_own_shard() -> None:
    assert not dist.is_initialized()
    with compat.fake_process_group(1, 4):
        group = dist.group.WORLD
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        out = [torch.zeros(4, 2)]
        group.allgather_into_tensor_coalesced(out, [torch.full((1, 2), 3.0)]).wait()
        assert torch.equal(out[0], torch.full((4, 2), 3.0))
        part = [torch.zeros(1, 2)]
        whole = torch.arange(8.0).view(4, 2)
        group.reduce_scatter_tensor_coalesced(part, [whole], dist.ReduceScatterOptions()).wait()
        assert part[0].isfinite().all()
    assert not dist.is_initialized()


def store_and_timeout(rank: int, world_size: int) -> tuple[bool, float]:
    group = dist.group.WORLD
    store = compat.group_store(group)
    store.set(f"contract/{rank}", "here")
    store.wait([f"contract/{r}" for r in range(world_size)])
    return store.check(["contract/absent"]), compat.group_timeout(group).total_seconds()


def test_group_has_a_store_and_a_timeout(ranks: Any) -> None:
    for absent, seconds in ranks(2).run(store_and_timeout):
        assert absent is False and seconds > 0


def test_wrap_policies() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    policy = ModuleWrapPolicy({nn.Linear})
    assert compat.is_wrap_policy(policy) and not compat.is_wrap_policy(lambda *_: True)
    assert compat.run_wrap_policy(policy, model) == {model[0], model[1][0]}


def test_flat_inputs() -> None:
    model = nn.Linear(2, 2)
    assert not compat.takes_flat_inputs(torch.fx.symbolic_trace(model).graph)
    exported = torch.export.export(model, (torch.ones(1, 2),)).module()
    assert compat.takes_flat_inputs(exported.graph)


def test_trees() -> None:
    tree = ({"a": torch.ones(1), "b": [2, None]}, 3.5)
    leaves, spec = compat.tree_flatten(tree)
    assert len(leaves) == 4 and compat.tree_unflatten(leaves, spec)[0]["b"] == [2, None]
    paths, _ = compat.tree_flatten_with_path(tree)
    assert [leaf for _, leaf in paths][1:] == leaves[1:]


def test_operators_know_their_aliases_and_randomness() -> None:
    aten = torch.ops.aten
    assert isinstance(aten.mm.default, compat.OpOverload)
    assert str(aten.mul.Tensor) == "aten.mul.Tensor" and str(aten.mm.default) == "aten.mm.default"
    assert torch.Tag.nondeterministic_seeded in aten.bernoulli.p.tags
    assert aten.copy_.default._schema.is_mutable and not aten.mm.default._schema.is_mutable
