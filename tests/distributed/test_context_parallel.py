"""Context parallelism beside FSDP, on real ranks: as torch's FSDP2 with its own, and as eager."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.experimental import context_parallel

import fxshard
from fxshard._torch.process_groups import fake_process_group
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import split_steps, tracked
from fxshard.verify.certificate import certificate
from tests.distributed import context_parallel_cases as cases
from tests.distributed import tensor_parallel_cases
from tests.distributed.context_parallel_cases import Job
from tests.distributed.tensor_parallel_cases import full

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

FAST = {
    "compile": Job(rotate="alltoall"),
    "fully_shard": Job("fully_shard"),
}
SLOW = {
    "allgather": Job(),
    "not causal": Job(causal=False),
    "contexts only": Job(shape=(1, 4), rotate="alltoall"),
    "hybrid": Job(shape=(2, 1, 2)),
    "hybrid, fully_shard": Job("fully_shard", shape=(1, 2, 2)),
    "low precision": Job(precision=LOW),
    "recomputed": Job(options={"checkpoint": "full"}, rotate="alltoall"),
    "unsharded between": Job(options={"strategy": "shard_grad_op"}),
}


def differing(rank: int, world_size: int, job: Job) -> dict[str, float]:
    """By name, what differs from FSDP2 with torch's own, and by how much."""
    ours = cases.trained(job, rank)
    theirs = cases.trained(Job(**{**vars(job), "how": "fsdp2", "options": {}}), rank)
    assert ours.keys() == theirs.keys()
    apart = {
        name: (ours[name].double() - theirs[name].double()).abs().max().item() for name in ours
    }
    return {name: each for name, each in apart.items() if each}


def from_eager(rank: int, world_size: int, job: Job) -> float:
    """The largest relative distance from one process with whole sequences."""
    ours, alone = cases.trained(job, rank), cases.alone(job)
    return max(
        ((ours[name] - value).norm() / value.norm().clamp(min=1e-6)).item()
        for name, value in alone.items()
        if name.startswith("0 ")
    )


@pytest.mark.parametrize("name", FAST)
def test_bitwise_as_torchs_own(ranks: Any, name: str) -> None:
    assert ranks(4).run(differing, FAST[name]) == [{}] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_bitwise_as_torchs_own_in_each_way(ranks: Any, name: str) -> None:
    assert ranks(4).run(differing, SLOW[name]) == [{}] * 4


@pytest.mark.parametrize("causal", [True, False])
def test_as_eager_on_whole_sequences(ranks: Any, causal: bool) -> None:
    job = Job(shape=(2, 2), causal=causal, steps=1)
    assert max(ranks(4).run(from_eager, job)) < 1e-5


def with_tensors(rank: int, world_size: int, how: str) -> float:
    """How far parameters are from FSDP2's, with tensor parallelism on a third dimension."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    found = []
    for shard in ("fsdp2", how):
        torch.manual_seed(0)
        model: Any = tensor_parallel_cases.Llama()
        tensor_parallel_cases.of_tensors(model, mesh["tp"])
        if shard == "compile":
            model = fxshard.compile(model, mesh=mesh)
        else:
            both = mesh["dp", "cp"]._flatten("dp_cp")
            shards: Any = fsdp2 if shard == "fsdp2" else fxshard.fully_shard
            for each in (*model.layers, model):
                shards(each, mesh=both)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            tokens, wanted = Job().batch(0, step)
            parts = context_parallel(mesh["cp"], buffers=[tokens, wanted], buffer_seq_dims=[1, 1])
            own = cases.torchs_own() if shard == "fsdp2" else contextlib.nullcontext()
            with parts, own:
                cases.loss(model(tokens), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([full(param) for param in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("how", ["compile", "fully_shard"])
@pytest.mark.sample(1)
def test_bitwise_beside_tensor_parallelism(ranks: Any, how: str) -> None:
    assert ranks(4).run(with_tensors, how) == [0.0] * 4


class Mixes(nn.Module):
    """f32[batch, sequence, WIDTH] -> the same, by attention that is not causal."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(cases.WIDTH, cases.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (cases.HEADS, -1)).transpose(1, 2)
        return self.out(
            F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        )


def in_and_out(rank: int, world_size: int) -> tuple[list[float], int]:
    """How far outputs are from eager's; the calls have equal shapes."""
    job = Job(shape=(1, 2), causal=False)
    mesh, eager = job.mesh, Mixes()
    for param in eager.parameters():
        dist.broadcast(param.detach(), 0)
    model: Any = fxshard.compile(copy.deepcopy(eager), mesh=mesh)
    x = torch.randn(2, 8, cases.WIDTH, generator=torch.Generator().manual_seed(0))
    mine, expected = x.chunk(2, 1)[rank].clone(), eager(x).chunk(2, 1)[rank]
    apart = []
    for around in (False, True, False, True):
        if around:
            whole = x.clone()
            with job.around(mesh, None, whole):
                apart.append((model(whole) - expected).abs().max().item())
        else:
            apart.append((model(mine) - eager(mine)).abs().max().item())
    return apart, len(model._fxshard.variants)


def test_calls_inside_and_outside_of_equal_shapes_run_other_programs(ranks: Any) -> None:
    for apart, programs in ranks(2).run(in_and_out):
        assert max(apart) < 1e-6 and programs == 2


@pytest.mark.parametrize(("rank", "rotate"), [(0, "alltoall"), (1, "alltoall"), (0, "allgather")])
def test_bytes_are_those_of_the_tracker(rank: int, rotate: str) -> None:
    """Ranks compute more or less, by where their part of the sequence lies."""
    with fake_process_group(rank, 4):
        job = Job(rotate=rotate)
        mesh, model = job.mesh, job.model()
        tokens, wanted = job.batch(0, 0)
        with job.around(mesh, model, tokens, wanted):
            options = {"world_size": 4, "optimizer": torch.optim.AdamW}
            plan = fxshard.plan(model, (tokens,), loss=lambda out: out.square().mean(), **options)
            measured = tracked(plan.workload, 2)
        found = compare(plan.memory, split_steps(measured, 2))
        assert found.max_abs_difference == 0, found.table(only_different=True)


def test_what_goes_round_is_a_row_and_all_ranks_say_it_alike() -> None:
    said = []
    for rank in (0, 1):
        with fake_process_group(rank, 4):
            job = Job(rotate="alltoall")
            mesh, model = job.mesh, job.model()
            tokens, wanted = job.batch(0, 0)
            with job.around(mesh, model, tokens, wanted):
                plan = fxshard.plan(model, (tokens,), world_size=4, loss=torch.mean)
            said.append(certificate(plan.program))
            assert "all-to-all 1 tensor" in plan.dump()
    assert said[0] == said[1]
