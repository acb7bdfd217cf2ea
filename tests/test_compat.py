"""One contract per name that fxshard takes from torch without a promise: which of them changed."""

import dataclasses
import datetime
import gc
import io
import itertools
import operator
import re
import subprocess
import sys
import weakref
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch._decomp.decompositions as _decompositions
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

from fxshard import compat

aten = torch.ops.aten


class Small(nn.Module):
    """One parameter, one buffer that is written, one submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> list[Tensor]:
        self.calls.add_(1)
        return [(self.linear(x) * mask).sum()]


@pytest.fixture(scope="module")
def joint() -> tuple[fx.GraphModule, list[Any], list[Any]]:
    mode = compat.FakeTensorMode()
    with mode:
        module = Small()
        args = (torch.ones(4, 3), torch.ones(4, 2, dtype=torch.bool))

    def enter(module: nn.Module, args: Any) -> None:
        compat.with_current_meta("nn_module_stack", {"": (type(module).__name__,)})

    handle = torch.nn.modules.module.register_module_forward_pre_hook(enter)
    with handle, torch.fx.traceback.preserve_node_meta():
        return compat.export_joint(module, args)


Joint = tuple[fx.GraphModule, list[Any], list[Any]]


def test_export_joint_describes_its_inputs(joint: Joint) -> None:
    graph_module, sources, _ = joint
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    assert len(sources) == len(placeholders), "a placeholder has no descriptor in meta['desc']"
    assert [compat.input_source(desc) for desc in sources] == [
        ("param", "linear.weight"),
        ("param", "linear.bias"),
        ("buffer", "calls"),
        ("input", 0),
        ("input", 1),
        ("tangent", ("output", 0)),
    ], "placeholders are not parameters, buffers, inputs, tangents as their descriptors say"
    assert compat.input_source(object())[0] == "other"


def test_export_joint_describes_its_outputs(joint: Joint) -> None:
    assert [compat.output_source(desc) for desc in joint[2]] == [
        ("mutation", ("buffer", "calls")),
        ("output", 0),
        ("grad", ("param", "linear.weight")),
        ("grad", ("param", "linear.bias")),
        ("none", None),
        ("none", None),
        ("none", None),
    ], "results are not mutations, outputs, gradients as their descriptors say"
    assert compat.output_source(object())[0] == "other"


def test_export_joint_keeps_operators_and_runs_forward_first(joint: Joint) -> None:
    nodes = [n for n in joint[0].graph.nodes if n.op == "call_function"]
    backward = [node.meta.get("partitioner_tag") == "is_backward" for node in nodes]
    assert any(backward), "backward nodes are no longer marked by partitioner_tag"
    assert backward == sorted(backward), "a forward node stands behind a backward one"
    targets = {node.target for node in nodes}
    assert aten.addmm.default in targets, "operators are decomposed"
    assert aten.add_.Tensor not in targets, "the graph is not functional: it has in-place operators"
    for node in nodes:
        assert isinstance(node.target, compat.OpOverload), f"{node.target} is no OpOverload"
        assert compat.is_fake(node.meta["val"]), "meta['val'] is no fake tensor"


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_modules_are_traced_as_eager_runs_them(kind: type[nn.RNNBase]) -> None:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(3, 4, num_layers=3, dropout=0.5, bidirectional=True)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [self.rnn(x)[0].sum()]

    before = dict(vars(_decompositions))
    with compat.FakeTensorMode() as mode:
        model, x = Output(), torch.randn(5, 2, 3)
    with mode, torch.enable_grad():
        graph_module, *_ = compat.export_joint(model, (x,))
    assert dict(vars(_decompositions)) == before, "what was patched stays patched"
    targets = [node.target for node in graph_module.graph.nodes]
    assert targets.count(aten.native_dropout.default) == 2, "no dropout between the layers"
    fused = [t for t in targets if "mkldnn" in str(t)]
    assert not fused, "an LSTM on floats is oneDNN's inference kernel"


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

    overload = compat.aten_operator(kernel)
    before = dict(overload.py_kernels)
    with compat.FakeTensorMode(), torch.enable_grad():
        graph_module, *_ = compat.export_joint(Resized(), (torch.ones(1, 2, *[4] * dims),))
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

    with compat.FakeTensorMode(), torch.enable_grad():
        _, sources, _ = joint = compat.export_joint(Parts(), (torch.ones(4, 6),))
    places = joint[0].graph.find_nodes(op="placeholder")
    both = zip(places, sources, strict=True)
    tangents = [n.meta["val"] for n, desc in both if compat.input_source(desc)[0] == "tangent"]
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


def test_which_convolutions_onednn_takes() -> None:
    """Of fake tensors too, under their mode; torch names them, but for the transposed one."""
    with compat.FakeTensorMode():
        x, weight = torch.ones(16, 4, 5, 5), torch.ones(4, 4, 3, 3)
        how: Any = ([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        assert compat.convolves_with_onednn(x, weight, *how)
        assert compat.convolves_with_onednn(x, weight, *how[:4], True, [0, 0], 1)
        assert not compat.convolves_with_onednn(x.double(), weight.double(), *how)


def test_metadata_of_forward_reaches_the_nodes(joint: Joint) -> None:
    nodes = {n.target: n for n in joint[0].graph.nodes if n.op == "call_function"}
    stack = {"": ("Linear",)}
    assert nodes[aten.addmm.default].meta.get("nn_module_stack") == stack, (
        "forward nodes do not take nn_module_stack from fx.traceback.current_meta"
    )
    assert nodes[aten.mm.default].meta.get("fwd_nn_module_stack") == stack, (
        "backward nodes do not know the module stack of their forward (fwd_nn_module_stack)"
    )


def test_with_current_meta_puts_back_what_was_there() -> None:
    current = torch.fx.traceback.current_meta
    assert "fxshard_test" not in current
    outer = compat.with_current_meta("fxshard_test", 1)
    inner = compat.with_current_meta("fxshard_test", 2)
    assert current["fxshard_test"] == 2, "fx.traceback.current_meta is a copy"
    inner()
    assert current["fxshard_test"] == 1
    outer()
    assert "fxshard_test" not in current


def test_current_meta_is_what_new_nodes_inherit() -> None:
    restore = compat.with_current_meta("fxshard_test", 1)
    assert compat.current_meta()["fxshard_test"] == 1
    restore()
    assert "fxshard_test" not in compat.current_meta()


def test_checkpoints_inline_marks_forward_and_backward() -> None:
    """By what transformers holds (``checkpoint`` itself), in both modes, and with a policy."""
    call = torch.utils.checkpoint.checkpoint
    inner = partial(call, torch.tanh, use_reentrant=True)
    policy = partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, [aten.tanh.default]
    )

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            x = torch.sin(x)
            x = inner(x)
            x = call(lambda x: torch.exp(inner(x)), x, use_reentrant=False)
            return [call(torch.tanh, x, use_reentrant=False, context_fn=policy).sum()]

    with compat.FakeTensorMode(), torch.fx.traceback.preserve_node_meta():
        x = torch.ones(3, requires_grad=True)
        with compat.checkpoints_inline():
            graph = compat.export_joint(Checkpointed(), (x,))[0].graph

    def marks(target: Any) -> list[int | None]:
        nodes = graph.find_nodes(op="call_function", target=target)
        return [compat.checkpoint_of(node) for node in nodes]

    first, second, third = marks(aten.tanh.default)
    assert None not in (first, second, third) and len({first, second, third}) == 3, (
        "operators inside torch.utils.checkpoint are not marked: checkpoint() does not look up "
        "_checkpoint_without_reentrant_generator and CheckpointFunction when it is called"
    )
    assert marks(aten.exp.default) == [second], "a checkpoint inside a checkpoint has its own mark"
    assert marks(aten.sin.default) == marks(aten.cos.default) == [None], "what is outside is marked"
    assert marks(aten.tanh_backward.default) == [third, second, first], (
        "backward nodes do not take meta['custom'] of their forward"
    )
    saved = [compat.is_saved_by_policy(n) for n in graph.nodes if n.target is aten.tanh.default]
    assert saved == [False, False, True], "policies do not write meta['recompute'] under a trace"


def test_checkpoints_inline_is_undone() -> None:
    module = torch.utils.checkpoint
    before = (module._checkpoint_without_reentrant_generator, module.CheckpointFunction)
    with pytest.raises(KeyError), compat.checkpoints_inline():
        raise KeyError
    assert before == (module._checkpoint_without_reentrant_generator, module.CheckpointFunction)


def test_compiling() -> None:
    with pytest.raises(KeyError), compat.compiling():
        assert torch.compiler.is_compiling(), "torch.compiler._is_compiling_flag has no effect"
        assert not torch.compiler.is_exporting(), "compiling() says exporting too"
        assert not torch.compiler.is_dynamo_compiling(), "compiling() says Dynamo too"
        raise KeyError
    assert not torch.compiler.is_compiling(), "the flag stays set after an error"


def test_exporting_is_false_under_compile_and_true_under_export() -> None:
    def told(x: Tensor) -> Any:
        return compat.exporting(), x + 1

    class Told(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if compat.exporting() else x - 1

    torch._dynamo.reset()
    assert torch.compile(told, backend="eager", fullgraph=True)(torch.ones(1))[0] is False
    exported = torch.export.export(Told(), (torch.ones(1),), strict=True).module()
    assert exported(torch.ones(1)).item() == 2 and not compat.exporting()


@pytest.mark.parametrize("read", ["item", "bool", "nonzero", "mask"])
def test_fake_tensors_refuse_to_tell_values(read: str) -> None:
    with compat.FakeTensorMode():
        x = torch.ones(3)
        with pytest.raises(compat.DATA_DEPENDENT_ERRORS):
            if read == "item":
                x.sum().item()
            elif read == "bool":
                bool(x.sum() > 0)
            else:
                x.nonzero() if read == "nonzero" else x[x > 0]


def test_what_torch_says_of_tensors_that_another_trace_has_made() -> None:
    kept: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not kept:
                kept.append(torch.ones(3))
            return x * kept[0]

    said = []
    with compat.FakeTensorMode():
        x = torch.ones(3, requires_grad=True)
    for use in (
        lambda: compat.export_joint(Keeps(), (x,)),  # runs forward twice
        lambda: kept[0] + torch.ones(3),
        lambda: torch.add(x, compat.FakeTensorMode().from_tensor(torch.ones(3))),
    ):
        with pytest.raises((AssertionError, RuntimeError)) as failure:
            use()
        said.append(next(t for t in compat.KEPT_BY_FORWARD if str(failure.value).startswith(t)))
    first, *others, first_of_2_11 = compat.KEPT_BY_FORWARD
    assert said[0] in (first, first_of_2_11)
    assert said[1:] == others


def test_fake_tensors_allocate_nothing_and_share_storages() -> None:
    with compat.FakeTensorMode():
        huge = torch.empty(2**40)
        view = huge.view(2, -1).t()[1:]
        copy = view.clone()
    assert compat.is_fake(huge) and not compat.is_fake(torch.ones(1))
    assert huge.untyped_storage().nbytes() == 4 * 2**40, "a fake storage does not tell its size"
    assert view.untyped_storage() is huge.untyped_storage(), (
        "a fake view has another storage object than its base: aliases are told by identity"
    )
    assert copy.untyped_storage() is not huge.untyped_storage()


def test_op_overloads_tell_name_tags_and_schema() -> None:
    dropout = aten.native_dropout.default
    assert isinstance(dropout, compat.OpOverload)
    assert str(aten.add.Tensor) == "aten.add.Tensor"
    assert str(aten.mm.default) == "aten.mm.default"
    assert torch.Tag.nondeterministic_seeded in dropout.tags, "random operators are not tagged so"
    assert torch.Tag.nondeterministic_seeded not in aten.mm.default.tags
    assert aten.copy_.default._schema.is_mutable and not aten.add.Tensor._schema.is_mutable


def test_dispatch_modes_see_backward_and_collectives() -> None:
    seen: list[str] = []

    class Names(compat.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with compat.fake_process_group(0, 2), Names():
        torch.ones(2, requires_grad=True).sin().sum().backward()
        group = dist.group.WORLD
        group.allgather_into_tensor_coalesced([torch.ones(4)], [torch.ones(2)]).wait()
    assert "aten.cos.default" in seen, "a mode no longer sees what backward runs"
    assert "c10d.allgather_into_tensor_coalesced_.default" in seen, (
        "a mode no longer sees the calls of a process group"
    )


# -- trees ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Box:
    x: Any
    rest: Any = None
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


Point = namedtuple("Point", "a b")


def test_trees_open_dataclasses() -> None:
    tree = ([1, {"k": Box(2, Frozen(3))}], Point(4, Box(5)))
    leaves, spec = compat.tree_flatten(tree)
    assert leaves == [1, 2, 3, 1, 4, 5, None, 1]
    back = compat.tree_unflatten([leaf and leaf * 10 for leaf in leaves], spec)
    assert back[1] == Point(40, back[1].b) and isinstance(back[1].b, Box)
    inner = back[0][1]["k"]
    assert (inner.x, inner.rest, inner.made) == (20, Frozen(30), 10), "__post_init__ ran again"
    with_path, same = compat.tree_flatten_with_path(tree)
    assert same == spec and [leaf for _, leaf in with_path] == leaves
    names = ["".join(map(str, path)) for path, _ in with_path]
    assert names[1:3] == ["[0][1]['k'].x", "[0][1]['k'].rest.x"]


def test_trees_without_dataclasses_are_torch_s() -> None:
    tree = ({"a": [1, (2, None)]}, Point(3, "s"))
    leaves, spec = compat.tree_flatten(tree)
    theirs = pytree.tree_flatten(tree)
    assert (leaves, spec) == theirs and hash(spec) == hash(theirs[1]), "specs cannot be keys"
    assert spec != compat.tree_flatten(({"b": [1, (2, None)]}, Point(3, "s")))[1]
    assert isinstance(spec, compat.TreeSpec)
    assert Box not in pytree.SUPPORTED_NODES, "the user's class became known to all of torch"


def test_takes_flat_inputs() -> None:
    module = nn.Linear(3, 2)
    exported = torch.export.export(module, (torch.ones(1, 3),)).module()
    assert compat.takes_flat_inputs(exported.graph), "torch.export's modules look like others now"
    assert not compat.takes_flat_inputs(fx.symbolic_trace(module).graph)


def test_wrap_policies() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    linears = {model[0], model[1][0]}
    policy = ModuleWrapPolicy({nn.Linear})
    assert compat.is_wrap_policy(policy) and compat.run_wrap_policy(policy, model) == linears
    custom = CustomPolicy(lambda module: isinstance(module, nn.ReLU))
    assert compat.is_wrap_policy(custom) and compat.run_wrap_policy(custom, model) == {model[2]}
    assert not compat.is_wrap_policy(lambda name, module: True)


# -- process groups -------------------------------------------------------------------------------


def test_a_fake_process_group() -> None:
    with pytest.raises(KeyError), compat.fake_process_group(1, 3):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
        group = dist.group.WORLD
        assert dist.get_backend(group) == "fake"
        ones, gathered = torch.ones(2), torch.zeros(6)
        group.allgather_into_tensor_coalesced([gathered], [ones]).wait()
        assert gathered.tolist() == [1.0] * 6, "a fake all-gather does not repeat the input"
        reduced = torch.zeros(2)
        options = dist.ReduceScatterOptions()
        group.reduce_scatter_tensor_coalesced([reduced], [torch.arange(6.0)], options).wait()
        raise KeyError
    assert not dist.is_initialized(), "the fake group outlives its block"


def group_contract(rank: int, world_size: int, timeout_s: float) -> None:
    world = dist.group.WORLD
    everyone = compat.group_store(world)
    assert compat.group_timeout(world) == datetime.timedelta(seconds=timeout_s), (
        "the timeout of the group's collectives is not where it was"
    )
    part = dist.new_group([0, 1])
    assert dist.get_process_group_ranks(part) == [0, 1]
    mine = compat.group_store(part)
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
    others = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    everyone = list(range(world_size))
    names = []
    for _ in range(3):
        group = compat.new_group(everyone, parent)
        names.append(group.group_name)
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == world_size
        assert compat.group_timeout(group) == compat.group_timeout(parent)
        dist.destroy_process_group(group)
    assert len(set(names)) == 3
    for group in others:
        dist.destroy_process_group(group)


def test_groups_are_made_again_after_one_was_destroyed(ranks: Any) -> None:
    ranks(2).run(groups_again)


def test_a_backward_knows_which_leaves_get_gradients() -> None:
    weight, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[list[bool]] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
            return weight * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            seen.append([compat.will_accumulate(node) for node, _ in ctx.next_functions])
            return grad, grad

    Product.apply(weight, x).sum().backward()
    Product.apply(weight, x).sum().backward(inputs=[x])
    torch.autograd.grad(Product.apply(weight, x * 1).sum(), x)
    assert seen == [[True, True], [False, True], [False, True]]
    torch.autograd.grad(Product.apply(weight, x).sum(), weight)
    assert seen[-1] == [False, False]


def gathers(rank: int, world_size: int) -> None:
    """gloo's own coalesced call promotes mixed dtypes, and reads the result in the first one."""
    compat.gather_one_by_one()
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
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    before, after = map(int, said.stdout.split())
    assert before == COALESCED_GATHER != after, "torch's gathers make other calls now"


