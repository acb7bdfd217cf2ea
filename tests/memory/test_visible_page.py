"""Memory_viz, differences, the page."""

import contextlib
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, Route, TimeoutError, sync_playwright
from torch import Tensor, nn
from torch.cuda import _memory_viz

import fxshard
from fxshard.errors import ConfigError
from fxshard.memory.category import CATEGORIES
from fxshard.memory.report import MemoryReport
from fxshard.memory.views import diff as differences
from fxshard.memory.views import html, memory_viz
from tests import browser as chromium
from tests.memory.visible_cases import PEAKS, Block, Shared, report

# -- memory_viz ------------------------------------------------------------------------------------


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


# -- differences -----------------------------------------------------------------------------------


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


# -- the page --------------------------------------------------------------------------------------


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

    Plotly puts a hover off while it is busy: on a slow machine, until after the mouse has left.
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


@pytest.mark.parametrize("name", ["offload", "llama"])
@pytest.mark.sample(1)
def test_page_in_chromium(browse: Any, name: str, tmp_path: Path) -> None:
    memory = report(name)
    ledger = memory.ledger()
    page = browse(memory, tmp_path)

    # It renders: an area per category, the total, bars of gathers and reduces, the phases.
    areas = page.locator("#chart .scatterlayer .trace").count()
    used = sum(bool(ledger.bytes[:, i].any()) for i in range(len(CATEGORIES)))
    assert areas == used + 2 + (name == "offload")  # the total, the mark of the peak, the CPU
    assert page.locator("#bars .barlayer .point").count() >= 2 * len(memory.units)
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
    for tick in range(0, len(memory.ledger().totals), len(memory.ledger().totals) // 4):
        hovered(page, tick)
        page.mouse.click(**at_tick(page, tick))
    bars = page.locator("#bars .barlayer .point")
    for bar in range(bars.count()):
        bars.nth(bar).hover(force=True)
        page.wait_for_selector("#bars .hoverlayer .hovertext")
    assert page.locator("b:text-is('$DATA')").count() == page.locator("img").count() == 0
    assert page.evaluate("window.ran") is None
