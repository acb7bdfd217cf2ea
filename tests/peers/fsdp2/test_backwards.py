"""test_fully_shard_comm.py: more than one backward of a forward."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.peers.fsdp2.common import DoubleLinear, adam, assert_parity, average_grads, made, shard


def two_paths(rank: int, world_size: int, reshard: bool) -> None:
    """Backward through one path of a fork, and then through the other, over what both share."""
    model = made(lambda: nn.Sequential(nn.Linear(8, 8), DoubleLinear(8)))
    ref = copy.deepcopy(model)
    shard(model, model[0], model[1].lin1, model[1].lin2, reshard_after_forward=reshard)
    both = [(ref, adam(ref)), (model, adam(model))]
    for _ in range(3):
        x = torch.randn(4, 8)
        for each, _ in both:
            first, second = each(x)
            second.sum().backward(retain_graph=True)
            first.sum().backward()
        average_grads(ref)
        assert_parity(ref, model)
        for _, optim in both:
            optim.step()
            optim.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
def test_backward_through_one_path_after_the_other(ranks: Any, reshard: bool) -> None:
    ranks(2).run(two_paths, reshard)
