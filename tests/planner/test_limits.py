"""The largest batch and the longest sequence against plans of every size, one by one."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import ConfigError, DoesNotFitError
from fxshard.plans.plan import Plan

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
MOST = 12  # sizes that are planned one by one


class Pairs(nn.Module):
    """f32[batch, seq, 6] -> a number; a table of 12 positions, scores of each pair of them."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(MOST, 6))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = self.linear(x + self.position[: x.shape[1]])
        return ((x @ x.transpose(1, 2)).softmax(-1) * scale).sum()


def made(batch: int = 3, seq: int = 7, **options: Any) -> Plan:
    call = (torch.zeros(batch, seq, 6), torch.zeros(()))
    return fxshard.plan(Pairs(), call, world_size=2, **options)


def peak(plan: Plan) -> int:
    return max(plan.memory.peak_bytes, plan.memory.first_step_peak_bytes)


@pytest.fixture(scope="module")
def by_length() -> dict[int, int]:
    """Peaks of all lengths, each planned from the start."""
    return {seq: peak(made(seq=seq, optimizer=adamw)) for seq in range(1, MOST + 1)}


@pytest.mark.parametrize("start", [5, 10])
@pytest.mark.parametrize("size", [1, 5, 6, 9, 11])
@pytest.mark.sample(3)
def test_the_longest_is_that_of_all_lengths(
    by_length: dict[int, int], start: int, size: int
) -> None:
    plan = made(seq=start, optimizer=adamw)
    for budget in (by_length[size], by_length[size + 1] - 1):
        limit = plan.longest_sequence(budget)
        assert limit.size == max(seq for seq, p in by_length.items() if p <= budget)
        assert limit.peak_bytes == by_length[limit.size] == peak(limit.plan)
        assert limit.next_peak_bytes == by_length[limit.size + 1] > budget
        assert limit.tensors == ("args[0]",) and limit.before == start
        assert len(limit.tried) <= 9


def test_multiples(by_length: dict[int, int]) -> None:
    limit = made(optimizer=adamw).longest_sequence(by_length[11], multiple_of=4)
    assert limit.size == 8 and set(limit.tried) <= set(range(4, MOST + 1, 4))
    assert limit.next_peak_bytes == by_length[12]


def test_a_length_that_the_model_refuses() -> None:
    limit = made().longest_sequence("1GiB")
    assert limit.size == MOST and limit.next_peak_bytes is None
    assert limit.why_not and f"{MOST + 1} cannot be planned" in str(limit)


def test_the_batch_of_all_inputs_with_it() -> None:
    def call(batch: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, 5, 6), torch.zeros(batch, 1, 1)

    plan = fxshard.plan(Pairs(), call(4), world_size=2)
    budget = peak(plan.replan(args=call(1000)))
    limit = plan.largest_batch(budget)
    assert limit.size == 1000 and len(limit.tried) <= 8
    assert limit.tensors == ("args[0]", "args[1]")
    assert peak(plan.replan(args=call(1001))) == limit.next_peak_bytes > budget


def test_what_does_not_fit_at_all() -> None:
    plan = made()
    with pytest.raises(DoesNotFitError, match=r"not even a batch of 1 fits.*\n.*alive") as error:
        plan.largest_batch("200B")
    assert "200 B given" in str(error.value)
    with pytest.raises(DoesNotFitError, match="not even a sequence of 4 fits"):
        plan.longest_sequence(10, multiple_of=4)


def test_questions_without_an_answer() -> None:
    plan = made()
    with pytest.raises(ConfigError, match=r"no tensor of the call has a dimension 5.*args\[0\]"):
        plan.longest_sequence("1MiB", dim=5)
    with pytest.raises(ConfigError, match="multiple_of=0"):
        plan.largest_batch("1MiB", multiple_of=0)
    with pytest.raises(ConfigError, match="80 gigs"):
        plan.largest_batch("80 gigs")
    with pytest.raises(ConfigError, match="a budget of -5: expected at least 1 byte"):
        plan.largest_batch(-5)
    with pytest.raises(ConfigError, match="a budget of 0: expected at least 1 byte"):
        plan.memory.assert_fits(0)
    with pytest.raises(ConfigError, match="no bytes"):
        made(seq=0).largest_batch("1MiB")


def test_a_loss_that_holds_labels() -> None:
    labels = torch.zeros(3, dtype=torch.int64)
    loss = functools.partial(nn.functional.cross_entropy, target=labels)
    plan = fxshard.plan(nn.Linear(6, 6), (torch.zeros(3, 6),), world_size=2, loss=loss)
    with pytest.raises(ConfigError, match="let it compute the loss"):
        plan.largest_batch("1MiB")


def test_cuda_must_find_room_in_its_allocator() -> None:
    def call(batch: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, 5, 6), torch.zeros(())

    plan = fxshard.plan(Pairs(), call(1000), world_size=2, device="cuda")
    memory = plan.memory.device_memory()
    budget = memory.outside + 2 * memory.reserved
    limit = plan.largest_batch(budget, multiple_of=500)
    limit.plan.memory.assert_fits(budget)
    assert limit.next_peak_bytes < budget  # of tensors alone
    assert "caching allocator finds no room" in limit.why_not
    with pytest.raises(DoesNotFitError):
        plan.replan(args=call(limit.size + 500)).memory.assert_fits(budget)


def test_a_budget_that_cuda_itself_takes_up_is_refused() -> None:
    plan = fxshard.plan(nn.Linear(8, 8), (torch.ones(2, 8),), world_size=2, device="cuda")
    with pytest.raises(DoesNotFitError, match=r"CUDA's context and NCCL take .* of 64\.00 MiB"):
        plan.memory.assert_fits("64MiB")
