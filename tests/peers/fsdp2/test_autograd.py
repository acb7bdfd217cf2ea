"""test_fully_shard_autograd.py: outputs, modules and containers that backward must pass."""

import collections
import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.optim.lr_scheduler import StepLR
from torch.testing import assert_close

from tests.peers.fsdp2.common import (
    MLP,
    DoubleLinear,
    Transformer,
    adam,
    assert_parity,
    made,
    shard,
)

RESHARD = [True, False, 2]
ROWS = 2  # of a rank's batch


def joined(ref: Any, model: Any, dim: int, loss_of: Any, steps: int = 10) -> None:
    """`model` on this rank's rows, beside plain eager on the rows of all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    both = [(ref, adam(ref)), (model, adam(model))]
    torch.manual_seed(1)
    for step in range(steps):
        whole = torch.rand(world_size * ROWS, dim)
        loss = loss_of(model(whole[rank * ROWS :][:ROWS]), step)
        theirs = loss_of(ref(whole), step)
        for each in (loss, theirs):
            each.backward()
        for param in ref.parameters():
            if param.grad is not None:
                param.grad /= world_size
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert_close(total, theirs.detach())
        assert_parity(ref, model)
        for _, optim in both:
            optim.step()
            optim.zero_grad(set_to_none=bool(step % 2))
        assert_parity(ref, model)


def unused_output(rank: int, world_size: int, reshard: Any) -> None:
    """Of two outputs, the second is left out after a few steps."""
    model = made(lambda: DoubleLinear(24))
    ref = copy.deepcopy(model)
    shard(model, model.lin1, reshard_after_forward=reshard)

    def loss(outputs: tuple[Tensor, Tensor], step: int) -> Tensor:
        return (outputs[0] * outputs[1]).sum() if step < 3 else outputs[0].sum()

    joined(ref, model, 24, loss)


@pytest.mark.parametrize("reshard", RESHARD)
def test_an_output_that_the_loss_leaves_out(ranks: Any, reshard: Any) -> None:
    ranks(4 if reshard == 2 else 2).run(unused_output, reshard)


def unused_module(rank: int, world_size: int, reshard: Any) -> None:
    model = made(lambda: DoubleLinear(24, second=False))
    ref = copy.deepcopy(model)
    shard(model, model.lin1, model.lin2, reshard_after_forward=reshard)
    joined(ref, model, 24, lambda out, step: out.sum())


@pytest.mark.parametrize("reshard", RESHARD)
def test_a_module_that_forward_leaves_out(ranks: Any, reshard: Any) -> None:
    ranks(4 if reshard == 2 else 2).run(unused_module, reshard)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def anew() -> Any:
    return collections.namedtuple("Anew", "x y")


WRAP: dict[str, Any] = {
    "list": lambda x: [x],
    "namedtuple": lambda x: Pair(x, torch.ones_like(x)),
    "namedtuple of each call": lambda x: anew()(x, torch.ones_like(x)),
    "tuple": lambda x: (x,),
    "dict": lambda x: {"x": x},
}


class Inside(nn.Module):
    """Works on the first tensor of a container, and gives the same kind of container."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, held: Any) -> Any:
        x = held["x"] if isinstance(held, dict) else held[0]
        y = self.lin2(self.lin1(x).relu()).relu()
        if isinstance(held, dict):
            return {"x": y}
        return type(held)(y, held[1]) if hasattr(held, "_fields") else type(held)([y])


class To(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return WRAP[self.kind](x)


class From(nn.Module):
    def forward(self, held: Any) -> Tensor:
        return held["x"] if isinstance(held, dict) else held[0]


def containers(rank: int, world_size: int, kind: str) -> None:
    dim = 24
    model = made(lambda: nn.Sequential(To(kind), *(Inside(dim) for _ in range(3)), From()))
    ref = copy.deepcopy(model)
    shard(model)
    joined(ref, model, dim, lambda out, step: out.sum())


@pytest.mark.parametrize("kind", WRAP)
def test_activations_in_containers(ranks: Any, kind: str) -> None:
    ranks(2).run(containers, kind)


# -- hooks on parameters ---------------------------------------------------------------------------


def hooks(rank: int, world_size: int) -> None:
    model = made(lambda: MLP(8))
    shard(model)
    counts: collections.Counter[str] = collections.Counter()
    for fqn, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, fqn=fqn: counts.update([fqn]))
    model(torch.randn(2, 8)).sum().backward()
    assert counts == {fqn: 1 for fqn, _ in model.named_parameters()}


def test_hooks_after_accumulation_run_once(ranks: Any) -> None:
    ranks(2).run(hooks)


def stepped_in_hooks(rank: int, world_size: int, offload: bool) -> None:
    """AdamW and a scheduler of each parameter, in its hook, beside the usual ones."""
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    ref, model = made(Transformer), made(Transformer)
    for each in (ref, model):
        shard(each, offload_policy=policy)

    def stepping(params: Any) -> tuple[Any, Any]:
        optim = torch.optim.AdamW(params, lr=1e-2, foreach=False)
        return optim, StepLR(optim, step_size=5)

    of_all = stepping(ref.parameters())
    own = {param: stepping([param]) for param in model.parameters()}

    def hook(param: nn.Parameter) -> None:
        optim, scheduler = own[param]
        optim.step()
        optim.zero_grad()
        scheduler.step()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    torch.manual_seed(42 + rank)
    tokens = ref.tokens(2, 16)
    for _ in range(10):
        losses = [each(tokens).sum() for each in (ref, model)]
        sum(losses).backward()
        of_all[0].step()
        of_all[0].zero_grad()
        of_all[1].step()
        assert torch.equal(*losses)
        for mine, theirs in zip(model.parameters(), ref.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())
            assert mine.grad is None


@pytest.mark.parametrize("offload", [False, True])
def test_an_optimizer_steps_in_hooks(ranks: Any, offload: bool) -> None:
    ranks(2).run(stepped_in_hooks, offload)
