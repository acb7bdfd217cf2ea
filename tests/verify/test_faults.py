"""Of every kind of fault (tests/faults/), `verify` finds each that does harm.

Whether a fault does harm is found without it: on a world that moves data as late and destroys it as
early as the program allows (`graphs.StrictWorld`) the numbers are others, the ranks disagree, or it
cannot run; or a simulation of streams and memory finds a race (`tests.streams`); or buffers are
alive that were not. The schedule is left out: there every fault would differ from the graph.
"""

import collections
import dataclasses
import functools
import random
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx

from fxshard import verify
from fxshard.errors import VerifyError
from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from tests import graphs, streams
from tests.faults import FAULTS, NoPlace
from tests.passes.test_streams import ALL, SMALL, of_zoo, untouched
from tests.passes.test_streams import small as built
from tests.verify.verify_cases import fresh

Build = Callable[[], Program]


def again(program: Program) -> Program:
    """A copy of a program after the pipeline, without its schedule."""
    facts = program.facts - {Fact.OUTLINED}
    return dataclasses.replace(fresh(program, program.world_size), facts=facts, schedule=None)


def refused(program: Program) -> str | None:
    """What the pipeline's runner says of a program: graph and facts."""
    try:
        program.graph.lint()
        verify.verify(program)
    except VerifyError as error:
        return error.fact
    except RuntimeError:
        return "lint"
    return None


def harm(program: Program, broken: Program, values: graphs.Values | None) -> str | None:
    """What the fault in `broken` does, or None. Without `values` no numbers are looked at."""
    right = graphs.run(again(program), values, apart=True) if values else {}
    try:
        broken.graph.lint()
        ours = graphs.run(broken, values, apart=True) if values else {}
        graphs.assert_same(ours, right, exact=False)
    except Exception as error:  # however it fails: numbers, shapes, missing gradients, deadlocks
        return type(error).__name__
    if (raced := streams.races(broken)) is not None:
        return raced
    if any(now > was for now, was in zip(buffers(broken), buffers(program), strict=True)):
        return "more buffers are alive"
    return None


def buffers(program: Program) -> tuple[int, int]:
    """Most bytes alive of what launches write or are sent, and what is left of it in the end.

    Copies out of a packed buffer count as what a launch writes.

    Alive until it is freed, for the process group may hold on to it.
    """
    theirs: dict[int, int] = {}
    alive: dict[int, int] = {}
    most = 0
    kept = {s for value in program.values for s in tags.storage_ids(value)}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            kept |= tags.storage_ids(node)
    for node in program.graph.nodes:
        if ops.of(node).asynchronous or node.target is ops.unpack:
            for each in (node, *tags.operands(node)):
                theirs |= {id(s): s.nbytes() for s in tags.storages(each) if id(s) not in kept}
            alive |= {s: theirs[s] for s in tags.storage_ids(node) if s in theirs}
            for each in tags.operands(node):
                alive |= {s: theirs[s] for s in tags.storage_ids(each) if s in theirs}
            most = max(most, sum(alive.values()))
        elif node.target is ops.free:
            for each in tags.operands(node):
                for storage in tags.storage_ids(each):
                    alive.pop(storage, None)
    return most, sum(alive.values())


@dataclasses.dataclass
class Count:
    """Of one kind: how many were made, how many were refused, by which Fact."""

    made: int = 0
    refused: int = 0
    harmless: int = 0
    facts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def tried(
    kind: str, program: Program, values: graphs.Values | None, seed: str, count: Count
) -> None:
    """Make one fault; it is refused, or does no harm."""
    broken = again(program)
    try:
        change = FAULTS[kind](broken, random.Random(zlib.crc32(f"{kind} {seed}".encode())))
    except NoPlace:
        return
    count.made += 1
    fact = refused(broken)
    if fact is not None:
        count.refused += 1
        count.facts[fact] += 1
        return
    found = harm(program, broken, values)
    assert found is None, f"{seed}: {kind}: {change}: {found}; verify accepts it"
    count.harmless += 1


@functools.cache
def small(name: str, prefetch: int) -> tuple[Program, graphs.Values]:
    return built(name, prefetch), graphs.random_values(SMALL[name]())


def swept(kind: str, seeds: int, prefetches: tuple[int, ...]) -> Count:
    count = Count()
    for name in SMALL:
        for prefetch in prefetches:
            program, values = small(name, prefetch)
            for seed in range(seeds):
                tried(kind, program, values, f"{name} {prefetch} {seed}", count)
    return count


# Kinds of fault that are harmless in some places: the program does the same.
@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_found(kind: str) -> None:
    count = swept(kind, 1, (1,))
    assert count.refused, f"no fault of this kind was made or refused: {count}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_many_faults_are_found(kind: str) -> None:
    count = swept(kind, 4, (0, 1, 2))
    print(f"{kind:45} made {count.made:4} refused {count.refused:4} harmless {count.harmless:3}")
    assert count.refused >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting", "prefetch"), ALL)
def test_faults_in_the_zoo_are_found(name: str, setting: str, prefetch: int) -> None:
    program = of_zoo(name, setting, prefetch)
    start = untouched(name, setting)
    half = any(param.compute_dtype is torch.bfloat16 for param in start.params.values())
    values = None if half and name in FULL_PRECISION_ON_CPU else graphs.random_values(start)
    made = 0
    alone = program.world_size * program.replicas == 1
    for kind in FAULTS.keys() - (UNSEEN_ON_ONE_RANK if alone else set()):
        count = Count()
        tried(kind, program, values, f"{name} {setting} {prefetch}", count)
        made += count.made
    assert made >= 30


# torch has no batch norm on CPU of a bf16 activation and weight with fp32 statistics.
FULL_PRECISION_ON_CPU = {"convnet"}
# Where nothing is reduced, a gradient bears no name in the graph: only the trace knew whose it is.
UNSEEN_ON_ONE_RANK = {"swap_returned_gradients"}


def test_there_are_kinds_enough() -> None:
    assert len(FAULTS) >= 40


def test_what_does_no_harm_is_no_fault_and_what_does_is_one() -> None:
    """The measure of harm, on faults whose effect is known."""

    def touched(change: Callable[[Program], None]) -> str | None:
        program, values = small("full", 1)
        broken = again(program)
        change(broken)
        return harm(program, broken, values)

    def launches(program: Program) -> Iterator[fx.Node]:
        return (n for n in program.graph.nodes if n.target is ops.all_gather)

    def no_frees(program: Program) -> None:
        for node in list(program.graph.nodes):
            if node.target is ops.free:
                program.graph.erase_node(node)

    def no_events(program: Program) -> None:
        for node in program.graph.nodes:
            tags.update(node, waits=())

    def other_numbers(program: Program) -> None:
        node = next(n for n in launches(program) if len(tags.operands(n)) == 3)
        a, b, c = tags.operands(node)
        node.args = ([c, b, a], *node.args[1:])

    assert touched(lambda program: None) is None
    assert touched(no_frees)
    assert "slow" in (touched(no_events) or "")
    assert touched(other_numbers) == "AssertionError"
