"""Atomic writes of files, and folders and files that only this user can have written."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

log: logging.Logger = logging.getLogger("fxshard")

_INSTEAD: dict[Path, Path] = {}  # folders that are not this user's alone -> temporary ones


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file atomically: readers see the old content or `content`.

    Args:
        path: of the file. A link is followed; something else than a regular file
            (``/dev/stdout``, a pipe) is written to directly.
        content: text is encoded as UTF-8.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    target = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    if not target.exists():
        replace(target, data)
    elif target.is_file():
        replace(target, data, mode=stat.S_IMODE(target.stat().st_mode))
    else:
        target.write_bytes(data)


def replace(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Put a new file in the place of whatever has this name.

    Args:
        path: of the file.
        content: of it.
        mode: its permission bits (None: by the umask).

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    # Not by tempfile, whose files only the owner can read.
    beside = path.with_name(f".{secrets.token_hex(8)}.writing")
    try:
        with open(beside, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def private(folder: Path) -> Path:
    """`folder`, made if it is absent, if it is this user's and nobody else may write to it.

    Otherwise a temporary folder of this process, with one warning: files that another user may have
    put there must not be executed.

    Raises:
        OSError: neither can be made.
    """
    with suppress(FileExistsError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and _is_ours(found):
        return folder
    if folder not in _INSTEAD:
        _INSTEAD[folder] = Path(tempfile.mkdtemp(prefix="fxshard-"))
        atexit.register(_remove, _INSTEAD[folder], os.getpid())
        log.warning(
            "fxshard: generated code is not kept in %s: it is no folder that is this user's and "
            "that nobody else may write to. This process uses %s and removes it at its end. To "
            "keep code, set TORCHINDUCTOR_CACHE_DIR to a folder of your own (chmod 700).",
            *(folder, _INSTEAD[folder]),
        )
    return _INSTEAD[folder]


def read_private(path: Path) -> bytes:
    """The content of a regular file that is this user's and that nobody else may write to.

    Raises:
        OSError: it is no such file, or cannot be read.
    """
    # Not a link, and not a pipe, which would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)  # of the opened file, even if the path has changed
        if not (stat.S_ISREG(found.st_mode) and _is_ours(found)):
            raise PermissionError(f"{path} is not this user's alone")
        return file.read()


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
