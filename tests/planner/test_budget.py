"""``memory_budget``: random models and budgets against the tracker, refusals against the grid."""

import functools
import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard.cli.main import main
from fxshard.config.checked import Config
from fxshard.errors import ConfigError, DoesNotFitError, FxshardError
from fxshard.planner.space import schedules
from fxshard.plans.plan import Plan
from tests.zoo.models import Transformer

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
momentum = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


class Layer(nn.Module):
    """x + W2 dropout(f(norm(W1 x))), f32[*, dim]."""

    def __init__(self, dim: int, hidden: int, dropout: float, function: Any) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(dim, hidden), nn.LayerNorm(hidden), None
        self.down = nn.Linear(hidden, dim)
        self.dropout, self.function = nn.Dropout(dropout), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(self.function(self.norm(self.up(x)))))


class Mlp(nn.Module):
    """f32[batch, dim] -> a number; the first and the last layer may share their weights."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        dim, hidden = draw.randint(4, 40), draw.randint(4, 90)
        dropout = draw.choice([0.0, 0.3])
        function = draw.choice([torch.tanh, torch.relu, nn.functional.gelu])
        self.inlet = nn.Linear(dim, dim, bias=False)
        self.layers = nn.ModuleList(
            Layer(dim, hidden, dropout, function) for _ in range(draw.randint(1, 4))
        )
        self.head = nn.Linear(dim, dim, bias=False)
        if draw.random() < 0.3:
            self.head.weight = self.inlet.weight
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Summed(nn.Module):
    """A transformer of the zoo, and the sum of what it returns."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        heads = draw.choice([1, 2])
        self.inner = Transformer(
            vocab=draw.randint(20, 60),
            dim=heads * draw.choice([4, 8, 16]),
            depth=draw.randint(1, 2),
            heads=heads,
            max_seq=16,
            dropout=draw.choice([0.0, 0.1]),
            tied=draw.random() < 0.4,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens).float().square().mean()


def case(seed: int) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """A model, a batch and the options of a plan, all from one seed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    if draw.random() < 0.7:
        model: nn.Module = Mlp(draw)
        args = (torch.randn(draw.choice([3, 32, 200]), model.dim),)
    else:
        model = Summed(draw)
        args = (torch.randint(20, (draw.choice([1, 4]), draw.randint(4, 16))),)
    for param in list(model.parameters())[1:-1]:
        if draw.random() < 0.1:
            param.requires_grad_(False)
    options: dict[str, Any] = {
        "world_size": draw.randint(2, 8),
        "optimizer": draw.choice([None, adamw, momentum]),
        "micro_batches": draw.choice([1, 1, 1, 2]),
    }
    if draw.random() < 0.4:
        reduce = draw.choice([None, torch.float32])
        options["mixed_precision"] = MixedPrecisionPolicy(torch.bfloat16, reduce)
    if draw.random() < 0.2:
        options |= draw.choice(
            [
                {"strategy": "shard_grad_op"},
                {"reshard_after_forward": True},
                {"backward_prefetch": 0},
                {"checkpoint": "selective"},
                {"offload": CPUOffloadPolicy()},
            ]
        )
    options["share"] = draw.uniform(0.45, 1.1)
    return model, args, options


def needed(plan: Plan) -> int:
    """What a device of a rank must have, less kernels' own."""
    made = [phase.peak_bytes for phase in plan.memory.lifecycle if phase.name.startswith("init")]
    return max(plan.memory.peak_bytes, plan.memory.first_step_peak_bytes, *made)


