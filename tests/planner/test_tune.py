"""fxshard.tune against plans of every configuration, made one by one from scratch."""

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard.cli import main
from fxshard.config.checked import Config
from fxshard.errors import ConfigError, DoesNotFitError
from fxshard.hardware import PRESETS
from fxshard.ir import dump
from fxshard.memory.views import html, plots
from fxshard.memory.views.plots import Dot
from fxshard.planner import bounds
from fxshard.planner.result import Tuning
from fxshard.planner.space import candidates
from fxshard.plans.plan import make_plan
from fxshard.plans.workload import Workload
from tests import captures

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BATCHES = (2, 8)
OPEN = {"batch": [("x", 0)]}  # a size that is open may cost an operator of its own: mean's divisor
SPACE: dict[str, list[Any]] = {
    "strategy": ["full_shard", "shard_grad_op"],
    "checkpoint": [None, "full"],
    "forward_prefetch": [1],
    "mixed_precision": [None, BF16],
    "offload": [None],
    "offload_activations": [None],
}
ONE: dict[str, list[Any]] = {
    name: values[:1] for name, values in SPACE.items() if name != "strategy"
}


class Blocks(nn.Module):
    """f32 (batch, 64) -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)
        )
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).logsumexp(-1).mean()


def tuned(budget: int | str, **more: Any) -> Tuning:
    given = {"world_size": 4, "hardware": "h100", "optimizer": adamw, "batches": BATCHES}
    given |= {"space": SPACE, "plans": None, "budget": budget}
    return fxshard.tune(Blocks(), (torch.zeros(2, 64),), **given | more)


@pytest.fixture(scope="module")
def every() -> dict[Any, tuple[int, float]]:
    """Peak and seconds per sample of every configuration, each planned on its own."""
    found = {}
    for values, batch in itertools.product(itertools.product(*SPACE.values()), BATCHES):
        options = dict(zip(SPACE, values, strict=True))
        with captures.sharing(True):
            call = (torch.zeros(batch, 64),)
            plan = fxshard.plan(
                Blocks(), call, world_size=4, optimizer=adamw, dynamic=OPEN, **options
            )
            peak = max(plan.memory.peak_bytes, plan.memory.first_step_peak_bytes)
            found[(*values, batch)] = peak, plan.estimate("h100").step_seconds / batch
    return found


def key_of(trial: Any) -> tuple[Any, ...]:
    return (*(trial.options[name] for name in SPACE), trial.batch)


def pareto(every: dict[Any, tuple[int, float]], budget: int) -> set[tuple[int, float]]:
    fitting = [each for each in every.values() if each[0] <= budget]
    return {
        (peak, seconds)
        for peak, seconds in fitting
        if not any(p <= peak and s <= seconds and (p, s) != (peak, seconds) for p, s in fitting)
    }


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
@pytest.mark.sample(2)
def test_best_and_front_are_those_of_all_plans(
    every: dict[Any, tuple[int, float]], at: float
) -> None:
    peaks = sorted(peak for peak, _ in every.values())
    budget = peaks[int(at * (len(peaks) - 1))]
    result = tuned(budget)
    best = min((seconds, peak) for peak, seconds in every.values() if peak <= budget)
    assert (result.best.sample_time, result.best.peak_bytes) == best and result.slack == 0
    assert {(t.peak_bytes, t.sample_time) for t in result.front} == pareto(every, budget)
    assert {key_of(trial) for trial in result.trials} == every.keys()
    for trial in result.trials:
        peak, seconds = every[key_of(trial)]
        if trial.peak_bytes is not None:  # planned: to the byte
            assert (trial.peak_bytes, trial.sample_time) == (peak, seconds)
            assert trial.fits == (peak <= budget)
        elif trial.why.startswith("does not fit"):
            assert peak > budget
        else:
            assert trial.why.startswith("pruned") and not trial.fits
    assert result.planned < len(every) or at == 1.0


def test_bounds_are_below_every_plan(every: dict[Any, tuple[int, float]]) -> None:
    hardware = PRESETS["h100"]
    call = (torch.zeros(2, 64),)
    options: dict[str, Any] = {"world_size": 4, "optimizer": adamw}
    resident = None
    for checkpoint, precision in itertools.product((None, "full"), (None, BF16)):
        chosen = {"checkpoint": checkpoint, "mixed_precision": precision, "dynamic": OPEN}
        stem_plan = fxshard.plan(Blocks(), call, passes=bounds.stem_passes, **options, **chosen)
        stem = bounds.Stem.of(stem_plan.program, hardware)
        resident = resident or bounds.Resident(stem_plan)
        for key, (peak, seconds) in every.items():
            if key[1] != checkpoint or key[3] is not precision:
                continue
            saved = stem.saved_bytes({"batch": key[-1]})
            least = resident.of(stem_plan.config, 4, saved)
            assert 0.3 * peak < least <= peak, key
            by_flops = bounds.flop_seconds(stem.flops(key[-1] / 2), hardware)
            if key[-1] == 2:
                optimizer = resident.optimizer_seconds(stem_plan.config, 4, hardware)
                assert 0 < by_flops < stem.seconds + optimizer <= 2 * seconds, key
            assert by_flops <= seconds * key[-1], key
            plan = stem_plan.replan(passes=None, args=(torch.zeros(key[-1], 64),))
            kept = sum(k.bytes for k in plan.memory.kept_for_backward())
            assert saved <= kept <= saved + 1024  # what the loss and outputs hold besides
            if key[-1] == 2:
                assert stem.seconds <= plan.estimate(hardware).compute_seconds


@pytest.mark.parametrize("precisions", [[None, BF16], [None]])
@pytest.mark.sample(1)
def test_one_trace_for_each_dtype(precisions: list[Any], traces: list[Any]) -> None:
    few = {"strategy": ["full_shard"], "mixed_precision": precisions}
    result = tuned("1GiB", space=SPACE | few)
    assert len(traces) == len(precisions)
    assert len({trial.batch for trial in result.trials if trial.peak_bytes}) == len(BATCHES)
    traces.clear()
    tuned("1GiB", batches=[1, 2], space={"checkpoint": [None]}, mixed_precision=BF16, plans=4)
    made = [kwargs.get("symbols") for _, kwargs in traces]
    assert made == [{"batch": ((0, 0),)}, None] or len(made) == 2, "a batch of 1 broadcasts"


class Quadratic(nn.Module):
    """f32 (batch, 16) -> a scalar: FLOPs without the batch, with it, and with its square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(16, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ (self.first @ self.second)
        rows = torch.cat([x, x[:1]]) @ self.first
        return (x @ x.t()).logsumexp(-1).sum() + rows.sum()


def test_flops_need_not_be_in_proportion_to_the_batch() -> None:
    @functools.cache
    def stem(batch: int) -> bounds.Stem:
        call = (torch.zeros(batch, 16),)
        options = {"world_size": 2, "dynamic": OPEN if batch > 1 else None}
        plan = fxshard.plan(Quadratic(), call, passes=bounds.stem_passes, **options)
        return bounds.Stem.of(plan.program, PRESETS["h100"])

    def by_hand(batch: int) -> float:
        rows = 3 * 16 + 2 * batch + 3 * (batch + 1)  # forward and backward; x has no gradient
        return 2 * (rows * 16 * 16 + 3 * batch * batch * 16)

    for opened, batches in ((4, (1, 4, 5, 64)), (64, (1, 64, 128))):
        made = stem(opened)
        for batch in batches:
            (exact,) = stem(batch).flops(1).values()
            assert exact == by_hand(batch)
            assert sum(made.flops(batch / opened).values()) <= exact, (opened, batch)


@pytest.mark.parametrize("checkpoint", [None, "full", "selective"])
def test_a_stem_made_once_gives_the_program_of_all_passes(checkpoint: str | None) -> None:
    options = {"optimizer": adamw, "dynamic": OPEN, "checkpoint": checkpoint}
    call: Any = (torch.zeros(2, 64),), {}
    stems: dict[Any, Any] = {}
    for more in ({"strategy": "shard_grad_op"}, {"offload": CPUOffloadPolicy()}, {}):
        config = Config.from_options(options | more)
        workload = Workload(Blocks(), call, 4, config)
        mine, whole = make_plan(workload, stems=stems), make_plan(workload)
        assert dump.text(mine.program) == dump.text(whole.program)
        assert mine.dump() == whole.dump() and mine.certificate == whole.certificate
        assert (mine.memory.ledger().bytes == whole.memory.ledger().bytes).all()
    assert len(stems) == 1


def test_what_a_pass_refuses_is_refused_again() -> None:
    """Half of a stem was taken for one: with bytes too few for it, the second plan was made."""
    call = ((torch.zeros(2, 64),), {})
    stems: dict[Any, Any] = {}
    workload = Workload(Blocks(), call, 4, Config.from_options({"checkpoint": 100}))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"at least .* of activations live"):
            make_plan(workload, stems=stems)


