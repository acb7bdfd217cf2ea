"""What a program says of tensor parallelism, on a fake process group: bytes, text, time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard import pipeline, verify
from fxshard._torch.process_groups import fake_process_group
from fxshard.config.checked import Config
from fxshard.cost import operators
from fxshard.hardware import hardware_of
from fxshard.ir import dump, ops, text
from fxshard.ir.program import Program
from fxshard.memory.category import Category
from fxshard.plans.plan import Plan
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import split_steps, tracked
from fxshard.verify.certificate import collectives
from tests import texts
from tests.distributed.tensor_parallel_cases import (
    Job,
    Mlp,
    WithLogits,
    of_an_mlp,
    of_sequences,
    of_sequences_and_logits,
    of_tensors,
    of_transformers,
)


@pytest.fixture(autouse=True)
def ranks_without_data() -> Iterator[None]:
    with fake_process_group(0, 4):
        yield


def planned(job: Job, **options: Any) -> Plan:
    model, _ = job.parallel()
    loss = None if job.plan is of_sequences_and_logits else lambda out: out.square().mean()
    with job.around_loss():
        return fxshard.plan(model, (job.batch(0, 0),), world_size=2, loss=loss, **options)


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (Job(of_an_mlp, model=Mlp), {"optimizer": torch.optim.AdamW}),
        (Job(of_tensors), {"checkpoint": "selective"}),
        (Job(of_sequences), {"checkpoint": "full", "optimizer": torch.optim.AdamW}),
        (Job(of_sequences_and_logits), {"backend": "inductor"}),
        (Job(of_transformers, model=WithLogits), {}),
        (Job(of_sequences), {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16)}),
        (Job(of_sequences_and_logits), {}),
    ],
)
@pytest.mark.sample(2)
def test_bytes_are_those_of_the_tracker(job: Job, options: dict[str, Any]) -> None:
    plan = planned(job, **options)
    with job.around_loss():
        measured = tracked(plan.workload, 2)
    found = compare(plan.memory, split_steps(measured, 2))
    assert found.max_abs_difference == 0, found.table(only_different=True)
    assert not plan.memory.lifecycle


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (Job(of_an_mlp, model=Mlp), {"optimizer": torch.optim.AdamW}),
        (Job(of_tensors), {"checkpoint": "selective"}),
        (Job(of_sequences), {"checkpoint": "full", "async_tensor_parallel": True}),
        (Job(of_sequences_and_logits), {}),
        (Job(of_transformers, model=WithLogits), {}),
        (Job(of_sequences), {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16)}),
    ],
)
@pytest.mark.sample(2)
def test_its_text_is_read_back(job: Job, options: dict[str, Any]) -> None:
    """Before the passes, between them, and after: where it lies, and who its groups are."""
    written = list[str]()

    class Noted:
        name, requires, ensures = "note-text", frozenset(), frozenset()

        def apply(self, program: Program) -> None:
            written.append(text.write(program))

    def passes(default: list[Any]) -> list[Any]:
        return [each for step in default for each in (Noted(), step)]

    program = planned(job, passes=passes, **options).program
    assert program.parallel and "Placed(mesh=Mesh(" in text.write(program)
    read = texts.again(program)
    verify.verify(read)
    assert collectives(read) == collectives(program)
    groups, same = (
        [each.group_of(node) for node in each.graph.nodes if ops.communicates(node)]
        for each in (program, read)
    )
    assert groups == same and "tp" in groups
    for each in written:
        assert text.write(text.parse(each)) == each
    first = text.parse(written[0])
    steps = pipeline.default_passes(Config.from_options(options | {"units": None}))
    pipeline.run(first, steps)
    assert text.write(first) == text.write(program)


def test_collectives_are_named_by_their_dimension() -> None:
    plan = planned(Job(of_an_mlp, model=Mlp))
    lines = [line for line in collectives(plan.program) if "group=tp" in line]
    want = "fxshard.model_all_reduce group=tp size=2 op=sum bytes="
    assert len(lines) == 3 and all(want in line for line in lines)
    assert sum("group=shard size=2" in line for line in collectives(plan.program)) > 4
    nodes = [n for n in plan.program.graph.nodes if "all_reduce" in str(n.target)]
    assert all(", 2, tp, sum, 1)" in dump.line(node, plan.program) for node in nodes)


def test_collectives_take_time_of_their_own_ranks() -> None:
    """Those of tensor parallelism are neighbours; those of data parallelism are so far apart."""
    program = planned(Job(of_an_mlp, model=Mlp)).program
    calls = [node for node in program.graph.nodes if ops.communicates(node)]
    for node in calls:
        sent = operators.collective(node, program.world_size, program.apart[""])
        mine = program.group_of(node) == "tp"
        assert (sent.ranks, sent.stride) == ((2, 1) if mine else (2, 2))
        if mine:
            assert (sent.total, sent.passes) == (4 * 6 * 4, 2)
            seconds = operators.node_seconds(node, hardware_of("h100"), 2, program.apart[""])
            assert seconds > 14e-6  # what NCCL takes besides
    assert any(program.group_of(node) == "tp" for node in calls)


def without_rows(default: Any) -> list[Any]:
    return [each for each in default if each.name != "launch-collectives"]


def test_they_run_beside_compute() -> None:
    """In backward the gradients of weights are computed meanwhile; nothing else is longer."""
    job = Job(of_sequences)
    estimate, plain = (
        planned(job, **more).estimate("h100") for more in ({}, {"passes": without_rows})
    )
    mine = [row for row in estimate.rows if row.stream == "tp"]
    assert {row.operation for row in mine} == {"all-gather", "reduce-scatter", "all-reduce"}
    hidden = sum(row.seconds for row in mine) - estimate.exposed_communication_seconds
    assert hidden > 0 and estimate.step_seconds < plain.step_seconds
    assert not [row for row in plain.rows if row.stream == "tp"]
    assert estimate.traffic()["all-gather"].collectives == sum(
        row.operation == "all-gather" for row in mine
    )


def test_what_is_in_flight_is_in_the_report() -> None:
    memory = planned(Job(of_sequences)).memory
    buffers = [r for r in memory.ledger().ranges if r.category is Category.COMMUNICATION]
    assert buffers and {each.stream for each in buffers} == {"tp"}
    assert {each.op for each in buffers} == {
        f"fxshard.model_{kind}" for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }


def test_blocks_share_their_regions() -> None:
    program = planned(Job(of_sequences)).program
    assert program.schedule is not None
    called = [n.target for n in program.schedule.forward.nodes if n.op == "call_module"]
    assert len(set(called)) < len(called)
