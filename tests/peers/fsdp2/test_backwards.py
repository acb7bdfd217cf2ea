"""Several files: more than one backward of a forward, and forward-mode derivatives."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close

import fxshard
from tests.peers.fsdp2.common import DoubleLinear, adam, assert_parity, average_grads, made, shard
from tests.ranks import told


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
            if each is model:
                each.set_is_last_backward(False)
            second.sum().backward(retain_graph=True)
            if each is model:
                each.set_is_last_backward(True)
            first.sum().backward()
        average_grads(ref)
        assert_parity(ref, model)
        for _, optim in both:
            optim.step()
            optim.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
def test_backward_through_one_path_after_the_other(ranks: Any, reshard: bool) -> None:
    ranks(2).run(two_paths, reshard)


def forward_mode(rank: int, world_size: int) -> str:
    """What is differentiated is no input of the sharded module; what is, is refused."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    with torch.device("meta"):
        parts = [nn.Linear(16, 32, bias=False), nn.Linear(32, 20, bias=False)]
    whole = []
    for part in parts:
        fxshard.fully_shard(part, mp_policy=policy, reshard_after_forward=False)
        part.to_empty(device="cpu")
        torch.manual_seed(7)
        weight = torch.randn(part.weight.shape)
        part.load_state_dict({"weight": weight})
        whole.append(weight.bfloat16())
    x, primal, tangent = (torch.randn(n, dtype=torch.bfloat16) for n in (16, 20, 20))
    hidden = parts[0](x)
    out, derivative = torch.func.jvp(lambda unused: parts[1](hidden), (primal,), (tangent,))
    assert out.dtype == torch.bfloat16
    assert_close(out, whole[1] @ (whole[0] @ x))
    assert_close(derivative, torch.zeros_like(out))
    return told(lambda: torch.func.jvp(parts[0], (x,), (x,)))


def test_forward_mode_around_a_sharded_module(ranks: Any) -> None:
    for said in ranks(2).run(forward_mode):
        assert "Transform a model without mixed_precision" in said, said
