"""What each strategy does on real ranks: numbers as FSDP2's, collectives and bytes by hand."""

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import AdamW

import fxshard
from fxshard._torch import process_groups
from fxshard.errors import ConfigError, UnitError
from fxshard.memory.category import Category
from tests import fsdp2
from tests.end_to_end.test_training import Net, assert_same, batch, grads_of, loss_of, state_of
from tests.fsdp2 import Result, full
from tests.oracles import Collective, count_collectives
from tests.zoo import MODELS

STEPS = 3
Options = dict[str, Any]
adamw = functools.partial(AdamW, lr=1e-3)


@functools.cache
def grid(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def with_mesh(options: Options) -> Options:
    """`options` with the mesh of the shape that they give."""
    return options | ({"mesh": grid(*options["mesh"])} if "mesh" in options else {})


def ours(name: str, options: Options) -> Result:
    case = MODELS[name]
    torch.manual_seed(0)
    model = fxshard.compile(case.build(), units=case.units, **with_mesh(options))
    return fsdp2.run_steps(model, case, STEPS)


def theirs(name: str, options: Options) -> Result:
    return fsdp2.train(MODELS[name], STEPS, **with_mesh(options))


def both(
    rank: int, world_size: int, names: Iterable[str], mine: Options, other: Options
) -> list[tuple[Result, Result]]:
    return [(ours(name, mine), theirs(name, other)) for name in names]


def assert_all(
    pool: Any, names: Iterable[str], mine: Options, other: Options, rtol: float = 0
) -> None:
    """On every rank and for every model, what fxshard and FSDP2 leave is the same."""
    for pairs in pool.run(both, names, mine, other):
        for result, reference in pairs:
            if rtol:
                fsdp2.assert_close(result, reference, rtol=rtol)
            else:
                fsdp2.assert_bitwise(result, reference)


def net() -> Any:
    """Three blocks and what is around them, the same on every rank."""
    torch.manual_seed(0)
    return Net()


def compiled(options: Options) -> Any:
    return fxshard.compile(net(), units=["blocks.*"], **with_mesh(options))


def one_step(
    rank: int, world_size: int, options: Options
) -> tuple[list[Collective], list[Collective]]:
    """Collectives of a step's forward and of its backward, with an optimizer step."""
    model = compiled(options)
    optimizer = AdamW(model.parameters())
    model._fxshard.variant((batch(rank),), {})
    with count_collectives() as forward:
        loss = loss_of(model(batch(rank)))
    with count_collectives() as backward:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return forward.calls, backward.calls


def sizes(calls: Iterable[Collective], kind: str) -> list[int]:
    return [call.nbytes for call in calls if call.kind == kind]


def groups(calls: Iterable[Collective], kind: str) -> set[tuple[int, ...]]:
    return {call.ranks for call in calls if call.kind == kind}


# Bytes of Net's units, and of what backward reads of them. A block has 6 + 6 (norm), 6 x 6 + 6
# (linear) numbers, and its biases are not read; the root 6 x 5 + 6 (inlet), 3 x 6 + 3 (head), and
# only the head's matrix is read.
BLOCK, ROOT = 4 * 54, 4 * 57
BLOCK_2, ROOT_2 = 4 * 54, 4 * 64  # 2 ranks pad the head's 3 rows to 4
BLOCK_4, ROOT_4 = 4 * 72, 4 * 76  # 4 ranks pad 6 rows to 8
READ_2, READ_ROOT_2 = 4 * 48, 4 * 24
READ_4, READ_ROOT_4 = 4 * 64, 4 * 24


# -- shard_grad_op --------------------------------------------------------------------------------


def test_shard_grad_op_bitwise_with_fsdp2(ranks: Any) -> None:
    mine, other = {"strategy": "shard_grad_op"}, {"reshard_after_forward": False}
    assert_all(ranks(2), MODELS, mine, other)


@pytest.mark.parametrize("strategy", ["shard_grad_op", ShardingStrategy.SHARD_GRAD_OP])
def test_shard_grad_op_gathers_nothing_in_backward(ranks: Any, strategy: Any) -> None:
    for forward, backward in ranks(2).run(one_step, {"strategy": strategy}):
        assert sizes(forward, "all_gather") == [ROOT_2, BLOCK_2, BLOCK_2, BLOCK_2]
        assert sizes(backward, "reduce_scatter") == [BLOCK_2, BLOCK_2, BLOCK_2, ROOT_2]
        assert len(forward) == len(backward) == 4


# -- no_shard -------------------------------------------------------------------------------------


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


def average(param: Tensor) -> None:
    assert param.grad is not None
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


@pytest.mark.parametrize("name", MODELS)
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


# -- hybrid ---------------------------------------------------------------------------------------

HYBRID = {"strategy": "hybrid_shard", "mesh": (2, 2)}
HYBRID_ZERO2 = {"strategy": "hybrid_shard_zero2", "mesh": (2, 2)}


@pytest.mark.parametrize(
    "names", [list(MODELS)[:3], pytest.param(list(MODELS)[3:], marks=pytest.mark.slow)]
)
def test_hybrid_bitwise_with_fsdp2(ranks: Any, names: list[str]) -> None:
    """Each reduction is a sum of two numbers: there is one order only."""
    assert_all(ranks(4), names, HYBRID, {"mesh": (2, 2)})


def test_hybrid_zero2_bitwise_with_fsdp2(ranks: Any) -> None:
    other = {"mesh": (2, 2), "reshard_after_forward": False}
    assert_all(ranks(4), ["transformer", "mlp13"], HYBRID_ZERO2, other)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_hybrid_with_one_row_or_column(ranks: Any, shape: tuple[int, int]) -> None:
    mine = {"strategy": "hybrid_shard", "mesh": shape}
    assert_all(ranks(4), ["mlp13"], mine, {"mesh": shape}, rtol=1e-6)


def row_and_column(rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Ranks 0 1 | 2 3: those that share a parameter, and those that hold the same shard."""
    first = rank // 2 * 2
    return (first, first + 1), (rank % 2, rank % 2 + 2)


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


def assert_reduced(calls: list[Collective], row: Any, column: Any) -> None:
    """Each unit is scattered over its row, then half of its bytes are reduced over the column."""
    reductions = [call for call in calls if call.kind != "all_gather"]
    assert [call.kind for call in reductions] == ["reduce_scatter", "all_reduce"] * 4
    assert sizes(calls, "reduce_scatter") == [BLOCK_2, BLOCK_2, BLOCK_2, ROOT_2]
    assert sizes(calls, "all_reduce") == [BLOCK_2 // 2, BLOCK_2 // 2, BLOCK_2 // 2, ROOT_2 // 2]
    assert groups(calls, "reduce_scatter") == {row}
    assert groups(calls, "all_reduce") == {column}


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
    """Shard groups 01, 23; replicas 02, 13, or 03, 12 which hold different rows."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    groups |= {ranks: dist.new_group(list(ranks)) for ranks in ((0, 3), (1, 2))}

    def mine(*choices: tuple[int, int]) -> Any:
        return next(groups[ranks] for ranks in choices if rank in ranks)

    shard = mine((0, 1), (2, 3))
    with pytest.raises(ConfigError, match="at different places of their shard groups"):
        pair = (shard, mine((0, 3), (1, 2)))
        fxshard.compile(net(), strategy="hybrid_shard", process_group=pair)
    pair = (shard, mine((0, 2), (1, 3)))
    ours = fxshard.compile(net(), strategy="hybrid_shard", process_group=pair)
    mesh = next(ours.parameters()).device_mesh
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]


def test_pairs_of_groups(ranks: Any) -> None:
    ranks(4).run(pairs_of_groups)


def test_what_is_no_arrangement_is_refused_on_all_ranks(ranks: Any) -> None:
    ranks(4).run(hybrid_refused)


# -- reshard_after_forward ------------------------------------------------------------------------


def test_reshard_to_groups_close_to_fsdp2(ranks: Any) -> None:
    options = {"reshard_after_forward": 2}
    assert_all(ranks(4), ["tied", "mlp13"], options, options, rtol=1e-6)


@pytest.mark.parametrize("value", [True, False, 2])
def test_reshard_bitwise_with_fsdp2_on_2_ranks(ranks: Any, value: bool | int) -> None:
    options = {"reshard_after_forward": value}
    assert_all(ranks(2), ["mlp13", "tied"], options, options)


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


MIXED = {"reshard_after_forward": {"blocks.0": False, "blocks.1": 2, "": False}}


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


# -- groups that the user gives -------------------------------------------------------------------


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


def reshards_inside_its_group(rank: int, world_size: int) -> tuple[Any, Any, set[Any]]:
    """Two groups of four; each is resharded to pairs."""
    mesh = grid(2, 4)["shard"]
    options: Options = {"units": ["blocks.*"], "reshard_after_forward": 2}
    found = []
    for each in (
        fxshard.compile(net(), mesh=mesh, **options),
        fxshard.compile(net(), strategy="hybrid_shard", mesh=grid(2, 4), **options),
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


# -- world sizes ----------------------------------------------------------------------------------

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


# -- ignored --------------------------------------------------------------------------------------

IGNORED: dict[str, Callable[[Any], list[Any]]] = {
    "module": lambda model: [model.blocks[1]],
    "inner module": lambda model: [model.blocks[0].norm],
    "parameter": lambda model: [model.blocks[2].linear.weight],
    "globs": lambda model: ["blocks.*.norm", "head.bias"],
    "everything of the root": lambda model: ["inlet", "head"],
}
LEFT_OUT = {
    "module": ["blocks.1.norm", "blocks.1.linear"],
    "inner module": ["blocks.0.norm"],
    "parameter": ["blocks.2.linear.weight"],
    "globs": ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "head.bias"],
    "everything of the root": ["inlet", "head"],
}
# Of 2 ranks, in the order in which backward reduces: 0 is a unit without anything to reduce.
REDUCED = {
    "module": [BLOCK_2, 0, BLOCK_2, ROOT_2],
    "inner module": [BLOCK_2, BLOCK_2, BLOCK_2 - 4 * 12, ROOT_2],
    "parameter": [BLOCK_2 - 4 * 36, BLOCK_2, BLOCK_2, ROOT_2],
    "globs": [BLOCK_2 - 4 * 12] * 3 + [ROOT_2 - 4 * 4],
    "everything of the root": [BLOCK_2] * 3 + [0],
}


def left_out(model: nn.Module, how: str) -> dict[str, nn.Parameter]:
    prefixes = LEFT_OUT[how]
    return {
        name: param
        for name, param in model.named_parameters()
        if any(name == p or name.startswith(p + ".") for p in prefixes)
    }


def averaged_by_hand(params: Iterable[nn.Parameter]) -> None:
    """What a user does with the gradients of what is ignored."""
    for param in params:
        average(param)


def ignores(rank: int, world_size: int, how: str, strategy: str) -> Any:
    plain = net()
    kept = left_out(plain, how)
    model = fxshard.compile(
        plain, units=["blocks.*"], ignored=IGNORED[how](plain), strategy=strategy
    )
    named = dict(model.named_parameters())
    for name, param in kept.items():
        assert named[name] is param and type(param) is nn.Parameter
    assert all(isinstance(param, DTensor) for name, param in named.items() if name not in kept)

    reference = net()
    apart = set(left_out(reference, how).values())
    options: Options = {"ignored_params": apart}
    if strategy == "no_shard":
        options["mesh"] = grid(world_size, 1)
    elif strategy == "shard_grad_op":
        options["reshard_after_forward"] = False
    for block in reference.blocks:
        fully_shard(block, **options)
    fully_shard(reference, **options)

    seen = []
    for each, alone in ((model, kept.values()), (reference, apart)):
        optimizer = AdamW(each.parameters(), lr=1e-2)
        values: list[Any] = []
        for step in range(STEPS):
            loss = loss_of(each(batch(rank, step)))
            with count_collectives() as calls:
                loss.backward()
            values.append((loss.detach(), grads_of(each)))
            if step == 1:
                averaged_by_hand(p for p in each.parameters() if p in set(alone))
            optimizer.step()
            optimizer.zero_grad()
        values.append(state_of(each))
        seen.append((values, calls.calls))
    return seen, {name: seen[0][0][0][1][name] for name in kept}


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("how", IGNORED)
def test_ignored_parameters_stay_whole_and_local(ranks: Any, how: str, strategy: str) -> None:
    first, second = ranks(2).run(ignores, how, strategy)
    for (mine, calls), (other, _) in (first[0], second[0]):
        assert_same(mine, other)
        if strategy != "no_shard":
            want = [size for size in REDUCED[how] if size]
            assert sizes(calls, "reduce_scatter") == want
    grads = first[1], second[1]
    assert list(grads[0]) == list(left_out(net(), how))
    for name in grads[0]:
        assert not torch.equal(grads[0][name], grads[1][name])


def gathers_nothing_ignored(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    forward, backward = one_step(rank, world_size, {"ignored": ["blocks.*.linear", "head"]})
    return sizes(forward, "all_gather"), sizes(backward, "all_gather")


def test_ignored_parameters_are_not_gathered(ranks: Any) -> None:
    for forward, backward in ranks(2).run(gathers_nothing_ignored):
        assert forward == [4 * 36, 4 * 12, 4 * 12, 4 * 12]  # the inlet, and the norms
        assert backward == [4 * 12, 4 * 12, 4 * 12]


class Tied(Net):
    """One block's linear layer is another's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear = self.blocks[0].linear


def ignores_tied(rank: int, world_size: int) -> list[Any]:
    seen = []
    for how in ("fxshard", "fsdp2"):
        torch.manual_seed(0)
        model: Any = Tied()
        weight = model.blocks[0].linear.weight
        if how == "fxshard":
            model = fxshard.compile(model, units=["blocks.*"], ignored=["blocks.0.linear"])
        else:
            alone = set(model.blocks[0].linear.parameters())
            for block in model.blocks:
                fully_shard(block, ignored_params=alone)
            fully_shard(model, ignored_params=alone)
        assert model.blocks[0].linear.weight is model.blocks[2].linear.weight is weight
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            loss_of(model(batch(rank, step))).backward()
            grads = grads_of(model)
            optimizer.step()
            optimizer.zero_grad()
        seen.append((grads, state_of(model)))
    return seen


def test_tied_ignored_parameters(ranks: Any) -> None:
    for mine, other in ranks(2).run(ignores_tied):
        assert_same(mine, other)


def test_ignored_names_must_exist() -> None:
    for ignored in (["blocks.7"], [nn.Linear(2, 2)], [nn.Parameter(torch.ones(1))]):
        with pytest.raises(UnitError, match="is not in Net"):
            fxshard.plan(net(), (batch(0),), world_size=2, ignored=ignored)


# -- bytes ----------------------------------------------------------------------------------------


def report(world_size: Any, **options: Any) -> Any:
    model = net()
    return fxshard.plan(
        model, (batch(0),), world_size=world_size, units=["blocks.*"], **options
    ).memory


def after_forward(world_size: Any, **options: Any) -> dict[Category, int]:
    return report(world_size, **options).snapshot("", "After Post-Forward")


def test_what_stays_unsharded_behind_forward() -> None:
    """What backward reads; the rest is given back in forward."""
    read = 3 * READ_4 + READ_ROOT_4
    for options in ({"strategy": "shard_grad_op"}, {"reshard_after_forward": False}):
        assert after_forward(4, **options)[Category.UNSHARDED_PARAM] == read
    some = {"blocks.1": False}
    assert after_forward(4, reshard_after_forward=some)[Category.UNSHARDED_PARAM] == READ_4
    for strategy in ("full_shard", "no_shard"):
        assert after_forward(4, strategy=strategy)[Category.UNSHARDED_PARAM] == 0
    assert after_forward((2, 2), strategy="hybrid_shard")[Category.UNSHARDED_PARAM] == 0
    zero2 = after_forward((2, 2), strategy="hybrid_shard_zero2")
    assert zero2[Category.UNSHARDED_PARAM] == 3 * READ_2 + READ_ROOT_2


def test_sharded_parameters_by_strategy() -> None:
    def parameters(world_size: Any, **options: Any) -> int:
        return after_forward(world_size, **options)[Category.SHARDED_PARAM]

    assert parameters(4) == (3 * BLOCK_4 + ROOT_4) // 4
    assert parameters(4, strategy="shard_grad_op") == (3 * BLOCK_4 + ROOT_4) // 4
    assert parameters(4, strategy="no_shard") == 3 * BLOCK + ROOT
    assert parameters((2, 2), strategy="hybrid_shard") == (3 * BLOCK_2 + ROOT_2) // 2
    # Resharded to pairs, half of what backward reads is kept besides.
    kept = (3 * READ_4 + READ_ROOT_4) // 2
    assert parameters(4, reshard_after_forward=2) == (3 * BLOCK_4 + ROOT_4) // 4 + kept
    # What is ignored is whole: here the norms and the head.
    rest = (3 * 4 * 56 + 4 * 48) // 4
    assert parameters(4, ignored=["blocks.*.norm", "head"]) == rest + 3 * 4 * 12 + 4 * 21


def test_gradients_by_strategy() -> None:
    def gradients(world_size: Any, **options: Any) -> int:
        (*_, backward, _) = report(world_size, **options).phases()
        return int(backward.after[-1, list(Category).index(Category.SHARDED_GRAD)])

    assert gradients(4) == (3 * BLOCK_4 + ROOT_4) // 4
    assert gradients(4, strategy="no_shard") == 3 * BLOCK + ROOT
    assert gradients((2, 2), strategy="hybrid_shard") == (3 * BLOCK_2 + ROOT_2) // 2
    assert gradients((4, 1), strategy="hybrid_shard") == 3 * BLOCK + ROOT


VALIDATED: list[tuple[Any, Options]] = [
    (2, {"strategy": "shard_grad_op"}),
    (8, {"strategy": "shard_grad_op"}),
    (1, {"strategy": "shard_grad_op"}),
    (1, {"strategy": "no_shard"}),
    (8, {"strategy": "no_shard"}),
    ((2, 3), {"strategy": "hybrid_shard"}),
    ((2, 3), {"strategy": "hybrid_shard_zero2"}),
    ((4, 1), {"strategy": "hybrid_shard"}),
    ((1, 4), {"strategy": "hybrid_shard_zero2"}),
    (8, {"reshard_after_forward": 2}),
    (8, {"reshard_after_forward": 4}),
    ((2, 4), {"strategy": "hybrid_shard", "reshard_after_forward": 2}),
    (8, {"reshard_after_forward": 8}),
    (4, {"ignored": ["**.bias"]}),
    (4, {"ignored": ["**.bias"], "strategy": "shard_grad_op"}),
    (3, {"ignored": ["**.bias"], "strategy": "no_shard"}),
    (4, {"forward_prefetch": 2, "backward_prefetch": 2, "strategy": "shard_grad_op"}),
    ((2, 2), {"forward_prefetch": 0, "backward_prefetch": 0, "strategy": "hybrid_shard"}),
]


def named(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return str(value)


@pytest.mark.parametrize(("world_size", "options"), VALIDATED, ids=named)
@pytest.mark.parametrize("name", ["transformer", "tied", "mlp13"])
def test_static_equals_measured(name: str, world_size: Any, options: Options) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    args, kwargs = case.batch(0, 0)
    result = fxshard.validate(
        case.build(),
        args,
        kwargs,
        world_size=world_size,
        units=case.units,
        optimizer=adamw,
        **options,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


def test_static_equals_measured_with_units_of_all_kinds() -> None:
    for world_size, options in ((4, MIXED), (4, {"ignored": ["blocks.1", "head.bias"]})):
        result = fxshard.validate(
            net(),
            (batch(0),),
            world_size=world_size,
            units=["blocks.*"],
            optimizer=adamw,
            **options,
        )
        assert result.max_abs_difference == 0, result.table(only_different=True)


# -- inside this process --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        ((2, 2), {"strategy": "hybrid_shard"}),
        ((2, 3), {"strategy": "hybrid_shard_zero2"}),
        ((3, 1), {"strategy": "hybrid_shard"}),
        (3, {"strategy": "shard_grad_op"}),
        (3, {"strategy": "no_shard"}),
        (4, {"reshard_after_forward": 2}),
        ((2, 4), {"strategy": "hybrid_shard", "reshard_after_forward": 2}),
        (4, MIXED),
        (2, {"ignored": ["blocks.1", "**.bias"]}),
        ((2, 2), {"strategy": "hybrid_shard", "ignored": ["blocks.*.norm"]}),
    ],
    ids=named,
)
def test_in_process_equals_eager(world_size: Any, options: Options) -> None:
    model = fxshard.compile(net(), units=["blocks.*"], world_size=world_size, **options)
    seen = []
    for each in (model, net()):
        optimizer = AdamW(each.parameters(), lr=1e-2)
        values: list[Any] = []
        for step in range(STEPS):
            loss = loss_of(each(batch(0, step)))
            loss.backward()
            values.append((loss.detach(), grads_of(each)))
            optimizer.step()
            optimizer.zero_grad()
        values.append({name: full(p) for name, p in each.named_parameters()})
        seen.append(values)
    mine, eager = seen
    assert_same(mine, eager, rtol=1e-6, atol=1e-7)


def test_hybrid_worlds_are_given_as_pairs() -> None:
    for call in (fxshard.plan, fxshard.validate):
        with pytest.raises(ConfigError, match="has two dimensions"):
            call(net(), (batch(0),), world_size=4, strategy="hybrid_shard")
        with pytest.raises(ConfigError, match="has one dimension"):
            call(net(), (batch(0),), world_size=(2, 2))
    with pytest.raises(ConfigError, match="has two dimensions"):
        fxshard.compile(net(), world_size=4, strategy="hybrid_shard")


def test_a_fake_group_of_any_size_counts_as_the_ranks_do() -> None:
    with process_groups.fake_process_group(0, 8):
        grid.cache_clear()
        _, backward = one_step(0, 8, {"strategy": "hybrid_shard", "mesh": (4, 2)})
        grid.cache_clear()
    assert_reduced(backward, (0, 1), (0, 2, 4, 6))
