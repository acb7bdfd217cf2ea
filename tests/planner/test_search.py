"""The engine of searches over plans: edges, and what a search keeps of its candidates."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from fxshard.errors import CaptureError, DoesNotFitError
from fxshard.planner.search import Search, edge, middle
from fxshard.planner.space import Candidate


@pytest.mark.parametrize("last", range(1, 64))
def test_an_edge_is_found_from_both_sides(last: int) -> None:
    asked: list[int] = []
    assert edge(lambda n: asked.append(n) or n <= last, 0, 64, middle) == last
    assert len(asked) <= 6 and 0 not in asked and 64 not in asked
    assert edge(lambda n: n >= last, 64, 0, middle) == last


def test_any_guess_between_both_leads_to_the_edge() -> None:
    draw = random.Random(0)

    def anywhere(good: int, bad: int) -> int | None:
        return draw.randrange(good + 1, bad) if bad - good > 1 else None

    assert {edge(lambda n: n <= 700, 0, 1000, anywhere) for _ in range(20)} == {700}
    assert edge(lambda n: n <= 700, 0, 1000, lambda good, bad: None) == 0, "near enough at once"


def made(candidate: Candidate) -> Any:
    """A plan that needs 10 bytes per sample; a model of 90 bytes while it is made."""
    size = candidate.changes["size"]
    if size == 7:
        raise CaptureError("no batch of 7.\nbecause")

    def assert_fits(budget: int) -> None:
        if budget < 90:
            raise DoesNotFitError("90 B needed to make the model.\nmore")

    memory = SimpleNamespace(peak_bytes=10 * size, first_step_peak_bytes=5, assert_fits=assert_fits)
    return SimpleNamespace(size=size, memory=memory, config=SimpleNamespace(device=None))


def test_a_candidate_is_planned_once_and_the_best_keeps_its_plan() -> None:
    asked: list[int] = []

    def noted(candidate: Candidate) -> Any:
        asked.append(candidate.changes["size"])
        return made(candidate)

    search = Search(noted, 100, lambda candidate, tried: -(tried.peak_bytes or 0))
    found = {n: search.ask(Candidate({"size": n})) for n in (3, 9, 5, 7, 12, 9, 7)}
    assert asked == [3, 9, 5, 7, 12] and [t.changes["size"] for t in search.tried] == asked
    assert {n: t.fits for n, t in found.items()} == {3: True, 9: True, 5: True, 7: False, 12: False}
    assert found[7].peak_bytes is None and found[7].why_not == "no batch of 7"
    assert found[12].why_not == "120 B needed, 100 B given: 20 B too much"
    assert search.best is found[9] and search.plan is not None and search.plan.size == 9


def test_what_fits_the_step_must_fit_while_it_is_made() -> None:
    search = Search(made, 80, lambda candidate, tried: 0)
    assert search.ask(Candidate({"size": 8})).why_not == "90 B needed to make the model"
    assert search.best is None and search.plan is None


def test_errors_that_are_no_refusals_are_raised() -> None:
    search = Search(made, 100, lambda candidate, tried: 0, refusals=(DoesNotFitError,))
    with pytest.raises(CaptureError, match="no batch of 7"):
        search.ask(Candidate({"size": 7}))
