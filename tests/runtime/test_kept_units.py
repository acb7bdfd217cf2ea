"""`set_reshard_after_backward(False)`: units stay unsharded for the next forward."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError
from tests.oracles import count_collectives
from tests.runtime.test_unit_methods import assert_same, batch, both, eager, grads, net, step


def microbatches(rank: int, world_size: int) -> None:
    """Three micro-batches without sync: the collectives and gradients of FSDP2, and of eager."""
    for reshard in (False, True):
        counts = []
        for model in both():
            model.set_reshard_after_forward(reshard)
            model.set_reshard_after_backward(False)
            seen = []
            for number in range(3):
                model.set_requires_gradient_sync(number == 2)
                forward, backward = step(model, rank, number)
                seen.append((forward.count("all_gather"), backward.count("all_gather")))
            counts.append(seen)
            for module in (model, *model.blocks):
                module.reshard()  # until then FSDP2's model has parameters without gradients
            assert_same(grads(model), eager(world_size, 3))
        assert counts[0] == counts[1]
        assert [forward for forward, _ in counts[1]] == [4, 0, 0]


def test_micro_batches_gather_once(ranks: Any) -> None:
    ranks(2).run(microbatches)


def sees_changes(rank: int, world_size: int) -> None:
    """After a step of the optimizer what was kept is old, and gathered again; then it is not."""
    reference = net()
    _, model = both()
    model.set_reshard_after_backward(False)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        joined = torch.cat([batch(r, number) for r in range(world_size)])
        expected = reference(joined)
        expected.backward()
        with count_collectives() as seen:
            loss = model(batch(rank, number))
        assert seen.count("all_gather") == 4
        loss.backward()
        for each in (mine, theirs):
            each.step()
            each.zero_grad()
    with torch.no_grad(), count_collectives() as seen:
        model(batch(rank, 9))
    assert seen.count("all_gather") == 4  # the last step changed the shards
    assert_same(
        {n: p.full_tensor() for n, p in model.named_parameters()},
        {n: p.detach() for n, p in reference.named_parameters()},
    )


def test_a_step_of_the_optimizer_is_seen(ranks: Any) -> None:
    ranks(2).run(sees_changes)
