"""Contracts of what `fxshard._torch.export` uses of torch."""

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.distributed_c10d as distributed_c10d
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor

from fxshard._torch import export, fake_tensors, modes, process_groups
from tests._torch.shared import aten

Joint = tuple[fx.GraphModule, list[Any], list[Any]]


def test_export_joint_describes_its_inputs(joint: Joint) -> None:
    graph_module, sources, _ = joint
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    assert len(sources) == len(placeholders), "a placeholder has no descriptor in meta['desc']"
    assert [export.input_source(desc) for desc in sources] == [
        ("param", "linear.weight"),
        ("param", "linear.bias"),
        ("buffer", "calls"),
        ("input", 0),
        ("input", 1),
        ("tangent", ("output", 0)),
    ], "placeholders are not parameters, buffers, inputs, tangents as their descriptors say"
    assert export.input_source(object())[0] == "other"


def test_export_joint_takes_parameters_of_subclasses_apart() -> None:
    linear = nn.Linear(4, 2)
    linear.weight = nn.Parameter(TwoTensor(torch.randn(2, 4), torch.randn(2, 4)))
    with fake_tensors.FakeTensorMode(allow_non_fake_inputs=True):
        _, sources, targets = export.export_joint(linear, (torch.randn(3, 4),))
    assert [export.input_source(desc) for desc in sources][:3] == [
        ("inner param", ("weight", "a")),
        ("inner param", ("weight", "b")),
        ("param", "bias"),
    ]
    assert targets


def test_export_joint_describes_its_outputs(joint: Joint) -> None:
    assert [export.output_source(desc) for desc in joint[2]] == [
        ("mutation", ("buffer", "calls")),
        ("output", 0),
        ("grad", ("param", "linear.weight")),
        ("grad", ("param", "linear.bias")),
        ("none", None),
        ("none", None),
        ("none", None),
    ], "results are not mutations, outputs, gradients as their descriptors say"
    assert export.output_source(object())[0] == "other"


def test_export_joint_keeps_operators_and_runs_forward_first(joint: Joint) -> None:
    nodes = [n for n in joint[0].graph.nodes if n.op == "call_function"]
    backward = [node.meta.get("partitioner_tag") == "is_backward" for node in nodes]
    assert any(backward), "backward nodes are no longer marked by partitioner_tag"
    assert backward == sorted(backward), "a forward node stands after a backward one"
    targets = {node.target for node in nodes}
    assert aten.addmm.default in targets, "operators are decomposed"
    assert aten.add_.Tensor not in targets, "the graph is not functional: it has in-place operators"
    for node in nodes:
        assert isinstance(node.target, export.OpOverload), f"{node.target} is no OpOverload"
        assert fake_tensors.is_fake(node.meta["val"]), "meta['val'] is no fake tensor"


