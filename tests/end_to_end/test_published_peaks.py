"""docs/published-peaks.md: each published figure has a dry run beside it, or the reason why not."""

import json

from benchmarks.published_steps.__main__ import PAGE, RESULTS, page
from benchmarks.published_steps.jobs import JOBS, NOT_RUN, figures, job_of


def test_each_figure_has_a_job_or_a_reason() -> None:
    for name in figures():
        reasons = [start for start in NOT_RUN if name.startswith(start)]
        assert job_of(name) is not None or len(reasons) == 1, name
    assert {job_of(name) for name in figures()} >= set(JOBS), "a job that no figure is of"


def test_the_page_shows_the_results() -> None:
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))