def test_plain_torch_functions_pass_subclasses_by() -> None:
    seen: list[Any] = []

    class Loud(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    loud = torch.ones(2).as_subclass(Loud)
    with compat.plain_torch_functions():
        assert type(loud + 1) is Tensor and not seen
    assert type(loud + 1) is Loud and seen


def test_group_store_and_timeout(ranks: Any) -> None:
    pool = ranks(2)
    pool.run(group_contract, 2 / 3 * pool.timeout_s)


# -- members of classes that other files use ------------------------------------------------------


def test_the_local_part_of_a_dtensor_can_be_replaced() -> None:
    with compat.fake_process_group(0, 2):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        param = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
        local = torch.zeros(2)
        param._local_tensor = local
        assert param.to_local().data_ptr() == local.data_ptr(), "sharding.Slot.settle has no effect"


def test_parameters_know_their_hooks() -> None:
    param = nn.Parameter(torch.ones(1))
    assert not param._backward_hooks and not param._post_accumulate_grad_hooks
    param.register_hook(lambda grad: None)
    param.register_post_accumulate_grad_hook(lambda param: None)
    assert param._backward_hooks and param._post_accumulate_grad_hooks


def test_every_name_has_a_contract() -> None:
    own = {
        name
        for name, value in vars(compat).items()
        if getattr(value, "__module__", None) == compat.__name__ and not name.startswith("_")
    }
    text = Path(__file__).read_text()
    assert [
        name for name in sorted(own | set(compat.__all__)) if f"compat.{name}" not in text
    ] == []


def test_dtensors_stand_on_their_local_tensor() -> None:
    with compat.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(2, 3)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        assert compat.local_tensor(sharded).data_ptr() == local.data_ptr()
        other = torch.zeros(2, 3)
        compat.set_local_tensor(sharded, other)
        assert compat.local_tensor(sharded) is other
        assert torch.equal(sharded.to_local(), other) and sharded.shape == (4, 3)


def test_a_dtensor_is_made_like_another() -> None:
    with compat.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        like = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        local = torch.zeros(2, 3)
        made = compat.dtensor_like(local, like)
        assert compat.local_tensor(made) is local and not made.requires_grad
        assert (made.shape, made.placements) == (like.shape, like.placements)
        assert made.device_mesh == mesh


def test_foreach_copy_casts_in_one_operator() -> None:
    tensors = [torch.randn(2, 3), torch.randn(5)]
    into = [torch.empty_like(t, dtype=torch.bfloat16) for t in tensors]
    with torch.profiler.profile() as seen:
        compat.foreach_copy(into, tensors)
    assert all(torch.equal(i, t.bfloat16()) for i, t in zip(into, tensors, strict=True))
    assert [e.count for e in seen.key_averages() if e.key == "aten::_foreach_copy_"] == [1]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_seen(register: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not compat.has_gradient_hooks(parameter)
    getattr(parameter, register)(lambda _: None)
    assert compat.has_gradient_hooks(parameter)


def test_fake_tensors_made_directly_are_those_of_the_mode() -> None:
    mode = compat.FakeTensorMode()
    with mode:
        like = torch.empty(4, 6, dtype=torch.bfloat16)
        seen = [like.t(), like[1:3], like.view(-1)]
    made = compat.fake_empty(mode, (4, 6), torch.bfloat16, torch.device("cpu"))
    views = [
        compat.fake_view(mode, made, v) for v in (Tensor.t, lambda x: x[1:3], lambda x: x.view(-1))
    ]
    for ours, theirs in zip([made, *views], [like, *seen], strict=True):
        assert compat.is_fake(ours) and ours.fake_mode is mode  # type: ignore[attr-defined]
        assert (ours.shape, ours.stride(), ours.dtype) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
        )
        assert (ours.storage_offset(), ours.device) == (theirs.storage_offset(), theirs.device)
        assert ours.untyped_storage().nbytes() == 48
    assert len({id(t.untyped_storage()) for t in [made, *views]}) == 1
    # The same views, in storages of another that lies alike.
    storage = torch.UntypedStorage(48, device="meta")
    for over, view in zip((compat.fake_over(mode, v, storage) for v in views), views, strict=True):
        assert compat.is_fake(over) and over.untyped_storage() is storage
        assert (over.shape, over.stride(), over.dtype) == (view.shape, view.stride(), view.dtype)
        assert (over.storage_offset(), over.device) == (view.storage_offset(), view.device)
    with mode:  # operators take them
        assert (made + views[2].view(4, 6)).shape == (4, 6)


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda", "meta"])
def test_a_fake_tensor_made_directly_is_what_its_constructor_makes(device: str) -> None:
    home = torch.device(device)
    mode = compat.FakeTensorMode()
    mode.allow_meta = True
    plain = [torch.empty(2, 3, dtype=torch.float16, device="meta") for _ in range(2)]
    theirs = compat.FakeTensor(mode, plain[0], home)
    ours = compat._fake(mode, plain[1], home)
    assert type(ours) is type(theirs)
    mine = {**vars(ours)}
    assert mine == vars(theirs) and mine["fake_mode"] is mode
    assert ours.untyped_storage() is plain[1].untyped_storage()
    for said in (
        *(torch._C._dispatch_keys, Tensor.size, Tensor.stride, Tensor.storage_offset),
        *(lambda t: t.dtype, lambda t: t.device, lambda t: t.requires_grad, lambda t: t.is_leaf),
        *(lambda t: t._version, lambda t: t._is_view(), lambda t: t.grad_fn, lambda t: t.layout),
    ):
        assert said(ours) == said(theirs)  # type: ignore[operator]
    mode._allow_unsafe_data_ptr_access = False
    refusals = []
    for make in (compat.FakeTensor, compat._fake):
        fake = make(mode, torch.empty(2, device="meta"), home)
        with pytest.raises(RuntimeError) as refused:
            fake.data_ptr()
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]
    # Attributes are each one's own, and no other mode's.
    ours.constant = plain[0]  # type: ignore[attr-defined]
    other = compat.FakeTensorMode()
    other.allow_meta = True
    third = compat._fake(other, plain[0], home)
    assert third.fake_mode is other and third.constant is None  # type: ignore[attr-defined]
    assert ours.fake_mode is mode  # type: ignore[attr-defined]


