"""Writes into parts of gradients, on gloo ranks: what one process does, or refused.

A gradient is a DTensor. Of a part whose rows lie on several ranks, DTensor makes a copy; what is
written into it would be lost, as it is with FSDP2.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from fxshard.errors import StepError
from tests.fsdp2 import full

# What a user does to a gradient, and whether it is refused.
WRITES: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "a row": (lambda grad: grad[0].zero_(), True),
    "rows": (lambda grad: grad[:2].mul_(0), True),
    "narrow": (lambda grad: grad.narrow(0, 0, 3).zero_(), True),
    "chunk": (lambda grad: grad.chunk(2)[0].zero_(), True),
    "flatten": (lambda grad: grad.flatten()[:2].zero_(), True),
    "diagonal": (lambda grad: grad.diagonal().zero_(), True),
    "a part of a part": (lambda grad: grad[:4][1:].add_(1), True),
    "a list": (lambda grad: torch._foreach_mul_([grad[0], grad[1]], 2.0), True),
    "out": (lambda grad: torch.mul(grad[0], 2.0, out=grad[0]), True),
    "columns": (lambda grad: grad.narrow(1, 0, 2).zero_(), False),
    "a column": (lambda grad: grad[:, 0].zero_(), False),
    "transposed": (lambda grad: grad.T.mul_(2), False),
    "all of it": (lambda grad: grad.view(-1).mul_(2), False),
    "by element": (lambda grad: grad.square_(), False),
    "read": (lambda grad: grad.mul_(grad[0].square().sum().item() + grad[1:].sum().item()), False),
}


def models(rank: int) -> tuple[Any, Any]:
    """Eager PyTorch on both ranks' batches, and fxshard on this rank's."""
    torch.manual_seed(0)
    eager = nn.Linear(4, 6)
    ours: Any = fxshard.compile(copy.deepcopy(eager))
    batches = [torch.randn(4, 4) for _ in range(2)]
    eager(torch.cat(batches)).square().mean().backward()
    ours(batches[rank]).square().mean().backward()
    return eager, ours


def written(rank: int, world_size: int) -> None:
    for name, (write, is_refused) in WRITES.items():
        eager, ours = models(rank)
        write(eager.weight.grad)
        try:
            write(ours.weight.grad)
        except StepError as error:
            assert is_refused and "p.grad[...] = value" in str(error), name
        else:
            assert not is_refused, name
            assert_close(full(ours.weight.grad), eager.weight.grad)


def test_writes_into_parts(ranks: Any) -> None:
    ranks(2).run(written)


def as_the_error_says(rank: int, world_size: int) -> None:
    eager, ours = models(rank)
    for model in (eager, ours):
        model.weight.grad[:3] = 1
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
    assert_close(full(ours.weight.detach()), eager.weight.detach())


def test_the_remedy(ranks: Any) -> None:
    ranks(2).run(as_the_error_says)


def copied(rank: int, world_size: int) -> None:
    """What is copied out of a part is a DTensor like any other."""
    _, ours = models(rank)
    part = ours.weight.grad[0]
    for made in (part.clone(), copy.deepcopy(part), pickle.loads(pickle.dumps(part)), part + part):
        assert isinstance(made, DTensor)
        want = full(made) * 2
        assert_close(full(made.mul_(2)), want)


def test_copies_of_parts_are_written(ranks: Any) -> None:
    ranks(2).run(copied)
