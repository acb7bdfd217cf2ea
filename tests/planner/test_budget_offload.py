"""Keep, recompute or offload, in one decision: what is chosen, its bytes, numbers and order."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.config.checked import Config
from fxshard.cost import activations
from fxshard.errors import DoesNotFitError, TooLittleError
from fxshard.hardware import PRESETS, Link
from fxshard.ir import ops, tags
from fxshard.ir.splitting import configured_units
from fxshard.passes.assign_checkpoints import AssignCheckpoints
from fxshard.passes.assign_units import AssignUnits
from fxshard.passes.canonicalize import Canonicalize
from fxshard.pipeline import make_program
from tests import fsdp2
from tests.zoo import MODELS, built

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
H100 = PRESETS["h100"]
UNITS = ["blocks.*"]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(nn.functional.gelu(self.up(x))))


class Blocks(nn.Module):
    """f32[rows, dim] -> a number."""

    def __init__(self, depth: int, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def large(depth: int = 6, rows: int = 8192, **options: Any) -> fxshard.Plan:
    """On the meta device: a block saves 256 MiB, of which the link hides a half."""
    with torch.device("meta"):
        model, x = Blocks(depth, 1024), torch.empty(rows, 1024)
    given: dict[str, Any] = {"units": UNITS, "world_size": 2, "optimizer": adamw}
    return fxshard.plan(model, (x,), **given | options)


def any_size(beta: float) -> Callable[[list[Any]], list[Any]]:
    """Passes that offload tensors of any size, by a link of `beta` bytes per second."""
    slow = dataclasses.replace(H100, host=Link(0.0, beta))

    def passes(default: list[Any]) -> list[Any]:
        new = {"least_bytes": 1, "hardware": slow}
        chooses = [isinstance(step, AssignCheckpoints) for step in default]
        both = zip(default, chooses, strict=True)
        return [dataclasses.replace(step, **new) if it else step for step, it in both]

    return passes


def on_device(plan: fxshard.Plan) -> int:
    return sum(k.bytes for k in plan.memory.kept_for_backward() if not k.on_cpu)


def least_of(plan: fxshard.Plan, **more: Any) -> int:
    with pytest.raises(TooLittleError, match="live from forward to backward") as refused:
        plan.replan(checkpoint=0, **more)
    return refused.value.least_bytes


def budgets(plan: fxshard.Plan, count: int, **more: Any) -> Iterator[int]:
    """From the least that can be reached to all that is saved without."""
    least, most = least_of(plan, **more), on_device(plan)
    return (least + (most - least) * i // (count - 1) for i in range(count))


def counts(plan: fxshard.Plan) -> tuple[int, int]:
    """How many tensors leave, and operators of compute that run again."""
    launches = plan.program.graph.find_nodes(op="call_function", target=ops.offload)
    again = [
        node
        for node in plan.program.phase("backward")
        if tags.get(node).recomputed and not tags.aliases_input(node)
    ]
    return sum(len(tags.operands(launch)) for launch in launches), len(again)


def peak(plan: fxshard.Plan) -> int:
    return max(plan.memory.peak_bytes, plan.memory.first_step_peak_bytes)


def seconds(plan: fxshard.Plan) -> float:
    return plan.estimate(H100).step_seconds


FORCED = {"offload_activations": True}


# -- what is chosen --------------------------------------------------------------------------------


def test_what_is_chosen_at_three_budgets() -> None:
    """What is hidden leaves first; then cheap functions run again, and then copies are waited for.

    Of six blocks, four leave what the link carries meanwhile; the last two have less beside them.
    """
    plan, mib = large(), 2**20
    found = {size: plan.replan(checkpoint=size * mib, **FORCED) for size in (1200, 800, 300)}
    assert {size: counts(each) for size, each in found.items()} == {
        1200: (5, 0),
        800: (8, 2),
        300: (11, 6),
    }
    assert seconds(found[1200]) == seconds(plan) < seconds(found[800]) < seconds(found[300])
    for size, each in found.items():
        assert on_device(each) <= size * mib
        assert each.memory.host_peak_bytes == on_device(plan) - on_device(each) - dropped(each)


def dropped(plan: fxshard.Plan) -> int:
    """Bytes of what is recomputed that backward would read: gelu's inputs and outputs here."""
    again = {n.name.removesuffix("_recomputed") for n in plan.program.phase("backward")}
    whole = large().program.phase("forward")
    return sum(
        tags.storages(node)[0].nbytes()
        for node in whole
        if node.name in again and not tags.aliases_input(node)
    )


