"""The runner: what it refuses, what it prints, and how it names the pass that did harm."""

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fxshard
from fxshard import pipeline
from fxshard.config.checked import Config
from fxshard.config.environment import environment
from fxshard.errors import ConfigError, VerifyError
from fxshard.ir import dump, ops, tags
from fxshard.ir.program import Fact, Program
from fxshard.passes.assign_units import AssignUnits
from fxshard.passes.canonicalize import Canonicalize
from fxshard.passes.insert_free import InsertFree
from fxshard.passes.insert_reduce import InsertReduce
from fxshard.passes.insert_unshard import InsertUnshard
from fxshard.passes.outline_regions import OutlineRegions
from tests import graphs

aten = torch.ops.aten
NAMES = [
    "canonicalize",
    "assign-units",
    "assign-checkpoints",
    "checkpoint",
    "bucket",
    "insert-unshard",
    "insert-reduce",
    "prefetch",
    "launch-collectives",
    "reinplace",
    "insert-free",
    "annotate-streams",
    "outline-regions",
]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No FXSHARD_* variable but those that the test sets."""
    for name in list(os.environ):
        if name.startswith("FXSHARD_"):
            monkeypatch.delenv(name)


def default() -> list[pipeline.Pass]:
    return pipeline.default_passes(Config())


@dataclasses.dataclass(frozen=True)
class TanhToSigmoid:
    """A user's pass: another activation."""

    name: ClassVar[str] = "tanh-to-sigmoid"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TAGGED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    modules: tuple[str, ...] = ("",)

    def apply(self, program: Program) -> None:
        for node in program.graph.find_nodes(op="call_function", target=aten.tanh.default):
            if tags.get(node).module in self.modules:
                node.target = aten.sigmoid.default


@dataclasses.dataclass(frozen=True)
class DropWaits:
    """A user's pass that does harm."""

    name: ClassVar[str] = "drop-waits"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        for node in program.graph.find_nodes(op="call_function", target=ops.wait):
            program.graph.erase_node(node)


@dataclasses.dataclass(frozen=True)
class ForgetTag:
    """A user's pass that makes a node and does not tag it."""

    name: ClassVar[str] = "forget-tag"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TAGGED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        behind = program.phase("forward")[-1]
        with program.graph.inserting_after(behind):
            program.graph.call_function(aten.relu.default, (behind,))


class Ordered(frozenset[Fact]):
    """A set that is iterated in the order in which it was given."""

    def __new__(cls, order: Sequence[Fact]) -> "Ordered":
        made = super().__new__(cls, order)
        made.order = order
        return made

    def __iter__(self) -> Iterator[Fact]:
        return iter(self.order)

    def __sub__(self, other: Any) -> "Ordered":
        return Ordered([fact for fact in self if fact not in other])


@dataclasses.dataclass(frozen=True)
class Needs(ForgetTag):
    """A pass that requires some Facts."""

    requires: frozenset[Fact] = frozenset()  # type: ignore[misc]


# -- what is required -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passes", "refused", "missing"),
    [
        ([AssignUnits()], "assign-units", [Fact.TAGGED]),
        ([Canonicalize(), InsertUnshard()], "insert-unshard", [Fact.UNITS_ASSIGNED]),
        ([Canonicalize(), InsertReduce()], "insert-reduce", [Fact.UNITS_ASSIGNED]),
        ([InsertFree()], "insert-free", [Fact.UNSHARD_PAIRED, Fact.REDUCED_ONCE]),
        ([*default()[:-3], OutlineRegions()], "outline-regions", [Fact.FREED]),
    ],
)
def test_a_pass_whose_facts_are_missing_is_refused(
    passes: list[pipeline.Pass], refused: str, missing: list[Fact]
) -> None:
    program = graphs.layered()
    with pytest.raises(ConfigError) as caught:
        pipeline.run(program, passes)
    wanted = " and ".join(fact.value for fact in missing)
    assert f"pass '{refused}' requires that {wanted};" in str(caught.value)
    assert "Put it after one that does." in str(caught.value)


def test_any_pass_of_the_default_list_may_be_asked_for_in_order() -> None:
    assert [step.name for step in default()] == NAMES
    known: set[Fact] = set()
    for step in default():
        assert step.requires <= known
        known |= step.ensures
    # Of those with options; and of no pass: where ranks differ.
    assert known == set(Fact) - {Fact.STEPPED_ONCE, Fact.CLIPPED, Fact.OFFLOADED, Fact.JOINED}


def test_an_option_of_the_config_reaches_its_pass() -> None:
    program = graphs.chain()
    pipeline.run(program, pipeline.default_passes(Config(forward_prefetch=3, backward_prefetch=0)))
    assert (program.forward_prefetch, program.backward_prefetch) == (3, 0)


# -- a user's pass --------------------------------------------------------------------------------


