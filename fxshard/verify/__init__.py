"""One check per Fact. A check raises VerifyError with the node at fault, or returns.

The files: `applies` (when a Fact must hold), `structure` (edges, tags, units, launches),
`buckets`, `checkpoints`, `parameters`, `gradients`, `steps`, `clipped`, `offloads`, `storages`,
`streams`, `joined` and `schedules`.
`walk` has what several of them look for in a graph.
"""

from __future__ import annotations

from collections.abc import Callable

from fxshard.errors import VerifyError
from fxshard.ir.program import Fact, Program
from fxshard.verify.applies import APPLIES
from fxshard.verify.buckets import bucketed
from fxshard.verify.checkpoints import recomputed
from fxshard.verify.clipped import clipped
from fxshard.verify.failure import fail
from fxshard.verify.gradients import equal_chunks, reduced_once
from fxshard.verify.joined import joined
from fxshard.verify.offloads import offloaded
from fxshard.verify.parameters import no_param_saved, params_unsharded
from fxshard.verify.schedules import outlined
from fxshard.verify.steps import stepped_once
from fxshard.verify.storages import bounded_inflight, freed, no_use_after_free
from fxshard.verify.streams import streams_ordered
from fxshard.verify.structure import one_dtype, tagged, units_assigned, unshard_paired, well_formed

__all__ = ["APPLIES", "CHECKS", "fail", "verify"]


def verify(program: Program) -> None:
    """Check every Fact that must hold: by what the program has, and by what passes ensure.

    Passes cannot change what a finished program must fulfil: see `fxshard.verify.applies`.

    Raises:
        VerifyError: the first Fact that does not hold, with ten lines of dump around the node.
    """
    for fact in Fact:
        try:
            if APPLIES[fact](program) or fact in program.facts:
                CHECKS[fact](program)
        except VerifyError:
            raise
        except Exception as error:  # of a program so wrong that a check cannot read it
            what = f"the program is too broken to be checked ({type(error).__name__}: {error})."
            raise VerifyError(fact.name.lower(), what) from error


CHECKS: dict[Fact, Callable[[Program], None]] = {
    Fact.WELL_FORMED: well_formed,
    Fact.TAGGED: tagged,
    Fact.UNITS_ASSIGNED: units_assigned,
    Fact.BUCKETED: bucketed,
    Fact.RECOMPUTED: recomputed,
    Fact.UNSHARD_PAIRED: unshard_paired,
    Fact.PARAMS_UNSHARDED: params_unsharded,
    Fact.NO_PARAM_SAVED: no_param_saved,
    Fact.REDUCED_ONCE: reduced_once,
    Fact.ONE_DTYPE: one_dtype,
    Fact.EQUAL_CHUNKS: equal_chunks,
    Fact.STEPPED_ONCE: stepped_once,
    Fact.CLIPPED: clipped,
    Fact.BOUNDED_INFLIGHT: bounded_inflight,
    Fact.OFFLOADED: offloaded,
    Fact.FREED: freed,
    Fact.NO_USE_AFTER_FREE: no_use_after_free,
    Fact.STREAMS_ORDERED: streams_ordered,
    Fact.JOINED: joined,
    Fact.OUTLINED: outlined,
}
