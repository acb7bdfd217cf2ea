"""Rows of a model's own collectives: without any wait, event or operand the program is refused."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from torch import fx

from fxshard import pipeline, verify
from fxshard.config import Config
from fxshard.errors import VerifyError
from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from tests import graphs, streams
from tests.passes.test_streams import assert_none_too_many
from tests.verify.verify_cases import fresh

GROUPS = ("tp", "ep")
Break = Callable[[], None]


def built() -> Program:
    program = graphs.of_its_own()
    pipeline.run(program, pipeline.default_passes(Config()), check_each=True)
    return program


def launches(program: Program, group: str) -> list[fx.Node]:
    return [n for n in program.graph.nodes if ops.of(n).of_model and ops.group(n) == group]


def wait_of(program: Program, launch: fx.Node) -> fx.Node:
    waits = program.graph.find_nodes(op="call_function", target=ops.wait)
    (found,) = (wait for wait in waits if tags.get(wait).pair == tags.get(launch).pair)
    return found


def faults(program: Program, group: str) -> Iterator[tuple[str, Break]]:
    """Everything that may be left out of the rows of a group, or run elsewhere."""
    for launch in launches(program, group):
        wait, tag = wait_of(program, launch), tags.get(launch)
        (item,) = launch.users
        (sent,) = tags.operands(launch)
        yield f"no %{wait}", lambda wait=wait: program.graph.erase_node(wait)
        for held in (item, sent):
            kept = [node for node in (item, sent) if node is not held]
            yield f"%{wait} without %{held}", lambda w=wait, k=kept: setattr(w, "args", (k,))
        for row in (launch, wait):
            for event in tags.get(row).waits:
                left = tuple(e for e in tags.get(row).waits if e != event)
                yield f"%{row} without {event}", lambda r=row, e=left: tags.update(r, waits=e)
        if tag.records:
            yield f"no {tag.records}", lambda n=launch: tags.update(n, records=None)
        yield f"%{launch} elsewhere", lambda n=launch: tags.update(n, stream="unshard")
        yield f"%{wait} too early", lambda n=launch, w=wait: n.prepend(w)
        yield f"%{wait} too late", lambda w=wait: list(program.graph.nodes)[-2].append(w)
        for where, value in enumerate(launch.args[1:], 1):
            other = {int: 3, str: "other"}.get(type(value), [3, 1])
            args = (*launch.args[:where], other, *launch.args[where + 1 :])
            yield f"%{launch} of {other}", lambda n=launch, a=args: setattr(n, "args", a)


@pytest.mark.parametrize("group", GROUPS)
def test_every_fault_is_found(group: str) -> None:
    number = 0
    while True:
        program = dataclasses.replace(fresh(built(), 2), schedule=None)
        every = list(faults(program, group))
        if number == len(every):
            break
        what, change = every[number]
        verify.verify(program)
        change()
        with pytest.raises(VerifyError):
            verify.verify(program)
            pytest.fail(f"accepted: {what}")
        number += 1
    assert number > 12


def test_there_is_no_race_and_no_event_too_many() -> None:
    program = built()
    assert streams.races(program) is None
    assert assert_none_too_many(program)


def test_launches_are_early_and_waits_late() -> None:
    """The order of the trace is that of launches; what needs none of them is between the two."""
    program = built()
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    gather = launches(program, "tp")[0]
    wait = wait_of(program, gather)
    names = [node.name for node in program.graph.nodes]
    between = names[order[gather] + 1 : order[wait]]
    assert between == ["getitem_5", "b"]
    assert {tags.get(n).stream for group in GROUPS for n in launches(program, group)} == {*GROUPS}
    assert Fact.STREAMS_ORDERED in program.facts
