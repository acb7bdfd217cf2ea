"""benchmarks/: their arithmetic by hand, each script's --smoke to its JSON, and the page."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from benchmarks import (
    chunk_loss,
    compile_step,
    figures,
    first_step,
    front,
    hardware_choice,
    joint_choice,
    limit,
    mesh_step_time,
    offload_activations,
    overhead,
    page,
    passes,
    peak_bytes,
    plan_405b,
    scale,
    step_time,
)
from benchmarks.models import EVERY, MODELS, SMOKE, llama
from benchmarks.ranks import RankFailed, alone, on_ranks
from benchmarks.sides import Setting, available

MACHINE = {"date", "machine", "cpu", "load", "python", "torch", "transformers"}


# -- arithmetic ------------------------------------------------------------------------------------


def test_spread_by_hand() -> None:
    # Positions 0.75 and 2.25 between the ordered 1, 2, 4, 8: 1.75, 3, 5.
    assert figures.spread([8.0, 1.0, 4.0, 2.0]) == {
        "median": 3.0, "q1": 1.75, "q3": 5.0, "count": 4
    }  # fmt: skip
    assert figures.spread([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0, "count": 1}
    with pytest.raises(ValueError, match="no values"):
        figures.spread([])


def test_ratio_is_of_medians_and_not_the_median_of_ratios() -> None:
    ours, theirs = [1.0, 2.0, 30.0], [10.0, 4.0, 3.0]
    assert figures.ratio(ours, theirs) == 0.5
    assert statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) == 0.5
    assert figures.ratio([1.0, 5.0, 6.0], theirs) == 1.25


def test_geometric_mean_by_hand() -> None:
    assert math.isclose(figures.geometric_mean([0.5, 2.0]), 1.0)
    assert math.isclose(figures.geometric_mean([0.8, 0.9, 1.0]), 0.72 ** (1 / 3))
    for bad in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="no geometric mean"):
            figures.geometric_mean(bad)


def test_a_step_is_the_slower_ranks_and_computing_is_the_sum() -> None:
    first = {"fsdp2": [{"forward": 1.0, "backward": 5.0, "optimizer": 1.0, "cpu": 6.0}]}
    second = {"fsdp2": [{"forward": 2.0, "backward": 3.0, "optimizer": 1.0, "cpu": 4.0}]}
    assert step_time.merged([first, second]) == {
        "fsdp2": [{"forward": 2.0, "backward": 5.0, "optimizer": 1.0, "step": 7.0, "cpu": 10.0}]
    }


def test_the_claim_is_the_geometric_mean_over_models() -> None:
    rows = [{"ratios": {"fxshard / fsdp2": {"step": step, "cpu": 1.0}}} for step in (0.5, 1.28)]
    (claim,) = step_time.claims(rows)
    assert claim["geometric_mean"] == 0.8 and claim["target"] == 0.90 and claim["met"]
    rows[0]["ratios"]["fxshard / fsdp2"]["step"] = 0.64
    (claim,) = step_time.claims(rows)
    assert claim["geometric_mean"] == round(math.sqrt(0.64 * 1.28), 4) and not claim["met"]


def test_peak_claims_take_each_case_once() -> None:
    rows = [
        {"setting": "fp32", "ratios": {"default": 0.5, "selective": 0.5, "best": 0.25}},
        {"setting": "bf16", "ratios": {"default": 2.0, "selective": 1.0, "best": 1.0}},
    ]
    default, selective, best = peak_bytes.claims(rows)
    assert (default["geometric_mean"], default["met"]) == (1.0, False)
    assert (selective["geometric_mean"], selective["met"]) == (0.7071, None)
    assert (best["geometric_mean"], best["met"]) == (0.5, True)
    assert best["settings"] == {"fp32": 0.25, "bf16": 1.0}


def test_first_step_is_flat_or_not() -> None:
    seconds = {("fsdp2-compiled", 4): 10.0, ("fsdp2-compiled", 32): 20.0, ("fxshard", 4): 5.0,
               ("fxshard", 32): 9.0}  # fmt: skip
    rows = [
        {"side": side, "layers": layers, "cold": {"first_seconds": value}}
        for (side, layers), value in seconds.items()
    ]
    versus, peer, flat = first_step.claims(rows)
    assert versus["layers"] == {"4": 0.5, "32": 0.45} and versus["met"]
    assert peer["value"] == 2.0 and peer["met"] is None
    assert flat["value"] == 1.8 and flat["target"] == 1.5 and not flat["met"]


def test_scale_is_linear_or_not() -> None:
    per_node = {"passes": 10.0, "verifier": 4.0, "liveness": 5.0, "report": 2.0}
    flat = [
        {"nodes": n, "units": n // 10 + 1, "microseconds_per_node": per_node} for n in (100, 1000)
    ]
    grown = [flat[0], {**flat[1], "microseconds_per_node": {**per_node, "verifier": 8.0}}]
    found = scale.claims_of(flat, grown)
    assert len(found) == 8 and [c["met"] for c in found].count(False) == 1
    (failed,) = (claim for claim in found if not claim["met"])
    assert failed["value"] == 2.0 and failed["claim"].startswith("verifier: µs per node, 101 units")
    stages = {"pass a": 1.0, "copy, lint": 2.0, "check b": 4.0, "ledger": 8.0, "table": 16.0}
    assert scale.totals(stages) == {
        "passes": 3.0, "verifier": 4.0, "liveness": 8.0, "report": 16.0, "all": 31.0
    }  # fmt: skip


def test_the_mark_of_405b_is_beaten_or_not() -> None:
    ours, theirs = ({"cpu_seconds": seconds, "peak_rss_bytes": 2**29} for seconds in (12.0, 48.0))
    report, memory, ratio = plan_405b.claims_of(ours, theirs)
    assert (report["value"], report["met"]) == (12.0, False)
    assert (memory["value"], memory["met"]) == (0.5, True)
    assert (ratio["value"], ratio["met"]) == (0.25, True)


# -- what is measured ------------------------------------------------------------------------------


class Event:
    """One of the profiler's."""

    def __init__(self, name: str, start: int, end: int = 0, size: int = 0) -> None:
        self._name, self._start, self._end, self._size = name, start, end, size

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def end_ns(self) -> int:
        return self._end

    def nbytes(self) -> int:
        return self._size


