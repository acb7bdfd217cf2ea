"""Units and parameters on meshes of their own: a strategy per unit, a mesh per call."""

import copy
import dataclasses
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import Shard
from torch.testing import assert_close

import fxshard
from fxshard.codegen.emit import Executor, TracedExecutor
from fxshard.config.checked import Config
from fxshard.errors import VerifyError
from fxshard.ir import dump, ops
from fxshard.ir.placements import OnMesh
from fxshard.ir.program import Program
from fxshard.ir.text import parse, write
from fxshard.plans.workload import Workload
from fxshard.runtime.module import sharded
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import on_this_rank, split_steps, tracked_steps
from fxshard.validation.tracker import Tracker, WatchedWorld
from fxshard.verify import verify
from tests import fsdp2
from tests.fsdp2 import Result, full
from tests.ranks import told
from tests.runtime.mesh_cases import (
    CASE,
    STRATEGIES,
    by_calls,
    by_parameters,
    by_strategies,
    called,
    experts,
    meshes,
    with_experts,
)
from tests.runtime.placement_cases import STEPS, locals_of, steps
from tests.texts import assert_equal

OURS = {
    "calls": lambda: by_calls(fxshard.fully_shard),
    "strategies": by_strategies,
    "parameters": lambda: by_parameters(fxshard.fully_shard),
}
THEIRS = {"calls": by_calls, "strategies": by_calls, "parameters": by_parameters}
OPTIONS = {"units": CASE.units, "strategy": STRATEGIES}


def batch() -> Any:
    return CASE.batch(0, 0)[0]


def built() -> nn.Module:
    torch.manual_seed(0)
    return CASE.build()


# -- numbers, collectives, bytes -------------------------------------------------------------------


def both(rank: int, world_size: int, kind: str) -> tuple[Result, Result, list[Any]]:
    theirs, ours = THEIRS[kind](), OURS[kind]()
    wanted = locals_of(theirs)
    for fqn, (placements, local, _) in locals_of(ours).items():
        assert placements == wanted[fqn][0], fqn
        assert torch.equal(local, wanted[fqn][1]), fqn
    counts = [called(model, rank) for model in (theirs, ours)]
    for model in (theirs, ours):
        model.zero_grad()
    return steps(theirs, CASE), steps(ours, CASE), counts


# Meshes of parameters are in torch since 2.13.
KINDS = ["calls", *(["parameters"] if hasattr(_fsdp_common, "ShardPlacementResult") else [])]


@pytest.mark.parametrize("kind", [*KINDS, "strategies"])
def test_three_steps_are_those_of_fsdp2_and_of_one_process(ranks: Any, kind: str) -> None:
    found = ranks(4).run(both, kind)
    alone = fsdp2.train_single(CASE, STEPS, 4)
    for theirs, ours, (their_calls, our_calls) in found:
        fsdp2.assert_close(ours, theirs, rtol=1e-5)
        again = our_calls - their_calls
        if kind == "strategies":  # the root is resharded after forward; FSDP2 leaves it unsharded
            assert again == Counter({("all_gather", (0, 1, 2, 3)): 1})
        else:
            assert our_calls == their_calls
        assert len({group for _, group in our_calls}) == 3
        for fqn, param in alone.params.items():
            assert_close(ours.params[fqn], param, rtol=1e-4, atol=1e-5)


def measured(rank: int, world_size: int, options: dict[str, Any]) -> int:
    """The largest difference between what is predicted and what the tracker sees on this rank."""
    config = Config.from_options({"optimizer": fsdp2.adamw, **options})
    work = Workload(built(), (CASE.batch(rank, 0)[0], {}), (2, 2), config)
    tracker = Tracker()

    def make_executor(program: Program, world: Any) -> Executor:
        return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

    model = sharded(on_this_rank(work), make_executor)
    tracked_steps(model, work, tracker, 2)
    report = model._fxshard.plan.memory
    return compare(report, split_steps(tracker.measured(), 2)).max_abs_difference


def test_bytes_on_ranks(ranks: Any) -> None:
    assert ranks(4).run(measured, OPTIONS) == [0] * 4


