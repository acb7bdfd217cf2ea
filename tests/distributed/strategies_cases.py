"""What several of the tests beside it need (test_strategies)."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW

import fxshard
from tests import fsdp2
from tests.end_to_end.training_cases import Net, batch, loss_of
from tests.fsdp2 import Result
from tests.oracles import Collective, count_collectives
from tests.zoo import MODELS

STEPS = 3


Options = dict[str, Any]


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


def average(param: Tensor) -> None:
    assert param.grad is not None
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


def row_and_column(rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Ranks 0 1 | 2 3: those that share a parameter, and those that hold the same shard."""
    first = rank // 2 * 2
    return (first, first + 1), (rank % 2, rank % 2 + 2)


def assert_reduced(calls: list[Collective], row: Any, column: Any) -> None:
    """Each unit is scattered over its row, then half of its bytes are reduced over the column."""
    reductions = [call for call in calls if call.kind != "all_gather"]
    assert [call.kind for call in reductions] == ["reduce_scatter", "all_reduce"] * 4
    assert sizes(calls, "reduce_scatter") == [BLOCK_2, BLOCK_2, BLOCK_2, ROOT_2]
    assert sizes(calls, "all_reduce") == [BLOCK_2 // 2, BLOCK_2 // 2, BLOCK_2 // 2, ROOT_2 // 2]
    assert groups(calls, "reduce_scatter") == {row}
    assert groups(calls, "all_reduce") == {column}


MIXED = {"reshard_after_forward": {"blocks.0": False, "blocks.1": 2, "": False}}
