"""What each strategy does on real ranks: numbers as FSDP2's, collectives and bytes by hand."""

import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError
from tests import fsdp2
from tests.distributed.strategies_cases import (
    BLOCK,
    BLOCK_2,
    READ_2,
    READ_ROOT_2,
    ROOT,
    ROOT_2,
    STEPS,
    Options,
    assert_all,
    assert_reduced,
    average,
    compiled,
    grid,
    groups,
    net,
    one_step,
    ours,
    row_and_column,
    sizes,
    theirs,
)
from tests.end_to_end.training_cases import assert_same, batch, grads_of, loss_of
from tests.fsdp2 import Result
from tests.zoo import MODELS

# -- shard_grad_op ---------------------------------------------------------------------------------


FEW = ("mlp13", "tied")  # what is padded, and what is tied; the others take longer to trace
NAMES = [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
SMALLEST = [n if n == "mlp13" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_shard_grad_op_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    mine, other = {"strategy": "shard_grad_op"}, {"reshard_after_forward": False}
    assert_all(ranks(2), [name], mine, other)


@pytest.mark.parametrize("strategy", ["shard_grad_op", ShardingStrategy.SHARD_GRAD_OP])
def test_shard_grad_op_gathers_nothing_in_backward(ranks: Any, strategy: Any) -> None:
    for forward, backward in ranks(2).run(one_step, {"strategy": strategy}):
        assert sizes(forward, "all_gather") == [ROOT_2, BLOCK_2, BLOCK_2, BLOCK_2]
        assert sizes(backward, "reduce_scatter") == [BLOCK_2, BLOCK_2, BLOCK_2, ROOT_2]
        assert len(forward) == len(backward) == 4


# -- no_shard --------------------------------------------------------------------------------------


def data_parallel(rank: int, world_size: int, name: str) -> tuple[Result, Result, Result]:
    """fxshard; FSDP2 on a mesh of replicas; plain eager whose gradients are averaged by hand."""
    case = MODELS[name]
    torch.manual_seed(0)
    eager = case.build()
    for param in eager.parameters():
        param.register_post_accumulate_grad_hook(average)
    by_hand = fsdp2.run_steps(eager, case, STEPS)
    return (
        ours(name, {"strategy": "no_shard"}),
        theirs(name, {"mesh": (world_size, 1)}),
        by_hand,
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_shard_bitwise_with_data_parallel(ranks: Any, name: str) -> None:
    for mine, replicated, by_hand in ranks(2).run(data_parallel, name):
        fsdp2.assert_bitwise(mine, replicated)
        fsdp2.assert_bitwise(mine, by_hand)


def test_no_shard_close_to_data_parallel_on_3_ranks(ranks: Any) -> None:
    for mine, replicated, by_hand in ranks(3).run(data_parallel, "mlp13"):
        fsdp2.assert_close(mine, replicated, rtol=1e-6)
        fsdp2.assert_close(mine, by_hand, rtol=1e-6)


@pytest.mark.parametrize("strategy", ["no_shard", ShardingStrategy.NO_SHARD])
def test_no_shard_reduces_each_unit_once(ranks: Any, strategy: Any) -> None:
    for forward, backward in ranks(2).run(one_step, {"strategy": strategy}):
        assert forward == []
        assert [call.kind for call in backward] == ["all_reduce"] * 4
        assert sizes(backward, "all_reduce") == [BLOCK, BLOCK, BLOCK, ROOT]
        assert groups(backward, "all_reduce") == {(0, 1)}


def replicated(rank: int, world_size: int) -> None:
    plain, model = net(), compiled({"strategy": "no_shard"})
    loss_of(model(batch(rank))).backward()
    for (name, want), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert isinstance(param, DTensor) and isinstance(param.grad, DTensor), name
        assert param.placements == param.grad.placements == (Replicate(),)
        assert torch.equal(param.to_local(), want)


def test_no_shard_parameters_are_replicated_dtensors(ranks: Any) -> None:
    ranks(2).run(replicated)


# -- hybrid ----------------------------------------------------------------------------------------


HYBRID = {"strategy": "hybrid_shard", "mesh": (2, 2)}


HYBRID_ZERO2 = {"strategy": "hybrid_shard_zero2", "mesh": (2, 2)}


@pytest.mark.parametrize("name", SMALLEST)
def test_hybrid_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    """Each reduction is a sum of two numbers: there is one order only."""
    assert_all(ranks(4), [name], HYBRID, {"mesh": (2, 2)})


@pytest.mark.parametrize("name", SMALLEST)
def test_hybrid_zero2_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    other = {"mesh": (2, 2), "reshard_after_forward": False}
    assert_all(ranks(4), [name], HYBRID_ZERO2, other)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_hybrid_with_one_row_or_column(ranks: Any, shape: tuple[int, int]) -> None:
    mine = {"strategy": "hybrid_shard", "mesh": shape}
    assert_all(ranks(4), ["mlp13"], mine, {"mesh": shape}, rtol=1e-6)


@pytest.mark.parametrize("strategy", ["hybrid_shard", ShardingStrategy.HYBRID_SHARD])
def test_hybrid_scatters_in_rows_and_reduces_in_columns(ranks: Any, strategy: Any) -> None:
    for rank, calls in enumerate(ranks(4).run(one_step, HYBRID | {"strategy": strategy})):
        forward, backward = calls
        row, column = row_and_column(rank)
        assert sizes(forward, "all_gather") == [ROOT_2, BLOCK_2, BLOCK_2, BLOCK_2]
        assert sizes(backward, "all_gather") == [READ_ROOT_2, READ_2, READ_2, READ_2]
        assert groups([*forward, *backward], "all_gather") == {row}
        assert_reduced(backward, row, column)
        assert (len(forward), len(backward)) == (4, 12)


@pytest.mark.parametrize("strategy", ["hybrid_shard_zero2", ShardingStrategy._HYBRID_SHARD_ZERO2])
def test_hybrid_zero2_gathers_nothing_in_backward(ranks: Any, strategy: Any) -> None:
    for rank, calls in enumerate(ranks(4).run(one_step, HYBRID | {"strategy": strategy})):
        forward, backward = calls
        row, column = row_and_column(rank)
        assert sizes(forward, "all_gather") == [ROOT_2, BLOCK_2, BLOCK_2, BLOCK_2]
        assert groups(forward, "all_gather") == {row}
        assert_reduced(backward, row, column)
        assert (len(forward), len(backward)) == (4, 8)


def hybrid_three_ways(rank: int, world_size: int) -> tuple[Any, list[Any]]:
    """A step's gradients, the mesh and placements: by mesh, pair of groups, and environment."""
    pair = (grid(2, 2)["shard"].get_group(), grid(2, 2)["replicate"].get_group())
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        options: list[Options] = [
            {"mesh": grid(2, 2)},
            {"process_group": pair},
            {},
            {"world_size": (2, 2)},
        ]
        found = []
        for option in options:
            model = fxshard.compile(net(), units=["blocks.*"], strategy="hybrid_shard", **option)
            loss_of(model(batch(rank))).backward()
            param: Any = next(model.parameters())
            where = (param.placements, param.device_mesh.mesh.tolist())
            found.append((where, grads_of(model)))
        return found[0], found[1:]
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_hybrid_by_mesh_groups_and_environment(ranks: Any) -> None:
    for reference, others in ranks(4).run(hybrid_three_ways):
        assert reference[0] == ((Replicate(), Shard(0)), [[0, 1], [2, 3]])
        for other in others:
            assert_same(other, reference)


def hybrid_refused(rank: int, world_size: int) -> None:
    wide: Options = {"strategy": "hybrid_shard"}
    flat = init_device_mesh("cpu", (4,))
    with pytest.raises(ConfigError, match="needs to know how 4 ranks are arranged"):
        compiled(wide)
    with pytest.raises(ConfigError, match=r"product\s+of the two must be that"):
        compiled(wide | {"world_size": (2, 3)})
    with pytest.raises(ConfigError, match="takes two, replicate x shard"):
        fxshard.compile(net(), strategy="hybrid_shard", mesh=flat)
    with pytest.raises(ConfigError, match="takes one"):
        fxshard.compile(net(), mesh=grid(2, 2))
    with pytest.raises(ConfigError, match=r"takes a pair \(shard, replicate\)"):
        fxshard.compile(net(), strategy="hybrid_shard", process_group=dist.group.WORLD)
    with pytest.raises(ConfigError, match="is a pair"):
        fxshard.compile(net(), process_group=(dist.group.WORLD, dist.group.WORLD))
    with pytest.raises(ConfigError, match="were both given"):
        fxshard.compile(net(), process_group=dist.group.WORLD, mesh=flat)


def pairs_of_groups(rank: int, world_size: int) -> None:
    """Shard groups 01, 23; replicas 02, 13, or 03, 12 which hold different rows.

    Shard groups 03, 12 with replicas 01, 23: to the one it is 03 that is first, to the other 12.
    """
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    groups |= {ranks: dist.new_group(list(ranks)) for ranks in ((0, 3), (1, 2))}

    def mine(*choices: tuple[int, int]) -> Any:
        return next(groups[ranks] for ranks in choices if rank in ranks)

    shard = mine((0, 1), (2, 3))
    with pytest.raises(ConfigError, match="at different places of their shard groups"):
        pair = (shard, mine((0, 3), (1, 2)))
        fxshard.compile(net(), strategy="hybrid_shard", process_group=pair)
    with pytest.raises(ConfigError, match="shard groups in different orders"):
        pair = (mine((0, 3), (1, 2)), shard)
        fxshard.compile(net(), strategy="hybrid_shard", process_group=pair)
    pair = (shard, mine((0, 2), (1, 3)))
    ours = fxshard.compile(net(), strategy="hybrid_shard", process_group=pair)
    mesh = next(ours.parameters()).device_mesh
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]


def test_pairs_of_groups(ranks: Any) -> None:
    ranks(4).run(pairs_of_groups)


def orders(rank: int, world_size: int) -> None:
    """DTensors go by the place in the mesh, and process groups by the number of the rank."""
    for rows in ([1, 0, 3, 2], [[1, 0], [3, 2]], [[0, 1], [3, 2]], [[0, 3], [1, 2]]):
        hybrid = isinstance(rows[0], list)
        options: Options = {"strategy": "hybrid_shard" if hybrid else "full_shard"}
        mesh = DeviceMesh("cpu", rows, mesh_dim_names=("replicate", "shard")[not hybrid :])
        for make in (functools.partial(fxshard.compile, **options), fxshard.fully_shard):
            with pytest.raises(ConfigError, match="process groups order theirs by number"):
                make(net(), mesh=mesh)
    mesh, model, first = DeviceMesh("cpu", [[2, 3], [0, 1]]), net(), net().state_dict()
    if rank:
        torch.nn.init.constant_(next(model.parameters()), 7)
    model = fxshard.compile(model, strategy="hybrid_shard", mesh=mesh, sync_module_states=True)
    assert_close(model.full_state_dict(rank0_only=False), dict(first))


def test_orders_of_ranks_that_process_groups_do_not_have(ranks: Any) -> None:
    ranks(4).run(orders)


def test_what_is_no_arrangement_is_refused_on_all_ranks(ranks: Any) -> None:
    ranks(4).run(hybrid_refused)
