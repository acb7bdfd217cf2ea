"""Gloo ranks on this machine, one thread each, that live for one measurement."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.figures import ROOT
from fxshard._torch import process_groups


class RankFailed(RuntimeError):
    """A rank ended without a result; the message has what it printed last."""


def alone(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run ``function(*args)`` in one fresh process without a group; see `on_ranks`."""
    return on_ranks(0, function, *args, **options)[0]


def here(world: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """The same in this process, as rank 0 of a fake group: for --smoke, which times nothing."""
    if not world:
        return [function(*args)]
    with process_groups.fake_process_group(0, world):
        return [function(*args)]


def on_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 900.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on `world` fresh processes in one gloo group; results by rank.

    Args:
        world: 0: one process, no group.
        function: importable by name; its module is imported in each process.
        timeout: seconds for all of it.
        environment: variables beside this process's own.

    Raises:
        RankFailed: one failed or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job")
        job.write_bytes(pickle.dumps((_module(function), function.__name__, args)))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        settings = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            **(environment or {}),
        }
        files = [Path(folder, f"said-{rank}") for rank in range(max(world, 1))]
        ranks = [_started(rank, world, folder, said, settings) for rank, said in enumerate(files)]
        until = time.monotonic() + timeout
        try:
            for rank, process in enumerate(ranks):
                if process.wait(max(0.0, until - time.monotonic())):
                    last = "\n".join(files[rank].read_text().splitlines()[-30:])
                    raise RankFailed(f"rank {rank} ended with {process.returncode}:\n{last}")
        except subprocess.TimeoutExpired as error:
            raise RankFailed(f"a rank did not end within {timeout:.0f} s") from error
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [pickle.loads(Path(folder, f"result-{i}").read_bytes()) for i in range(len(ranks))]


def _started(
    rank: int, world: int, folder: str, said: Path, settings: dict[str, str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.ranks", str(rank), str(world), folder]
    with said.open("w") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=settings, stdout=file, stderr=subprocess.STDOUT
        )


def _module(function: Callable[..., Any]) -> str:
    """Where a function can be imported from, if it is in the script that runs too."""
    if function.__module__ != "__main__":
        return function.__module__
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "run the script as `python -m benchmarks.<name>`"
    return spec.name


def _rank(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if world:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    module, name, args = pickle.loads((folder / "job").read_bytes())
    result = getattr(importlib.import_module(module), name)(*args)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    if world:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
