"""Reshard_after_forward, groups that the user gives, world sizes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError, UnitError
from tests.distributed.strategies_cases import (
    BLOCK_4,
    MIXED,
    READ_4,
    READ_ROOT_4,
    ROOT_4,
    STEPS,
    Options,
    assert_all,
    compiled,
    grid,
    groups,
    net,
    one_step,
    row_and_column,
    sizes,
)
from tests.end_to_end.training_cases import Whole, assert_same, batch, grads_of, loss_of, state_of
from tests.oracles import Collective, count_collectives
from tests.zoo import MODELS

# -- the first rank of a group ---------------------------------------------------------------------


def states_of_the_first(rank: int, world_size: int, members: list[list[int]]) -> list[bool]:
    """Whether this rank has the full states, and sees unsharded parameters, of its own group."""
    made = [dist.new_group(ranks=ranks) for ranks in members]
    group = next((g for g, ranks in zip(made, members, strict=True) if rank in ranks), None)
    if group is None:
        return []
    plain = net()
    want = {name: param.detach().clone() for name, param in plain.named_parameters()}
    model = fxshard.compile(plain, process_group=group)
    optimizer = AdamW(model.parameters(), lr=0.0)
    loss_of(model(batch(rank))).backward()
    optimizer.step()
    state = model.full_state_dict()
    whole = model.full_optim_state_dict(optimizer)
    if state:
        assert_close({name: state[name] for name in want}, want, rtol=0, atol=0)
        for name, param in want.items():
            assert whole["state"][name]["exp_avg"].shape == param.shape
    with model.summon_full_params(writeback=False, rank0_only=True):
        full = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    return [bool(state), bool(whole), full == want.keys()]


@pytest.mark.parametrize(
    ("world_size", "members", "firsts"),
    [(2, [[0], [1]], {0, 1}), (4, [[1, 3]], {1}), (4, [[0, 2], [1, 3]], {0, 1})],
    ids=["each alone", "without rank 0", "two groups"],
)
def test_whole_states_are_on_the_first_rank_of_the_group(
    ranks: Any, world_size: int, members: list[list[int]], firsts: set[int]
) -> None:
    """Of the model's group, as FSDP1 has it: the global rank 0 may be in none, or in another."""
    found = ranks(world_size).run(states_of_the_first, members)
    for rank, has in enumerate(found):
        taking_part = any(rank in group for group in members)
        assert has == ([rank in firsts] * 3 if taking_part else [])


# -- reshard_after_forward -------------------------------------------------------------------------


