"""Gradients on gloo ranks: computed with, hooked, assigned and asked for as in one process."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from fxshard.errors import RankMismatchError, StepError
from tests.fsdp2 import full

Use = Callable[[Tensor], Any]


def like(grad: Tensor) -> Tensor:
    """A plain tensor of all rows, the same on all ranks."""
    return torch.arange(float(grad.numel())).reshape(grad.shape) / grad.numel()


def item_set(grad: Tensor, index: Any) -> None:
    grad[index] = 0.5


USES: dict[str, Use] = {
    "a sum in place": lambda grad: grad.add_(like(grad)),
    "a product with a row, in place": lambda grad: grad.mul_(torch.arange(4.0)),
    "a product with a column, in place": lambda grad: grad.mul_(torch.arange(6.0)[:, None]),
    "a mask": lambda grad: grad.masked_fill_(like(grad) > 0.5, 0.0),
    "rows by index": lambda grad: item_set(grad, torch.tensor([0, 3])),
    "rows by slice": lambda grad: item_set(grad, slice(1, 5)),
    "elements by a mask": lambda grad: item_set(grad, like(grad) > 0.5),
    "index_add_": lambda grad: grad.index_add_(0, torch.tensor([0, 3]), torch.ones(2, 4)),
    "copy_": lambda grad: grad.copy_(like(grad)),
    "out": lambda grad: torch.add(grad, like(grad), out=grad),
    "data": lambda grad: setattr(grad, "data", like(grad)),
    "a list, in place": lambda grad: torch._foreach_add_([grad], [like(grad)]) and None,
    "a list, copied": lambda grad: torch._foreach_copy_([grad], [like(grad)]) and None,
    "a plain tensor first": lambda grad: like(grad) - grad,
    "a matrix": lambda grad: like(grad).T @ grad,
    "with itself": lambda grad: grad.T @ grad,
    "where": lambda grad: torch.where(like(grad) > 0.5, grad, torch.zeros(())),
    "cosine_similarity": lambda grad: torch.cosine_similarity(grad, like(grad), dim=0),
    "cat": lambda grad: torch.cat([grad.flatten(), torch.ones(3)]),
    "unbind": lambda grad: grad.unbind()[4],
    "numpy": lambda grad: torch.from_numpy(grad.cpu().numpy() * 2),
    "tolist": lambda grad: torch.tensor(grad.tolist()),
    "equal": lambda grad: torch.tensor(torch.equal(grad, like(grad))),
    "svd": lambda grad: torch.linalg.svdvals(grad),
    "a norm": lambda grad: torch.tensor(grad.norm().item()),
}


def models(rank: int, hook: Use | None = None) -> tuple[Any, Any, Tensor, Tensor]:
    """Eager PyTorch and its batch, both ranks', and fxshard and this rank's."""
    torch.manual_seed(0)
    eager = nn.Linear(4, 6)
    ours: Any = fxshard.compile(copy.deepcopy(eager))
    batches = [torch.randn(4, 4) for _ in range(2)]
    if hook is not None:
        for model in (eager, ours):
            model.weight.register_hook(hook)
    return eager, ours, torch.cat(batches), batches[rank]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def stepped(eager: nn.Module, ours: nn.Module) -> None:
    """The gradients are what an optimizer can step with, and equal."""
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor) and theirs.grad is not None
        assert_close(full(mine.grad), theirs.grad)
    for model in (eager, ours):
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert_close(full(mine), theirs.detach())


def used(rank: int, world_size: int) -> None:
    for name, use in USES.items():
        eager, ours, joined, batch = models(rank)
        loss(eager, joined).backward()
        loss(ours, batch).backward()
        theirs, mine = use(eager.weight.grad), use(ours.weight.grad)
        if theirs is not None:
            assert_close(full(mine), theirs, msg=lambda text, name=name: f"{name}: {text}")
        stepped(eager, ours)


def test_computed_with(ranks: Any) -> None:
    ranks(2).run(used)


HOOKS: dict[str, Use] = {
    "plain tensors": lambda grad: grad * torch.arange(4.0) + like(grad),
    "its rows": lambda grad: grad * grad[0],
    "centred": lambda grad: grad - grad.mean(0),
    "a full tensor": lambda grad: grad.full_tensor() if isinstance(grad, DTensor) else grad,
}


def hooked(rank: int, world_size: int) -> None:
    for hook in HOOKS.values():
        eager, ours, joined, batch = models(rank, hook)
        for _ in range(2):  # the second is added
            loss(eager, joined).backward()
            loss(ours, batch).backward()
        (theirs,) = torch.autograd.grad(loss(eager, joined), [eager.weight])
        (mine,) = torch.autograd.grad(loss(ours, batch), [ours.weight])
        assert_close(full(mine + like(mine)), theirs + like(theirs))
        stepped(eager, ours)


def test_hooks(ranks: Any) -> None:
    ranks(2).run(hooked)


def asked(rank: int, world_size: int) -> None:
    eager, ours, joined, batch = models(rank)
    for model, x in ((eager, joined), (ours, batch)):
        loss(model, x).backward(inputs=[model.weight])
        assert model.bias.grad is None
        torch.autograd.backward(loss(model, x), inputs=model.bias)
        other = copy.deepcopy(eager) if model is eager else models(rank)[1]
        wanted = [model.weight, other.weight]
        used, unused = torch.autograd.grad(loss(model, x), wanted, allow_unused=True)
        assert unused is None and used.shape == (6, 4)
        _, filled = torch.autograd.grad(loss(model, x), wanted, materialize_grads=True)
        assert filled.shape == (6, 4) and not full(filled).any()
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss(model, x), wanted)
        named = torch.autograd.grad(loss(model, x), dict(model.named_parameters()))
        assert [*named] == ["weight", "bias"]
        assert_close(full(named["weight"]), full(model.weight.grad))
    stepped(eager, ours)


def test_asked_for(ranks: Any) -> None:
    ranks(2).run(asked)


SETS: dict[str, Use] = {
    "a full tensor": lambda grad: like(grad),
    "centred": lambda grad: grad - grad.mean(0),
    "a sum over the ranks": lambda grad: grad.sum(0).expand(6, 4) + like(grad),
    "a clone": lambda grad: grad.clone(),
}


def assigned(rank: int, world_size: int) -> None:
    for made in SETS.values():
        eager, ours, joined, batch = models(rank)
        for model, x in ((eager, joined), (ours, batch)):
            loss(model, x).backward()
            model.weight.grad = made(model.weight.grad)
        stepped(eager, ours)
    with pytest.raises(RuntimeError, match="size"):
        ours.weight.grad = torch.zeros(3, 4)


def test_assigned(ranks: Any) -> None:
    ranks(2).run(assigned)


def saved(rank: int, world_size: int) -> None:
    eager, ours, joined, batch = models(rank)
    loss(eager, joined).backward()
    loss(ours, batch).backward()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        again = pickle.loads(pickle.dumps(mine.grad))
        assert type(again) is DTensor and type(copy.deepcopy(mine.grad)) is DTensor
        assert_close(full(again), theirs.grad)
        assert_close(full(copy.deepcopy(mine.grad)), theirs.grad)
        with pytest.raises(StepError, match="full_tensor"):
            torch.from_dlpack(mine.grad)


def test_saved(ranks: Any) -> None:
    ranks(2).run(saved)


def lbfgs(rank: int, world_size: int, search: str | None) -> None:
    """Five rows on two ranks; the closure returns the mean loss, as that of one process."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    ours: Any = fxshard.compile(copy.deepcopy(eager))
    batches = [torch.randn(4, 4) for _ in range(2)]

    def minimise(model: nn.Module, batch: Tensor, common: bool) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn=search)

        def closure() -> Tensor:
            optimizer.zero_grad()
            found = loss(model, batch)
            found.backward()
            found = found.detach()
            if common:
                dist.all_reduce(found)
                found /= 2
            return found

        optimizer.step(closure)

    minimise(eager, torch.cat(batches), common=False)
    minimise(ours, batches[rank], common=True)
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert_close(full(mine), theirs.detach(), rtol=1e-3, atol=1e-4)
    with pytest.raises(RankMismatchError, match=r"closure of LBFGS(.|\n)*all_reduce"):
        minimise(ours, batches[rank], common=False)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(ranks: Any, search: str | None) -> None:
    ranks(2).run(lbfgs, search)


