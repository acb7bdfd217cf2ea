"""What faults of programs of other strategies than `full_shard` are made of."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import fx

from fxshard import pipeline
from fxshard.config.checked import Config
from fxshard.config.precision import Precision
from fxshard.ir import tags, transfers
from fxshard.ir.program import Fact, Program
from tests import graphs
from tests.graphs import BF16
from tests.verify.verify_cases import ALWAYS, find, item

chain, layered = graphs.chain, graphs.layered
Build = Callable[[], Program]
Fault = Callable[[Program], fx.Node]


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault in what the passes make of a program.

    Attributes:
        harms: the numbers on a `StrictWorld` are others, or it cannot run at all.
    """

    fact: Fact
    fault: Fault
    build: Build
    harms: bool


class Cases(list[Case]):
    """The faults of a file, in order."""

    def breaks(self, fact: Fact, build: Build, *, harms: bool = True) -> Callable[[Fault], Fault]:
        """Enters a function, which breaks a good program and returns the node to blame."""

        def add(fault: Fault) -> Fault:
            self.append(Case(fact, fault, build, harms))
            return fault

        return add


def good(build: Build) -> Program:
    """The program that `build` makes, after the whole pipeline, its parameters apart."""
    program = build()
    pipeline.run(program, pipeline.default_passes(Config(**graphs.APART)))
    assert program.facts == ALWAYS
    return program


def returned(program: Program, name: str, node: fx.Node) -> fx.Node:
    """Return `node` as the gradient of `name`."""
    names = [result.name for result in program.results]
    values = program.values
    values[names.index(name)] = node
    program.values = values
    return node


def value_of(program: Program, name: str) -> fx.Node:
    return program.values[[result.name for result in program.results].index(name)]


def repeated(program: Program, after: fx.Node, node: fx.Node, taken: list[fx.Node]) -> fx.Node:
    """A copy of the launch `node` on `taken`, and its wait, after `after`; returns its item."""
    tag = dataclasses.replace(
        tags.get(node), phase="backward", pair=99, records="z99", waits=(), fqn=None
    )
    with program.graph.inserting_before(after.next):
        got, *_ = transfers.insert_operator(
            program, node.target, (taken, *node.args[1:]), [str(tags.get(taken[0]).fqn)], tag, "z"
        )
        transfers.insert_wait(program, [got], tag)
    return got


def part(program: Program, name: str, index: int = 0) -> fx.Node:
    return item(find(program, name), index)


bf16 = functools.partial(chain, precision=BF16)
offload = functools.partial(chain, offloaded=True)
offload_bf16 = functools.partial(chain, offloaded=True, precision=BF16)
kept = functools.partial(chain, reshard=False)
regrouped = functools.partial(chain, world_size=4, reshard=2)
hybrid = functools.partial(chain, replicas=2)
hybrid_layers = functools.partial(layered, replicas=2)
no_shard = functools.partial(chain, world_size=1, replicas=2)
summed = functools.partial(chain, replicas=2, precision=Precision(torch.float16))
low_precision = functools.partial(chain, replicas=2, precision=Precision(torch.bfloat16))
hooked = functools.partial(layered, comm_hook=True)
accumulated = functools.partial(chain, accumulated=frozenset({"head"}))
no_sync = functools.partial(chain, sync=False)
adds = functools.partial(chain, sync=False, accumulated=frozenset({"head"}))
