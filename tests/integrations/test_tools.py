"""Tools of PyTorch around a training loop, on ranks: beside the same loop in one process."""

import copy
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import (
    SWALR,
    AveragedModel,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.testing import assert_close

from fxshard.memory.category import Category
from tests.end_to_end.losses_cases import made
from tests.end_to_end.training_cases import Net, batch, loss_of, state_of

STEPS = 4
WAYS = ("compile", "fully_shard")


def steps(model: Any, optimizer: Any, ranks: list[int], count: int = STEPS) -> Iterator[Tensor]:
    """The mean loss over all ranks' batches after each step, on every rank."""
    for step in range(count):
        losses = [loss_of(model(batch(rank, step))) for rank in ranks]
        mean = torch.stack(losses).mean()
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = mean.detach()
        if dist.is_initialized() and len(ranks) == 1:
            dist.all_reduce(found)
            found = found / dist.get_world_size()
        yield found


# -- schedulers ------------------------------------------------------------------------------------


def in_sequence(optimizer: Any) -> Any:
    parts = [
        lr.LinearLR(optimizer, 0.1, total_iters=2),
        lr.CosineAnnealingWarmRestarts(optimizer, 2),
    ]
    return lr.SequentialLR(optimizer, parts, [2])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "OneCycleLR": lambda optimizer: lr.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda optimizer: lr.ReduceLROnPlateau(
        optimizer, factor=0.1, patience=0, threshold=10.0
    ),
    "SequentialLR": in_sequence,
}


def scheduled(model: Any, ranks: list[int], name: str, rate: Any) -> Any:
    """The learning rate and the parameters after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=copy.deepcopy(rate))
    scheduler = SCHEDULERS[name](optimizer)
    found = []
    for loss in steps(model, optimizer, ranks):
        scheduler.step(*[loss] * (name == "ReduceLROnPlateau"))
        (group,) = optimizer.param_groups
        found.append((float(group["lr"]), group["betas"], state_of(model)))
    return found


def scheduling(rank: int, world_size: int, way: str, names: list[str], rate: Any) -> None:
    model = made(way, Net)
    start = copy.deepcopy(model.state_dict())
    for name in names:
        model.load_state_dict(start)
        found = scheduled(model, [rank], name, rate)
        wanted = scheduled(made("eager", Net), list(range(world_size)), name, rate)
        assert len({each[0] for each in found}) > 1, name
        assert_close(found, wanted, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_schedulers_step_as_in_one_process(ranks: Any) -> None:
    ranks(2).run(scheduling, "fully_shard", list(SCHEDULERS), 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_schedulers_of_a_rate_that_is_a_tensor(ranks: Any, way: str) -> None:
    names = [name for name in SCHEDULERS if name != "ReduceLROnPlateau"]
    ranks(2).run(scheduling, way, names, torch.tensor(1e-2))


def own_optimizer(rank: int, world_size: int) -> None:
    """The optimizer that is in the program takes its rate from the scheduler too."""
    make = functools.partial(torch.optim.AdamW, lr=1e-2)
    for options in ({}, {"optimizer_in_backward": True}):
        model = made("compile", Net, optimizer=make, **options)
        eager = made("eager", Net)
        alone = make(eager.parameters())
        both = [
            lr.OneCycleLR(each, 0.1, total_steps=STEPS + 1) for each in (model.optimizer, alone)
        ]
        mine, all_ranks = steps(model, model.optimizer, [rank]), steps(eager, alone, [0, 1])
        for _ in zip(mine, all_ranks, strict=True):
            for scheduler in both:
                scheduler.step()
            assert_close(state_of(model), state_of(eager), rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_schedulers_of_the_optimizer_in_the_program(ranks: Any) -> None:
    ranks(2).run(own_optimizer)


# -- averages of weights -------------------------------------------------------------------------


def averaged(model: Any, ranks: list[int], multi_avg_fn: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=multi_avg_fn)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for _ in steps(model, optimizer, ranks):
        with CommDebugMode() as sent:
            average.update_parameters(model)
        assert sent.get_total_counts() == 0  # shards of both lie alike
        scheduler.step()
    with torch.no_grad():
        output = average(batch(7))
    return [
        output,
        state_of(average.module),
        state_of(model),
        float(optimizer.param_groups[0]["lr"]),
    ]


def averaging(rank: int, world_size: int, way: str) -> None:
    for function in (get_ema_multi_avg_fn(0.9), get_swa_multi_avg_fn(), None):
        found = averaged(made(way, Net), [rank], function)
        wanted = averaged(made("eager", Net), list(range(world_size)), function)
        assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["fully_shard", pytest.param("compile", marks=pytest.mark.slow)])
def test_averaged_models_are_those_of_one_process(ranks: Any, way: str) -> None:
    ranks(2).run(averaging, way)


class Normed(nn.Module):
    """(batch, 5) -> (batch, 3), with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def norms(rank: int, world_size: int, way: str) -> None:
    """Each rank's statistics are of its own batches, as with FSDP2."""
    averages = [AveragedModel(made(each, Normed)) for each in (way, "eager")]
    loader = [batch(rank, step) for step in range(3)]
    for average in averages:
        update_bn(loader, average)
    mine, wanted = ({n: b.clone() for n, b in a.named_buffers()} for a in averages)
    assert_close(mine, wanted)
    assert wanted["module.blocks.0.1.running_mean"].abs().max() > 0.01
    with torch.no_grad():
        assert_close(averages[0].eval()(batch(9)), averages[1].eval()(batch(9)))


@pytest.mark.parametrize("way", ["compile", pytest.param("fully_shard", marks=pytest.mark.slow)])
def test_update_bn_fills_the_statistics_of_an_average(ranks: Any, way: str) -> None:
    ranks(2).run(norms, way)


# -- profiles, and memory per step -----------------------------------------------------------------


def profiled(rank: int, world_size: int, folder: str) -> None:
    plain, model = made("fully_shard", Net), made("fully_shard", Net)
    wanted = [
        loss.item() for loss in steps(plain, torch.optim.SGD(plain.parameters(), 0.1), [rank])
    ]
    found = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=2),
        on_trace_ready=tensorboard_trace_handler(folder, f"rank{rank}"),
        profile_memory=True,
    ) as run:
        for loss in steps(model, torch.optim.SGD(model.parameters(), 0.1), [rank]):
            found.append(loss.item())
            run.step()
    assert found == wanted
    (trace,) = Path(folder).glob(f"rank{rank}.*.json")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "FSDP::all_gather (blocks.0)" in names


def test_a_profile_of_some_steps_is_written_for_tensorboard(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(profiled, str(tmp_path))


class Writer:
    """As a `SummaryWriter` of TensorBoard."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((step, value))


def log_memory(writer: Any, model: Any, step: int) -> None:
    """The recipe of docs/tools.md."""
    report = model.memory
    writer.add_scalar("memory/peak_bytes", report.peak_bytes, step)
    for category, size in report.peak_by_category.items():
        writer.add_scalar(f"memory/at_peak/{category.value}", size, step)


def test_memory_of_each_step_is_logged() -> None:
    writer, model = Writer(), made("in_process", Net)
    for step, length in enumerate((4, 4, 16)):
        loss_of(model(torch.randn(length, 5))).backward()
        log_memory(writer, model, step)
    (_, first), (_, second), (_, longer) = writer.scalars["memory/peak_bytes"]
    assert first == second < longer
    kinds = [writer.scalars[f"memory/at_peak/{kind.value}"][0][1] for kind in Category]
    assert sum(kinds) == first
