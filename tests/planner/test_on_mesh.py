"""A model on a mesh, planned without a process group."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxshard
from fxshard._torch.process_groups import fake_process_group
from fxshard.errors import CaptureError, ConfigError
from fxshard.plans.workload import entered_once
from fxshard.verify.certificate import collectives
from tests.distributed import context_parallel_cases as contexts
from tests.distributed import expert_parallel_cases as experts
from tests.distributed.tensor_parallel_cases import Mlp, of_an_mlp

X = torch.randn(4, 6)
MESH = {"dp": 2, "tp": 2}


@pytest.fixture(autouse=True)
def no_ranks_are_left() -> Iterator[None]:
    yield
    assert not dist.is_initialized()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    of_an_mlp(model, mesh["tp"])


def of_experts(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        parallelize_module(layer, mesh["ep"], {"moe.experts": experts.ToRanks()})


def of_experts_and_tensors(model: Any, mesh: DeviceMesh) -> None:
    """Experts are spread over the ranks of a batch, in a mesh of their own."""
    experts.of_tensors(model, mesh["tp"])
    of_experts(model, init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=("rest", "ep")))


def of_experts_and_outputs(model: Any, mesh: DeviceMesh) -> None:
    """Sequences are in full on all ranks of a batch, before experts too."""
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    of_experts(model, init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=("rest", "ep")))


def planned(**options: Any) -> fxshard.Plan:
    given = {"mesh": MESH, "parallelize": parallelize, "optimizer": torch.optim.AdamW, **options}
    if given["parallelize"] is of_experts:
        return fxshard.plan(experts.Net(), (experts.batch(0, 0),), **given)
    return fxshard.plan(Mlp(), (X,), loss=lambda out: out.square().mean(), **given)


def test_it_is_the_plan_on_ranks_that_the_user_makes() -> None:
    plan = planned()
    report = plan.memory.to_dict()
    with fake_process_group(0, 4):
        model = Mlp()
        of_an_mlp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"])
        theirs = fxshard.plan(
            *(model, (X,)),
            world_size=2,
            loss=lambda out: out.square().mean(),
            optimizer=torch.optim.AdamW,
        )
        assert report == theirs.memory.to_dict()
        assert collectives(plan.program) == collectives(theirs.program)
        assert plan.estimate("h100").step_seconds == theirs.estimate("h100").step_seconds


EXPERTS: dict[str, tuple[dict[str, int], Any, Any]] = {
    "alone": ({"dp": 2, "ep": 2}, of_experts, 4),
    "copies": ({"copies": 2, "dp": 1, "ep": 2}, of_experts, (2, 2)),
    "beside tensor parallelism": ({"dp": 2, "tp": 2}, of_experts_and_tensors, 2),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_planned_as_on_ranks_that_the_user_makes(case: str) -> None:
    """For as many tokens as are told."""
    dims, function, size = EXPERTS[case]
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "data_sizes": {"**.experts": 12}}
    options |= {"strategy": "hybrid_shard"} if len(dims) == 3 else {}
    model, call = experts.Net(), (experts.batch(0, 0),)
    plan = fxshard.plan(model, call, mesh=dims, parallelize=function, **options)
    assert plan.workload.world_size == size
    report, lines = plan.memory.to_dict(), collectives(plan.program)
    more = plan.replan(data_sizes={"**.experts": 24})
    assert more.memory.peak_bytes > plan.memory.peak_bytes
    with fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        function(model, mesh)
        theirs = fxshard.plan(model, call, world_size=size, **options)
        assert report == theirs.memory.to_dict()
        assert lines == collectives(theirs.program)


def test_tokens_that_all_ranks_of_a_batch_send_are_refused() -> None:
    """Experts would get each of them twice."""
    model, call = experts.Net(), (experts.batch(0, 0),)
    dims, function = {"dp": 2, "tp": 2}, of_experts_and_outputs
    with pytest.raises(CaptureError, match=r"layers.0.moe.experts: each of the 2 ranks of 'tp'"):
        fxshard.plan(model, call, mesh=dims, parallelize=function, data_sizes={"**.experts": 12})


def test_a_plan_answers_when_its_ranks_are_gone() -> None:
    plan = planned()
    assert plan.dump() and plan.code and plan.memory.table()
    replanned = plan.replan(world_size=4)
    assert replanned.memory.peak_bytes < plan.memory.peak_bytes
    other = planned(mesh={"dp": 4, "tp": 2})  # of the same ranks of tensor parallelism
    assert other.memory.to_dict() == replanned.memory.to_dict()
    traced = plan.replan(args=(X[:2],))
    assert traced.memory.peak_bytes < plan.memory.peak_bytes


def test_the_model_is_not_changed() -> None:
    model = Mlp()
    before = {name: id(param) for name, param in model.named_parameters()}
    fxshard.plan(model, (X,), mesh=MESH, parallelize=parallelize)
    assert {name: id(param) for name, param in model.named_parameters()} == before


def test_what_is_left_of_the_mesh_is_data_parallel() -> None:
    assert planned(mesh={"dp": 4}, parallelize=None).workload.world_size == 4
    assert planned(mesh={"tp": 2}).workload.world_size == 1
    one = {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
    assert planned(mesh=one).workload.world_size == 2
    hybrid = planned(mesh={**one, "dp_replicate": 3}, strategy="hybrid_shard")
    assert hybrid.workload.world_size == (3, 2)


def test_no_mesh_of_later_ranks_is_taken_for_one_of_a_plan() -> None:
    """torch's caches put meshes that are equal for each other, whose groups are others."""
    planned()
    with fake_process_group(0, 4):
        init_device_mesh("cpu", (4,), mesh_dim_names=("first",))  # other numbers of groups
        model = Mlp()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        of_an_mlp(model, mesh["tp"])
        groups = {id(p.device_mesh.get_group()) for p in model.layers.parameters()}  # type: ignore[union-attr]
        assert groups == {id(mesh["tp"].get_group())}
    planned(checkpoint="full")


