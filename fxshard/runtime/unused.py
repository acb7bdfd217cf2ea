"""Gradients that no loss has reached: their ``.grad`` stays None on all ranks, as in eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from fxshard.ir.program import Program
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld


class Reach:
    """The gradients of one module that losses have reached so far.

    A program takes zeros as gradients of outputs that are in no loss, so that all ranks reduce the
    same parameters. A gradient that comes from such zeros only, on all ranks, is None in eager.
    """

    def __init__(self) -> None:
        self._accumulated: set[str] = set()  # gradients under `no_sync` that a loss has reached
        self._anywhere: Callable[[], frozenset[str]] = frozenset

    def __reduce__(self) -> Any:
        """Copy and pickle it without accumulated gradients, as the module."""
        return Reach, ()

    def accumulated(self, fqn: str) -> None:
        """Note that a loss has reached a gradient which eager code has accumulated."""
        self._accumulated.add(fqn)

    def has_accumulated(self, fqn: str) -> bool:
        """True if a loss has reached an accumulated gradient on this rank."""
        return fqn in self._accumulated

    def begin(
        self,
        program: Program,
        arrived: Iterable[int],
        world: C10dWorld | InProcessWorld,
        waiting: Iterable[str],
    ) -> frozenset[str]:
        """A backward begins; call it on all ranks.

        Args:
            program: whose backward it is.
            arrived: flat indices of the outputs whose gradients have arrived.
            world: of the ranks.
            waiting: FQNs of the parameters that have an accumulated gradient, or a partial sum.

        Returns:
            Names of the gradients that no loss reaches on this rank.
        """
        arrived = frozenset(arrived)
        here = frozenset(name for name, reach in program.reached.items() if not reach & arrived)
        self._accumulated &= set(waiting)  # the rest has been reduced, or dropped
        made = program.gradients or frozenset()
        kept = {fqn for fqn in program.params if program.reduces(fqn) != "all"}
        self._accumulated |= (made - here) & kept
        doubtful = [fqn for fqn in sorted(_doubtful(program, made)) if fqn not in kept]
        used = self._accumulated | (made - here)
        self._anywhere = frozenset
        if doubtful:
            flags = "".join("1" if fqn in used else "0" for fqn in doubtful)
            on_any_rank = world.any_rank(flags)
            self._anywhere = functools.cache(lambda: _without(doubtful, on_any_rank()))
        return here - (program.params.keys() - kept)

    def unused(self) -> frozenset[str]:
        """FQNs of the sharded parameters that no loss reaches on any rank in this backward.

        Call it on all ranks, after the first reduction.
        """
        return self._anywhere()


def _doubtful(program: Program, made: frozenset[str]) -> frozenset[str]:
    """FQNs of the gradients that may be reached on no rank; the same on all ranks."""
    needs = program.common or program.needs
    if needs is not None:
        return frozenset(needs.grads) - needs.certain
    sums = (program.accumulated | program.partial) - made
    return frozenset(fqn for fqn in program.params if fqn in program.reached or fqn in sums)


def _without(fqns: list[str], flags: str) -> frozenset[str]:
    return frozenset(fqn for fqn, flag in zip(fqns, flags, strict=True) if flag == "0")