def test_nothing_leaves_that_need_not() -> None:
    plan = large()
    assert counts(plan.replan(checkpoint=on_device(plan), **FORCED)) == (0, 0)


class Wider(nn.Module):
    """Backward reads no input of it, but to recompute."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.double().square().float())


class Inlet(Blocks):
    """What is outside of all checkpoints is read to recompute inside of one."""

    def __init__(self) -> None:
        super().__init__(0, 1024)
        self.blocks = nn.ModuleList(Wider(1024) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sin())


def test_what_is_outside_of_checkpoints_leaves_too() -> None:
    with torch.device("meta"):
        model, x = Inlet(), torch.empty(8192, 1024, requires_grad=True)
    slow = any_size(1e9)  # so that the fewest bytes leave
    plan = fxshard.plan(model, (x,), units=UNITS, world_size=2, passes=slow)
    for budget in budgets(plan, 5, **FORCED):
        assert on_device(plan.replan(checkpoint=budget, **FORCED)) <= budget
    least = least_of(plan, **FORCED)
    program = plan.replan(checkpoint=least, **FORCED).program
    launches = program.graph.find_nodes(op="call_function", target=ops.offload)
    left = {tensor.name for launch in launches for tensor in tags.operands(launch)}
    assert "sin" in left


def test_it_is_considered_on_accelerators_unless_it_is_forbidden() -> None:
    plan = large(depth=2)
    size = (on_device(plan) * 3) // 4
    assert not counts(plan.replan(checkpoint=size))[0]
    cuda = plan.replan(checkpoint=size, device="cuda")
    assert counts(cuda) == counts(plan.replan(checkpoint=size, **FORCED)) != (0, 0)
    for refused in ({"offload_activations": False}, {"pipeline_stage": True}):
        assert not counts(cuda.replan(**refused))[0]
    named = cuda.replan(offload_activations=["blocks.0"])
    alone = plan.replan(checkpoint=size)
    assert on_device(named) <= on_device(alone), "what is named leaves besides"
    assert counts(named)[1] == counts(alone)[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"checkpoint": 2**30}, None),
        ({"checkpoint": 2**30, "device": "cuda"}, True),
        ({"checkpoint": 2**30, "offload_activations": True}, True),
        ({"checkpoint": 2**30, "offload_activations": False, "device": "cuda"}, False),
        ({"checkpoint": 2**30, "offload_activations": "1GiB"}, False),
        ({"checkpoint": "full", "offload_activations": True}, False),
    ],
)
def test_who_chooses(options: dict[str, Any], said: bool | None) -> None:
    assert Config.from_options(options).chooses_offloads is said


def test_layers_of_one_form_are_decided_once() -> None:
    sizes = {}
    for depth in (4, 24):
        with torch.device("meta"):
            model, x = Blocks(depth, 1024), torch.empty(8192, 1024)
        passes = [Canonicalize(), AssignUnits(), AssignCheckpoints()]
        config = Config.from_options({"checkpoint": "full", "units": UNITS, "passes": passes})
        units = configured_units(model, config)
        program = make_program(model, (x,), {}, units=units, world=1, config=config)
        problem = activations._Problem(program, lambda node: 1.0, H100)
        sizes[depth] = len(problem.columns), len(problem.rows)
    assert sizes[4] == sizes[24]


# -- more bytes, less time -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, FORCED], ids=["recompute", "offload"])
@pytest.mark.parametrize("world_size", [1, 4])
def test_more_saved_bytes_never_take_longer(options: dict[str, Any], world_size: int) -> None:
    plan = large(world_size=world_size)
    slowest = float("inf")
    for budget in budgets(plan, 9, **options):
        chosen = plan.replan(checkpoint=budget, **options)
        assert on_device(chosen) <= budget
        assert seconds(chosen) <= slowest
        slowest = seconds(chosen)
    assert slowest == seconds(plan)


ZOO = ["dropout", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "t5", "convnet"))]


@pytest.mark.parametrize("options", [{}, FORCED], ids=["recompute", "offload"])
@pytest.mark.parametrize("name", ZOO)
def test_more_saved_bytes_never_take_longer_in_the_zoo(name: str, options: dict[str, Any]) -> None:
    case = MODELS[name]
    model, args, kwargs = built(case)
    given: dict[str, Any] = {"world_size": 1, "units": case.units, "passes": any_size(1e9)}
    plan = fxshard.plan(model, args, kwargs, **given)
    slowest = float("inf")
    for budget in budgets(plan, 7, **options):
        chosen = plan.replan(checkpoint=budget, **options)
        assert on_device(chosen) <= budget
        at_that_link = chosen.estimate(dataclasses.replace(H100, host=Link(0.0, 1e9)))
        assert at_that_link.step_seconds <= slowest * (1 + 1e-12)
        slowest = at_that_link.step_seconds


@pytest.mark.parametrize("options", [{}, FORCED], ids=["recompute", "offload"])
def test_more_memory_never_takes_longer(options: dict[str, Any]) -> None:
    """The peak of the plan is within the budget."""
    plan = large(depth=3, forward_prefetch=1, reshard_after_forward=True, **options)
    slowest, most = float("inf"), peak(large(depth=3))
    for budget in range(most * 7 // 10, most + most // 10, most // 10):
        chosen = plan.replan(memory_budget=budget)
        assert peak(chosen) <= budget
        assert seconds(chosen) <= slowest
        slowest = seconds(chosen)
    assert slowest == seconds(large(depth=3))


def test_never_worse_than_recomputation_alone_or_offloading_alone() -> None:
    """On CUDA, whose allocator must find room too."""
    plan = large(device="cuda", forward_prefetch=1, backward_prefetch=1, reshard_after_forward=True)
    budget = int(3.25 * 2**30)
    chosen = plan.replan(memory_budget=budget)
    chosen.memory.assert_fits(budget)
    assert counts(chosen)[0]
    assert seconds(chosen) < seconds(plan.replan(memory_budget=budget, offload_activations=False))
    alone = plan.replan(offload_activations=True)
    with contextlib.suppress(DoesNotFitError):
        alone.memory.assert_fits(budget)
        assert seconds(chosen) <= seconds(alone)
    changes = [each.changes for each in chosen.chosen.tried]  # type: ignore[union-attr]
    assert {each.get("offload_activations") for each in changes} == {None, True, False} or (
        seconds(chosen) == seconds(plan)
    )


# -- bytes and numbers, all three mixed ------------------------------------------------------------

MIXED: dict[str, Any] = {**FORCED, "passes": any_size(1e9), "checkpoint": 25_000}


def test_the_mix_has_all_three() -> None:
    case = MODELS["transformer"]
    args, kwargs = case.batch(0, 0)
    plan = fxshard.plan(case.build(), args, kwargs, world_size=2, units=case.units, **MIXED)
    left, again = counts(plan)
    saved = [k for k in plan.memory.kept_for_backward() if k.checkpointed and not k.on_cpu]
    assert left and again and saved
    assert on_device(plan) <= MIXED["checkpoint"]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "far_ahead": {"forward_prefetch": 2, "reshard_after_forward": False},
    "micro_batches": {"micro_batches": 2, "no_sync": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["transformer", pytest.param("dropout", marks=pytest.mark.slow)])
@pytest.mark.sample(2)
def test_bytes(name: str, setting: str) -> None:
    """0 bytes from the tracker; after forward the device has what was predicted, and no more."""
    case = MODELS[name]
    args, kwargs = case.batch(0, 0)
    options = {"world_size": 2, "optimizer": adamw, **MIXED} | SETTINGS[setting]
    torch.manual_seed(0)
    result = fxshard.validate(case.build(), args, kwargs, units=case.units, **options)
    assert result.max_abs_difference == 0, result.table(only_different=True)


def with_fsdp2(rank: int, world_size: int) -> None:
    case = MODELS["transformer"]
    torch.manual_seed(0)
    model: Any = fxshard.compile(case.build(), units=case.units, **MIXED)
    ours = fsdp2.run_steps(model, case, 3)
    left, again = counts(model.plan)
    assert left and again
    fsdp2.assert_bitwise(ours, fsdp2.train(case, 3))


def with_eager(rank: int, world_size: int) -> None:
    """On the joined batch."""
    torch.manual_seed(0)
    eager = Blocks(3, 16)
    plan = fxshard.plan(copy.deepcopy(eager), (torch.empty(64, 16),), world_size=2, units=UNITS)
    options = {**MIXED, "checkpoint": on_device(plan) // 4}
    model: Any = fxshard.compile(copy.deepcopy(eager), units=UNITS, **options)
    for number in range(2):
        draws = [torch.Generator().manual_seed(10 * number + r) for r in range(world_size)]
        batches = [torch.randn(64, 16, generator=draw) for draw in draws]
        model(batches[rank]).backward()
        eager(torch.cat(batches)).backward()
    assert all(counts(model.plan))
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(fsdp2.full(mine.grad), its.grad)


@pytest.mark.parametrize("check", [with_fsdp2, with_eager])
def test_numbers_on_ranks(ranks: Any, check: Any) -> None:
    ranks(2).run(check)
