"""What is alive behind each row of a schedule."""

from __future__ import annotations

from fxshard.ir.schedule import points
from fxshard.memory.report import MemoryReport


def live_after(report: MemoryReport) -> dict[tuple[str, str], int]:
    """Bytes alive on the device behind each row of the last micro-batch, in the steady step.

    By phase and name of the row.
    """
    program, ledger = report.program, report.ledger()
    assert program.schedule is not None
    last = report.micro_batches - 1
    starts = {phase.name: phase.start for phase in ledger.phases if phase.micro_batch == last}
    found: dict[tuple[str, str], int] = {}
    for phase, graph in program.schedule.phases():
        for number, point in enumerate(points(program.schedule, graph), start=starts[phase] + 1):
            if point.node is None:
                found[phase, point.row.name] = int(ledger.totals[2 * number + 1])
    return found
