"""Reads of parameters on some ranks only: an error on all, no wrong number, and no dead process."""

from typing import Any

import pytest

from tests.distributed import read_cases as cases


@pytest.mark.parametrize("then", ["a call", "backward", "a method"])
@pytest.mark.parametrize("name", cases.READS)
@pytest.mark.sample(8)
def test_a_read_on_one_rank_while_the_other_goes_on(hasty: Any, name: str, then: str) -> None:
    for said in hasty(2).run(cases.apart, name, then):
        assert said.startswith("RankMismatchError"), said


def test_a_read_before_a_call_here_and_after_it_there(hasty: Any) -> None:
    """Each gather would meet another one of its size."""
    for found in hasty(2).run(cases.order):
        assert len(found) == 1 and found[0].startswith("RankMismatchError"), found


def test_other_parameters_of_one_size_are_found_by_the_next_call(hasty: Any) -> None:
    for said in hasty(2).run(cases.others):
        assert said.startswith("RankMismatchError") and "what was read before" in said, said


def test_ranks_agree_twice_on_any_number_of_reads(ranks: Any) -> None:
    assert ranks(2).run(cases.alike) == [4, 4]  # before the first and after the last, two times
