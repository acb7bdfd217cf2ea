"""What a plan without ranks says of a mesh is what holds on real ranks of it."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.verify.certificate import collectives
from tests.distributed.tensor_parallel_cases import Job, of_sequences

JOB = Job(of_sequences)


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    of_sequences(model, mesh["tp"])


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def on_ranks(rank: int, world_size: int) -> tuple[Any, list[str], list[str], str]:
    """The plan on real ranks, and what the compiled model does in a step."""
    model, mesh = JOB.parallel()
    batch = JOB.batch(rank, 0)
    plan = fxshard.plan(model, (batch,), world_size=2, loss=loss, optimizer=torch.optim.AdamW)
    compiled = fxshard.compile(model, mesh=mesh, args=(batch,))
    loss(compiled(batch)).backward()
    ran = collectives(compiled.plan.program)
    return plan.memory.to_dict(), collectives(plan.program), ran, plan.certificate


def test_bytes_and_collectives_are_those_on_real_ranks(ranks: Any) -> None:
    torch.manual_seed(0)
    plan = fxshard.plan(
        *(JOB.model(), (JOB.batch(0, 0),)),
        mesh={"dp": 2, "tp": 2},
        parallelize=parallelize,
        loss=loss,
        optimizer=torch.optim.AdamW,
    )
    memory, lines = plan.memory.to_dict(), collectives(plan.program)
    del memory["kernel_temporaries"]  # of gloo, where a process of ranks gathers one by one
    found = ranks(4).run(on_ranks)
    for theirs, planned, ran, certificate in found:
        assert (planned, ran, certificate) == (lines, lines, plan.certificate)
        for name in ("peak_bytes", "first_step_peak_bytes", "peak_by_category", "peak_by_stream"):
            assert theirs[name] == memory[name]
    del found[0][0]["kernel_temporaries"]
    assert found[0][0] == memory
