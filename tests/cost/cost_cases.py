"""What several of the tests beside it need (test_cost)."""

import argparse
import itertools
from typing import Any

import pytest
import torch

import fxshard
from fxshard import pipeline
from fxshard.cli import model_source
from fxshard.config.checked import Config
from fxshard.cost import timeline
from fxshard.cost.timeline import Estimate
from fxshard.hardware import Hardware, Link
from fxshard.ir.program import Program

aten = torch.ops.aten


FREE = Link(0.0, 1e30)


def toy(**changes: Any) -> Hardware:
    """Round numbers: a product of [2,4] and [4,4] takes 1 s, a ring of 2 moves 32 bytes in 1 s.

    A weight f32[4,4] has 64 bytes, and half of it moves: gathering or reducing one takes 1 s too.
    Memory takes no time.
    """
    figures: dict[str, Any] = {
        "name": "toy",
        "flops": {torch.float32: 64.0},
        "achievable": 1.0,
        "memory_bandwidth": 1e30,
        "memory_bytes": 1,
        "launch_overhead": 0.0,
        "link": Link(0.0, 32.0),
        "network": Link(0.0, 32.0),
        "host": FREE,
    }
    return Hardware(**figures | changes)


def rewritten(program: Program, **options: Any) -> Program:
    pipeline.run(program, pipeline.default_passes(Config(**options)))
    return program


def took(program: Program, hardware: Hardware, **options: Any) -> Estimate:
    """The estimate of a program, with what holds for each."""
    found = timeline.estimate([rewritten(program, **options)], hardware)
    busy = found.compute_seconds + found.exposed_communication_seconds
    assert found.step_seconds == pytest.approx(busy)
    units = found.by_unit().values()
    assert sum(unit.compute for unit in units) == pytest.approx(found.compute_seconds)
    assert sum(unit.exposed for unit in units) == pytest.approx(
        found.exposed_communication_seconds - found.tail
    )
    for stream in {row.stream for row in found.rows}:  # a stream does one thing at a time
        own = [row for row in found.rows if row.stream == stream]
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    return found


def spans(found: Estimate, *operations: str, phase: str = "forward") -> list[tuple[Any, ...]]:
    """Unit, start and end of the rows of those operations, to a thousandth."""
    return [
        (row.unit, round(row.start, 3), round(row.end, 3))
        for row in found.rows
        if row.operation in operations and row.phase == phase and row.seconds > 1e-9
    ]


def preset(name: str, *options: str) -> fxshard.Plan:
    parser = argparse.ArgumentParser()
    model_source.add_arguments(parser)
    args = parser.parse_args(["--hf-config", name, *options])
    model, inputs, keywords = model_source.load(model_source.ModelSource.of(args), "meta")
    return fxshard.plan(
        model, inputs, keywords, world_size=args.world_size, **model_source.options(args)
    )