def test_compile_takes_the_best_and_trains() -> None:
    result = tuned("1GiB", space={}, batches=[4], plans=3)
    best = result.best
    torch.manual_seed(0)
    model = fxshard.compile(Blocks(), world_size=best.world_size, **best.options)
    optimizer = adamw(model.parameters())
    x = torch.randn(best.batch, 64)
    before = model(x)
    before.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert model(x) < before
    assert best.config is not None and best.plan is not None
    for name, value in best.options.items():
        assert getattr(best.config, name) == getattr(best.plan.config, name) == value
    plan = fxshard.plan(Blocks(), (torch.zeros(4, 64),), world_size=best.world_size, **best.options)
    assert max(plan.memory.peak_bytes, plan.memory.first_step_peak_bytes) == best.peak_bytes
    assert plan.replan(dynamic=OPEN).estimate("h100").step_seconds == best.step_time
    assert plan.config.optimizer is adamw, "what was given stays"


def test_losers_say_why(every: dict[Any, tuple[int, float]]) -> None:
    peaks = sorted(peak for peak, _ in every.values())
    result = tuned(peaks[len(peaks) // 2], space=SPACE | {"reshard_after_forward": [None, 3]})
    reasons = [trial.why for trial in result.trials]
    assert reasons[0] == "best" and reasons.count("best") == 1
    starts = ("does not fit: ", "dominated by #", "slower: ", "pruned: at least ", "refused: ")
    assert all(reason.startswith(starts) for reason in reasons[1:])
    refused = [t for t in result.trials if t.options["reshard_after_forward"] == 3]
    assert all("cannot be cut into groups of 3" in t.why or not t.peak_bytes for t in refused)
    assert any("cannot be cut into groups of 3" in t.why for t in refused)
    for trial in result.trials[1:]:
        if trial.why.startswith("dominated by #"):
            other = result.trials[int(trial.why.split("#")[1].split(":")[0]) - 1]
            assert other.on_front and other.fits and not trial.on_front
            assert other.peak_bytes <= trial.peak_bytes
            assert other.sample_time <= trial.sample_time
        if trial.on_front:
            ratio = trial.sample_time / result.best.sample_time
            assert f"{ratio:.2f}x" in trial.why or f"{ratio:.4f}x" in trial.why
    table = str(result)
    assert (
        "Best of" in table and "does not fit: " in table and "refused: " in result.table(rows=None)
    )


class Table(nn.Module):
    """f32 (batch, 4) -> a scalar, for up to 6 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, 4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table[: x.shape[0]]
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_a_batch_that_the_model_refuses() -> None:
    result = fxshard.tune(
        *(Table(), (torch.zeros(2, 4),)),
        world_size=2,
        hardware="h100",
        batches=[2, 4, 16],
        space={"checkpoint": [None], "mixed_precision": [None], "forward_prefetch": [1]},
    )
    assert result.best.batch == 4
    assert all(t.why.startswith("refused: ") for t in result.trials if t.batch == 16)


@pytest.mark.parametrize("plans", [1, 3])
def test_a_limit_of_plans_tells_what_was_left(
    every: dict[Any, tuple[int, float]], plans: int
) -> None:
    result = tuned("1GiB", plans=plans)
    assert result.planned == plans == sum(trial.peak_bytes is not None for trial in result.trials)
    left = f"{plans} planned in full; what was not planned may take up to {result.slack:.1%} less"
    assert (left if result.slack else f"{plans} planned in full; nothing else") in result.summary()
    fastest = min(seconds for _, seconds in every.values())
    assert fastest >= result.best.sample_time * (1 - result.slack)
    left = [t.why for t in result.trials if t.peak_bytes is None]
    assert left and all(why.startswith((f"not planned, {plans} other", "pruned")) for why in left)


def test_nothing_fits(every: dict[Any, tuple[int, float]]) -> None:
    smallest = min(peak for peak, _ in every.values())
    with pytest.raises(DoesNotFitError, match="nothing fits") as raised:
        tuned(smallest - 1)
    assert f"needs {fxshard.bytesize.size_text(smallest)} (" in str(raised.value)
    assert "batch 2)" in str(raised.value)
    with pytest.raises(DoesNotFitError, match="the smallest of"):
        tuned("1KiB", plans=2)


def test_offload_is_the_last_resort() -> None:
    space = {name: ONE[name] for name in ("forward_prefetch", "mixed_precision")}
    space |= {"strategy": ["full_shard"], "checkpoint": [None, "full"]}
    roomy = tuned("1GiB", space=space, batches=[2])
    offloaded = [t for t in roomy.trials if t.options["offload"] is not None]
    assert offloaded and all("offload is for what fits in no other way" in t.why for t in offloaded)
    least = min(t.peak_bytes for t in roomy.trials if t.peak_bytes)
    tight = tuned(least - 1, space=space, batches=[2])
    assert isinstance(tight.best.options["offload"], CPUOffloadPolicy)
    asked = tuned("1GiB", space=space | {"offload": [None, CPUOffloadPolicy()]}, batches=[2])
    assert any(t.fits and t.options["offload"] is not None for t in asked.trials)


def test_offloaded_activations_are_compared_and_bounded() -> None:
    """Each plan, with and without, beside bounds; where they leave, more fits."""
    with torch.device("meta"):
        model, x = Wide(), torch.empty(8192, 1024)
    space = ONE | {"offload_activations": [None, True], "checkpoint": [None, 2**28]}
    space |= {"strategy": ["full_shard"]}
    given = {"world_size": 4, "hardware": "h100", "batches": [8192], "plans": None}

    def found(budget: int | str) -> dict[Any, Any]:
        result = fxshard.tune(model, (x,), budget=budget, space=space, **given)
        names = ("checkpoint", "offload_activations")
        return {tuple(trial.options[name] for name in names): trial for trial in result.trials}

    roomy = found("80GiB")
    peaks = {}
    for (checkpoint, offload), trial in roomy.items():
        plan = fxshard.plan(
            model, (x,), world_size=4, checkpoint=checkpoint, offload_activations=offload
        )
        peaks[checkpoint, offload] = max(plan.memory.peak_bytes, plan.memory.first_step_peak_bytes)
        assert trial.least_bytes <= peaks[checkpoint, offload]
        assert trial.least_seconds <= plan.estimate("h100").step_seconds
    assert peaks[None, True] < peaks[None, None]
    plain, leaves = roomy[None, None], roomy[None, True]
    assert plain.why == "best" and leaves.on_front and leaves.why.startswith("same time, ")
    tight = found(peaks[None, None] - 1)
    best = next(iter(tight.values()))
    assert best.options["offload_activations"] is True and best.options["checkpoint"] is None
    assert "offload_activations" in best.setting
    smallest = found(min(peaks.values()))
    assert next(iter(smallest.values())).peak_bytes <= min(peaks.values())


class Wide(nn.Module):
    """f32 (rows, 1024) -> a scalar: a block saves 224 MiB, of which the link hides a half."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 3072), nn.GELU(), nn.Linear(3072, 1024)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_the_default_space_has_all_that_is_left_open() -> None:
    result = tuned("1GiB", space=None, world_size=16, batches=None, plans=2)
    names = ("strategy", "checkpoint", "forward_prefetch", "mixed_precision", "offload")
    names = (*names, "offload_activations", "reshard_after_forward")
    seen = {n: {repr(t.options.get(n)) for t in result.trials} for n in names}
    assert [len(seen[name]) for name in names] == [5, 3, 3, 3, 2, 2, 3]
    assert seen["reshard_after_forward"] == {"None", "8", "{'': False}"}
    assert {t.world_size for t in result.trials} == {16, (2, 8)}
    assert {t.batch for t in result.trials} == {2 << power for power in range(9)}
    fixed = tuned("1GiB", space=None, strategy="full_shard", checkpoint="full", plans=2)
    assert {t.options["strategy"] for t in fixed.trials} == {"full_shard"}
    assert {t.options["checkpoint"] for t in fixed.trials} == {"full"}
    assert len({t.options["backward_prefetch"] for t in fixed.trials}) == 3


def test_all_but_the_root_is_resharded_where_there_is_more_than_a_root() -> None:
    """Of a model of one unit it would be shard_grad_op."""
    space = ONE | {"backward_prefetch": [1]}
    texts = [
        [each.text for each in candidates(Config(), 4, 8, units, [None], space)] for units in (1, 2)
    ]
    assert texts[0] == [
        "no_shard, prefetch=1",
        "shard_grad_op, prefetch=1",
        "full_shard, prefetch=1",
    ]
    assert {*texts[1]} - {*texts[0]} == {"full_shard, reshard=all but root, prefetch=1"}
    assert len(texts[1]) == len(texts[0]) + 1


def test_all_but_the_root_is_what_is_planned_alone() -> None:
    root: dict[str, Any] = {"reshard_after_forward": {"": False}, "strategy": "full_shard"}
    space = ONE | {name: [value] for name, value in root.items()}
    result = tuned("1GiB", space=space, batches=[2])
    with captures.sharing(True):
        call = (torch.zeros(2, 64),)
        alone = fxshard.plan(
            Blocks(), call, world_size=4, optimizer=adamw, forward_prefetch=1, dynamic=OPEN, **root
        )
    best = result.best
    assert best.options["reshard_after_forward"] == {"": False}
    assert best.peak_bytes == max(alone.memory.peak_bytes, alone.memory.first_step_peak_bytes)
    assert best.step_time == alone.estimate("h100").step_seconds


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"hardware": "v100"}, "hardware='v100': expected one of a100"),
        ({"space": {"hardware": ["h100", "a100"]}}, "expected the name of an option"),
        ({"memory_budget": "1GiB"}, "give budget=... instead"),
        ({"space": {"checkpiont": [None]}}, "expected the name of an option"),
        ({"space": {"checkpoint": "full"}}, "a list of its values"),
        ({"space": {"checkpoint": []}}, "a list of its values"),
        ({"space": {"checkpoint": {"layers.0": "full"}}}, "a list of its values"),
        ({"space": {"memory_budget": ["1GiB"]}}, "expected the name of an option"),
        ({"space": ["checkpoint"]}, "expected a dict by name of an option"),
        ({"space": {"world_size": [0]}}, "world_size=0: expected a whole number of ranks"),
        *(({"batches": each}, "whole numbers >= 1") for each in ([0], [], 4, "24", [2.0], [True])),
        *(({"plans": each}, "an integer >= 1") for each in (0, "2", 2.5, True)),
        ({"plans": "2", "progress": True}, "plans='2': expected None or an integer >= 1"),
        *(({"budget": each}, "at least 1 byte") for each in (-5, 0, "0GiB")),
        *(({"budget": each}, "is no size") for each in (1.5, "80Gb", "1.2.3GiB", True)),
        ({"space": {"strategy": ["fastest"]}}, "'fastest' is not supported"),
        ({"checkpiont": "full"}, "Did you mean 'checkpoint'"),
    ],
)
def test_what_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tuned(more.pop("budget", "1GiB"), **more)
    assert said in str(raised.value)


