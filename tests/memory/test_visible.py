"""What a report shows: text, JSON, CSV, the HTML page, Perfetto, memory_viz, and differences.

That the figures are right is for tests/memory/test_memory.py; here, that each view says them:
against counts by hand, against the sums that they must keep, and against the programs that open
them: Chromium, torch's own `torch.cuda._memory_viz`, a JSON Schema validator.
"""

import csv
import io
import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import ConfigError
from fxshard.memory.category import CATEGORIES
from tests.memory.visible_cases import PEAKS, Block, report

SCHEMA = json.loads(
    (Path(fxshard.__file__).parent / "memory" / "views" / "report.schema.json").read_text("utf-8")
)
SCHEMA["$defs"]["category"] = {"enum": [category.value for category in CATEGORIES]}


REPORTS = ("hand", "shared", "llama", "offload", "frozen")


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", ["B", "MiB"])
@pytest.mark.parametrize("name", REPORTS)
def test_no_line_of_the_table_is_longer_than_asked(name: str, units: str) -> None:
    for depth in (None, 1, 3):
        text = report(name).table(depth, units)
        assert max(map(len, text.splitlines())) <= 100
    narrow = report(name).table(units=units, width=79)
    assert max(map(len, narrow.splitlines())) <= 79


def test_large_figures_and_long_names_fit_too() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_projection_with_a_long_name = nn.Linear(1_000_000, 1_000_000)

        def forward(self, x: Tensor) -> Tensor:
            return self.a_projection_with_a_long_name(x)

    with torch.device("meta"):
        model = nn.Sequential(*(Inner() for _ in range(4)))
        memory = fxshard.plan(model, (torch.ones(1000, 1_000_000),), world_size=2).memory
    lines = memory.table(units="B").splitlines()
    assert max(map(len, lines)) <= 100
    names = [line for line in lines if line.startswith("[1…2].a_projection")]
    assert names and f"{memory.peak_bytes:,}" in "".join(lines) and memory.peak_bytes > 10**13


def rows_of(table: str) -> list[tuple[str, str, list[int]]]:
    """``(module, state, figures)`` of a table in bytes."""
    found, module = [], ""
    _, _, body = table.partition("\n  ----")
    for line in body.splitlines()[1:]:
        if line.startswith("In every row"):
            break
        if line.startswith("    "):  # notes of the name above
            continue
        if line.startswith("  "):
            state = re.match(r"  ([A-Za-z -]+?)  +(?=[.\d])", line)
            assert state is not None, line
            figures = line[state.end() :].replace(",", "").split()
            found.append((module, state[1], [0 if v == "." else int(v) for v in figures]))
        else:
            module = re.split(r" \(|: total", line)[0]
    return found