def test_a_fake_tensor_made_directly_computes_and_needs_gradients() -> None:
    mode = compat.FakeTensorMode()
    ours = compat.fake_empty(mode, (2, 3), torch.float32, torch.device("cpu"))
    ours.requires_grad_()
    with mode:
        (ours @ torch.ones(3, 4)).sum().backward()
        mask = torch.ones(2, 3, dtype=torch.bool)
    assert ours.grad is not None and ours.grad.shape == (2, 3)
    assert ours.grad.fake_mode is mode  # type: ignore[attr-defined]
    with mode, pytest.raises(compat.DATA_DEPENDENT_ERRORS):
        bool(ours.detach().masked_fill(mask, 0.0).sum() > 0)


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
    at_once = compat.copy_graph(graph)
    at_once.lint()
    for one, other in zip(at_once.nodes, graph.nodes, strict=True):
        assert one.graph is at_once and one.meta == other.meta and one.meta is not other.meta
    before = _all_of(graph)
    assert _all_of(at_once) == _all_of(by_node)
    at_once.erase_node(list(at_once.nodes)[-1])
    assert _all_of(_graph_by_hand()) == before


def test_a_node_appended_is_that_of_create_node() -> None:
    one, other = fx.Graph(), fx.Graph()
    for graph, make in ((one, partial(compat.append_node, one)), (other, other.create_node)):
        a = graph.placeholder("a")
        for _ in range(2):  # the second time the name is taken
            make("call_function", aten.cat.default, ([a, a], 1), {}, "cat_3")
        make("call_function", aten.add.Tensor, (a, 1), {"alpha": 2}, "sum")
    assert _all_of(one) == _all_of(other)
    owned = fx.GraphModule({}, one).graph
    with pytest.raises(AssertionError, match="hooks"):
        compat.append_node(owned, "placeholder", "b", (), {}, "b")


