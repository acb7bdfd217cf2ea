"""The command line, in process: what it prints, and how it ends.

One file because every command is called the same way.
"""

import dataclasses
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM  # noqa: F401, says what it misses when it is imported

import fxshard
from fxshard.cli import main, model_source
from fxshard.ir import text
from fxshard.memory.category import CATEGORIES

LLAMA = ("--hf-config", "tiny-llama", "--seq", "8", "--world-size", "2")
BLOCKS = ("--model", "tests.cli.test_cli:blocks", "--world-size", "2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Tokens(nn.Module):
    """Takes token ids, as --batch and --seq make them."""

    def __init__(self, *, peek: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.Sequential(Block(), Block(), Block())
        self.peek = peek

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layers(self.embed(ids))
        if self.peek and hidden.sum() > 0:
            hidden = -hidden
        return hidden.mean()


def blocks() -> Any:
    return nn.Sequential(Block(), Block()), (torch.ones(4, 8),), {}


def of_a_function() -> Any:
    """A model that cannot be pickled."""

    class Local(Block):
        pass

    return nn.Sequential(Local()), (torch.ones(4, 8),), {}


def tokens() -> nn.Module:
    return Tokens()


def data_dependent() -> nn.Module:
    return Tokens(peek=True)


def nothing() -> None:
    return None


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    code = main.main(argv)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "report", *LLAMA, "--depth", "1", "--memory-units", "KiB")
    assert (code, err) == (0, "")
    assert out.startswith("Peak ") and re.search(r"owned +total", out) and "in KiB" in out
    assert "\nlm_head (" in out and "\nmodel (" in out and "\nmodel.layers (" not in out
    assert max(map(len, out[out.index("Bytes of one rank") :].splitlines())) <= 100


def test_report_as_json_is_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "report", *BLOCKS, "--optimizer", "sgd", "--json")
    model, args, kwargs = blocks()
    plan = fxshard.plan(model, args, kwargs, world_size=2, optimizer=model_source.OPTIMIZERS["sgd"])
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(plan.memory.to_dict()))


def test_optimizer_and_units_matter(capsys: pytest.CaptureFixture[str]) -> None:
    def opt_state(*more: str) -> int:
        _, out, _ = run(capsys, "report", *BLOCKS, "--json", *more)
        return json.loads(out)["peak_by_category"].get("OptState", 0)

    own = opt_state("--optimizer", "tests.cli.test_cli:momentum")
    assert opt_state("--optimizer", "none") == 0 < own < opt_state()
    _, out, _ = run(capsys, "dump", *BLOCKS, "--json", "--units", "0", "--units", "1.linear")
    assert [unit["name"] for unit in json.loads(out)["units"]] == ["(root)", "0", "1.linear"]


def test_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "report", *BLOCKS, "--budget", "1GiB")[0] == 0
    code, out, err = run(capsys, "report", *BLOCKS, "--budget", "1KiB", "--json")
    assert code == 1
    assert json.loads(out)["peak_bytes"] > 1024
    assert "1.00 KiB given" in err and "Peak" in err


def test_fits_on_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU: what CUDA's allocator reserves counts, and what is outside of it."""
    spec = ("fits", *BLOCKS, "--device", "cuda")
    code, out, err = run(capsys, *spec, "--budget", "80GiB")
    assert (code, err) == (0, "") and "CUDA's allocator reserves" in out
    code, out, err = run(capsys, *spec, "--budget", "1.76GiB")  # 1.75 GiB are outside
    assert code == 1 and "finds no room" in err


def test_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    for more, has in (((), False), (("--checkpoint", "full"), True)):
        code, out, _ = run(capsys, "report", *BLOCKS, "--json", *more)
        assert code == 0 and ("Pre-Forward AC" in out) is has


@pytest.mark.parametrize("told", [(), ("1MiB",), ("*",)])
def test_offload_activations(capsys: pytest.CaptureFixture[str], told: tuple[str, ...]) -> None:
    """What a small model saves is not worth a copy, unless it is asked for."""
    code, out, err = run(capsys, "report", *BLOCKS, "--offload-activations", *told, "--json")
    assert code == 0, err
    assert (json.loads(out)["host_peak_bytes"] > 0) is bool(told)


