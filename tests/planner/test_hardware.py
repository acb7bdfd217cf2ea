"""The option `hardware`: every choice by times is made for it, and it goes wherever options go."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.cli import main
from fxshard.cli.model_source import OPTIMIZERS
from fxshard.config.checked import Config
from fxshard.errors import ConfigError
from fxshard.hardware import PRESETS, Hardware, Link, Tree
from fxshard.pipeline import default_passes
from fxshard.planner.result import Trial
from tests import fsdp2
from tests.planner.test_budget_offload import Blocks, counts, large, peak

H100 = PRESETS["h100"]
MIB = 2**20
NO_LINK = dataclasses.replace(H100, name="no link", host=Link(0.0, 1.0))
FAST_LINK = dataclasses.replace(H100, name="fast link", host=Link(0.0, 1e15))
FORCED: dict[str, Any] = {"offload_activations": True}


# -- what is chosen --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [{"device": "cuda"}, FORCED], ids=["cuda", "forced"])
def test_bytes_of_checkpoints_offload_by_its_link(where: dict[str, Any]) -> None:
    plan = large(depth=3, checkpoint=400 * MIB, **where)
    left, again = counts(plan.replan(hardware=NO_LINK))
    assert not left and again
    left, again = counts(plan.replan(hardware=FAST_LINK))
    assert left and not again
    assert (
        counts(plan) == counts(plan.replan(hardware="h100")) == counts(plan.replan(hardware=H100))
    )


def test_what_leaves_by_itself_is_what_its_link_hides() -> None:
    plan = large(depth=3, **FORCED)
    none, some, most = (
        counts(plan.replan(hardware=each))[0] for each in (NO_LINK, "h100", FAST_LINK)
    )
    assert none == 0 < some < most


class Both(nn.Module):
    """f32[rows, dim] -> the same: saves a product, and elementwise functions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight).sin() * x.sin().exp().tanh().sigmoid()


SLOW_MEMORY = dataclasses.replace(H100, memory_bandwidth=1e10)
SLOW_PRODUCTS = dataclasses.replace(H100, flops={torch.float32: 1e10})


def test_what_is_recomputed_is_what_is_cheap_there() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(Both(1024), Both(1024)), torch.empty(1024, 1024)

    def again(hardware: Hardware) -> set[str]:
        more: dict[str, Any] = {"checkpoint": 22 * MIB, "loss": torch.sum, "hardware": hardware}
        plan = fxshard.plan(model, (x,), world_size=2, units=["*"], **more)
        names = [n.name for n in plan.program.phase("backward") if n.name.endswith("_recomputed")]
        return {name.split("_")[0] for name in names}

    assert again(SLOW_MEMORY) - again(SLOW_PRODUCTS) == {"mm"}
    assert again(SLOW_PRODUCTS) - again(SLOW_MEMORY) == {"exp"}


def test_memory_budget_chooses_for_it() -> None:
    plan = large(depth=3, forward_prefetch=1, backward_prefetch=1, reshard_after_forward=True)
    budget = peak(plan) * 85 // 100
    found = {}
    for hardware in (NO_LINK, FAST_LINK):
        chosen = plan.replan(memory_budget=budget, hardware=hardware, **FORCED)
        assert peak(chosen) <= budget
        found[hardware.name] = counts(chosen)
        assert chosen.chosen is not None
        assert chosen.chosen.seconds == chosen.estimate(hardware).step_seconds
        assert chosen.chosen.seconds == chosen.estimate().step_seconds
        assert f"estimated on {hardware.name} (" in str(chosen.chosen)
    assert not found["no link"][0] and found["no link"][1]
    assert found["fast link"][0] and not found["fast link"][1]


# -- tune ------------------------------------------------------------------------------------------


