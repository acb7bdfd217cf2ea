"""Random programs beside eager PyTorch: 200 seeds, each right or refused by name; planted faults.

`make fuzz N=10000` runs more; `python -m tests.fuzz SEED` replays one.
"""

import dataclasses
import functools
from collections.abc import Callable

import pytest

from tests.fuzz.case import Case, Program, drawn_case
from tests.fuzz.draft import Class, Line
from tests.fuzz.faults import FAULTS
from tests.fuzz.judge import Verdict, judged_here, judged_on_ranks, on_rank
from tests.fuzz.script import script
from tests.fuzz.shrink import shrunk
from tests.ranks import Ranks

HERE, SIZE = 176, 16  # cases in this process, and how many of them one test runs
REAL, JOB = 24, 8  # the same on real ranks
WITHIN = 10  # a planted fault is found among so many cases that have what it breaks


@functools.cache
def here(seed: int) -> Case:
    """In this process, and without Inductor, which would take longer than all the rest."""
    case = drawn_case(seed, processes=False)
    eager = tuple((name, code) for name, code in case.options if name != "backend")
    return dataclasses.replace(case, options=eager)


def failures(cases: list[Case], verdicts: list[Verdict]) -> str:
    """What is neither right nor refused, each as a script."""
    both = zip(cases, verdicts, strict=True)
    return "\n".join(
        f"# {case.seed} {verdict.kind}: {verdict.reason}\n{script(case, verdict)}{verdict.detail}"
        for case, verdict in both
        if verdict.kind not in ("right", "refused")
    )


@pytest.mark.parametrize("start", range(0, HERE, SIZE))
def test_in_one_process(start: int, one_thread: None) -> None:
    cases = [here(seed) for seed in range(start, start + SIZE)]
    verdicts = [judged_here(case) for case in cases]
    assert not failures(cases, verdicts)


@pytest.mark.parametrize("start", range(HERE, HERE + REAL, JOB))
def test_on_ranks(start: int, ranks: Callable[[int], Ranks], one_thread: None) -> None:
    seeds = [seed for seed in range(start, start + JOB)]
    cases = [drawn_case(seed, processes=True) for seed in seeds]
    for size in sorted({case.ranks for case in cases}):
        some = [case for case in cases if case.ranks == size]
        assert not failures(some, judged_on_ranks(some, ranks(size), sizes=False))


def found(seed: int, sizes: bool) -> bool:
    return judged_here(here(seed), sizes=sizes).kind not in ("right", "refused")


def test_a_failure_shrinks_to_a_small_script() -> None:
    lines = (
        Line("linear", "v0 = self.m0(x)", "v0", ("x",)),
        Line("linear", "v1 = self.m1(v0)", "v1", ("v0",)),
        Line("pointwise", "v2 = torch.tanh(v1)", "v2", ("v1",)),
        Line("casts", "v3 = v2.to(BF16)", "v3", ("v2",)),
    )
    inits = ("self.m0 = nn.Linear(3, 4)", "self.m1 = nn.Linear(4, 4)")
    model = Class("Model", ("x",), inits, lines, "(v3, v1)")
    program = Program((model,), (("x", "torch.randn(n, 3, generator=g)"),), "2")
    case = Case(0, program, (("pack_bytes", "0"),), world=3, micro_batches=2)
    small = shrunk(case, lambda smaller: "pointwise" in smaller.operators())
    (made,) = small.program.used
    assert [line.text for line in made.lines] == ["v0 = self.m0(x)", "v2 = torch.tanh(v0)"]
    assert (made.inits, made.result) == (inits[:1], "v0")
    assert (small.options, small.world, small.steps, small.micro_batches) == ((), 2, 1, 1)
    text = script(small, Verdict("wrong"))
    compile(text, "a script", "exec")
    assert "fxshard.compile" in text and "def batch" in text


def test_a_seed_is_one_case() -> None:
    assert drawn_case(3) == drawn_case(3)


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "wait_dropped"])
def test_planted_faults_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    plant, reaches = FAULTS[name]
    cases = [case for case in map(here, range(HERE)) if reaches(case)][:WITHIN]
    plant(monkeypatch)
    sizes = name == "wrong_bytes_of_an_operator"
    assert {"wrong", "bytes"} & {judged_here(case, sizes).kind for case in cases}


def with_a_fault(name: str, rank: int, world_size: int, cases: list[Case]) -> list[object]:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name][0](patch)
        return on_rank(rank, world_size, cases)


def test_a_dropped_wait_is_found(ranks: Callable[[int], Ranks]) -> None:
    cases = [drawn_case(seed, processes=True) for seed in range(HERE, HERE + JOB)]
    some = [case for case in cases if case.ranks == 2][:4]
    job = functools.partial(with_a_fault, "wait_dropped")
    verdicts = judged_on_ranks(some, ranks(2), sizes=False, job=job)
    assert "wrong" in {verdict.kind for verdict in verdicts}