def test_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "fits", *BLOCKS, "--budget", "1GiB")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"It fits: .* KiB needed of 1.00 GiB, .* left\.\n", out)
    code, out, err = run(capsys, "fits", *BLOCKS, "--budget", "1KiB")
    assert (code, out) == (1, "")
    assert "needed, 1.00 KiB given" in err and "alive:" in err
    # The step that needs most decides: with three micro-batches the sums of gradients lie beside.
    more = ("--micro-batches", "3", "--no-sync", "--optimizer", "none")
    assert peak_of(capsys, *more) > peak_of(capsys, "--optimizer", "none")
    budget = str(peak_of(capsys, *more))
    assert run(capsys, "fits", *BLOCKS, *more, "--budget", budget)[0] == 0
    assert run(capsys, "fits", *BLOCKS, *more, "--budget", str(int(budget) - 1))[0] == 1


def peak_of(capsys: pytest.CaptureFixture[str], *more: str) -> int:
    told = json.loads(run(capsys, "report", *BLOCKS, "--json", *more)[1])
    return max(told["peak_bytes"], told["first_step_peak_bytes"])


def test_report_writes_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {
        name: str(tmp_path / name) for name in ("json", "csv", "html", "perfetto", "memory-viz")
    }
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    code, out, err = run(capsys, "report", *BLOCKS, *options)
    assert (code, err) == (0, "") and "Bytes of one rank of 2" in out
    assert all(path in out for path in files.values())
    told = json.loads(Path(files["json"]).read_text())
    assert told["schema"] == "fxshard.memory/2" and told["peak_bytes"] > 0
    lines = Path(files["csv"]).read_text().splitlines()
    assert len(lines) == 1 + sum(
        3 * len(told[step]["phases"]) + len(told[step]["rows"])
        for step in ("first_step", "steady_step")
    ) + 3 * len(told["lifecycle"])
    assert "<!doctype html>" in Path(files["html"]).read_text()
    assert json.loads(Path(files["perfetto"]).read_text())["traceEvents"]
    assert "device_traces" in pickle.loads(Path(files["memory-viz"]).read_bytes())
    code, _, err = run(capsys, "report", *BLOCKS, "--csv", str(tmp_path / "no" / "where"))
    assert code == 2 and "No such file or directory" in err and err.count("\n") == 1


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", *BLOCKS, "--top", "3", "--no-what-ifs")
    assert (code, err) == (0, "")
    model, args, kwargs = blocks()
    plan = fxshard.plan(
        model, args, kwargs, world_size=2, optimizer=model_source.OPTIMIZERS["adamw"]
    )
    assert out == f"{plan.memory.explain_peak(3, what_ifs=False)}\n"
    assert f"{plan.memory.peak_bytes:,} bytes" in out
    _, tried, _ = run(capsys, "explain", *BLOCKS, "--top", "3")
    assert tried.startswith(out.rstrip("\n")) and len(tried) > len(out)


def test_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, other = str(tmp_path / "one.json"), str(tmp_path / "other.json")
    run(capsys, "report", *BLOCKS, "--json", one)
    run(capsys, "report", *BLOCKS, "--json", other, "--optimizer", "none")
    code, out, err = run(capsys, "diff", one, other, "--memory-units", "B")
    assert (code, err) == (0, "")
    peaks = [json.loads(Path(path).read_text())["peak_bytes"] for path in (one, other)]
    figures = (*(f"{peak:,}" for peak in peaks), f"{peaks[1] - peaks[0]:+,}")
    assert re.search(r"device +total +" + " +".join(map(re.escape, figures)), out)
    assert "OptState" in out
    _, out, _ = run(capsys, "diff", one, other, "--json")
    rows = json.loads(out)["rows"]
    assert rows and all(row["before"] != row["after"] for row in rows)
    _, out, _ = run(capsys, "diff", one, one)
    assert "No module has another peak." in out


def test_dump_folds(capsys: pytest.CaptureFixture[str]) -> None:
    _, folded, _ = run(capsys, "dump", "--model", "tests.cli.test_cli:tokens")
    _, unfolded, _ = run(capsys, "dump", "--model", "tests.cli.test_cli:tokens", "--no-fold")
    assert "x 2" in folded and "x 2" not in unfolded
    assert len(folded.splitlines()) < len(unfolded.splitlines())
    _, forward, _ = run(capsys, "dump", *BLOCKS, "--phase", "forward")
    assert "forward" in forward and "backward" not in forward


