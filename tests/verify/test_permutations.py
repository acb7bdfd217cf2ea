"""Pipelines that are none: a pass left out, doubled, or swapped with another.

What comes of them is right, by `tests.interpreter`, or refused, with the name of a pass, the reason
and what is unusual about the pipeline. Nothing rests on what passes say that they require and
ensure: here they say nothing.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._pytree import tree_flatten

from fxshard import pipeline
from fxshard.config.checked import Config
from fxshard.errors import ConfigError, PassError, VerifyError
from fxshard.ir.program import Fact, Program
from tests import graphs, interpreter
from tests.passes.passes_cases import LOSS, marked, root
from tests.passes.test_streams import SMALL, untouched
from tests.verify.settings import SETTINGS
from tests.zoo import MODELS
from tests.zoo.more import MATRIX

Build = Callable[[], Program]
Pipelines = Iterator[tuple[str, list[Any]]]


@dataclasses.dataclass(frozen=True)
class Silent:
    """A pass that says nothing of itself."""

    of: Any
    requires: ClassVar[frozenset[Fact]] = frozenset()
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    @property
    def name(self) -> str:
        return str(self.of.name)

    def apply(self, program: Program) -> None:
        self.of.apply(program)


def left_out(passes: list[Any]) -> Pipelines:
    for i, step in enumerate(passes):
        yield f"no {step.name}", passes[:i] + passes[i + 1 :]


def doubled(passes: list[Any]) -> Pipelines:
    for i, step in enumerate(passes):
        yield f"{step.name} twice", passes[: i + 1] + passes[i:]


def neighbours(passes: list[Any]) -> Pipelines:
    for i in range(len(passes) - 1):
        yield swapped(passes, i, i + 1)


def pairs(passes: list[Any]) -> Pipelines:
    for i, j in itertools.combinations(range(len(passes)), 2):
        yield swapped(passes, i, j)


def swapped(passes: list[Any], i: int, j: int) -> tuple[str, list[Any]]:
    order = list(passes)
    order[i], order[j] = order[j], order[i]
    return f"{passes[i].name} and {passes[j].name} swapped", order


def assert_right_or_refused(
    build: Build,
    config: Config,
    kinds: Sequence[Callable[[list[Any]], Pipelines]],
    batch: interpreter.Batch | None = None,
    *,
    exact: bool = True,
) -> tuple[int, int]:
    """How many pipelines gave a program, which is right, and how many were refused."""
    start = build()
    values = interpreter.values_of(start, start.world_size * start.replicas, batch)
    wanted = interpreter.reduced(start, interpreter.interpreted(start, values), values)
    passes: list[Any] = [Silent(step) for step in pipeline.default_passes(config)]
    right = refused = 0
    for said, order in itertools.chain.from_iterable(kind(passes) for kind in kinds):
        try:
            program = pipeline.rewritten(build, order)
        except (VerifyError, PassError, ConfigError) as error:
            assert_reads_well(error, [step.name for step in order])
            refused += 1
            continue
        if program.schedule is None:  # which `make_program` refuses
            assert said == "no outline-regions"
            refused += 1
            continue
        ours = interpreter.interpreted(program, values)
        assert ours.keys() == wanted.keys(), said
        for key in wanted:
            if exact:
                assert interpreter.same(ours[key], wanted[key]), f"{said}: {key} differs"
            else:
                graphs.assert_same(
                    dict([(key, ours[key])]), dict([(key, wanted[key])]), exact=False
                )
        right += 1
    return right, refused


def assert_reads_well(error: Exception, names: Sequence[str]) -> None:
    """It names a pass of the pipeline, the Fact or what was raised, and what is unusual."""
    text = str(error)
    if isinstance(error, VerifyError | PassError):
        assert error.pass_name in names
    assert any(f"'{name}'" in text for name in names), text
    optional = "'insert-step' is for" in text  # some pipelines have none
    assert "The pipeline differs from the default one: " in text or optional
    if isinstance(error, VerifyError):
        assert text.startswith(f"fact '{error.fact}' does not hold after pass '{error.pass_name}'")


KINDS = [left_out, doubled, neighbours]


@pytest.mark.parametrize("kind", KINDS)
def test_pipelines_that_are_none(kind: Callable[[list[Any]], Pipelines]) -> None:
    right, refused = assert_right_or_refused(SMALL["accumulated"], Config(), [kind])
    assert right and refused


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        # The schedule is a copy: tags that come later are not in it.
        ("annotate-streams", "outline-regions", "fact 'streams_ordered' does not hold after pass"),
        (
            "assign-checkpoints",
            "checkpoint",
            "which its checkpoint does not save: checkpoint has not",
        ),
    ],
)
def test_swapped_passes_are_refused_with_the_reason(first: str, second: str, reason: str) -> None:
    passes: list[Any] = [Silent(step) for step in pipeline.default_passes(Config())]
    names = [step.name for step in passes]
    _, order = swapped(passes, names.index(first), names.index(second))
    with pytest.raises(VerifyError) as caught:
        pipeline.rewritten(marked, order)
    text = str(caught.value)
    assert reason in text and f"'{second}' comes before '{first}', not after it" in text


def test_a_pipeline_without_streams_is_refused() -> None:
    passes: list[Any] = [Silent(step) for step in pipeline.default_passes(Config())]
    with pytest.raises(VerifyError) as caught:
        pipeline.rewritten(SMALL["full"], [p for p in passes if p.name != "annotate-streams"])
    text = str(caught.value)
    assert (caught.value.fact, caught.value.pass_name) == ("streams_ordered", "outline-regions")
    assert "runs on the compute stream, not on 'unshard'." in text
    assert "The pipeline differs from the default one: it has no 'annotate-streams'." in text


@pytest.mark.parametrize("said", ["insert-unshard", "insert-reduce"])
def test_a_pass_that_fails_is_named(said: str) -> None:
    passes: list[Any] = [Silent(step) for step in pipeline.default_passes(Config())]
    order = next(order for name, order in doubled(passes) if name == f"{said} twice")
    with pytest.raises(PassError) as caught:
        pipeline.rewritten(SMALL["full"], order)
    assert caught.value.pass_name == said and isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value).startswith(f"pass '{said}' failed with ValueError: ")
    assert f"'{said}' is in it 2 times." in str(caught.value)


# -- the whole grid -------------------------------------------------------------------------------

EVERYTHING = [left_out, doubled, pairs]
TEN = [*MODELS, "twice", "unet", "vit", "gru"]
EXACT = [name for name in SETTINGS if "mixed_precision" not in SETTINGS[name][0]]
LEAVING: dict[str, Any] = {"offload_activations": "1GiB"}
STEPPED: dict[str, Any] = {"optimizer_in_backward": True}  # of programs and of options
STEPS = {**STEPPED, "optimizer": torch.optim.SGD}
CHUNKED: dict[str, Any] = {"chunk_loss": 1}

# Programs, and options whose passes the default pipeline has not.
OTHERS: dict[str, tuple[Build, dict[str, Any]]] = {
    "checkpoints": (marked, {}),
    "offloaded activations": (functools.partial(graphs.chain, 3), LEAVING),
    "steps": (functools.partial(graphs.layered, **STEPPED), STEPS),
    "chunks": (functools.partial(graphs.parse, LOSS, root), CHUNKED),
    "chunks, offloaded": (functools.partial(graphs.parse, LOSS, root), CHUNKED | LEAVING),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALL, *OTHERS])
def test_all_of_small_programs(name: str) -> None:
    build, options = {**{key: (SMALL[key], {}) for key in SMALL}, **OTHERS}[name]
    exact = name != "fp16" and "chunk_loss" not in options
    assert_right_or_refused(build, Config(**options), EVERYTHING, exact=exact)


def batch(name: str) -> interpreter.Batch:
    return lambda rank: tree_flatten(MATRIX[name].batch(rank, 0))[0]


@pytest.mark.slow
@pytest.mark.parametrize("setting", EXACT)
@pytest.mark.parametrize("name", TEN)
def test_all_of_the_zoo(name: str, setting: str) -> None:
    config = Config(units=MATRIX[name].units, **SETTINGS[setting][0])
    build = functools.partial(untouched, name, setting)
    assert_right_or_refused(build, config, EVERYTHING, batch(name))


@pytest.mark.slow
@pytest.mark.parametrize("options", [STEPS, LEAVING], ids=["steps", "recomputed and offloaded"])
@pytest.mark.parametrize("name", TEN)
def test_all_of_the_zoo_with_other_passes(name: str, options: dict[str, Any]) -> None:
    def build() -> Program:
        program = untouched(name, "apart")
        if options is STEPS:
            return dataclasses.replace(program, **STEPPED)
        checkpoints = dict.fromkeys([unit.fqn for unit in program.units[1:]], "selective")
        return dataclasses.replace(program, checkpoints=checkpoints)

    config = Config(units=MATRIX[name].units, **graphs.APART, **options)
    assert_right_or_refused(build, config, EVERYTHING, batch(name))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["bf16", "everything"])
@pytest.mark.parametrize("name", ["mlp13", "tied", "twice"])
def test_all_of_the_zoo_in_bfloat16(name: str, setting: str) -> None:
    config = Config(units=MATRIX[name].units, **SETTINGS[setting][0])
    build = functools.partial(untouched, name, setting)
    assert_right_or_refused(build, config, EVERYTHING, batch(name), exact=False)
