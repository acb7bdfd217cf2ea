"""Names that modules have in pages, files and source: they are text there, and nothing else."""

import csv
import html.parser
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import UnitError
from fxshard.ir import splitting
from fxshard.memory.views.plots import PeakCurve, plot_curves

ODD = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "/etc/x",
    "%{customdata[0]}$DATA'\"`{}\\",
    "=1+1,a;b",
    "[red]é→[/]",
)


class Odd(nn.Module):
    def __init__(self, names: tuple[str, ...] = ODD) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x).relu()
        return x.sum()


@pytest.fixture(scope="module")
def plan() -> fxshard.Plan:
    return fxshard.plan(Odd(), (torch.ones(2, 4),), world_size=2, units=[nn.Linear])


class Elements(html.parser.HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)


def test_a_page_holds_names_as_data(plan: fxshard.Plan, tmp_path: Path) -> None:
    plan.memory.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    found = Elements()
    found.feed(text)
    assert found.tags.count("script") == 3 and "img" not in found.tags
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert "<" not in data  # "<!--<script" hides the end of a script
    assert set(ODD) <= set(json.loads(data)["strings"])


def test_json_and_csv_hold_names_as_they_are(plan: fxshard.Plan, tmp_path: Path) -> None:
    memory = plan.memory
    told = json.loads(json.dumps(memory.to_dict()))
    assert set(ODD) <= {row["module"] for row in told["steady_step"]["rows"]}
    rows = list(csv.DictReader(io.StringIO(memory.to_csv())))
    assert set(ODD) <= {row["module"] for row in rows}
    memory.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert set(ODD) <= {event.get("args", {}).get("module") for event in events}
    memory.to_memory_viz(tmp_path / "snapshot.pickle")
    memory.table(), memory.explain_peak(5, what_ifs=False), plan.dump(), plan.code
    assert sorted(file.name for file in tmp_path.iterdir()) == ["snapshot.pickle", "trace.json"]


def test_dumps_stay_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        """A pass with a name like a path."""

        name = "../../x"
        requires = ensures = frozenset[Any]()

        def apply(self, program: Any) -> None:
            return None

    folder = tmp_path / "a" / "b" / "dumps"
    monkeypatch.setenv("FXSHARD_DUMP_DIR", str(folder))
    named = lambda passes: [*passes, Named()]  # noqa: E731
    fxshard.plan(Odd(), (torch.ones(2, 4),), world_size=2, passes=named)
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.parent for file in written} == {folder}
    assert any(file.name.endswith("_.._.._x.after.txt") for file in written)


@pytest.mark.parametrize("name", ["a\nb", "a\r", "\x1b[31m", "\0", "\ud800", "\u2028"])
def test_names_that_cannot_be_printed_are_refused(name: str) -> None:
    x = torch.ones(2, 4)
    for model in (Odd((name,)), nn.Linear(4, 4), nn.Linear(4, 4)):
        if isinstance(model, nn.Linear):
            model.register_buffer(name, torch.ones(1))
        with pytest.raises(UnitError, match=r"cannot be printed.*rename it"):
            fxshard.plan(model, (x,), world_size=2)
        with pytest.raises(UnitError, match=r"cannot be printed.*rename it"):
            fxshard.compile(model, args=(x,), world_size=1)


def test_a_name_is_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is executed does not rest on names having been refused."""
    monkeypatch.setattr(splitting, "check_printable", lambda model: None)
    touched = tmp_path / "touched"
    name = f"a\n    open({str(touched)!r}, 'w')\n    #".replace(".", "_")
    model = Odd((name,))
    plan = fxshard.plan(model, (torch.ones(2, 4),), world_size=1, units=[nn.Linear])
    assert "open(" in plan.code
    for line in plan.code.splitlines():
        assert "open(" not in line.partition("#")[0]
    fxshard.compile(model, world_size=1, units=[nn.Linear])(torch.ones(2, 4)).backward()
    assert not list(tmp_path.iterdir())


def test_names_of_sizes_are_no_formulas_in_plots(tmp_path: Path) -> None:
    curves = [PeakCurve(r"$\frac", (1, 2), (3, 4), r"$x_{")]
    plot_curves(tmp_path / "curves.png", curves)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
