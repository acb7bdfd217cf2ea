"""What is kept of a model that was dropped: its submodules, parameters and gradients.

The model itself goes when Python's garbage collector finds it, which is not the same moment on all
ranks. Here it is gone on rank 1, or not.
"""

import copy
import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard
from tests.fsdp2 import full


def dropped(rank: int, keep: Any) -> tuple[Any, Any, weakref.ref[Any]]:
    """What `keep` takes of eager PyTorch and of fxshard, after a step; the model is dropped."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model = fxshard.compile(copy.deepcopy(plain))
    batch = torch.randn(4, 4)
    plain(batch).square().mean().backward()
    model(batch[2 * rank :][:2]).square().mean().backward()
    kept, gone = keep(model), weakref.ref(model)
    gc.disable()
    del model
    if rank:
        gc.collect()
    gc.enable()
    return keep(plain), kept, gone


def of_submodule(rank: int, world_size: int) -> None:
    plain, kept, _ = dropped(rank, lambda model: model[0])
    batch = torch.randn(4, 4)
    plain.zero_grad()
    kept.zero_grad()
    plain(batch).square().mean().backward()
    kept(batch[2 * rank :][:2]).square().mean().backward()
    for expected, found in zip(plain.parameters(), kept.parameters(), strict=True):
        assert_close(full(found.grad), expected.grad)


def of_parameter(rank: int, world_size: int) -> None:
    plain, kept, _ = dropped(rank, lambda model: model[1].weight)
    with torch.no_grad():
        assert_close(kept.norm().item(), plain.norm().item())
        assert_close(kept + torch.ones(6), plain + 1)
    plain.grad = kept.grad = None
    (plain * plain).sum().backward()
    (kept * kept).sum().backward()
    assert_close(full(kept.grad), plain.grad)


def of_gradient(rank: int, world_size: int) -> None:
    plain, kept, gone = dropped(rank, lambda model: model[1].weight.grad)
    assert (gone() is None) == bool(rank)
    assert_close(kept.norm().item(), plain.norm().item())
    assert_close(kept + torch.ones(6), plain + 1)


def of_nothing(rank: int, world_size: int) -> None:
    """Neither the model nor its gradients stay when nothing was kept."""

    def grads(model: nn.Module) -> list[Tensor]:
        return [p.grad for p in model.parameters() if p.grad is not None]

    _, kept, gone = dropped(rank, lambda model: list(map(weakref.ref, grads(model))))
    gc.collect()
    assert gone() is None
    assert not any(each() is not None for each in kept)


def test_a_submodule(ranks: Any) -> None:
    ranks(2).run(of_submodule)


def test_a_parameter(ranks: Any) -> None:
    ranks(2).run(of_parameter)


def test_a_gradient(ranks: Any) -> None:
    ranks(2).run(of_gradient)


def test_nothing(ranks: Any) -> None:
    ranks(2).run(of_nothing)