def test_dump_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "dump", *LLAMA, "--json", "--phase", "backward")
    said = json.loads(out)
    assert code == 0 and said["world_size"] == 2 and len(said["certificate"]) == 64
    rows = [row for block in said["blocks"] for row in block["rows"]]
    assert {row["phase"] for row in rows} == {"backward"}
    operations = {"pack", "unshard", "wait", "unpack", "compute", "free", "reduce"}
    assert operations == {row["operation"] for row in rows}


def test_dump_of_graph_and_code(capsys: pytest.CaptureFixture[str]) -> None:
    _, graph, _ = run(capsys, "dump", *BLOCKS, "--graph")
    assert graph.startswith("program world_size=2 units=3") and "fxshard.all_gather" in graph
    _, code, _ = run(capsys, "dump", *BLOCKS, "--code")
    compile(code, "dumped", "exec")
    assert "def forward(world, args):" in code


def test_dump_says_what_a_pass_changed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "dump", *BLOCKS, "--diff", "insert-unshard")
    assert (code, err) == (0, "")
    gathers = [line for line in out.splitlines() if "fxshard.all_gather" in line]
    assert gathers and all(line.startswith("+") for line in gathers)
    _, graph, _ = run(capsys, "dump", *BLOCKS, "--graph")
    assert len(gathers) == graph.count("fxshard.all_gather")
    code, out, err = run(capsys, "dump", *BLOCKS, "--diff", "outline-regions")
    assert out == "outline-regions changes nothing in the graph of this model.\n"
    code, out, err = run(capsys, "dump", *BLOCKS, "--diff", "nosuch")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "--diff nosuch: no such pass; there are canonicalize, assign-units, " in err


def test_passes_run_on_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def said(*argv: str) -> tuple[str, str]:
        assert main.main(argv) == 0, capsys.readouterr().err
        return capsys.readouterr()

    finished, _ = said("dump", *BLOCKS, "--text")
    assert finished.startswith("program v2 world_size=2 ") and finished.endswith("\nend\n")
    captured, _ = said("dump", *BLOCKS, "--text", "canonicalize")
    (tmp_path / "p.txt").write_text(captured)
    assert said("opt", str(tmp_path / "p.txt"))[0] == finished
    some = ("--passes", "canonicalize,assign-units,insert-unshard", "--print-after-all")
    out, err = said("opt", str(tmp_path / "p.txt"), *some, "-o", str(tmp_path / "q.txt"))
    assert not out and "fxshard.all_gather(" in (tmp_path / "q.txt").read_text()
    shown = re.findall(r"^\[fxshard\] after (.*):\nprogram world_size=2", err, re.M)
    assert shown == ["canonicalize", "assign-units", "insert-unshard"]
    rest = "insert-reduce,prefetch,reinplace,insert-free,annotate-streams,outline-regions"
    out, _ = said("opt", str(tmp_path / "q.txt"), "--passes", rest)
    assert " outlined=True" in out.split("\n")[0]


def test_passes_run_on_text_with_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As `fxshard.plan` with these options does; the model is captured without them."""
    options: fxshard.Options = {
        "max_bucket_bytes": "1KiB",
        "forward_prefetch": 0,
        "reduce_op": "sum",
        "max_inflight": 1,
    }
    (tmp_path / "p.txt").write_text(run(capsys, "dump", *BLOCKS, "--text", "canonicalize")[1])
    given = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
    code, out, _ = run(capsys, "opt", str(tmp_path / "p.txt"), *given)
    model, args, kwargs = blocks()
    plan = fxshard.plan(model, args, kwargs, world_size=2, **options)
    assert code == 0 and out == text.write(plan.program)
    assert out != run(capsys, "opt", str(tmp_path / "p.txt"))[1]


OF_A_USER = """
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Pair(NamedTuple):
    twice: Tensor
    loss: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Pair:
        return Pair(x * 2, self.linear(x).mean())


def made():
    return Model(), (torch.ones(4, 8),), {}
