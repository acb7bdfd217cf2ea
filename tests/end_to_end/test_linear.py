"""Passes, checks and the memory analysis cost the same per node at every depth: operations counted.

No clock: `sys.settrace` counts the lines that run, in every file of fxshard. What grows faster than
the graph shows up as more lines per node in the deeper of two models.
"""

import gc
import subprocess
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from benchmarks.scale import Grouped, Timed
from fxshard import verify
from fxshard.host import collector
from fxshard.ir import tags
from fxshard.memory import liveness
from fxshard.memory.held import held_ranges
from fxshard.memory.lifecycle import init
from fxshard.memory.optimizer import trace_step
from fxshard.memory.recording import Kernels
from tests.zoo import MODELS, built

ROOT = Path(__file__).parents[2]
AT_MOST = 1.15  # lines per node, of the deeper model to the shallower
X = (4, 8)
PLAN: dict[str, Any] = {
    "world_size": 8,
    "mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "optimizer": torch.optim.AdamW,
}


class Lines:
    """Counts the lines of fxshard that run, by stage."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            count = 0

            def line(frame: types.FrameType, event: str, arg: Any) -> Any:
                nonlocal count
                count += event == "line"
                return line

            def call(frame: types.FrameType, event: str, arg: Any) -> Any:
                name = frame.f_code.co_filename
                return line if "/fxshard/" in name or "/passes/" in name else None

            before = sys.gettrace()
            sys.settrace(call)
            try:
                return function(*args, **kwargs)
            finally:
                sys.settrace(before)
                self.seen[stage] += count

        return run


def lines_per_node(make: Callable[..., fxshard.Plan], **options: Any) -> dict[str, float]:
    """By pass, check and stage of the analysis."""
    lines: Any = Lines()
    checks = {f: lines.timed(f"check {f.name}", check) for f, check in verify.CHECKS.items()}
    with mock.patch.dict(verify.CHECKS, checks):
        plan = make(passes=lambda default: [Timed(step, lines) for step in default], **options)
    step = lines.timed("optimizer", trace_step)(plan.program, plan.config.optimizer)
    work = plan.workload
    held = lines.timed("held", held_ranges)(work.module, work.call, plan.program)
    report = lines.timed("liveness", liveness.analyse)(plan.programs, held, step)
    lines.timed("table", report.table)()
    plan.__dict__ |= {"memory": report, "optimizer_step": step}
    lines.timed("dump", plan.dump)()
    nodes = len(plan.program.graph.nodes)
    return {stage: count / nodes for stage, count in lines.seen.items()}


def growth(shallow: dict[str, float], deep: dict[str, float]) -> dict[str, float]:
    """Per stage, where it takes at least a line per node: deep / shallow."""
    assert shallow.keys() == deep.keys()
    return {s: round(deep[s] / shallow[s], 3) for s in deep if max(deep[s], shallow[s]) > 1}


def planner(sizes: Sequence[int], **options: Any) -> Callable[..., fxshard.Plan]:
    with torch.device("meta"):
        return partial(fxshard.plan, Grouped(sizes), (torch.empty(X),), **PLAN, **options)


SETTINGS: dict[str, dict[str, Any]] = {
    "checkpointed": {"checkpoint": "full"},
    "unsharded until backward": {"strategy": "shard_grad_op"},
    "resharded to pairs": {"strategy": "full_shard", "reshard_after_forward": 2},
}


SQUARES = """
def loop(n):
    for i in range(n):
        for j in range(i):
            pass

def comprehension(n):
    for i in range(n):
        [j for j in range(i)]

def straight(n):
    for i in range(n):
        str(i)
