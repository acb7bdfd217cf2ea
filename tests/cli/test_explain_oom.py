"""``fxshard explain-oom``: what it prints, and how it ends."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.cli import main
from tests.memory.snapshots import fragmented


def planned() -> fxshard.Plan:
    return fxshard.plan(nn.Linear(8, 8), (torch.ones(2, 8),), world_size=2)


def no_plan() -> int:
    return 1


def run(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str, str]:
    code = main.main(["explain-oom", *map(str, argv)])
    return code, *capsys.readouterr()


def test_it_says_who_held_memory_and_what_would_have_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = fragmented().dump(tmp_path / "s.pickle")
    code, said, _ = run(capsys, file)
    assert code == 0
    for expected in (
        "Device 0 ran out of memory: 4.00 GiB (4,294,967,296 bytes) asked for on stream 0",
        "6.00 GiB    free, in 3 pieces, the largest 2.00 GiB",
        "Fragmentation: 6.50 GiB are free in all",
        "fits          PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "does not fit  -2.00 GiB: activation checkpointing",
    ):
        assert expected in said
    assert run(capsys, file, "--top", "1")[1].count(" more ") > said.count(" more ")
    code, _, error = run(capsys, file, "--device", "3")
    assert code == 2 and "device 3: the snapshot says nothing about it, but about 0." in error


def test_a_plan_is_put_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = fragmented().dump(tmp_path / "s.pickle")
    code, said, _ = run(capsys, file, "--plan", "tests.cli.test_explain_oom:planned")
    assert code == 0 and "Beside the plan:" in said and "What would change the plan" in said
    command = ["report", "--model", "tests.cli.test_cli:blocks", "--world-size", "2"]
    assert main.main([*command, "--json", str(tmp_path / "report.json")]) == 0
    capsys.readouterr()
    code, said, _ = run(capsys, file, "--plan", tmp_path / "report.json")
    assert code == 0 and "Beside the plan:" in said and "What would change the plan" not in said
    (tmp_path / "other.json").write_text("{}")
    for plan, why in (
        ("tests.cli.test_explain_oom:no_plan", "returned int: expected what fxshard.plan returns"),
        ("tests.cli.test_explain_oom:absent", "no attribute"),
        (tmp_path / "absent.json", "no report that can be read"),
        (tmp_path / "other.json", "no report as `fxshard report --json`"),
    ):
        code, _, error = run(capsys, file, "--plan", plan)
        assert code == 2 and why in error


SCRIPT = """
import sys
import torch

layer = torch.nn.Linear(int(sys.argv[1]), 8, device="cuda")
optimizer = torch.optim.SGD(layer.parameters())
while True:
    layer(torch.ones(4, int(sys.argv[1]), device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_dry_run_is_put_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, script = fragmented().dump(tmp_path / "s.pickle"), tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, said, _ = run(capsys, file, "--dry-run", script, "--world-size", "2", "--", "1024")
    assert code == 0 and "Beside the plan:" in said and "32.03 KiB" in said  # 4 * 8 * 1025
    json_file = str(tmp_path / "report.json")
    assert main.main(["dryrun", str(script), "--json", json_file, "--", "1024"]) == 0
    capsys.readouterr()
    assert run(capsys, file, "--plan", json_file)[1] == said
    assert run(capsys, file, "--dry-run", tmp_path / "none.py")[0] == 2
    with pytest.raises(SystemExit):
        run(capsys, file, "--dry-run", script, "--plan", json_file)


def test_what_is_no_snapshot_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.pickle"
    for content in (b"", pickle.dumps({"a": 1}), pickle.dumps(print)):
        path.write_bytes(content)
        code, said, error = run(capsys, path)
        assert (code, said) == (2, "") and error.startswith(f"fxshard: {path}: no snapshot of")
