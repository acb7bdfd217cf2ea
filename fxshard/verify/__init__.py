"""One check per Fact. A check raises VerifyError with the node at fault, or returns.

The rooms: `structure` (tags, units, launches, the schedule), `buckets`, `parameters`, `gradients`,
`steps`, `storages` and `streams`. `walk` has what several of them look for in a graph.
"""

from __future__ import annotations

from collections.abc import Callable

from fxshard.program import Fact, Program
from fxshard.verify.buckets import bucketed
from fxshard.verify.failure import fail
from fxshard.verify.gradients import equal_chunks, reduced_once
from fxshard.verify.parameters import no_param_saved, params_unsharded
from fxshard.verify.steps import stepped_once
from fxshard.verify.storages import bounded_inflight, freed, no_use_after_free
from fxshard.verify.streams import streams_ordered
from fxshard.verify.structure import one_dtype, outlined, tagged, units_assigned, unshard_paired

__all__ = ["CHECKS", "fail", "verify"]


def verify(program: Program) -> None:
    """Check every Fact in ``program.facts``.

    Raises:
        VerifyError: the first Fact that does not hold, with ten lines of dump around the node.
    """
    for fact in Fact:
        if fact in program.facts:
            CHECKS[fact](program)


CHECKS: dict[Fact, Callable[[Program], None]] = {
    Fact.TAGGED: tagged,
    Fact.UNITS_ASSIGNED: units_assigned,
    Fact.BUCKETED: bucketed,
    Fact.UNSHARD_PAIRED: unshard_paired,
    Fact.PARAMS_UNSHARDED: params_unsharded,
    Fact.NO_PARAM_SAVED: no_param_saved,
    Fact.REDUCED_ONCE: reduced_once,
    Fact.ONE_DTYPE: one_dtype,
    Fact.EQUAL_CHUNKS: equal_chunks,
    Fact.STEPPED_ONCE: stepped_once,
    Fact.BOUNDED_INFLIGHT: bounded_inflight,
    Fact.FREED: freed,
    Fact.NO_USE_AFTER_FREE: no_use_after_free,
    Fact.STREAMS_ORDERED: streams_ordered,
    Fact.OUTLINED: outlined,
}
