"""`shard_placement_fn`: parameters that are sharded along any dimension, on gloo ranks."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.testing import assert_close

import fxshard
from tests import fsdp2
from tests.fsdp2 import Result
from tests.oracles import Collective, count_collectives
from tests.runtime.placement_cases import (
    EVEN,
    FUNCTIONS,
    STEPS,
    UNEVEN,
    columns,
    compiled,
    largest,
    last,
    locals_of,
    steps,
    trained,
)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def as_eager(found: list[Result], name: str, case: Any) -> None:
    """All ranks have what eager PyTorch has on the joined batch."""
    alone = fsdp2.train_single(case, STEPS, len(found))
    for ours in found:
        for fqn, param in alone.params.items():
            assert_close(ours.params[fqn], param, rtol=1e-4, atol=1e-5, msg=f"{name}: {fqn}")
        for mine, grads in zip(ours.grads, alone.grads, strict=True):
            for fqn, grad in grads.items():
                assert_close(mine[fqn], grad, rtol=1e-4, atol=1e-5, msg=f"{name}: {fqn}")
    losses = [sum(each) / len(found) for each in zip(*(r.losses for r in found), strict=True)]
    assert_close(losses, alone.losses, rtol=1e-5, atol=1e-6)


# -- numbers ---------------------------------------------------------------------------------------


def both(rank: int, world_size: int, name: str, fn: str) -> tuple[Result, Result, Result]:
    case = EVEN[name]
    theirs = trained(case, FUNCTIONS[fn])
    ours = trained(case, FUNCTIONS[fn], shard=fxshard.fully_shard)
    return theirs, ours, steps(compiled(case, FUNCTIONS[fn]), case)


@pytest.mark.parametrize(
    ("world", "name", "fn"),
    [
        (2, "mixed", "columns"),
        (2, "conv", "last"),
        (4, "mixed", "largest"),
        pytest.param(4, "conv", "columns", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sample(2)
def test_three_steps_are_those_of_fsdp2_and_of_one_process(
    ranks: Any, world: int, name: str, fn: str
) -> None:
    found = ranks(world).run(both, name, fn)
    as_eager([ours for _, ours, _ in found], name, EVEN[name])
    for theirs, ours, again in found:
        if world == 2:
            fsdp2.assert_bitwise(ours, theirs)
            fsdp2.assert_bitwise(again, theirs)
        else:  # gloo adds four numbers in an order that depends on the size of a message
            fsdp2.assert_close(ours, theirs, rtol=1e-5)
            fsdp2.assert_close(again, theirs, rtol=1e-5)


def uneven(rank: int, world_size: int, name: str, fn: str) -> list[Result]:
    """By the optimizer that reads memory as one block, too."""
    fused = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
    return [
        steps(compiled(UNEVEN[name], FUNCTIONS[fn]), UNEVEN[name], optimizer=optimizer)
        for optimizer in (fsdp2.adamw, fused)
    ]


@pytest.mark.parametrize(
    ("world", "name", "fn"), [(2, "mixed", "columns"), (4, "mixed", "columns"), (4, "conv", "last")]
)
@pytest.mark.sample(2)
def test_sizes_that_do_not_divide_evenly_or_are_shorter_than_the_ranks(
    ranks: Any, world: int, name: str, fn: str
) -> None:
    for found in zip(*ranks(world).run(uneven, name, fn), strict=True):
        as_eager(list(found), name, UNEVEN[name])


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("cases", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_in_one_process(name: str, cases: dict[str, Any]) -> None:
    """All ranks take one batch, which is that of rank 0."""
    case = cases[name]
    alone = fsdp2.train_single(case, STEPS, 1)
    for world in (2, 4):
        fsdp2.assert_close(steps(compiled(case, largest, world_size=world), case), alone, rtol=1e-5)


def options(rank: int, world_size: int, kind: str) -> tuple[Result, Result]:
    """A script by torch's function and by ours."""
    given: dict[str, Any] = {
        "bf16": {"mp_policy": BF16},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "kept": {"reshard_after_forward": False},
    }.get(kind, {})
    if kind == "hybrid":
        names = ("replicate", "shard")
        given["mesh"] = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names)
    case = EVEN["mixed"]
    theirs = trained(case, columns, **given)
    return theirs, trained(case, columns, shard=fxshard.fully_shard, **given)


@pytest.mark.parametrize(
    ("world", "kind"), [(2, "bf16"), (2, "offload"), (2, "kept"), (4, "hybrid")]
)
@pytest.mark.sample(2)
def test_with_other_arguments_it_is_fsdp2_still(ranks: Any, world: int, kind: str) -> None:
    for theirs, ours in ranks(world).run(options, kind):
        if world == 2:
            fsdp2.assert_bitwise(ours, theirs)
        else:
            fsdp2.assert_close(ours, theirs, rtol=1e-5)


