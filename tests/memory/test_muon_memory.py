"""What a step of Muon takes on each rank: predicted, and measured on gloo ranks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Muon

import fxshard
from fxshard.codegen import full_matrices
from fxshard.memory.category import CATEGORIES, Category
from fxshard.memory.optimizer import trace_step
from fxshard.memory.optimizer_step import OptimizerStep
from fxshard.memory.recording import OperatorEvent
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import split_steps, tracked
from fxshard.validation.tracker import Measured
from tests.runtime.full_matrix_cases import Preconditioned
from tests.runtime.muon_cases import batch, built, columns, matrices_and_rest

STEPS = 2


def shampoo_and_muon(named_parameters: Any) -> list[Any]:
    params = [param for _, param in named_parameters if param.dim() == 2]
    return [Preconditioned(params[:2], lr=0.1), Muon(params[2:])]


OPTIMIZERS = {"muon": matrices_and_rest, "shampoo": shampoo_and_muon}


def planned(ranks: int, name: str, **options: Any) -> Any:
    options = {"optimizer": OPTIMIZERS[name], "units": ["tall", "wide"], **options}
    return fxshard.plan(built(), (batch(0, 0),), world_size=ranks, **options)


def most(events: Sequence[OperatorEvent], step: OptimizerStep) -> int:
    """Bytes alive at most, besides the state."""
    live, peak, sizes = 0, 0, dict[int, int]()
    for event in events:
        for number, size in event.allocated:
            sizes[number] = 0 if number in step.state else size
            live += sizes[number]
        peak = max(peak, live)
        live -= sum(sizes.pop(number, 0) for number in event.freed)
    return peak


def measured(rank: int, ranks: int, name: str, limit: int, options: Any) -> list[Measured]:
    before, full_matrices.ROUND_BYTES = full_matrices.ROUND_BYTES, limit
    try:
        plan = planned(ranks, name, **options)
        work = dataclasses.replace(plan.workload, call=((batch(rank, 0),), {}))
        return tracked(work, STEPS)
    finally:
        full_matrices.ROUND_BYTES = before


@pytest.mark.parametrize(
    ("ranks_of", "name", "limit", "options"),
    [
        (2, "muon", 2**20, {}),
        (3, "muon", 1, {"shard_placement_fn": columns}),
        (3, "shampoo", 200, {}),
    ],
    ids=["2 ranks", "3 ranks, columns, a matrix a round", "3 ranks, shampoo"],
)
def test_bytes_on_each_rank(
    ranks: Any, monkeypatch: Any, ranks_of: int, name: str, limit: int, options: Any
) -> None:
    monkeypatch.setattr(full_matrices, "ROUND_BYTES", limit)
    plan = planned(ranks_of, name, **options)
    found = ranks(ranks_of).run(measured, name, limit, options)
    validation = compare(plan.memory, split_steps(found[0], STEPS))
    where = validation.points, validation.table(only_different=True)
    assert validation.max_abs_difference == 0, where
    peaks = []
    for rank, phases in enumerate(found):
        step = trace_step(plan.program, plan.config.optimizer, rank=rank)
        assert step is not None
        seen = [phase for phase in phases if phase.phase == "optimizer"][-1]
        peak = int(seen.during.sum(1).max()) - sum(seen.start)
        assert peak == most(step.second, step)
        peaks.append(peak)
    assert name != "muon" or peaks[0] == max(peaks)


def test_offloaded_on_the_cpu_it_is_all_on_the_host(ranks: Any) -> None:
    options = {"offload": CPUOffloadPolicy()}
    found = ranks(2).run(measured, "muon", full_matrices.ROUND_BYTES, options)
    report = planned(2, "muon", **options).memory
    assert compare(report, split_steps(found[0], STEPS)).max_abs_difference == 0


def test_the_report_names_what_is_sent() -> None:
    plan = planned(2, "muon")
    ranges = {each.name: each for each in plan.memory.steady.ranges}
    sent, received = ranges["rows for the owners"], ranges["matrices of this owner"]
    assert sent.category is received.category is Category.TEMP
    assert sent.bytes == 2 * (7 * 7 + 3 * 13 + 1 * 5 + 5 * 1)  # bf16, of rank 0's rows
    assert received.bytes == 2 * 13 * 7  # the matrix of most FLOPs; the other rank has the rest
    assert ranges["momentum_buffer of tall.weight"].bytes == 4 * 7 * 7
    assert ranges["exp_avg of tall.bias"].bytes == 4 * 7
    assert plan.memory.optimizer == "Muon, AdamW"
    state = list(CATEGORIES).index(Category.OPT_STATE)
    assert plan.memory.phases()[-1].after[-1][state] > 0


def test_the_dump_shows_who_owns_what(monkeypatch: Any) -> None:
    monkeypatch.setattr(full_matrices, "ROUND_BYTES", 1)
    plan = planned(2, "muon")
    text = plan.dump("optimizer")
    assert [line.split()[:3] for line in text.splitlines()[2:]] == [
        ["1", "0", "tall.weight"],
        ["1", "1", "wide.weight"],
        ["2", "1", "last.weight"],
        ["3", "1", "short.weight"],
    ]
    assert plan.dump().endswith(text)
    assert text not in plan.dump("backward")
    adamw = plan.replan(optimizer=torch.optim.AdamW)
    with pytest.raises(fxshard.ConfigError, match="expected 'forward', 'backward', or None"):
        adamw.dump("optimizer")


def test_formulas_are_refused_and_other_numbers_of_ranks_are_planned() -> None:
    plan = planned(2, "muon")
    with pytest.raises(fxshard.ConfigError, match=r"Muon, AdamW: which matrices rank 0 owns"):
        plan.memory.formula()
    assert plan.at(world=4).memory.peak_bytes < plan.memory.peak_bytes


def test_offload_on_cuda_is_refused() -> None:
    on_cuda = planned(2, "muon", device="cuda")
    assert on_cuda.memory.peak_bytes > 0
    plan = planned(2, "muon", offload=CPUOffloadPolicy(), device="cuda")
    with pytest.raises(fxshard.ConfigError, match="Muon, AdamW with offload"):
        assert plan.memory


def test_the_time_of_a_step_has_the_exchanges_and_the_products() -> None:
    plan = planned(2, "muon")
    estimate = plan.estimate("h100")
    traffic = estimate.traffic()["all-to-all"]
    step = plan.optimizer_step
    assert traffic.collectives == 2
    assert traffic.link_bytes == sum(step.sent.exchanges) / 2  # half of it stays on the rank
    without = fxshard.plan(
        built(), (batch(0, 0),), world_size=2, units=["tall", "wide"], optimizer=torch.optim.SGD
    )
    longer = estimate.step_seconds - without.estimate("h100").step_seconds
    assert longer > traffic.seconds > 0


class Products(torch.nn.Module):
    """Matrices of any shapes."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.matrices = torch.nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(each * x).sum() for each in self.matrices]).sum()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sample(2)
def test_no_rank_needs_more_than_rank_0(seed: int, monkeypatch: Any) -> None:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 60, (9, 2), generator=draw).tolist()
    monkeypatch.setattr(full_matrices, "ROUND_BYTES", (1, 5000, 2**26)[seed % 3])
    model = Products([(rows, columns) for rows, columns in sizes])
    options = {"shard_placement_fn": columns} if seed % 2 else {}
    plan = fxshard.plan(
        model, (torch.ones(()),), world_size=2 + seed % 3, optimizer=Muon, **options
    )
    peaks = []
    for rank in range(2 + seed % 3):
        step = trace_step(plan.program, Muon, rank=rank)
        assert step is not None
        peaks.append(most(step.second, step))
    assert peaks[0] == max(peaks)