def grid(plan: Plan, options: dict[str, Any], budgets: int) -> Iterator[dict[str, Any]]:
    """Every combination of what is free; `budgets` numbers of saved bytes among them."""
    saved = sum(each.bytes for each in plan.memory.kept_for_backward())
    points = [saved * i // budgets for i in range(1, budgets + 1)]
    free: dict[str, list[Any]] = {
        "reshard_after_forward": [True, {"": False}, False],
        "forward_prefetch": [0, 1, 2],
        "backward_prefetch": [0, 1, 2],
        "checkpoint": [None, "selective", "full", *points] if len(plan.units) > 1 else [None],
    }
    if "strategy" in options:
        del free["reshard_after_forward"]
    free = {name: values for name, values in free.items() if name not in options}
    for values in itertools.product(*free.values()):
        yield dict(zip(free, values, strict=True))


PLAIN = {"checkpoint": None}


def check(seed: int, *, exhaustive: bool = False) -> bool:
    """Plan the case of one seed within its budget; returns if anything fits."""
    model, args, options = case(seed)
    share = options.pop("share")
    if options.get("checkpoint") and len(fxshard.plan(model, args, **options | PLAIN).units) == 1:
        del options["checkpoint"]  # which is refused for a model of one unit
    plan = fxshard.plan(model, args, **options)
    budget = int(needed(plan) * share)
    try:
        plan = fxshard.plan(model, args, **options, memory_budget=budget)
    except DoesNotFitError as error:
        assert "nothing that was tried fits" in str(error)
        for changes in grid(plan, options, 10) if exhaustive else ():
            try:
                other = plan.replan(**changes)
            except FxshardError:
                continue
            assert needed(other) > budget, (seed, changes)
        return False
    assert needed(plan) <= budget
    assert plan.chosen is not None and plan.chosen.budget_bytes == budget
    for name in options:
        if name not in ("world_size", "micro_batches"):
            assert name not in plan.chosen.changes
    seen = fxshard.validate(model, args, **options | plan.chosen.changes)
    assert seen.max_abs_difference == 0, (seed, seen.table(only_different=True))
    assert seen.measured_peak_bytes <= needed(plan)
    assert max(sum_of_cells(seen)) <= budget
    return True


def sum_of_cells(seen: Any) -> list[int]:
    """Measured bytes of all categories at each moment, the optimizer's included."""
    totals: dict[Any, int] = {}
    for cell in seen.cells:
        key = (cell.step, cell.module, cell.state)
        totals[key] = totals.get(key, 0) + cell.measured
    calls: dict[Any, int] = {}
    for cell in seen.cells:  # of a module that is called several times, each call has such a row
        key = (cell.step, cell.module, cell.state, cell.category)
        calls[key] = calls.get(key, 0) + 1
    return [total // calls[*key, seen.cells[0].category] for key, total in totals.items()]


@pytest.mark.parametrize("seed", [1, 3, 4, 5, 8])
@pytest.mark.sample(2)
def test_random_models_and_budgets(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(12, 212, 20))
def test_two_hundred_models_and_budgets(start: int) -> None:
    """Of each twenty some fit and some do not; of two that do not, the whole grid is planned."""
    refused = 0
    for seed in range(start, start + 20):
        refused += not check(seed, exhaustive=refused < 2)
    assert 0 < refused < 20


def stack() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """Two layers whose activations are most of the peak, on two ranks."""
    torch.manual_seed(0)
    draw = random.Random(2)
    model = Mlp(draw)
    model.layers = nn.ModuleList(Layer(model.dim, 64, 0.2, torch.tanh) for _ in range(2))
    return model, (torch.randn(100, model.dim),), {"world_size": 2, "optimizer": adamw}


def test_all_but_the_root_is_tried_where_there_is_more_than_a_root() -> None:
    """Of a model of one unit it is what is unsharded until backward."""
    model, args, options = stack()
    for units, values in ((None, [True, {"": False}, False]), ([], [True, False])):
        plan = fxshard.plan(model, args, **options, units=units)
        found = [each["reshard_after_forward"] for each in schedules(Config(), plan.program)]
        assert found[: len(values)] == values, "with the default prefetch"
        assert len(found) == 3 * len(values)


def test_what_the_user_gives_stays() -> None:
    """Even if it is the default."""
    model, args, options = stack()
    peak = needed(fxshard.plan(model, args, **options))
    fixed = {"reshard_after_forward": None, "forward_prefetch": 1, "offload": None}
    plan = fxshard.plan(model, args, **options, **fixed, memory_budget=peak - 1)
    assert plan.chosen is not None
    assert set(plan.chosen.changes) == {"backward_prefetch", "checkpoint"}
    assert all(set(t.changes) <= set(plan.chosen.changes) for t in plan.chosen.tried)
    with pytest.raises(DoesNotFitError, match=r"checkpoint stayed as given") as refused:
        fxshard.plan(model, args, **options, checkpoint=None, memory_budget=peak // 2)
    lines = str(refused.value).splitlines()
    assert all("too much" in line for line in lines[3:-1]) and len(lines) > 8


@pytest.mark.slow
def test_the_fastest_that_fits_is_picked() -> None:
    """Of all that the search may pick, planned one by one, by the estimate."""
    model, args, options = stack()
    plan = fxshard.plan(model, args, **options)
    peak = needed(plan)
    every = [
        (other.estimate("h100").step_seconds, needed(other))
        for changes in grid(plan, {}, 8)
        if changes["forward_prefetch"] == changes["backward_prefetch"]
        for other in [plan.replan(**changes)]
    ]
    for share in (2.0, 1.0, 0.9, 0.8):
        budget = int(peak * share)
        chosen = plan.replan(memory_budget=budget).chosen
        assert chosen is not None
        best = min(seconds for seconds, size in every if size <= budget)
        assert chosen.seconds <= best * 1.01
    assert chosen.seconds > min(seconds for seconds, _ in every)


def test_a_budget_can_be_changed() -> None:
    """What was chosen before is free again; what is changed besides stays."""
    model, args, options = stack()
    options |= {"strategy": "full_shard", "forward_prefetch": 1, "backward_prefetch": 1}
    peak = needed(fxshard.plan(model, args, **options))
    small = fxshard.plan(model, args, **options, memory_budget=int(0.8 * peak))
    large = small.replan(memory_budget="1GiB")
    assert small.chosen is not None and "checkpoint" in small.chosen.changes
    assert large.chosen is not None and "checkpoint" not in large.chosen.changes
    assert large.config.memory_budget == 2**30
    other = small.replan(world_size=4)
    assert other.chosen is None and other.config.checkpoint == small.config.checkpoint


def test_the_model_is_captured_once(traces: list[Any]) -> None:
    model, args, options = stack()
    plan = fxshard.plan(model, args, **options, memory_budget="1GiB")
    assert plan.chosen is not None and len(plan.chosen.tried) > 2 and len(traces) == 1


def test_compile_says_what_it_picked(caplog: pytest.LogCaptureFixture) -> None:
    """And trains as eager does."""
    model, args, options = stack()
    options["world_size"] = 1
    peak = needed(fxshard.plan(model, args, **options))
    with pytest.raises(ConfigError, match="memory_budget needs an example call"):
        fxshard.compile(model, **options, memory_budget=peak)
    eager, _, _ = stack()
    with caplog.at_level(logging.INFO, "fxshard"):
        mine = fxshard.compile(model, args=args, **options, memory_budget=int(0.9 * peak))
    lines = [r.getMessage() for r in caplog.records if "memory_budget=" in r.getMessage()]
    assert (
        len(lines) == 1 and f"checkpoint={mine.plan.config.checkpoint / 2**10:.2f} KiB" in lines[0]
    )
    grads = []
    for each in (mine, eager):
        torch.manual_seed(3)
        each(*args).backward()
        grads.append([p.grad for p in each.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_cuda_is_asked_for_its_allocator_and_offloads_last() -> None:
    model, args, options = stack()
    options |= {"strategy": "full_shard", "forward_prefetch": 1, "backward_prefetch": 1}
    plan = fxshard.plan(model, args, **options, checkpoint=None, device="cuda")
    memory = plan.memory.device_memory()
    fits = plan.replan(memory_budget=memory.outside + 2 * memory.reserved)
    assert fits.chosen is not None and fits.chosen.changes == {}
    with pytest.raises(DoesNotFitError, match="offload=CPUOffloadPolicy") as refused:
        plan.replan(memory_budget=memory.outside + 2**20)
    assert "finds no room" in str(refused.value)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--hf-config", "tiny-llama", "--seq", "16", "--world-size", "4"]
    within = ["--memory-budget", "1MiB", "--reshard-after-forward", "yes", "--checkpoint", "full"]
    assert main(["fits", *model, *within, "--budget", "1MiB"]) == 0
    said = capsys.readouterr()
    assert "It fits" in said.out and "memory_budget=1.00 MiB: backward_prefetch" in said.err
    assert main(["explain", *model, "--no-what-ifs", "--checkpoint", "1KiB"]) == 2
    assert "live from forward to backward" in capsys.readouterr().err
