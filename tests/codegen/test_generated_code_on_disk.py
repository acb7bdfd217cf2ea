"""Generated code on disk is executed: only what this user alone can have written is read."""

import logging
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxshard._torch import inductor
from fxshard.codegen import regions
from fxshard.host import files

CODE = inductor.Generated("def call(args):\n    return args\n", {"c": torch.arange(3)}, (0,))
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder has been replaced by a temporary one yet."""
    monkeypatch.setattr(files, "_INSTEAD", {})


@pytest.fixture
def store(tmp_path: Path) -> regions.Store:
    return regions.Store(tmp_path / "cache")


def same(one: inductor.Generated | None, other: inductor.Generated) -> bool:
    assert one is not None
    constants = one.constants.keys() == other.constants.keys() and all(
        torch.equal(one.constants[name], value) for name, value in other.constants.items()
    )
    return constants and (one.source, one.aligned) == (other.source, other.aligned)


def entry(store: regions.Store, name: str = "x") -> Path:
    return store.folder / f"{name}.json"


def test_what_was_written_is_read(store: regions.Store) -> None:
    store.write("x", CODE)
    assert same(store.read("x"), CODE)
    assert store.read("y") is None
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(store).stat().st_mode) == 0o600


def test_a_truncated_or_altered_entry_is_generated_anew(store: regions.Store) -> None:
    store.write("x", CODE)
    whole = entry(store).read_bytes()
    chance = random.Random(0)
    broken = [whole[:size] for size in (0, 1, 63, 64, 65, 66, len(whole) // 2, len(whole) - 1)]
    for _ in range(200):
        at = chance.randrange(len(whole))
        broken.append(
            whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :]
        )
    for each in broken:
        entry(store).write_bytes(each)
        assert store.read("x") is None
    found = regions.generated(store, "x", lambda: CODE, wait=True)
    assert found is not None and found[1]
    assert entry(store).read_bytes() == whole


def test_an_entry_of_another_name_is_not_taken(store: regions.Store) -> None:
    store.write("x", CODE)
    entry(store).rename(entry(store, "y"))
    assert store.read("y") is None


def others(path: Path) -> None:
    os.chown(path, 12345, 12345)


def linked(path: Path) -> None:
    there = path.rename(path.with_name("elsewhere"))
    path.symlink_to(there)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


SPOILT = [
    lambda path: path.chmod(path.stat().st_mode | stat.S_IWGRP),
    lambda path: path.chmod(path.stat().st_mode | stat.S_IWOTH),
    linked,
    *[others] * (os.geteuid() == 0),
]
NAMES = ["group may write", "all may write", "link", *["another user's"] * (os.geteuid() == 0)]


@pytest.mark.parametrize("spoil", [*SPOILT, pipe], ids=[*NAMES, "pipe"])
def test_a_file_that_another_can_have_written_is_not_read(
    store: regions.Store, spoil: Callable[[Path], None]
) -> None:
    store.write("x", CODE)
    spoil(entry(store))
    assert store.read("x") is None
    found = regions.generated(store, "x", lambda: CODE, wait=True)
    assert found is not None and found[1]
    assert same(store.read("x"), CODE), "and it is replaced"


@pytest.mark.parametrize("spoil", SPOILT, ids=NAMES)
def test_a_folder_that_another_can_write_to_is_left_with_one_warning(
    store: regions.Store, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store.write("x", CODE)
    spoil(store.folder)
    other, again = regions.Store(store.folder), regions.Store(store.folder)
    assert other.folder == again.folder != store.folder
    assert stat.S_IMODE(other.folder.stat().st_mode) == 0o700
    assert other.read("x") is None
    other.write("x", CODE)
    assert same(again.read("x"), CODE)
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and str(store.folder) in warnings[0] and VARIABLE in warnings[0]


def test_the_folder_of_kernels_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default lies where everybody may make a folder of that name first."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first").chmod(0o777)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "first"))
    folder = Path(inductor.inductor_cache_dir())
    assert folder != tmp_path / "first" and os.environ[VARIABLE] == str(folder)
    assert regions.Store().folder == folder / "fxshard"


def test_a_temporary_folder_goes_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    program = (
        "import importlib.util, os, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('files', {files.__file__!r})\n"
        "files = importlib.util.module_from_spec(spec); spec.loader.exec_module(files)\n"
        f"folder = files.private(pathlib.Path({str(tmp_path / 'cache')!r}))\n"
        "child = os.fork()\n"
        "if not child: sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "assert folder.is_dir()\n"
        "print(folder)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "TORCHINDUCTOR_CACHE_DIR" in run.stderr
    assert run.stdout.strip() and not Path(run.stdout.strip()).exists()


def test_writers_at_the_same_time_leave_one_whole_entry(store: regions.Store) -> None:
    pids = []
    for number in range(4):
        pid = os.fork()
        if not pid:
            for _ in range(50):
                text = str(number) * 10_000
                files.write(entry(store), text)
                if len(set(entry(store).read_text())) != 1:
                    os._exit(1)
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert os.listdir(store.folder) == ["x.json"]


def test_nothing_is_kept_where_nothing_can_be_written(
    store: regions.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: object, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    made = []
    monkeypatch.setattr(files, "replace", full)
    found = regions.generated(store, "x", lambda: made.append(1) or CODE, wait=True)
    assert found == (CODE, True) and made == [1], "generated once"