def test_tops_of_phases_by_hand() -> None:
    events = [
        Event("[memory]", 1, size=50),  # of the step before: not counted
        Event("phase forward", 10, 20),
        Event("[memory]", 11, size=7),
        Event("[memory]", 12, size=5),  # 112
        Event("[memory]", 13, size=-5),
        Event("phase backward", 21, 30),
        Event("[memory]", 22, size=2),  # 109
        Event("[memory]", 23, size=-9),
    ]
    assert peak_bytes.tops(events[::-1], 100) == {"forward": 112, "backward": 109}


def test_a_plain_model_is_measured_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, AdamW's states and the batch are held; gradients are the peak of its step."""
    linear = torch.nn.Linear(64, 32, bias=False)
    recipe: Any = type(SMOKE)(
        "linear", "linear", lambda: linear, lambda: (torch.ones(1, 64), torch.ones(1, 32)),
        lambda output, targets: (output * targets).sum(), "none.*",
    )  # fmt: skip
    monkeypatch.setitem(peak_bytes.EVERY, "linear", recipe)
    found = peak_bytes.measure(recipe, "plain", 2, Setting())
    weight = 4 * 64 * 32
    batch = 4 * (64 + 32)
    assert found.held == 3 * weight + 4 + batch  # a step counter per parameter
    output, product, loss = 4 * 32, 4 * 32, 4
    assert found.phases["forward"] == found.held + output + product + loss
    assert found.phases["optimizer"] >= found.held + 2 * weight  # the gradient, and foreach's copy


