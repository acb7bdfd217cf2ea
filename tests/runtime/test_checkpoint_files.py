"""What is on the disk: files that were truncated, altered or made by others, disks that are full,
processes that die. The last checkpoint stays loadable, and no file runs code.
"""

import errno
import io
import json
import multiprocessing as mp
import os
import pickle
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from fxshard.errors import CheckpointError
from fxshard.runtime.checkpoint import files as saved_files
from tests.ranks import Ranks

OPERATIONS = {
    "open",
    "fsync",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "scandir",
    "listdir",
}
FILES = io.FileIO | io.BufferedWriter | io.BufferedReader | io.TextIOWrapper


def is_file_operation(function: Any) -> bool:
    """Of a function in C: ``os.rename``, ``open``, the ``write`` of a file, ..."""
    if isinstance(function.__self__, FILES):
        return function.__name__ in ("write", "flush", "close", "read", "__exit__")
    return function.__module__ in ("posix", "_io", "io") and function.__name__ in OPERATIONS


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [each.clone() for each in (*model.state_dict().values(), *states)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The complete state of a checkpoint in the directory above."""
    fxshard.save_checkpoint(tmp_path, *trained(), extra={"step": 1, "rng": torch.get_rng_state()})
    return tmp_path / "version-1"


# -- truncated and altered -------------------------------------------------------------------------


def refused(path: Path) -> str:
    """The error of loading `path`, which leaves the model as it was."""
    model, optimizer = trained()
    before = values(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        fxshard.load_checkpoint(path, model, optimizer)
    assert same(values(model, optimizer), before)
    return str(caught.value)


def test_every_file_is_in_the_digests(saved: Path) -> None:
    listed = json.loads((saved / saved_files.DIGESTS).read_text())
    assert {*listed, saved_files.DIGESTS} == set(os.listdir(saved))


STATE = ("__0_0.distcp", ".metadata", "extra.pt", saved_files.DIGESTS, "../latest")


@pytest.mark.parametrize("name", STATE)
def test_truncated_and_altered_files_are_refused(saved: Path, name: str) -> None:
    file, chance = saved / name, random.Random(name)
    whole = file.read_bytes()
    broken = [whole[: chance.randrange(len(whole))] for _ in range(6)] + [b"", whole + b"0"]
    for _ in range(14):
        at, flip = chance.randrange(len(whole)), 1 << chance.randrange(8)
        broken.append(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
    for each in broken:
        file.write_bytes(each)
        told = refused(saved.parent)
        assert str(saved.parent) in told and "Cause: rank 0: " in told
    file.write_bytes(whole)
    fxshard.load_checkpoint(saved.parent, *trained())


def test_missing_and_added_files_are_refused(saved: Path) -> None:
    (saved / "__0_1.distcp").write_bytes(b"")
    assert "digests.json lists other files than" in refused(saved.parent)
    (saved / "__0_1.distcp").unlink()
    for name in ("__0_0.distcp", "extra.pt", saved_files.DIGESTS):
        (saved / name).rename(saved.parent / "away")
        refused(saved.parent)
        (saved.parent / "away").rename(saved / name)


def test_the_state_that_is_loaded_lies_in_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    for name in ("../version-1", str(saved), "version-1/../version-1"):
        (inside / "latest").write_text(name)
        assert "which is no state" in refused(inside)


# -- code in files ---------------------------------------------------------------------------------


def touch(path: Path) -> None:
    path.touch()


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return touch, (self.path,)


def sealed(state: Path) -> None:
    """What another would do who writes a checkpoint: the digests are right."""
    files = [file for file in state.iterdir() if file.name != saved_files.DIGESTS]
    digests = {file.name: saved_files._digest(file) for file in files}
    (state / saved_files.DIGESTS).write_text(json.dumps(digests))


def in_extra(state: Path, touch: Touch) -> None:
    torch.save({"step": touch}, state / "extra.pt")


def in_metadata(state: Path, touch: Touch) -> None:
    metadata = pickle.loads((state / ".metadata").read_bytes())
    metadata.planner_data = (metadata.planner_data, touch)
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


def in_options(state: Path, touch: Touch) -> None:
    """In the learning rate."""
    metadata = pickle.loads((state / ".metadata").read_bytes())
    (info,) = [v for k, v in metadata.storage_data.items() if k.fqn.endswith("0.lr")]
    raw = io.BytesIO()
    torch.save(touch, raw)
    info.relative_path, info.offset, info.length = "__0_1.distcp", 0, len(raw.getvalue())
    (state / "__0_1.distcp").write_bytes(raw.getvalue())
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("put", [in_extra, in_metadata, in_options])
def test_code_in_a_checkpoint_runs_only_if_it_is_trusted(
    saved: Path, tmp_path: Path, put: Callable[[Path, Touch], None]
) -> None:
    touched = tmp_path / "touched"
    put(saved, Touch(touched))
    sealed(saved)
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match=r"(?s)test_checkpoint_files.touch.*trusted=True"):
        fxshard.load_checkpoint(tmp_path, model, optimizer)
    assert not touched.exists()
    fxshard.load_checkpoint(tmp_path, model, optimizer, trusted=True)
    assert touched.exists()


def test_metadata_names_no_file_elsewhere(saved: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../elsewhere"
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    sealed(saved)
    assert "'../../elsewhere', a file elsewhere" in refused(tmp_path)


def test_objects_in_extra_need_trust(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    fxshard.save_checkpoint(tmp_path, model, extra={"where": Path("x")})
    with pytest.raises(CheckpointError, match=r"extra has pathlib.*trusted=True"):
        fxshard.load_checkpoint(tmp_path, model)
    assert fxshard.load_checkpoint(tmp_path, model, trusted=True) == {"where": Path("x")}
    plain = {"a": [1, 2.0, None, True, "é", b"\0"], "b": (torch.bfloat16, {3}, torch.ones(2))}
    fxshard.save_checkpoint(tmp_path, model, extra=plain)
    assert str(fxshard.load_checkpoint(tmp_path, model)) == str(plain)


# -- disks that are full, folders that cannot be written -------------------------------------------


@contextmanager
def at_operation(
    number: int, do: Callable[[], None], *, after: bool = False
) -> Iterator[list[str]]:
    """Do something before or after the file operation of this number; gives their names."""
    seen: list[str] = []

    def watch(frame: Any, event: str, function: Any) -> None:
        if event == ("c_return" if after else "c_call") and is_file_operation(function):
            seen.append(function.__name__)
            if len(seen) - 1 == number:
                do()

    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def raising(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.sample(2)
def test_a_failed_save_leaves_the_last_checkpoint_and_says_what_failed(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = trained(), trained()
    with at_operation(-1, raising(code)) as operations:
        fxshard.save_checkpoint(tmp_path / "dry", *first)
    failed = 0
    chance = random.Random(code)
    for number in sorted(chance.sample(range(len(operations)), 10)):
        path = tmp_path / str(number)
        fxshard.save_checkpoint(path, *first, extra="first")
        caplog.clear()
        told = ""
        try:
            with at_operation(number, raising(code)):
                fxshard.save_checkpoint(path, *second, extra="second")
        except CheckpointError as error:
            told = str(error)
        got = trained()
        extra = fxshard.load_checkpoint(path, *got)
        assert same(values(*got), values(*(first if extra == "first" else second)))
        if told:
            failed += 1
            assert extra == "first" and os.strerror(code) in told and str(path) in told
        else:  # the operation is of no consequence, or of the removal of the state before
            assert extra == "second"
        fxshard.save_checkpoint(path, *second, extra="third")
        assert fxshard.load_checkpoint(path, *got) == "third"
        assert len(os.listdir(path)) == 2
    assert failed >= 4


def test_a_full_disk(tmp_path: Path) -> None:
    """Files may not grow beyond a few bytes."""
    first = trained()
    fxshard.save_checkpoint(tmp_path, *first, extra="first")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large"):
            fxshard.save_checkpoint(tmp_path, *trained(), extra="second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    got = trained()
    assert fxshard.load_checkpoint(tmp_path, *got) == "first"
    assert same(values(*got), values(*first))
    assert sorted(os.listdir(tmp_path)) == ["latest", "version-1"], "what fills the disk is removed"


# -- processes that die ----------------------------------------------------------------------------


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(path: str, times: int, answer: Any) -> None:
    """Saves, in children that are killed at random file operations; what was loaded after each."""
    torch.set_num_threads(1)
    first, second = trained(), trained()
    with at_operation(-1, kill_me) as operations:
        fxshard.save_checkpoint(f"{path}/dry", *first)
        fxshard.save_checkpoint(f"{path}/dry", *second)
    half = len(operations) // 2
    chance = random.Random(0)
    found = []
    for trial in range(times):
        root = f"{path}/{trial}"
        fxshard.save_checkpoint(root, *first, extra="first")
        child = os.fork()
        if not child:
            with at_operation(chance.randrange(half), kill_me, after=chance.random() < 0.5):
                fxshard.save_checkpoint(root, *second, extra="second")
            os._exit(0)
        chance.random(), chance.randrange(half)  # as the child does
        _, status = os.waitpid(child, 0)
        got = trained()
        extra = fxshard.load_checkpoint(root, *got)
        right = same(values(*got), values(*(first if extra == "first" else second)))
        fxshard.save_checkpoint(root, *second, extra="third")
        goes_on = fxshard.load_checkpoint(root, *got) == "third" and len(os.listdir(root)) == 2
        found.append((os.WIFSIGNALED(status), extra, right, goes_on))
    answer.send(found)


@pytest.mark.parametrize("times", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_points(tmp_path: Path, times: int) -> None:
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=killed_while_saving, args=(str(tmp_path), times, theirs))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    assert all(right and goes_on for _, _, right, goes_on in found)
    assert sum(killed for killed, _, _, _ in found) >= 0.8 * times
    assert {extra for _, extra, _, _ in found} <= {"first", "second"}


# -- on several ranks ------------------------------------------------------------------------------


def fails_on_one(rank: int, world_size: int, path: str) -> list[tuple[str, str, bool]]:
    """What each save said, of which rank 1 cannot do a random file operation; what was loaded."""
    torch.manual_seed(0)  # ranks hold the same, whatever ran on them before
    first, second = trained(), trained()
    fxshard.save_checkpoint(f"{path}/dry", *first)
    with at_operation(-1, kill_me) as operations:
        fxshard.save_checkpoint(f"{path}/dry", *second)
    counts: list[Any] = [None] * world_size
    dist.all_gather_object(counts, len(operations))
    found = []
    for number in random.Random(0).sample(range(counts[1]), 10):
        told = ""
        fxshard.save_checkpoint(path, *first, extra="first")
        try:
            with at_operation(number if rank else -1, raising(errno.ENOSPC)):
                fxshard.save_checkpoint(path, *second, extra="second")
        except CheckpointError as error:
            told = str(error)
        got = trained()
        extra = fxshard.load_checkpoint(path, *got)
        right = same(values(*got), values(*(first if extra == "first" else second)))
        found.append((told, extra, right))
    return found


def test_all_ranks_raise_if_one_cannot_write(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    answers = ranks(2).run(fails_on_one, str(tmp_path))
    for (told, extra, right), (other, also, too) in zip(*answers, strict=True):
        assert right and too and extra == also
        assert bool(told) == bool(other) == (extra == "first")
        if told:
            for each in (told, other):
                assert "No space left on device" in each and "state before is as it was" in each
    assert sum(bool(told) for told, _, _ in answers[0]) >= 3


def refused_on_all(rank: int, world_size: int, path: str) -> str:
    return refused(Path(path))


def test_all_ranks_refuse_what_one_finds_altered(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks(2).run(saved_on_ranks, str(tmp_path))
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "extra.pt"):
        file = tmp_path / "version-1" / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        one, other = ranks(2).run(refused_on_all, str(tmp_path))
        assert one == other and f"ValueError: {name} is not as it was saved" in one
        file.write_bytes(whole)


def saved_on_ranks(rank: int, world_size: int, path: str) -> None:
    fxshard.save_checkpoint(path, *trained(), extra=1)
