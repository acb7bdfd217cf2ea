"""Eager reads of a model that `fxshard.shard` sharded reduce as its programs do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.config import Config
from fxshard.pipeline import default_passes
from tests.fsdp2 import full
from tests.ranks import told

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
HALF = torch.float16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "predivide": {"gradient_predivide_factor": 2.0},
    "divide": {"gradient_divide_factor": 3.0, "gradient_predivide_factor": 0.5},
    "sum": {"reduce_op": "sum"},
    "f16": {"mixed_precision": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=HALF)},
    "f16 predivided": {
        "mixed_precision": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=HALF),
        "gradient_predivide_factor": 1 / 1024,  # so that the sum is no finite number
    },
    "no shard": {"strategy": "no_shard", "gradient_predivide_factor": 4.0},
    "passes": {"passes": lambda passes: [_summing(step) for step in passes]},
}


def _summing(step: Any) -> Any:
    return type(step)("sum") if step.name == "insert-reduce" else step


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def gradients(rank: int, world_size: int, name: str, scale: float) -> tuple[list[Tensor], ...]:
    """Of the same model read by a program, and in eager."""
    options = dict(OPTIONS.get(name, {}))
    if name == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shard"))
        options = {"strategy": "hybrid_shard", "mesh": mesh, "gradient_predivide_factor": 2.0}
    batch = BATCH.chunk(world_size)[rank]
    found = []
    for verb in ("compile", "shard"):
        model = getattr(fxshard, verb)(build(), **options)
        (scale * model(batch)).float().sum().backward()
        found.append([full(p.grad) for p in model.parameters()])
    return tuple(found)


def eager(divisor: float) -> list[Tensor]:
    """Of the sum over the ranks' batches."""
    model = build()
    model(BATCH).sum().backward()
    return [p.grad / divisor for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", OPTIONS)
def test_eager_reads_reduce_as_programs_do(ranks: Any, name: str) -> None:
    """Bitwise, and as eager on the joined batch."""
    for program, read in ranks(2).run(gradients, name, 1.0):
        for ours, theirs in zip(read, program, strict=True):
            assert torch.equal(ours, theirs) or (ours.isnan() == theirs.isnan()).all()
        if "f16" not in name:
            divisor = {"divide": 3.0, "sum": 1.0, "passes": 1.0}.get(name, 2.0)
            torch.testing.assert_close(read, eager(divisor))


def test_what_overflows_in_a_program_overflows_in_eager_reads(ranks: Any) -> None:
    """The predivision is seen: without it the sums of both ranks are finite."""
    for program, read in ranks(2).run(gradients, "f16 predivided", 100.0):
        assert any(grad.isinf().any() for grad in program)
        assert [grad.isinf().tolist() for grad in read] == [g.isinf().tolist() for g in program]


def test_on_a_mesh_of_two_dimensions(ranks: Any) -> None:
    for program, read in ranks(4).run(gradients, "hybrid", 1.0):
        torch.testing.assert_close(read, program, rtol=0, atol=0)
        torch.testing.assert_close(read, eager(4.0))


def without_a_reduction(rank: int, world_size: int) -> str:
    passes = [step for step in default_passes(Config()) if step.name != "insert-reduce"]
    model = fxshard.shard(build(), passes=passes)
    return told(lambda: model(BATCH.chunk(world_size)[rank]).sum().backward())


def test_a_pipeline_that_does_not_say_how(ranks: Any) -> None:
    for said in ranks(2).run(without_a_reduction):
        assert said.startswith("StepError") and "has no insert-reduce" in said
