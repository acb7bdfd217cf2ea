"""Rows that go to the ranks of their experts, as many as the data say, on real ranks."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.parallel import parallelize_module

import fxshard
from fxshard._torch.process_groups import fake_process_group
from fxshard.ir import ops, tags
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import split_steps, tracked
from tests import texts
from tests.distributed import expert_parallel_cases as cases
from tests.distributed.expert_parallel_cases import Job
from tests.experts import WIDTH, Experts
from tests.ranks import told

ROWS = 16
# step -> rank -> how many rows it sends to each rank
SENT = ([(5, 11), (9, 7)], [(1, 15), (16, 0)], [(0, 16), (4, 12)], [(16, 0), (16, 0)])


def sharded(how: str) -> Any:
    torch.manual_seed(0)
    model = Experts()
    if how == "compile":
        return fxshard.compile(model, units=["expert"])
    shard: Any = fsdp2 if how == "fsdp2" else fxshard.fully_shard
    shard(model.expert)
    return shard(model)


def trained(rank: int, model: Any) -> list[Tensor]:
    """Losses and parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, sent in enumerate(SENT):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        received = torch.tensor([sent[0][rank], sent[1][rank]])
        losses.append(model(x, torch.tensor(sent[rank]), received).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in losses] + [p.full_tensor() for p in model.parameters()]


def compared(rank: int, world_size: int, how: str) -> tuple[float, int, int]:
    """How far from FSDP2; how many programs and all-to-alls there are."""
    ours = sharded(how)
    found = zip(trained(rank, ours), trained(rank, sharded("fsdp2")), strict=True)
    apart = max((a - b).abs().max().item() for a, b in found)
    launches = [n for n in ours.plan.program.graph.nodes if n.target is ops.model_all_to_all]
    return apart, len(ours._fxshard.variants), len(launches)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["compile", "fully_shard"])
def test_bitwise_as_fsdp2_in_one_program(ranks: Any, how: str) -> None:
    """Three launches (the batch needs no gradient), of sizes that each step has anew."""
    assert ranks(2).run(compared, how) == [(0.0, 1, 3)] * 2


# -- experts of frameworks' models, on a mesh of their own -------------------------------------

FULL = {"checkpoint": "full", "units": ["**.layers.*"]}  # of every model here
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
EQUAL = {
    "torchtitan's form": Job(),
    "transformers, four ranks": Job("qwen3_moe", "compile", (2, 2), starved=True),
    "transformers, no experts elsewhere": Job("mixtral", "compile", ()),
    "tensor parallelism": Job(shape=(2, 2), tensor=2, starved=True),
    "recomputed, torch's wrapper": Job(starved=True, checkpoint="wrapper"),
    "recomputed, the option": Job("qwen3_moe", "compile", (2, 2), options=FULL),
}
GRID = {
    "titan, starved": Job(starved=True),
    "titan, compile": Job(how="compile"),
    "titan, four ranks": Job(shape=(2, 2)),
    "titan, four ranks, compile": Job(how="compile", shape=(2, 2)),
    "titan, of four": Job(how="compile", shape=(1, 4)),
    "titan, low precision": Job(shape=(2, 2), given={"mp_policy": LOW}),
    "titan, unsharded between": Job(shape=(2, 2), given={"reshard_after_forward": False}),
    "qwen3_moe": Job("qwen3_moe", starved=True),
    "qwen3_moe, four ranks": Job("qwen3_moe", shape=(2, 2)),
    "qwen3_moe, low precision": Job("qwen3_moe", shape=(2, 2), given={"mp_policy": LOW}),
    "qwen3_moe, no experts elsewhere": Job("qwen3_moe", "compile", ()),
    "mixtral": Job("mixtral"),
    "mixtral, four ranks": Job("mixtral", "compile", shape=(2, 2)),
    "tensor parallelism, compile": Job(how="compile", shape=(2, 2), tensor=2),
    "tensor parallelism, experts over all ranks": Job(shape=(1, 4), tensor=2),
    "tensor parallelism, compile, experts over all": Job(how="compile", shape=(1, 4), tensor=2),
    "tensor parallelism, low precision": Job(shape=(2, 2), tensor=2, given={"mp_policy": LOW}),
    "tensor parallelism, recomputed": Job(shape=(2, 2), tensor=2, checkpoint="wrapper"),
    "recomputed, wrapper, compile": Job(how="compile", checkpoint="wrapper"),
    "recomputed, wrapper, four ranks": Job(shape=(2, 2), checkpoint="wrapper"),
    "recomputed, reentrant": Job(checkpoint="reentrant"),
    "recomputed, composable": Job(checkpoint="composable"),
    "recomputed, composable, compile": Job(how="compile", checkpoint="composable"),
    "recomputed, selective": Job(checkpoint="selective"),
    "recomputed, selective, four ranks": Job(shape=(2, 2), checkpoint="selective", starved=True),
    "recomputed, low precision": Job(
        shape=(2, 2), given={"mp_policy": LOW}, checkpoint="selective"
    ),
    "recomputed, selective option": Job(
        how="compile", shape=(2, 2), options=FULL | {"checkpoint": "selective"}
    ),
    "recomputed, qwen3_moe": Job("qwen3_moe", checkpoint="selective", starved=True),
    "recomputed, mixtral": Job("mixtral", "compile", (2, 2), options=FULL, starved=True),
}


