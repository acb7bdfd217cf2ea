"""The files of a checkpoint: at any moment, a crash leaves a complete state.

A checkpoint is a directory with complete states in ``version-N`` and a file ``latest`` that names
one of them. A new state is written into ``writing-N``, renamed when all ranks are done, and then
``latest`` is replaced, which the file system does at once or not at all. The old state is removed
after that. So at any moment ``latest`` names a complete state: the old one or the new one.

``digests.json`` of a state has the SHA-256 of its other files. Files that were truncated or altered
since are refused. The digests do not prove who wrote the files, so unpickling is restricted
(`unpickling.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from fxshard.errors import CheckpointError
from fxshard.runtime.checkpoint.ranks import Ranks, cause_of, explained
from fxshard.runtime.checkpoint.unpickling import restricted

log: logging.Logger = logging.getLogger("fxshard")
DIGESTS = "digests.json"


@dataclasses.dataclass(frozen=True)
class New:
    """A state that is being written to the checkpoint in `root`."""

    root: Path
    number: int

    @property
    def writing(self) -> Path:
        return self.root / f"writing-{self.number}"

    @property
    def failed(self) -> str:
        return f"{self.writing} could not be written, and the state before is as it was"

    def write(self, state: dict[str, Any], ranks: Ranks, say: Callable[[str], None]) -> None:
        """Write what this rank has to, and make it the latest state when all ranks have."""
        say("writing")
        with explained(self.failed):
            save(state, storage_writer=_CheckpointWriter(self.writing), process_group=ranks.group)
        say("checksums")

        def digests_of_mine() -> dict[str, str]:
            ranks.require_group()  # else torch's save has taken this rank for the only one
            return _digests(self.writing, ranks.rank)

        digests = ranks.all(digests_of_mine, self.failed)
        ranks.first(lambda: _publish(self.root, self.number, digests), self.failed)
        if ranks.rank == 0:
            try:
                _remove_before(self.root, self.number)
            except OSError as error:
                log.warning("fxshard: a state before in %s cannot be removed: %s", self.root, error)

    @contextlib.contextmanager
    def removed_if_it_fails(self, ranks: Ranks) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            if ranks.rank == 0:  # it may be what fills the disk
                shutil.rmtree(self.writing, ignore_errors=True)
            raise


def _version(entry: Path) -> re.Match[str] | None:
    """Of a complete or half-written state: group 2 is its number."""
    return re.fullmatch(r"(version|writing)-(\d+)(\.latest)?", entry.name)


def begin(root: Path, extra: bytes) -> int:
    """Make the directory of a new state, with `extra` in it; returns its number."""
    root.mkdir(parents=True, exist_ok=True)
    found = [(entry, match) for entry in root.iterdir() if (match := _version(entry))]
    number = 1 + max((int(match[2]) for _, match in found), default=0)
    for entry, match in found:
        if match[1] == "writing":  # of a process that died while it saved
            _remove(entry)
    made = root / f"writing-{number}"
    made.mkdir()
    try:
        (made / "extra.pt").write_bytes(extra)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return number


def _publish(root: Path, number: int, digests: list[dict[str, str]]) -> None:
    """Make a state that all ranks have written the latest one.

    Args:
        digests: by rank, those of the files that it wrote.
    """
    writing = root / f"writing-{number}"
    listed = {file: digest for part in digests for file, digest in part.items()}
    (writing / DIGESTS).write_text(json.dumps(listed))
    pointer = writing.with_suffix(".latest")
    pointer.write_text(f"version-{number}")
    for written in (writing / DIGESTS, writing / "extra.pt", writing, pointer):
        _sync(written)
    writing.rename(root / f"version-{number}")
    _sync(root)
    pointer.replace(root / "latest")


def _remove_before(root: Path, number: int) -> None:
    """Remove the states before this one, once the disk has its name."""
    _sync(root)
    for entry in root.iterdir():
        if (found := _version(entry)) and int(found[2]) < number:
            _remove(entry)


def latest(root: Path) -> tuple[str, dict[str, str]]:
    """The name of the complete state, and the digests of its files.

    Raises:
        ValueError: the files are not those that were saved.
    """
    name = (root / "latest").read_text()
    if not re.fullmatch(r"version-\d+", name):
        raise ValueError(f"'latest' names {name[:80]!r}, which is no state")
    digests = json.loads((root / name / DIGESTS).read_text())
    found = {file.name for file in (root / name).iterdir()} - {DIGESTS}
    if not isinstance(digests, dict) or digests.keys() != found:
        raise ValueError(f"{DIGESTS} lists other files than {sorted(found)}")
    return name, digests


def _digests(writing: Path, rank: int) -> dict[str, str]:
    """Of the files that `rank` wrote."""
    mine = (file for file in writing.iterdir() if _writer(file) == rank)
    return {file.name: _digest(file) for file in mine}


def check_digests(version: Path, digests: dict[str, str], ranks: Ranks) -> None:
    """Check this rank's share of the files: each reads as many.

    Raises:
        ValueError: one is not as it was saved.
    """
    for file in sorted(digests)[ranks.rank :: ranks.size]:
        if _digest(version / file) != digests[file]:
            raise ValueError(f"{file} is not as it was saved")


def extra_of(version: Path, *, trusted: bool) -> Any:
    with restricted("extra"):
        return torch.load(version / "extra.pt", "cpu", weights_only=not trusted)


def _writer(file: Path) -> int:
    """The rank that wrote a file of a state: torch's begin with its number, all others are 0's."""
    found = re.match(r"__(\d+)_", file.name)
    return int(found[1]) if found else 0


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _sync(path: Path) -> None:
    """Have the file system write a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _CheckpointWriter(FileSystemWriter):
    """Torch's writer; its errors are those of the disk."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise cause_of(error) from error
