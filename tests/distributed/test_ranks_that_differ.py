"""`ranks_may_differ`: what ranks may not differ in is refused on all of them, and nothing hangs."""

import json
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.errors import ConfigError
from fxshard.runtime.world.c10d import C10dWorld
from tests.ranks import Failure, told
from tests.runtime.differing_cases import CASES, WIDTH, built


class Net(nn.Module):
    """Two layers, and a call that each rank may make another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, way: str = "") -> Any:
        x = self.first(x)
        if way == "skips":
            return x.sum()
        if way == "asks":
            x = x * 2 if x.sum() > 0 else x  # control flow that depends on data
        if way == "sums":
            dist.all_reduce(x.detach())
        if way == "detached":
            return self.second(x).sum().detach()
        y = self.second(x)
        return (y.sum(), x) if way == "both" else y.sum()


def net(**options: Any) -> Any:
    torch.manual_seed(0)
    return fxshard.compile(Net(), units=["first", "second"], ranks_may_differ=True, **options)


X = torch.randn(2, WIDTH)


# -- all ranks refuse, and may go on ---------------------------------------------------------------


def evaluates(model: Any, rank: int) -> None:
    with torch.set_grad_enabled(rank > 0):
        model(X)


def syncs(model: Any, rank: int) -> None:
    if rank:
        model(X)
    else:
        with model.no_sync():
            model(X)


def needs_none(model: Any, rank: int) -> None:
    model(X, "" if rank else "detached")


def refused(model: Any, rank: int) -> None:
    model(X, "" if rank else "asks")


def calls_collectives(model: Any, rank: int) -> None:
    model(X, "" if rank else "sums")


REFUSED: dict[Callable[[Any, int], None], str] = {
    evaluates: r"rank 0: inference, reduces all; rank 1: training.*but all train or none does",
    syncs: r"rank 0: training, reduces none; rank 1: training, reduces all.*all under no_sync",
    needs_none: r"with outputs that need gradients on all or on none",
    refused: r"rank 0 refuses this call of the model, and the others do not: CaptureError",
    calls_collectives: r"The model calls collectives itself, and not the same on all ranks",
}


def refuses(rank: int, world_size: int, number: int) -> list[str]:
    """What the call is refused with, twice, and the step after it."""
    act = list(REFUSED)[number]
    model = net()
    found = [told(lambda: act(model, rank)) for _ in range(2)]
    loss = model(X, "skips" if rank else "")
    loss.backward()
    return [*found, told(lambda: model(X))]


@pytest.mark.parametrize("act", REFUSED, ids=lambda act: act.__name__)
def test_what_ranks_may_not_differ_in_is_refused_on_all(ranks: Any, act: Any) -> None:

    for first, again, after in ranks(2).run(refuses, list(REFUSED).index(act)):
        for text in (first, again):
            assert text.startswith("RankMismatchError"), text
            assert re.search(REFUSED[act], text), text
        assert after == "no error"


def leaves_partial_sums(rank: int, world_size: int) -> str:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
    model: Any = fxshard.fully_shard(Net(), mesh=mesh, ranks_may_differ=True)
    model.set_requires_all_reduce(False)
    return told(lambda: model(X, "skips" if rank else ""))


def test_partial_sums_of_ranks_that_differ_are_refused(ranks: Any) -> None:
    for found in ranks(2).run(leaves_partial_sums):
        assert found.startswith("RankMismatchError: ranks take different ways through the model")
        assert "Accumulate with no_sync" in found


# -- ranks that do something else, or die ----------------------------------------------------------


def leaves_out_backward(rank: int, world_size: int) -> list[str]:
    model = net()

    def step(number: int) -> None:
        loss = model(X, "skips" if rank else "")
        if rank or number != 1:
            loss.backward()

    return [told(lambda number=number: step(number)) for number in range(3)]


def calls_once_more(rank: int, world_size: int) -> list[str]:
    """Rank 0 begins a step that rank 1, which saves a checkpoint, has not."""
    model = net()
    model(X, "skips" if rank else "").backward()
    if rank:
        return [told(lambda: model.full_state_dict())]
    return [told(lambda: model(X).backward())]


def test_a_rank_that_leaves_out_a_backward(hasty: Any) -> None:
    first, second = hasty(2).run(leaves_out_backward)
    assert first[:2] == ["no error"] * 2 and second[0] == "no error"
    assert first[2].startswith("RankMismatchError: rank 0 would do something else"), first
    assert second[1].startswith("RankMismatchError: a collective failed on rank 1"), second
    assert "rank 0 waits for all ranks to agree" in second[1]


def test_a_rank_that_does_something_else(hasty: Any) -> None:
    called, saved = hasty(2).run(calls_once_more)
    assert called == [
        "RankMismatchError: rank 0 calls the model, but rank 1 waits for all ranks to agree on "
        "what they do to the model. Call the model on all ranks the same number of times."
    ]
    assert saved[0].startswith("RankMismatchError: rank 1 waited to agree on what they do"), saved


def other_outputs(rank: int, world_size: int) -> list[str]:
    """Rank 0 makes its loss of an output that backward does not start from."""
    model = net()

    def step() -> None:
        total, x = model(X, "both")
        (total if rank else x.sum()).backward()

    return [told(step)]


def test_a_loss_of_other_outputs(hasty: Any) -> None:
    first, second = hasty(2).run(other_outputs)
    assert "RankMismatchError" in first[0] and "RankMismatchError" in second[0]


def all_of_other_outputs(rank: int, world_size: int) -> str:
    model = net()
    _, x = model(X, "both")
    return told(lambda: x.sum().backward())


def test_losses_of_other_outputs_on_all_ranks(ranks: Any) -> None:
    for found in ranks(2).run(all_of_other_outputs):
        assert found.startswith("StepError: a gradient arrived at [1], where backward does not")
        assert "make the whole loss in forward, or return no scalar" in found


def dies(rank: int, world_size: int) -> str:
    model = net()
    model(X, "skips" if rank else "").backward()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: model(X, "skips" if rank else ""))


def test_a_rank_that_dies_between_steps(hasty: Any) -> None:
    *alive, dead = hasty(3).run_expecting_errors(dies)
    assert isinstance(dead, Failure)
    for found in alive:
        assert "RankDiedError" in found and "rank 2 died" in found, found


class Row:
    """A process group of a grid of ranks: it gives this rank what the others of its group say."""

    def __init__(self, others: dict[str, list[int]]) -> None:
        self.others, self.sent = others, ""

    def exchange(self, text: str, *args: Any) -> dict[str, list[int]]:
        self.sent = text
        return {text: [0]} | self.others


def test_ranks_of_a_grid_that_no_group_covers() -> None:
    """Rank 0 of 2 x 2: along one dimension, and then along the other with what it has heard."""
    world = object.__new__(C10dWorld)
    world._calls = 0
    row, column = Row({"y": [1]}), Row({json.dumps({"x": [2], "y": [3]}): [2]})
    world._everyone = [row, column]  # type: ignore[list-item]
    assert world.exchange("x", "what") == {"x": [0, 2], "y": [1, 3]}
    assert json.loads(column.sent) == {"x": [0], "y": [1]}


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reduce_op": "max"}, "a rank without a gradient counts as zeros"),
        ({"max_inflight": 3}, "launches would wait for what one rank alone computes"),
        ({"backward_prefetch": "post"}, "launches would wait for what one rank alone computes"),
        ({"ranks_may_differ": 1}, "ranks_may_differ=1"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fxshard.compile(Net(), world_size=2, **{"ranks_may_differ": True, **options})


def test_shard_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks_may_differ=True with fxshard\.shard: a graph"):
        fxshard.shard(Net(), world_size=2, ranks_may_differ=True)


def test_passes_without_the_one_that_joins_ranks() -> None:
    def without(passes: list[Any]) -> list[Any]:
        return [step for step in passes if step.name != "join-ranks"]

    model = fxshard.compile(Net(), world_size=2, ranks_may_differ=True, passes=without)
    with pytest.raises(ConfigError, match="the passes have no 'join-ranks'"):
        model(X)


def test_a_plan_knows_one_call_and_adds_nothing() -> None:
    call, units = CASES["towers"].batch(0, 1), CASES["towers"].units
    plans = [
        fxshard.plan(built("towers"), kwargs=call, world_size=2, units=units, ranks_may_differ=d)
        for d in (True, False)
    ]
    assert plans[0].certificate == plans[1].certificate
    assert plans[0].memory.peak_bytes == plans[1].memory.peak_bytes