@pytest.mark.parametrize(
    "strategy",
    [
        STRATEGIES,
        {"": "hybrid_shard", "blocks.0": "no_shard", "blocks.1": "full_shard"},
        pytest.param({"blocks.0": "no_shard"}, marks=pytest.mark.slow),
        pytest.param({"": "no_shard", "blocks.*": "full_shard"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": fsdp2.adamw},
        {"optimizer": fsdp2.adamw, "optimizer_in_backward": True},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"reshard_after_forward": 2},
                {"pack_bytes": 0, "forward_prefetch": 0},
                {"min_bucket_bytes": 4096},
                {"checkpoint": "full"},
            )
        ),
    ],
)
def test_bytes_and_numbers_without_ranks(strategy: Any, options: dict[str, Any]) -> None:
    hybrid = "hybrid_shard" in strategy.values()
    given = {"units": CASE.units, "strategy": strategy, **options}
    found = fxshard.validate(
        built(), batch(), world_size=(2, 2) if hybrid else 4, numerics=True, **given
    )
    assert found.max_abs_difference == 0
    assert found.numerics is not None and found.numerics.verdict == "bitwise", found.numerics


def test_all_ranks_in_one_process() -> None:
    alone = fsdp2.train_single(CASE, STEPS, 1)
    fsdp2.assert_close(steps(by_strategies(), CASE), alone, rtol=1e-5)


def of_experts(rank: int, world_size: int, folder: str) -> None:
    """Three steps beside FSDP2, and beside eager PyTorch whose gradients are averaged by hand."""
    theirs, _ = with_experts()
    (ours, mesh), alone = with_experts(fxshard.fully_shard), experts()
    models = theirs, ours, alone
    optimizers = [fsdp2.adamw(model.parameters()) for model in models]
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + step))
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            for name, param in model.named_parameters() if model is alone else ():
                own = "expert" in name
                dist.all_reduce(param.grad, group=mesh.get_group() if own else None)
                param.grad /= 2 if own else 4
            optimizer.step()
            optimizer.zero_grad()
    for name, param in theirs.named_parameters():
        mine = ours.get_parameter(name)
        assert mine.device_mesh == param.device_mesh and mine.placements == param.placements
        assert_close(mine.to_local(), param.to_local())
        assert_close(full(mine), alone.get_parameter(name).detach())
    for what, action in {
        "clip_grad_norm_": lambda: ours.clip_grad_norm_(1.0),
        "full_state_dict": ours.full_state_dict,
        "save_checkpoint": lambda: fxshard.save_checkpoint(folder, ours),
    }.items():
        assert f"StepError: {what}: parameter '0.expert.weight' is on mesh 'efsdp'" in told(action)