def test_a_users_pass_has_its_effect() -> None:
    torch.manual_seed(0)
    model, x = graphs.Chain(), torch.randn(2, 4)
    mine = [*default()[:3], TanhToSigmoid(), *default()[3:]]
    with torch.no_grad():
        theirs = fxshard.compile(model, world_size=2, args=(x,), passes=default())(x)
        torch.testing.assert_close(theirs, graphs.Chain.forward(model, x))
    model = graphs.Chain()
    weights = [layer.weight.detach().clone() for layer in model.layers]
    with torch.no_grad():
        head = model.head.clone()
        ours = fxshard.compile(model, world_size=2, args=(x,), passes=mine)(x)
    for weight in weights:
        x = torch.sigmoid(x @ weight.t())
    torch.testing.assert_close(ours, x @ head)


def test_a_function_makes_the_pipeline_of_the_default_one() -> None:
    """With the options of this compile: no list has to be made for them."""
    given: list[str] = []

    def with_mine(passes: list[Any]) -> list[Any]:
        given.extend(step.name for step in passes)
        return [*passes[:3], TanhToSigmoid(), *passes[3:]]

    options = {"world_size": 2, "forward_prefetch": 3, "optimizer_in_backward": True}
    options["optimizer"] = torch.optim.SGD
    plan = fxshard.plan(graphs.Chain(), (torch.randn(2, 4),), **options, passes=with_mine)
    assert "insert-step" in given and plan.program.forward_prefetch == 3
    names = " ".join(str(node.target) for node in plan.program.phase("forward"))
    assert "sigmoid" in names and "tanh" not in names
    with pytest.raises(ConfigError, match=r"the function passes=.* expected a list of passes"):
        fxshard.plan(graphs.Chain(), (torch.randn(2, 4),), world_size=2, passes=lambda p: None)


def test_a_users_pass_gets_its_options_and_place() -> None:
    seen: list[str] = []
    program = graphs.layered()
    step = TanhToSigmoid(modules=("layers.1",))
    pipeline.run(
        program,
        [default()[0], step, *default()[1:]],
        observe=lambda name, before, after: seen.append(name),
    )
    assert seen == [NAMES[0], step.name, *NAMES[1:]]
    text = dump.text(program)
    calls = [len(re.findall(rf"aten\.{name}_?\(", text)) for name in ("tanh", "sigmoid")]
    assert calls == [1, 1]


def test_observe_gets_the_texts_of_every_pass() -> None:
    seen: list[tuple[str, str, str]] = []
    program = graphs.chain()
    first = dump.text(program)
    pipeline.run(program, default(), observe=lambda *texts: seen.append(texts))
    assert [name for name, _, _ in seen] == NAMES
    assert seen[0][1] == first and seen[-1][2] == dump.text(program)
    for (_, _, after), (_, before, _) in itertools.pairwise(seen):
        assert after == before
    texts = {name: (before, after) for name, before, after in seen}
    assert "fxshard.all_gather" not in texts["insert-unshard"][0]
    assert "fxshard.all_gather" in texts["insert-unshard"][1]


def test_plan_passes_observe_on() -> None:
    seen: list[str] = []
    model = nn.Linear(4, 4)
    fxshard.plan(
        model, (torch.randn(2, 4),), world_size=2, observe=lambda name, *_: seen.append(name)
    )
    assert seen == NAMES


# -- a pass that does harm ------------------------------------------------------------------------

HARM = [*default()[:6], DropWaits(), *default()[6:7]]


def test_a_fact_that_a_pass_breaks_is_found_at_the_end() -> None:
    with pytest.raises(VerifyError) as caught:
        pipeline.run(graphs.chain(), HARM)
    assert (caught.value.fact, caught.value.pass_name) == ("unshard_paired", None)
    assert "after pass" not in str(caught.value)