def test_values_may_come_from_an_iterator() -> None:
    lists = {"strategy": ["full_shard", "no_shard"], "checkpoint": [None, "full"]}
    given = {name: iter(values) for name, values in lists.items()}
    result = tuned("1GiB", space=ONE | given, batches=iter([2, 8]))
    found = {(t.options["strategy"], t.options["checkpoint"], t.batch) for t in result.trials}
    assert found == set(itertools.product(*lists.values(), BATCHES))


def test_replicas_by_shards_are_searched_with_hybrid_strategies() -> None:
    result = tuned("1GiB", space=ONE, world_size=(2, 2), batches=[2])
    hybrid = {"hybrid_shard", "hybrid_shard_zero2"}
    assert {t.options["strategy"] for t in result.trials if t.fits} == hybrid
    both = {"strategy": ["full_shard", "hybrid_shard"], "world_size": [4, (2, 2)]}
    result = tuned("1GiB", space=ONE | both, batches=[2])
    legal = {("full_shard", 4), ("hybrid_shard", (2, 2))}
    for trial in result.trials:
        refused = (trial.options["strategy"], trial.world_size) not in legal
        assert trial.why.startswith("refused: world_size=") == refused


def test_what_is_refused_is_no_plan() -> None:
    wrong = {"reshard_after_forward": [3, None], "strategy": ["full_shard"]}  # of 4 ranks
    result = tuned("1GiB", space=ONE | wrong, plans=1)
    assert result.planned == 1 and result.best.options["reshard_after_forward"] is None


