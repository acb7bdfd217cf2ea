"""The bytes: static against the tracker, against torch's profiler, and against counts by hand.

`fxshard.validate` compares the analysis with a tracker that shares no code with it; the profiler
sees what neither can (inside kernels) and is torch's own.
"""

import collections
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard import compat
from fxshard.config import Config
from fxshard.errors import ConfigError
from fxshard.executor import Executor, TracedExecutor
from fxshard.memory.category import Category, State
from fxshard.memory.report import DoesNotFitError
from fxshard.memory.tracker import Tracker, WatchedWorld
from fxshard.module import ShardedModule
from fxshard.units import find_units
from fxshard.world.c10d import C10dWorld
from tests import oracles
from tests.zoo import MODELS, Case

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
FORMULAS_KNOWN = ["transformer", "llama", "tied", "mlp13", "dropout"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(case: Case) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return case.build(), *case.batch(0, 0)


@pytest.mark.parametrize("world_size", [2, 7, 8])
@pytest.mark.parametrize("name", MODELS)
def test_static_equals_measured_everywhere(name: str, world_size: int) -> None:
    case = MODELS[name]
    model, args, kwargs = built(case)
    result = fxshard.validate(
        model, args, kwargs, world_size=world_size, units=case.units, optimizer=adamw
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)
    assert {cell.step for cell in result.cells} == {1, 2}
    recomputed = {State.PRE_FORWARD_AC, State.POST_FORWARD_AC}  # of checkpoints; none here
    states = {cell.state for cell in result.cells}
    assert states >= {state.value for state in set(State) - recomputed}
    assert result.static_peak_bytes == result.measured_peak_bytes > 0


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.AdamW, lr=1e-3, foreach=True, amsgrad=True),
        functools.partial(torch.optim.Adam, lr=1e-3, fused=True),
        torch.optim.Adagrad,
        torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-2, weight_decay=0.1),
    ],
)
def test_optimizers_are_analysed_by_running_them(optimizer: Any) -> None:
    case = MODELS["mlp13"]
    model, args, kwargs = built(case)
    result = fxshard.validate(model, args, kwargs, world_size=2, optimizer=optimizer)
    assert result.max_abs_difference == 0, result.table(only_different=True)


def step_of(case: Case, world_size: int, make_executor: Any = Executor) -> Any:
    """One training step (without optimizer) of rank 0 on a fake group, as a callable."""
    model, args, kwargs = built(case)
    world = C10dWorld(init_device_mesh("cpu", (world_size,)))
    units = find_units(model, case.units)
    sharded = ShardedModule(model, units, world, Config(), make_executor)

    def step() -> None:
        leaves, _ = compat.tree_flatten(sharded(*args, **kwargs))
        (variant,) = sharded.variants.values()
        roots = [leaves[i] for i in variant.program.signature.tangents]
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        for param in sharded.parameters():
            param.grad = None

    step()
    return step


@pytest.mark.parametrize("name", FORMULAS_KNOWN)
def test_peak_equals_the_profilers(name: str) -> None:
    case = MODELS[name]
    model, args, kwargs = built(case)
    report = fxshard.plan(model, args, kwargs, world_size=8, units=case.units).memory
    held = report.phases()[0].start
    with compat.fake_process_group(0, 8):
        step = step_of(case, 8)
        peak = oracles.profiler_peak_bytes(step, before=step)
    assert report.peak_with_kernels_bytes == sum(held) + peak


@pytest.mark.parametrize("name", FORMULAS_KNOWN)
def test_every_kernel_temporary_has_its_row(name: str) -> None:
    """Operator by operator: what the profiler sees an operator take and give back is a row."""
    case = MODELS[name]
    model, args, kwargs = built(case)
    rows = fxshard.plan(model, args, kwargs, world_size=8, units=case.units).memory
    want = collections.Counter(
        (row.op.split(".")[1], row.bytes) for row in rows.kernel_temporaries if row.backend == "cpu"
    )
    with compat.fake_process_group(0, 8):
        got = collections.Counter(oracles.profiler_temporaries(step_of(case, 8)))
    assert got == want


@pytest.mark.parametrize("rows", [8, 200, 800])
@pytest.mark.parametrize("transposed", [False, True])
def test_attention_blocks(rows: int, transposed: bool) -> None:
    """The block sizes of CPU attention change with the sequence length."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            y = nn.functional.scaled_dot_product_attention(x, x, x)
            return (y.transpose(1, 2) if transposed else y).flatten(1).square().mean()

    case = Case("attention", Attention, lambda r, s: ((torch.randn(1, 2, rows, 16),), {}), sum)
    model, args, kwargs = built(case)
    report = fxshard.plan(model, args, kwargs, world_size=1).memory
    want = [row.bytes for row in report.kernel_temporaries if "attention" in row.op]
    with compat.fake_process_group(0, 1):
        got = oracles.profiler_temporaries(step_of(case, 1))
    assert [size for op, size in got if "attention" in op] == want


def test_unknown_kernels_are_named_and_leave_the_sum_open() -> None:
    case = MODELS["convnet"]
    model, args, kwargs = built(case)
    report = fxshard.plan(model, args, kwargs, world_size=2).memory
    assert report.peak_with_kernels_bytes is None
    unknown = {row.op for row in report.kernel_temporaries if row.bytes is None}
    assert {"aten.convolution", "aten.convolution_backward"} <= unknown


def test_gloo_buffers_are_rows_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    report = fxshard.plan(model, (torch.ones(1, 6),), world_size=2).memory
    rows = [row for row in report.kernel_temporaries if row.backend == "gloo"]
    # weight f32[4,6] = 96 bytes, shards of 48: gathered once in forward only (a first layer's
    # backward needs no weight), reduced once.
    assert [(row.op, row.bytes) for row in rows] == [
        ("all_gather", 48 + 96),
        ("reduce_scatter", 96),
    ]


def test_gradients_of_inputs_are_counted() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.ones(7, 6, requires_grad=True)
    result = fxshard.validate(model, (x,), world_size=2, optimizer=adamw)
    assert result.max_abs_difference == 0, result.table(only_different=True)


class Hand(nn.Module):
    """One matrix multiplication: small enough to count by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 4))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight.t()).sum()


