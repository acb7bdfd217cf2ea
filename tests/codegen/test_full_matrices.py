"""Who owns which matrix, and in which round it is sent."""

import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from fxshard.codegen import muon
from fxshard.codegen.full_matrices import Matrix, Rounds, most_flops, rounds
from fxshard.ir.layout import ParamLayout

SHAPES = [(4, 4), (64, 16), (16, 64), (3, 200), (128, 128), (1, 5), (32, 32), (32, 32), (8, 2)]


def matrices(shapes: list[tuple[int, int]], ranks: int) -> list[Matrix]:
    found = []
    for number, shape in enumerate(shapes):
        layout = ParamLayout(shape, torch.float32, 0, (1, ranks), (Replicate(), Shard(0)))
        flops = muon.newton_schulz_flops(*shape, steps=5)
        found.append(Matrix(f"w{number}", layout, torch.bfloat16, flops))
    return found


def owned(found: Rounds, rank: int) -> list[int]:
    return [i for now in found for i in now[rank]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_each_matrix_has_one_owner_and_flops_are_balanced(ranks: int) -> None:
    every = matrices(SHAPES, ranks)
    found = rounds(every, ranks)
    assert sorted(i for rank in range(ranks) for i in owned(found, rank)) == [*range(len(SHAPES))]
    loads = [sum(every[i].flops for i in owned(found, rank)) for rank in range(ranks)]
    least = max(max(m.flops for m in every), math.ceil(sum(m.flops for m in every) / ranks))
    assert max(loads) == most_flops(every, found) <= least * 4 / 3
    assert found == rounds(every, ranks)


def test_equal_matrices_are_shared_evenly() -> None:
    found = rounds(matrices([(32, 32)] * 12, 4), 4)
    assert [len(owned(found, rank)) for rank in range(4)] == [3] * 4


def test_rounds_bound_what_an_owner_receives() -> None:
    every = matrices([(32, 32)] * 12, 4)
    one = every[0].nbytes
    for limit, count in ((1, 3), (2 * one, 2), (3 * one, 1)):
        found = rounds(every, 4, limit)
        assert len(found) == count
        most = max(sum(every[i].nbytes for i in mine) for now in found for mine in now)
        assert most <= max(limit, one)


def test_rank_0_is_the_one_that_needs_most_memory() -> None:
    """The largest matrix is a thin one, of few FLOPs, which the rank with the fewest gets."""
    every = matrices([(64, 64), (64, 64), (2, 6000)], 3)
    assert owned(rounds(every, 3), 0) == [2]


def test_known_owners_are_kept_and_the_others_go_around_them() -> None:
    every = matrices([(32, 32)] * 4, 2)
    found = rounds(every, 2, known={"w3": 1, "w2": 1, "elsewhere": 0})
    assert owned(found, 1) == [2, 3]
    assert owned(found, 0) == [0, 1]


def test_flops_are_those_of_torchs_step() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for shape in ((5, 9), (9, 5), (4, 4)):
        param = torch.nn.Parameter(torch.randn(shape))
        param.grad = torch.randn(shape)
        with FlopCounterMode(display=False) as counted:
            torch.optim.Muon([param], ns_steps=3).step()
        assert counted.get_total_flops() == muon.newton_schulz_flops(*shape, steps=3)
