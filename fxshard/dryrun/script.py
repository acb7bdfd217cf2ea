"""A script as torchrun would start it on one rank, in a dry run of some of its steps."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fxshard.dryrun.gpus import DEFAULT, GPUS_PER_NODE
from fxshard.dryrun.run import DryRun, dry_run
from fxshard.errors import ConfigError


def run_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    world_size: int,
    device: str = DEFAULT,
    rank: int = 0,
    steps: int = 2,
) -> DryRun:
    """Run a Python file or module as ``torchrun`` does, to the end of its first steps.

    Args:
        script: path of the file, or name of the module.
        arguments: of the script, which `sys.argv` has after its name.
        module: `script` is a module, as with ``python -m``.
        world_size, device, rank, steps: see `dry_run`.

    Returns:
        What the steps took.

    Raises:
        ConfigError: there is no such file, or the script ended before a step did.
        CaptureError: see `dry_run`.
        Exception: what the script raises.
    """
    if not module and not Path(script).is_file():
        raise ConfigError(f"{script}: no such file.")
    code: object = None
    with (
        _as_started(script, arguments, module, _environment(world_size, rank)),
        dry_run(world_size=world_size, device=device, rank=rank, steps=steps) as run,
    ):
        try:
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code
    if not run.steps:
        ended = "" if code is None else f" with exit code {code}"
        raise ConfigError(
            f"{script} ended{ended} without a step of an optimizer, so there is no step to tell of."
        )
    return run


def _environment(world_size: int, rank: int) -> dict[str, str]:
    """What torchrun sets."""
    local = min(world_size, GPUS_PER_NODE)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(-(-world_size // local)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "fxshard-dryrun",
    }


@contextlib.contextmanager
def _as_started(
    script: str, arguments: Sequence[str], module: bool, environment: dict[str, str]
) -> Iterator[None]:
    """What a script finds in `sys` and `os.environ`, while the block runs."""
    argv, path, before = sys.argv, sys.path, dict(os.environ)
    sys.argv = [script, *arguments]
    sys.path = [os.getcwd() if module else str(Path(script).resolve().parent), *path]
    os.environ.update(environment)
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
        os.environ.clear()
        os.environ.update(before)
