"""torch's test_fsdp_grad_acc.py: accumulated gradients are those of the batches joined."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload
from torch.testing import assert_close

from tests.peers.fsdp1.models import Transformer
from tests.peers.fsdp1.shared import STRATEGIES, compiled, ddp, grads_of, loss_of, sgd

PREFETCHES = (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)
GRID = [
    pytest.param(strategy, prefetch, id=f"{strategy.name}-{prefetch and prefetch.name}")
    for strategy, prefetch in itertools.product(STRATEGIES, PREFETCHES)
]
# Whether 9 steps are inside of `no_sync`; the last step always reduces.
INSIDE, OUTSIDE = [True] * 3, [False] * 3
ORDERS = {"inside_first": INSIDE + OUTSIDE + INSIDE, "outside_first": OUTSIDE + INSIDE + OUTSIDE}

Batch = tuple[Tensor, ...]


def batches(count: int) -> list[Batch]:
    """The same tokens in other orders; others on each rank."""
    first = Transformer().get_input()

    def shuffled(x: Tensor) -> Tensor:
        return x.view(-1)[torch.randperm(x.numel())].view_as(x)

    found = [first, *(tuple(map(shuffled, first)) for _ in range(count - 1))]
    for a, b in itertools.combinations(found, 2):
        assert not any(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return found


def accumulated(rank: int, world_size: int, inside: list[bool], options: dict[str, Any]) -> None:
    """Against the joined batch: of the same model, as torch's test has it, and of DDP."""
    model = compiled(Transformer(batch_norm=False), **options)
    optimizer = sgd(model)
    each = batches(len(inside))
    joined = tuple(torch.cat(parts, dim=1) for parts in zip(*each, strict=True))
    want = loss_of(model, joined)
    want.backward()
    ours = {name: grad for name, grad in grads_of(model).items() if grad is not None}
    model.zero_grad()
    losses = []
    for number, batch in enumerate(each):
        silent = inside[number] and number < len(each) - 1
        with model.no_sync() if silent else contextlib.nullcontext():
            loss = loss_of(model, batch)
            loss.backward()
        losses.append(loss.detach())
    assert_close(sum(losses), want.detach())
    got = {name: grad for name, grad in grads_of(model).items() if grad is not None}
    assert_close(got, ours)
    reference = ddp(Transformer(batch_norm=False))
    loss_of(reference, joined).backward()
    assert_close(got, {n: grad for n, grad in grads_of(reference).items() if grad is not None})
    optimizer.step()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("strategy", "prefetch"), GRID)
@pytest.mark.parametrize("order", ORDERS)
def test_accumulation(ranks: Any, order: str, strategy: Any, prefetch: Any) -> None:
    options = {"strategy": strategy, "backward_prefetch": prefetch}
    ranks(2).run(accumulated, ORDERS[order], options)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("strategy", "prefetch"), GRID)
def test_accumulation_with_offload(ranks: Any, strategy: Any, prefetch: Any) -> None:
    options = {"strategy": strategy, "backward_prefetch": prefetch, "offload": CPUOffload(True)}
    ranks(2).run(accumulated, INSIDE, options)


def test_accumulation_with_offload_and_reduction(ranks: Any) -> None:
    """FSDP1 cannot do that: accumulate sharded gradients that are offloaded."""
    ranks(2).run(accumulated, ORDERS["outside_first"], {"offload": CPUOffload(True)})