NAMES = ["mlp13", pytest.param("tied", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", NAMES)
def test_reshard_to_groups_close_to_fsdp2(ranks: Any, name: str) -> None:
    options = {"reshard_after_forward": 2}
    assert_all(ranks(4), [name], options, options, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [True, False, 2])
def test_reshard_bitwise_with_fsdp2_on_2_ranks(ranks: Any, value: bool | int, name: str) -> None:
    options = {"reshard_after_forward": value}
    assert_all(ranks(2), [name], options, options)


def test_resharded_units_are_gathered_from_their_neighbour(ranks: Any) -> None:
    for rank, calls in enumerate(ranks(4).run(one_step, {"reshard_after_forward": 2})):
        forward, backward = calls
        row, _ = row_and_column(rank)
        assert sizes(forward, "all_gather") == [ROOT_4, BLOCK_4, BLOCK_4, BLOCK_4]
        assert groups(forward, "all_gather") == {(0, 1, 2, 3)}
        assert sizes(backward, "all_gather") == [READ_ROOT_4, READ_4, READ_4, READ_4]
        assert groups(backward, "all_gather") == {row}
        assert sizes(backward, "reduce_scatter") == [BLOCK_4, BLOCK_4, BLOCK_4, ROOT_4]
        assert groups(backward, "reduce_scatter") == {(0, 1, 2, 3)}
        assert (len(forward), len(backward)) == (4, 8)


def reshards_each_its_own(rank: int, world_size: int) -> tuple[Any, Any, list[Collective]]:
    """Trained by fxshard and by FSDP2, each unit resharded its own way."""
    model, reference = compiled(MIXED), net()
    for block, value in zip(reference.blocks, (False, 2, True), strict=True):
        fully_shard(block, reshard_after_forward=value)
    fully_shard(reference, reshard_after_forward=False)
    found = []
    for each in (model, reference):
        optimizer = AdamW(each.parameters(), lr=1e-2)
        for step in range(STEPS):
            loss = loss_of(each(batch(rank, step)))
            with count_collectives() as backward:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((state_of(each), backward.calls))
    (mine, calls), (other, _) = found
    return mine, other, calls


def test_each_unit_reshards_its_own_way(ranks: Any) -> None:
    for rank, (mine, other, calls) in enumerate(ranks(4).run(reshards_each_its_own)):
        assert_same(mine, other, rtol=1e-6, atol=1e-6)
        gathers = [(c.nbytes, c.ranks) for c in calls if c.kind == "all_gather"]
        assert gathers == [(READ_4, (0, 1, 2, 3)), (READ_4, row_and_column(rank)[0])]


def reshard_refused(rank: int, world_size: int) -> None:
    for options in ({}, {"args": (batch(rank),)}):
        with pytest.raises(ConfigError, match="4 ranks cannot be cut into groups of 3"):
            compiled({"reshard_after_forward": 3} | options)
        with pytest.raises(ConfigError, match="4 ranks cannot be cut into groups of 8"):
            compiled({"reshard_after_forward": {"blocks.1": 8}} | options)
    with pytest.raises(ConfigError, match=r"'blocks.0.linear', which is no unit"):
        compiled({"reshard_after_forward": {"blocks.*.linear": False}})
    with pytest.raises(UnitError, match="matches no module"):
        compiled({"reshard_after_forward": {"layers.*": False}})


def test_resharding_that_cannot_be_is_refused(ranks: Any) -> None:
    ranks(4).run(reshard_refused)
    for call in (fxshard.plan, fxshard.validate):
        with pytest.raises(ConfigError, match="4 ranks cannot be cut into groups of 3"):
            call(net(), (batch(0),), world_size=4, reshard_after_forward=3)
    with pytest.raises(ConfigError, match="4 ranks cannot be cut into groups of 3"):
        fxshard.compile(net(), world_size=4, reshard_after_forward=3)
    with pytest.raises(ConfigError, match="nothing is sharded"):
        fxshard.plan(net(), (batch(0),), world_size=4, strategy="no_shard", reshard_after_forward=2)


# -- groups that the user gives --------------------------------------------------------------------


def in_two_groups(rank: int, world_size: int) -> list[tuple[Any, Any]]:
    """Ranks 0 1 and 2 3 train for themselves, under a mesh, a slice of one and a process group."""
    mesh = grid(2, 2)["shard"]
    found: list[Any] = []
    for options in ({"mesh": mesh}, {"process_group": mesh.get_group()}):
        model, reference = fxshard.compile(net(), units=["blocks.*"], **options), net()
        for block in reference.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(reference, mesh=mesh)
        seen = []
        for each in (model, reference):
            optimizer = AdamW(each.parameters(), lr=1e-2)
            for step in range(STEPS + rank // 2):  # the groups do not even take as many steps
                loss_of(each(batch(rank, step))).backward()
                grads = grads_of(each)
                optimizer.step()
                optimizer.zero_grad()
            seen.append((grads, state_of(each)))
        found.append(tuple(seen))
    return found


def test_two_groups_train_for_themselves_as_under_fsdp2(ranks: Any) -> None:
    results = ranks(4).run(in_two_groups)
    for pairs in results:
        for mine, other in pairs:
            assert_same(mine, other)
    params = [pairs[0][0][1]["head.weight"] for pairs in results]
    assert torch.equal(params[0], params[1]) and torch.equal(params[2], params[3])
    assert not torch.equal(params[0], params[2])


def in_a_part(rank: int, world_size: int) -> list[list[int]]:
    """Only ranks 1 and 2 have a model."""
    group = dist.new_group([1, 2])
    if rank not in (1, 2):
        return []
    model = compiled({"process_group": group})
    with count_collectives() as seen:
        loss_of(model(batch(rank))).backward()
    reference = net()
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in reference.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(reference, mesh=mesh)
    loss_of(reference(batch(rank))).backward()
    assert_same(grads_of(model), grads_of(reference))
    return [list(call.ranks) for call in seen.calls]


def test_ranks_outside_of_the_group_take_no_part(ranks: Any) -> None:
    outside, *inside = ranks(3).run(in_a_part)
    assert outside == []
    assert inside == [[[1, 2]] * 12] * 2


def small() -> Whole:
    """For 8 ranks, each of which traces it."""
    torch.manual_seed(0)
    return Whole()


def reshards_inside_its_group(rank: int, world_size: int) -> tuple[Any, Any, set[Any]]:
    """Two groups of four; each is resharded to pairs."""
    mesh = grid(2, 4)["shard"]
    options: Options = {"units": ["blocks.*"], "reshard_after_forward": 2}
    found = []
    for each in (
        fxshard.compile(small(), mesh=mesh, **options),
        fxshard.compile(small(), strategy="hybrid_shard", mesh=grid(2, 4), **options),
    ):
        optimizer = AdamW(each.parameters(), lr=1e-2)
        with count_collectives() as seen:
            for step in range(2):
                loss_of(each(batch(rank % 4, step))).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((state_of(each), groups(seen.calls, "all_gather")))
    (mine, used), (other, same) = found
    assert used == same
    return mine, other, used


def test_resharding_inside_of_two_groups(ranks: Any) -> None:
    """Both groups see the same batches: then they are each what a hybrid of them is."""
    for rank, (mine, other, used) in enumerate(ranks(8).run(reshards_inside_its_group)):
        assert_same(mine, other, rtol=1e-6, atol=1e-6)
        four, two = rank // 4 * 4, rank // 2 * 2
        assert used == {(four, four + 1, four + 2, four + 3), (two, two + 1)}


# -- world sizes -----------------------------------------------------------------------------------


WAYS: dict[str, tuple[Options, Options]] = {
    "full_shard": ({}, {}),
    "shard_grad_op": ({"strategy": "shard_grad_op"}, {"reshard_after_forward": False}),
    "no_shard": ({"strategy": "no_shard"}, {"mesh": (0, 1)}),
    "hybrid_shard": ({"strategy": "hybrid_shard", "mesh": (1, 0)}, {"mesh": (1, 0)}),
    "hybrid_shard_zero2": (
        {"strategy": "hybrid_shard_zero2", "mesh": (1, 0)},
        {"mesh": (1, 0), "reshard_after_forward": False},
    ),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.sample(3)
def test_every_world_size(ranks: Any, strategy: str, world_size: int) -> None:
    """`gain` has one row: all ranks but the first have an empty shard of it."""
    mine, other = (
        options | {"mesh": tuple(size or world_size for size in options["mesh"])}
        if "mesh" in options
        else options
        for options in WAYS[strategy]
    )
    rtol = 0 if world_size <= 2 else 1e-6
    assert_all(ranks(world_size), ["mlp13"], mine, other, rtol)


def rows_of_gain(rank: int, world_size: int, strategy: str) -> tuple[int, int]:
    case = MODELS["mlp13"]
    options: Options = {"strategy": strategy, "units": case.units}
    if "hybrid" in strategy:
        options["mesh"] = grid(2, 2)
    model = fxshard.compile(case.build(), **options)
    (args, kwargs) = case.batch(rank, 0)
    case.loss(model(*args, **kwargs)).backward()
    gain: Any = model.get_parameter("blocks.0.gain")
    return len(gain.to_local()), len(gain.grad.to_local())


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        ("full_shard", [1, 0, 0, 0]),
        ("shard_grad_op", [1, 0, 0, 0]),
        ("no_shard", [1, 1, 1, 1]),
        ("hybrid_shard", [1, 0, 1, 0]),
        ("hybrid_shard_zero2", [1, 0, 1, 0]),
    ],
)
def test_empty_shards(ranks: Any, strategy: str, rows: list[int]) -> None:
    assert ranks(4).run(rows_of_gain, strategy) == [(n, n) for n in rows]