"""


def test_opt_imports_what_it_is_told_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class that the model returns is a user's, whose module a later process has not read."""
    module = "opt_imports_this"
    (tmp_path / f"{module}.py").write_text(OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    spec = ("--model", f"{module}:made", "--world-size", "2")
    _, written, _ = run(capsys, "dump", *spec, "--text", "assign-units")
    (tmp_path / "p.txt").write_text(written)
    monkeypatch.delitem(sys.modules, module)
    command = ["opt", str(tmp_path / "p.txt")]
    command += ["--passes", "assign-units,insert-unshard", "-o", str(tmp_path / "q.txt")]
    code, _, err = run(capsys, *command)
    assert code == 2 and f"fxshard opt --import {module}" in err and module not in sys.modules
    assert run(capsys, *command, "--import", module)[0] == 0
    assert "fxshard.all_gather" in (tmp_path / "q.txt").read_text()


def test_opt_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(("dump", *BLOCKS, "--text", "canonicalize")) == 0
    captured = capsys.readouterr().out
    for written, argv, refusal in (
        (captured, ("--passes", "no-such"), r"fxshard: --passes no-such: no such pass; there are "),
        (captured, ("--set", "strategy=no_shard"), r"fxshard: --set strategy=no_shard: expected "),
        (captured, ("--set", "max_inflight=0"), r"fxshard: max_inflight=0: expected None or "),
        (captured, ("--passes", "insert-free"), r"fxshard: pass 'insert-free' requires that "),
        (captured[: captured.index("\n", 1000)], (), r"fxshard: line \d+: the text is cut off"),
        (captured.replace("v2", "v9", 1), (), r"fxshard: line 1: the text is of version 'v9'"),
    ):
        (tmp_path / "p.txt").write_text(written)
        assert main.main(("opt", str(tmp_path / "p.txt"), *argv)) == 2
        out, err = capsys.readouterr()
        assert not out and re.match(refusal, err) and err.count("\n") == 1
    assert main.main(("opt", str(tmp_path / "none.txt"))) == 2
    assert "no text that can be read" in capsys.readouterr().err
    assert main.main(("dump", *BLOCKS, "--text", "no-such")) == 2
    assert "--text no-such: no such pass" in capsys.readouterr().err


def test_dump_with_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "dump", *BLOCKS, "--hardware", "h100")
    assert code == 0 and out.splitlines()[0].split()[-1] == "exposed"
    _, told, _ = run(capsys, "dump", *BLOCKS, "--hardware", "h100", "--json", "--no-fold")
    ((_, rows),) = (block.values() for block in json.loads(told)["blocks"])
    exposed = [seconds for row in rows for seconds in row["exposed"]]
    assert len(exposed) == len(rows) and sum(exposed) > 0
    model, args, kwargs = blocks()
    plan = fxshard.plan(
        model, args, kwargs, world_size=2, optimizer=model_source.OPTIMIZERS["adamw"]
    )
    assert sum(exposed) == pytest.approx(plan.estimate("h100").exposed_communication_seconds)
    assert out == plan.dump(hardware="h100") + "\n"
    code, _, err = run(capsys, "dump", *BLOCKS, "--hardware", "v100")
    assert code == 2 and "expected one of a100, h100, h200, b200" in err


def test_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.json")
    options = ("--hardware", "h100", "--ranks-per-node", "1", "--perfetto", trace)
    code, out, err = run(capsys, "estimate", *BLOCKS, *options)
    assert (code, err) == (0, "")
    model, args, kwargs = blocks()
    plan = fxshard.plan(
        model, args, kwargs, world_size=2, optimizer=model_source.OPTIMIZERS["adamw"]
    )
    found = plan.estimate("h100", ranks_per_node=1)
    assert out == f"{found.table()}\n\n{found.summary()}\n\nTrace for ui.perfetto.dev: {trace}\n"
    events = json.loads(Path(trace).read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "C"}
    code, _, err = run(capsys, "estimate", *BLOCKS, "--hardware", "nosuch")
    assert code == 2 and "hardware='nosuch'" in err
    nowhere = str(tmp_path / "no" / "where")
    code, _, err = run(capsys, "estimate", *BLOCKS, "--hardware", "b200", "--perfetto", nowhere)
    assert code == 2 and "No such file or directory" in err and err.count("\n") == 1


def test_validate(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "validate", *BLOCKS, "--ranks", "fake")
    assert code == 0
    assert "largest difference 0 bytes" in out and "Peak Forward" in out
    assert "After Pre-Forward" not in out
    _, everything, _ = run(capsys, "validate", *LLAMA, "--ranks", "fake", "--all", "--steps", "1")
    assert "After Pre-Forward" in everything and "model.layers.1.mlp.up_proj" in everything


def test_validate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "validate", *BLOCKS, "--ranks", "fake", "--json")
    said = json.loads(out)
    assert code == 0 and said["max_abs_difference"] == 0
    assert said["static_peak_bytes"] == said["measured_peak_bytes"] > 0
    assert {cell["category"] for cell in said["cells"]} == {c.value for c in CATEGORIES}