def test_options_that_decide_what_is_traced_or_stepped() -> None:
    """The bounds are about the user's optimizer and units; a plan with others is not below them."""
    varied = {
        "optimizer": [adamw, functools.partial(torch.optim.SGD, lr=1e-3)],
        "ignored": [(), ["layers.1.*"]],
    }
    peaks = {}
    for values in itertools.product(*varied.values()):
        options = dict(zip(varied, values, strict=True))
        plan = fxshard.plan(Blocks(), (torch.zeros(2, 64),), world_size=4, **options)
        peaks[values[0], bool(values[1])] = max(
            plan.memory.peak_bytes, plan.memory.first_step_peak_bytes
        )
    least = min(peaks.values())
    space = ONE | {"strategy": ["full_shard"]} | varied
    best = tuned(least, space=space, batches=[2]).best
    assert (best.options["optimizer"], bool(best.options["ignored"])) == min(peaks, key=peaks.get)
    assert best.peak_bytes == least


def test_a_bar_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    tuned("1GiB", batches=[2], space={"checkpoint": [None]}, plans=1, progress=True)
    told = capsys.readouterr()
    assert "tuning" in told.err and not told.out
    tuned("1GiB", batches=[2], space={"checkpoint": [None]}, plans=1)
    assert not capsys.readouterr().err


