"""Dry runs of torch's other parallelisms: right to the byte, or refused with a remedy."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxshard
from fxshard.errors import CaptureError
from fxshard.memory.category import Category
from fxshard.memory.cuda.reserved import DeviceMemory
from tests.dryrun.parallel_cases import Job, measured, predicted, train, zero, zero_with_views

MIB = 1 << 20

JOBS = {
    "ddp": (2, Job("ddp")),
    "ddp, accumulates": (2, Job("ddp", micro_batches=3, options={"bucket_cap_mb": 0.002})),
    "ddp, views": (2, Job("ddp", options={"gradient_as_bucket_view": True}, clip=True)),
    "ddp, views and zeros": (
        2,
        Job("ddp", micro_batches=2, options={"gradient_as_bucket_view": True}, to_none=False),
    ),
    "ddp, finds unused": (2, Job("ddp", options={"find_unused_parameters": True})),
    "ddp, static": (2, Job("ddp", options={"static_graph": True, "bucket_cap_mb": 0.002})),
    "ddp, autocast": (2, Job("ddp", micro_batches=2, autocast=True, scaler=True, clip=True)),
    "ddp, hook": (2, Job("ddp", options={"hook": allreduce_hook})),
    "ddp, zero": (2, Job("ddp", optimizer=zero)),
    "ddp, zero with views": (2, Job("ddp", optimizer=zero_with_views, clip=True)),
    "tp": (2, Job("tp")),
    "tp, sequence": (2, Job("tp", options={"sequence": True}, clip=True)),
    "tp, loss": (2, Job("tp", options={"loss_parallel": True})),
    "tp, sequence and loss": (2, Job("tp", options={"sequence": True, "loss_parallel": True})),
    "hsdp": (4, Job("hsdp", micro_batches=3)),
    "hsdp, half": (4, Job("hsdp", options={"half": True}, clip=True)),
    "hsdp, autocast": (4, Job("hsdp", autocast=True, scaler=True, clip=True)),
    "2d": (4, Job("2d", micro_batches=2)),
    "2d, all": (
        4,
        Job("2d", micro_batches=2, clip=True, options={"sequence": True, "half": True}),
    ),
    "extended": (2, Job("extended", micro_batches=2)),
    "fsdp1": (2, Job("fsdp1", micro_batches=2, clip=True)),
    "fsdp1, original": (2, Job("fsdp1", options={"use_orig_params": True}, clip=True)),
    "fsdp1, half": (2, Job("fsdp1", micro_batches=2, options={"half": True})),
    "fsdp1, gradients": (
        2,
        Job("fsdp1", options={"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    ),
    "fsdp1, nothing": (2, Job("fsdp1", options={"sharding_strategy": ShardingStrategy.NO_SHARD})),
    "fsdp1, hybrid": (
        4,
        Job("fsdp1", options={"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "replicas": 2}),
    ),
}
FAST = ("extended", "ddp, views", "ddp, accumulates", "tp, loss", "2d, all")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in JOBS]
)
@pytest.mark.sample(2)
def test_every_operator_boundary(ranks: Any, name: str) -> None:
    """Measured on real gloo ranks, which share no code with fxshard."""
    world_size, job = JOBS[name]
    real = ranks(world_size).run(measured, job)[0]
    dry = predicted(world_size, job)
    assert len(dry) > 50
    assert [name for name, _ in dry] == [name for name, _ in real]
    assert dry == real


# -- for a GPU, counted by hand --------------------------------------------------------------------


def steps(run: fxshard.DryRun, model: nn.Module) -> None:
    """Two steps of AdamW on a batch of 1 MiB."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(512, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()


