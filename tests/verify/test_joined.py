"""Programs of ranks that take different ways have the same collectives, and a fault is found."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from fxshard import pipeline, verify
from fxshard.config.checked import Config
from fxshard.errors import VerifyError
from fxshard.ir import ops, tags, text
from fxshard.ir.needs import Needs, merged
from fxshard.ir.program import Fact, Program
from fxshard.ir.splitting import configured_units
from fxshard.verify.certificate import agreement, collectives
from tests.runtime.differing_cases import CASES
from tests.texts import assert_equal

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "split": {"max_bucket_bytes": 100},
    "joined": {"min_bucket_bytes": 2000, "forward_prefetch": 2},
    "kept": {"reshard_after_forward": False, "backward_prefetch": 0},
    "alone": {"pack_bytes": 0, "checkpoint": "full"},
}


def programs(
    name: str,
    ranks: int,
    options: dict[str, Any],
    step: int = 0,
    between: Sequence[Any] = (),
) -> list[Program]:
    """The program of each rank, completed; `between` are passes after join-ranks."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    config = Config(units=case.units, ranks_may_differ=True, **options)
    units = configured_units(model, config)

    def made(rank: int, common: Needs | None, captures: dict[Any, Program]) -> Program:
        args, given = (), config
        if common is not None and between:
            passes = pipeline.default_passes(config)
            at = 1 + [step.name for step in passes].index("join-ranks")
            given = config.changed({"passes": [*passes[:at], *between, *passes[at:]]})
        return pipeline.make_program(
            *(model, args, case.batch(rank, step)),
            units=units,
            world=ranks,
            config=given,
            common=common,
            captures=captures,
        )

    captures: list[dict[Any, Program]] = [{} for _ in range(ranks)]
    alone = [made(rank, None, captures[rank]) for rank in range(ranks)]
    needs = [program.needs for program in alone if program.needs is not None]
    common = merged(needs, {param.fqn: param.position for u in units for param in u.params})
    return [made(rank, common, captures[rank]) for rank in range(ranks)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(3)
def test_all_ranks_have_the_same_collectives(name: str, option: str) -> None:
    for step in range(2):
        made = programs(name, 4, OPTIONS[option], step)
        for one, other in itertools.pairwise(made):
            assert collectives(one) == collectives(other)
            assert agreement(one) == agreement(other)


def test_text_both_ways() -> None:
    for program in programs("towers", 2, {}):
        assert program.common is not None
        assert_equal(text.parse(text.write(program)), program)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A pass that leaves out, or moves, what join-ranks has inserted."""

    do: Callable[[Program], Any]
    name: ClassVar[str] = "fault"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        self.do(program)


def joins(program: Program) -> list[fx.Node]:
    return list(program.graph.find_nodes(op="call_function", target=ops.join))


def no_gather(program: Program) -> None:
    """Of a unit in forward."""
    program.graph.erase_node(joins(program)[0])


def no_gather_in_backward(program: Program) -> None:
    program.graph.erase_node(joins(program)[-1])


def no_reduction(program: Program) -> None:
    """The zeros of a parameter, as if it had been forgotten."""
    values = program.values
    zeros = [v for v in values if v.target is torch.ops.aten.full.default]
    at = values.index(zeros[0])
    del program.results[at]
    program.values = values[:at] + values[at + 1 :]
    program.graph.erase_node(zeros[0])


def another_order(program: Program) -> None:
    """The gathers of a tower come before all others."""
    node = joins(program)[-1]
    first = program.phase("backward")[0]
    first.prepend(node)


FAULTS = {
    no_gather: r"'image\.\d\.\w+' is not gathered in forward, but other ranks do that",
    no_gather_in_backward: r"'image\.\d\.weight' is not gathered in backward, but other ranks",
    no_reduction: r"'image\.\d\.\w+' is not reduced, but other ranks do that and would wait",
    another_order: r"come too late: other ranks have %\w+ earlier",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_launch_that_a_rank_leaves_out_is_found(fault: Callable[[Program], Any]) -> None:
    """Rank 0 has no image in this step."""
    with pytest.raises(VerifyError, match=FAULTS[fault]) as caught:
        programs("towers", 2, {"pack_bytes": 0}, 0, [Fault(fault)])
    assert caught.value.fact == "joined"


def test_a_dropped_pass_is_found() -> None:
    """Without join-ranks a program has not what ranks have agreed on."""
    program, _ = programs("towers", 2, {})
    without = [s for s in pipeline.default_passes(Config()) if s.name != "join-ranks"]
    torch.manual_seed(0)
    model = CASES["towers"].build()
    config = Config(units=CASES["towers"].units, passes=without)
    with pytest.raises(VerifyError, match="is not gathered in forward"):
        pipeline.make_program(
            *(model, (), CASES["towers"].batch(1, 0)),
            units=configured_units(model, config),
            world=2,
            config=config,
            common=program.common,
        )


def test_a_launch_that_only_this_rank_has_is_found() -> None:
    for program in programs("towers", 2, {"pack_bytes": 0}):
        assert program.common is not None
        fewer = tuple(e for e in program.common.backward if e != ("grad", "shared.bias"))
        program.common = dataclasses.replace(program.common, backward=fewer)
        with pytest.raises(VerifyError, match=r"'shared\.bias' is reduced by %reduce_\d+, and not"):
            verify.verify(program)


def test_joins_are_of_the_unit_whose_parameters_they_read() -> None:
    for program in programs("towers", 2, {}):
        for node in joins(program):
            units = {program.params[name].unit for name in _names(node)}
            assert units == {tags.get(node).unit}


def _names(node: fx.Node) -> list[str]:
    return [tags.get(each).fqn or "" for each in tags.operands(node)]
