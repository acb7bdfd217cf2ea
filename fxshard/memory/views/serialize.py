"""A report as JSON-ready values: schema "fxshard.memory/2", described in docs/report-json.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from fxshard.memory.category import CATEGORIES
from fxshard.memory.ledger import HALF, Ledger, LiveRange
from fxshard.memory.report import MemoryReport

SCHEMA = "fxshard.memory/2"


def to_dict(report: MemoryReport) -> dict[str, Any]:
    """Everything that a report knows. All sizes are bytes; a category that is absent has none."""
    return {
        "schema": SCHEMA,
        "world_size": report.world_size,
        "micro_batches": report.micro_batches,
        "optimizer": report.optimizer,
        "offloaded": report.offloaded,
        "units": [
            {"name": unit.name, "kind": unit.kind, "parameters": [p.fqn for p in unit.params]}
            for unit in report.units
        ],
        "streams": streams(report.ledger()),
        "peak_bytes": report.peak_bytes,
        "first_step_peak_bytes": report.first_step_peak_bytes,
        "host_peak_bytes": report.host_peak_bytes,
        "peak_with_kernels_bytes": report.peak_with_kernels_bytes,
        "peak_by_category": {c.value: v for c, v in report.peak_by_category.items() if v},
        "peak_by_stream": report.peak_by_stream,
        "device": report.device,
        "device_memory": _device_memory(report),
        "peak_at": dataclasses.asdict(report.peak_at),
        "alive_at_peak": [_thing(report.ledger(), each) for each in report.alive_at_peak()],
        "kernel_temporaries": [dataclasses.asdict(k) for k in report.kernel_temporaries],
        "lifecycle": [phase.to_dict() for phase in report.lifecycle],
        "steady_step": _step(report, first=False),
        "first_step": _step(report, first=True),
    }


def _device_memory(report: MemoryReport) -> dict[str, Any] | None:
    if report.device != "cuda":
        return None
    found = report.device_memory()
    return {
        "allocated_bytes": found.allocated,
        "reserved_bytes": found.reserved,
        "fragmentation": found.fragmentation,
        "phases": [dataclasses.asdict(phase) for phase in found.phases],
        "fixed": [dataclasses.asdict(cost) for cost in found.fixed],
        "unknown": [dataclasses.asdict(kernel) for kernel in found.unknown],
    }


def streams(ledger: Ledger) -> list[str]:
    """Names of the streams that anything runs on, in order of their first operator."""
    return list(dict.fromkeys(moment.stream for moment in ledger.moments))


def by_category(sizes: Iterable[int]) -> dict[str, int]:
    """Category -> bytes, without zeros."""
    return {c.value: int(v) for c, v in zip(CATEGORIES, sizes, strict=True) if v}


def _thing(ledger: Ledger, each: LiveRange) -> dict[str, Any]:
    return {
        "name": each.name,
        "op": each.op,
        "module": each.module,
        "category": each.category.value,
        "bytes": each.bytes,
        "line": each.line,
        "stream": each.stream,
        "storage": each.storage,
        "born": moment(ledger, each.born),
        "died": moment(ledger, each.died),
    }


def moment(ledger: Ledger, tick: int | None) -> dict[str, Any] | None:
    """Where a range begins or ends; None before the step and after it."""
    if tick is None or not 0 <= tick < 2 * len(ledger.moments):
        return None
    phase, point = ledger.at(tick)
    return {
        "phase": phase.name,
        "micro_batch": phase.micro_batch,
        "point": point,
        "node": ledger.moments[tick // 2].node,
    }


def _step(report: MemoryReport, *, first: bool) -> dict[str, Any]:
    return {
        "peak_bytes": report.first_step_peak_bytes if first else report.peak_bytes,
        "phases": list(_phases(report, first)),
        "rows": list(_rows(report, first)),
    }


def _phases(report: MemoryReport, first: bool) -> Iterator[dict[str, Any]]:
    ledger = report.ledger(first_step=first)
    for phase in ledger.phases:
        ticks = ledger.extremes(phase)
        place = ledger.moments[ticks["peak"] // 2]
        found: dict[str, Any] = {
            "phase": phase.name,
            "micro_batch": phase.micro_batch,
            "points": phase.points,
            **{f"{state}_bytes": int(ledger.totals[tick]) for state, tick in ticks.items()},
            "peak_at": {"node": place.node, "module": place.module, "line": place.line},
            **{state: by_category(ledger.bytes[tick, :HALF]) for state, tick in ticks.items()},
        }
        if report.offloaded:
            host = ledger.bytes[phase.begin : phase.end + 1, HALF:]
            top = int(host.sum(1).argmax())
            found["host_start"] = by_category(host[0])
            found["host_peak"] = by_category(host[top])
            found["host_end"] = by_category(host[-1])
        yield found


def _rows(report: MemoryReport, first: bool) -> Iterator[dict[str, Any]]:
    for where, row, owned in report.figures(first_step=first):
        found = {
            "module": where.module,
            "state": where.state.value,
            "call": where.call,
            "micro_batch": where.micro_batch,
            "bytes": int(row[:HALF].sum()),
            "by_category": by_category(row[:HALF]),
            "owned_bytes": int(owned[:HALF].sum()),
            "owned": by_category(owned[:HALF]),
        }
        if report.offloaded:
            found["host"] = by_category(row[HALF:])
            found["host_owned"] = by_category(owned[HALF:])
        yield found
