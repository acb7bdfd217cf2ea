"""``checkpoint="2GiB"``: against every choice there is, against the tracker, against eager."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.config.checked import Config
from fxshard.cost import activations
from fxshard.errors import ConfigError
from fxshard.ir import tags
from fxshard.ir.program import Program
from fxshard.ir.splitting import configured_units
from fxshard.memory.category import Category, State
from fxshard.passes.assign_checkpoints import AssignCheckpoints
from fxshard.passes.assign_units import AssignUnits
from fxshard.passes.canonicalize import Canonicalize
from fxshard.passes.checkpoint import Checkpoint
from fxshard.pipeline import make_program
from fxshard.plans.plan import Plan
from tests.zoo import MODELS, built
from tests.zoo.more import MORE

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
INSIDE = ["blocks.*"]


class Chain(nn.Module):
    """Blocks of products and functions of which each saves another; f32[*, 8] -> a number."""

    def __init__(self, block: Callable[[int], nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(i) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


class Wide(nn.Module):
    """tanh(W2 gelu(W1 x)): backward reads two products and two functions of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(nn.functional.gelu(self.up(x))))


class Relu(nn.Module):
    """relu(W relu(W x)): its last value is read by its own backward and by the next block."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(torch.relu(self.linear(x))))


class Random(nn.Module):
    """Two draws, the second with or without the first: a state of the generator each, or one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 96), nn.Linear(96, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.up(x).sigmoid(), 0.5)
        return x + nn.functional.dropout(self.down(y), 0.25)


class Norm(nn.Module):
    """Batch norm writes its statistics: what runs again reads a copy from before."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).sin()).cos()


class Moving(nn.Module):
    """Replaces a buffer that it reads through a view: what runs again reads a copy from before."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.full((1, 8), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x) + self.mean.view(8)).sin()
        self.mean = self.mean + y.detach().mean(0)
        return y.cos()


class Own(nn.Module):
    """Checkpointed by torch, in a model of which other blocks are not."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner, self.number = Wide(number), number

    def forward(self, x: Tensor) -> Tensor:
        if self.number == 0:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


def weight(node: fx.Node) -> float:
    """Work that no formula gives: distinct for most operators, and exact in floating point."""
    if tags.aliases_input(node) or node.target in activations.STATES:
        return 0.0
    written = sum(t.numel() for t in tags.tensors(node.meta["val"]))
    return float(written * (7 if "mm" in str(node.target) else 2) + len(node.all_input_nodes))


def made(model: nn.Module, x: Tensor, passes: list[Any], captures: dict[Any, Any]) -> Program:
    config = Config.from_options({"checkpoint": "full", "units": INSIDE, "passes": passes})
    units = configured_units(model, config)
    return make_program(model, (x,), {}, units=units, world=1, config=config, captures=captures)


def saved_and_spent(program: Program) -> tuple[int, float]:
    """Bytes that live between the phases, and work of what runs again; counted on the graph."""
    given = {s for n in program.graph.find_nodes(op="placeholder") for s in tags.storage_ids(n)}
    storages = {}
    for node in program.phase("forward"):
        returned = any(user.op == "output" for user in node.users)
        if returned or any(tags.get(u).phase == "backward" for u in node.users if u.op != "output"):
            storages |= {id(s): s.nbytes() for s in tags.storages(node) if id(s) not in given}
    again = [node for node in program.phase("backward") if tags.get(node).recomputed]
    return sum(storages.values()), sum(map(weight, again))


def all_choices(model: nn.Module, x: Tensor) -> Iterator[tuple[int, float]]:
    plain = made(model, x, [Canonicalize(), AssignUnits(), AssignCheckpoints()], {})
    values = [
        node.name
        for node in plain.phase("forward")
        if tags.get(node).checkpoint is not None
        and isinstance(node.meta["val"], Tensor)
        and (not tags.aliases_input(node) or "getitem" in node.name)
    ]
    for picked in itertools.product([False, True], repeat=len(values)):
        names = set(itertools.compress(values, picked))
        program = plain.copied(plain.units, plain.world_size)
        for node in program.phase("forward"):
            tags.update(node, save=node.name in names)
        Checkpoint().apply(program)
        yield saved_and_spent(program)


@pytest.mark.parametrize(
    ("block", "depth"),
    [(Wide, 2), (Relu, 2), (Random, 1), (Norm, 1), (Moving, 1)],
    ids=lambda v: getattr(v, "__name__", v),
)
@pytest.mark.sample(2)
def test_the_choice_is_the_best_of_all(block: Callable[[int], nn.Module], depth: int) -> None:
    torch.manual_seed(0)
    model, x = Chain(block, depth), torch.randn(16, 8)
    every = set(all_choices(model, x))
    least, most = min(size for size, _ in every), max(size for size, _ in every)
    spent = []
    edges = sorted({size for size, _ in every})
    budgets = sorted({*edges[:: max(len(edges) // 10, 1)], least + 1, most, most + 10**9})
    for budget in budgets:
        best = min(cost for size, cost in every if size <= budget)
        passes = [Canonicalize(), AssignUnits(), Budgeted(budget), Checkpoint()]
        size, cost = saved_and_spent(made(model, x, passes, {}))
        assert (cost, size) == (best, min(s for s, c in every if c == best)), budget
        spent.append(cost)
    assert spent == sorted(spent, reverse=True) and spent[-1] == 0
    with pytest.raises(ConfigError, match=re.escape(f"({least:,} bytes)")):
        passes = [Canonicalize(), AssignUnits(), Budgeted(least - 1)]
        made(model, x, passes, {})


class Budgeted(AssignCheckpoints):
    """assign-checkpoints with a budget, where work counts as `weight` says."""

    def __init__(self, budget: int) -> None:
        super().__init__(weight)
        object.__setattr__(self, "budget", budget)

    def apply(self, program: Program) -> None:
        program.checkpoints = dict.fromkeys(program.checkpoints, self.budget)  # type: ignore[attr-defined]
        super().apply(program)


def kept(plan: Plan) -> int:
    return sum(each.bytes for each in plan.memory.kept_for_backward())


def least_of(plan: Plan) -> int:
    with pytest.raises(ConfigError, match="live from forward to backward") as refused:
        plan.replan(checkpoint=0)
    said = re.search(r"\(([\d,]+) bytes\)", str(refused.value))
    assert said is not None
    return int(said[1].replace(",", ""))


def budgets(plan: Plan, count: int) -> list[int]:
    """From the least that can be reached to all that is saved without."""
    least, most = least_of(plan), kept(plan)
    return [least + (most - least) * i // (count - 1) for i in range(count)]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("unet", "llama", "t5", "bert")]


@pytest.mark.parametrize("name", ["dropout", *SLOW])
def test_measured_bytes_are_within_the_budget(name: str) -> None:
    """The tracker's activations after forward, and every other byte of the step."""
    case = (MODELS | MORE)[name]
    model, args, kwargs = built(case)
    plan = fxshard.plan(model, args, kwargs, world_size=2, units=case.units)
    for budget in budgets(plan, 3):
        result = fxshard.validate(
            *(model, args, kwargs), world_size=2, units=case.units, checkpoint=budget, steps=1
        )
        assert result.max_abs_difference == 0, result.table(only_different=True)
        measured = [
            cell.measured
            for cell in result.cells
            if (cell.module, cell.state) == ("", State.AFTER_POST_FORWARD.value)
            and cell.category is Category.ACTIVATION
        ]
        assert len(measured) == 1 and measured[0] <= budget
        assert measured[0] == kept(plan.replan(checkpoint=budget))


