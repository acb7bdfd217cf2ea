"""Units that are called by themselves: what their backward recomputes, methods of the root, and
what `unshard` does inside of a forward. All of it as under FSDP2, on ranks whose batches differ."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fxshard
from tests.fsdp2 import full
from tests.oracles import count_collectives

POLICIES = MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Block(nn.Module):
    """A part of it is recomputed, `times`; it reads the dtype of a weight, as T5 does."""

    def __init__(self, times: int, nested: bool, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.times, self.nested, self.reentrant = times, nested, reentrant

    def inner(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.to(self.first.weight.dtype)).tanh()).tanh()

    def again(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(
                self.again if self.nested else self.inner, x, use_reentrant=self.reentrant
            )
        out: Tensor = self.last(x)
        return out

    def value(self, x: Tensor) -> Tensor:
        return self(x) * 2 if self.times == 2 else self.forward(x) * 2


def batch(rank: int) -> Tensor:
    made = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    return made.requires_grad_()


def run(
    fully_shard: Callable[..., Any],
    register: Callable[..., Any],
    block: Block,
    policy: MixedPrecisionPolicy,
    call: str,
    rank: int,
) -> tuple[list[Any], list[Any], int]:
    """Outputs and gradients of two backwards of a block by itself; gathers of the second one."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), block)
    fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    register(block, "value")
    x = batch(rank)
    model(x).float().sum().backward()  # FSDP2 finds its root at the first forward
    model.zero_grad()
    for _ in range(2):
        with count_collectives() as seen:
            out = getattr(block, call)(x) if call == "value" else block(x)
            out.float().square().sum().backward()
    grads = [None if p.grad is None else full(p.grad) for p in block.parameters()]
    return [out, x.grad], grads, seen.count("all_gather")


def recomputed(rank: int, world_size: int, frozen: str) -> None:
    cases = [
        (times, nested, reentrant, policy, call)
        for times, nested in ((1, False), (2, False), (1, True))
        for reentrant in (False, True)
        for policy in POLICIES
        for call in ("forward", "value")
    ]
    for times, nested, reentrant, policy, call in cases:
        found = []
        for fully_shard, register in (
            (fsdp.fully_shard, fsdp.register_fsdp_forward_method),
            (fxshard.fully_shard, fxshard.register_fsdp_forward_method),
        ):
            torch.manual_seed(1)
            block = Block(times, nested, reentrant)
            for name, param in block.named_parameters():
                param.requires_grad_(not (frozen and name.startswith(frozen)) and frozen != "all")
            found.append(run(fully_shard, register, block, policy, call, rank))
        (theirs, other, gathers), (ours, mine, own) = found
        what = f"{times=} {nested=} {reentrant=} {call=} {policy.param_dtype}"
        for own_tensor, their_tensor in zip(ours, theirs, strict=True):
            assert torch.equal(own_tensor, their_tensor), what
        # FSDP2 adds the gradients of what is recomputed twice before it reduces them, in bfloat16.
        coarse = policy.param_dtype is not None and reentrant and times == 2
        for a, b in zip(mine, other, strict=True):
            assert (a is None) == (b is None), what
            if a is not None:
                assert_close(a, b, **({"rtol": 2**-7, "atol": 2**-7} if coarse else {}), msg=what)
        assert own == gathers == 2, what


@pytest.mark.parametrize("frozen", ["", "first", "all"])
def test_what_a_unit_by_itself_recomputes(ranks: Any, frozen: str) -> None:
    ranks(2).run(recomputed, frozen)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).tanh())
        return out

    def value(self, x: Tensor) -> Tensor:
        return self(x) + self.forward(x).square()


def of_the_root(rank: int, world_size: int, units: tuple[str, ...], policy: int) -> None:
    found = []
    for fully_shard, register in (
        (fsdp.fully_shard, fsdp.register_fsdp_forward_method),
        (fxshard.fully_shard, fxshard.register_fsdp_forward_method),
    ):
        torch.manual_seed(0)
        model: Any = Root()
        for name in units:
            fully_shard(model.get_submodule(name), mp_policy=POLICIES[policy])
        fully_shard(model, mp_policy=POLICIES[policy])
        register(model, "value")
        with torch.no_grad():
            without = model.value(batch(rank))
        out = model.value(batch(rank))
        out.float().sum().backward()
        grads = [full(p.grad) for p in model.parameters()]
        found.append(([without, out, model(batch(rank))], grads))
    (theirs, other), (ours, mine) = found
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) and a.dtype is b.dtype
    for a, b in zip(mine, other, strict=True):
        assert_close(a, b, **({"rtol": 2**-7, "atol": 2**-7} if policy else {}))


@pytest.mark.parametrize("policy", [0, 1])
@pytest.mark.parametrize("units", [(), ("a",), ("a", "b")], ids=str)
def test_a_method_of_the_root(ranks: Any, units: tuple[str, ...], policy: int) -> None:
    ranks(2).run(of_the_root, units, policy)


class Ahead(Root):
    """It unshards a block before another one computes, and reshards it."""

    def forward(self, x: Tensor) -> Tensor:
        handle = self.b.unshard(async_op=True)  # type: ignore[operator]
        x = self.a(x)
        if handle is not None:
            handle.wait()
        out: Tensor = self.b(x)
        self.b.reshard()  # type: ignore[operator]
        return out


def unsharding(block: Any) -> Any:
    def hook(*_: Any) -> None:
        block.unshard(async_op=True)

    return hook


def ahead(rank: int, world_size: int) -> None:
    found = []
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        for hook in (False, True):
            torch.manual_seed(0)
            model: Any = Root() if hook else Ahead()
            if hook:
                model.a.register_forward_pre_hook(unsharding(model.b))
            fully_shard(model.a)
            fully_shard(model.b)
            fully_shard(model)
            for _ in range(2):
                model(batch(rank)).square().sum().backward()
            found.append([full(p.grad) for p in model.parameters()])
    for theirs, ours in zip(found[:2], found[2:], strict=True):
        assert_close(ours, theirs)


def test_unshard_inside_of_a_forward(ranks: Any) -> None:
    ranks(2).run(ahead)
