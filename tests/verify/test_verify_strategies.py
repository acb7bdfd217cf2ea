"""`verify` finds what is wrong in programs of every strategy and policy, and what it finds harms.

As tests/verify/test_verify.py, whose faults are those of `full_shard`.
"""

import dataclasses
import functools

import pytest
import torch

from fxshard import pipeline, verify
from fxshard.config.checked import Config
from fxshard.config.precision import Precision
from fxshard.errors import VerifyError
from fxshard.ir import dump
from fxshard.ir.program import Fact, Program
from fxshard.ir.splitting import configured_units
from tests import graphs
from tests.verify import movement_faults, reduction_faults
from tests.verify.full_shard_faults import FAULTS
from tests.verify.settings import SETTINGS, traced
from tests.verify.strategy_cases import Build, Case, good, hooked, no_shard, offload_bf16, regrouped
from tests.verify.verify_cases import ALWAYS, assert_every_event_matters, fresh
from tests.zoo import MODELS

CASES = [*reduction_faults.CASES, *movement_faults.CASES]
IDS = [f"{case.fact.name.lower()}-{case.fault.__name__}" for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fault_is_found(case: Case) -> None:
    program = good(case.build)
    node = case.fault(program)
    with pytest.raises(VerifyError) as caught:
        verify.verify(program)
    assert caught.value.fact == case.fact.name.lower(), caught.value
    assert caught.value.node == node.name, caught.value
    assert "    " + dump.line(node, program) in str(caught.value).splitlines()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.harms], ids=lambda c: c.fault.__name__
)
def test_fault_does_harm(case: Case) -> None:
    values = graphs.random_values(case.build())
    program, broken = good(case.build), good(case.build)
    case.fault(broken)
    program.schedule = broken.schedule = None  # it still is that of the good program
    assert not differs(program, program, values)
    assert differs(program, broken, values)


def differs(program: Program, broken: Program, values: graphs.Values) -> bool:
    """True if the ranks of `broken` disagree, if it cannot run, or if it gives other numbers."""
    right = graphs.run(program, values, apart=True)
    try:
        wrong = graphs.run(broken, values, apart=True)
        graphs.assert_same(wrong, right, exact=False)
    except (AssertionError, RuntimeError):
        return True
    return False


def test_there_are_new_faults() -> None:
    names = [case.fault.__name__ for case in CASES]
    assert len(set(names)) == len(names) and not set(names) & {f.__name__ for _, f in FAULTS}


SOME = ["tied", "convnet", pytest.param("transformer", marks=pytest.mark.slow)]
EVENTFUL = {
    "hybrid_offload_bf16": functools.partial(offload_bf16, replicas=2),
    "regrouped_offload": functools.partial(regrouped, offloaded=True),
    "hook": hooked,
    "no_shard_fp16": functools.partial(no_shard, precision=Precision(torch.float16)),
}


@pytest.mark.parametrize("build", EVENTFUL.values(), ids=list(EVENTFUL))
def test_every_event_matters(build: Build) -> None:
    program = good(build)
    program.facts = {Fact.STREAMS_ORDERED}
    assert_every_event_matters(program)


# -- and no false alarm ---------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.sample(4)
def test_no_false_alarm(name: str, setting: str) -> None:
    options, attributes = SETTINGS[setting]
    config = Config(units=MODELS[name].units, **options)
    program = traced(name, config.mixed_precision is not None)
    units = configured_units(MODELS[name].build(), config)
    program = fresh(program, attributes.get("world_size", 2))
    program = dataclasses.replace(
        program, units=units, offloaded=config.offload is not None, **attributes
    )
    grads = [r.name for r in program.results if r.kind == "grad" and r.name in program.params]
    kept = [frozenset(), frozenset(grads[::2]), frozenset(program.params)]
    for names in kept:
        rewritten = fresh(program, program.world_size)
        rewritten.accumulated = names
        pipeline.run(rewritten, pipeline.default_passes(config), check_each=True)
        assert rewritten.facts == ALWAYS