@pytest.mark.parametrize("way", ["FXSHARD_DEBUG", "check_each"])
def test_the_pass_that_breaks_a_fact_is_named(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if way == "FXSHARD_DEBUG":
        monkeypatch.setenv(way, "1")
    with pytest.raises(VerifyError) as caught:
        pipeline.run(graphs.chain(), HARM, check_each=way == "check_each")
    assert caught.value.pass_name == "drop-waits"
    text = str(caught.value)
    assert text.startswith("fact 'unshard_paired' does not hold after pass 'drop-waits': ")
    assert "%unshard_0 has 0 waits, expected 1." in text
    assert "    ^^^^" in text
    assert text.endswith("reproduce with FXSHARD_DEBUG=4 (dumps the program around every pass)")
    assert "insert-reduce" not in capsys.readouterr().err


@pytest.mark.parametrize("debug", ["0", "1", "4"])
def test_a_node_without_tag_is_named_at_any_debug_level(
    debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXSHARD_DEBUG", debug)
    with pytest.raises(VerifyError, match="%relu_default has no tag"):
        pipeline.run(graphs.chain(), [default()[0], ForgetTag()])


def test_a_graph_that_is_none_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class UseBeforeDefinition(ForgetTag):
        def apply(self, program: Program) -> None:
            first, *_, last = program.phase("forward")
            first.prepend(last)

    with pytest.raises(VerifyError, match="before it has been defined"):
        pipeline.run(graphs.chain(), [default()[0], UseBeforeDefinition()])


# -- FXSHARD_DEBUG and FXSHARD_DUMP_DIR -----------------------------------------------------------


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """`printed(level)`: what a run over `graphs.chain` prints at that FXSHARD_DEBUG."""

    def run(level: int) -> str:
        monkeypatch.setenv("FXSHARD_DEBUG", str(level))
        pipeline.run(graphs.chain(), default())
        out, err = capsys.readouterr()
        assert out == ""
        return err

    yield run


def test_debug_0_prints_nothing(printed: Any) -> None:
    assert printed(0) == ""


def test_debug_1_lists_passes_with_time(printed: Any) -> None:
    lines = printed(1).splitlines()
    assert len(lines) == len(NAMES)
    for position, (name, line) in enumerate(zip(NAMES, lines, strict=True)):
        start, _, seconds = line.partition(" nodes, ")
        assert start.startswith(f"[fxshard] {position} {name}: ")
        assert int(start.rpartition(" ")[2]) > 0
        assert seconds.endswith(" s") and float(seconds[:-2]) >= 0


def test_debug_2_counts_operators(printed: Any) -> None:
    lines = printed(2).splitlines()
    at = lines.index(next(line for line in lines if " 5 insert-unshard: " in line))
    counts = lines[at + 1 : lines.index(next(li for li in lines if " 6 insert-reduce: " in li))]
    assert "[fxshard]   +5 fxshard.all_gather.default" in counts
    assert "[fxshard]   +5 fxshard.wait.default" in counts
    assert "[fxshard]   -1 head" in counts and "[fxshard]   +1 shard_head" in counts
    assert not any("aten" in line for line in counts)


def test_debug_3_prints_differences(printed: Any) -> None:
    lines = printed(3).splitlines()
    assert lines.count("--- before") == lines.count("+++ after") == 8  # four passes change no text
    assert "+  %wait_0 = fxshard.wait([%getitem])  | layers.0 unit=1 pair=0" in lines
    assert "-  %head : f32[4,3] = param head" in lines
    assert "[fxshard]   +5 fxshard.wait.default" in lines


def test_debug_4_prints_programs(printed: Any) -> None:
    text = printed(4)
    program = graphs.chain()
    pipeline.run(program, [])
    for step in default():
        step.apply(program)
        assert f"[fxshard] after {step.name}:\n{dump.text(program)}\n" in text
    assert "--- before" not in text
    assert "[fxshard]   +5 fxshard.wait.default" in text


@pytest.mark.parametrize("value", ["5", "-1", "yes", "1.0"])
def test_a_debug_level_that_is_none_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSHARD_DEBUG", value)
    with pytest.raises(ConfigError) as caught:
        environment()
    assert f"FXSHARD_DEBUG={value!r}: expected 0, 1, 2, 3 or 4" in str(caught.value)
    with pytest.raises(ConfigError):
        pipeline.run(graphs.chain(), default())


def test_dump_dir_gets_a_pair_of_files_per_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "not" / "there"
    monkeypatch.setenv("FXSHARD_DUMP_DIR", str(folder))
    program = graphs.chain()
    first = dump.text(program)
    pipeline.run(program, default())
    assert capsys.readouterr().err == ""
    stems = [f"{position:02d}_{name}" for position, name in enumerate(NAMES)]
    wanted = {f"{stem}.{when}.txt" for stem in stems for when in ("before", "after")}
    assert {path.name for path in folder.iterdir()} == wanted
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert texts[f"{stems[0]}.before.txt"] == first + "\n"
    assert texts[f"{stems[-1]}.after.txt"] == dump.text(program) + "\n"
    for one, two in itertools.pairwise(stems):
        assert texts[f"{one}.after.txt"] == texts[f"{two}.before.txt"]


def test_the_message_of_a_refusal_does_not_depend_on_hashes() -> None:
    """Facts are a set, whose order differs from rank to rank; the message must not."""
    facts = [Fact.FREED, Fact.TAGGED, Fact.OUTLINED]
    for order in itertools.permutations(facts):
        step = Needs(Ordered(order))
        with pytest.raises(ConfigError) as caught:
            pipeline.run(graphs.chain(), [step])
        said = [str(caught.value).index(fact.value) for fact in Fact if fact in facts]
        assert said == sorted(said)
