"""What a report shows: text, JSON, CSV, the HTML page, Perfetto, memory_viz, and differences.

That the figures are right is for tests/memory/test_memory.py; here, that each view says them:
against counts by hand, against the sums that they must keep, and against the programs that open
them: Chromium, torch's own `torch.cuda._memory_viz`, a JSON Schema validator.
"""

import contextlib
import csv
import functools
import io
import itertools
import json
import pickle
import pickletools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from playwright.sync_api import Page, Route, TimeoutError, sync_playwright
from torch import Tensor, nn
from torch.cuda import _memory_viz
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard.errors import ConfigError
from fxshard.memory.category import CATEGORIES
from fxshard.memory.report import MemoryReport
from fxshard.memory.views import diff as differences
from fxshard.memory.views import html, memory_viz
from tests import browser as chromium
from tests.zoo import MODELS

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SCHEMA = json.loads(
    (Path(fxshard.__file__).parent / "memory" / "views" / "report.schema.json").read_text("utf-8")
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Shared(nn.Module):
    """Calls its block twice; f32 (batch, 16) -> a number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.tanh(self.block(self.stem(x)))).mean()


class Hand(nn.Module):
    """One matrix multiplication: small enough to count by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight.t()).sum()


@functools.cache
def report(name: str) -> MemoryReport:
    """Reports that several tests read: none of them changes one."""
    if name == "hand":
        return fxshard.plan(Hand(), (torch.ones(2, 4),), world_size=2).memory
    if name == "frozen":  # no backward: its values die when the step ends
        x = torch.ones(4, 16)
        return fxshard.plan(Shared().requires_grad_(False), (x,), world_size=2).memory
    if name == "shared":
        options: dict[str, Any] = {"world_size": 2, "optimizer": adamw, "micro_batches": 2}
        return fxshard.plan(Shared(), (torch.ones(4, 16),), **options).memory
    case = MODELS["llama"]
    torch.manual_seed(0)
    # "llama" has a buffer per parameter; in "offload" they are packed.
    options = {
        "llama": {"pack_bytes": 0},
        "offload": {"offload": CPUOffloadPolicy(), "mixed_precision": BF16},
    }
    args, kwargs = case.batch(0, 0)
    return fxshard.plan(
        case.build(), args, kwargs, world_size=8, units=case.units, optimizer=adamw, **options[name]
    ).memory


REPORTS = ("hand", "shared", "llama", "offload", "frozen")


# -- text ---------------------------------------------------------------------------------------


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


PEAKS = tuple(s for s in differences.State if s.value in differences.PEAKS)


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


# -- JSON and CSV -------------------------------------------------------------------------------


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


# -- Perfetto -----------------------------------------------------------------------------------


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


# -- memory_viz ---------------------------------------------------------------------------------