def test_gradients_arrive_in_a_list_whose_items_die_when_they_are_taken_out() -> None:
    seen: list[Any] = []

    class Doubled(torch.autograd.Function):
        boxed_grads_call = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Tensor | None:
            grads = compat.boxed(given)
            grad = grads.pop()
            assert grad is not None and not grads
            seen.append(weakref.ref(grad.untyped_storage()))
            result = grad * 2
            del grad
            seen.append(seen[0]() is None)
            return result

    leaf = torch.ones(3, requires_grad=True)
    (Doubled.apply(leaf) * 3).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [6.0, 6.0, 6.0]
    assert seen[1] is compat.BOXED_GRADS


def test_without_a_reduce_dtype_fsdp2_reduces_as_stored_or_as_computed() -> None:
    seen: list[torch.dtype] = []

    class Reductions(compat.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "reduce_scatter" in str(func):
                seen.extend(t.dtype for t in pytree.tree_leaves(args) if isinstance(t, Tensor))
            return func(*args, **(kwargs or {}))

    with compat.fake_process_group(0, 2):
        model = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        with Reductions():
            model(torch.ones(2, 4)).sum().backward()
    assert set(seen) == {torch.float32 if compat.REDUCES_AS_STORED else torch.bfloat16}


def test_what_autograd_itself_does_to_gradients_is_told_from_what_the_model_does() -> None:
    class Scaled(nn.Module):
        """Reads one bf16 parameter twice beside fp32, and one that it casts itself."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.offset = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [((x * self.gain + self.offset.float()) * self.gain).sum()]

    with compat.FakeTensorMode():
        model, x = Scaled(), torch.ones(2, 3)
    with torch.fx.traceback.preserve_node_meta():
        graph_module, _, targets = compat.export_joint(model, (x,))
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    sources = [compat.output_source(desc) for desc in targets]
    by_source = dict(zip(sources, output.args[0], strict=True))
    gain, offset = (by_source["grad", ("param", name)] for name in ("gain", "offset"))
    assert compat.sums_gradients(gain)
    marked = {"autograd_backward" in node.meta for node in graph.nodes} != {False}
    assert marked or not compat.REDUCES_AS_STORED  # torch 2.11 has no such mark, and nobody asks
    assert [compat.casts_gradient(part) for part in gain.args] == [marked, marked]
    assert offset.target is aten._to_copy.default and not compat.casts_gradient(offset)
    ours = [node for node in graph.nodes if compat.casts_gradient(node)]
    assert len(ours) == 2 * marked and sum(compat.sums_gradients(node) for node in graph.nodes) == 1


def test_versions_count_changes_in_place_through_views() -> None:
    base = torch.ones(4)
    before = compat.version(base)
    base[:2].add_(1)
    assert compat.version(base) > before
    with torch.inference_mode():
        assert compat.version(torch.ones(1)) == 0


def test_a_dtensor_takes_over_the_storage_offset_of_its_local_tensor() -> None:
    with compat.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.arange(8.0)[2:].view(2, 3)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        assert sharded.storage_offset() == 2, "compat.stand_in may go"
        with pytest.raises(RuntimeError, match="invalid python storage"):
            torch.save(sharded, io.BytesIO())
        like = compat.stand_in(local)
        assert (like.shape, like.dtype, like.storage_offset()) == (local.shape, local.dtype, 0)
        shape, stride = (4, 3), (3, 1)
        savable = nn.Parameter(
            DTensor.from_local(like, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        )
        compat.set_local_tensor(savable, local)
        torch.save(savable, io.BytesIO())
        assert torch.equal(savable.to_local(), local) and savable.stride() == stride
        assert compat.stand_in(local[:0]).shape == (0, 3)


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_pre_hook", "forward pre-hook"),
        ("register_forward_hook", "forward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
        ("register_full_backward_hook", "backward hook"),
    ],
)
def test_hooks_of_a_module_are_seen_and_have_numbers_of_their_own(register: str, kind: str) -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert compat.module_hooks(module) == [] and compat.hook_numbers([module, other]) == ()

    def hook(*_: Any) -> None: ...

    handles = [getattr(each, register)(hook) for each in (module, other)]
    ((found, number, function),) = compat.module_hooks(module)
    assert (found, function) == (kind, hook)
    first = compat.hook_numbers([module, other])
    assert first[0] == number and len(set(first)) == 2
    handles[0].remove()
    assert compat.hook_numbers([module, other]) == first[1:]
    getattr(module, register)(hook)
    assert compat.hook_numbers([module])[0] not in first


def test_aten_kernels_come_and_go() -> None:
    x = torch.randn(3)
    table = torch._C._dispatch_dump_table("aten::rms_norm")
    want = torch.rms_norm(x, (3,))
    with compat.aten_kernels({("rms_norm", "AutogradCPU"): lambda x, *_: x}):
        assert torch.equal(torch.rms_norm(x, (3,)), x)
    assert torch.equal(torch.rms_norm(x, (3,)), want)
    assert torch._C._dispatch_dump_table("aten::rms_norm") == table


def test_an_operator_with_a_kernel_and_a_formula_is_not_decomposed() -> None:
    """What keeps ``_fused_rms_norm`` whole in a trace (torch/utils/_python_dispatch.py)."""

    class Rms(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [torch.rms_norm(x, (3,)).sum()]

    def operators() -> set[Any]:
        with compat.FakeTensorMode():
            x = torch.ones(2, 3, requires_grad=True)
        return {node.target for node in compat.export_joint(Rms(), (x,))[0].graph.nodes}

    assert aten._fused_rms_norm.default not in operators()
    with compat.aten_kernels({("_fused_rms_norm", "CPU"): lambda *_: None}):
        assert {aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default} <= operators()


def test_aten_names_are_those_with_a_kernel_for_the_key() -> None:
    names = compat.aten_names("AutocastCPU")
    assert {"mm", "conv2d.padding"} <= set(names) and "relu" not in names
    assert compat.aten_operator("conv2d.padding") is aten.conv2d.padding
    assert compat.aten_operator("mm") is aten.mm.default


def test_autocast_can_be_passed_by_and_seen() -> None:
    x = torch.ones(2, 2)
    assert not compat.inside_autocast()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compat.inside_autocast() and (x @ x).dtype == torch.bfloat16
        with compat.without_autocast("cpu"):
            assert (x @ x).dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        assert compat.inside_autocast()
    assert not compat.inside_autocast()


def test_attention_order_is_that_of_sdpa_kernel() -> None:
    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    assert compat.attention_order()[:2] == [int(flash), int(efficient)]
    with sdpa_kernel([efficient, flash], set_priority=True):
        assert compat.attention_order()[:2] == [int(efficient), int(flash)]


def test_inductor_source_is_a_module_with_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is built; autocast around it changes nothing; the call is boxed and drops."""
    from torch._inductor.async_compile import AsyncCompile

    def build(*args: Any) -> None:
        raise AssertionError("a kernel was built")

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", build)
    mode = compat.FakeTensorMode()
    with mode:
        values = [torch.ones(4, 8), torch.ones(8, 8)]
    graph = fx.symbolic_trace(lambda x, y: (torch.sigmoid(x @ y) * 2.0,)).graph
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = compat.inductor_source(graph, values, mode)
        assert isinstance(made, compat.Generated)
    assert "args.clear()" in made.source and "del arg0_1" in made.source
    assert "bfloat16" not in made.source
    assert "async_compile.wait(globals())" in made.source, "loading waits elsewhere"
    assert "def call(" in made.source and "empty_strided_cpu(" in made.source
    assert made.constants == {} and made.aligned == ()
    known = {"assert_size_stride", "assert_size_stride_grouped", "assert_alignment"}
    _, body = made.source.split("def call(", 1)
    assert set(re.findall(r"\bassert_\w+", body)) <= known, "regions.py does not know them all"


def test_inductor_source_keeps_eagers_random_kernels() -> None:
    mode = compat.FakeTensorMode()
    graph = fx.Graph()
    x = graph.placeholder("x")
    drawn = graph.call_function(aten.native_dropout.default, (x, 0.5, True))
    graph.output(tuple(graph.call_function(operator.getitem, (drawn, i)) for i in range(2)))
    with mode:
        values = [torch.ones(4, 8)]
    assert "aten.native_dropout" in compat.inductor_source(graph, values, mode).source


def test_outside_autocast_nothing_is_cast() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with compat.outside_autocast():
            assert (x @ x).dtype is torch.float32


def test_inductor_cache_dir_is_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert compat.inductor_cache_dir() == str(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    assert Path(default_cache_dir()).is_absolute()


def test_inductor_key_is_of_options_and_threads() -> None:
    import torch._inductor.config as config

    key = compat.inductor_key()
    assert compat.inductor_key() == key and torch.__version__ in key
    with config.patch(epilogue_fusion=not config.epilogue_fusion):
        assert compat.inductor_key() != key


def test_extern_kernels_have_matrix_products() -> None:
    out = torch.empty(2, 2)
    compat.extern_kernels().mm(torch.ones(2, 3), torch.ones(3, 2), out=out)
    assert torch.equal(out, torch.full((2, 2), 3.0))


def test_symbolic_sizes_collect_what_is_asked_of_them() -> None:
    env = compat.ShapeEnv(duck_shape=False)
    rows, columns = (compat.symbolic_size(env, name, 8) for name in ("rows", "columns"))
    with compat.FakeTensorMode(shape_env=env):
        x = torch.empty(rows, columns)
        assert x.view(-1).shape[0] == 64 and not env.replacements
    symbol = compat.expression(rows)
    assert symbol != compat.expression(columns), "equal sizes became one symbol"
    assert compat.expression(rows * 2) == 2 * symbol and isinstance(rows, compat.SYMBOLIC)
    assert env.var_to_range[symbol].lower == 2
    assert rows < 10
    assert [str(guard.expr) for guard in env.guards][-1] == str(symbol < 10)
    assert rows == columns and env.simplify(symbol) == env.simplify(compat.expression(columns))


def test_dynamo_gives_one_graph_and_keeps_nothing() -> None:
    linear, x = nn.Linear(3, 3), torch.ones(2, 3)
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return lambda *given: graph(*given)

    for _ in range(12):  # more often than one code object may be compiled
        assert torch.equal(compat.dynamo(linear, (x,), {}, backend), linear(x))
    assert len(graphs) == 12
    (node,) = (node for node in graphs[0].graph.nodes if node.op == "call_function")
    assert [path for path, _ in node.meta["nn_module_stack"].values()] == ["L['model']"]


def test_a_mesh_forgets_its_groups() -> None:
    with compat.fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        group = weakref.ref(mesh.get_group("a"))
        compat.forget_groups(mesh["a"])
    gc.collect()
    assert group() is None, "something else refers to the groups of a mesh"


class Two(nn.Module):
    """Calls one module twice, the second time in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return torch.utils.checkpoint.checkpoint(
            self.inner, x, use_reentrant=False, context_fn=partial(_contexts, 1)
        )


def _contexts(number: int) -> Any:
    return torch.utils.checkpoint.noop_context_fn()


@pytest.fixture(scope="module")
def dynamo_graph() -> tuple[Two, fx.GraphModule]:
    """A model, and the graph that Dynamo makes of it."""
    found: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        found.append(graph_module)
        return graph_module

    torch._dynamo.reset()
    model = Two()
    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(3, 2))
    (graph_module,) = found
    return model, graph_module


def test_dynamo_names_the_modules_of_a_node(dynamo_graph: tuple[Two, fx.GraphModule]) -> None:
    model, graph_module = dynamo_graph
    ids = [str(id(model.inner)), str(id(model.inner[0]))]
    node = next(n for n in graph_module.graph.nodes if n.target is nn.functional.linear)
    assert compat.dynamo_modules(node) == [(ids[0], 0), (ids[1], 0)]
    assert compat.dynamo_paths(node) == [(ids[0], "inner"), (ids[1], "inner.0")]
    path, _, function = compat.stack_line(node).partition(" in ")
    assert path.startswith(__file__) and function == "forward"


def test_dynamo_makes_an_operator_of_a_checkpoint(dynamo_graph: tuple[Two, fx.GraphModule]) -> None:
    model, graph_module = dynamo_graph
    target = compat.checkpoint_operator()
    (node,) = [n for n in graph_module.graph.nodes if n.target is target]
    assert node.args[0].op == "get_attr"
    body = getattr(graph_module, node.args[0].target)
    context = compat.checkpoint_context(body)
    assert isinstance(context, partial) and context.func is _contexts
    (inside,) = [n for n in body.graph.nodes if n.target is nn.functional.linear]
    assert compat.dynamo_modules(inside) == [
        (str(id(model.inner)), 1),
        (str(id(model.inner[0])), 1),
    ]
    assert compat.checkpoint_context(graph_module) is torch.utils.checkpoint.noop_context_fn


def test_dynamo_treats_marked_modules_as_managed_by_fsdp() -> None:
    from torch._dynamo.variables.nn_module import FSDPManagedNNModuleVariable

    seen: list[Any] = []
    init = FSDPManagedNNModuleVariable.__init__

    def watched(self: Any, value: Any, **kwargs: Any) -> None:
        seen.append(value)
        init(self, value, **kwargs)

    model = Two()
    for module in model.modules():
        compat.mark_for_dynamo(module)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPManagedNNModuleVariable, "__init__", watched)
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3, 2))
    assert any(value is model.inner[0] for value in seen)


def test_a_backend_is_registered_once() -> None:
    from torch._dynamo.backends import registry

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        return graph_module

    try:
        compat.register_backend("fxshard_test", backend)
        compat.register_backend("fxshard_test", lambda *args: None)
        assert registry.lookup_backend("fxshard_test") is backend
    finally:
        registry._COMPILER_FNS.pop("fxshard_test", None)
        registry._BACKENDS.pop("fxshard_test", None)


def test_only_inlined_functions_are_traced_by_their_callers_alone() -> None:
    counts = {"graphs": 0}

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        counts["graphs"] += 1
        return graph_module

    def read(x: Tensor) -> Any:
        return torch.compiler.is_compiling(), x + 1

    def caller(x: Tensor) -> Any:
        return read(x)

    compat.only_inlined(read)
    torch._dynamo.reset()
    assert torch.compile(caller, backend=backend, fullgraph=True)(torch.ones(1))[0] is True
    assert counts["graphs"] == 1
    torch._dynamo.reset()
    assert torch.compile(read, backend=backend)(torch.ones(1))[0] is False
    assert counts["graphs"] == 1


def test_saved_tensors_hooks_on_top() -> None:
    assert compat.saved_tensors_hooks_on_top() is None

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert compat.saved_tensors_hooks_on_top() == (pack, unpack)


def test_in_backward_is_true_in_hooks_of_the_engine() -> None:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(compat.in_backward()))
    x.square().sum().backward()
    assert seen == [True] and not compat.in_backward()


def test_tree_map_tensors_leaves_the_rest() -> None:
    made = compat.tree_map_tensors(lambda t: t + 1, ({"a": torch.zeros(1)}, 3, None))
    assert made[0]["a"].item() == 1 and made[1:] == (3, None)


# -- what stamping takes ---------------------------------------------------------------------------


def test_fakes_in_one_storage_are_aliases() -> None:
    mode = compat.FakeTensorMode()
    with mode:
        like = torch.empty(4, 6).t()[1:]
    storage = compat.fake_storage(96)
    where = like.size(), like.stride(), int(like.storage_offset())
    made = [compat.fake_of(mode, storage, *where, like.dtype, like.device) for _ in range(2)]
    for fake in made:
        assert fake.untyped_storage() is storage or fake.untyped_storage()._cdata == storage._cdata
        assert (fake.shape, fake.stride(), fake.storage_offset()) == ((5, 4), (1, 6), 1)
        assert (fake.dtype, fake.device.type) == (torch.float32, "cpu")
    assert storage.nbytes() == 96
    with mode:
        assert (made[0] + made[1]).shape == (5, 4)


def test_a_wrapper_has_a_form_and_its_operators_come_to_dispatch() -> None:
    seen: list[Any] = []

    class Wrapper(Tensor):
        __torch_function__ = compat.NO_TORCH_FUNCTION

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return args[0]

    shape = ((2, 3), (1, 2), 4, torch.bfloat16, torch.device("cpu"), False)
    made = compat.wrapper(Wrapper, *shape)
    assert (tuple(made.shape), made.stride(), made.storage_offset()) == shape[:3]
    assert (made.dtype, made.device, made.requires_grad) == shape[3:]
    torch.relu(made)
    assert seen == [aten.relu.default]


def test_nodes_made_has_the_dead_ones(joint: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    dead, live = graph.call_function(torch.relu, (x,)), graph.call_function(torch.relu, (x,))
    graph.output(live)
    with compat.nodes_made() as made:
        graph.eliminate_dead_code()
        graph.eliminate_dead_code()
    assert dead not in graph.nodes
    assert [node.name for node in made[graph]] == ["x", "relu", "relu_1", "output"]
    assert compat.has_names_of(graph, made[graph])
    assert not compat.has_names_of(graph, list(graph.nodes))
    with compat.nodes_made() as found, compat.FakeTensorMode():
        module = Small()
        traced, _, _ = compat.export_joint(
            module, (torch.ones(4, 3), torch.ones(4, 2, dtype=torch.bool))
        )
    assert compat.has_names_of(traced.graph, found[traced.graph])


def test_sizes_are_in_functions_of_sympy() -> None:
    import torch.utils._sympy.functions as torchs

    a, b = sympy.symbols("a b", integer=True, positive=True)
    made = {
        torchs.FloorDiv(a, b): sympy.floor(a / b),
        torchs.CeilToInt(torchs.IntTrueDiv(a, b)): sympy.ceiling(a / b),
        torchs.Mod(a, b) * 2: 2 * sympy.Mod(a, b),
        torchs.Max(a, b) + torchs.Min(a, 3): sympy.Max(a, b) + sympy.Min(a, 3),
        torchs.ModularIndexing(a, 2, b): sympy.Mod(sympy.floor(a / 2), b),
        torchs.PowByNatural(a, b): a**b,
    }
    for theirs, ours in made.items():
        assert compat.in_sympy(theirs) == ours
        for values in ({a: 7, b: 3}, {a: 12, b: 4}):
            assert int(theirs.xreplace({s: sympy.Integer(n) for s, n in values.items()})) == int(
                ours.subs(values)
            )


def test_divisions_of_a_trace_are_torchs() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv(duck_shape=False)
    size = compat.symbolic_size(env, "seq", 6)
    assert size % 2 == 0
    (division,) = compat.expression(12 * (size // 2)).atoms(compat.FloorDiv)
    assert sympy.Eq(compat.Mod(*division.args), 0) in [guard.expr for guard in env.guards]
    (largest,) = compat.expression(torch.sym_max(size - 4, 1)).atoms(compat.Max)
    assert set(largest.args) == {1, compat.expression(size) - 4}


def test_descriptors_of_another_name(joint: Any) -> None:
    _, sources, targets = joint
    named = [compat.of_name(desc, lambda name: f"other.{name}") for desc in sources]
    params = [s for kind, s in map(compat.input_source, named) if kind == "param"]
    assert params == ["other.linear.weight", "other.linear.bias"]
    renamed = [compat.of_name(desc, lambda name: "new") for desc in targets if desc is not None]
    found = [compat.output_source(desc) for desc in renamed]
    assert ("grad", ("param", "new")) in found
    assert ("mutation", ("buffer", "new")) in found
    assert ("output", 0) in found


def test_values_of_a_literal_under_a_fake_mode() -> None:
    literal = torch.tensor([1.5, 2.0])
    with compat.FakeTensorMode():
        assert compat.values_as_text(literal) == "[1.5, 2.0]"


def test_real_tensors_under_a_fake_mode() -> None:
    with compat.FakeTensorMode():
        assert compat.is_fake(torch.ones(2))
        with compat.outside_modes():
            assert not compat.is_fake(torch.ones(2))
        assert compat.is_fake(torch.ones(2))


def test_tools_of_torch_see_nothing_and_come_back() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    ran: list[nn.Module] = []
    mine = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: ran.append(m))
    hooks = torch.nn.modules.module._global_forward_hooks
    linear = nn.Linear(2, 2)
    with FlopCounterMode(display=False) as counter:
        before = dict(hooks)
        with compat.unobserved():
            linear(torch.ones(1, 2))
        assert dict(hooks) == before
        assert counter.get_total_flops() == 0
    mine.remove()
    assert ran == [linear]


def test_the_name_of_a_higher_order_operator() -> None:
    class Mode(compat.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    operator = torch.ops.higher_order.cond
    with Mode(), pytest.raises(NotImplementedError) as failure:
        operator(torch.tensor(True), torch.sin, torch.cos, (torch.ones(2),))
    assert compat.higher_order_operator(failure.value) == "cond"
    assert compat.higher_order_operator(ValueError("x")) is None


def test_checks_of_linear_algebra_are_operators_and_no_dead_code() -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x)

    with compat.FakeTensorMode():
        x = torch.eye(3, requires_grad=True)
    graph_module, _, _ = compat.export_joint(Inverse(), (x,))
    targets = [str(node.target) for node in graph_module.graph.nodes]
    assert "aten._linalg_check_errors.default" in targets


def test_a_node_goes_to_another_checkpoint() -> None:
    inside = {"custom": {compat._CHECKPOINT: 3, "mine": 1}, "val": 0}
    assert compat.checkpoint_number(inside) == 3
    moved = dict(inside)
    compat.in_checkpoint(moved, 7)
    assert compat.checkpoint_number(moved) == 7
    assert moved["custom"]["mine"] == 1
    assert compat.checkpoint_number(inside) == 3
    assert compat.checkpoint_number({}) is None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * 2


def test_a_custom_function_is_told_from_the_formula_of_an_operator() -> None:
    with torch.library._scoped_library("fxshard_contract", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
        formula = partial(lambda ctx, grad: grad * 2)
        torch.library.register_autograd("fxshard_contract::doubled", formula, lib=library)
        x = torch.ones(2, requires_grad=True)
        operator = torch.ops.fxshard_contract.doubled(x)
        assert "fxshard_contract_doubled" in operator.grad_fn.name()
        assert not compat.is_custom_function(operator.grad_fn)
        assert compat.is_custom_function(Doubled.apply(x).grad_fn)
        assert not compat.is_custom_function((x * 2).grad_fn)


def test_rng_is_kept() -> None:
    before = torch.get_rng_state()
    with compat.rng_kept():
        torch.manual_seed(before[0].item() + 1)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_torch_steps_an_optimizer_without_state_to_save_it() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with compat.not_stepped(optimizer):
        assert get_optimizer_state_dict(model, optimizer)["state"] == {}
    assert not optimizer.state
    assert get_optimizer_state_dict(model, optimizer)["state"]  # what the context is against
    before = optimizer.state
    with compat.not_stepped(optimizer):
        assert optimizer.state is before


def test_plain_torch_functions() -> None:
    class Asked(Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    asked = torch.ones(2).as_subclass(Asked)
    with compat.plain_torch_functions():
        assert torch.equal(asked + 1, torch.full((2,), 2.0)) and asked.shape == (2,)
    with pytest.raises(AssertionError):
        asked + 1


def test_hooks_of_optimizers_lie_where_they_are_taken_from() -> None:
    optimizer, ran = torch.optim.SGD(nn.Linear(2, 2).parameters()), []
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    both = [
        register_optimizer_step_pre_hook(lambda *_: ran.append("all")),
        register_optimizer_step_post_hook(lambda *_: ran.append("all")),
    ]
    try:
        with compat.without_step_hooks(optimizer):
            optimizer.step()
        assert ran == []
        optimizer.step()
        assert sorted(ran) == ["all", "all", "post", "pre"]
    finally:
        for handle in both:
            handle.remove()


def test_leaves_are_exchanged_by_what_they_are() -> None:
    x, y, other = torch.ones(1), torch.ones(1), torch.zeros(1)
    found = compat.exchanged({"a": [x, y], "b": (x, 3)}, {id(x): other})
    assert found["a"][0] is other and found["b"] == (other, 3) and found["a"][1] is y


def test_dtensor_asks_its_handlers_before_its_own_dispatch() -> None:
    aten_add = torch.ops.aten.add.Tensor
    with compat.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        before = dict(compat.dtensor_handlers())
        compat.dtensor_handlers()[aten_add] = lambda *_: torch.tensor(7.0)
        try:
            assert torch.ops.aten.add.Tensor(x, x).item() == 7
            with compat.without_dtensor_handler(aten_add):
                assert isinstance(x + x, DTensor)
            assert torch.ops.aten.add.Tensor(x, x).item() == 7
        finally:
            del compat.dtensor_handlers()[aten_add]
        assert compat.dtensor_handlers() == before