def ranks_of(job: Job) -> int:
    return math.prod(job.shape) if job.shape else 2


@pytest.mark.parametrize("name", EQUAL)
def test_bitwise_as_fsdp2_with_the_same_experts(ranks: Any, name: str) -> None:
    job = EQUAL[name]
    assert ranks(ranks_of(job)).run(cases.differing, job) == [({}, 2)] * ranks_of(
        job
    )  # and one of evaluation


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_bitwise_as_fsdp2_in_each_way(ranks: Any, name: str) -> None:
    job = GRID[name]
    assert ranks(ranks_of(job)).run(cases.differing, job) == [({}, 2)] * ranks_of(
        job
    )  # and one of evaluation


@pytest.mark.parametrize(
    "job",
    [
        Job(how="compile", dtype=torch.float64, steps=2),
        Job(how="compile", shape=(2, 2), dtype=torch.float64, steps=2, tensor=2),
        *(  # FSDP2 on gloo divides twice where copies of one rank are told to sum
            pytest.param(Job("titan", how, (2, 1, 2), torch.float64), marks=pytest.mark.slow)
            for how in ("compile", "fully_shard")
        ),
        pytest.param(Job("qwen3_moe", "compile", (2, 2), torch.float64), marks=pytest.mark.slow),
        pytest.param(Job("mixtral", "compile", (2, 2), torch.float64), marks=pytest.mark.slow),
    ],
)
def test_as_eager_on_the_batches_of_all_ranks(ranks: Any, job: Job) -> None:
    assert max(ranks(ranks_of(job)).run(cases.from_eager, job)) < 1e-6