# -- the command line, and plots -------------------------------------------------------------------


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png, page = tmp_path / "front.png", tmp_path / "page.html"
    command = "tune --model tests.planner.test_tune:example --batches 2 --world-size 4 --bf16"
    more = f"--hardware h100 --plans 4 --plot {png} --html {page}"
    assert main.main([*command.split(), *more.split()]) == 0
    told = capsys.readouterr().out
    assert "Best of" in told and "ms / sample" in told and "best" in told
    assert png.read_bytes().startswith(b"\x89PNG")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text())[1])
    assert data["front"]["budget"] == PRESETS["h100"].memory_bytes
    assert len(data["front"]["dots"]) == 4 and "curves" not in data
    assert main.main([*command.split(), "--hardware", "h100", "--budget", "1KiB"]) == 1
    assert "nothing fits" in capsys.readouterr().err
    assert main.main([*command.split(), "--hardware", "v100"]) == 2


def example() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """For the command line."""
    return Blocks(), (torch.zeros(2, 64),), {}


DOTS = [
    Dot("small", 2 * 2**30, 3e-3, True, True),
    Dot("best", 6 * 2**30, 1e-3, True, True, True),
    Dot("worse", 7 * 2**30, 2e-3, True),
    Dot("large", 9 * 2**30, 0.5e-3, False),
]


