"""Collectives of sequence parallelism in parts: numbers, bytes, rows, and when it is done."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fxshard
from fxshard._torch.process_groups import fake_process_group
from fxshard.hardware import Link
from fxshard.ir import ops
from fxshard.passes.async_tensor_parallel import AsyncTensorParallel
from fxshard.plans.plan import Plan
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import split_steps, tracked
from tests.distributed import tensor_parallel_cases as cases
from tests.distributed.slow_links import SLOW_LINKS
from tests.distributed.tensor_parallel_cases import Job


def in_parts(default: Sequence[Any]) -> list[Any]:
    """The default passes with this one, where it belongs."""
    at = [each.name for each in default].index("launch-collectives")
    return [*default[:at], AsyncTensorParallel(SLOW_LINKS), *default[at:]]


JOB = Job(cases.of_sequences, options={"passes": in_parts}, steps=2)


def counted(plan: Plan) -> collections.Counter[str]:
    return collections.Counter(
        ops.of(node).operation for node in plan.program.graph.nodes if ops.of(node).of_model
    )


def planned(**options: Any) -> Plan:
    model, _ = JOB.parallel()
    more: dict[str, Any] = {"world_size": 2, "loss": lambda out: out.square().mean(), **options}
    return fxshard.plan(model, (JOB.batch(0, 0),), **more)


def differing(rank: int, world_size: int, job: Job) -> tuple[dict[str, float], dict[str, int]]:
    found = cases.differing(job, rank)
    model = job.sharded()
    job.loss(model, job.batch(rank, 0)).backward()
    return found, dict(counted(model.plan))


def test_numbers_are_those_of_fsdp2(ranks: Any) -> None:
    """Two parts of a batch of two; two ranks add up two terms, whatever the size."""
    with fake_process_group(0, 4):
        plain = counted(planned())
    for apart, counts in ranks(4).run(differing, JOB):
        assert all(value < 1e-6 for value in apart.values()), apart
        assert counts["reduce-scatter"] > plain["reduce-scatter"]
        assert counts["all-gather"] > plain["all-gather"]
        assert counts["all-reduce"] == plain["all-reduce"]


@pytest.mark.parametrize("more", [{}, {"checkpoint": "full"}])
def test_bytes_and_rows(more: dict[str, Any]) -> None:
    with fake_process_group(0, 4):
        plan = planned(passes=in_parts, **more)
        found = compare(plan.memory, split_steps(tracked(plan.workload, 2), 2))
        assert found.max_abs_difference == 0, found.table(only_different=True)
        assert (
            plan.estimate(SLOW_LINKS).step_seconds
            < planned(**more).estimate(SLOW_LINKS).step_seconds
        )
        rows = [row for row in plan.estimate(SLOW_LINKS).rows if row.phase == "forward"]
    gathers = [row for row in rows if row.operation == "all-gather" and row.unit == "layers.0"]
    assert len(gathers) == 4
    meanwhile = [r for r in rows if r.stream == "compute" and r.operation == "compute"]
    second = gathers[1]
    assert any(r.start < second.end and r.end > second.start and r.seconds for r in meanwhile)


def test_it_is_off_and_done_only_where_it_is_shorter() -> None:
    with fake_process_group(0, 4):
        plain = counted(planned())
        assert counted(planned(async_tensor_parallel=True)) == plain  # too small for an H100
        assert counted(planned(passes=in_parts)) != plain


def test_the_option_hardware_decides() -> None:
    """Links that take no time are not worth a kernel more; slow ones are."""
    fast = dataclasses.replace(SLOW_LINKS, link=Link(0.0, 1e15))
    with fake_process_group(0, 4):
        whole, same, parts = (
            planned(async_tensor_parallel=True, hardware=each)
            for each in ("h100", fast, SLOW_LINKS)
        )
        assert counted(whole) == counted(same)
        assert counted(parts) == counted(planned(passes=in_parts)) != counted(whole)
        assert parts.certificate != whole.certificate, "ranks that differ are refused"
        found = compare(parts.memory, split_steps(tracked(parts.workload, 2), 2))
        assert found.max_abs_difference == 0, found.table(only_different=True)


def test_parts_are_rows() -> None:
    """One product of all rows gives what those of the parts give, here bit by bit."""
    x, w = torch.randn(16, 8), torch.randn(8, 4)
    parts: list[Tensor] = [part @ w for part in x.chunk(2)]
    torch.testing.assert_close(torch.cat(parts), x @ w, rtol=1e-6, atol=1e-6)