# What MemoryViz.js reads (function unpickle in torch/utils/viz/MemoryViz.js).
OPCODES = {
    *("APPEND", "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LONG1", "LONG_BINGET", "MARK"),
    *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS"),
    *("SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


@pytest.mark.parametrize("first_step", [False, True])
@pytest.mark.parametrize("name", ["shared", "offload", "frozen"])
def test_memory_viz_read_back(name: str, first_step: bool, tmp_path: Path) -> None:
    memory = report(name)
    memory.to_memory_viz(tmp_path / "snapshot.pickle", first_step=first_step)
    data = (tmp_path / "snapshot.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= OPCODES
    snapshot = pickle.loads(data)
    peaks = []
    for device, trace in enumerate(snapshot["device_traces"]):
        alive: dict[int, int] = {}
        most = 0
        for event in trace:
            if event["action"] == "alloc":
                begin, end = event["addr"], event["addr"] + event["size"]
                assert event["addr"] not in alive and event["size"] > 0 and event["frames"]
                if most < 50_000:  # no two share an address; enough of them
                    assert all(a + s <= begin or end <= a for a, s in alive.items())
                alive[event["addr"]] = event["size"]
            elif event["action"] == "free_completed":
                assert alive.pop(event["addr"]) == event["size"]
            most = max(most, sum(alive.values()))
        peaks.append(most)
        (segment,) = [each for each in snapshot["segments"] if each["device"] == device]
        blocks = [b for b in segment["blocks"] if b["state"] == "active_allocated"]
        assert {b["address"]: b["size"] for b in blocks} == alive
    want = [memory.first_step_peak_bytes if first_step else memory.peak_bytes]
    if name == "offload":
        host = memory.ledger(first_step=first_step).bytes[:, len(CATEGORIES) :].sum(1)
        want.append(int(host.max()))
    assert peaks == want


def test_torchs_own_tool_takes_the_snapshot() -> None:
    memory = report("llama")
    snapshot = memory_viz.snapshot(memory)
    held = memory.phases()[-1].end_bytes
    blocks = _memory_viz.memory(snapshot, format_flamegraph=str).splitlines()
    allocated = [line for line in blocks if "active_allocated" in line]
    assert sum(int(line.rpartition(" ")[2]) for line in allocated) == held
    assert any("lm_head.weight" in line for line in allocated)
    summary = _memory_viz.segsum(snapshot)  # it checks its own sums
    assert f"total_allocated: {_memory_viz.Bytes(held)}" in summary
    assert "free completed for" in _memory_viz.trace(snapshot)
    page = _memory_viz.trace_plot(snapshot)
    assert "Active Memory Timeline" in page
    # An allocation that a gather makes and that becomes a parameter is one allocation.
    events = snapshot["device_traces"][0]
    frames = [event["frames"] for event in events if event["action"] == "alloc"]
    assert any(f[0]["filename"] == "All Gather -> Unsharded Param" for f in frames)
    assert any(each["filename"].endswith("modeling_llama.py") for f in frames for each in f)
    # MemoryViz.js fails where there are categories, but none is "unknown".
    assert "unknown" in {event["category"] for event in events}


# -- differences --------------------------------------------------------------------------------


def test_a_report_does_not_differ_from_itself() -> None:
    found = report("llama").diff(report("llama"))
    assert found.peak_difference == 0 and not found.only_different().rows
    assert "No module has another peak." in found.table()


def test_diff_of_settings_and_of_models() -> None:
    class Deeper(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.extra = Block()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.extra(x))

    one, other = report("shared"), None
    x = torch.ones(4, 16)
    other = fxshard.plan(Deeper(), (x,), world_size=2, strategy="shard_grad_op").memory
    found = one.diff(other)
    assert found.peak_difference == other.peak_bytes - one.peak_bytes
    rows = {
        (r.step, r.name, r.state, r.category, r.call, r.micro_batch): r
        for r in found.rows
        if r.kind == "module"
    }
    missing = rows["steady", "extra", "Peak Forward", "total", 0, 0]
    assert missing.before is None
    assert missing.after == sum(other.cells()["extra", PEAKS[0]].values())
    gone = rows["steady", "block", "Peak Forward", "total", 1, 1]  # the second micro-batch
    assert gone.after is None and gone.difference == -(gone.before or 0) < 0
    for key, total in rows.items():
        if key[3] == "total":
            parts = [rows.get((*key[:3], c.value, *key[4:])) for c in CATEGORIES]
            assert total.difference == sum(p.difference for p in parts if p is not None)
    phases = {(r.name, r.micro_batch) for r in found.rows if r.kind == "phase"}
    assert {("forward", 0), ("forward", 1), ("optimizer", -1)} <= phases
    for depth in (None, 1):
        table = found.table(depth, units="KiB")
        assert max(map(len, table.splitlines())) <= 100 and "extra" in table
    assert "extra.linear" not in found.table(1)
    assert "optimizer" in found.table(only_different=False)


def test_diff_refuses_other_schemas() -> None:
    told = report("hand").to_dict()
    with pytest.raises(ConfigError, match=r"'fxshard.memory/1': expected 'fxshard.memory/2'"):
        differences.diff(told, {**told, "schema": "fxshard.memory/1"})


# -- the page -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browse() -> Iterator[Any]:
    """Opens a report in Chromium; afterwards, nothing was fetched and nothing complained."""
    said: list[str] = []
    asked: list[str] = []

    def route(route: Route) -> None:
        if route.request.url.startswith(("file:", "data:")):
            route.continue_()
        else:
            asked.append(route.request.url)
            route.abort()

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=chromium.executable(), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1500, "height": 1200})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.set_default_timeout(120_000)  # ms; a page of three libraries on a busy machine
        page.route("**/*", route)

        def opened(memory: MemoryReport, folder: Path, **options: Any) -> Page:
            memory.to_html(folder / "page.html", **options)
            page.goto((folder / "page.html").as_uri())
            page.wait_for_selector("#chart[data-ready]")
            return page

        yield opened
        browser.close()
    assert (said, asked) == ([], [])


def at_tick(page: Page, tick: int) -> dict[str, float]:
    """Where on the screen a tick of the timeline is."""
    return page.evaluate(
        """tick => {
            const chart = document.getElementById("chart"), box = chart.getBoundingClientRect();
            const { xaxis, yaxis } = chart._fullLayout;
            return { x: box.left + xaxis._offset + xaxis.d2p(tick),
                     y: box.top + yaxis._offset + yaxis._length * 0.7 };
        }""",
        tick,
    )


def leave(page: Page) -> None:
    """Move the mouse away from the chart until its hover text is gone.

    Plotly puts a hover off while it is busy: on a slow machine, until behind the mouse has left.
    """
    for _ in range(60):
        page.mouse.move(0, 0)
        with contextlib.suppress(TimeoutError):
            gone = "document.querySelector('#chart .hovertext') === null"
            return page.wait_for_function(gone, timeout=2_000) and None
        page.mouse.move(**at_tick(page, 0))
    raise AssertionError("the hover text stays")


def hovered(page: Page, tick: int) -> tuple[int, str]:
    """Hover near a tick; the tick that the page took, and what it says."""
    page.evaluate("scrollTo(0, 0)")  # a click may have scrolled the chart to where the mouse goes
    leave(page)
    page.evaluate(
        """() => {
            window.hovered = null;
            document.getElementById("chart")
                .on("plotly_hover", e => { window.hovered = e.points[0].x; });
        }"""
    )
    page.mouse.move(**at_tick(page, tick))
    page.wait_for_function("window.hovered !== null")
    return int(page.evaluate("window.hovered")), page.text_content("#chart .hoverlayer") or ""


def listed(page: Page) -> tuple[int, list[int]]:
    """The tick whose things are listed, and their bytes."""
    page.wait_for_selector("#alive-list[data-tick]")  # it is there when the chart shows it, too
    tick = page.get_attribute("#alive-list", "data-tick")
    things = page.eval_on_selector_all("#alive-list .thing", "all => all.map(e => e.dataset.bytes)")
    assert tick is not None
    return int(tick), [int(size) for size in things]


@pytest.mark.parametrize("name", ["llama", "offload"])
def test_page_in_chromium(browse: Any, name: str, tmp_path: Path) -> None:
    memory = report(name)
    ledger = memory.ledger()
    page = browse(memory, tmp_path)

    # It renders: an area per category, the total, bars of gathers and reduces, the phases.
    areas = page.locator("#chart .scatterlayer .trace").count()
    used = sum(bool(ledger.bytes[:, i].any()) for i in range(len(CATEGORIES)))
    assert areas == used + 2 + (name == "offload")  # the total, the mark of the peak, the CPU
    assert page.locator("#bars .barlayer .point").count() >= 2 * len(memory.program.units)
    labels = page.text_content("#bars .ytick >> nth=0") or ""
    assert "All Gather" in labels
    titles = page.locator("#chart .annotation").all_text_contents()
    assert titles[:3] == ["forward", "backward", "optimizer"]

    # At first, the things alive at the peak are listed.
    tick, things = listed(page)
    assert tick == int(ledger.totals.argmax()) and sum(things) == memory.peak_bytes
    assert f"{memory.peak_bytes:,} bytes" in (page.text_content("body") or "")

    # Hover names the node and the module, and how many bytes.
    for wanted in (len(ledger.totals) // 5, len(ledger.totals) // 2):
        tick, text = hovered(page, wanted)
        moment = ledger.moments[tick // 2]
        assert moment.node in text and (moment.module or "(root)") in text
        assert f"{int(ledger.totals[tick]):,} bytes" in text

    # A click lists what is alive there.
    page.mouse.click(**at_tick(page, len(ledger.totals) // 2))
    clicked, things = listed(page)
    assert (clicked, sum(things)) == (tick, int(ledger.totals[tick]))
    page.click("#to-peak")
    assert sum(listed(page)[1]) == memory.peak_bytes

    # Bars say what they are, and a click on one lists what is alive where it begins.
    longest, begin = page.evaluate(
        """() => {
            const { x, base } = document.getElementById("bars").data[0];
            const longest = x.indexOf(Math.max(...x));
            return [longest, base[longest]];
        }"""
    )
    bar = page.locator("#bars .barlayer .trace").first.locator(".point").nth(longest)
    box = bar.bounding_box()
    assert box is not None
    middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    page.mouse.move(**middle)
    page.wait_for_selector("#bars .hoverlayer .hovertext")
    assert "All Gather" in (page.text_content("#bars .hoverlayer") or "")
    page.mouse.click(**middle)
    clicked, things = listed(page)
    assert (clicked, sum(things)) == (begin, int(ledger.totals[begin]))


def column(page: Page, number: int) -> list[str]:
    cells = page.eval_on_selector_all(
        f"#modules tbody tr td:nth-child({number})", "all => all.map(e => e.textContent)"
    )
    return [str(cell) for cell in cells]


def test_module_table_sorts_and_filters(browse: Any, tmp_path: Path) -> None:
    memory = report("llama")
    page = browse(memory, tmp_path)
    cells = memory.cells()
    peaks = [sum(v.values()) for (_, state), v in cells.items() if state is PEAKS[1]]
    for wanted in (sorted(peaks, reverse=True), sorted(peaks)):
        page.click("#modules th:has-text('total')")
        assert [int(each.replace(",", "")) for each in column(page, 4)] == wanted
    assert page.get_attribute("#modules th:has-text('total')", "aria-sort") == "ascending"
    page.click("#modules th:has-text('module')")
    names = column(page, 1)
    assert names == sorted(names, key=lambda name: name.replace("(root)", ""))  # "(" is before "a"
    page.fill("#filter", "layers.1.mlp")
    assert column(page, 1) == [n for n in names if "layers.1.mlp" in n] != []
    page.fill("#filter", "")
    page.select_option("#state", "")
    assert len(column(page, 1)) == len(cells)


def test_page_of_a_step_without_backward(browse: Any, tmp_path: Path) -> None:
    page = browse(report("frozen"), tmp_path)
    assert sum(listed(page)[1]) == report("frozen").peak_bytes
    assert column(page, 2) and set(column(page, 2)) == {"Peak Forward"}


def test_page_of_calls_and_micro_batches(browse: Any, tmp_path: Path) -> None:
    page = browse(report("shared"), tmp_path, first_step=True)
    _, things = listed(page)
    assert sum(things) == report("shared").first_step_peak_bytes
    assert "block (call 2) (micro-batch 2)" in column(page, 1)
    phases = page.locator("#phases tbody tr").all_text_contents()
    outside = report("shared").lifecycle
    assert len(phases) == 2 * len(report("shared").phases()) + len(outside)
    assert outside[0].name == "init" and phases[-len(outside)].startswith("outsideinit")
    assert any("forward (2 of 2)" in phase for phase in phases)


def test_large_steps_are_thinned_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each run the moment with the most bytes; what is said of a moment stays exact."""
    memory = report("llama")
    ledger = memory.ledger()
    whole = html.contents(memory)
    assert len(whole["ticks"]) == len(ledger.totals) and "Drawn are" not in whole["note"]
    monkeypatch.setattr(html, "DRAWN", 200)
    monkeypatch.setattr(html, "NEAR", 20)
    data = html.contents(memory)
    ticks = data["ticks"]
    assert len(ticks) <= 200 and ticks == sorted(set(ticks))
    peak = int(ledger.totals.argmax())
    assert set(range(peak - 20, peak + 20)) <= set(ticks)
    assert f"{len(ticks):,} of {len(ledger.totals):,} moments" in data["note"]
    for i, tick in enumerate(ticks):
        alive = [r for r in data["ranges"] if r[5] <= tick and (r[6] < 0 or tick < r[6])]
        assert sum(r[4] for r in alive) == sum(c[i] for c in data["bytes"]) == ledger.totals[tick]
    run = -(-len(ledger.totals) // (200 - 2 * 20 - 2 * len(ledger.phases)))
    for begin in range(0, len(ledger.totals), run):
        drawn = [int(ledger.totals[t]) for t in ticks if begin <= t < begin + run]
        assert max(drawn) == int(ledger.totals[begin : begin + run].max())


def test_page_without_plotly_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fxshard\[html\]'"):
        report("hand").to_html(tmp_path / "page.html")


def test_what_a_page_quotes_cannot_break_it(browse: Any, tmp_path: Path) -> None:
    """Hovered, clicked and listed, a name is text."""
    names = ("</script><b>$DATA</b>", "<!--<script>", "<img src=x onerror=ran=1>")

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.children():
                x = layer(x)
            return x.sum()

    options: dict[str, Any] = {"world_size": 2, "units": [nn.Linear], "pack_bytes": 0}
    memory = fxshard.plan(Odd(), (torch.ones(2, 4),), **options).memory
    page = browse(memory, tmp_path)
    assert set(names) <= set(column(page, 1))
    for tick in range(0, len(memory.ledger().totals), len(memory.ledger().totals) // 8):
        hovered(page, tick)
        page.mouse.click(**at_tick(page, tick))
    bars = page.locator("#bars .barlayer .point")
    for bar in range(bars.count()):
        bars.nth(bar).hover(force=True)
        page.wait_for_selector("#bars .hoverlayer .hovertext")
    assert page.locator("b:text-is('$DATA')").count() == page.locator("img").count() == 0
    assert page.evaluate("window.ran") is None