def test_experts_that_some_ranks_share(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(of_experts, str(tmp_path))


# -- what users do with it -------------------------------------------------------------------------


def states(rank: int, world_size: int, folder: str) -> None:
    """State dicts, DCP in both directions, copies, norms, units alone, accumulation."""
    theirs, ours = by_parameters(), by_calls(fxshard.fully_shard)
    steps(ours, CASE)
    dcp.save({"model": ours.state_dict()}, checkpoint_id=f"{folder}/ours")
    loaded = {"model": theirs.state_dict()}
    dcp.load(loaded, checkpoint_id=f"{folder}/ours")
    theirs.load_state_dict(loaded["model"])
    wanted = {fqn: full(param) for fqn, param in ours.named_parameters()}
    for fqn, param in theirs.named_parameters():
        assert torch.equal(full(param), wanted[fqn]), fqn
    dcp.save({"model": by_calls().state_dict()}, checkpoint_id=f"{folder}/theirs")
    again = {"model": ours.state_dict()}
    dcp.load(again, checkpoint_id=f"{folder}/theirs")
    ours.load_state_dict(again["model"])
    fresh = dict(built().named_parameters())
    for fqn, value in ours.full_state_dict(rank0_only=False).items():
        assert torch.equal(value, fresh.get(fqn, value)), fqn
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert [(p.fqn, p.mesh) for u in made._fxshard.units for p in u.params] == [
            (p.fqn, p.mesh) for u in ours._fxshard.units for p in u.params
        ]
        assert_close(made(*CASE.batch(rank, 0)[0]), ours(*CASE.batch(rank, 0)[0]))


def test_states_and_copies(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(states, str(tmp_path))


def saved(rank: int, world_size: int, folder: str) -> None:
    """`save_checkpoint` of several meshes, loaded into one, and the optimizer with it."""
    values = []
    for strategy in (STRATEGIES, "full_shard"):
        mesh = meshes()[int(isinstance(strategy, dict))]
        model = by_strategies(strategy=strategy, mesh=mesh)
        optimizer = fsdp2.adamw(model.parameters())
        if not values:
            fsdp2.run_steps(model, CASE, 2, optimizer=lambda _, made=optimizer: made)
            fxshard.save_checkpoint(f"{folder}/one", model, optimizer)
        else:
            fxshard.load_checkpoint(f"{folder}/one", model, optimizer)
        found = {fqn: full(param) for fqn, param in model.named_parameters()}
        for fqn, param in model.named_parameters():
            found |= {f"{fqn}.{k}": full(v) for k, v in optimizer.state[param].items()}
        values.append(found)
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        assert torch.equal(value, values[1][name]), name


def test_checkpoints_move_between_meshes(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(saved, str(tmp_path))


def accumulated(model: nn.Module, rank: int, turn: str) -> dict[str, torch.Tensor]:
    """The gradients of two backwards, the first of which is not reduced, or not all-reduced."""
    model.zero_grad()
    name = {"sync": "set_requires_gradient_sync", "replicas": "set_requires_all_reduce"}[turn]
    for last in (False, True):
        getattr(model, name)(last)
        CASE.loss(model(*CASE.batch(rank, int(last))[0])).backward()
    return {fqn: full(param.grad) for fqn, param in model.named_parameters()}


def phases(rank: int, world_size: int, kind: str) -> None:
    pair = THEIRS[kind](), OURS[kind]()
    for turn in ("sync", "replicas"):
        theirs, ours = (accumulated(model, rank, turn) for model in pair)
        for fqn, grad in theirs.items():
            assert_close(ours[fqn], grad, rtol=1e-5, atol=1e-7, msg=f"{turn}: {fqn}")
    ours = pair[1]
    norm = ours.clip_grad_norm_(0.1)
    wanted = nn.utils.get_total_norm(list(theirs.values()))
    assert_close(norm, wanted)
    for fqn, param in ours.named_parameters():
        assert_close(full(param.grad), theirs[fqn] * (0.1 / (wanted + 1e-6)))
    # a unit by itself, and all of them
    x = torch.ones(2, 4, 8)
    alone: Any = built()
    alone.load_state_dict({k: full(v) for k, v in ours.state_dict().items()})
    for each in (ours, alone):
        each.zero_grad()
        each.blocks[0](x).sum().backward()
    for fqn, param in ours.blocks[0].named_parameters():
        grad = alone.blocks[0].get_parameter(fqn).grad
        assert_close(full(param.grad), grad, rtol=1e-4, atol=1e-5)
    ours.unshard()
    for fqn, param in alone.named_parameters():
        assert torch.equal(ours.get_parameter(fqn).detach(), param), fqn
    ours.reshard()


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_norms_and_units_by_themselves(ranks: Any, kind: str) -> None:
    ranks(4).run(phases, kind)


def clipped(rank: int, world_size: int, foreach: bool | None) -> None:
    """By torch's own function, which refuses FSDP2's gradients on several meshes."""
    model, theirs = by_calls(fxshard.fully_shard), by_calls()
    for each in (model, theirs):
        CASE.loss(each(*CASE.batch(rank, 0)[0])).backward()
    with pytest.raises(RuntimeError, match="must have the same mesh"):
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    plain = [nn.Parameter(full(p)) for p in model.parameters()]
    for mine, param in zip(plain, model.parameters(), strict=True):
        mine.grad = full(param.grad)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
    assert_close(full(norm), nn.utils.clip_grad_norm_(plain, 0.1))
    for params in (plain, [*model.parameters()]):
        torch.optim.AdamW(params, lr=0.1, foreach=foreach).step()
    for mine, param in zip(plain, model.parameters(), strict=True):
        assert_close(full(param), mine.detach())
        assert_close(full(param.grad), mine.grad)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_torchs_clip_grad_norm_and_optimizers_on_several_meshes(
    ranks: Any, foreach: bool | None
) -> None:
    ranks(4).run(clipped, foreach)


# -- what is written of it -------------------------------------------------------------------------


def test_plan_dump_and_certificate_name_the_meshes() -> None:
    plan = fxshard.plan(built(), batch(), world_size=(2, 2), **OPTIONS)
    text = dump.text(plan.program)
    assert "  mesh all: 1 x 4: mix, embed.weight, blocks.1.norm.weight" in text
    assert "4, shard@all" in text
    assert_equal(parse(write(plan.program)), plan.program)
    groups = Counter(
        str(ops.group(node)) for node in plan.program.graph.nodes if ops.communicates(node)
    )
    assert groups == {"shard@all": 5, "shard": 3, "replicate": 1}
    with pytest.raises(fxshard.ConfigError, match="no formulas of a model whose parameters are on"):
        plan.memory.formula()
    bigger = plan.at(world=4)
    assert bigger.program.layouts["mix"].mesh == (1, 8)
    assert bigger.program.layouts["blocks.0.up.weight"].mesh == (2, 4)
    policy = CustomPolicy(
        lambda module: (
            {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
            if module in (model.blocks[0],)
            else module in (model.blocks[1],)
        )
    )
    model: Any = built()
    same = fxshard.plan(model, batch(), world_size=(2, 2), units=policy)
    assert {p.fqn: p.mesh for p in same.program.params.values()} == {
        p.fqn: p.mesh for p in plan.program.params.values()
    }


def test_a_collective_in_the_group_of_another_mesh_is_found() -> None:
    plan = fxshard.plan(built(), batch(), world_size=(2, 2), **OPTIONS)
    program, collectives = plan.program, (ops.all_gather, ops.reduce_scatter, ops.all_reduce)
    for launch in [node for node in program.graph.nodes if node.target in collectives]:
        kept, group = launch.args, str(ops.group(launch))
        kind = group.partition("@")[0]
        launch.args = (*kept[:2], kind if "@" in group else f"{kind}@all", *kept[3:])
        with pytest.raises(VerifyError):
            verify(program)
        launch.args = kept
    verify(program)
    root, *others = program.units
    first, *rest = root.params
    moved = dataclasses.replace(root, params=(dataclasses.replace(first, mesh=""), *rest))
    program.units = (moved, *others)
    with pytest.raises(VerifyError):
        verify(program)


# -- refused ---------------------------------------------------------------------------------------


def refusals(rank: int, world_size: int) -> dict[str, str]:
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def small() -> Any:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    # Of the two ranks next to this one's pair.
    elsewhere = DeviceMesh("cpu", [(rank // 2 * 2 + 2) % 4, (rank // 2 * 2 + 3) % 4])
    outside = small()
    fxshard.fully_shard(outside[0])
    hooked = small()
    fxshard.fully_shard(hooked[0], mesh=pair)
    fxshard.fully_shard(hooked)
    return {
        "elsewhere": told(
            lambda: fxshard.fully_shard(
                small(), shard_placement_fn=lambda p: OnMesh(Shard(0), elsewhere)
            )
        ),
        "outside": told(lambda: fxshard.fully_shard(outside, mesh=pair["b"])),
        "hook": told(lambda: hooked.register_comm_hook(None, lambda *args: None)),
        "unit": told(lambda: fxshard.compile(small(), strategy={"0.x": "no_shard"})),
        "no unit": told(lambda: fxshard.compile(small(), strategy={"0": "no_shard"}, units=["1"])),
        "name": told(lambda: fxshard.compile(small(), strategy={"0": "shards"})),
        "list": told(
            lambda: fxshard.compile(small(), strategy={"0": "no_shard"}, units=[["0", "1"]])
        ),
        "two": told(
            lambda: fxshard.compile(
                small(), strategy={"0": "no_shard", "1": "shard_grad_op"}, units=[["0", "1"]]
            )
        ),
    }


REFUSED = {
    "elsewhere": "does not have this rank, which has these parameters too",
    "outside": "which the mesh of the model",
    "hook": "does not go together with parameters on several meshes",
    "unit": "pattern '0.x' matches no module",
    "no unit": "strategy names '0', which is no unit",
    "name": "strategy='shards' is not supported",
    "two": "'0' and '1' are one unit, gathered and reduced together",
}


def test_what_cannot_be_is_refused_with_what_to_do(ranks: Any) -> None:
    for found in ranks(4).run(refusals):
        for case, said in REFUSED.items():
            assert said in found[case], (case, found[case])