def test_validate_fails_on_a_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = true_validate(*args, **kwargs)
        odd = next(i for i, c in enumerate(result.cells) if c.state == "After Post-Backward")
        result.cells[odd] = dataclasses.replace(result.cells[odd], static=123_456_789)
        return result

    true_validate = fxshard.validate
    monkeypatch.setattr(fxshard, "validate", wrong)
    code, out, _ = run(capsys, "validate", *BLOCKS, "--ranks", "fake")
    assert code == 1
    assert "123,456,789" in out  # a cell that differs is shown, wherever it is


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("report", "--model", "nosuch:fn"), "No module named 'nosuch'"),
        (("report", "--model", "os:nosuch"), "no attribute 'nosuch'"),
        (("report", "--model", "os"), "pkg.mod:fn"),
        (("report", "--model", "os:sep"), "not callable"),
        (("report", "--model", "tests.cli.test_cli:nothing"), "returned NoneType"),
        (("report", "--model", "tests.cli.test_cli:data_dependent"), "test_cli.py"),  # CaptureError
        (("report", "--hf-config", "nosuch"), "tiny-llama"),
        (("report", *BLOCKS, "--units", "nosuch"), "'nosuch' matches no module"),  # UnitError
        (("report", *BLOCKS, "--optimizer", "adam"), "--optimizer adam"),
        (("report", *BLOCKS, "--budget", "lots"), "'lots' is no size"),
        (("diff", "nosuch.json", "nosuch.json"), "nosuch.json: no report that can be read"),
        (("diff", "pyproject.toml", "pyproject.toml"), "pyproject.toml: no report"),
        (("fits", *BLOCKS, "--budget", "lots"), "'lots' is no size"),
    ],
)
def test_usage_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("report",),
        ("report", *LLAMA, *BLOCKS),
        ("report", *BLOCKS, "--world-size", "0"),
        ("fits", *BLOCKS),
        ("diff", "one.json"),
    ],
)
def test_argparse_refuses(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main.main(argv)
    assert exit_.value.code == 2
    assert "usage: " in capsys.readouterr().err


ON_TOKENS = ("--model", "tests.cli.test_cli:tokens", "--world-size", "2")

# What an option would change nothing beside, or twice: refused before anything is planned.
IDLE = [
    (("report", *BLOCKS, "--gradient-checkpointing"), "--gradient-checkpointing with --model"),
    (("fits", *ON_TOKENS, "--gradient-checkpointing", "--budget", "1GiB"), "use --checkpoint"),
    (("report", *BLOCKS, "--batch", "2"), "--batch with --model tests.cli.test_cli:blocks, which"),
    (("explain", *BLOCKS, "--seq", "2"), "--seq with --model tests.cli.test_cli:blocks, which"),
    (("solve", "max_batch", *BLOCKS, "--seq", "2", "--budget", "1GiB"), "--seq with --model"),
    (("validate", *BLOCKS, "--batch", "1"), "--batch with --model"),
    (("tune", *ON_TOKENS, "--hardware", "h100", "--batch", "2", "--batches", "4"), "--batch with"),
    (("report", *BLOCKS, "--json", "--depth", "1"), "--depth with --json"),
    (("report", *BLOCKS, "--json", "--memory-units", "B"), "--memory-units with --json"),
    (("diff", "a", "b", "--json", "--depth", "1"), "--depth with --json"),
    (("diff", "a", "b", "--json", "--memory-units", "MiB"), "--memory-units with --json"),
    (("diff", "a", "b", "--json", "--all"), "--all with --json"),
    (("dump", *BLOCKS, "--graph", "--phase", "forward"), "--phase with --graph"),
    (("dump", *BLOCKS, "--code", "--no-fold"), "--no-fold with --code"),
    *((("fsdp2", *BLOCKS, *more), f"{more[0]} with fsdp2: torch's FSDP2 has no such option")
      for more in (("--hardware", "h100"), ("--strategy", "no_shard"), ("--memory-budget", "1GiB"),
                   ("--chunk-loss",), ("--offload-activations",), ("--data-sizes", "5"))),
    (("solve", "max_seq", *ON_TOKENS, "--at", "batch=2", "--at", "batch=4", "--budget", "1GiB"),
     "--at names batch twice"),
    (("solve", "max_b", *BLOCKS, "--dynamic", "b=input:0", "--dynamic", "b=input:1", "--budget",
      "1GiB"), "--dynamic names b twice"),
    (("report", "--model", "torch.nn:Linear"), "--model torch.nn:Linear: it is called as Linear()"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), IDLE, ids=[" ".join(argv) for argv, _ in IDLE])
def test_an_option_is_obeyed_or_refused(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_batch_and_seq_of_a_model_that_takes_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """With --model too, where fn() returns no call: the batch is made from them."""
    peaks = [
        json.loads(run(capsys, "report", *ON_TOKENS, "--json", *more)[1])["peak_bytes"]
        for more in ((), ("--batch", "1"), ("--seq", "128"), ("--batch", "3"), ("--seq", "256"))
    ]
    assert peaks[0] == peaks[1] == peaks[2] < min(peaks[3:])


def test_config_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**model_source.PRESETS["tiny-llama"], "num_hidden_layers": 3}))
    _, out, _ = run(capsys, "dump", "--hf-config", str(file), "--seq", "8", "--json")
    assert len(json.loads(out)["units"]) == 4
    file.write_text('{"model_type": "nosuch"}')
    code, _, err = run(capsys, "dump", "--hf-config", str(file))
    assert code == 2 and "nosuch" in err and len(err) < 300