def quadratic(batch: Any, seq: Any, world: Any) -> Any:
    """A peak by hand."""
    return 1000 // world + 10 * batch * seq + batch * seq**2


def test_curves_are_those_of_the_function() -> None:
    here = {"batch": 2, "seq": 8, "world": 4}
    drawn = plots.curves(quadratic, {"batch": range(1, 5), "world": [1, 10, 1000]}, here)
    assert [c.name for c in drawn] == ["batch", "world"]
    assert drawn[0].at == (1, 2, 3, 4)
    assert drawn[0].bytes == tuple(250 + 80 * b + 64 * b for b in (1, 2, 3, 4))
    assert drawn[1].bytes == (1288, 388, 289) and drawn[1].fixed == "batch 2, seq 8"
    assert drawn[1].is_log and not drawn[0].is_log
    (many,) = plots.curves(quadratic, {"seq": range(1, 9999)}, here)
    assert len(many.at) == plots.POINTS and many.at[0] == 1 and many.at[-1] == 9998


def test_plots_show_what_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    plots.plot_front("", DOTS, 8 * 2**30)
    (axes,) = figures[0].axes
    grey, star = axes.collections
    assert grey.get_offsets().tolist() == [[7.0, 2.0], [9.0, 0.5]]
    assert star.get_offsets().tolist() == [[6.0, 1.0]]
    front, budget = axes.lines
    assert front.get_xydata().tolist() == [[2.0, 3.0], [6.0, 1.0]]
    assert list(budget.get_xdata()) == [8.0, 8.0]
    here = {"batch": 2, "seq": 8, "world": 4}
    drawn = plots.curves(quadratic, {"batch": [1, 2, 4], "seq": [8, 16]}, here)
    plots.plot_curves("", drawn, 600)
    first, second = figures[1].axes
    assert first.lines[0].get_xydata().tolist() == [[1, 394], [2, 538], [4, 826]]
    assert list(first.lines[1].get_ydata()) == [600, 600] and second.get_xlabel() == "seq"
    monkeypatch.undo()
    plots.plot_curves(tmp_path / "curves.png", drawn, 600)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write"):
        plots.plot_front(tmp_path / "no" / "such.png", DOTS, 2**30)
    with pytest.raises(ConfigError, match="no curve"):
        plots.plot_curves(tmp_path / "none.png", [])


def test_sections_of_the_page_are_there_if_there_is_data() -> None:
    drawn = plots.curves(quadratic, {"batch": [1, 2, 4]}, {"batch": 2, "seq": 8, "world": 4})
    found = html.tuning(DOTS, drawn, 8 * 2**30)
    assert found["front"]["unit"] == "GiB" and found["front"]["dots"][1][1:3] == (6 * 2**30, 1.0)
    assert found["curves"]["drawn"][0]["bytes"] == (394, 538, 826)
    assert html.tuning((), (), None) == {}
    with pytest.raises(ConfigError, match="needs the budget"):
        html.tuning(DOTS, (), None)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'fxshard[plot]'")):
        plots.plot_front(tmp_path / "front.png", DOTS, 2**30)
