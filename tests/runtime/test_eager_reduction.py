"""What reads a parameter outside of a program has its gradient reduced as programs do, or fails."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

import fxshard
from fxshard.config.checked import Config
from fxshard.pipeline import default_passes
from tests.fsdp2 import full
from tests.oracles import count_collectives
from tests.ranks import Failure, told

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
HALF, BF16 = torch.float16, torch.bfloat16
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
    "offload": {"offload": CPUOffloadPolicy(pin_memory=False), "gradient_predivide_factor": 2.0},
    "reduced in bf16": {"mixed_precision": MixedPrecisionPolicy(reduce_dtype=BF16)},
    "kept in bf16": {
        "mixed_precision": MixedPrecision(reduce_dtype=BF16, keep_low_precision_grads=True)
    },
    "passes": {"passes": lambda passes: [_with_op("sum", step) for step in passes]},
}
LOW = ("f16", "f16 predivided", "reduced in bf16", "kept in bf16")


def _with_op(op: str, step: Any) -> Any:
    return type(step)(op) if step.name == "insert-reduce" else step


def _max_of_passes(passes: list[Any]) -> list[Any]:
    return [_with_op("max", step) for step in passes]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def read(model: Any, x: Tensor) -> Tensor:
    """Layer by layer: no call of the model, and so no program."""
    for layer in model:
        x = layer(x)
    return x


def shard_of(rank: int, world_size: int) -> Tensor:
    return BATCH.chunk(world_size)[rank]


def gradients(rank: int, world_size: int, name: str, scale: float) -> list[list[Tensor]]:
    """Of the same model in a program, in the eager forward of `shard`, and layer by layer."""
    options = dict(OPTIONS.get(name, {}))
    if name == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shard"))
        options = {"strategy": "hybrid_shard", "mesh": mesh, "gradient_predivide_factor": 2.0}
    batch = shard_of(rank, world_size)
    runs: list[tuple[Callable[..., Any], Callable[..., Tensor]]] = [
        (fxshard.compile, lambda model, x: model(x)),
        (fxshard.shard, lambda model, x: model(x)),
    ]
    if "f16" not in name:  # layers that are called alone compute in the dtype that is stored
        runs += [(fxshard.compile, read), (fxshard.shard, read)]
    found = []
    for verb, run in runs:
        model = verb(build(), **options)
        (scale * run(model, batch)).float().sum().backward()
        found.append([full(p.grad) for p in model.parameters()])
    return found


def eager(divisor: float) -> list[Tensor]:
    """Of the sum over the ranks' batches."""
    model = build()
    model(BATCH).sum().backward()
    return [p.grad / divisor for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", OPTIONS)
def test_eager_reads_reduce_as_programs_do(ranks: Any, name: str) -> None:
    """Bitwise, and as eager on the joined batch."""
    for program, *reads in ranks(2).run(gradients, name, 1.0):
        for found in reads:
            for ours, theirs in zip(found, program, strict=True):
                assert ours.dtype is theirs.dtype
                assert torch.equal(ours, theirs) or (ours.isnan() == theirs.isnan()).all()
        if name not in LOW:
            divisor = {"divide": 3.0, "sum": 1.0, "passes": 1.0}.get(name, 2.0)
            torch.testing.assert_close(program, eager(divisor))


def test_what_overflows_in_a_program_overflows_in_eager_reads(ranks: Any) -> None:
    """The predivision is seen: without it the sums of both ranks are finite."""
    for program, found in ranks(2).run(gradients, "f16 predivided", 100.0):
        assert any(grad.isinf().any() for grad in program)
        assert [grad.isinf().tolist() for grad in found] == [g.isinf().tolist() for g in program]


def test_on_a_mesh_of_two_dimensions(ranks: Any) -> None:
    for program, *reads in ranks(4).run(gradients, "hybrid", 1.0):
        torch.testing.assert_close(program, eager(4.0))
        for found in reads:
            torch.testing.assert_close(found, program, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["plain", "sum", "divide"])
def test_all_ranks_in_one_process(name: str) -> None:
    """Each rank has the same batch: a sum is that of equal gradients."""
    found = []
    for verb in (fxshard.compile, fxshard.shard):
        model = verb(build(), world_size=2, **OPTIONS[name])
        model(BATCH).sum().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


def changed_factor(rank: int, world_size: int) -> list[Tensor]:
    model: Any = fxshard.compile(build())
    read(model, shard_of(rank, world_size)).sum().backward()
    model.zero_grad()
    model.set_gradient_divide_factor(5.0)
    read(model, shard_of(rank, world_size)).sum().backward()
    return [full(p.grad) for p in model.parameters()]


def test_a_factor_that_is_set_later(ranks: Any) -> None:
    for found in ranks(2).run(changed_factor):
        torch.testing.assert_close(found, eager(5.0))


class Turned(nn.Module):
    """Complex numbers times a phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 0.5j]))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).abs().square().sum() + (x * self.phase).imag.sum()


def complex_gradients(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    model = fxshard.shard(Turned(), mixed_precision=MixedPrecisionPolicy(reduce_dtype=BF16))
    model(x[rank]).backward()
    plain = Turned()
    (sum(plain(row) for row in x) / world_size).backward()
    return full(model.phase.grad), plain.phase.grad


def test_complex_gradients_are_not_cast(ranks: Any) -> None:
    for found, expected in ranks(2).run(complex_gradients):
        torch.testing.assert_close(found, expected)


def largest(rank: int, world_size: int) -> tuple[list[str], bool]:
    x = shard_of(rank, world_size)
    model: Any = fxshard.compile(build(), reduce_op="max")
    sharded = fxshard.shard(build(), passes=_max_of_passes)
    said = [told(lambda: read(model, x).sum().backward())]
    said += [told(lambda: sharded(x).sum().backward())]
    with torch.no_grad():
        alike = torch.equal(read(model, x), sharded(x)) and torch.equal(model(x), sharded(x))
    return said, alike


def test_a_reduction_of_each_read_that_is_none_of_their_sum_is_refused(ranks: Any) -> None:
    for said, alike in ranks(2).run(largest):
        for text in said:
            assert text.startswith("StepError") and "'max'" in text and "no_grad" in text
        assert alike


def second_derivatives(rank: int, world_size: int) -> tuple[str, list[Tensor], list[Tensor]]:
    """Of gradients of the input, and of gradients of parameters."""
    x = shard_of(rank, world_size)
    ours, plain = fxshard.shard(build()), build()

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().sum()

    penalty(ours, x).backward()
    (penalty(plain, BATCH) / world_size).backward()
    found = [[full(p.grad) for p in m.parameters() if p.grad is not None] for m in (ours, plain)]
    loss = ours(x).sum()
    parameters = list(ours.parameters())
    said = told(lambda: torch.autograd.grad(loss, parameters, create_graph=True))
    return said, *found


def test_second_derivatives_are_right_or_refused(ranks: Any) -> None:
    for said, ours, plain in ranks(2).run(second_derivatives):
        torch.testing.assert_close(ours, plain)
        assert said.startswith("StepError") and "create_graph=True" in said


# -- accumulation ----------------------------------------------------------------------------------


def accumulated(rank: int, world_size: int, last: str) -> dict[str, Any]:
    """Half of the batch under no_sync, the other half after it."""
    model: Any = fxshard.compile(build(), gradient_predivide_factor=2.0)
    first, second = shard_of(rank, world_size).chunk(2)
    with model.no_sync(), count_collectives() as waiting:
        read(model, first).sum().backward()
    early = [p.grad for p in model.parameters()]
    with count_collectives() as reducing:
        (read(model, second) if last == "read" else model(second)).sum().backward()
    return {
        "early": early,
        "grads": [full(p.grad) for p in model.parameters()],
        "waiting": waiting.kinds(),
        "reductions": reducing.count("reduce_scatter"),
        "left": list(model._fxshard.accumulated),
    }


@pytest.mark.parametrize(("last", "reductions"), [("read", 4), ("program", 1)])
def test_no_sync_accumulates(ranks: Any, last: str, reductions: int) -> None:
    for found in ranks(2).run(accumulated, last):
        assert found["early"] == [None] * 4 and set(found["waiting"]) == {"all_gather"}
        assert found["reductions"] == reductions and found["left"] == []
        torch.testing.assert_close(found["grads"], eager(2.0))


def accumulated_apart(rank: int, world_size: int) -> list[Any]:
    """What no program makes a gradient of, and what `zero_grad` drops."""
    model: Any = fxshard.compile(Pair())
    x = shard_of(rank, world_size)
    with model.no_sync():
        model.second(x).sum().backward()
    model(x).sum().backward()
    found = [full(p.grad) for p in model.parameters()]
    with model.no_sync():
        model.second(x).sum().backward()
    model.zero_grad()
    return [found, list(model._fxshard.accumulated)]


class Pair(nn.Module):
    """Its program reads one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def test_the_next_program_reduces_what_it_does_not_read(ranks: Any) -> None:
    expected = Pair()
    ((expected.first(BATCH) + expected.second(BATCH)).sum() / 2).backward()
    for found, left in ranks(2).run(accumulated_apart):
        torch.testing.assert_close(found, [p.grad for p in expected.parameters()])
        assert left == []


def asked_for(rank: int, world_size: int) -> str:
    model: Any = fxshard.compile(build())
    with model.no_sync():
        loss = read(model, shard_of(rank, world_size)).sum()
        return told(lambda: torch.autograd.grad(loss, list(model.parameters())))


def test_gradients_under_no_sync_that_autograd_grad_asks_for_are_refused(ranks: Any) -> None:
    for said in ranks(2).run(asked_for):
        assert said.startswith("StepError") and "no_sync" in said


# -- groups and ranks ------------------------------------------------------------------------------


def groups(rank: int, world_size: int) -> set[tuple[str, bool]]:
    """Kind of collective, and whether it was in the group of the all-gathers."""
    model: Any = fxshard.compile(build())
    model.set_separate_reduce_scatter_group()
    own = model._fxshard.world.reductions["shard"].group_name
    with count_collectives() as seen:
        read(model, shard_of(rank, world_size)).sum().backward()
    return {(call.kind, call.group == own) for call in seen.calls}


def test_reductions_have_the_group_that_was_made_for_them(ranks: Any) -> None:
    for found in ranks(2).run(groups):
        assert found == {("all_gather", False), ("reduce_scatter", True)}


def dies(rank: int, world_size: int, verb: str) -> None:
    model: Any = getattr(fxshard, verb)(build())
    x = shard_of(rank, world_size)
    read(model, x)  # from here on ranks gather without a word before
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    read(model, x).sum().backward()


@pytest.mark.parametrize("verb", ["compile", "shard"])
def test_survivors_name_the_dead(hasty: Any, verb: str) -> None:
    survivor, dead = hasty(2).run_expecting_errors(dies, verb)
    assert isinstance(survivor, Failure) and "exit code -9" in dead
    assert "RankDiedError: a collective failed on rank 0: rank 1 of 2" in survivor


def without_a_reduction(rank: int, world_size: int) -> str:
    passes = [step for step in default_passes(Config()) if step.name != "insert-reduce"]
    model = fxshard.shard(build(), passes=passes)
    return told(lambda: model(shard_of(rank, world_size)).sum().backward())


def test_a_pipeline_that_does_not_say_how(ranks: Any) -> None:
    for said in ranks(2).run(without_a_reduction):
        assert said.startswith("StepError") and "has no insert-reduce" in said