"""


def test_what_is_counted_is_work() -> None:
    """A loop within a loop shows, in a comprehension too; one alone does not."""
    made: dict[str, Callable[[int], None]] = {}
    exec(compile(SQUARES, "/fxshard/squares.py", "exec"), made)
    found = {}
    for name in ("loop", "comprehension", "straight"):
        lines = Lines()
        counts = []
        for n in (20, 60):
            lines.timed(name, made[name])(n)
            counts.append(lines.seen.pop(name) / n)
        found[name] = counts[1] / counts[0]
    assert found["loop"] > 2 and found["comprehension"] > 2
    assert found["straight"] < 1.05 < AT_MOST


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.sample(2)
def test_deeper_models_cost_as_much_per_node(setting: str) -> None:
    options = SETTINGS[setting]
    shallow, deep = (lines_per_node(planner([n], **options), units=["groups.*"]) for n in (8, 24))
    too_much = {s: g for s, g in growth(shallow, deep).items() if g > AT_MOST}
    assert not too_much, f"lines per node grow with depth: {too_much}"


def test_larger_units_cost_as_much_per_node() -> None:
    """All parameters in one unit or two, or a unit per block: what is packed together is long."""
    plan = planner([2, 10], checkpoint="full")(units=["groups.*"])
    few, many = (lines_per_node(plan.replan, units=[u]) for u in ("groups.*", "groups.*.*"))
    # Each unit has some work of its own; what grows with the square of a unit would be 10 times.
    too_much = {s: g for s, g in growth(many, few).items() if g > 1.5}
    assert not too_much, f"lines per node grow with the parameters of a unit: {too_much}"


# -- shortcuts that must not change anything -------------------------------------------------------


def _laid_out(value: Any) -> list[tuple[Any, ...]]:
    return [
        (t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.untyped_storage().nbytes())
        for t in tags.tensors(value)
    ]


@pytest.mark.parametrize(
    "name", ["llama", "tied", pytest.param("transformer", marks=pytest.mark.slow)]
)
def test_what_is_recomputed_lies_as_torchs_fake_kernels_say(name: str) -> None:
    """The values that the checkpoint pass gives its copies, beside running the operators."""
    if name not in MODELS:
        pytest.fail(f"no model {name}: {', '.join(MODELS)}")
    model, args, kwargs = built(MODELS[name])
    plan = fxshard.plan(
        model, args, kwargs, world_size=4, checkpoint="full", units=MODELS[name].units
    )
    again = [n for n in plan.program.graph.nodes if "val" in n.meta and tags.get(n).recomputed]
    assert len(again) > 10
    for node in again:
        made = plan.program.refake(node)
        assert _laid_out(made) == _laid_out(node.meta["val"]), node.format_node()
        inputs = {s for n in node.all_input_nodes for s in tags.storage_ids(n)}
        theirs = {id(t.untyped_storage()) for t in tags.tensors(made)}
        assert (theirs <= inputs) == (tags.storage_ids(node) <= inputs), node.format_node()


def _calls() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    aten = torch.ops.aten

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for shape in ((3, 4), (3, 4), (1,), (0, 2)):
        x, y = tensor(*shape), tensor(*shape)
        yield aten.add_.Tensor, (x, y), {"alpha": 2}
        yield aten.addcdiv_.default, (x, y, y), {"value": -0.1}
        yield aten.sqrt.default, (x,), {}
        yield aten.mul.Tensor, (x.t() if x.dim() == 2 else x, 3.0), {}
        yield aten.zeros_like.default, (x,), {"memory_format": torch.preserve_format}
        yield aten.lerp_.Scalar, (x, y, 0.5), {}
        yield aten.unsqueeze_.default, (tensor(*shape), 0), {}
        yield aten.view.default, (x, [-1]), {}
        yield aten.mul.Tensor, (torch.ones(()), 2), {}
        yield aten._foreach_add.Scalar, ([x, y, tensor(5)], 1.0), {}
        yield aten._foreach_sqrt.default, ([x, tensor(5, dtype=torch.bfloat16), y],), {}
        yield aten._foreach_mul_.Scalar, ([x, y, tensor(7)], 2.0), {}
        yield aten._foreach_add_.List, ([x, tensor(5)], [y, tensor(5)]), {"alpha": -0.5}
        yield aten._foreach_div.ScalarList, ([x, y, tensor(5)], [1.0, 2.0, 3.0]), {}
        yield aten._foreach_addcmul_.Scalar, ([x, tensor(5)], [y, tensor(5)], [y, tensor(5)]), {}


def test_kernels_that_are_not_run_again_give_what_torchs_give() -> None:
    """Each call twice, of tensors alike: the second is remembered, and views and values are not."""
    kernels = Kernels()
    for _ in range(2):
        ours, theirs = list(_calls()), list(_calls())
        for (func, args, kwargs), (_, same, options) in zip(ours, theirs, strict=True):
            made, want = kernels.run(func, args, kwargs), func(*same, **options)
            assert _laid_out(made) == _laid_out(want), func
            assert _laid_out(args) == _laid_out(same), func
            for i, (mine, yours) in enumerate(zip(args, same, strict=True)):
                assert (made is mine) == (want is yours), (func, i)
            storages = {id(t.untyped_storage()) for t in tags.tensors(list(args))}
            wanted = {id(t.untyped_storage()) for t in tags.tensors(list(same))}
            views = [id(t.untyped_storage()) in storages for t in tags.tensors(made)]
            assert views == [id(t.untyped_storage()) in wanted for t in tags.tensors(want)], func
            distinct = {id(t.untyped_storage()) for t in tags.tensors(made)}
            assert len(distinct) == len({id(t.untyped_storage()) for t in tags.tensors(want)})


def test_kernels_with_values_run_each_time() -> None:
    kernels, count = Kernels(), torch.zeros(())
    for _ in range(3):
        kernels.run(torch.ops.aten.add_.Tensor, (count, 1), {})
    assert count.item() == 3


class Counted(nn.Linear):
    """A user's module: its initialisation may look at anything."""

    calls = 0

    def reset_parameters(self) -> None:
        Counted.calls += 1
        super().reset_parameters()


