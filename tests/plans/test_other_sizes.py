"""A capture with open sizes, set to other sizes, beside the capture of a call of those sizes."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.ir import dump
from fxshard.plans.plan import Plan
from tests.capture.test_shapes import named_dimensions
from tests.zoo.more import MATRIX

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


def assert_equal(ours: Plan, fresh: Plan) -> None:
    for mine, theirs in zip(ours.programs, fresh.programs, strict=True):
        assert dump.text(mine) == dump.text(theirs)
        assert mine.domain is not None and theirs.domain is not None
        assert mine.domain.example == theirs.domain.example
        assert mine.signature.inputs == theirs.signature.inputs
    assert ours.dump() == fresh.dump()
    assert ours.code == fresh.code and ours.certificate == fresh.certificate
    assert ours.memory.to_dict() == fresh.memory.to_dict()


def enlarged(value: Any, dims: dict[int, int]) -> Any:
    """The call with other sizes in some dimensions."""
    if isinstance(value, dict):
        return {name: enlarged(item, dims) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(enlarged(item, dims) for item in value)
    shape = [dims.get(dim, size) for dim, size in enumerate(value.shape)]
    return torch.zeros(shape, dtype=value.dtype, device="meta")


FAST = ("tied",)
REST = ((6, 12), (7, 2))  # batch, length


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in MATRIX if n not in FAST)]
)
@pytest.mark.parametrize("size", [(3, 5), *(pytest.param(s, marks=pytest.mark.slow) for s in REST)])
def test_other_sizes_are_those_of_a_capture_of_their_own(
    name: str, size: tuple[int, int], traces: list[Any]
) -> None:
    case = MATRIX[name]
    torch.manual_seed(0)
    model, (args, kwargs) = case.build(), case.batch(0, 0)
    options: dict[str, Any] = {
        "world_size": 2,
        "units": case.units,
        "optimizer": adamw,
        "dynamic": named_dimensions(case),
    }
    plan = fxshard.plan(model, args, kwargs, **options)
    tokens = len(options["dynamic"]) > 1
    dims = dict(enumerate(size if tokens else size[:1]))
    other = {"args": enlarged(args, dims), "kwargs": enlarged(kwargs, dims)}
    traces.clear()
    ours = plan.replan(**other)
    traced = len(traces)
    fresh = fxshard.plan(model, *other.values(), **options)
    assert_equal(ours, fresh)
    assert traced == (plan.program.domain.refusal(ours.program.domain.example) is not None)
    assert_equal(plan, fxshard.plan(model, args, kwargs, **options))  # is as it was


class Writes(nn.Module):
    """Writes into its input and into a buffer: f32 (batch, 4) -> a scalar, and half of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("table", torch.zeros(64, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += x.mean(0)
        y = self.linear(x + self.seen) + self.table[: x.shape[0]]
        first, second = y.split([y.shape[0] // 2, y.shape[0] - y.shape[0] // 2])
        x.add_(1.0)
        return y[1:].sum() + first.sum(), second.relu()


def test_views_and_writes_keep_their_storages(traces: list[Any]) -> None:
    options: dict[str, Any] = {"world_size": 2, "dynamic": {"n": [("x", 0)]}}
    plan = fxshard.plan(Writes(), (torch.zeros(6, 4),), **options)
    for size in (4, 7, 40):
        call = (torch.zeros(size, 4),)
        traces.clear()
        ours = plan.replan(args=call)
        assert not traces
        assert_equal(ours, fxshard.plan(Writes(), call, **options))
    traces.clear()
    with pytest.raises(fxshard.errors.CaptureError):
        plan.replan(args=(torch.zeros(65, 4),))  # the table has 64 rows
    assert traces, "outside of the domain it is traced again"


def test_what_is_not_open_is_traced_again(traces: list[Any]) -> None:
    plan = fxshard.plan(Writes(), (torch.zeros(6, 4),), world_size=2, dynamic={"n": [("x", 0)]})
    traces.clear()
    assert plan.replan(args=(torch.zeros(1, 4),)).program.domain is None
    ((_, options),) = traces
    assert not options.get("symbols"), "a size of 1 broadcasts: a trace of its own"
    plan.replan(args=(torch.zeros(6, 4, dtype=torch.bfloat16),))
    assert len(traces) == 2
    fixed = fxshard.plan(Writes(), (torch.zeros(6, 4),), world_size=2)
    traces.clear()
    fixed.replan(args=(torch.zeros(5, 4),))
    assert len(traces) == 1
    fixed.replan(world_size=4)
    assert len(traces) == 1


def test_the_options_and_micro_batches_of_the_other_size(traces: list[Any]) -> None:
    options: dict[str, Any] = {"world_size": 2, "dynamic": {"n": [("x", 0)]}}
    plan = fxshard.plan(Writes(), (torch.zeros(6, 4),), **options)
    more: dict[str, Any] = {"micro_batches": 2, "no_sync": True, "reshard_after_forward": False}
    traces.clear()
    ours = plan.replan(args=(torch.zeros(9, 4),)).replan(**more)
    assert not traces
    assert_equal(ours, fxshard.plan(Writes(), (torch.zeros(9, 4),), **options, **more))