def states(rank: int, world_size: int, job: Job, folder: str) -> tuple[float, float, float]:
    """How far a norm, clipped gradients, and full and saved parameters are from the right."""
    model = job.sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(cases.batch(rank // job.tensor, 0)).backward()
    grads = [cases.full(param.grad) for param in model.parameters()]
    wanted = torch.nn.utils.get_total_norm(grads)
    norm = (model.clip_grad_norm_(0.5) - wanted).abs().item()
    clipped = torch.nn.utils.get_total_norm([cases.full(p.grad) for p in model.parameters()])
    optimizer.step()
    known = {name: cases.full(param) for name, param in model.named_parameters()}
    found = [model.full_state_dict(rank0_only=False)]
    fxshard.save_checkpoint(folder, model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    fxshard.load_checkpoint(folder, model, optimizer)
    found.append({name: cases.full(param) for name, param in model.named_parameters()})
    differ = [(each[n] - v).abs().max().item() for each in found for n, v in known.items()]
    return norm, (clipped - 0.5).abs().item(), max(differ)


@pytest.mark.parametrize(
    "job",
    [
        Job(how="compile"),
        pytest.param(Job(how="compile", shape=(2, 2), tensor=2), marks=pytest.mark.slow),
    ],
)
def test_norms_full_states_and_checkpoints(ranks: Any, tmp_path: Path, job: Job) -> None:
    for found in ranks(ranks_of(job)).run(states, job, str(tmp_path)):
        assert max(found) < 1e-6


REFUSED = {
    "experts_alone": "ConfigError: experts on .* get the tokens of 2 ranks, .* world_size=2",
    "a_plan_of_others": "ConfigError: experts on .* get the tokens of 2 ranks, .* over 4",
    "no_mesh": "UnitError: parameter 'layers.0.moe.experts.up' is a DTensor already, .* give the",
}


def refused(rank: int, world_size: int) -> dict[str, str]:
    model, _ = Job().spread()
    ids = cases.batch(rank, 0)
    return {
        "experts_alone": told(lambda: fxshard.compile(model, mesh=Job().mesh["mod_ep"])),
        "a_plan_of_others": told(lambda: fxshard.plan(model, (ids,), world_size=4)),
        "no_mesh": told(lambda: fxshard.compile(model)),
    }


def test_what_cannot_be_is_refused_by_name(ranks: Any) -> None:
    for said in ranks(2).run(refused):
        for name, text in REFUSED.items():
            assert re.match(text, said[name]), (name, said[name])


def test_a_mesh_without_a_dimension_for_each_experts_ranks() -> None:
    with fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        model = parallelize_module(cases.Net(), mesh, {"layers.0.moe.experts": cases.ToRanks()})
        said = told(lambda: fxshard.compile(model, mesh=mesh))
    assert re.match(r"ConfigError: .* on the dimension 'ep' of .*, \(1, ranks\), ", said), said


def test_experts_that_are_not_on_the_ranks_of_a_batch() -> None:
    """Each of these would send the same tokens to experts of its own."""
    with fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
        model = parallelize_module(
            cases.Net(), mesh["ep"], {"layers.0.moe.experts": cases.ToRanks()}
        )
        cases.of_tensors(model, mesh["tp"])
        said = told(lambda: fxshard.compile(model, mesh=mesh))
    assert re.match(r"UnitError: experts such as .*, which has not the ranks of .*'tp'", said), said


class Arriving(cases.ToRanks):
    """How many rows come from each rank is said, as no other rank is there to say it."""

    def _exchanged(self, counts: Tensor, group: Any) -> Tensor:
        return counts * 0 + torch.tensor([5, 3, 4, 1])  # of two ranks, for this rank's two experts


def arriving(job: Job, **options: Any) -> fxshard.Plan:
    """Of the first rank, where all rows go to its experts; on a group that moves nothing.

    gloo's threads would hold what was sent for a while.
    """
    rows = cases.CHOSEN * cases.batch(0, 0).numel() // job.tensor
    model, ranks = job.built(), math.prod(job.shape) // job.tensor
    for layer in model.layers:
        weight = layer.moe.router.weight  # all go to the first rank's experts
        torch.nn.init.zeros_(weight).requires_grad_(False)
        parallelize_module(layer, job.mesh["ep"], {"moe.experts": Arriving()})
    if job.tensor > 1:
        cases.of_tensors(model, job.dense["tp"])
    # rows that are sent to each rank, that come from each, and those of each expert
    told = {"layers.*.moe.experts": [rows, 0, 5 + 3, 4 + 1, 5 + 4, 3 + 1]}
    options = {"optimizer": torch.optim.AdamW, "data_sizes": told, "units": ["layers.*"]} | options
    return fxshard.plan(model, (cases.batch(0, 0),), world_size=ranks, **options)


def require_exact(plan: fxshard.Plan) -> None:
    found = compare(plan.memory, split_steps(tracked(plan.workload, 2), 2))
    assert found.max_abs_difference == 0, found.table(only_different=True)


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_bytes_are_exact_for_the_tokens_that_come(shape: tuple[int, int]) -> None:
    with fake_process_group(0, math.prod(shape)):
        plan = arriving(Job(shape=shape))
        require_exact(plan)
        assert plan.program.apart == {"": 1, "mod_ep": 2}  # ranks of experts lie between
        assert {*texts.again(plan.program).parallel} == {*plan.program.parallel} == {"ep"}
        more = {"layers.*.moe.experts": [24, 0, 16, 16, 16, 16]}
        assert plan.replan(data_sizes=more).memory.peak_bytes > plan.memory.peak_bytes


def all_to_alls(plan: fxshard.Plan) -> tuple[int, int]:
    """How many there are in forward and in backward."""
    phases = [
        tags.get(node).phase
        for node in plan.program.graph.nodes
        if tags.get(node).role != "wait" and "all_to_all" in str(node.target)
    ]
    return phases.count("forward"), phases.count("backward")


def test_bytes_are_exact_beside_tensor_parallelism() -> None:
    job = Job(shape=(2, 2), tensor=2)
    with fake_process_group(0, 4):
        plan = arriving(job)
        require_exact(plan)
        assert plan.program.apart == {"": 2, "mod_ep": 2}
        require_exact(arriving(job, checkpoint="full"))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_bytes_are_exact_of_what_is_recomputed(policy: str) -> None:
    """Two layers send rows and get them back, and gradients; "full" sends the rows again."""
    with fake_process_group(0, 4):
        plan = arriving(Job(shape=(2, 2)), checkpoint=policy)
        require_exact(plan)
        without = plan.replan(checkpoint=None)
        assert plan.memory.peak_bytes < without.memory.peak_bytes
        assert all_to_alls(without) == (4, 4)
        assert all_to_alls(plan) == ((4, 8) if policy == "full" else (4, 4))


def test_numbers_and_choices_of_experts_are_saved_in_any_case() -> None:
    """The numbers are read once; who goes where is not chosen again."""
    with fake_process_group(0, 4):
        plan = arriving(Job(shape=(2, 2)), checkpoint="full")
        nodes = list(plan.program.graph.nodes)
        saved = [n for n in nodes if tags.get(n).save]
        numbers = [n for n in nodes if n.target is torch.ops.aten._local_scalar_dense.default]
        assert len(numbers) == 12 and {*numbers} <= {*saved}
        assert all(tags.get(node).phase == "forward" for node in numbers)
        chosen = [n for n in saved if n not in numbers]
        assert [tuple(node.meta["val"].shape) for node in chosen] == [(12, cases.CHOSEN)] * 2
        assert all(tags.source(node).target is torch.ops.aten.topk.default for node in chosen)
        left_out = [p for p in fxshard.default_passes() if p.name != "assign-checkpoints"]
        said = told(lambda: arriving(Job(shape=(2, 2)), checkpoint="full", passes=left_out).program)
        assert "assign-checkpoints has not run" in said, said
