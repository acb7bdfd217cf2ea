"""Files of reports: written whole or not at all; what was truncated or altered is refused."""

import copy
import dataclasses
import errno
import json
import os
import pickle
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from examples.demo.recipe import Settings
from fxshard.cli import main
from fxshard.errors import ConfigError
from fxshard.host import files
from fxshard.memory.report import MemoryReport
from fxshard.memory.views import diff as differences


def called() -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    return nn.Linear(4, 4), (torch.ones(2, 4),), {}


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    adamw = torch.optim.AdamW
    return fxshard.plan(nn.Linear(4, 4), (torch.ones(2, 4),), world_size=2, optimizer=adamw).memory


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_pickled_report_has_every_figure_and_view_and_no_program(
    device: str | None, tmp_path: Path
) -> None:
    adamw, x = torch.optim.AdamW, torch.ones(2, 4)
    options: dict[str, Any] = {"optimizer": adamw, "device": device, "micro_batches": 2}
    made = fxshard.plan(nn.Linear(4, 4), (x,), world_size=2, **options).memory
    loaded = pickle.loads(pickle.dumps(made))
    assert loaded.plan is None and made.plan is not None
    assert loaded.to_dict() == made.to_dict()
    assert loaded.table() == made.table() and loaded.to_csv() == made.to_csv()
    assert str(loaded.explain_peak()) == str(made.explain_peak(what_ifs=False))
    assert loaded.unsharded() == made.unsharded() and loaded.rows() == made.rows()
    for report, name in ((made, "made"), (loaded, "loaded")):
        report.to_perfetto(tmp_path / name)
    assert (tmp_path / "loaded").read_text() == (tmp_path / "made").read_text()
    for ask in (loaded.formula, loaded.kept_for_backward, lambda: loaded.at(world=4)):
        with pytest.raises(ConfigError, match="has no plan to ask"):
            ask()


def test_a_report_is_frozen(report: MemoryReport) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.device = "cuda"  # type: ignore[misc]


def places(told: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside."""
    items = told.items() if isinstance(told, dict) else enumerate(told)
    found = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
    return found


def test_altered_reports_are_compared_or_refused(report: MemoryReport) -> None:
    whole = json.loads(json.dumps(report.to_dict()))
    chance, refused = random.Random(0), 0
    others = [None, "x", -1, 1.5, [], {}, [[]], True, {"": None}]
    for _ in range(150):
        told = copy.deepcopy(whole)
        *path, last = chance.choice(places(told))
        inside = told
        for key in path:
            inside = inside[key]
        if chance.random() < 0.3:
            del inside[last]
        else:
            inside[last] = chance.choice(others)
        try:
            differences.diff(whole, told).table(only_different=False)
        except ConfigError as error:
            refused += 1
            assert "report" in str(error)
    assert refused > 20  # and the others change nothing that is compared


def test_files_that_are_no_reports_are_refused(
    report: MemoryReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.dumps(report.to_dict()).encode()
    (tmp_path / "whole.json").write_bytes(whole)
    chance = random.Random(0)
    broken = [whole[: chance.randrange(len(whole))] for _ in range(10)]
    broken += [b"", b"\xff\xfe", b"[]", b"1", b"[" * 100_000, b'{"schema": ' * 50_000]
    for _ in range(30):
        at = chance.randrange(len(whole))
        flipped = bytes([whole[at] ^ (1 << chance.randrange(8))])
        broken.append(whole[:at] + flipped + whole[at + 1 :])
    codes = []
    for each in broken:
        (tmp_path / "broken.json").write_bytes(each)
        code = main.main(["diff", str(tmp_path / "whole.json"), str(tmp_path / "broken.json")])
        assert code in (0, 2), "a figure that was altered is a figure"
        said = capsys.readouterr().err
        assert (code == 2) == said.startswith("fxshard: "), said
        codes.append(code)
    assert all(codes[:16])


@pytest.mark.parametrize(
    "text", ["", "[]", '{"steps": 3', '{"other": 1}', '{"layers": "x"}', "[" * 10**5]
)
def test_settings_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(ConfigError, match="no settings of a run"):
        Settings.load(tmp_path / "settings.json")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "[" * 10**5, '{"model_type": "llama"', '{"model_type": 3}', '{"a": 1}'),
        '{"model_type": "llama", "hidden_size": "x"}',
        '{"model_type": "llama", "hidden_size": 7, "num_attention_heads": 0}',
        '{"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "evil--x.Y"}}',
    ],
)
def test_configs_that_are_none_are_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    code = main.main(["report", "--hf-config", str(tmp_path / "config.json")])
    assert code == 2 and capsys.readouterr().err.startswith("fxshard: --hf-config")


# -- writing ---------------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[MemoryReport, Path], None]] = {
    "html": MemoryReport.to_html,
    "perfetto": MemoryReport.to_perfetto,
    "memory_viz": MemoryReport.to_memory_viz,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_the_file_before(
    report: MemoryReport, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("before")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            WRITERS[writer](report, tmp_path / "file")
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("file", "before")]
    WRITERS[writer](report, tmp_path / "file")
    assert len(os.listdir(tmp_path)) == 1 and (tmp_path / "file").stat().st_size > 100


def test_the_command_says_what_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "absent" / "report.json")
    code = main.main(["report", "--model", "tests.memory.test_report_files:called", "--json", path])
    said = capsys.readouterr().err
    assert code == 2 and f"cannot write {path}: No such file" in said


def test_links_modes_and_devices(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    files.write(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "after"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    files.write("/dev/null", "nothing")
    assert Path("/dev/null").is_char_device()
    before = os.umask(0o022)
    try:
        files.write(tmp_path / "new", b"\0")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o644
