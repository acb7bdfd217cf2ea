"""Collectives that forward calls itself: on their group, in its order, with torch's gradients."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard._torch.process_groups import fake_process_group
from fxshard.errors import CaptureError
from fxshard.ir import ops
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import split_steps, tracked
from tests.end_to_end.training_cases import assert_same, batch, grads_of

CALLS: dict[str, Callable[[Tensor], Tensor]] = {}


def called(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    CALLS[function.__name__] = function
    return function


@called
def all_reduce(y: Tensor) -> Tensor:
    total = y.detach().sum(0)
    dist.all_reduce(total)
    return y - total / 8


@called
def all_reduce_of_what_needs_a_gradient(y: Tensor) -> Tensor:
    total = y.sum(0)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return y - total / 8


@called
def all_reduce_async(y: Tensor) -> Tensor:
    total = y.detach().sum(0)
    work = dist.all_reduce(total, async_op=True)
    y = y.tanh()
    work.wait()
    return y - total / 8


@called
def all_gather_into_tensor(y: Tensor) -> Tensor:
    every = torch.empty(2 * y.shape[0], y.shape[1])
    dist.all_gather_into_tensor(every, y.detach())
    return y + every.mean(0)


@called
def all_gather(y: Tensor) -> Tensor:
    every = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(every, y.detach().cos())
    return y + every[0] - every[1]


@called
def reduce_scatter(y: Tensor) -> Tensor:
    mine = torch.empty_like(y)
    dist.reduce_scatter(mine, [y.detach(), y.detach().cos()])
    other = torch.empty_like(y)
    dist.reduce_scatter_tensor(other, torch.cat([y, y + 1]).detach())
    return y + mine / other


@called
def broadcast(y: Tensor) -> Tensor:
    first = y.detach().mean(0)
    dist.broadcast(first, 0)
    return y - first


@called
def to_and_from_one_rank(y: Tensor) -> Tensor:
    first, every = dist.get_rank() == 0, [torch.empty(6) for _ in range(2)]
    total, mine = y.detach().sum(0), torch.empty(6)
    dist.gather(total, every if first else None)
    dist.scatter(mine, [every[0].cos(), every[1] / 2] if first else None)
    dist.reduce(total, 0)
    return y * mine + (total if first else 0)


@called
def all_to_all(y: Tensor) -> Tensor:
    other = torch.empty_like(y)
    dist.all_to_all_single(other, y.detach())
    return y * other


@called
def nn_functional_all_reduce(y: Tensor) -> Tensor:
    return y - with_gradients.all_reduce(y.sum(0)) / 8


@called
def nn_functional_all_gather(y: Tensor) -> Tensor:
    return y + sum(part.cos() for part in with_gradients.all_gather(y))


@called
def functional_all_reduce(y: Tensor) -> Tensor:
    return y - functional.all_reduce(y.detach().sum(0), "sum", dist.group.WORLD) / 8


@called
def functional_with_gradients(y: Tensor) -> Tensor:
    rows = functional.all_gather_tensor_autograd(y, 0, dist.group.WORLD)
    return y + functional.reduce_scatter_tensor_autograd(rows.cos(), "sum", 0, dist.group.WORLD)


@called
def in_a_checkpoint(y: Tensor) -> Tensor:
    return checkpoint(nn_functional_all_reduce, y, use_reentrant=False)


@called
def on_a_group_of_one(y: Tensor) -> Tensor:
    total = y.detach().sum(0)
    dist.all_reduce(total, group=groups()[dist.get_rank()])
    return y - total / 8


@functools.cache
def groups() -> list[Any]:
    return [dist.new_group([rank]) for rank in range(2)]


class Model(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.call = nn.Linear(5, 6), nn.Linear(6, 3), call

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.call(self.first(x)))).square().mean()


def made(call: Callable[[Tensor], Tensor], how: str) -> Any:
    torch.manual_seed(0)
    model = Model(call)
    if how == "compile":
        return fxshard.compile(model, units=["first"])
    shard = fsdp2 if how == "fsdp2" else fxshard.fully_shard
    shard(model.first)
    return shard(model)


def trains(rank: int, world_size: int, name: str, how: str) -> list[str]:
    """Beside FSDP2; returns the collectives of the model in the program."""
    groups.cache_clear()
    groups()
    ours, theirs = made(CALLS[name], how), made(CALLS[name], "fsdp2")
    for step in range(2):
        found = []
        for model in (ours, theirs):
            with CommDebugMode() as seen:
                loss = model(batch(rank, step))
                loss.backward()
            found.append((loss.detach(), grads_of(model), seen.get_total_counts()))
            model.zero_grad()
        assert torch.equal(found[0][0], found[1][0])
        assert_same(found[0][1], found[1][1], rtol=1e-6, atol=1e-7)
    return [str(n.target) for n in ours.plan.program.graph.nodes if ops.communicates(n)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch: no autograd kernel is registered
@pytest.mark.parametrize("how", ["compile", "fully_shard"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sample(16)
def test_as_under_fsdp2(ranks: Any, name: str, how: str) -> None:
    first, second = ranks(2).run(trains, name, how)
    assert first == second and any("fxshard.model_" in target for target in first), first
    assert not any("c10d" in target for target in first), first


def refuses(rank: int, world_size: int) -> None:
    def barrier(y: Tensor) -> Tensor:
        dist.barrier()
        return y

    def send(y: Tensor) -> Tensor:
        if dist.get_rank():
            dist.send(y, 0)
        else:
            dist.recv(y, 1)
        return y

    for call, what in ((barrier, "barrier"), (send, "send or recv")):
        with pytest.raises(CaptureError, match=rf"forward calls {what} of torch\.distributed, at "):
            made(call, "compile")(batch(rank))


def test_what_no_graph_holds_is_refused(ranks: Any) -> None:
    ranks(2).run(refuses)


def differs(rank: int, world_size: int) -> None:
    made(CALLS["all_reduce" if rank else "broadcast"], "compile")(batch(rank))


def test_ranks_agree_on_the_collectives_of_the_model(ranks: Any) -> None:
    for failure in ranks(2).run_expecting_errors(differs):
        assert "RankMismatchError" in failure and "fxshard.model_all_reduce" in failure


def in_another_order(rank: int, world_size: int, calls: int) -> None:
    """Two groups of the same ranks, none of which has a name of the user's."""
    two = [dist.new_group(), dist.new_group()]
    order = (two[::-1] if rank else two)[:calls]

    def call(y: Tensor) -> Tensor:
        for group in order:
            total = y.detach().sum(0)
            dist.all_reduce(total, group=group)
            y = y - total / 8
        return y

    made(call, "compile")(batch(rank))


@pytest.mark.parametrize("calls", [1, 2])
def test_ranks_that_take_two_groups_in_two_orders_are_refused(ranks: Any, calls: int) -> None:
    """Each would wait for the other."""
    for failure in ranks(2).run_expecting_errors(in_another_order, calls):
        assert "RankMismatchError" in failure and "First difference" in failure, failure
        assert "group=group of 2" in failure and " made=" in failure


def test_bytes_are_known_beforehand() -> None:
    for name in ("all_reduce", "all_gather_into_tensor", "functional_with_gradients"):
        with fake_process_group(0, 2):
            plan = fxshard.plan(Model(CALLS[name]), (batch(0),), world_size=2, units=["first"])
            measured = tracked(plan.workload, 2)
        found = compare(plan.memory, split_steps(measured, 2))
        assert found.holds, found.table(only_different=True)


def test_without_a_process_group_it_is_refused() -> None:
    with pytest.raises(CaptureError, match=r'(?s)has not been init.*init_process_group\("fake"'):
        fxshard.compile(Model(CALLS["all_reduce"]), world_size=2)(batch(0))