@pytest.mark.parametrize(
    ("mode", "dims", "kernel"),
    [
        ("nearest", 2, "upsample_nearest2d"),
        ("nearest-exact", 1, "_upsample_nearest_exact1d"),
        ("linear", 1, "upsample_linear1d"),
        ("bilinear", 2, "upsample_bilinear2d"),
        ("bicubic", 2, "upsample_bicubic2d"),
        ("trilinear", 3, "upsample_trilinear3d"),
    ],
)
def test_interpolation_is_traced_as_one_kernel_each_way(mode: str, dims: int, kernel: str) -> None:
    class Resized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [nn.functional.interpolate(x * self.gain, scale_factor=2.0, mode=mode).sum()]

    overload = export.aten_operator(kernel)
    before = dict(overload.py_kernels)
    with fake_tensors.FakeTensorMode(), torch.enable_grad():
        graph_module, *_ = export.export_joint(Resized(), (torch.ones(1, 2, *[4] * dims),))
    assert overload.py_kernels == before and before, "what was taken away is back"
    targets = {str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"}
    assert {f"aten.{kernel}.default", f"aten.{kernel}_backward.default"} <= targets
    assert not [t for t in targets if "index" in t], "interpolation is decomposed"


def test_gradients_of_outputs_are_traced_dense_and_alone() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            y = x * self.gain
            parts = [y[:, ::2], y.t(), y[1:]]
            return [aten._unsafe_view(part, part.shape) for part in parts]

    with fake_tensors.FakeTensorMode(), torch.enable_grad():
        _, sources, _ = joint = export.export_joint(Parts(), (torch.ones(4, 6),))
    places = joint[0].graph.find_nodes(op="placeholder")
    both = zip(places, sources, strict=True)
    tangents = [n.meta["val"] for n, desc in both if export.input_source(desc)[0] == "tangent"]
    assert [t.stride() for t in tangents] == [(3, 1), (1, 6), (6, 1)]
    sizes = [t.untyped_storage().nbytes() for t in tangents]
    assert sizes == [4 * t.numel() for t in tangents], "a gradient is traced as a part of an output"


def test_a_function_gets_the_gradient_of_a_repeated_output_at_its_last_place() -> None:
    arrived: list[list[bool]] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.set_materialize_grads(False)
            y, z = x * 2, x * 3
            return y, z, y

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            arrived.append([grad is not None for grad in grads])
            return grads[2]

    a, _, b = Twice.apply(torch.ones(3, requires_grad=True))
    assert a is b
    (a.sum() + b.sum()).backward()
    assert arrived == [[False, False, True]]


def test_metadata_of_forward_reaches_the_nodes(joint: Joint) -> None:
    nodes = {n.target: n for n in joint[0].graph.nodes if n.op == "call_function"}
    stack = {"": ("Linear",)}
    assert nodes[aten.addmm.default].meta.get("nn_module_stack") == stack, (
        "forward nodes do not take nn_module_stack from fx.traceback.current_meta"
    )
    assert nodes[aten.mm.default].meta.get("fwd_nn_module_stack") == stack, (
        "backward nodes do not know the module stack of their forward (fwd_nn_module_stack)"
    )


def test_compiling() -> None:
    with pytest.raises(KeyError), export.compiling():
        assert torch.compiler.is_compiling(), "torch.compiler._is_compiling_flag has no effect"
        assert not torch.compiler.is_exporting(), "compiling() says exporting too"
        assert not torch.compiler.is_dynamo_compiling(), "compiling() says Dynamo too"
        raise KeyError
    assert not torch.compiler.is_compiling(), "the flag stays set after an error"


def test_exporting_is_false_under_compile_and_true_under_export() -> None:
    def told(x: Tensor) -> Any:
        return export.exporting(), x + 1

    class Told(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if export.exporting() else x - 1

    torch._dynamo.reset()
    assert torch.compile(told, backend="eager", fullgraph=True)(torch.ones(1))[0] is False
    exported = torch.export.export(Told(), (torch.ones(1),), strict=True).module()
    assert exported(torch.ones(1)).item() == 2 and not export.exporting()


def test_what_torch_says_of_tensors_that_another_trace_has_made() -> None:
    kept: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not kept:
                kept.append(torch.ones(3))
            return x * kept[0]

    said = []
    with fake_tensors.FakeTensorMode():
        x = torch.ones(3, requires_grad=True)
    for use in (
        lambda: export.export_joint(Keeps(), (x,)),  # runs forward twice
        lambda: kept[0] + torch.ones(3),
        lambda: torch.add(x, fake_tensors.FakeTensorMode().from_tensor(torch.ones(3))),
    ):
        with pytest.raises((AssertionError, RuntimeError)) as failure:
            use()
        said.append(next(t for t in export.KEPT_BY_FORWARD if str(failure.value).startswith(t)))
    first, *others, first_of_2_11 = export.KEPT_BY_FORWARD
    assert said[0] in (first, first_of_2_11)
    assert said[1:] == others


def test_op_overloads_tell_name_tags_and_schema() -> None:
    dropout = aten.native_dropout.default
    assert isinstance(dropout, export.OpOverload)
    assert str(aten.add.Tensor) == "aten.add.Tensor"
    assert str(aten.mm.default) == "aten.mm.default"
    assert torch.Tag.nondeterministic_seeded in dropout.tags, "random operators are not tagged so"
    assert torch.Tag.nondeterministic_seeded not in aten.mm.default.tags
    assert aten.copy_.default._schema.is_mutable and not aten.add.Tensor._schema.is_mutable


def group_contract(rank: int, world_size: int, timeout_s: float) -> None:
    world = dist.group.WORLD
    everyone = process_groups.group_store(world)
    assert process_groups.group_timeout(world) == datetime.timedelta(seconds=timeout_s), (
        "the timeout of the group's collectives is not where it was"
    )
    part = dist.new_group([0, 1])
    assert dist.get_process_group_ranks(part) == [0, 1]
    mine = process_groups.group_store(part)
    mine.set(f"contract/{rank}", "part")
    mine.wait([f"contract/{1 - rank}"], datetime.timedelta(seconds=100))
    assert mine.get(f"contract/{1 - rank}") == b"part"
    assert not everyone.check([f"contract/{rank}"]), "groups share one space of keys"
    assert mine.add("contract/count", 1) in (1, 2)
    with pytest.raises(RuntimeError):
        mine.wait(["contract/never"], datetime.timedelta(seconds=0.1))


def groups_again(rank: int, world_size: int) -> None:
    """torch's own way hangs here: a destroyed group's name comes again, and numbers differ."""
    parent = dist.group.WORLD
    assert parent is not None
    count = distributed_c10d._world.group_count
    others = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    distributed_c10d._world.group_count = count  # torch 2.14 counts these, and would hang itself
    everyone = list(range(world_size))
    names = []
    for _ in range(3):
        group = process_groups.new_group(everyone, parent)
        names.append(group.group_name)
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == world_size
        assert process_groups.group_timeout(group) == process_groups.group_timeout(parent)
        dist.destroy_process_group(group)
    assert len(set(names)) == 3
    shared = process_groups.shared_group(everyone, parent)
    assert process_groups.shared_group(everyone, parent) is shared
    assert process_groups.shared_group(everyone, parent, "gloo") is not shared
    assert process_groups.is_alive(shared) and not process_groups.is_alive(None)
    dist.destroy_process_group(shared)
    assert not process_groups.is_alive(shared)
    assert process_groups.shared_group(everyone, parent) is not shared
    if rank:
        process_groups.new_group([rank], parent)
    assert distributed_c10d._world.group_count == count, "a user's groups would have other names"
    for group in others:
        dist.destroy_process_group(group)


def test_groups_are_made_again_after_one_was_destroyed(ranks: Any) -> None:
    ranks(2).run(groups_again)


def gathers(rank: int, world_size: int) -> None:
    """gloo's own coalesced call promotes mixed dtypes, and reads the result in the first one."""
    process_groups.gather_one_by_one()
    group: Any = dist.group.WORLD
    parts = [torch.full((2, 2), float(rank)).t(), torch.arange(3, dtype=torch.bfloat16) + 3 * rank]
    wholes = [torch.empty(4, 2), torch.empty(6, dtype=torch.bfloat16)]
    work = group.allgather_into_tensor_coalesced(wholes, parts)
    work.wait()
    assert work._get_op_type() != COALESCED_GATHER
    assert wholes[0].tolist() == [[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2
    assert wholes[1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    gathered = functional_collectives.all_gather_tensor(torch.full((1,), float(rank)), 0, group)
    assert gathered.tolist() == [0.0, 1.0]
    numbers = torch.empty(2)
    group.allgather_into_tensor_coalesced([numbers], [torch.tensor(float(rank))]).wait()
    assert numbers.tolist() == [0.0, 1.0], "of tensors without dimensions"


COALESCED_GATHER = 6  # c10d::OpType (torch/csrc/distributed/c10d/Work.hpp)


def test_gathers_are_made_one_by_one(ranks: Any) -> None:
    ranks(2).run(gathers)


SHARDS = """
import torch, torch.distributed as dist, fxshard
dist.init_process_group("gloo", init_method="file://STORE", rank=0, world_size=1)
def kind():
    work = dist.group.WORLD.allgather_into_tensor_coalesced([torch.empty(1)], [torch.ones(1)])
    work.wait()
    return work._get_op_type()
before = kind()
fxshard.shard(torch.nn.Linear(2, 2))
print(before, kind())
"""


def test_who_shards_a_model_has_them_made_so(tmp_path: Path) -> None:
    code = SHARDS.replace("STORE", str(tmp_path / "store"))
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, (said.returncode, said.stdout, said.stderr)
    before, after = map(int, said.stdout.split())
    assert before == COALESCED_GATHER != after, "torch's gathers make other calls now"


ENDS = """
import sys, time, torch, torch.distributed as dist, fxshard
dist.init_process_group("gloo", init_method="file://STORE", rank=0, world_size=1)
fxshard.shard(torch.nn.Linear(2, 2))
sys.setswitchinterval(1000)
dist.group.WORLD._allgather_base(torch.empty(1), torch.ones(1))
end = time.monotonic() + 0.2
while time.monotonic() < end:
    pass  # the thread of gloo is done, and waits for the interpreter to drop its tensors
"""


def ends(code: str, store: Path) -> str:
    code = code.replace("STORE", str(store))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return run.stderr if run.returncode else ""


def test_a_process_ends_while_gloo_holds_tensors(tmp_path: Path) -> None:
    """Whoever shards a model calls `process_groups.let_go_before_exit`.

    Without it most of these end by "terminate called without an active exception" before Python
    3.14, not all: which thread gets the interpreter first is the system's to say.
    """
    assert [ends(ENDS, tmp_path / f"{i}") for i in range(3)] == [""] * 3


def test_group_store_and_timeout(ranks: Any) -> None:
    pool = ranks(2)
    pool.run(group_contract, 2 / 3 * pool.timeout_s)


def test_parameters_know_their_hooks() -> None:
    param = nn.Parameter(torch.ones(1))
    assert not param._backward_hooks and not param._post_accumulate_grad_hooks
    param.register_hook(lambda grad: None)
    param.register_post_accumulate_grad_hook(lambda param: None)
    assert param._backward_hooks and param._post_accumulate_grad_hooks


def test_aten_kernels_come_and_go() -> None:
    x = torch.randn(3)
    table = torch._C._dispatch_dump_table("aten::rms_norm")
    want = torch.rms_norm(x, (3,))
    with export.aten_kernels({("rms_norm", "AutogradCPU"): lambda x, *_: x}):
        assert torch.equal(torch.rms_norm(x, (3,)), x)
    assert torch.equal(torch.rms_norm(x, (3,)), want)
    assert torch._C._dispatch_dump_table("aten::rms_norm") == table


def test_an_operator_with_a_kernel_and_a_formula_is_not_decomposed() -> None:
    """What keeps ``_fused_rms_norm`` whole in a trace (torch/utils/_python_dispatch.py)."""

    class Rms(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [torch.rms_norm(x, (3,)).sum()]

    def operators() -> set[Any]:
        with fake_tensors.FakeTensorMode():
            x = torch.ones(2, 3, requires_grad=True)
        return {node.target for node in export.export_joint(Rms(), (x,))[0].graph.nodes}

    assert aten._fused_rms_norm.default not in operators()
    with export.aten_kernels({("_fused_rms_norm", "CPU"): lambda *_: None}):
        assert {aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default} <= operators()


def test_aten_names_are_those_with_a_kernel_for_the_key() -> None:
    names = export.aten_names("AutocastCPU")
    assert {"mm", "conv2d.padding"} <= set(names) and "relu" not in names
    assert export.aten_operator("conv2d.padding") is aten.conv2d.padding
    assert export.aten_operator("mm") is aten.mm.default


def test_attention_order_is_that_of_sdpa_kernel() -> None:
    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    assert export.attention_order()[:2] == [int(flash), int(efficient)]
    with sdpa_kernel([efficient, flash], set_priority=True):
        assert export.attention_order()[:2] == [int(efficient), int(flash)]


def test_descriptors_of_another_name(joint: Any) -> None:
    _, sources, targets = joint
    named = [export.of_name(d, f"other.{export.input_source(d)[1]}") for d in sources]
    params = [s for kind, s in map(export.input_source, named) if kind == "param"]
    assert params == ["other.linear.weight", "other.linear.bias"]
    renamed = [export.of_name(desc, "new") for desc in targets if desc is not None]
    found = [export.output_source(desc) for desc in renamed]
    assert ("grad", ("param", "new")) in found
    assert ("mutation", ("buffer", "new")) in found
    assert ("output", 0) in found


def test_the_name_of_a_higher_order_operator() -> None:
    class Mode(modes.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    operator = torch.ops.higher_order.cond
    with Mode(), pytest.raises(NotImplementedError) as failure:
        operator(torch.tensor(True), torch.sin, torch.cos, (torch.ones(2),))
    assert export.higher_order_operator(failure.value) == "cond"
    assert export.higher_order_operator(ValueError("x")) is None


def test_operators_are_found_by_name_alone() -> None:
    for found in (
        torch.ops.aten.mm.default,
        torch.ops.aten.add_.Tensor,
        torch.ops.prims.sin.default,
    ):
        assert export.operator_named(str(found)) is found
    for name in ("aten.mm", "aten.nope.default", "nope.mm.default", "os.path.join", "aten..mm", ""):
        assert export.operator_named(name) is None
    assert export.operator_named("load_library.x.default") is None
    assert export.operator_named("higher_order.cond.default") is None