@pytest.mark.parametrize("block", [Wide, Relu, Random, Norm, Moving, Own], ids=lambda b: b.__name__)
@pytest.mark.sample(3)
def test_numbers_are_those_of_eager(block: Callable[[int], nn.Module]) -> None:
    """Bitwise, draws of dropout included, with half of what could be saved."""
    torch.manual_seed(0)
    eager, x = Chain(block, 4), torch.randn(16, 8)
    plan = fxshard.plan(eager, (x,), world_size=1, units=INSIDE)
    for budget in budgets(plan, 3)[:2]:
        torch.manual_seed(0)
        mine = fxshard.compile(Chain(block, 4), world_size=1, units=INSIDE, checkpoint=budget)
        torch.manual_seed(0)
        reference = Chain(block, 4)
        for number in range(2):
            results = []
            for model in (mine, reference):
                torch.manual_seed(number)
                loss = model(x)
                loss.backward()
                drawn = torch.rand(3)  # the generator is where it would be
                grads = [p.grad for p in model.parameters()]
                results.append([loss.detach(), drawn, *grads])
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b)


def test_layers_of_one_form_share_their_variables() -> None:
    """The problem is as large at 24 layers as at 3, and what is saved is as good."""
    x = torch.randn(16, 8)
    sizes = {}
    for depth in (3, 24):
        program = made(
            Chain(Wide, depth), x, [Canonicalize(), AssignUnits(), AssignCheckpoints()], {}
        )
        sizes[depth] = len(activations._Problem(program, weight).columns)
    assert sizes[3] == sizes[24]


def test_without_backward_nothing_is_saved() -> None:
    with torch.no_grad():
        plan = fxshard.plan(
            *(Chain(Random, 2), (torch.randn(16, 8),)), world_size=2, units=INSIDE, checkpoint=0
        )
    assert not plan.program.phase("backward")


def test_text_and_numbers_are_sizes() -> None:
    assert Config.from_options({"checkpoint": "1.5 KiB"}).checkpoint == 1536
    assert Config.from_options({"checkpoint": 77}).checkpoint == 77
    for bad in (True, -1, "2 gigs", 1.5):
        with pytest.raises(ConfigError, match=r"2GiB|>= 0"):
            Config.from_options({"checkpoint": bad})
    with pytest.raises(ConfigError, match="budget of all units together"):
        Config.from_options({"checkpoint": {"blocks.*": "1GiB"}})
