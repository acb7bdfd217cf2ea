"""The harness checks itself: FSDP2 against plain eager, and pools with ranks in trouble."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.fsdp2 import Result, assert_bitwise, assert_close, train, train_single
from tests.ranks import Failure, RankError, Ranks
from tests.zoo import MODELS

STEPS = 3


def fsdp2(rank: int, world_size: int, name: str) -> Result:
    return train(MODELS[name], STEPS)


def pid(rank: int, world_size: int) -> int:
    return os.getpid()


def total_rank(rank: int, world_size: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


def raise_on(rank: int, world_size: int, culprit: int) -> float:
    if rank == culprit:
        raise ValueError(f"rank {rank} is out of sorts")
    return total_rank(rank, world_size)


def die_on(rank: int, world_size: int, culprit: int) -> float:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    return total_rank(rank, world_size)


def abort_on(rank: int, world_size: int, culprit: int) -> float:
    if rank == culprit:
        os.abort()
    return total_rank(rank, world_size)


def tarry_on(rank: int, world_size: int, culprit: int) -> float:
    """The other ranks wait for `culprit` in a collective."""
    if rank == culprit:
        time.sleep(600)
    return total_rank(rank, world_size)


def hang_on(rank: int, world_size: int, culprit: int) -> int:
    if rank == culprit:
        time.sleep(600)
    return rank


@pytest.mark.parametrize("name", MODELS)
def test_cases_are_deterministic(name: str) -> None:
    case = MODELS[name]
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = case.build()
        args, kwargs = case.batch(1, 2)
        outputs.append(case.loss(model(*args, **kwargs)))
    assert outputs[0].shape == () and torch.equal(*outputs)
    assert str(case.batch(0, 0)) != str(case.batch(1, 0)) != str(case.batch(1, 1))


@pytest.mark.parametrize("name", ["transformer", "llama", "mlp13"])
@pytest.mark.sample(2)
def test_fsdp2_equals_single_process(ranks, name: str) -> None:
    of_rank = ranks(2).run(fsdp2, name)
    first, second = of_rank
    mean_losses = [(a + b) / 2 for a, b in zip(first.losses, second.losses, strict=True)]
    single = train_single(MODELS[name], STEPS, world_size=2)
    for result in of_rank:
        assert_close(replace(result, losses=mean_losses), single, rtol=1e-5)


@pytest.mark.parametrize("name", ["tied", "convnet", "dropout"])
@pytest.mark.sample(2)
def test_fsdp2_repeats_itself(ranks, name: str) -> None:
    first, second = ranks(2).run(fsdp2, name), ranks(2).run(fsdp2, name)
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b)
    assert first[0].losses != first[1].losses
    assert_bitwise(
        replace(first[0], losses=[], grads=[], buffers={}),
        replace(first[1], losses=[], grads=[], buffers={}),
    )


def test_differences_are_named(ranks) -> None:
    result = ranks(2).run(fsdp2, "mlp13")[0]
    assert_bitwise(result, result)
    grads = [dict(step) for step in result.grads]
    grad = grads[1]["blocks.2.gain"]
    assert grad is not None
    grads[1]["blocks.2.gain"] = grad + 0.25
    with pytest.raises(
        AssertionError, match=r"step 1, grad of blocks\.2\.gain: .*2\.500e-01, in 1 of 1 elem"
    ):
        assert_bitwise(replace(result, grads=grads), result)
    with pytest.raises(AssertionError, match=r"step 1, grad of blocks\.2\.gain: not within 1e-05"):
        assert_close(replace(result, grads=grads), result, rtol=1e-5)
    with pytest.raises(
        AssertionError, match=r"after step 2, parameter inlet\.weight: only in the second"
    ):
        assert_close(replace(result, params={}), result, rtol=1e-5)


def test_a_pool_lives_through_many_runs(ranks) -> None:
    pool = ranks(2)
    assert pool.run(pid) == pool.run(pid)
    assert len({os.getpid(), *pool.run(pid)}) == 3


def test_an_exception_names_its_rank(ranks) -> None:
    pool = ranks(2)
    with pytest.raises(RankError, match="rank 1 is out of sorts") as error:
        pool.run(raise_on, 1)
    assert next(iter(error.value.failures)) == 1
    assert pool.run(total_rank) == [1.0, 1.0]


def test_errors_on_every_rank(ranks) -> None:
    answers = ranks(2).run_expecting_errors(raise_on, 0)
    assert all(isinstance(answer, Failure) for answer in answers)
    assert "ValueError: rank 0 is out of sorts" in answers[0]


@pytest.mark.parametrize("way", ["itself", "before", "during"])
@pytest.mark.sample(2)
def test_a_dead_rank_is_reported(ranks, way: str) -> None:
    pool = ranks(2)
    jobs = {"itself": (die_on, 1), "before": (total_rank,), "during": (tarry_on, 1)}
    assert pool.run(total_rank) == [1.0, 1.0]
    if way == "before":
        pool.kill(1)
    if way == "during":
        pool.kill(1, delay_s=0.3)
    answers = pool.run_expecting_errors(*jobs[way])
    assert answers[1] == "rank 1 died, exit code -9"
    assert isinstance(answers[0], Failure) and "gloo" in answers[0]
    assert pool.run(total_rank) == [1.0, 1.0]


def test_an_aborting_rank_leaves_its_stacks(ranks) -> None:
    answers = ranks(2).run_expecting_errors(abort_on, 1)
    assert answers[1].startswith(f"rank 1 died, exit code {-signal.SIGABRT}")
    for said in ("SIGABRT(6), PID", " frame #0", "Fatal Python error: Aborted", "in abort_on"):
        assert said in answers[1]


def test_a_hung_rank_is_killed() -> None:
    pool = Ranks(2)
    patience = pool.timeout_s
    try:
        assert pool.run(total_rank) == [1.0, 1.0]
        pool.timeout_s = 4
        answers = pool.run_expecting_errors(hang_on, 1)
        assert answers[0] == 0
        assert "rank 1 hung: no answer in 4 s" in answers[1] and "in hang_on" in answers[1]
        pool.timeout_s = patience
        assert pool.run(total_rank) == [1.0, 1.0]
    finally:
        pool.close()