def of_options(rank: int, world_size: int) -> dict[str, Result]:
    every: dict[str, dict[str, Any]] = {
        "alone": {"pack_bytes": 0},
        "groups": {"reshard_after_forward": 2},
        "groups, alone": {"reshard_after_forward": 2, "pack_bytes": 0},
        "buckets": {"max_bucket_bytes": 300, "min_bucket_bytes": 200, "pack_bytes": 128},
    }
    case = UNEVEN["mixed"]
    return {name: steps(compiled(case, columns, **given), case) for name, given in every.items()}


def test_buckets_packs_and_smaller_groups_change_no_number(ranks: Any) -> None:
    found = ranks(4).run(of_options)
    for name in found[0]:
        as_eager([each[name] for each in found], name, UNEVEN["mixed"])


# -- what users see --------------------------------------------------------------------------------


def seen(rank: int, world_size: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    theirs, ours = EVEN["conv"].build(), compiled(EVEN["conv"], last)
    fully_shard(theirs, shard_placement_fn=last)
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    copies = compiled(EVEN["conv"], columns, strategy="hybrid_shard", mesh=mesh)
    short = compiled(UNEVEN["mixed"], columns)
    return locals_of(theirs), locals_of(ours), locals_of(copies), locals_of(short)


def test_each_rank_has_the_local_tensors_of_fsdp2(ranks: Any) -> None:
    torch.manual_seed(0)
    whole = dict(UNEVEN["mixed"].build().named_parameters())
    for rank, (theirs, ours, copies, short) in enumerate(ranks(4).run(seen)):
        assert ours.keys() == theirs.keys()
        for fqn, (placements, local, contiguous) in ours.items():
            assert placements == theirs[fqn][0]
            assert contiguous
            assert torch.equal(local, theirs[fqn][1])
        assert ours["first.weight"][0] == (Shard(3),) and ours["first.bias"][0] == (Shard(0),)
        assert copies["first.weight"][0] == (Replicate(), Shard(1))
        for fqn, (placements, local, contiguous) in short.items():
            chunks = whole[fqn].chunk(4, placements[0].dim)
            wanted = (
                chunks[rank] if rank < len(chunks) else chunks[0].narrow(placements[0].dim, 0, 0)
            )
            assert contiguous
            assert torch.equal(local, wanted), fqn


def collectives(rank: int, world_size: int) -> list[list[Collective]]:
    found = []
    for fn in (columns, None):
        model, case = compiled(EVEN["mixed"], fn), EVEN["mixed"]
        case.loss(model(*case.batch(rank, 0)[0])).backward()  # the first call is traced
        with count_collectives() as calls:
            case.loss(model(*case.batch(rank, 1)[0])).backward()
        found.append(calls.calls)
    return found


def test_collectives_are_those_of_shard_0(ranks: Any) -> None:
    """As many, of the same kinds, and of the same bytes, since all sizes divide evenly."""
    for placed, rows in ranks(2).run(collectives):
        assert [(c.kind, c.nbytes) for c in placed] == [(c.kind, c.nbytes) for c in rows]
        assert len(placed) > 6


def around_a_step(rank: int, world_size: int) -> dict[str, Any]:
    """What is read and written outside of programs, of sizes that do not divide evenly."""
    case = UNEVEN["mixed"]
    model = compiled(case, columns)
    optimizer = fsdp2.adamw(model.parameters())
    found: dict[str, Any] = {"full": model.full_state_dict(rank0_only=False)}
    case.loss(model(*case.batch(rank, 0)[0])).backward()
    found["norm"] = model.clip_grad_norm_(0.1)
    found["grads"] = {n: fsdp2.full(p.grad) for n, p in model.named_parameters()}
    found["torch's norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    with model.summon_full_params(), torch.no_grad():
        found["summoned"] = {n: p.clone() for n, p in model.named_parameters()}
        for param in model.parameters():
            param.add_(1)
    with model.summon_full_params(with_grads=True):
        for param in model.parameters():
            param.grad = param.detach() * 2
    found["written"] = {n: fsdp2.full(p.grad) for n, p in model.named_parameters()}
    assert all(param.grad.to_local().is_contiguous() for param in model.parameters())
    optimizer.zero_grad()
    model.unshard()
    found["unsharded"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.reshard()
    with model.no_sync():
        case.loss(model(*case.batch(rank, 1)[0])).backward()
    case.loss(model(*case.batch(rank, 2)[0])).backward()
    found["accumulated"] = {n: fsdp2.full(p.grad) for n, p in model.named_parameters()}
    optimizer.zero_grad()
    part = model.blocks[0](torch.ones(1, 2, 7) * (rank + 1))  # eager: a submodule by itself
    part.square().mean().backward()
    found["eager"] = {
        n: fsdp2.full(p.grad) for n, p in model.named_parameters() if p.grad is not None
    }
    model.load_state_dict(found["full"])
    found["loaded"] = {n: fsdp2.full(p) for n, p in model.named_parameters()}
    return found


def test_state_norms_and_eager_reads_are_those_of_the_plain_model(ranks: Any) -> None:
    case, world = UNEVEN["mixed"], 4
    torch.manual_seed(0)
    plain = case.build()
    start = {n: p.detach().clone() for n, p in plain.named_parameters()}

    def backward(step: int) -> None:
        losses = [case.loss(plain(*case.batch(rank, step)[0])) for rank in range(world)]
        torch.stack(losses).mean().backward()

    backward(0)
    optimizer = fsdp2.adamw(plain.parameters())
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    grads = {n: p.grad.clone() for n, p in plain.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    stepped = {n: p.detach().clone() for n, p in plain.named_parameters()}
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(1)
    moved = {n: p.detach().clone() for n, p in plain.named_parameters()}
    backward(1)
    backward(2)
    accumulated = {n: p.grad.clone() for n, p in plain.named_parameters()}
    optimizer.zero_grad()
    outs = [plain.blocks[0](torch.ones(1, 2, 7) * (rank + 1)) for rank in range(world)]
    torch.stack([out.square().mean() for out in outs]).mean().backward()
    eager = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    expected = {
        "full": start,
        "grads": grads,
        "summoned": stepped,
        "written": {name: value * 2 for name, value in moved.items()},
        "unsharded": moved,
        "accumulated": accumulated,
        "eager": eager,
        "loaded": start,
    }
    for found in ranks(world).run(around_a_step):
        assert_close(found["norm"], norm)
        assert_close(found["torch's norm"], torch.tensor(0.1), rtol=1e-3, atol=1e-4)
        for what, tensors in expected.items():
            for fqn, tensor in tensors.items():
                assert_close(found[what][fqn], tensor, rtol=1e-4, atol=1e-5, msg=f"{what}: {fqn}")


def shapes_seen(rank: int, world_size: int) -> list[list[tuple[int, ...]]]:
    """What an optimizer finds that looks at shapes, in FSDP2 and here."""
    found = []
    torch.manual_seed(0)
    theirs = EVEN["mixed"].build()
    fully_shard(theirs, shard_placement_fn=columns)
    for model in (theirs, compiled(EVEN["mixed"], columns)):
        EVEN["mixed"].loss(model(*EVEN["mixed"].batch(rank, 0)[0])).backward()
        shapes = []
        for param in model.parameters():
            grad = param.grad
            assert grad.placements == param.placements and grad.to_local().is_contiguous()
            shapes += [
                tuple(param.shape),
                tuple(param.to_local().shape),
                tuple(grad.to_local().shape),
            ]
        found.append(shapes)
    return found


def test_optimizers_see_the_shapes_that_fsdp2_shows(ranks: Any) -> None:
    for theirs, ours in ranks(2).run(shapes_seen):
        assert ours == theirs


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["even", "uneven"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"pack_bytes": 0},
        {"mixed_precision": BF16},
        {"offload": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": 2},
        {"optimizer_in_backward": True, "pack_bytes": 0},
    ],
    ids=lambda given: next(iter(given), "default"),
)
@pytest.mark.sample(3)
def test_bytes_are_the_trackers(case: str, given: dict[str, Any]) -> None:
    """Each category at each point, of rank 0 of four, and the numbers of all ranks."""
    mixed = (EVEN if case == "even" else UNEVEN)["mixed"]
    torch.manual_seed(0)
    args, _ = mixed.batch(0, 0)
    found = fxshard.validate(
        *(mixed.build(), args),
        world_size=4,
        units=mixed.units,
        shard_placement_fn=columns,
        loss=mixed.loss,
        optimizer=fsdp2.adamw,
        numerics=True,
        **given,
    )
    assert found.holds
    assert found.numerics is not None
    assert not [row for row in found.numerics.rows if row.verdict == "wrong"]


def test_on_processes_bytes_and_numbers_hold() -> None:
    torch.manual_seed(0)
    case = UNEVEN["conv"]
    found = fxshard.validate(
        *(case.build(), case.batch(0, 0)[0]),
        world_size=2,
        ranks="processes",
        loss=case.loss,
        units=case.units,
        optimizer=fsdp2.adamw,
        shard_placement_fn=lambda param: last(param),  # no process could be sent this one
    )
    assert found.holds
    assert found.numerics is not None
    assert not [row for row in found.numerics.rows if row.verdict == "wrong"]


def test_a_function_that_knows_parameters_by_identity() -> None:
    """It is asked once: the copies that are validated have other identities."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    chosen = {id(model[0].weight): Shard(1)}
    found = fxshard.validate(
        *(model, (torch.randn(2, 8),)),
        world_size=2,
        shard_placement_fn=lambda param: chosen.get(id(param)),
        numerics=True,
    )
    assert found.holds
    plan = fxshard.plan(
        *(model, (torch.randn(2, 8),)),
        world_size=2,
        shard_placement_fn=lambda param: chosen.get(id(param)),
    )
    assert {p.fqn: p.shard_dim for p in plan.program.params.values() if p.shard_dim} == {
        "0.weight": 1
    }
    again = plan.replan(world_size=4)
    assert again.config.shard_placement_fn == {"0.weight": Shard(1)}
