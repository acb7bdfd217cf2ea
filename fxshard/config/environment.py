"""The environment variables, parsed once."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from pathlib import Path

from fxshard.errors import ConfigError

log: logging.Logger = logging.getLogger("fxshard")


@dataclasses.dataclass(frozen=True)
class Environment:
    """What ``FXSHARD_*`` variables say (documented in docs/env.md).

    Attributes:
        debug: 0 quiet; 1 pass list and timing; 2 op-count differences; 3 text differences per
            pass; 4 full dumps.
        dump_dir: where dumps go (None: standard error).
        flat_capture: trace every block of a deep model (see `fxshard.capture.repeat`).
    """

    debug: int = 0
    dump_dir: Path | None = None
    flat_capture: bool = False


def environment() -> Environment:
    """Parse the environment.

    Raises:
        ConfigError: ``FXSHARD_DEBUG`` is not an integer from 0 to 4, or ``FXSHARD_FLAT_CAPTURE``
            neither 0 nor 1, or ``FXSHARD_PROGRESS`` is neither (see `fxshard.host.progress`).
    """
    raw = os.environ.get("FXSHARD_DEBUG") or "0"
    if raw not in {"0", "1", "2", "3", "4"}:
        raise ConfigError(f"FXSHARD_DEBUG={raw!r}: expected 0, 1, 2, 3 or 4 (docs/env.md).")
    dump_dir = os.environ.get("FXSHARD_DUMP_DIR")
    for name in ("FXSHARD_FLAT_CAPTURE", "FXSHARD_PROGRESS"):
        flag = os.environ.get(name, "0")
        if flag not in {"0", "1"}:
            raise ConfigError(f"{name}={flag!r}: expected 0 or 1 (docs/env.md).")
    flat = os.environ.get("FXSHARD_FLAT_CAPTURE", "0")
    return Environment(int(raw), Path(dump_dir) if dump_dir else None, flat == "1")


def notice(line: str) -> None:
    """One line on what cost time: to the logger, and to standard error if FXSHARD_DEBUG is set."""
    log.info("fxshard: %s", line)
    if os.environ.get("FXSHARD_DEBUG"):
        print(f"[fxshard] {line}", file=sys.stderr)
