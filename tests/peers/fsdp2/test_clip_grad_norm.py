"""test_fully_shard_clip_grad_norm_.py"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing import assert_close

from tests.oracles import count_collectives
from tests.peers.fsdp2.common import MLP, Transformer, adam, average_grads, ddp, made, shard


def assert_clipped(
    ref: Any,
    model: Any,
    x: Tensor,
    max_norm: float,
    norm_type: float,
    all_reduces: int,
    after: Callable[[Any], None] = lambda model: None,
    large: Callable[[Any], bool] = all,
) -> None:
    """Gradients, their total norm, and the norm of each, in ten steps on one batch."""
    both = [(ref, adam(ref)), (model, adam(model))]

    def norm(tensor: Any) -> float:
        return torch.linalg.vector_norm(tensor, ord=norm_type).item()

    for _ in range(10):
        for each, optim in both:
            optim.zero_grad()
            each(x).sum().backward()
        after(ref)
        pairs = list(zip(model.parameters(), ref.parameters(), strict=True))
        before = [(m.grad.to_local().clone(), t.grad.clone()) for m, t in pairs]
        for mine, theirs in pairs:
            assert_close(mine.grad.full_tensor(), theirs.grad)
        for grads in zip(*before, strict=True):
            assert large(norm(each) > max_norm for each in grads)  # or nothing is clipped
        theirs_total = torch.nn.utils.clip_grad_norm_(ref.parameters(), max_norm, norm_type)
        with count_collectives() as seen:
            total: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        assert_close(total.full_tensor(), theirs_total)
        assert seen.kinds() == ["all_reduce"] * all_reduces  # one per dimension of the mesh
        for (mine, theirs), (shard_before, grad_before) in zip(pairs, before, strict=True):
            for now, then in ((mine.grad.to_local(), shard_before), (theirs.grad, grad_before)):
                assert norm(now) <= max_norm
                assert not torch.equal(now, then) or not then.count_nonzero()


def clipped(rank: int, world_size: int, norm_type: float) -> None:
    model = made(Transformer)
    ref = ddp(copy.deepcopy(model))
    shard(model)
    assert_clipped(ref, model, model.tokens(3, 16), 1, norm_type, 1)


@pytest.mark.parametrize("norm_type", [2, 1, float("inf")])
def test_gradients_are_clipped_by_their_common_norm(ranks: Any, norm_type: float) -> None:
    ranks(2).run(clipped, norm_type)


def of_sequences(rank: int, world_size: int, norm_type: float) -> None:
    """Layers whose activations are DTensors, and a norm of which each rank has a part of each
    sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ref = made(
        lambda: nn.Sequential(
            *(MLP(16, multiplier=each) for each in (3, 4, 3)), nn.LayerNorm(16, bias=False)
        )
    )
    plan = {
        "[012].in_proj": ColwiseParallel(use_local_output=False),
        "[01].out_proj": RowwiseParallel(use_local_output=False),
        "2.out_proj": RowwiseParallel(output_layouts=Shard(1)),
        "3": SequenceParallel(sequence_dim=1),
    }
    model: Any = parallelize_module(copy.deepcopy(ref), mesh["tp"], plan)
    shard(model, *model[:3], mesh=mesh["dp"], reshard_after_forward=True)
    torch.manual_seed(43 + rank // 2)
    group = mesh["dp"].get_group()

    def after(model: nn.Module) -> None:
        average_grads(model, group)

    assert_clipped(ref, model, torch.randn(2, 16), 0.5, norm_type, 2, after, large=any)


@pytest.mark.parametrize("norm_type", [2, 1, 3, float("inf")])
def test_gradients_of_two_dimensions_are_clipped(ranks: Any, norm_type: float) -> None:
    ranks(4).run(of_sequences, norm_type)
