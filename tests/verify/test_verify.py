"""`verify` finds what is wrong in a program, says where, and is silent about every good one."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from fxshard import pipeline, verify
from fxshard.config.checked import Config
from fxshard.errors import FxshardError, VerifyError
from fxshard.ir import dump
from fxshard.ir.program import Fact, Program
from tests import graphs
from tests.verify.full_shard_faults import (
    FAULTS,
    Fault,
    freed_before_the_last_reader,
    freed_while_it_is_sent,
    gradients_in_another_order,
    gradients_swapped,
    shards_swapped,
    wait_after_the_use,
    wait_after_the_use_of_a_view,
)
from tests.verify.verify_cases import ALWAYS, assert_every_event_matters, capture, captured, fresh
from tests.zoo import MODELS


def good(depth: int = 2) -> Program:
    """`graphs.layered` after the whole pipeline, its parameters apart (packed: test_bucket.py)."""
    program = graphs.layered(depth)
    pipeline.run(program, pipeline.default_passes(Config(**graphs.APART)))
    assert program.facts == ALWAYS
    return program


def test_every_fact_has_a_fault() -> None:
    assert {fact for fact, _ in FAULTS} == ALWAYS
    assert set(verify.CHECKS) == set(Fact)


@pytest.mark.parametrize(
    ("fact", "fault"), FAULTS, ids=[f"{fact.name.lower()}-{f.__name__}" for fact, f in FAULTS]
)
def test_fault_is_found(fact: Fact, fault: Fault) -> None:
    program = good()
    node = fault(program)
    with pytest.raises(VerifyError) as caught:
        verify.verify(program)
    error, text = caught.value, str(caught.value)
    assert isinstance(error, FxshardError) and isinstance(error, AssertionError)
    assert error.fact == fact.name.lower()
    assert text.startswith(f"fact '{error.fact}' does not hold: ")
    if node is None:
        return
    assert error.node == node.name
    lines = text.splitlines()
    at = lines.index("    " + dump.line(node, program))
    assert set(lines[at + 1]) == {" ", "^"} and lines[at + 1].startswith("    ^")
    assert len(lines) <= 1 + 12


@pytest.mark.parametrize(
    "fault",
    [
        wait_after_the_use,
        wait_after_the_use_of_a_view,
        shards_swapped,
        gradients_swapped,
        freed_before_the_last_reader,
        freed_while_it_is_sent,
        gradients_in_another_order,
    ],
)
def test_fault_does_harm(fault: Fault) -> None:
    """What `verify` refuses would have gone wrong: the facts are not stricter than need be."""
    torch.manual_seed(0)
    model, tokens = graphs.Layered(), torch.tensor([0, 3, 1, 4])
    values = graphs.values_of(model, tokens)
    program, broken = good(), good()
    fault(broken)
    if FAULTS[[f for _, f in FAULTS].index(fault)][0] is not Fact.OUTLINED:
        program.schedule = broken.schedule = None  # it still is that of the good program
    right, wrong = graphs.run(program, values), graphs.run(broken, values)
    assert any(not torch.equal(right[key], wrong[key]) for key in right)


def test_every_event_matters() -> None:
    assert_every_event_matters(good())


def check(program: Program, prefetch: int, world_sizes: Sequence[int] = (2,)) -> None:
    config = Config(forward_prefetch=prefetch, backward_prefetch=prefetch)
    for world_size in world_sizes:
        rewritten = fresh(program, world_size)
        pipeline.run(rewritten, pipeline.default_passes(config), check_each=True)
        assert rewritten.facts == ALWAYS


OTHERS = [pytest.param(prefetch, marks=pytest.mark.slow) for prefetch in (0, 2)]


@pytest.mark.parametrize("prefetch", [1, *OTHERS])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(2)
def test_no_false_alarm(name: str, prefetch: int) -> None:
    check(captured(name), prefetch, world_sizes=(1, 2, 3, 8))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(2)
def test_no_false_alarm_in_inference(name: str) -> None:
    check(captured(name, training=False), 1)


class Again(nn.Module):
    """Its first layer runs first and last: unsharded all the way. Units lie inside units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x).tanh()
        return x


class Lender(nn.Module):
    """Runs its inner unit first, and multiplies first of all by what its caller lends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, lent: Tensor) -> Tensor:
        return self.gain * self.inner(lent * x)


class Tangled(nn.Module):
    """Parameters are read where another unit runs: the root's, and each layer's in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(Lender() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        lent = self.scale
        for layer in self.layers:
            x = layer(x, lent).tanh()
            lent = layer.gain
        return x


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("build", [Again, Tangled])
@pytest.mark.sample(2)
def test_units_that_must_stay_unsharded_are_no_fault(
    build: Callable[[], nn.Module], prefetch: int
) -> None:
    inner = {Again: "layers.*.1", Tangled: "layers.*.inner"}[build]
    for units in (["layers.*"], ["layers.*", inner], [inner]):
        check(capture(build(), (torch.randn(2, 4),), {}, units=units), prefetch)
