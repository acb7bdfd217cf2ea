"""What is recorded of an optimizer's step, as data."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import NamedTuple

import sympy

from fxshard.cost.timeline import OptimizerState
from fxshard.memory.category import Category
from fxshard.memory.ledger import OPTIMIZER, LiveRange, owner_of
from fxshard.memory.recording import OperatorEvent


class OptimizerStorage(NamedTuple):
    """A storage that an optimizer keeps: its `key` in the state of the parameter `fqn`."""

    bytes: int
    key: str
    fqn: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """``exp_avg of layers.0.weight``."""
        return f"{self.key} of {self.fqn}"


Parts = dict[tuple[str, ...], list[OperatorEvent]]  # by what is stepped together


@dataclasses.dataclass
class Sent:
    """What is sent for updates of full matrices.

    Attributes:
        names: of the buffers, by storage.
        exchanges: bytes of each all-to-all, of the larger of its two buffers.
        flops: of the matrices that one rank owns, at most; in bf16 for Muon.
        schedules: who owns which, in which round; a table for each optimizer.
    """

    names: dict[int, str] = dataclasses.field(default_factory=dict)
    exchanges: list[int] = dataclasses.field(default_factory=list)
    flops: int = 0
    schedules: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class OptimizerStep:
    """A recording of the first and the second step.

    Attributes:
        name: class of the optimizer.
        first, second: events in order; the second step is the steady state.
        state: storages that are optimizer state after the first or the second step.
        held: those that are state between the two.
        parts: with the optimizer in backward, the events of the first and of the second step by
            what is stepped together (FQNs, in the order of the program's operator).
        initial: those that the optimizer makes when it is made (Adagrad), before the first step.
        has_state: the optimizer's ``state`` is not empty after the first step.
        formulas: the bytes of each storage as an expression of the number of ranks, where it
            depends on it; empty if not asked for (see `with_formulas`).
        on_host: storages that the CPU holds while parameters are elsewhere, such as Adam's steps.
        without: FQNs of parameters without a gradient, as no loss reaches them.
        sent: what is sent for updates of full matrices, in a step.
    """

    name: str
    first: list[OperatorEvent]
    second: list[OperatorEvent]
    state: dict[int, OptimizerStorage]
    held: list[int]
    initial: list[int] = dataclasses.field(default_factory=list)
    has_state: bool = True
    parts: tuple[Parts, Parts] | None = None
    formulas: dict[int, sympy.Expr] = dataclasses.field(default_factory=dict)
    on_host: frozenset[int] = frozenset()
    without: frozenset[str] = frozenset()
    sent: Sent = dataclasses.field(default_factory=Sent)

    def between_steps(self) -> OptimizerState:
        """What it keeps between two steps, and sends in one, for an estimate of its time."""
        found: dict[str, int] = defaultdict(int)
        for number in self.held:
            found[self.state[number].fqn] += self.state[number].bytes
        return OptimizerState(self.name, dict(found), tuple(self.sent.exchanges), self.sent.flops)

    def range_of(self, op: str, number: int, size: int, *, host: bool) -> LiveRange:
        """The live range of a storage that `op` made: state, or a temporary."""
        name, owner, category = f"temporary of {op}", OPTIMIZER, Category.TEMP
        name = self.sent.names.get(number, name)
        if number in self.state:
            state = self.state[number]
            name, owner, category = state.name, owner_of(state.fqn), Category.OPT_STATE
        formula = self.formulas.get(number)
        host = host or number in self.on_host
        return LiveRange(0, name, op, owner, category, size, host, formula=formula)
