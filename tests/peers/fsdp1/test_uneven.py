"""torch's test_fsdp_uneven.py: rows that do not divide by the number of ranks."""

from typing import Any

import torch
from torch import nn
from torch.testing import assert_close

from tests.fsdp2 import full
from tests.peers.fsdp1.shared import compiled


def one_step(rank: int, world_size: int) -> None:
    """Against the step computed by hand: the gradient of a row is the mean of all inputs."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 3, bias=False)
    inputs, rate = torch.rand(8, 3), 0.1
    want = inputs[rank] @ linear.weight.detach().T
    step = linear.weight.detach() - inputs[:world_size].mean(0).expand(3, 3) * rate
    model = compiled(linear, units=[])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    out = model(inputs[rank])
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert_close(out.detach(), want)
    assert_close(full(model.weight), step)
    with model.summon_full_params():
        assert_close(model.weight.detach(), step)


def test_one_step_on_2_ranks(ranks: Any) -> None:
    ranks(2).run(one_step)


def test_one_step_on_4_ranks(ranks: Any) -> None:
    """The last rank has no row."""
    ranks(4).run(one_step)