@pytest.mark.parametrize("width", [100, 79, 66])
@pytest.mark.parametrize("name", ["shared", "llama"])
def test_rows_add_up_however_narrow(name: str, width: int) -> None:
    """owned, total, categories; what is the same in every row is said once, under the table."""
    table = report(name).table(units="B", width=width)
    said = re.search(r"In every row: (.*?)\(in\s+total\)", table, re.DOTALL)
    assert said is not None
    constant = sum(int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", said[1]))
    rows = rows_of(table)
    assert rows
    for _, _, (owned, total, *parts) in rows:
        assert owned <= total == constant + sum(parts)


@pytest.mark.parametrize("depth", [None, 1, 2, 3])
@pytest.mark.parametrize("name", REPORTS)
def test_owned_at_the_peak_adds_up_to_it_at_any_depth(name: str, depth: int | None) -> None:
    table = " ".join(report(name).table(depth, "B").split())
    owned = re.findall(r"owns ([\d,]+)", table)
    assert sum(int(each.replace(",", "")) for each in owned) == report(name).peak_bytes


def test_phases_are_rows_of_both_steps_and_each_micro_batch() -> None:
    lines = report("shared").table(units="B").splitlines()
    phases = ["forward (1 of 2)", "backward (1 of 2)", "forward (2 of 2)", "backward (2 of 2)"]
    for phase in (*phases, "optimizer", "zero_grad"):
        assert (
            sum(re.match(rf"(first|steady|) +{re.escape(phase)} ", x) is not None for x in lines)
            == 2
        )
    (init,) = [line for line in lines if line.startswith("init ")]
    assert f"{report('shared').lifecycle[0].peak_bytes:,}" in init.split()
    peaks = [
        int(line[26:].split()[1].replace(",", "")) for line in lines if line.startswith("steady")
    ]
    assert peaks == [report("shared").phases()[0].peak_bytes]


def test_calls_have_rows_of_their_own() -> None:
    table = report("shared").table()
    assert "\nblock (" in table and "\nblock (call 2" in table and "block.linear (call 2" in table
    forward = [x for x in rows_of(report("shared").table(units="B")) if x[0] == "block"]
    assert len([x for x in forward if x[1] == "Peak Forward"]) == 2


def test_cpu_columns_with_offload() -> None:
    table = report("offload").table()
    assert re.search(r"Temp .* CPU$", table, re.MULTILINE) and "on the CPU Sharded Param" in table
    assert "CPU" not in report("llama").table()


def test_layers_fold_when_equal_and_else_say_their_range() -> None:
    """Frozen layers between a stem and a head, on one rank: all hold the same."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 1)
            self.layers = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x).mean()

    model = Stack().requires_grad_(False)
    x = torch.ones(8, 16)
    table = fxshard.plan(model, (x,), world_size=1, strategy="no_shard").memory.table(units="B")
    assert re.search(r"^layers.0 \(one of 4 with equal rows, to layers.3", table, re.MULTILINE)
    assert "layers.1" not in table and "first of" not in table

    trained = fxshard.plan(Stack(), (x,), world_size=2).memory
    folded = trained.table(units="B")
    line = next(x for x in folded.splitlines() if x.startswith("layers.[1…2] (2): total at"))
    totals = [
        sum(trained.cells()[f"layers.{i}", state].values()) for state in PEAKS for i in (1, 2)
    ]
    low_high = [int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", line.partition(": ")[2])]
    assert low_high == [*sorted(totals[:2]), *sorted(totals[2:])]
    unfolded = trained.table(units="B", fold=False)
    assert all(f"\nlayers.{i}" in unfolded for i in range(4)) and "Before Pre-Forward" in unfolded


def test_table_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="MiB"):
        report("hand").table(units="MB")
    with pytest.raises(ConfigError, match="micro_batch=5"):
        report("hand").table(micro_batch=5)
    with pytest.raises(ConfigError, match="width=30"):
        report("llama").table(units="B", width=30)


def test_long_names_lose_their_beginning() -> None:
    model = nn.Sequential()
    inner = model
    for _ in range(9):
        inner.add_module("a_rather_long_name", nn.Sequential())
        inner = inner.a_rather_long_name
    inner.add_module("linear", nn.Linear(4, 4))
    lines = fxshard.plan(model, (torch.ones(1, 4),), world_size=2).memory.table().splitlines()
    assert max(map(len, lines)) <= 100
    assert any(x.startswith("…") and ".a_rather_long_name.linear" in x for x in lines)


# -- JSON and CSV ----------------------------------------------------------------------------------


def closed(schema: Any) -> Any:
    """The schema, refusing what it does not describe."""
    if isinstance(schema, dict):
        more = {"additionalProperties": False} if "properties" in schema else {}
        return {key: closed(value) for key, value in schema.items()} | more
    return [closed(each) for each in schema] if isinstance(schema, list) else schema


def test_json_of_a_plan_for_cuda() -> None:
    """The phases of the caching allocator: tensors <= allocated <= reserved."""
    plan = fxshard.plan(nn.Linear(4, 4), (torch.ones(2, 4),), world_size=2, device="cuda")
    told = json.loads(json.dumps(plan.memory.to_dict()))
    jsonschema.validate(told, closed(SCHEMA), jsonschema.Draft202012Validator)
    assert told["device"] == "cuda" and told["device_memory"]["phases"]
    for phase in told["device_memory"]["phases"]:
        assert phase["requested"] <= phase["allocated"] <= phase["reserved"]
    assert report("llama").to_dict()["device_memory"] is None


@pytest.mark.parametrize("name", REPORTS)
def test_json_keeps_its_schema_and_its_sums(name: str) -> None:
    told = json.loads(json.dumps(report(name).to_dict()))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(told, closed(SCHEMA), jsonschema.Draft202012Validator)
    assert sum(told["peak_by_category"].values()) == told["peak_bytes"]
    assert sum(told["peak_by_stream"].values()) == told["peak_bytes"]
    assert sum(each["bytes"] for each in told["alive_at_peak"]) == told["peak_bytes"]
    for step in (told["first_step"], told["steady_step"]):
        assert max(phase["peak_bytes"] for phase in step["phases"]) == step["peak_bytes"]
        for row in step["rows"]:
            assert sum(row["by_category"].values()) == row["bytes"]
            assert sum(row["owned"].values()) == row["owned_bytes"] <= row["bytes"]
        for phase in step["phases"]:
            for state in ("start", "peak", "end"):
                assert sum(phase[state].values()) == phase[f"{state}_bytes"]
    if name == "frozen":  # the caller has not yet dropped the output
        return
    # What the first step leaves is what the steady step begins with, and leaves.
    assert told["first_step"]["phases"][-1]["end"] == told["steady_step"]["phases"][0]["start"]
    assert told["steady_step"]["phases"][-1]["end"] == told["steady_step"]["phases"][0]["start"]


def test_json_by_hand() -> None:
    """f32[5,4] over 2 ranks: shards of 3 rows = 48 bytes, gathered 96; the batch f32[2,4] = 32."""
    told = report("hand").to_dict()
    rows = {(r["module"], r["state"]): r for r in told["steady_step"]["rows"]}
    assert rows["", "Before Pre-Forward"]["by_category"] == {"Sharded Param": 48, "Inputs": 32}
    forward = rows["", "Peak Forward"]
    assert forward["by_category"] == {
        "Sharded Param": 48,
        "Inputs": 32,
        "Unsharded Param": 96,
        "Activation": 40,  # what mm writes, f32[2,5]
    }
    assert forward["owned"] == forward["by_category"]  # there is one module
    phases = {p["phase"]: p for p in told["steady_step"]["phases"]}
    assert phases["forward"]["start_bytes"] == phases["zero_grad"]["end_bytes"] == 48 + 32
    assert told["streams"][0] == "compute" and "unshard" in told["streams"]
    assert told["units"] == [{"name": "(root)", "kind": "Hand", "parameters": ["weight"]}]


def test_alive_at_the_peak_says_where_from() -> None:
    alive = report("llama").to_dict()["alive_at_peak"]
    born = [each for each in alive if each["born"]]
    assert born and all(each["op"] for each in born)
    assert {each["born"] for each in alive if each["category"] == "Sharded Param"} == {None}
    assert {each["died"] for each in alive if each["category"] == "OptState"} == {None}
    lines = [each["line"] for each in born if each["category"] == "Activation"]
    assert any("modeling_llama.py:" in line and " in forward" in line for line in lines)
    streams = {(each["category"], each["stream"]) for each in alive}
    assert ("Unsharded Param", "unshard") in streams and ("Activation", "compute") in streams
    assert {stream for category, stream in streams if category == "Activation"} == {"compute"}


@pytest.mark.parametrize("name", ["shared", "offload"])
def test_csv_has_the_rows_of_the_json(name: str) -> None:
    told = report(name).to_dict()
    read = list(csv.DictReader(io.StringIO(report(name).to_csv())))
    for step in ("first", "steady"):
        lines = [line for line in read if line["step"] == step]
        rows = [line for line in lines if line["state"] not in ("Start", "Peak", "End")]
        for line, row in zip(rows, told[f"{step}_step"]["rows"], strict=True):
            place = (line["module"], line["state"], int(line["call"]), int(line["micro_batch"]))
            assert place == (row["module"], row["state"], row["call"], row["micro_batch"])
            assert (int(line["total"]), int(line["owned total"])) == (
                row["bytes"],
                row["owned_bytes"],
            )
            for category in CATEGORIES:
                assert int(line[category.value]) == row["by_category"].get(category.value, 0)
                assert int(line[f"owned {category.value}"]) == row["owned"].get(category.value, 0)
            if name == "offload":
                assert int(line["CPU total"]) == sum(row["host"].values())
        outside = [r for r in read if r["step"] == "outside" and r["state"] == "Peak"]
        assert [int(r["total"]) for r in outside] == [p["peak_bytes"] for p in told["lifecycle"]]
        peaks = [int(line["total"]) for line in lines if line["state"] == "Peak"]
        assert peaks == [phase["peak_bytes"] for phase in told[f"{step}_step"]["phases"]]


# -- Perfetto --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_step", [False, True])
@pytest.mark.parametrize("name", ["shared", "offload", "frozen"])
def test_perfetto_read_back(name: str, first_step: bool, tmp_path: Path) -> None:
    memory = report(name)
    memory.to_perfetto(tmp_path / "trace.json", first_step=first_step)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    peak = memory.first_step_peak_bytes if first_step else memory.peak_bytes
    counters: dict[int, dict[str, int]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "C":
            counters[event["ts"]][event["name"]] = event["args"]["bytes"]
    now: dict[str, int] = {}
    totals, hosts = [], []
    for _, changed in sorted(counters.items()):
        now |= changed
        totals.append(now["total"])
        hosts.append(now.get("CPU total", 0))
        assert sum(now[category.value] for category in CATEGORIES) == now["total"]
    assert max(totals) == peak
    if not first_step:
        assert max(hosts) == memory.host_peak_bytes

    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks: dict[str, list[Any]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["pid"], event["tid"]]].append(event)
    reduces = set() if name == "frozen" else {"stream reduce"}
    assert {"phases", "stream compute", "stream unshard", *reduces} <= tracks.keys()
    for track in tracks.values():  # of one track none overlap: Perfetto would nest them
        ordered = sorted(track, key=lambda event: event["ts"])
        for one, other in itertools.pairwise(ordered):
            assert one["ts"] + one["dur"] <= other["ts"]
    gathers = [e["name"] for e in tracks["stream unshard"] if "all_gather" in e["name"]]
    assert gathers
    ends = {(e["cat"], e["id"]): e["ts"] for e in events if e["ph"] == "e"}
    begins = {(e["cat"], e["id"]): e["ts"] for e in events if e["ph"] == "b"}
    assert begins.keys() == ends.keys() and all(begins[k] < ends[k] for k in begins)