def test_tune_plans_for_its_hardware_and_its_choice_changes() -> None:
    with torch.device("meta"):
        model, x = Blocks(3, 1024), torch.empty(8192, 1024)
    space = {
        "strategy": ["full_shard"],
        "forward_prefetch": [1],
        "mixed_precision": [None],
        "checkpoint": [400 * MIB],
        "offload_activations": [False, True],
    }
    given: dict[str, Any] = {"units": ["blocks.*"], "batches": [8192], "plans": None}

    def tried(hardware: str | Hardware) -> tuple[Trial, dict[bool, Trial]]:
        found = fxshard.tune(
            *(model, (x,)), world_size=4, hardware=hardware, budget="80GiB", space=space, **given
        )
        return found.best, {t.options["offload_activations"]: t for t in found.trials}

    for hardware, leaves in ((NO_LINK, False), ("h100", True), (FAST_LINK, True)):
        best, found = tried(hardware)
        assert best.options["offload_activations"] is leaves
        assert best.options["hardware"] == hardware
        assert best.plan is not None and best.step_time == best.plan.estimate().step_seconds
        assert bool(counts(best.plan)[0]) is leaves
        times = {each: trial.step_time for each, trial in found.items()}
        if hardware is NO_LINK:  # chosen for an H100, it would wait for the link for minutes
            assert times[True] == times[False]
        again = fxshard.plan(model, (x,), world_size=best.world_size, **best.options)
        assert counts(again) == counts(best.plan)


# -- bytes and numbers -----------------------------------------------------------------------------


def small() -> tuple[nn.Module, Tensor]:
    """Its activations have the least bytes that are offloaded, or more."""
    torch.manual_seed(0)
    return Blocks(3, 128), torch.randn(2048, 128)


SMALL: dict[str, Any] = {"units": ["blocks.*"], "checkpoint": 13 * MIB, **FORCED}


@pytest.mark.parametrize("hardware", [NO_LINK, FAST_LINK], ids=lambda h: h.name)
def test_bytes_are_those_of_the_tracker(hardware: Hardware) -> None:
    model, x = small()
    options = {"world_size": 2, "hardware": hardware, **SMALL}
    left, again = counts(fxshard.plan(model, (x,), **options))
    assert (bool(left), bool(again)) == (hardware is FAST_LINK, hardware is NO_LINK)
    result = fxshard.validate(model, (x,), **options)
    assert result.max_abs_difference == 0, result.table(only_different=True)


def on_ranks(rank: int, world_size: int) -> tuple[tuple[int, int], str]:
    """Beside eager on the joined batch; then with hardware of another kind on each rank."""
    eager, _ = small()
    draws = [torch.Generator().manual_seed(r) for r in range(world_size)]
    batches = [torch.randn(2048, 128, generator=draw) for draw in draws]
    model: Any = fxshard.compile(copy.deepcopy(eager), hardware=FAST_LINK, **SMALL)
    model(batches[rank]).backward()
    mine = {**SMALL, "hardware": NO_LINK if rank else FAST_LINK}
    apart: Any = fxshard.compile(copy.deepcopy(eager), **mine)
    said = ""
    try:
        apart(batches[rank])
    except fxshard.RankMismatchError as error:
        said = str(error)
    eager(torch.cat(batches)).backward()
    for got, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(fsdp2.full(got.grad), wanted.grad)
    return counts(model.plan), said


def test_numbers_on_ranks_and_ranks_that_choose_otherwise(ranks: Any) -> None:
    """Of a unit that runs again more is gathered: ranks are refused for what they would do."""
    for (left, again), said in ranks(2).run(on_ranks):
        assert left and not again
        assert "backward fxshard.all_gather" in said and "with the same options" in said


# -- where it goes ---------------------------------------------------------------------------------

OWN = Hardware(
    name="mine",
    flops={torch.float32: 1e13, torch.bfloat16: 1e14},
    achievable=0.5,
    memory_bandwidth=1e12,
    memory_bytes=24 * 10**9,
    launch_overhead=3e-6,
    link=Link(1e-6, 2e10),
    network=Link(5e-6, 1e9),
    host=Link(1e-5, 1.2e10),
    tree=Tree(1e-6, 8e-6, 0.9),
)