def by_category(run: fxshard.DryRun, category: Category) -> Iterator[Any]:
    kinds = (each for each in run.memory.steady.ranges if each.category is category)
    return (each for each in kinds if not each.host and each.bytes >= MIB // 8)


@pytest.mark.parametrize("views", [False, True])
def test_buckets_of_ddp(views: bool) -> None:
    """1 MiB: each of three weights, two states and a gradient of each, and a batch."""
    with fxshard.dry_run(world_size=8) as run:
        layers = nn.Sequential(*(nn.Linear(512, 512, bias=False, device="cuda") for _ in range(3)))
        model = DistributedDataParallel(layers, device_ids=[0], gradient_as_bucket_view=views)
        steps(run, model)
    report = run.memory
    # after the optimizer's step: with weights, states and buckets, of which gradients are views
    assert [phase.end_bytes for phase in report.phases()][-1] == 12 * MIB
    # besides in backward of the second layer: the batch, the first layer's result, and of two
    # layers the gradients of weight and input; with views those of the weight are in a bucket
    assert report.peak_at.phase == "backward"
    assert report.peak_bytes // MIB == (17 if views else 18)
    names = [each.name for each in by_category(run, Category.SHARDED_PARAM)]
    assert names == ["0.weight", "1.weight", "2.weight"]
    reduced = Category.SHARDED_GRAD if views else Category.REDUCE_SCATTER
    buckets = [each.bytes // MIB for each in by_category(run, reduced)]
    assert buckets == [3, 1, 2]  # one, rebuilt in the order of gradients: the first has 1 MiB
    assert all(not each.host for each in report.steady.ranges if "buckets" in each.module)


def test_streams_of_hsdp() -> None:
    """One weight of 1 MiB on 2 x 4 ranks, in bf16: a quarter is sharded."""
    with fxshard.dry_run(world_size=8) as run:
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = nn.Linear(512, 512, bias=False, device="cuda")
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        steps(run, model)
    found = {
        category: [(each.bytes, each.stream) for each in by_category(run, category)]
        for category in Category
    }
    quarter = MIB // 4
    assert found[Category.SHARDED_PARAM] == [(quarter, "compute")]
    assert found[Category.OPT_STATE] == 2 * [(quarter, "compute")]
    copy_in = "all-gather copy-in"
    assert found[Category.ALL_GATHER] == [(quarter // 2, copy_in), (2 * quarter, copy_in)]
    assert found[Category.UNSHARDED_PARAM] == [(2 * quarter, "compute")]
    assert found[Category.UNSHARDED_GRAD] == [(2 * quarter, "compute")]
    # the input of the reduce-scatter, its result in bf16, and what the all-reduce left in fp32
    assert found[Category.REDUCE_SCATTER] == [
        (2 * quarter, "compute"), (quarter // 2, "reduce-scatter")
    ]  # fmt: skip
    assert found[Category.SHARDED_GRAD] == [(quarter, "all-reduce")]


def test_tensor_parallel_on_a_gpu() -> None:
    """Two weights of 1 MiB on 2 ranks: 1/2 MiB each of weights, states and gradients."""
    with fxshard.dry_run(world_size=2) as run:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2))).cuda()
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cuda", (2,)), plan)
        steps(run, model)
    assert [each.bytes for each in by_category(run, Category.SHARDED_PARAM)] == 2 * [MIB // 2]
    assert [each.bytes for each in by_category(run, Category.OPT_STATE)] == 4 * [MIB // 2]
    # weights and states, the batch, the first layer's half, and the sum before and after
    assert run.memory.peak_bytes == (1 + 2) * MIB + MIB + MIB // 2 + 2 * MIB
    assert run.memory.peak_at.node == "_c10d_functional.all_reduce.default"


@pytest.mark.parametrize(
    "job",
    [
        Job("ddp", "cuda", options={"device_ids": [0], "find_unused_parameters": True}),
        Job("ddp", "cuda", options={"static_graph": True}, optimizer=zero),
        Job("ddp", "cuda", options={"hook": fp16_compress_hook}, optimizer=zero_with_views),
        Job("tp", "cuda", options={"sequence": True, "loss_parallel": True}),
        Job("2d", "cuda", options={"sequence": True}, autocast=True, scaler=True, clip=True),
        Job("extended", "cuda", micro_batches=2),
    ],
    ids=lambda job: job.kind,
)
@pytest.mark.sample(2)
def test_followed_on_a_gpu(job: Job) -> None:
    with fxshard.dry_run(world_size=4, rank=3) as run:
        train(job, run.step)
    owned = run.memory.peak_by_category
    assert owned[Category.SHARDED_PARAM] and owned[Category.OPT_STATE]
    assert run.device_memory().allocated > run.memory.peak_bytes


def test_fsdp1_on_a_gpu_depends_on_how_far_the_host_is_ahead() -> None:
    """Its weights lie in memory of a stream of its own, which the compute stream reads.

    With the limit it waits, before it gathers a layer, until the weights of the layer before the
    last are free. Without, it never waits, and no gather of two steps finds the memory free that
    one before it had: of 4 layers in forward, in backward and again, 1 MiB each.
    """
    found = {}
    for limit in (True, False):
        with fxshard.dry_run(world_size=4) as run:
            layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
            model = FullyShardedDataParallel(
                layers,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                device_id=0,
                limit_all_gathers=limit,
                forward_prefetch=False,
                backward_prefetch=None,
            )
            steps(run, model)
        found[limit] = run.device_memory()
    limited, ahead = found[True], found[False]
    assert limited.keeping_up is not None and ahead.keeping_up is not None
    assert limited.allocated == ahead.allocated  # time changes nothing
    assert limited.keeping_up.peaks == ahead.keeping_up.peaks
    assert limited.keeping_up.peaks.active < limited.active < ahead.active
    gathered = [_most_beside_compute(each) for each in (limited, ahead)]
    assert gathered[0] < 8 * MIB < 16 * MIB <= gathered[1]


def _most_beside_compute(memory: DeviceMemory) -> int:
    """Bytes of the stream that gathers."""
    streams = memory.reserved_by_stream
    return max(streams[name] for name in streams if name != "compute")


# -- refused ---------------------------------------------------------------------------------------


def test_compiled_ddp_is_refused_where_it_is_split() -> None:
    model = nn.Linear(8, 8)
    with fxshard.dry_run(world_size=4):
        compiled = torch.compile(DistributedDataParallel(model.cuda()))
        with pytest.raises(CaptureError, match="optimize_ddp"):
            compiled(torch.randn(2, 8, device="cuda"))


def test_what_fails_without_a_kernel_names_the_line() -> None:
    with fxshard.dry_run(world_size=4):
        model = DistributedDataParallel(nn.SyncBatchNorm(4).cuda())
        with pytest.raises(CaptureError, match=r"test_parallelisms\.py.*batch_norm"):
            model(torch.randn(2, 4, 8, device="cuda"))