def test_units_of_the_models_are_their_blocks() -> None:
    with torch.device("meta"):
        counts = {
            name: len(recipe.block_modules(recipe.build()))
            for name, recipe in {**MODELS, **peak_bytes.MODELS}.items()
        }
    assert counts == {
        "tiny": 4, "small": 6, "medium": 8, "encoder": 6, "convnet": 6, "llama-1b": 16,
        "llama-8b": 32, "llama-8b, labels": 32, "bert-large": 24, "resnet-50": 16,
    }  # fmt: skip


def test_all_peers_are_there() -> None:
    assert {"plain", "fsdp1", "fsdp2", "fsdp2-compiled", "fxshard"} <= set(available())


def test_a_failing_rank_is_told_with_its_last_words() -> None:
    with pytest.raises(RankFailed, match="no values to take a median of"):
        alone(figures.spread, [])


def point(name: str, time: float, size: int, compiled: bool = False) -> dict[str, Any]:
    ours = name.startswith("fxshard")
    return {"name": name, "ours": ours, "compiled": compiled, "time": time, "bytes": size}


def test_a_front_is_the_fastest_as_small_and_the_smallest_as_fast() -> None:
    points = [
        point("FSDP2", 1.0, 100),
        point("FSDP2, checkpointed", 1.5, 40),
        point("FSDP2, compiled", 0.8, 80, compiled=True),
        point("fxshard, saved", 0.9, 110),
        point("fxshard, some", 1.0, 80),
        point("fxshard, none", 1.2, 50),
        point("fxshard, inductor", 0.6, 70, compiled=True),
    ]
    eager, full, compiled = front.beside(points)
    assert (eager["time"], eager["time_by"]) == (1.0, "fxshard, some")
    assert (eager["bytes"], eager["bytes_by"]) == (0.8, "fxshard, some")
    assert (full["time"], full["bytes"], full["bytes_by"]) == (None, 1.25, "fxshard, none")
    assert (compiled["time"], compiled["bytes"]) == (0.75, 0.875)
    found = front.claims([{"beside": [eager, full, compiled]}])
    assert (found["points"], found["in_front"]) == (3, 2)
    assert found["without_a_plan"] == {"time": 1, "bytes": 0}
    assert found["time"] == pytest.approx(0.75**0.5, abs=1e-4)


# -- the scripts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What --smoke of each script writes."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overhead, "DEPTH", 4)
        patch.setitem(EVERY, "smoke", llama("smoke", dim=64, depth=1, vocab=128, batch=1, seq=16))
        scripts = (step_time, peak_bytes, first_step, limit, overhead, passes, scale, plan_405b)
        for script in (*scripts, chunk_loss, offload_activations, joint_choice, hardware_choice):
            name = script.__name__.rpartition(".")[2]
            assert script.main(["--smoke", "--out", str(folder / f"{name}.json")]) == 0
    return folder