def test_figures_of_ones_own_survive_what_options_do() -> None:
    config = Config.from_options({"hardware": OWN})
    for made in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        config.changed({"checkpoint": "full"}),
        dataclasses.replace(config, max_inflight=3),
    ):
        assert made.hardware == OWN and "hardware" in made.given
    names = {"torch": torch, "Hardware": Hardware, "Link": Link, "Tree": Tree}
    assert eval(repr(OWN), names) == OWN
    assert f"hardware={OWN!r}" in repr(config) and "hardware='h100'" in repr(Config())
    assert Config().given == frozenset()
    model = fxshard.compile(nn.Linear(4, 4), world_size=2, hardware=OWN)
    assert pickle.loads(pickle.dumps(model))._fxshard.config.hardware == OWN


def test_every_pass_that_reads_times_gets_it() -> None:
    options: dict[str, Any] = {"async_tensor_parallel": True, "offload_activations": True}
    for config, count in ((Config(hardware=OWN), 1), (Config(hardware=OWN, **options), 3)):
        read: list[Any] = [each for each in default_passes(config) if hasattr(each, "hardware")]
        assert len(read) == count
        assert all(step.hardware == OWN for step in read)


def test_graphs_of_dynamo_take_it() -> None:
    """As they take `checkpoint`: in torch.compile's options too."""
    model, x = small()
    fxshard.shard(model, world_size=1, units=["blocks.*"], **FORCED)
    options: dict[str, Any] = {"checkpoint": 13 * MIB}
    found = {}
    for hardware in (NO_LINK, FAST_LINK):
        torch._dynamo.reset()
        given = {**options, "hardware": hardware}
        torch.compile(model, backend="fxshard", options=given)(x).backward()
        found[hardware.name] = fxshard.reports(model)[-1].recomputed()
    assert found["no link"] and not found["fast link"]


def test_a_dry_run_of_another_gpu_leaves_it() -> None:
    """A script chooses in a dry run what it chooses on the GPU."""
    model, x = small()
    given: dict[str, Any] = {"world_size": 2, **SMALL}
    wanted = fxshard.plan(model, (x,), **given)
    with fxshard.dry_run(world_size=2, device="a100"):
        model, _ = small()
        found = fxshard.plan(model, (x,), **given)
    assert counts(found) == counts(wanted)
    assert found.config.hardware == "h100"


def named() -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    return nn.Sequential(Both(1024), Both(1024)), (torch.randn(1024, 1024),), {}


def test_the_command_line_chooses_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dump`; and `opt`, of a program that has not chosen yet."""
    monkeypatch.setitem(PRESETS, "slow-memory", SLOW_MEMORY)
    monkeypatch.setitem(PRESETS, "slow-products", SLOW_PRODUCTS)
    command = ["dump", "--model", "tests.planner.test_hardware:named", "--world-size", "2"]
    command += ["--checkpoint", "22MiB", "--units", "*"]

    def told(*argv: str) -> str:
        assert main.main(argv) == 0
        return capsys.readouterr().out

    before = tmp_path / "before.txt"
    before.write_text(told(*command, "--text", "assign-checkpoints"))
    graphs = []
    for name in ("slow-memory", "slow-products"):
        graphs.append(told(*command, "--graph", "--hardware", name))
        whole = told(*command, "--text", "--hardware", name)
        assert told("opt", str(before), "--set", f"hardware={name}") == whole
    assert ["mm_1_recomputed" in each for each in graphs] == [True, False]
    estimate = ("estimate", *command[1:], "--hardware", "slow-memory", "--ranks-per-node", "1")
    plan = fxshard.plan(
        *named(), world_size=2, units=["*"], checkpoint="22MiB", optimizer=OPTIMIZERS["adamw"],
        hardware=dataclasses.replace(SLOW_MEMORY, ranks_per_node=1),
    )  # fmt: skip
    assert plan.estimate().table() in told(*estimate)


@pytest.mark.parametrize("verb", ["plan", "compile", "shard", "validate", "tune", "default_passes"])
def test_an_unknown_name_is_refused(verb: str) -> None:
    args = () if verb == "default_passes" else (nn.Linear(4, 4),)
    more = {} if verb == "default_passes" else {"world_size": 2}
    with pytest.raises(
        ConfigError, match="hardware='v100': expected one of a100, h100, h200, b200"
    ):
        getattr(fxshard, verb)(*args, hardware="v100", **more)
