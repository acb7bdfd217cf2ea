"""test_fully_shard_clip_grad_norm_.py"""

import copy
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.oracles import count_collectives
from tests.peers.fsdp2.common import Transformer, adam, ddp, made, shard


def clipped(rank: int, world_size: int, norm_type: float) -> None:
    model = made(Transformer)
    ref = ddp(copy.deepcopy(model))
    shard(model)
    both = [(ref, adam(ref)), (model, adam(model))]
    tokens = model.tokens(3, 16)

    def norm(tensor: Any) -> float:
        return torch.linalg.vector_norm(tensor, ord=norm_type).item()

    for _ in range(10):
        for each, optim in both:
            optim.zero_grad()
            each(tokens).sum().backward()
        pairs = list(zip(model.parameters(), ref.parameters(), strict=True))
        before = [(m.grad.to_local().clone(), t.grad.clone()) for m, t in pairs]
        for mine, theirs in pairs:
            assert_close(mine.grad.full_tensor(), theirs.grad)
        assert all(norm(each) > 1 for grads in before for each in grads)  # or nothing is clipped
        theirs_total = torch.nn.utils.clip_grad_norm_(ref.parameters(), 1, norm_type)
        with count_collectives() as seen:
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1, norm_type, foreach=True)
        assert_close(total.full_tensor(), theirs_total)
        assert seen.kinds() == ["all_reduce"]
        for (mine, theirs), (shard_before, grad_before) in zip(pairs, before, strict=True):
            for now, then in ((mine.grad.to_local(), shard_before), (theirs.grad, grad_before)):
                assert norm(now) <= 1
                assert not torch.equal(now, then) or not then.count_nonzero()


@pytest.mark.parametrize("norm_type", [2, 1, float("inf")])
def test_gradients_are_clipped_by_their_common_norm(ranks: Any, norm_type: float) -> None:
    ranks(2).run(clipped, norm_type)