def beside_plain_ones(rank: int, world_size: int, foreach: bool | None) -> None:
    """A parameter that is ignored has a plain gradient, which the user averages."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model = copy.deepcopy(eager)
    ours: Any = fxshard.compile(model, ignored=[model[1].weight])
    batches = [torch.randn(4, 4) for _ in range(2)]
    loss(eager, torch.cat(batches)).backward()
    loss(ours, batches[rank]).backward()
    plain = ours[1].weight
    assert not isinstance(plain, DTensor)
    dist.all_reduce(plain.grad)
    plain.grad /= 2
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=foreach) for m in (ours, eager)]
    assert_close(full(norms[0]), norms[1])
    for make in STEPS:  # in lists torch takes states together, which are plain DTensors
        for each in (eager, ours):
            optimizer = make(each.parameters(), lr=0.01, foreach=foreach)
            optimizer.step()
            optimizer.step()
        for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
            assert_close(full(mine), theirs.detach(), msg=f"of {make}")
            assert_close(full(mine.grad), theirs.grad)


OPTIM = torch.optim
STEPS: list[Any] = [
    *(OPTIM.Adadelta, OPTIM.Adagrad, OPTIM.Adam, OPTIM.Adamax, OPTIM.AdamW, OPTIM.ASGD),
    *(OPTIM.NAdam, OPTIM.RAdam, OPTIM.RMSprop, OPTIM.Rprop),
    functools.partial(OPTIM.SGD, momentum=0.9),
    functools.partial(OPTIM.AdamW, amsgrad=True, maximize=True),
]


@pytest.mark.parametrize("foreach", [None, True, False])
def test_beside_plain_ones(ranks: Any, foreach: bool | None) -> None:
    ranks(2).run(beside_plain_ones, foreach)