def test_only_torchs_own_modules_are_filled_once_per_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: Counter[str] = Counter()
    original = init._recorded

    def recorded(tree: Any, module: nn.Module, *args: Any) -> Any:
        filled[type(module).__name__] += 1
        return original(tree, module, *args)

    monkeypatch.setattr(init, "_recorded", recorded)
    Counted.calls = 0
    with torch.device("meta"):
        layers = [Counted(4, 4), Counted(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        layers += [nn.Linear(4, 4, bias=False), nn.Linear(4, 8)]
        model = nn.Sequential(*layers, nn.LayerNorm(8))
        x = torch.empty(2, 4)
    began = Counted.calls
    memory = fxshard.plan(model, (x,), world_size=2, loss=Tensor.sum).memory
    phase = next(phase for phase in memory.lifecycle if phase.name == "init")
    assert Counted.calls - began == 2
    assert filled == {"Counted": 2, "Linear": 3, "LayerNorm": 1}
    # Each of them draws its weight in place: one operator per module that stands in the phase.
    drawn = Counter(m.module for m in phase.ledger.moments if m.node.startswith("aten.uniform_"))
    assert drawn == {"0": 2, "1": 2, "2": 2, "3": 2, "4": 1, "5": 2}


# -- the collector ---------------------------------------------------------------------------------


def test_the_collector_stands_still_inside_and_runs_again_behind() -> None:
    assert gc.isenabled()
    with collector.paused():
        assert not gc.isenabled()
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collector.paused():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled(), "who had it off has it off"
    finally:
        gc.enable()


def test_what_was_made_inside_is_old_and_frozen_objects_stay_frozen() -> None:
    with collector.paused():
        made = [[i] for i in range(2000)]
    assert gc.get_count()[0] < 700  # none of them is young any more
    assert any(each is made for each in gc.get_objects(generation=2))
    gc.freeze()
    try:
        with collector.paused():
            pass
        # the number of them may fall: what is frozen dies as ever when nobody refers to it
        assert gc.get_freeze_count() and not any(each is made for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_garbage_of_earlier_work_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ring:
        def __init__(self) -> None:
            self.me = self

    monkeypatch.setattr(collector, "_limit", 100)
    monkeypatch.setattr(collector, "_kept", 0)

    made: list[weakref.ref[Ring]] = []

    def alive() -> int:
        return sum(each() is not None for each in made)

    with collector.paused():
        made += [weakref.ref(Ring()) for _ in range(500)]
    assert alive() == 500
    with collector.paused():  # in the midst of work
        assert alive() == 500
    with collector.paused(sweep=True):
        assert alive() == 0
    # A collection takes as long as there are objects: as many must have come before the next.
    assert collector._limit >= len(gc.get_objects(generation=2)) * 0.9
    assert collector._limit >= collector.SWEEP


# -- imports ---------------------------------------------------------------------------------------

LEAN = """
import sys, torch, fxshard
with torch.device("meta"):
    model, x = torch.nn.Linear(4, 4), torch.empty(2, 4)
plan = fxshard.plan(model, (x,), world_size=2, loss=torch.Tensor.sum, optimizer=torch.optim.AdamW)
plan.memory.table()
wanted = ("scipy", "transformers", "plotly", "rich", "matplotlib", "pandas")
print(*[name for name in wanted if name in sys.modules])
"""


def test_a_plan_imports_only_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAN], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