def test_python_m_fxshard() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fxshard", "--help"], capture_output=True, text=True, check=True
    )
    commands = ("report", "explain", "fits", "diff", "dump", "estimate", "validate")
    assert all(command in done.stdout for command in commands)


def test_what_there_is_is_told_without_torch() -> None:
    """Importing it takes seconds."""
    told = "import sys; from fxshard.cli.main import main\ntry: main(['--help'])\n"
    told += "except SystemExit: pass\n"
    told += "assert 'torch' not in sys.modules and 'Plan' in dir(sys.modules['fxshard'])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert "validate" in done.stdout


def test_validate_starts_ranks_where_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "validate", *BLOCKS, "--optimizer", "sgd")
    assert (code, err) == (0, "")
    assert "largest difference 0 bytes" in out and "on 2 gloo ranks" in out
    assert "bitwise equal to eager PyTorch's" in out


def test_validate_says_why_it_starts_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "tests.cli.test_cli:of_a_function", "--world-size", "2")
    code, out, err = run(capsys, "validate", *model)
    assert code == 0 and "largest difference 0 bytes" in out and "gloo" not in out
    assert err.startswith("fxshard: not on real ranks: the model cannot be sent")
    code, _, err = run(capsys, "validate", *model, "--ranks", "processes")
    assert code == 2 and "the model cannot be sent" in err
    code, out, _ = run(capsys, "validate", *BLOCKS[:2], "--world-size", "9")
    assert code == 0 and "gloo" not in out


def test_strategies_and_policies_matter(capsys: pytest.CaptureFixture[str]) -> None:
    few = (*ON_TOKENS, "--batch", "1", "--seq", "2")  # parameters are most of the peak

    def report(*more: str, model: tuple[str, ...] = few) -> dict[str, Any]:
        code, out, err = run(capsys, "report", *model, "--json", *more)
        assert (code, err) == (0, "")
        told: dict[str, Any] = json.loads(out)
        return told

    def root(told: dict[str, Any], state: str) -> dict[str, int]:
        rows = told["steady_step"]["rows"]
        (row,) = [r for r in rows if (r["module"], r["state"]) == ("", state)]
        return dict(row["by_category"])

    plain, after = report(), "After Post-Forward"
    half = root(report("--bf16"), "Peak Forward")
    gathered = root(plain, "Peak Forward")["Unsharded Param"]
    assert 0 < half["Unsharded Param"] <= gathered / 2
    kept = root(report("--strategy", "shard_grad_op"), after)
    assert kept["Unsharded Param"] > 0
    assert root(report("--reshard-after-forward", "no"), after) == kept
    assert report("--offload")["host_peak_bytes"] > 0 == plain["host_peak_bytes"]
    every = root(report(model=LLAMA), after)["Activation"]
    saved = root(report("--gradient-checkpointing", model=LLAMA), after)["Activation"]
    assert saved < every / 2


def test_validate_of_micro_batches_on_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--strategy", "hybrid_shard", "--world-size", "2x2", "--bf16")
    code, out, _ = run(
        capsys, "validate", "--model", "tests.cli.test_cli:blocks", *grid, "--micro-batches", "2",
        "--no-sync", "--ranks", "fake",
    )  # fmt: skip
    assert code == 0 and "largest difference 0 bytes" in out
