"""What is alive after each row of a schedule."""

from __future__ import annotations

from fxshard.memory.report import MemoryReport


def live_after(report: MemoryReport) -> dict[tuple[str, str], int]:
    """Bytes alive on the device after each row of the last micro-batch, in the steady step.

    By phase and name of the row.
    """
    ledger, last = report.ledger(), report.micro_batches - 1
    return {
        (phase.name, moment.node): int(ledger.totals[phase.begin + 2 * number + 1])
        for phase in ledger.phases
        if phase.micro_batch == last
        for number, moment in enumerate(ledger.of_phase(phase), start=1)
        if moment.kind == "row"
    }
