"""Random programs that change something between calls: each is right, or refused by name.

`python -m tests.fuzz.changes --count N` runs more; with a seed it replays one.
"""

from collections.abc import Callable

import pytest

from tests.fuzz.changes import drawn, judged, on_rank
from tests.fuzz.judge import Verdict
from tests.ranks import Ranks

HERE, SIZE = 20, 10  # cases in this process, and how many of them one test runs
REAL, JOB = 4, 4  # the same on real ranks


def failures(seeds: range, verdicts: list[Verdict]) -> str:
    """What is neither right nor refused."""
    return "\n".join(
        f"{drawn(seed)}\n{verdict.kind}: {verdict.reason}\n{verdict.detail}"
        for seed, verdict in zip(seeds, verdicts, strict=True)
        if verdict.kind not in ("right", "refused")
    )


@pytest.mark.parametrize("start", range(0, HERE, SIZE))
def test_in_one_process(start: int, one_thread: None) -> None:
    seeds = range(start, start + SIZE)
    assert not failures(seeds, [judged(drawn(seed)) for seed in seeds])


@pytest.mark.parametrize("start", range(HERE, HERE + REAL, JOB))
def test_on_ranks(start: int, ranks: Callable[[int], Ranks], one_thread: None) -> None:
    seeds = range(start, start + JOB)
    for verdicts in ranks(2).run(on_rank, seeds):
        assert not failures(seeds, verdicts)