def read(results: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    assert found.keys() >= MACHINE
    return found


@pytest.mark.slow
def test_two_real_ranks_take_turns() -> None:
    sides = ["fsdp2", "fxshard"]
    times = step_time.merged(on_ranks(2, step_time.timed, "smoke", sides, 3))
    assert {side: len(rows) for side, rows in times.items()} == {"fsdp2": 3, "fxshard": 3}
    for rows in times.values():
        for row in rows:
            assert row["step"] >= max(row[phase] for phase in step_time.PHASES)


@pytest.mark.slow
def test_step_time_smoke(results: Path) -> None:
    found = read(results, "step_time")
    (model,) = found["models"]
    ours = {"fxshard", "fxshard-selective", "fxshard-full"}
    assert set(model["milliseconds"]) == {"plain", "fsdp1", "fsdp2", *ours}
    for side in model["milliseconds"].values():
        assert side.keys() == {"step", "forward", "backward", "optimizer", "cpu"}
        for each in side.values():
            assert 0 < each["q1"] <= each["median"] <= each["q3"] and each["count"] == 2
    (claim,) = found["claims"]
    assert claim["geometric_mean"] == pytest.approx(
        model["ratios"]["fxshard / fsdp2"]["step"], abs=1e-4
    )


@pytest.mark.slow
def test_peak_bytes_smoke(results: Path) -> None:
    (case,) = read(results, "peak_bytes")["models"]
    assert (case["world_size"], case["setting"]) == (8, "fp32")
    assert len(case["fxshard"]) == len(peak_bytes.SCHEDULES)
    for side in (case["fsdp2"], *case["fxshard"]):
        assert side["peak"] == max(side["phases"].values()) > side["held"] > 0
        # Both hold a rank's shards and states and the batch: the same bytes.
        assert side["held"] == case["fsdp2"]["held"]
    assert case["ratios"]["best"] <= case["ratios"]["default"]


@pytest.mark.slow
def test_first_step_smoke(results: Path) -> None:
    (case,) = read(results, "first_step")["cases"]
    assert case["side"] == "fxshard"
    assert case["cold"].keys() == {"first_seconds", "cpu_seconds", "second_seconds"}
    assert min(case["cold"].values()) > 0


def test_the_least_bytes_by_hand() -> None:
    # In backward mm makes the gradient, 64 bytes, of the input and the output's gradient, 32 each;
    # the output is the caller's, 32, and half of the weight stays, 32.
    plan = fxshard.plan(nn.Linear(4, 4, bias=False), (torch.ones(2, 4),), world_size=2)
    assert limit.least_bytes(plan) == 64 + 3 * 32 + 32
    assert plan.memory.peak_bytes == 64 + 3 * 32 + 2 * 32  # and the shard that is received


@pytest.mark.slow
def test_limit_smoke(results: Path) -> None:
    (row,) = read(results, "limit")["models"]
    assert sum(row["waterfall"].values()) == pytest.approx(
        row["milliseconds"]["step"]["median"], abs=0.1
    )
    assert row["bytes"]["collectives"] > 0
    assert row["ratios"]["peak"] >= 1 and row["ratios"]["step"] > 0


@pytest.mark.slow
def test_overhead_smoke(results: Path) -> None:
    found = read(results, "overhead")
    assert [row["layers"] for row in found["planning"]] == [1, 2]
    assert found["planning"][0]["nodes"] < found["planning"][1]["nodes"]
    ran = found["running"]
    assert 0 < ran["views"] < ran["operators"]
    assert set(ran["microseconds_per_operator"]) == {"fxshard", "bare operators", "eager", "fsdp2"}


@pytest.mark.slow
def test_passes_smoke(results: Path) -> None:
    default, without = read(results, "passes")["rows"]
    assert default["options"] == "default"
    # Three layers and a root, gathered in forward and in backward, reduced once.
    assert default["collectives"] == without["collectives"] == 3 * 4
    assert without["peak_bytes"] < default["peak_bytes"]
    assert without["exposed_ms"] > default["exposed_ms"]


@pytest.mark.slow
def test_chunk_loss_smoke(results: Path) -> None:
    found = read(results, "chunk_loss")
    full, chosen, *_ = found["peaks"]
    assert (full["chunk_loss"], chosen["chunk_loss"]) == (False, True)
    assert chosen["peak_bytes"] < full["peak_bytes"] and chosen["nodes"] > full["nodes"]
    assert [row["chunk_loss"] for row in found["times"]] == [False, True, 256]


@pytest.mark.slow
def test_compile_step_smoke(tmp_path: Path) -> None:
    """On two real ranks, whose losses it compares."""
    assert compile_step.main(["--smoke", "--out", str(tmp_path / "compile_step.json")]) == 0
    found = read(tmp_path, "compile_step")
    assert [row["max_norm"] for row in found["steps"]] == [1.0, None]
    assert all(row["step / loop"] > 0 and row["step"]["count"] == 3 for row in found["steps"])
    kept, recomputed = found["peaks"]
    assert recomputed["step"] <= kept["step"] <= kept["loop"]


@pytest.mark.slow
def test_offload_activations_smoke(results: Path) -> None:
    found = read(results, "offload_activations")["rows"]
    for without, _, layers in (found[i : i + 3] for i in range(0, 9, 3)):
        left = without["between_bytes"] - layers["between_bytes"]
        assert left == layers["host_peak_bytes"] > without["host_peak_bytes"] == 0


@pytest.mark.slow
def test_front_smoke(tmp_path: Path) -> None:
    assert front.main(["--smoke", "--out", str(tmp_path / "front.json")]) == 0
    found = read(tmp_path, "front")
    (model,) = found["models"]
    assert len(model["beside"]) == sum(not each["ours"] for each in model["points"]) == 3
    saved, less, none = (p["bytes"] for p in model["points"] if not p["ours"])
    assert saved > less > none > 0
    assert front.page(found).count("\n| ") == 1 + 3


@pytest.mark.slow
def test_joint_choice_smoke(results: Path) -> None:
    for row in read(results, "joint_choice")["rows"]:
        for chosen in filter(None, (row["joint"], row["recompute_only"])):
            assert chosen["saved_bytes"] <= row["budget_bytes"]


@pytest.mark.slow
def test_hardware_choice_smoke(results: Path) -> None:
    for row in read(results, "hardware_choice")["rows"]:
        assert row["step_ms"] <= row["step_ms_as_for_other"]


@pytest.mark.slow
def test_scale_smoke(results: Path) -> None:
    found = read(results, "scale")
    assert [row["units"] for row in found["by_nodes"]] == [2, 3]
    assert [row["units"] for row in found["by_units"]] == [3, 5]
    assert found["by_units"][0]["parameters"] == found["by_units"][1]["parameters"] == 4 * 6
    for row in (*found["by_nodes"], *found["by_units"]):
        stages = row["cpu_seconds"]
        assert {"pass checkpoint", "check freed", "record optimizer", "liveness"} <= stages.keys()
        whole = 1e6 * sum(stages.values()) / row["nodes"]
        assert row["microseconds_per_node"]["all"] == pytest.approx(whole, rel=0.01)


@pytest.mark.slow
def test_a_step_beside_tensor_parallelism_is_measured_on_four_ranks(tmp_path: Path) -> None:
    out = tmp_path / "mesh.json"
    assert mesh_step_time.main(["--models", "titan", "--steps", "1", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["models"]
    assert row["losses"]["fxshard"] == pytest.approx(row["losses"]["fsdp2"], rel=1e-6)
    assert min(row["peaks"].values()) > 0 and {*row["ratios"]} == {"step", "peak"}


@pytest.mark.slow
def test_plan_405b_smoke(results: Path) -> None:
    ours, theirs = read(results, "plan_405b")["sides"]
    assert ours["parameters"] == theirs["parameters"]
    for side in (ours, theirs):
        assert sum(side["by_category"].values()) == side["peak_bytes"] > 0
    # Shards and AdamW's states of the same parameters: the same bytes on both sides.
    kinds = ("Sharded Param",)
    assert [ours["by_category"][k] for k in kinds] == [theirs["by_category"][k] for k in kinds]
    assert ours["modules"] > theirs["modules"]


@pytest.mark.slow
def test_the_page_has_every_script_and_names_what_is_missing(results: Path, tmp_path: Path) -> None:
    text = page.page(results)
    for title, script, _ in page.SECTIONS:
        assert f"\n## {title}\n" in text
        assert f"python -m {script.__name__}" in text
    assert "No result yet" not in text
    assert page.page(tmp_path).count("No result yet: run `python -m benchmarks.") == len(
        page.SECTIONS
    )


def test_the_page_and_the_tables_beside_it_are_up_to_date(tmp_path: Path) -> None:
    """`python -m benchmarks.page` writes them from what is recorded; the page has one table."""
    text = page.PAGE.read_text()
    assert text == page.page(page.RESULTS)
    assert text.count("\n|--") == 1 and len(text.splitlines()) <= 240
    tables = page.tables(page.RESULTS)
    assert {path.stem for path in page.TABLES.glob("*.csv")} == tables.keys()
    for name, rows in tables.items():
        figures.write_csv(tmp_path / name, rows)
        assert (tmp_path / name).read_text() == (page.TABLES / f"{name}.csv").read_text()
        assert f"](benchmarks/{name}.csv)" in text