def test_counts_by_hand() -> None:
    """f32[5,4] over 2 ranks: chunks of 3 rows = 48 bytes, gathered 96 bytes, gradient 80."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    report = fxshard.plan(Hand(), (torch.ones(2, 4),), world_size=2, optimizer=optimizer).memory
    before = report.snapshot("", "Before Pre-Forward", first_step=True)
    assert before == {c: 0 for c in Category} | {
        Category.SHARDED_PARAM: 48,
        Category.BUFFER: 12,
        Category.INPUTS: 32,
    }
    # mm reads the gathered parameter and writes f32[2,5] = 40 bytes.
    peak = report.snapshot("", "Peak Forward", first_step=True)
    assert peak is not None
    assert peak[Category.UNSHARDED_PARAM] == 96 and peak[Category.ACTIVATION] == 40
    # The gradient (80 bytes) does not divide by 2: a padded copy (96) is sent, the result is 48.
    backward = report.snapshot("", "Peak Backward", first_step=True)
    assert backward is not None
    assert backward[Category.REDUCE_SCATTER] == 96
    after = report.snapshot("", "After Post-Backward", first_step=True)
    assert after is not None
    assert after[Category.SHARDED_GRAD] == 48
    # Momentum is kept for the rows that rank 0 owns: 3 x 4 floats.
    steady = report.snapshot("", "Before Pre-Forward")
    assert steady is not None
    assert steady[Category.OPT_STATE] == 48
    assert report.first_step_peak_bytes <= report.peak_bytes


def test_report_speaks() -> None:
    case = MODELS["llama"]
    model, args, kwargs = built(case)
    report = fxshard.plan(
        model, args, kwargs, world_size=2, units=case.units, optimizer=adamw
    ).memory
    text = report.explain_peak(3)
    assert f"{report.peak_bytes:,} bytes" in text and report.peak_at.node in text
    assert len(text.splitlines()) == 4
    assert sum(report.peak_by_category.values()) == report.peak_bytes
    assert sum(t.bytes for t in report.alive_at_peak()) == report.peak_bytes
    assert max(total for *_, total in report.timeline()) <= report.peak_bytes
    told = report.to_dict()
    assert told["peak_bytes"] == report.peak_bytes and told["schema"] == "fxshard.memory/1"
    assert set(told["modules"]) == set(report.modules())
    for name in ("model.layers.0", "Peak Backward", "OptState"):
        assert name.split(" ")[0] in report.table()


def test_budget() -> None:
    case = MODELS["mlp13"]
    model, args, kwargs = built(case)
    report = fxshard.plan(model, args, kwargs, world_size=2).memory
    report.assert_fits("1GiB")
    with pytest.raises(DoesNotFitError, match="too much"):
        report.assert_fits(report.peak_bytes - 1)
    with pytest.raises(ConfigError, match="80GiB"):
        report.assert_fits("eighty")


def test_unknown_state_lists_the_legal_ones() -> None:
    model, args, kwargs = built(MODELS["mlp13"])
    report = fxshard.plan(model, args, kwargs, world_size=2).memory
    with pytest.raises(ConfigError, match="Peak Forward"):
        report.snapshot("", "Peak")


def test_planning_leaves_no_trace_in_memory_or_model() -> None:
    """Analysis allocates nothing of the model's size and leaves the model untouched."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    params = dict(model.named_parameters())
    x = torch.ones(4, 512)
    peak = oracles.profiler_peak_bytes(
        lambda: fxshard.plan(model, (x,), world_size=4).memory.table()
    )
    assert peak < 512 * 512 * 4
    assert all(model.get_parameter(name) is param for name, param in params.items())


def test_analysis_changes_no_live_byte() -> None:
    """The profiler sees the same memory with the tracker and without it."""
    case = MODELS["llama"]
    with compat.fake_process_group(0, 4):
        step = step_of(case, 4)
        plain = oracles.profiler_peak_bytes(step, before=step)
    tracker = Tracker()

    def make(program: Any, world: Any) -> Executor:
        return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

    with compat.fake_process_group(0, 4), tracker:
        step = step_of(case, 4, make)
        tracked = oracles.profiler_peak_bytes(step, before=step)
    assert tracked == plain