def test_a_context_is_around_each_trace_and_the_report() -> None:
    job = contexts.Job()
    tokens, _ = job.batch(0, 0)
    options: dict[str, Any] = {"loss": lambda out: out.square().mean()}
    plan = fxshard.plan(
        *(job.model(), (tokens,)),
        mesh={"dp": 2, "cp": 2},
        context=lambda model, mesh: job.around(mesh, model, tokens),
        **options,
    )
    report, again = plan.memory.to_dict(), plan.replan(checkpoint="full").memory.peak_bytes
    assert tokens.shape[1] == contexts.LENGTH
    with fake_process_group(0, 4):
        mesh, model = job.mesh, job.model()
        with job.around(mesh, model, tokens):
            theirs = fxshard.plan(model, (tokens,), world_size=4, **options)
            others = theirs.memory.to_dict()
            for each in (report, others):
                del each["lifecycle"]  # models are made and saved outside of contexts
            assert report == others
            assert collectives(plan.program) == collectives(theirs.program)
            assert theirs.replan(checkpoint="full").memory.peak_bytes == again
    assert plan.workload.world_size == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": 3}, "expected ranks by name"),
        ({"mesh": {"dp": 0}}, "'dp' has 0 ranks"),
        ({"mesh": {"pp": 2, "dp": 2}}, "pipeline_stage=True"),
        ({"mesh": {"dp": 2, "cp": 2}}, "context="),
        ({"mesh": {"dp": 2, "ep": 2}, "parallelize": None}, "places no parameter on 'dp', 'ep'"),
        ({"mesh": {"ep": 2}, "parallelize": of_experts}, "the dimension before it"),
        ({"mesh": MESH, "parallelize": None}, "places no parameter on 'dp', 'tp'"),
        ({"mesh": {"a": 2, "b": 2, "tp": 2}}, "strategy='hybrid_shard'"),
        ({"mesh": {"dp": 4}}, "raised KeyError"),
        ({"parallelize": lambda model, mesh: 3}, "returned a int"),
        ({"parallelize": lambda model, mesh: fully_shard(model, mesh=mesh["dp"])}, "fully_shard"),
        ({"world_size": 2}, "both given"),
        ({"mesh": None}, "parallelize=... needs the mesh"),
        ({"mesh": None, "parallelize": None}, "for how many ranks"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(**options)


def test_sizes_that_do_not_divide_are_refused_by_the_model() -> None:
    class Heads(Mlp):
        def forward(self, x: Any) -> Any:
            return self.layers[0][0](x).unflatten(-1, (-1, 4)).sum()  # 8 features on 3 ranks

    with pytest.raises(CaptureError, match="unflatten"):
        fxshard.plan(Heads(), (X,), mesh={"dp": 2, "tp": 3}, parallelize=parallelize)


def test_models_and_processes_with_ranks_are_refused() -> None:
    with fake_process_group(0, 4):
        with pytest.raises(ConfigError, match="a process group is initialised"):
            planned()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ConfigError, match="makes the mesh itself"):
            planned(mesh=mesh)
        model = Mlp()
        of_an_mlp(model, mesh["tp"])
    with pytest.raises(ConfigError, match="parallelised already"):
        fxshard.plan(model, (X,), mesh=MESH, parallelize=parallelize)


def test_a_block_inside_of_itself_does_nothing() -> None:
    """`loss_parallel` has no effect any more when an inner one has ended."""
    seen: list[str] = []

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        seen.append("in")
        try:
            yield
        finally:
            seen.append("out")

    around = entered_once(block)
    with around(), around(), around():
        pass
    with pytest.raises(ArithmeticError), around():
        raise ArithmeticError
    with around():
        pass
    assert seen == ["in", "out"] * 3
