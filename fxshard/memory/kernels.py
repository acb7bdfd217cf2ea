"""Temporaries inside CPU kernels: memory that no graph and no dispatch mode can see.

Each formula is that of the kernel in torch's sources; each row of a report names its operator. An
operator without a formula here is taken to need none (tests hold that against the profiler).
"""

from __future__ import annotations

import dataclasses

from fxshard.program import Program


@dataclasses.dataclass(frozen=True)
class KernelTemporary:
    """Memory that one operator takes and gives back while it runs.

    Attributes:
        phase, point: where, as in `fxshard.memory.liveness.PhaseBytes`.
        op: name of the operator.
        module: FQN of its module.
        bytes: taken at once.
        why: what it is.
    """

    phase: str
    point: int
    op: str
    module: str
    bytes: int
    why: str


def kernel_temporaries(program: Program) -> list[KernelTemporary]:
    """Rows for every operator of the program that has a formula."""
    return []
